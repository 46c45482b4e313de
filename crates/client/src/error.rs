//! Errors of client calls.

use std::fmt;
use towline_wire::hello::VERSION;
use towline_wire::{Errno, ProtocolError};

/// A failed operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// An error number from the server (or from a check before sending), as from a local system
    /// call.
    Errno(Errno),
    /// The server cannot be reached, or no longer.
    Connection {
        /// The server, as in the URL.
        server: String,
        /// What was tried and how it failed.
        what: String,
        /// Closest error number.
        errno: Errno,
    },
    /// The peer sent an invalid message.
    Protocol(ProtocolError),
    /// The version of the protocol that the server speaks, which differs from the library's. Counts
    /// as `EPROTO`.
    Version(u16),
    /// The server accepts only these ways of authentication and encryption
    /// ([`towline_wire::hello::authentication`], [`towline_wire::hello::encryption`]), of which the library lacks
    /// one. Counts as `EPROTONOSUPPORT`.
    Methods {
        /// How clients authenticate themselves.
        authentication: u16,
        /// How connections are encrypted.
        encryption: u16,
    },
    /// Changes of a disk that were answered and not flushed may be lost, since the server's machine
    /// or a flush failed: the disk may hold older data than was read before. Callers that can
    /// handle this open the disk again. Counts as `EIO`.
    WritesLost {
        /// The disk.
        disk: String,
    },
    /// A request was under way when the server restarted, and it is unknown whether it took effect.
    /// Counts as `EIO`.
    Unknown,
}

impl Error {
    /// The error number that a Unix program expects.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Self::Errno(errno) => *errno,
            Self::Connection { errno, .. } => *errno,
            Self::Protocol(_) | Self::Version(_) => Errno::EPROTO,
            Self::Methods { .. } => Errno::EPROTONOSUPPORT,
            Self::Unknown | Self::WritesLost { .. } => Errno::EIO,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Errno(errno) => write!(f, "{errno}"),
            Self::Connection { server, what, .. } => write!(f, "server {server}: {what}"),
            Self::Protocol(error) => write!(f, "{error}"),
            Self::Version(theirs) => write!(
                f,
                "the server speaks version {theirs} of the protocol and this program version \
                 {VERSION}: install the same release of towline on both machines"
            ),
            Self::Methods { authentication, encryption } => write!(
                f,
                "the server wants authentication {authentication} and encryption {encryption}, and this \
                 program knows only none (0) of both: install the same release of towline on both machines"
            ),
            Self::WritesLost { disk } => write!(
                f,
                "disk \"{disk}\": what was written to it and not flushed may be lost: its server's \
                 machine or a flush failed meanwhile; check its contents, then open it again"
            ),
            Self::Unknown => f.write_str(
                "the server restarted while this request was under way: it may or may not have \
                 taken effect, look before you repeat it",
            ),
        }
    }
}

impl std::error::Error for Error {}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<ProtocolError> for Error {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Errno(errno) => errno.into(),
            other => Self::other(other),
        }
    }
}
