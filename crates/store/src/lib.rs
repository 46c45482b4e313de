//! What a server exports: trees of files, behind one trait with two back ends.
//!
//! [`FileStore`] resolves paths and changes names; [`OpenFile`] reads and writes. Flags, modes and
//! error numbers are those of Linux. Back ends: [`directory`], a tree of the local file system, and
//! [`memory`], a file system of our own in memfd pages.
//!
//! Calls may block on the file system unless their documentation says otherwise.

pub mod directory;
mod file_store;
pub mod memory;

pub use file_store::{
    Caller, FileStore, Listing, OpenFile, OpenHow, ReadOutcome, SetAttr, Source, XattrAction,
};
