//! What can go wrong, each kind apart.

use std::fmt;
use std::io;
use towline_net::address::Address;
use towline_wire::{Errno, ProtocolError};

/// Why a call or an operation failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The system refused something here.
    Io(io::Error),
    /// Bytes that should be a descriptor or a message are none.
    Protocol(ProtocolError),
    /// The owner of the buffers refused. `ESTALE`: no such buffers, or not any more; `EACCES`: not
    /// for writing; `ERANGE`: beyond their end; `EOPNOTSUPP`: not by this strategy; `EAGAIN`: the
    /// peer holds too many leases; else what reading or writing the buffers said.
    Refused(Errno),
    /// The peer closed, died, or broke the protocol.
    PeerLost,
    /// Not done in the time given; an operation goes on, and can be waited for again or cancelled.
    TimedOut,
    /// It needs more memory than the whole pool has.
    TooLarge {
        /// Bytes needed, in whole buffers.
        needed: u64,
        /// Bytes of the pool.
        pool: u64,
    },
    /// No link to the owner, and none of its addresses may be or can be connected to.
    Unreachable {
        /// The owner's node number.
        node: u64,
        /// The address tried last, and what it said.
        last: Option<(Address, io::Error)>,
    },
    /// The strategy that was asked for cannot be used here.
    Strategy(&'static str),
    /// The range, or the intent, does not fit the aggregate.
    Invalid(&'static str),
    /// The operation is unknown: never started, or its result was taken already.
    NoOperation,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Protocol(error) => error.fmt(f),
            Self::Refused(errno) => {
                write!(f, "owner of the buffers refused: {} ({})", errno.text(), errno.name())
            }
            Self::PeerLost => f.write_str("link to the peer was lost"),
            Self::TimedOut => f.write_str("operation not finished in the time given"),
            Self::TooLarge { needed, pool } => write!(
                f,
                "context needs {needed} bytes of buffers, the pool has {pool}: split the aggregate"
            ),
            Self::Unreachable { node, last: None } => write!(
                f,
                "node {node:016x}: no link, and no address that may be connected to (see Reach)"
            ),
            Self::Unreachable { node, last: Some((address, error)) } => {
                write!(f, "node {node:016x} at {address}: {error}")
            }
            Self::Strategy(what) => write!(f, "strategy: {what}"),
            Self::Invalid(what) => f.write_str(what),
            Self::NoOperation => f.write_str("no such operation, or its result was taken already"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            Self::Protocol(error) => Some(error),
            Self::Unreachable { last: Some((_, error)), .. } => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Io(error.into())
    }
}

impl From<ProtocolError> for Error {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}
