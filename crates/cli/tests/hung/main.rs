//! What hangs under a server: whoever uses it waits, and nobody else.
//!
//! A file system that hangs is one of FUSE whose process is stopped and continued; a device that does not answer
//! is one whose file system is frozen.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod devices;
mod directories;
mod disks;
#[path = "../support/mod.rs"]
mod support;
mod world;
