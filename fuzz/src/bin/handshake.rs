//! Fuzzes the decoders of headers, hellos and welcomes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let version = towline_wire::hello::version_of(data);
    if let Ok(hello) = towline_wire::Hello::parse(data) {
        assert!(version.is_none_or(|version| version == hello.version));
    }
    if let Ok(welcome) = towline_wire::Welcome::parse(data) {
        assert!(version.is_none_or(|version| version == welcome.version));
    }
    if let Some(head) = data.first_chunk()
        && let Ok(header) = towline_wire::Header::parse(head)
    {
        let again = towline_wire::Header::parse(&header.to_bytes());
        assert_eq!(again.map(|header| header.to_bytes()), Ok(header.to_bytes()));
    }
});
