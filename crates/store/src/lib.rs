//! Stores: the back ends of the file trees and disks that a server exports.
//!
//! A [`FileStore`] is a tree of files: it resolves paths and changes names; an [`OpenFile`] of it
//! reads and writes. Flags, modes and error numbers are those of Linux. Its back ends are
//! [`directory`], a tree of the local file system, and [`memory`], Towline's own file system in
//! memfd pages.
//!
//! A [`BlockStore`] is a disk. Its back ends are in [`block`]: files and devices, memory, and
//! stripes of other disks.
//!
//! Calls may block on the file system unless their documentation says otherwise.

#![cfg_attr(not(test), deny(clippy::print_stderr))]

pub mod block;
mod block_store;
pub mod directory;
mod file_store;
pub mod memory;
mod watching;

pub use block_store::{
    BlockStore, Continuity, Direction, Extent, Geometry, Layout, Now, Place, ZeroHow,
};
pub use file_store::{
    Caller, Closing, FREED_BYTES_MAX, FileStore, Listing, OpenFile, OpenHow, PathRead, ReadOutcome,
    Remains, SetAttr, Source, XattrAction, trim_slashes,
};
pub use watching::{Watch, Witness};
