//! Fuzzes the parser of journals of `towline disk copy`: writing and reading the result gives the same value.
#![no_main]
#![allow(dead_code)] // the program uses more of this module

#[path = "../../../crates/cli/src/disk/noted.rs"]
mod noted;

use noted::{Left, Piece, Stamp, Title};

/// Returns the title of the copy. Most inputs belong to other copies; the corpus has one of this copy.
fn title() -> Title {
    let stamp = |is: &str, sure| Stamp { is: is.to_owned(), size: 3, sure };
    Title {
        source: "a".to_owned(),
        source_is: stamp("1", true),
        target: "b".to_owned(),
        target_is: stamp("2", false),
    }
}

fn written(title: &Title, pieces: &[Piece]) -> String {
    let mut text = noted::line(title).expect("a title can be written");
    for piece in pieces {
        text += &noted::line(piece).expect("a piece can be written");
    }
    text
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let title = title();
    let _ = Left::read(data, &title);
    // With the right title, which a fuzzer would hardly find.
    let whole = [written(&title, &[]).as_bytes(), data].concat();
    let Left::Pieces(pieces) = Left::read(&whole[..], &title) else { panic!("its own title") };
    let again = written(&title, &pieces);
    assert_eq!(Left::read(again.as_bytes(), &title), Left::Pieces(pieces));
});
