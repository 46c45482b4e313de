//! Fuzzes the parsers of the server's configuration files, and of exports and sizes on the command line.
#![no_main]
#![allow(dead_code)] // the program uses more of these modules

#[path = "../../../crates/cli/src/serve/exports.rs"]
mod exports;
#[path = "../../../crates/cli/src/serve/file.rs"]
mod file;

libfuzzer_sys::fuzz_target!(|text: &str| {
    // Parsing an address looks up its host, which a fuzzer should not do.
    if !text.contains("tcp://") {
        let _ = file::parse(text);
    }
    let _ = exports::parse_directory(text);
    let _ = exports::parse_memory(text);
    let _ = exports::parse_disk(text);
    let _ = exports::parse_bytes(text);
});
