//! The NBD protocol, complete, without sockets and without memory of its own for payload.
//!
//! [`Haggle`] is the first phase: bytes of the client in, bytes of the server out, until both
//! agree ([`Agreement`]) on an export and a form of reply. [`Receiver`] cuts the second phase into
//! [`Request`]s, each checked against the export before anybody sees it, and asks a [`Handler`]
//! where payload goes. [`reply`] writes replies in the three forms. All numbers are big-endian.
//!
//! The text is `doc/proto.md` of the reference implementation with its extension for extended
//! headers. Nothing here panics whatever the peer sends.
#![forbid(unsafe_code)]

mod agreement;
mod check;
pub mod constants;
mod handshake;
mod receiver;
pub mod reply;
mod request;

pub use agreement::{Agreement, Catalogue, Context, Form, Offer};
pub use check::{Checked, Refusal};
pub use constants::Error;
pub use handshake::{Ended, Haggle, Progress};
pub use receiver::{Handler, Received, Receiver};
pub use request::{Command, Request, header_bytes};

/// The peer broke the protocol in a way that leaves no common ground: the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolError(pub &'static str);

impl std::fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for ProtocolError {}
