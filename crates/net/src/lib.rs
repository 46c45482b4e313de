//! Lanes: streams of framed messages over TCP, Unix sockets, shared memory, or inside a process.
//!
//! A [`Link`] moves bytes and never waits. All links behave alike, so the code above is written once.
//! [`SendQueue`] sends aggregates over a link, each slice in the cheapest way that is allowed, and
//! counts which way it took. [`Input`] splits received bytes into messages and puts bulk payload in its
//! final place. [`address`] listens and connects. Nothing here knows about files.

pub mod address;
mod congestion;
mod counters;
mod doorbell;
mod glance;
mod in_place;
mod in_ring;
mod input;
mod link;
mod local;
mod payload;
mod pipe;
mod queue;
mod shm;
mod socket;
mod socket_file;
mod spin;
mod target;

pub use counters::Counters;
pub use doorbell::Doorbell;
pub use glance::Glance;
pub use input::{Incoming, Input, Sink};
pub use link::{Link, LinkKind};
pub use local::local_pair;
pub use payload::Payload;
pub use pipe::Pipe;
pub use queue::{Flushed, SENDFILE_BYTES_MIN, SendQueue, Telling};
pub use shm::{SHM_BYTES, ShmLink, ShmSide};
pub use socket::{
    MOMENT, PeerCredentials, Wait, network_namespace, pause, peer_closed, peer_credentials,
    peer_groups, receive_descriptors, send_descriptors,
};
pub use spin::{Spin, look_often};
pub use target::Target;
