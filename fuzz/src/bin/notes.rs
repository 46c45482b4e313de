//! Lines that processes of a `towline run` leave: what is read, is the same when it is written and
//! read again.
#![no_main]

use towline_instance::notes::Note;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // As they are read: the file is cut at the ends of lines.
    for line in data.split(|byte| *byte == b'\n') {
        if let Some(note) = Note::parse(line) {
            let written = note.to_bytes();
            let (end, again) = written.split_last().expect("a line has an end");
            assert!(*end == b'\n' && !again.contains(&b'\n'));
            assert_eq!(Note::parse(again), Some(note));
        }
    }
});
