//! Remote disks as local block devices.
//!
//! Two ways lead there. [`ublk`]: the kernel hands requests to queues of ours in user space, which
//! pass them to a [`Backend`], a connection to the server that outlives its failures. [`nbd`]: the
//! kernel speaks NBD itself over sockets that we connected and agreed on. Either device outlives
//! the process that serves it, and a [`Record`] tells another one how to go on.

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
pub use origin::{Found, Origin};
pub use record::{Claim, Kind, Record};
pub use watch::watch_size;
