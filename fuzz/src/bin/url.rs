//! Fuzzes the parsers of URLs and addresses: parsing the text of a URL gives the same URL.
#![no_main]

use towline_client::Url;
use towline_net::address::Address;

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let Ok(url) = Url::parse(text) {
        assert_eq!(Url::parse(&url.to_string()).as_ref(), Ok(&url), "shown as {url}");
        let below = url.join(b"a\xff %?");
        assert_eq!(Url::parse(&below.to_string()).as_ref(), Ok(&below), "shown as {below}");
    }
    let _ = nbd_conformance::uri::parse(text);
    // Parsing an address looks up its host, which a fuzzer should not do.
    if !text.starts_with("tcp://") {
        let _ = Address::parse(text);
    }
});
