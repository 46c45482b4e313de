//! The Towline client library: remote files and disks, with blocking and asynchronous calls on one
//! core.
//!
//! A [`Client`] is one session with one server. Clone it and use it from as many threads as you
//! like. It has no background thread: every waiting caller makes progress for all. A [`File`] is an
//! open file or directory; paths passed to it are relative to it. A [`Disk`] is an open disk.
//!
//! Blocking calls move bytes straight between the socket and the caller's buffer, or several of
//! them ([`File::read_vectored_at`]). [`Operation`]s are the same calls started now and completed
//! later: singly ([`Operation::wait`]), in any order ([`Group`]) or as futures.
//!
//! The client replaces a lost connection and resends unanswered requests in the same session, so
//! each request takes effect once. After a restart of the server it reopens open files. While the
//! server stays away for long ([`Options::reconnect`]), requests fail; once it is back, later ones go
//! on in another session.
//!
//! [`Client::events`] reports changes to watched files ([`File::watch`]), whoever makes them.

mod borrow;
mod client;
mod connection;
mod convert;
mod core;
mod disk;
mod disks;
mod error;
mod file;
mod first_use;
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
mod whole;

pub use client::{Client, Options, PlaceOf, Priority};
pub use connection::Connection;
pub use disk::{Disk, DiskInfo, ExtentKind, ZeroHow};
pub use disks::Durability;
pub use error::Error;
pub use file::{Begun, File, Lock};
pub use names::{Batch, DirEntry, SetAttr};
pub use operation::{Group, Operation};
pub use times::Times;
pub use towline_net::LinkKind;
pub use towline_wire::disk::{DiskExtent, extent_flag};
pub use towline_wire::{Attr, Errno, StatFs, Timestamp};
pub use url::{Transport, Url};
pub use watching::{Happening, Happenings};
