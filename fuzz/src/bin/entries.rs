//! Fuzzes the decoder of directory entries with attributes: encoding the result gives the same bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut bytes = Vec::new();
    for entry in towline_wire::entry::Entries::new(data) {
        let Ok(entry) = entry else { return };
        entry.encode(&mut bytes);
    }
    assert_eq!(bytes, data);
});
