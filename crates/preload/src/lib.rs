//! The library that `towline run` preloads: replaces libc's file functions for remote paths and
//! descriptors.
//!
//! `table.rs` lists every function that is replaced. Each decides by path or descriptor whether the call is
//! ours (`place.rs`, `descriptors.rs`) and otherwise calls the real function. Our calls become calls of
//! `towline-client` (`remote.rs`). As the library lives in foreign processes, it has its own allocator,
//! starts no threads, does not write to the standard streams, lets no panic out, keeps `errno` on success,
//! and does nothing at all unless `TOWLINE_RUN` names a run.
#![allow(unsafe_code)] // all of this interfaces with C

mod ahead;
mod alloc;
mod awaited;
mod behind;
mod between;
mod cache;
mod changed;
mod closing;
mod common;
mod demand;
mod descriptors;
mod elf;
mod fresh;
mod guard;
#[cfg(target_arch = "x86_64")]
mod guest;
mod handlers;
mod hash;
mod holder;
mod hooks;
mod known;
mod languages;
mod lasting;
mod limits;
mod mirror;
mod moved;
mod opened;
mod own;
mod place;
mod pool;
mod process;
mod remote;
mod report;
mod runs;
mod start;
mod stdio;
mod table;
mod trap;
mod variadic;
mod vfork;
mod waits;
mod walk;
mod working;
mod written;

#[global_allocator]
static ALLOCATOR: alloc::Arena = alloc::Arena::new();
