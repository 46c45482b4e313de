//! The header that starts every message.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | kind |
//! | 1 | 1 | flags |
//! | 2 | 2 | slot |
//! | 4 | 4 | sequence |
//! | 8 | 4 | body length |
//! | 12 | 4 | payload length |
//! | 16 | 8 | offset |
//! | 24 | 4 | word a |
//! | 28 | 4 | word b |

use crate::codec::ProtocolError;
use crate::limits::{
    BODY_BYTES_MAX, FRAGMENT_BYTES_MAX, HEADER_BYTES, INLINE_BYTES_MAX, LISTING_BYTES_MAX,
    SLOTS_MAX,
};

/// What a message is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
#[non_exhaustive]
pub enum Kind {
    /// Client to server, first on a lane: who I am, which session this lane belongs to.
    Hello = 1,
    /// Server to client: answer to a hello.
    Welcome = 2,
    /// Client to server: a compound. `offset` is the number of bytes that the client offers to
    /// send when granted; words a and b are the user and group id of the caller. What the slot's
    /// last reply lent goes back with it.
    Request = 3,
    /// Server to client: the results of a compound, and the last message of its slot. Word a is
    /// the boot epoch, word b the time spent in the server, in nanoseconds.
    Reply = 4,
    /// Part of a transfer: payload for `offset` of the transfer of this slot. Word a is an errno:
    /// not zero when the payload had to be filled because the file shrank or could not be read. The
    /// body holds the checksums of the payload where they were asked for ([`crate::disk`]).
    Data = 5,
    /// Server to client: send `word a` bytes of this slot's transfer from `offset` on.
    Grant = 6,
    /// Server to client, unasked: `flags` says which [`notice`], slot and sequence are zero.
    Notice = 7,
    /// Client to server: give up the blocking lock request of this slot.
    Cancel = 8,
    /// Client to server over shared memory: what the reply of this slot and sequence lent is read,
    /// and no next request of the slot is at hand to say so. Without a loan it means nothing.
    Release = 9,
    /// Client to server: the session is over, keep nothing for it.
    Goodbye = 10,
}

/// What a [`Kind::Notice`] says, in its flags.
pub mod notice {
    /// The server is shutting down: end what you do and reconnect later.
    pub const SHUTDOWN: u8 = 1;
    /// A lease is recalled (word a: reserved). Sent to no client yet; clients ignore it.
    pub const RECALL: u8 = 2;
}

/// Flags of a [`Kind::Request`].
pub mod request_flag {
    /// Over shared memory: the data may be lent, the client can read it in place.
    pub const BORROWS: u8 = 1;
    /// The first of the data that is offered follows at once, without a grant, by the leave that a reply gave
    /// ([`super::reply_flag::AHEAD`]). The upper half of `offset` says how many bytes of it.
    pub const AHEAD: u8 = 2;
}

/// Flags of a [`Kind::Reply`].
pub mod reply_flag {
    /// The reply was remembered from an earlier execution of the same request.
    pub const REPLAYED: u8 = 1;
    /// The data is not sent but lent: `offset` is where in the body the list of its
    /// [`crate::extents`] begins, behind the results. It stays as it is until the client's next
    /// request in this slot or a [`super::Kind::Release`], and no longer than the lane.
    pub const LENT: u8 = 2;
    /// The request was under way when the server was killed, and nobody can know whether it took
    /// effect.
    pub const UNKNOWN: u8 = 4;
    /// With [`LENT`]: the data does not stay as it is, since writes that overlap the read may change
    /// it, and there is nothing to give back.
    pub const LIVE: u8 = 8;
    /// One more buffer is kept for the session: one further request that offers data, for a file or a disk, may have the first of it, at most
    /// `offset` bytes, follow at once. The leave holds for this lane, and for
    /// [`AHEAD_MILLISECONDS`](crate::limits::AHEAD_MILLISECONDS) from when the client gets it.
    pub const AHEAD: u8 = 16;
}

/// Flags of a [`Kind::Data`].
pub mod data_flag {
    /// Instead of payload: word b bytes of zeroes.
    pub const HOLE: u8 = 1;
    /// From a client: the fragment that follows its request without a grant. The server throws it away where the
    /// buffer has gone meanwhile, or the request does not come to its data at once, and grants it later like any other.
    pub const AHEAD: u8 = 2;
}

