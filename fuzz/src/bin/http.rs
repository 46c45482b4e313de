//! Fuzzes the parser of requests for the server's counters. Nothing that arrives later changes what a complete
//! request asks for.
#![no_main]

#[path = "../../../crates/cli/src/serve/http.rs"]
mod http;

use http::Asked;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let found = http::asked(data);
    match found {
        Asked::Metrics => assert!(data.starts_with(b"GET /metrics")),
        Asked::Other => assert!(data.starts_with(b"GET ")),
        Asked::Wrong => {}
    }
    if http::is_enough(data) {
        let more = [data, b"GET /metrics HTTP/1.1\r\n\r\n"].concat();
        assert!(http::is_enough(&more));
        // What is only too long may be in its first line yet.
        assert!(http::asked(&more) == found || !data.contains(&b'\n'));
    }
});
