//! A conformance kit for servers of the Network Block Device protocol.
//!
//! Each rule of the protocol text (`doc/proto.md` of the reference implementation, with its
//! extended-headers extension) is one small check in [`rules`]. A check opens its own connections,
//! speaks legal and illegal NBD, and says what it saw. The kit shares no code with any server: it is
//! an independent reading of the text. Read [`client`] for how it speaks, [`rule`] for what a rule is.
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
