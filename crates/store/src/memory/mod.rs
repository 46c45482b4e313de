//! A file system of our own in memory, with the semantics of a local Linux file system.
//!
//! [`MemoryStore`] is what a server exports. Names, attributes and directories are ordinary
//! structures; the bytes of files stand in one memfd, from which a transport can send them
//! without copying. Nothing here waits for a device.
//!
//! # Locks
//!
//! Taken in this order, none of which is ever held across a call out of the store, except that a
//! [`Listing`](crate::Listing) is called under the lock of the directory it lists, and a [`Witness`](crate::Witness) under
//! that of the names that change and of the watches. Neither must call back:
//!
//! 1. `Tree::topology`, a mutex, by renames between two directories: under it the parent of no
//!    directory changes but by its holder.
//! 2. The names of directories: an ancestor before its descendants. Two that are unrelated are
//!    only taken under `topology`; all others hold at most a parent and then one child.
//! 3. The data of one file. No names are held then, and never the data of two files.
//! 4. The extended attributes of one inode.
//! 5. Leaves, one at a time: the attributes of an inode, the parent of a directory, the free
//!    blocks of the arena, who watches what.
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

pub use store::MemoryStore;
