//! Block devices served from user space through the kernel's ublk driver.
//!
//! [`Control`] creates and removes devices through the control device. Each queue of a device is a
//! thread ([`Device::serve`]) with its own io_uring, whose commands report the result of one request and
//! fetch the next.
//!
//! Devices survive this process: when it ends, requests wait, and the kernel gives those that it had
//! not answered to the process that takes over ([`Device::recover`]).

mod abi;
mod control;
mod device;
mod queue;

pub use control::{Control, Information, State};
pub use device::{Device, Event, Options, owner};
