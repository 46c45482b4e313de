//! The messages between nodes: the bodies of `Request` messages, each with a tag byte.
//!
//! Data is sent in `Data` messages: `offset` is the position in the transfer, words a and b are the low
//! and high half of the operation's number, and the flags say which side chose that number ([`stream`]).

use crate::ProtocolError;
use crate::choose::Strategy;
use crate::global::Part;
use crate::limits::{PARTS_MAX, REGIONS_MAX};
use towline_mem::Region;
use towline_wire::codec::{Field, Reader};
use towline_wire::{Header, Kind};

/// The kind of transfer that a `Data` message belongs to, in its flags.
pub(crate) mod stream {
    /// An answer to the receiver's `Fetch`.
    pub(crate) const FETCH: u8 = 0;
    /// A write-back that the receiver requested with `Grant`.
    pub(crate) const UPDATE: u8 = 1;
    /// Pushed by the sender into memory granted with `PushGrant`.
    pub(crate) const PUSH: u8 = 2;
}

/// A range of one entry of the owner's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) handle: u32,
    pub(crate) generation: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Range {
    /// Returns the range of a part, whose owner is known from the link.
    pub(crate) fn of(part: &Part) -> Self {
        Self {
            handle: part.handle,
            generation: part.generation,
            offset: part.offset,
            length: part.length,
        }
    }
}

/// A range of a memory that was passed to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Index among the memories passed with the message.
    pub(crate) memory: u8,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// What a `Fetch` requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Only a lease; the receiver will write.
    Lease,
    /// The data, by this strategy.
    Data(Strategy),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Control<'a> {
    /// A message of the program. If data was pushed before it: the number of that push, and the ranges
    /// of the sender's buffers that were pushed.
    Message { pushed: Option<(u64, Vec<Range>)>, bytes: &'a [u8] },
    /// Frees `bytes` bytes of the message window.
    Window { bytes: u32 },
    /// Requests ranges of the owner's buffers, and a lease on them until `Close`.
    Fetch { operation: u64, want: Want, granted: u64, ranges: Vec<Range> },
    /// The sender of `operation`'s data may send everything before `until`. `owner` is true if this
    /// comes from the receiver of a write-back, false if from that of a fetch.
    Grant { operation: u64, owner: bool, until: u64 },
    /// All data of a fetch was sent (inline: it is the payload), or a write-back was applied.
    Done { operation: u64 },
    /// The answer to a direct fetch: the places of the data in the owner's memory.
    Regions { operation: u64, regions: Vec<Region> },
    /// The answer to a mapping fetch: `memories` memories were sent before, over the other socket, and
    /// the data is at these places in them.
    Mapped { operation: u64, memories: u8, places: Vec<Place> },
    /// An operation that the receiver of this message started has failed at the sender.
    Failed { operation: u64, errno: u16 },
    /// The receiver of data is done with it: acknowledges, and returns the lease. With the number of a
    /// write-back: the rest of it will not be sent.
    Close { operation: u64, acknowledged: bool },
    /// Grants `buffers` buffers of one fragment each, to push into.
    PushGrant { buffers: u32 },
    /// Writes back: inline (the payload), after grants, or from the data pushed as `pushed`.
    Update { operation: u64, strategy: Strategy, pushed: u64, ranges: Vec<Range> },
}

impl Control<'_> {
    /// Encodes the body of this message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            Self::Message { pushed, bytes } => {
                out.push(1);
                out.push(u8::from(pushed.is_some()));
                if let Some((number, ranges)) = pushed {
                    number.encode(&mut out);
                    encode_ranges(ranges, &mut out);
                }
                bytes.encode(&mut out);
            }
            Self::Window { bytes } => {
                out.push(2);
                bytes.encode(&mut out);
            }
            Self::Fetch { operation, want, granted, ranges } => {
                out.push(3);
                operation.encode(&mut out);
                out.push(match want {
                    Want::Lease => 0,
                    Want::Data(strategy) => strategy_code(*strategy),
                });
                granted.encode(&mut out);
                encode_ranges(ranges, &mut out);
            }
            Self::Grant { operation, owner, until } => {
                out.push(4);
                operation.encode(&mut out);
                out.push(u8::from(*owner));
                until.encode(&mut out);
            }
            Self::Done { operation } => {
                out.push(5);
                operation.encode(&mut out);
            }
            Self::Regions { operation, regions } => {
                out.push(6);
                operation.encode(&mut out);
                (regions.len() as u16).encode(&mut out);
                for region in regions {
                    region.address.encode(&mut out);
                    region.length.encode(&mut out);
                }
            }
            Self::Mapped { operation, memories, places } => {
                out.push(7);
                operation.encode(&mut out);
                memories.encode(&mut out);
                (places.len() as u16).encode(&mut out);
                for place in places {
                    place.memory.encode(&mut out);
                    place.offset.encode(&mut out);
                    place.length.encode(&mut out);
                }
            }
            Self::Failed { operation, errno } => {
                out.push(8);
                operation.encode(&mut out);
                errno.encode(&mut out);
            }
            Self::Close { operation, acknowledged } => {
                out.push(9);
                operation.encode(&mut out);
                out.push(u8::from(*acknowledged));
            }
            Self::PushGrant { buffers } => {
                out.push(10);
                buffers.encode(&mut out);
            }
            Self::Update { operation, strategy, pushed, ranges } => {
                out.push(11);
                operation.encode(&mut out);
                out.push(strategy_code(*strategy));
                pushed.encode(&mut out);
                encode_ranges(ranges, &mut out);
            }
        }
        out
    }
}

