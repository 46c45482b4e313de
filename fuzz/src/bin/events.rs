//! Fuzzes the decoder of events of watched files: encoding the result gives the same bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut bytes = Vec::new();
    for event in towline_wire::event::Events::new(data) {
        let Ok(event) = event else { return };
        event.encode(&mut bytes);
    }
    assert_eq!(bytes, data);
});
