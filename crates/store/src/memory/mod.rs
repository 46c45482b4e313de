//! Towline's own file system in memory, with the semantics of a local Linux file system.
//!
//! A server exports a [`MemoryStore`]. Names, attributes and directories are ordinary structures.
//! The bytes of files are in one memfd, from which a transport can send them without copying. No
//! operation waits for a device.
//!
//! # Locks
//!
//! Locks are taken in this order. None is held across a call out of the store, with two exceptions:
//! a [`Listing`](crate::Listing) is called under the lock of the directory that it lists, and a
//! [`Witness`](crate::Witness) under those of the changing names and of the watches. Neither may
//! call back.
//!
//! 1. `Tree::topology`, a mutex, taken by renames between two directories: while it is held, only its
//!    holder changes the parent of a directory.
//! 2. The names of directories: an ancestor before its descendants. Only a holder of `topology` locks
//!    two unrelated directories; all others hold at most a parent and then one child.
//! 3. The data of one file. No names are held then, and never the data of two files.
//! 4. The extended attributes of one inode.
//! 5. Leaves, one at a time: the attributes of an inode, the parent of a directory, the free blocks of
//!    the arena, the watches.
#![forbid(unsafe_code)]

mod access;
mod arena;
mod blocks;
mod change;
mod create;
mod data;
mod file;
mod inode;
mod names;
mod open;
mod rename;
mod store;
mod walk;
mod watches;
mod xattr;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod users;

pub use store::MemoryStore;
