//! The handshake of a lane.

use crate::codec::{Field, ProtocolError, Reader};

/// First bytes of a hello's body: a peer that speaks something else is told apart at once.
pub const MAGIC: u64 = 0x454e_494c_574f_5431; // "1TOWLINE" as little-endian bytes
/// Version of the protocol. Nothing is released; it changes with every change of the wire.
pub const VERSION: u16 = 6;

/// What a lane asks for.
pub mod want {
    /// Move this session to shared memory; only over a Unix socket.
    pub const SHARED_MEMORY: u32 = 1;
    /// Let others go before this session, to a share. To be said by each lane.
    pub const LOW_PRIORITY: u32 = 2;
}

/// Name of a local socket in the abstract name space of `unix(7)`. Its number is random, so that
/// nobody can be in its place before the server.
#[must_use]
pub fn local_socket_name(number: u64) -> String {
    format!("towline-{number:016x}")
}

/// How the peers prove who they are. Only `NONE` exists yet; the field keeps the place.
pub mod authentication {
    /// No proof: accepted on loopback and Unix sockets, elsewhere only by an insecure server.
    pub const NONE: u16 = 0;
}

/// What became of the session that a lane asked for.
pub mod resumed {
    /// Not known, or none was asked for: a new one began.
    pub const NEW: u16 = 0;
    /// Joined: all is as it was.
    pub const JOINED: u16 = 1;
    /// Known from before a restart of the server. What it did is remembered, so that requests can
    /// be sent again; what it had open and locked is not, and can be had again by
    /// [`crate::Request::Reclaim`] and `Lock`, with [`crate::Request::Reclaimed`] at the end.
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

            /// Reads the structure, which must fill `bytes` exactly.
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
        /// Bits of [`want`].
        pub want: u32,
        /// Random number that names the client process.
        pub client: u64,
        /// Session to join, zero for a new one.
        pub session: u64,
        /// Secret of that session, as the welcome told it; zero for a new one.
        pub secret: u64,
        /// Random number of a family of sessions, whoever knows it belongs to it: they share their
        /// open files. Zero: open files of its own.
        pub family: u64,
    }
}

structure! {
    /// Body of [`crate::Kind::Welcome`].
    pub struct Welcome {
        /// [`MAGIC`].
        pub magic: u64,
        /// [`VERSION`].
        pub version: u16,
        /// Error number; zero when welcome. `EPROTO`: other version. `EACCES`: not allowed here.
        pub errno: u16,
        /// Bits of [`want`] that were granted.
        pub granted: u32,
        /// Session this lane belongs to.
        pub session: u64,
        /// Secret that lets further lanes join.
        pub secret: u64,
        /// Changes with every start of the server.
        pub boot_epoch: u32,
        /// One of [`resumed`].
        pub resumed: u16,
        /// Slots of the session.
        pub slots: u16,
        /// For a peer on the same machine: number of a Unix socket of the same server, named by
        /// [`local_socket_name`], over which the session can be joined. Zero: none.
        pub local_socket: u64,
        /// Largest read or write in one request, bytes.
        pub transfer_bytes_max: u32,
        /// Largest payload without grant, bytes.
        pub inline_bytes_max: u32,
    }
}
