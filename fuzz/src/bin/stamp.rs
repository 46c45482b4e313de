//! Fuzzes the parser of stamps on partial copies of `towline cp --resume`: writing and reading an accepted
//! stamp gives the same value.
#![no_main]

#[path = "../../../crates/cli/src/copy/stamp.rs"]
mod stamp;

use stamp::Stamp;
use towline_client::{Attr, Timestamp};

libfuzzer_sys::fuzz_target!(|input: (u64, i64, u32, &[u8])| {
    let (size, seconds, nanoseconds, value) = input;
    let modified = Timestamp::new(seconds, nanoseconds);
    let stamp = Stamp::new(&Attr { size, modified, ..Attr::default() });
    let _ = stamp.read(value);
    // With the right source, which a fuzzer would hardly find.
    let own = stamp.text(0);
    let value = [own.strip_suffix('0').expect("the end of it").as_bytes(), value].concat();
    if let Some(done) = stamp.read(&value) {
        assert_eq!(stamp.read(stamp.text(done).as_bytes()), Some(done));
    }
});
