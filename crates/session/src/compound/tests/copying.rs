//! What is read as copies, not as pages of files, which can be gone when the reply is sent.

use super::*;

#[test]
fn a_file_that_becomes_shorter_is_read_as_it_is_when_its_pages_are_copied() {
    const LENGTH: u32 = 100_000;
    const SHORTER: u32 = 50_001;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("f");
    std::fs::write(&path, b"").unwrap();
    let mut world = World::new(DirectoryStore::new(directory.path(), false).unwrap(), false);
    let (handle, base) = (world.open(b"f", 0).handle(), world.root);
    for request in [
        Request::Read { handle, offset: 0, length: LENGTH },
        Request::ReadPath { base, flags: 0, length: LENGTH, path: b"f" },
    ] {
        std::fs::write(&path, [7; LENGTH as usize]).unwrap();
        let mut compound = Compound::new(0, 1, &encode_compound(&[request]), &[], 0).unwrap();
        compound.copy();
        let (files, caller) = (world.files.clone(), caller());
        let mut files = files.lock();
        let files = Table::Held(&mut files);
        let exports = &world.export;
        let mut context = Context { files, exports, caller: &caller, session: 1 };
        let Step::Block(_, work, bytes) = compound.run(None, &mut context) else {
            panic!("the core copies");
        };
        assert_eq!(bytes, LENGTH.into());
        std::fs::File::options().write(true).open(&path).unwrap().set_len(SHORTER.into()).unwrap();
        compound.unblocked(work());
        assert!(matches!(compound.run(None, &mut context), Step::Finished));
        let (results, data, ..) = compound.reply();
        let results = parse_results(results).unwrap();
        assert_eq!(results[..], [Reply::Read { length: SHORTER, errno: 0 }]);
        assert!(data.to_vec().unwrap() == [7; SHORTER as usize]);
    }
}

#[test]
fn only_what_must_not_be_sent_again_copies_what_it_reads() {
    let attach = Request::Attach { name: b"x" };
    let open = |flags| Request::Open { base: CURRENT, flags, mode: 0, path: b"f" };
    let read = Request::Read { handle: CURRENT, offset: 0, length: 100_000 };
    let (close, close_other) = (Request::Close { handle: CURRENT }, Request::Close { handle: 7 });
    let exclusive = open_flag::CREATE | open_flag::EXCLUSIVE;
    let cases: [(&[Request<'_>], bool); 7] = [
        (&[read], false),
        (&[open(0), read], false),
        (&[attach, open(READ_WRITE), read, close], false),
        (&[open(exclusive), read], true),
        (&[open(open_flag::TRUNCATE | READ_WRITE), read], true),
        (&[close_other, read], true),
        (&[open(0), close], false),
    ];
    for (requests, copies) in cases {
        let compound = Compound::new(0, 1, &encode_compound(requests), &[], 0).unwrap();
        assert_eq!(compound.copies, copies, "{requests:?}");
    }
}
