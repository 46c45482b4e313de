//! Server-side sessions, without sockets or clocks.
//!
//! A [`Session`] is a client's identity and outlives its connections. It has slots with sequence numbers
//! and remembered replies ([`slots`]), open files ([`files`]), and, with a [`state`], a record that
//! outlives the server. A [`Compound`] executes one request against the stores, and says when it has to
//! wait: for data from the client, for a thread that may block, for a lock ([`locks`]), or for events of
//! watched files ([`watches`]). Its driver does the waiting.
#![forbid(unsafe_code)]

mod compound;
pub mod files;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod held;
pub mod locks;
mod record;
mod session;
#[cfg(test)]
mod simulation;
pub mod slots;
pub mod state;
pub mod watches;

pub use compound::{Blocking, BlockingResult, Closed, Compound, Context, Step};
pub use session::{Exports, Session};
