//! Tests: messages of every kind come back as they were encoded. The macros that define the messages make
//! them, so that no kind can be left out.

use crate::codec::{Field, Reader};
use crate::reply::parse_results;
use crate::request::{encode_compound, parse_compound};
use crate::{Attr, Hello, ProtocolError, Reply, Request, StatFs, Timestamp, Welcome};
use proptest::prelude::*;
use proptest::sample::Index;

/// Where the fields of messages come from.
pub(crate) struct Draw<'a> {
    /// Repeated for ever.
    numbers: std::iter::Cycle<std::slice::Iter<'a, u8>>,
    /// Byte strings are parts of this.
    text: &'a [u8],
}

impl<'a> Draw<'a> {
    fn new(numbers: &'a [u8], text: &'a [u8]) -> Self {
        Self { numbers: numbers.iter().cycle(), text }
    }
}

/// A field of a message.
pub(crate) trait Drawn<'a> {
    fn drawn(draw: &mut Draw<'a>) -> Self;
}

macro_rules! drawn {
    ($($kind:ty),*) => {$(
        impl Drawn<'_> for $kind {
            fn drawn(draw: &mut Draw<'_>) -> Self {
                let bytes: Vec<u8> = draw.numbers.by_ref().take(size_of::<Self>()).copied().collect();
                Self::decode(&mut Reader::new(&bytes)).unwrap()
            }
        }
    )*};
}

drawn!(u8, u16, u32, u64, Timestamp, Attr, StatFs);

impl<'a> Drawn<'a> for &'a [u8] {
    fn drawn(draw: &mut Draw<'a>) -> Self {
        let start = usize::from(u16::drawn(draw)) % (draw.text.len() + 1);
        let length = usize::from(u16::drawn(draw)) % (draw.text.len() + 1 - start);
        &draw.text[start..start + length]
    }
}

/// Returns the bytes of a message without some at the end, but with its first one.
fn cut(bytes: &[u8], at: Index) -> &[u8] {
    &bytes[..1 + at.index(bytes.len())]
}

/// Checks that a structure comes back, and only from exactly its bytes.
fn comes_back<T: PartialEq + std::fmt::Debug>(
    structure: &T,
    encode: fn(&T, &mut Vec<u8>),
    parse: fn(&[u8]) -> Result<T, ProtocolError>,
    at: Index,
) {
    let mut bytes = Vec::new();
    encode(structure, &mut bytes);
    assert_eq!(parse(&bytes).as_ref(), Ok(structure));
    assert!(parse(&bytes[..at.index(bytes.len())]).is_err());
    bytes.push(0);
    assert!(parse(&bytes).is_err());
}

proptest! {
    #[test]
    fn messages_of_every_kind_come_back(
        numbers in proptest::collection::vec(any::<u8>(), 1..200),
        text in proptest::collection::vec(1u8.., 0..200),
        at in any::<Index>(),
    ) {
        let mut draw = Draw::new(&numbers, &text);
        for request in Request::of_every_kind(&mut draw) {
            let body = encode_compound(&[request]);
            prop_assert_eq!(&parse_compound(&body).unwrap()[..], &[request]);
            let part = cut(&body, at);
            prop_assert!(part.len() == body.len() || parse_compound(part).is_err(), "{:?}", request);
        }
        for reply in Reply::of_every_kind(&mut draw) {
            let mut body = Vec::new();
            reply.encode(&mut body);
            prop_assert_eq!(&parse_results(&body).unwrap()[..], &[reply]);
            let part = cut(&body, at);
            prop_assert!(part.len() == body.len() || parse_results(part).is_err(), "{:?}", reply);
        }
        comes_back(&Hello::drawn(&mut draw), Hello::encode, Hello::parse, at);
        comes_back(&Welcome::drawn(&mut draw), Welcome::encode, Welcome::parse, at);
    }
}
