//! Fuzzes the decoders of headers, hellos and welcomes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = towline_wire::Hello::parse(data);
    let _ = towline_wire::Welcome::parse(data);
    if let Some(head) = data.first_chunk()
        && let Ok(header) = towline_wire::Header::parse(head)
    {
        let again = towline_wire::Header::parse(&header.to_bytes());
        assert_eq!(again.map(|header| header.to_bytes()), Ok(header.to_bytes()));
    }
});
