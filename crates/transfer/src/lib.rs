//! Buffers that any node can name, and data that moves when somebody needs it.
//!
//! A [`Node`] imports buffers ([`import`]) and gives them a global name ([`Node::globalize`]). The
//! name, a [`Global`], is control information: it is split, combined, packed into a few bytes
//! ([`Global::pack`]) and sent anywhere without its data. Whoever unpacks it opens a [`Context`],
//! which brings the data by one of a few strategies ([`choose`]), works on it, and closes the
//! context; that acknowledges, and the owner can take its buffers back ([`Node::reclaim`]).
//!
//! There is no thread behind a node. Calls that wait make progress for all; an owner has to be in
//! one of them ([`Node::receive`], [`Node::acknowledged`], [`Node::serve`]) for others to be served.
//!
//! What a peer sends is checked before it is used: descriptors and handles may be forged. What is
//! not checked is who a peer is; links are not authenticated yet, so that nodes listen beyond their
//! machine only when told to ([`Options::insecure`]).
//!
//! Read in this order: `global.rs`, `choose.rs`, `message.rs`, `receiver.rs`, `owner.rs`,
//! `writeback.rs`.
#![forbid(unsafe_code)]

mod arrivals;
pub mod choose;
mod completion;
mod context;
mod counters;
mod descriptor;
mod error;
#[cfg(fuzzing)]
pub mod fuzzing;
mod global;
mod greeting;
pub mod import;
pub mod limits;
mod links;
mod message;
mod messaging;
mod node;
mod operation;
mod owner;
mod progress;
mod receiver;
mod state;
mod writeback;

pub use choose::{Choice, Strategy};
pub use context::Context;
pub use counters::{Counts, Way, WayCounts};
pub use error::Error;
pub use global::{Access, Global, Home, Part, PartKind};
pub use messaging::Message;
pub use node::{Acknowledged, Node, Options, PeerHandle, Reach};
pub use operation::{Finished, Group, OperationId};
pub use towline_net::address::Address;
pub use towline_wire::{Errno, ProtocolError};

/// What a context is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Reading.
    Read,
    /// Writing; the bytes that are there now do not come.
    Write,
    /// Reading and writing.
    ReadWrite,
}
