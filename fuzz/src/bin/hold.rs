//! Fuzzes the decoder of the packets between a server and the process that holds its open files.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| towline_server::fuzzing::held(data));
