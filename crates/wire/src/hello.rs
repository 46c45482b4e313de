//! The handshake of a lane.

use crate::codec::{Field, ProtocolError, Reader};

/// First bytes of the body of a hello and a welcome, to recognize peers that speak another protocol.
pub const MAGIC: u64 = 0x454e_494c_574f_5431; // "1TOWLINE" as little-endian bytes
/// Version of the protocol. It changes with every change of the wire format, as there is no release yet.
pub const VERSION: u16 = 17;

/// Returns the version of the peer that has sent this body of a hello or welcome. In every version, both begin with
/// [`MAGIC`] and the version; their lengths may differ. `None`: the peer speaks another protocol.
#[must_use]
pub fn version_of(body: &[u8]) -> Option<u16> {
    let mut reader = Reader::new(body);
    let magic: u64 = Field::decode(&mut reader).ok()?;
    (magic == MAGIC).then(|| Field::decode(&mut reader).ok())?
}

/// Features that a lane asks for.
pub mod want {
    /// Move this session to shared memory; only valid over a Unix socket.
    pub const SHARED_MEMORY: u32 = 1;
    /// Serve other sessions first, except for a guaranteed share. Each lane has to ask for it.
    pub const LOW_PRIORITY: u32 = 2;
    /// This session reports the ends of all processes of its family that took locks
    /// ([`crate::Request::ProcessEnded`]). Their locks then last as long as they do, not as long as their
    /// sessions. Counts for a lane that begins a session.
    pub const REPORTS_ENDS: u32 = 4;
}

/// Returns the name of a local socket in the abstract namespace of `unix(7)`. The number is random, so
/// that no other process can take the name before the server does.
#[must_use]
pub fn local_socket_name(number: u64) -> String {
    format!("towline-{number:016x}")
}

/// How the client authenticates itself. Only `NONE` exists; the field is there for later methods.
pub mod authentication {
    /// No authentication: accepted on loopback and Unix sockets, elsewhere only by an insecure server.
    pub const NONE: u16 = 0;
}

/// How everything after the welcome is encrypted. Only `NONE` exists; the field is there for later methods.
pub mod encryption {
    /// No encryption.
    pub const NONE: u16 = 0;
}

/// Outcome of a lane's request to join a session.
pub mod resumed {
    /// The session is unknown, or the lane asked for none: a new one began.
    pub const NEW: u16 = 0;
    /// Joined: the session is unchanged.
    pub const JOINED: u16 = 1;
    /// The server remembers the session from before its restart. It knows the results of the
    /// session's requests, so the client can send requests again. Open files and locks are gone; the
    /// client gets them back with [`crate::Request::Reclaim`] and `Lock`, followed by
    /// [`crate::Request::Reclaimed`].
    pub const REMEMBERED: u16 = 2;
}

macro_rules! structure {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$doc:meta])* pub $field:ident: $kind:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct $name { $($(#[$doc])* pub $field: $kind,)* }

        impl $name {
            /// Appends the encoding to `out`.
            pub fn encode(&self, out: &mut Vec<u8>) {
                $(Field::encode(&self.$field, out);)*
            }

            /// Decodes the structure, which must fill `bytes` exactly.
            ///
            /// # Errors
            /// Too few or too many bytes.
            pub fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
                let mut reader = Reader::new(bytes);
                let value = Self { $($field: Field::decode(&mut reader)?,)* };
                if !reader.is_empty() {
                    return Err(reader.error("bytes after the end of the message"));
                }
                Ok(value)
            }

            #[cfg(test)]
            pub(crate) fn drawn(draw: &mut crate::round_trips::Draw<'_>) -> Self {
                Self { $($field: crate::round_trips::Drawn::drawn(draw),)* }
            }
        }
    };
}

structure! {
    /// Body of [`crate::Kind::Hello`].
    pub struct Hello {
        /// [`MAGIC`].
        pub magic: u64,
        /// [`VERSION`].
        pub version: u16,
        /// One of [`authentication`].
        pub authentication: u16,
        /// One of [`encryption`].
        pub encryption: u16,
        /// Bits of [`want`].
        pub want: u32,
        /// Random number that identifies the client process.
        pub client: u64,
        /// Session to join; zero for a new one.
        pub session: u64,
        /// Secret of that session, from its welcome; zero for a new one.
        pub secret: u64,
        /// Random number of a family of sessions, which share their open files. Every session that knows
        /// the number belongs to the family. Zero: the session has its own open files.
        pub family: u64,
        /// The process of the family whose requests the session carries, by its number as an owner of locks:
        /// when its end is reported ([`crate::Request::ProcessEnded`]), they come first. Zero: none, or one
        /// that is named later ([`crate::Request::HandOver`]).
        pub process: u64,
    }
}

structure! {
    /// Body of [`crate::Kind::Welcome`].
    pub struct Welcome {
        /// [`MAGIC`].
        pub magic: u64,
        /// [`VERSION`].
        pub version: u16,
        /// Error number; zero if the lane is accepted. `EPROTO`: other version. `EPROTONOSUPPORT`: unknown way of
        /// authentication or encryption.
        pub errno: u16,
        /// One of [`authentication`]: that of the hello, or in a refusal what the server accepts.
        pub authentication: u16,
        /// One of [`encryption`], likewise.
        pub encryption: u16,
        /// Bits of [`want`] that were granted.
        pub granted: u32,
        /// Session this lane belongs to.
        pub session: u64,
        /// Secret with which further lanes can join the session.
        pub secret: u64,
        /// Changes with every start of the server and, for a family, when all its sessions had ended: its
        /// files have to be opened again.
        pub boot_epoch: u32,
        /// One of [`resumed`].
        pub resumed: u16,
        /// Number of slots of the session.
        pub slots: u16,
        /// For a peer on the same machine: number of a Unix socket of the same server, named by
        /// [`local_socket_name`], over which a lane can join the session. Zero: none.
        pub local_socket: u64,
        /// Largest read or write in one request, in bytes.
        pub transfer_bytes_max: u32,
        /// Largest payload without a grant, in bytes.
        pub inline_bytes_max: u32,
    }
}
