//! Fuzzes the decoders of the configuration passed to the processes of a `towline run`, and of what they ask
//! and tell its keeper: encoding and decoding the result gives the same value.
#![no_main]

use towline_instance::Config;
use towline_instance::watches::{Ask, Listed};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Some(config) = Config::parse(data) {
        let bytes = config.to_bytes();
        assert_eq!(Config::parse(&bytes).map(|again| again.to_bytes()), Some(bytes));
    }
    if let Some(ask) = Ask::parse(data) {
        let again = Ask::parse(&ask.to_bytes()).unwrap();
        assert_eq!((again.mount, again.mask, again.identity), (ask.mount, ask.mask, ask.identity));
    }
    if let Some(listed) = Listed::parse(data) {
        let parts = listed.to_packets();
        let again = parts.iter().flat_map(|part| Listed::parse(part).unwrap().names);
        assert_eq!(again.collect::<Vec<_>>(), listed.names);
    }
});
