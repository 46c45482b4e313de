#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = towline_wire::Hello::parse(data);
    let _ = towline_wire::Welcome::parse(data);
    if let Some(head) = data.first_chunk() {
        let _ = towline_wire::Header::parse(head);
    }
});
