//! File systems and devices that hang under a server: only their users wait.
//!
//! The file system that hangs is a FUSE one whose process is stopped and continued; the device that does not
//! answer is that of a frozen file system.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod devices;
mod directories;
mod disks;
#[path = "../support/mod.rs"]
mod support;
mod world;
