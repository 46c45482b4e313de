//! Fuzzes the decoder of the configuration passed to the processes of a `towline run`: encoding and decoding
//! the result gives the same value.
#![no_main]

use towline_instance::Config;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some(config) = Config::parse(data) {
        let bytes = config.to_bytes();
        assert_eq!(Config::parse(&bytes).map(|again| again.to_bytes()), Some(bytes));
    }
});