impl<'a> Control<'a> {
    /// Decodes a body.
    pub(crate) fn decode(body: &'a [u8]) -> Result<Self, ProtocolError> {
        let mut reader = Reader::new(body);
        let r = &mut reader;
        let message = match u8::decode(r)? {
            1 => {
                let pushed = match flag(r)? {
                    true => Some((Field::decode(r)?, decode_ranges(r)?)),
                    false => None,
                };
                Self::Message { pushed, bytes: Field::decode(r)? }
            }
            2 => Self::Window { bytes: Field::decode(r)? },
            3 => Self::Fetch {
                operation: Field::decode(r)?,
                want: match u8::decode(r)? {
                    0 => Want::Lease,
                    code => Want::Data(strategy_of(code, r)?),
                },
                granted: Field::decode(r)?,
                ranges: decode_ranges(r)?,
            },
            4 => Self::Grant {
                operation: Field::decode(r)?,
                owner: flag(r)?,
                until: Field::decode(r)?,
            },
            5 => Self::Done { operation: Field::decode(r)? },
            6 => Self::Regions { operation: Field::decode(r)?, regions: decode_regions(r)? },
            7 => Self::Mapped {
                operation: Field::decode(r)?,
                memories: Field::decode(r)?,
                places: decode_places(r)?,
            },
            8 => Self::Failed { operation: Field::decode(r)?, errno: Field::decode(r)? },
            9 => Self::Close { operation: Field::decode(r)?, acknowledged: flag(r)? },
            10 => Self::PushGrant { buffers: Field::decode(r)? },
            11 => Self::Update {
                operation: Field::decode(r)?,
                strategy: {
                    let code = u8::decode(r)?;
                    strategy_of(code, r)?
                },
                pushed: Field::decode(r)?,
                ranges: decode_ranges(r)?,
            },
            _ => return Err(reader.error("unknown message tag")),
        };
        if !reader.is_empty() {
            return Err(reader.error("bytes after the message"));
        }
        Ok(message)
    }
}

fn flag(reader: &mut Reader<'_>) -> Result<bool, ProtocolError> {
    match u8::decode(reader)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(reader.error("flag is neither 0 nor 1")),
    }
}

fn strategy_code(strategy: Strategy) -> u8 {
    match strategy {
        Strategy::Inline => 1,
        Strategy::Push => 2,
        Strategy::Pull => 3,
        Strategy::PullDirect => 4,
        Strategy::Map => 5,
    }
}

fn strategy_of(code: u8, reader: &Reader<'_>) -> Result<Strategy, ProtocolError> {
    Ok(match code {
        1 => Strategy::Inline,
        2 => Strategy::Push,
        3 => Strategy::Pull,
        4 => Strategy::PullDirect,
        5 => Strategy::Map,
        _ => return Err(reader.error("unknown strategy")),
    })
}

fn encode_ranges(ranges: &[Range], out: &mut Vec<u8>) {
    (ranges.len() as u16).encode(out);
    for range in ranges {
        range.handle.encode(out);
        range.generation.encode(out);
        range.offset.encode(out);
        range.length.encode(out);
    }
}

fn decode_ranges(reader: &mut Reader<'_>) -> Result<Vec<Range>, ProtocolError> {
    let count = usize::from(u16::decode(reader)?);
    if count == 0 || count > PARTS_MAX {
        return Err(reader.error("no ranges, or more than the limit"));
    }
    let (mut ranges, mut total) = (Vec::with_capacity(count), 0u64);
    for _ in 0..count {
        let range = Range {
            handle: Field::decode(reader)?,
            generation: Field::decode(reader)?,
            offset: Field::decode(reader)?,
            length: Field::decode(reader)?,
        };
        let end = range.offset.checked_add(range.length);
        let sum = total.checked_add(range.length);
        let (Some(_), Some(sum), 1..) = (end, sum, range.length) else {
            return Err(reader.error("range is empty or too long"));
        };
        total = sum;
        ranges.push(range);
    }
    Ok(ranges)
}

