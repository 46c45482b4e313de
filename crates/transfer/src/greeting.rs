//! The first message of each side of a link, which identifies the node and says what the link can be.
//!
//! Both greetings have the same fixed length, so they are read exactly, together with the descriptors
//! that accompany the answer over a Unix socket.

use crate::ProtocolError;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use towline_net::{Link, Wait, receive_descriptors};
use towline_wire::codec::{Field, Reader};
use towline_wire::limits::HEADER_BYTES;
use towline_wire::{Header, Kind};

const MAGIC: u64 = 0x3153_4e41_5254_4c57; // "WLTRANS1" as little-endian bytes
const BODY_BYTES: usize = 48;
pub(crate) const GREETING_BYTES: usize = HEADER_BYTES + BODY_BYTES;

/// Features that a side asks for, or agrees to.
pub(crate) mod want {
    /// Rings in shared memory instead of the socket.
    pub(crate) const SHARED_MEMORY: u32 = 1;
    /// A second socket for descriptors.
    pub(crate) const DESCRIPTORS: u32 = 2;
}

/// A node's identity, and the features that it wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub(crate) wants: u32,
    /// The process number, as the node itself sees it.
    pub(crate) process: u32,
    pub(crate) node: u64,
    pub(crate) host: u64,
    /// Address of `proof_value` in the node's memory, by which other processes of the same user can
    /// check whether they can read that memory. Zero over TCP.
    pub(crate) proof_address: u64,
    pub(crate) proof_value: u64,
}

impl Greeting {
    pub(crate) fn to_bytes(self, kind: Kind) -> Vec<u8> {
        let mut header = Header::new(kind, 0, 0);
        header.body_bytes = BODY_BYTES as u32;
        let mut out = header.to_bytes().to_vec();
        MAGIC.encode(&mut out);
        self.wants.encode(&mut out);
        self.process.encode(&mut out);
        self.node.encode(&mut out);
        self.host.encode(&mut out);
        self.proof_address.encode(&mut out);
        self.proof_value.encode(&mut out);
        out
    }

    pub(crate) fn parse(bytes: &[u8; GREETING_BYTES], kind: Kind) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(bytes);
        let mut head = [0; HEADER_BYTES];
        head.copy_from_slice(reader.take(HEADER_BYTES)?);
        let header = Header::parse(&head)?;
        if header.kind != kind || header.body_bytes as usize != BODY_BYTES {
            return Err(reader.error("no greeting of a node"));
        }
        if u64::decode(&mut reader)? != MAGIC {
            return Err(reader.error("peer speaks another protocol"));
        }
        Ok(Self {
            wants: Field::decode(&mut reader)?,
            process: Field::decode(&mut reader)?,
            node: Field::decode(&mut reader)?,
            host: Field::decode(&mut reader)?,
            proof_address: Field::decode(&mut reader)?,
            proof_value: Field::decode(&mut reader)?,
        })
    }
}

/// A greeting that is being received.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    bytes: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Incoming {
    /// Receives what is there. Returns the greeting once it is complete, and takes nothing more from the
    /// socket then.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        kind: Kind,
    ) -> io::Result<Option<Greeting>> {
        let mut part = [0; GREETING_BYTES];
        let wanted = GREETING_BYTES - self.bytes.len();
        match receive_descriptors(socket, &mut part[..wanted], Wait::No) {
            Ok((0, _)) => return Err(io::ErrorKind::ConnectionReset.into()),
            Ok((count, more)) => {
                self.bytes.extend_from_slice(&part[..count]);
                self.descriptors.extend(more);
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        if self.descriptors.len() > 2 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
        }
        let Some(bytes) = self.bytes.first_chunk() else { return Ok(None) };
        Greeting::parse(bytes, kind)
            .map(Some)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

/// Sends a greeting, which is small enough for the empty buffer of a new connection.
pub(crate) fn send(link: &Link, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let Some(socket) = link.fd() else { return Err(io::ErrorKind::Unsupported.into()) };
    match towline_net::send_descriptors(socket, bytes, descriptors, Wait::No)? {
        sent if sent == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}
