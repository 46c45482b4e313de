//! A tree of the local file system, resolved by the kernel beneath its root.
//!
//! [`DirectoryStore`] exports a directory. What it promises:
//!
//! - Every path is resolved by `openat2(2)` with `RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS`, so that
//!   neither `..` nor a symbolic link nor a race with a rename leads out of the export: `EXDEV`.
//!   Absolute symbolic links lead out by definition. A directory that is moved out of the export
//!   while it is open stays open, as for a local process, but no path goes above it any more.
//! - No client makes the server wait for the other end of a fifo or read from a device: those, and
//!   sockets, open only with `O_PATH`, else `ENXIO`. To tell, they are opened for a moment without
//!   waiting; where opening a device does something by itself, export a tree mounted `nodev`.
//! - A [`Caller`](crate::Caller) with `enforce` is checked by the kernel: the thread takes on that
//!   user, group and groups and loses its capabilities for the duration of the call. Data is
//!   written as the user who opened the file, so that set-user-id bits fall and quotas hold.
//! - Appending reports exactly where the bytes went, whoever else appends to the file, here or in
//!   another process: the kernel picks the place under its inode lock and tells it.
//!
//! What it relies on: Linux 5.8 or later, and `/proc` mounted. Threads that make files get a `umask(2)` of
//! their own, that of the client. Inode numbers are those of the file system: export a tree without
//! further mounts below it where clients depend on their being unique.

mod attributes;
mod bell;
mod changes;
mod copy;
mod identity;
mod known;
mod listing;
pub(crate) mod mounts;
mod open_file;
mod open_flags;
mod residency;
mod resolve;
mod store;
pub(crate) mod system;
#[cfg(test)]
mod tests;
mod watches;

pub use known::{make_no_ring, requests_arrived};
pub use store::DirectoryStore;
