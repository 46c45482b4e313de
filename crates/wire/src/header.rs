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
    BODY_BYTES_MAX, HEADER_BYTES, INLINE_BYTES_MAX, LISTING_BYTES_MAX, READ_BYTES_MAX, SLOTS_MAX,
};

/// Kind of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
#[non_exhaustive]
pub enum Kind {
    /// Client to server, first on a lane: names the client and the session of the lane.
    Hello = 1,
    /// Server to client: the answer to a hello.
    Welcome = 2,
    /// Client to server: a compound. `offset` is the number of bytes that the client offers to
    /// send under grants; words a and b are the user and group id of the caller. The request returns
    /// the loan of the slot's last reply.
    Request = 3,
    /// Server to client: the results of a compound, and the last message of its request. Word a is
    /// the boot epoch, word b the time spent in the server in nanoseconds.
    Reply = 4,
    /// Part of the slot's transfer: payload that belongs at `offset` of it. Word a is an errno,
    /// nonzero if the payload was padded because the file shrank or could not be read. The body
    /// holds the checksums of the payload if the request asked for them ([`crate::disk`]).
    Data = 5,
    /// Server to client: send `word a` bytes of the slot's transfer, starting at `offset`.
    Grant = 6,
    /// Server to client, unsolicited: `flags` says which [`notice`]; slot and sequence are zero.
    Notice = 7,
    /// Client to server: give up the slot's request that waits for a lock or for events.
    Cancel = 8,
    /// Client to server over shared memory: returns the loan of the reply with this slot and
    /// sequence, if the slot has no next request yet that would return it. Ignored without a loan.
    Release = 9,
    /// Client to server: the session is over, and the server need keep nothing for it.
    Goodbye = 10,
    /// Client to server over a Unix socket or shared memory: word a is the processor on which the client runs, so that the
    /// server can serve it there. Ignored over other links, which may come from another machine.
    Processor = 11,
}

/// Meanings of a [`Kind::Notice`], in its flags.
pub mod notice {
    /// The server has shut down, and ends the lane. It did not begin what it left unanswered, except for
    /// requests that wait for others, and those that may be repeated anyway.
    pub const SHUTDOWN: u8 = 1;
    /// A lease is recalled (word a: reserved). Servers do not send it; clients ignore it.
    pub const RECALL: u8 = 2;
    /// The server will not lend from the memory with number `offset` again. Once the client has read what was
    /// lent, it need not keep it: the disk that had it may be gone.
    pub const FORGOTTEN: u8 = 3;
}

/// Flags of a [`Kind::Request`].
pub mod request_flag {
    /// Over shared memory: the server may lend the data, because the client can read it in place.
    pub const BORROWS: u8 = 1;
    /// The first part of the offered data follows at once, under the advance grant of an earlier reply
    /// ([`super::reply_flag::AHEAD`]). The upper half of `offset` is the length of that part in bytes.
    pub const AHEAD: u8 = 2;
}

/// Flags of a [`Kind::Reply`].
pub mod reply_flag {
    /// The server remembered the reply from an earlier execution of the same request.
    pub const REPLAYED: u8 = 1;
    /// The data is lent instead of sent: `offset` is where in the body, after the results, the list
    /// of its [`crate::extents`] begins. The data does not change until the client's next request in
    /// this slot or a [`super::Kind::Release`], or until the lane ends.
    pub const LENT: u8 = 2;
    /// The request was being executed when the server was killed, and it is unknown whether it took
    /// effect.
    pub const UNKNOWN: u8 = 4;
    /// With [`LENT`]: writes that overlap the read may change the data at any time, and there is no
    /// loan to return.
    pub const LIVE: u8 = 8;
    /// An advance grant: the server reserves one more buffer for the session. With one later request
    /// that offers data, for a file or a disk, the client may send the first part of the data at once,
    /// at most `offset` bytes. The grant is valid on this lane, for
    /// [`AHEAD_MILLISECONDS`](crate::limits::AHEAD_MILLISECONDS) after the client receives it.
    pub const AHEAD: u8 = 16;
}

/// Flags of a [`Kind::Data`].
pub mod data_flag {
    /// Word b bytes of zeroes, instead of payload.
    pub const HOLE: u8 = 1;
    /// From a client: the fragment that follows its request under an advance grant. If the buffer is gone, or
    /// the request cannot take its data at once, the server discards the fragment and grants it again later.
    pub const AHEAD: u8 = 2;
}

/// The fixed part of every message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Kind of the message.
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
    /// Makes a header with zeroes in all fields but kind, slot and sequence.
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

    /// Marks a request whose first `bytes` offered bytes follow at once: see [`request_flag::AHEAD`].
    pub fn set_ahead(&mut self, bytes: u32) {
        self.flags |= request_flag::AHEAD;
        self.offset |= u64::from(bytes) << 32;
    }

    /// Removes that mark from a request and returns the number of offered bytes that follow at once.
    pub fn take_ahead(&mut self) -> u32 {
        if self.flags & request_flag::AHEAD == 0 {
            return 0;
        }
        let bytes = (self.offset >> 32) as u32;
        self.flags &= !request_flag::AHEAD;
        self.offset &= u64::from(u32::MAX);
        bytes
    }

    /// Encodes the header.
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

    /// Decodes and checks a header.
    ///
    /// # Errors
    /// An unknown kind, or a slot or length beyond [`crate::limits`].
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
            11 => Kind::Processor,
            _ => return Err(ProtocolError { what: "unknown kind of message", at: 0 }),
        };
        // Faster than a reader, and both sides do this for every message.
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
            Kind::Data => READ_BYTES_MAX,
            _ => 0,
        };
        if header.payload_bytes as usize > payload_max {
            return Err(ProtocolError { what: "payload longer than the limit", at: 12 });
        }
        Ok(header)
    }
}
