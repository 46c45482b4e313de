//! The fragment engine of disks. Each core has one, which serves all fronts: NBD and Towline's own sessions.
//!
//! A large read is cut into fragments that are read from the disk together. Each fragment is handed over when
//! it lands, in any order. So the network works while the disk is still working, and a read holds memory only
//! for its fragments under way, not for its whole length. The back end decides where a fragment ends
//! ([`towline_store::BlockStore::locate`]): on a stripe, at each member's boundary.
//!
//! The engine knows neither sockets nor rings: a [`Driver`] starts all work that waits for a device and
//! reports when it is done.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stderr))]

mod changes;
mod cursor;
mod disk;
mod engine;
mod memory;
mod path;
mod rate;
mod request;
mod shape;
mod slab;
mod ways;
mod writers;

pub use changes::{Changes, GRAIN};
pub use cursor::SHORTEST_FRAGMENT;
pub use disk::{Disk, Failures};
pub use engine::{Engine, Limits, OwnerKey, RequestKey};
pub use memory::Short;
pub use path::{DataPath, Delivery, Moved};
pub use rate::{ClientKey, Meter, Meters, RateLimit};
pub use request::{Call, Driver, How, Output, Piece, Status, Times, Work};
pub use shape::{DEPTH_MAX, Shape};
