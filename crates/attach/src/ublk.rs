//! Block devices served from user space through the kernel's ublk driver.
//!
//! The control device makes and ends devices ([`Control`]); each of a device's queues is a thread
//! of ours ([`Device::serve`]) with an io_uring of its own, whose commands fetch a request of the
//! kernel and at the same time tell the outcome of the one before.
//!
//! The device is made so that it outlives us: when this process ends, requests wait, and those it
//! had not answered are given to the process that takes over ([`Device::recover`]).

mod abi;
mod control;
mod device;
mod queue;

pub use control::{Control, Information, State};
pub use device::{Device, Event, Options, exists};
