//! What the processes of a `towline run` are told: read and written again as it was.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some(config) = towline_instance::Config::parse(data) {
        let bytes = config.to_bytes();
        assert_eq!(bytes, data[..bytes.len()]);
    }
});
