//! The Towline server: cores, listeners, exports and statistics.
//!
//! [`Server::start`] starts one thread for each core. A core owns an event loop, its lanes and its sessions
//! ([`core`]). Threads that may block ([`offload`]) wait for devices. The path of a request: lane ->
//! `session::Compound` -> store -> send queue of the lane.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stderr))]

mod caller;
mod complaints;
mod config;
mod core;
mod disks;
mod elsewhere;
mod ending;
mod exports;
mod extents;
mod failed_disks;
mod failure;
mod families;
#[cfg(fuzzing)]
pub mod fuzzing;
mod grants;
mod groups;
mod guarded;
mod handshake;
mod helpers;
mod kept;
mod lane;
mod lanes;
mod loans;
mod mailbox;
mod messages;
mod native;
mod nbd;
mod offload;
mod owner;
mod pools;
mod priority;
mod prometheus;
mod running;
mod server;
mod serving;
mod sessions;
mod state_directory;
mod stats;
mod waiting;
mod watch;

pub use config::{
    CORE_BUFFER_BYTES_MIN, CORES_MAX, Config, DiskExport, DiskKind, EngineWish, Export, ExportKind,
    OwnStore,
};
pub use kept::hold::run as hold_files;
pub use server::{Server, StartError};
pub use towline_block::{DataPath, Delivery, RateLimit, SHORTEST_FRAGMENT, Shape};
pub use towline_store::block::CacheMode;
