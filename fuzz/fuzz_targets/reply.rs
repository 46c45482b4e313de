#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = towline_wire::reply::parse_results(data);
});
