//! Fuzzes the decoder of packed aggregate descriptors.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(global) = towline_transfer::Global::unpack(data) {
        // Every accepted value has only one encoding.
        assert_eq!(global.pack().expect("what was unpacked can be packed"), data);
    }
});
