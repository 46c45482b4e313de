//! Fuzzes the parser of notes left by the processes of a `towline run`: writing and reading a note gives
//! the same note.
#![no_main]

use towline_instance::notes::Note;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // As in the program, which splits the file at newlines.
    for line in data.split(|byte| *byte == b'\n') {
        if let Some(note) = Note::parse(line) {
            let written = note.to_bytes();
            let (end, again) = written.split_last().expect("a line has an end");
            assert!(*end == b'\n' && !again.contains(&b'\n'));
            assert_eq!(Note::parse(again), Some(note));
        }
    }
});
