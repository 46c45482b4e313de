//! What a server exports: trees of files and disks, each behind one trait.
//!
//! [`FileStore`] resolves paths and changes names; [`OpenFile`] reads and writes. Flags, modes and
//! error numbers are those of Linux. Back ends: [`directory`], a tree of the local file system, and
//! [`memory`], a file system of our own in memfd pages.
//!
//! [`BlockStore`] is a disk; back ends in [`block`]: files and devices, memory, stripes of others.
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
    Caller, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, SetAttr, Source, XattrAction,
};
pub use watching::{Watch, Witness};
