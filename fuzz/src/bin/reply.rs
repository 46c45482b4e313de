//! Fuzzes the decoders of reply bodies, lists of lent extents and lists of disk extents: encoding the
//! result gives the same bytes.
#![no_main]

use towline_wire::codec::Field;
use towline_wire::disk::{encode_extents, parse_extents};
use towline_wire::extents::Extents;
use towline_wire::limits::LENT_EXTENTS_MAX;
use towline_wire::reply::parse_results;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(replies) = parse_results(data) {
        let mut bytes = Vec::new();
        replies.iter().for_each(|reply| reply.encode(&mut bytes));
        assert_eq!(bytes, data);
    }
    if let Ok(list) = Extents::parse(data) {
        let mut bytes = Vec::new();
        list.encode(&mut bytes);
        assert_eq!(bytes, data);
        // Bounded, so that the sum of the lengths cannot overflow.
        assert!(list.extents.len() <= LENT_EXTENTS_MAX && list.bytes() > 0 || data.len() == 4);
    }
    if let Ok(list) = parse_extents(data) {
        assert_eq!(encode_extents(&list), data);
    }
});
