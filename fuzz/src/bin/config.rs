//! Configuration files of the server, and exports and sizes as the command line has them.
#![no_main]
#![allow(dead_code)] // the program uses more of these modules

#[path = "../../../crates/cli/src/serve/exports.rs"]
mod exports;
#[path = "../../../crates/cli/src/serve/file.rs"]
mod file;

libfuzzer_sys::fuzz_target!(|text: &str| {
    // Addresses are looked up, which is none of a fuzzer's business.
    if !text.contains("tcp://") {
        let _ = file::parse(text);
    }
    let _ = exports::parse_directory(text);
    let _ = exports::parse_memory(text);
    let _ = exports::parse_disk(text);
    let _ = exports::parse_bytes(text);
});
