//! The errors of this crate.

use std::fmt;
use std::io;
use towline_net::address::Address;
use towline_wire::{Errno, ProtocolError};

/// Why a call or an operation failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// An error of the local system.
    Io(io::Error),
    /// The bytes are not a valid descriptor or message.
    Protocol(ProtocolError),
    /// The owner of the buffers refused. `ESTALE`: the buffers do not exist, or no longer; `EACCES`: not
    /// for writing; `ERANGE`: beyond their end; `E2BIG`: in more than 16384 pieces; `EOPNOTSUPP`: not
    /// with this strategy; `EAGAIN`: the peer holds too many leases; otherwise an error in reading or
    /// writing the buffers.
    Refused(Errno),
    /// The peer closed the link, died, or broke the protocol.
    PeerLost,
    /// Not finished in the time given. An operation continues, and can be waited for again or cancelled.
    TimedOut,
    /// The operation needs more memory than the pool has, apart from what is reserved for pushes.
    TooLarge {
        /// Bytes needed, in whole buffers.
        needed: u64,
        /// Bytes that the pool has for it.
        pool: u64,
    },
    /// There is no link to the owner, and no address of it may be or can be connected to.
    Unreachable {
        /// The owner's node number.
        node: u64,
        /// The address tried last, and its error.
        last: Option<(Address, io::Error)>,
    },
    /// The requested strategy cannot be used here.
    Strategy(&'static str),
    /// The range or the intent does not fit the aggregate.
    Invalid(&'static str),
    /// The operation is unknown: it was never started, or its result was already taken.
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
