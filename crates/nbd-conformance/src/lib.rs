//! A conformance test kit for servers of the Network Block Device protocol.
//!
//! Each rule of the protocol text (`doc/proto.md` of the reference implementation, with its
//! extended-headers extension) is one small check in [`rules`]. A check opens its own connections,
//! speaks valid and invalid NBD, and reports what it saw. The kit shares no code with any server, so
//! it is an independent reading of the text. [`client`] speaks the protocol; [`rule`] defines a rule.
#![forbid(unsafe_code)]

pub mod client;
pub mod launch;
pub mod link;
pub mod report;
pub mod rule;
pub mod rules;
pub mod target;
pub mod uri;
pub mod wire;
