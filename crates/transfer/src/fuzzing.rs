//! Private decoders of this crate, for the fuzzers.

use crate::greeting::{GREETING_BYTES, Greeting};
use crate::message::Control;
use towline_wire::Kind;
use towline_wire::limits::HEADER_BYTES;

/// Decodes the body of a control message; an accepted body must be its only encoding.
pub fn control(body: &[u8]) {
    if let Ok(message) = Control::decode(body) {
        assert_eq!(message.encode(), body);
    }
}

/// Parses the greeting of a node.
pub fn greeting(bytes: &[u8]) {
    if let Some(bytes) = bytes.first_chunk::<GREETING_BYTES>()
        && let Ok(greeting) = Greeting::parse(bytes, Kind::Hello)
    {
        let again = greeting.to_bytes(Kind::Hello);
        // Header words without a meaning here may have any value.
        assert_eq!(again[HEADER_BYTES..], bytes[HEADER_BYTES..]);
    }
}
