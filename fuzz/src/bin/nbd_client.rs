//! Fuzzes what NBD servers send to our client: handshake, extents, replies.
#![no_main]

use towline_attach::nbd::fuzzing;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((which, answers)) = data.split_first() else { return };
    match which % 4 {
        0 => fuzzing::handshake("d", answers),
        // The empty name, for which servers may tell the disk's own one.
        1 => fuzzing::handshake("", answers),
        2 => {
            // Disks that are asked for in one range, and in several.
            let sizes = [1 << 20, 5 << 30];
            fuzzing::extents(sizes[usize::from(which >> 7)], answers);
        }
        _ => {
            let Some((cut, answers)) = answers.split_first_chunk() else { return };
            fuzzing::replies(answers, usize::from(u16::from_le_bytes(*cut)));
        }
    }
});
