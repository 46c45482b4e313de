//! Packed descriptors of aggregates.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(global) = towline_transfer::Global::unpack(data) {
        // There is one encoding of what was accepted.
        assert_eq!(global.pack().expect("what was unpacked can be packed"), data);
    }
});
