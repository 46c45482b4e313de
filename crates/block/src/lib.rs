//! The fragment engine of disks: one for each core, under every front: NBD, and sessions of our
//! own.
//!
//! A large read is cut into fragments that are read from the disk together, and each is handed
//! over when it lands, in any order. So the network works while the disk still does, and a read
//! holds the memory of its fragments under way, not of its length. Where a fragment ends is the
//! back end's say ([`towline_store::BlockStore::locate`]): on a stripe, at each member's boundary.
//!
//! The engine knows neither sockets nor rings: a [`Driver`] begins what waits for a device, and
//! tells when it is done.
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

pub use changes::{Changes, GRAIN};
pub use cursor::SHORTEST_FRAGMENT;
pub use disk::{Disk, Failures};
pub use engine::{Engine, Limits, OwnerKey, RequestKey};
pub use memory::Short;
pub use path::{DataPath, Delivery, Moved};
pub use rate::{ClientKey, Meter, Meters, RateLimit};
pub use request::{Call, Driver, How, Output, Piece, Status, Times, Work};
pub use shape::{DEPTH_MAX, Shape};
