//! URLs and addresses: what is read, shows itself as something that is read as the same.
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
    // Hosts are looked up, which is none of a fuzzer's business.
    if !text.starts_with("tcp://") {
        let _ = Address::parse(text);
    }
});