fn decode_regions(reader: &mut Reader<'_>) -> Result<Vec<Region>, ProtocolError> {
    let count = usize::from(u16::decode(reader)?);
    if count == 0 || count > REGIONS_MAX {
        return Err(reader.error("no regions, or more than the limit"));
    }
    (0..count)
        .map(|_| Ok(Region { address: Field::decode(reader)?, length: Field::decode(reader)? }))
        .collect()
}

fn decode_places(reader: &mut Reader<'_>) -> Result<Vec<Place>, ProtocolError> {
    let count = usize::from(u16::decode(reader)?);
    if count == 0 || count > PARTS_MAX {
        return Err(reader.error("no places, or more than the limit"));
    }
    (0..count)
        .map(|_| {
            Ok(Place {
                memory: Field::decode(reader)?,
                offset: Field::decode(reader)?,
                length: Field::decode(reader)?,
            })
        })
        .collect()
}

/// Returns the header of a data message.
pub(crate) fn data_header(flags: u8, operation: u64, offset: u64, length: u64) -> Header {
    let mut header = Header::new(Kind::Data, 0, 0);
    header.flags = flags;
    header.offset = offset;
    header.payload_bytes = length as u32; // at most a fragment
    header.word_a = operation as u32;
    header.word_b = (operation >> 32) as u32;
    header
}

/// Returns the operation number of a data message.
pub(crate) fn operation_of(header: &Header) -> u64 {
    u64::from(header.word_a) | u64::from(header.word_b) << 32
}

/// Encodes a control message that a payload of `payload_bytes` bytes follows.
pub(crate) fn control_bytes(control: &Control<'_>, payload_bytes: u64) -> Vec<u8> {
    let body = control.encode();
    let mut header = Header::new(Kind::Request, 0, 0);
    header.body_bytes = body.len() as u32;
    header.payload_bytes = payload_bytes as u32; // at most the inline limit
    let mut bytes = header.to_bytes().to_vec();
    bytes.extend_from_slice(&body);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choose::Strategy;
    use proptest::prelude::{Just, any, prop_assert_eq, prop_oneof, proptest};

    proptest! {
        #[test]
        fn what_is_read_is_written_the_same(
            tag in 0u8..13,
            rest in proptest::collection::vec(prop_oneof![Just(0u8), Just(1u8), any::<u8>()], 0..80),
        ) {
            let body = [&[tag], &rest[..]].concat();
            if let Ok(message) = Control::decode(&body) {
                prop_assert_eq!(message.encode(), body);
            }
        }
    }

    #[test]
    fn every_message_is_read_as_it_was_written() {
        let range = Range { handle: 3, generation: u64::MAX, offset: 5, length: 7 };
        let region = Region { address: 1 << 40, length: 9 };
        let all = [
            Control::Message { pushed: None, bytes: b"hello" },
            Control::Message { pushed: Some((4, vec![range; 2])), bytes: b"" },
            Control::Window { bytes: 77 },
            Control::Fetch {
                operation: 1,
                want: Want::Data(Strategy::Map),
                granted: 2,
                ranges: vec![range; 3],
            },
            Control::Fetch { operation: 1, want: Want::Lease, granted: 0, ranges: vec![range] },
            Control::Grant { operation: 9, owner: true, until: 10 },
            Control::Done { operation: 8 },
            Control::Regions { operation: 8, regions: vec![region; 2] },
            Control::Mapped {
                operation: 8,
                memories: 2,
                places: vec![Place { memory: 1, offset: 2, length: 3 }],
            },
            Control::Failed { operation: 8, errno: 116 },
            Control::Close { operation: 8, acknowledged: false },
            Control::PushGrant { buffers: 6 },
            Control::Update {
                operation: 8,
                strategy: Strategy::Push,
                pushed: 2,
                ranges: vec![range],
            },
        ];
        for message in all {
            let bytes = message.encode();
            assert_eq!(Control::decode(&bytes).unwrap(), message);
            for cut in 0..bytes.len() {
                assert!(Control::decode(&bytes[..cut]).is_err(), "{message:?} cut at {cut}");
            }
        }
        assert!(Control::decode(&[99]).is_err());
    }
}