/// The fixed part of every message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What the message is.
    pub kind: Kind,
    /// Meaning depends on the kind.
    pub flags: u8,
    /// Slot of the session.
    pub slot: u16,
    /// Sequence number within the slot.
    pub sequence: u32,
    /// Bytes of body after the header.
    pub body_bytes: u32,
    /// Bytes of payload after the body.
    pub payload_bytes: u32,
    /// Offset in a transfer, or bytes offered.
    pub offset: u64,
    /// Meaning depends on the kind.
    pub word_a: u32,
    /// Meaning depends on the kind.
    pub word_b: u32,
}

impl Header {
    /// A header with everything but kind, slot and sequence zero.
    #[must_use]
    pub fn new(kind: Kind, slot: u16, sequence: u32) -> Self {
        Self {
            kind,
            flags: 0,
            slot,
            sequence,
            body_bytes: 0,
            payload_bytes: 0,
            offset: 0,
            word_a: 0,
            word_b: 0,
        }
    }

    /// Says in a request that so many of the bytes that it offers follow at once: see [`request_flag::AHEAD`].
    pub fn set_ahead(&mut self, bytes: u32) {
        self.flags |= request_flag::AHEAD;
        self.offset |= u64::from(bytes) << 32;
    }

    /// Takes out of a request how many of the bytes that it offers follow at once; zero: none.
    pub fn take_ahead(&mut self) -> u32 {
        if self.flags & request_flag::AHEAD == 0 {
            return 0;
        }
        let bytes = (self.offset >> 32) as u32;
        self.flags &= !request_flag::AHEAD;
        self.offset &= u64::from(u32::MAX);
        bytes
    }

    /// The 32 bytes of this header.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0] = self.kind as u8;
        out[1] = self.flags;
        out[2..4].copy_from_slice(&self.slot.to_le_bytes());
        out[4..8].copy_from_slice(&self.sequence.to_le_bytes());
        out[8..12].copy_from_slice(&self.body_bytes.to_le_bytes());
        out[12..16].copy_from_slice(&self.payload_bytes.to_le_bytes());
        out[16..24].copy_from_slice(&self.offset.to_le_bytes());
        out[24..28].copy_from_slice(&self.word_a.to_le_bytes());
        out[28..32].copy_from_slice(&self.word_b.to_le_bytes());
        out
    }

    /// Checks and reads a header.
    ///
    /// # Errors
    /// An unknown kind, a slot or a length beyond [`crate::limits`].
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, ProtocolError> {
        let kind = match bytes[0] {
            1 => Kind::Hello,
            2 => Kind::Welcome,
            3 => Kind::Request,
            4 => Kind::Reply,
            5 => Kind::Data,
            6 => Kind::Grant,
            7 => Kind::Notice,
            8 => Kind::Cancel,
            9 => Kind::Release,
            10 => Kind::Goodbye,
            _ => return Err(ProtocolError { what: "unknown kind of message", at: 0 }),
        };
        // Not field by field with a reader: both sides do this for every message.
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let header = Self {
            kind,
            flags: bytes[1],
            slot: u16::from_le_bytes([bytes[2], bytes[3]]),
            sequence: word(4),
            body_bytes: word(8),
            payload_bytes: word(12),
            offset: u64::from(word(16)) | u64::from(word(20)) << 32,
            word_a: word(24),
            word_b: word(28),
        };
        if usize::from(header.slot) >= SLOTS_MAX {
            return Err(ProtocolError { what: "slot beyond the limit", at: 2 });
        }
        if header.body_bytes as usize > BODY_BYTES_MAX {
            return Err(ProtocolError { what: "body longer than the limit", at: 8 });
        }
        let payload_max = match kind {
            Kind::Request => INLINE_BYTES_MAX,
            Kind::Reply => LISTING_BYTES_MAX,
            Kind::Data => FRAGMENT_BYTES_MAX,
            _ => 0,
        };
        if header.payload_bytes as usize > payload_max {
            return Err(ProtocolError { what: "payload longer than the limit", at: 12 });
        }
        Ok(header)
    }
}
