//! A back end that exports a tree of the local file system; the kernel resolves paths beneath its
//! root.
//!
//! [`DirectoryStore`] exports a directory. It guarantees:
//!
//! - Every path is resolved by `openat2(2)` with `RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS`, so
//!   neither `..` nor a symbolic link nor a race with a rename leads out of the export: such a path
//!   fails with `EXDEV`, and so does an absolute symbolic link. A directory that is moved out of
//!   the export while open stays open, as for a local process, but no path goes above it any more.
//! - No client can make the server wait for the other end of a FIFO or read from a device. These
//!   and sockets open only with `O_PATH`; otherwise `ENXIO`. To find out the type, the server opens
//!   them for a moment without waiting. If opening a device has side effects, export a tree mounted
//!   `nodev`.
//! - The kernel checks a [`Caller`](crate::Caller) with `enforce`: the thread takes on that user,
//!   group and groups and loses its capabilities for the duration of the call. Data is written as
//!   the user who opened the file, so that set-user-id bits are cleared and quotas apply.
//! - An append reports exactly where its bytes went, whoever else appends to the file, on this
//!   server or in another process: the kernel chooses the place under its inode lock and reports
//!   it.
//!
//! It needs Linux 5.8 or later, and `/proc` mounted. Threads that create files get their own
//! `umask(2)`, that of the client. Inode numbers are those of the file system: if clients depend on
//! unique numbers, export a tree without mounts below it.

mod aligned;
mod attributes;
mod bell;
mod changes;
mod copied;
mod copy;
mod identity;
mod known;
mod listing;
pub(crate) mod mounts;
mod open_file;
mod open_flags;
mod read_path;
mod residency;
mod resolve;
mod store;
pub(crate) mod system;
#[cfg(test)]
mod tests;
mod watches;

pub use known::{make_no_ring, requests_arrived};
pub use store::DirectoryStore;
