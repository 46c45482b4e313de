//! Decoders of this crate that are private, for the fuzzers.

use crate::greeting::{GREETING_BYTES, Greeting};
use crate::message::Control;
use towline_wire::Kind;
use towline_wire::limits::HEADER_BYTES;

/// The body of a control message: what is accepted has this one encoding.
pub fn control(body: &[u8]) {
    if let Ok(message) = Control::decode(body) {
        assert_eq!(message.encode(), body);
    }
}

/// The greeting of a node.
pub fn greeting(bytes: &[u8]) {
    if let Some(bytes) = bytes.first_chunk::<GREETING_BYTES>()
        && let Ok(greeting) = Greeting::parse(bytes, Kind::Hello)
    {
        let again = greeting.to_bytes(Kind::Hello);
        // Words of the header that have no meaning here may be anything.
        assert_eq!(again[HEADER_BYTES..], bytes[HEADER_BYTES..]);
    }
}
