//! Fuzzes the decoders of control messages and greetings between nodes of the crate `transfer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    towline_transfer::fuzzing::control(data);
    towline_transfer::fuzzing::greeting(data);
});
