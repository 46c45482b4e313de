//! An NBD client: negotiates with a server, serves a queue from it, and hands connections to the
//! kernel's own client.

mod bytes;
mod calls;
mod extents;
#[cfg(fuzzing)]
pub mod fuzzing;
mod handshake;
mod kernel;
mod lane;
mod netlink;
mod source;

pub use calls::{CallError, Caller};
pub use kernel::{Kernel, KernelOptions, owner};
pub use lane::Lane;
pub use source::{Connection, Extent, Source};
