//! The complete NBD protocol, without sockets and without payload buffers of its own.
//!
//! [`Haggle`] is the handshake: it takes bytes from the client and produces bytes for it until both sides
//! agree ([`Agreement`]) on an export and a form of reply. [`Receiver`] is the transmission phase: it cuts
//! the stream into [`Request`]s, checks each against the export, and asks a [`Handler`] where payload goes.
//! [`reply`] writes replies in the three forms. All numbers are big-endian.
//!
//! The specification is `doc/proto.md` of the reference implementation, including the extension for extended
//! headers. Nothing here panics, whatever the peer sends.
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
pub use request::{Command, Request, ends_with_disconnect, header_bytes};

/// The peer broke the protocol so badly that the connection has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolError(pub &'static str);

impl std::fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for ProtocolError {}
