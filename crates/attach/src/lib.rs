//! Remote disks as local block devices.
//!
//! There are two ways. With [`ublk`] the kernel hands requests to our queues in user space, which
//! pass them to a [`Backend`], a connection to the server that survives failures of the server. With
//! [`nbd`] the kernel speaks NBD itself, over sockets that we connect and negotiate. Either device
//! survives the process that serves it, and a [`Record`] tells another process how to take over.

mod backend;
mod error;
mod native;
pub mod nbd;
mod origin;
pub mod read_ahead;
mod record;
mod sysfs;
pub mod ublk;
mod watch;

pub use backend::{Backend, Finished, Geometry, Operation, Request};
pub use error::Error;
pub use native::Native;
pub use origin::{BackendOptions, Found, Origin};
pub use record::{Claim, Kind, Record};
pub use watch::watch_disk;
