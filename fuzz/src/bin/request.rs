//! Fuzzes the decoders of request bodies, for files and for disks: encoding the result gives the same bytes.
#![no_main]

use towline_wire::request::{encode_compound, parse_compound, parse_disk_request};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(requests) = parse_compound(data) {
        assert_eq!(encode_compound(&requests), data);
    }
    if let Ok(request) = parse_disk_request(data) {
        assert_eq!(encode_compound(&[request]), data);
    }
});
