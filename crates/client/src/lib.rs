//! The Towline client library: remote files and disks, blocking and asynchronous from one core.
//!
//! A [`Client`] is one session with one server; clone it and use it from as many threads as you
//! like. There is no thread behind it: whichever caller waits makes progress for all. A [`File`]
//! is an open file or directory; its paths are relative to it. A [`Disk`] is an open disk. Blocking calls move bytes straight
//! between the socket and the caller's buffer; [`Operation`]s are the same calls started now and
//! completed later, alone ([`Operation::wait`]), in any order ([`Group`]) or as futures.
//!
//! A lost connection is replaced and unanswered requests are sent again under the same session,
//! so each takes effect once. After a restart of the server open files are opened again.
//!
//! What happens to open files that are watched ([`File::watch`]), by whomever, [`Client::events`] tells.

mod borrow;
mod client;
mod convert;
mod core;
mod disk;
mod disks;
mod error;
mod file;
mod handshake;
mod lent;
mod listings;
mod names;
mod operation;
mod reclaim;
mod times;
mod url;
mod vectored;
mod watching;

pub use client::{Client, Options, Priority};
pub use disk::{Disk, DiskInfo, ExtentKind, ZeroHow};
pub use error::Error;
pub use file::{File, Lock};
pub use names::{Batch, DirEntry, SetAttr};
pub use operation::{Group, Operation};
pub use times::Times;
pub use towline_net::LinkKind;
pub use towline_wire::disk::{DiskExtent, extent_flag};
pub use towline_wire::{Attr, Errno, StatFs, Timestamp};
pub use url::{Transport, Url};
pub use watching::{Happening, Happenings};
