//! Buffers that any node can name, and whose data moves when it is needed.
//!
//! A [`Node`] imports buffers ([`import`]) and gives them a global name ([`Node::globalize`]). The name,
//! a [`Global`], is control information: it is split, combined, packed into a few bytes
//! ([`Global::pack`]) and sent anywhere without its data. A receiver unpacks it and opens a [`Context`],
//! which brings the data by one of a few strategies ([`choose`]), works on it, and closes the context.
//! Closing acknowledges, and then the owner can take its buffers back ([`Node::reclaim`]).
//!
//! A node has no thread of its own. Calls that wait make progress for all operations; an owner has to be
//! in one of them ([`Node::receive`], [`Node::acknowledged`], [`Node::serve`]) for other nodes to be
//! served.
//!
//! Everything a peer sends is checked before it is used, because descriptors and handles may be forged.
//! A peer's identity is not checked: links are not authenticated, so nodes listen beyond their machine
//! only when told to ([`Options::insecure`]).
//!
//! Reading order: `global.rs`, `choose.rs`, `message.rs`, `receiver.rs`, `owner.rs`, `writeback.rs`.
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

/// The purpose for which a context is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Reading.
    Read,
    /// Writing; the existing bytes are not fetched.
    Write,
    /// Reading and writing.
    ReadWrite,
}
