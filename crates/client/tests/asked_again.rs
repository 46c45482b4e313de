//! Requests that are sent again because their lane ended, where the server does not remember a reply.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, Raw, hello, hello_message, message, request, setup};
use std::path::Path;
use towline_server::EngineWish;
use towline_wire::reply::parse_results;
use towline_wire::request::CURRENT;
use towline_wire::{Header, Hello, Kind, Reply, Request, Welcome};

/// Counts descriptors of this process that refer to a file.
fn open_descriptors(path: &Path) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|fd| std::fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to == path))
        .count()
}

/// A new lane of a session.
fn joined(port: u16, welcome: &Welcome) -> Raw {
    let mut raw = Raw::connect(port);
    let Welcome { session, secret, .. } = *welcome;
    raw.send(&hello_message(&Hello { session, secret, ..hello() }));
    let (_, body) = raw.receive().unwrap();
    assert_ne!(Welcome::parse(&body).unwrap().resumed, 0);
    raw
}

/// The client knows only one handle: what was opened for a reply that it never got is closed.
#[test]
fn what_is_opened_once_more_is_open_once() {
    let setup = setup(EngineWish::Automatic);
    let path = setup.data.join("file");
    std::fs::write(&path, b"content").unwrap();
    let path = path.canonicalize().unwrap();
    let (mut raw, welcome) = Raw::greeted(setup.port());
    let attach = Request::Attach { name: b"dir" };
    let open = Request::Open { base: CURRENT, flags: 0, mode: 0, path: b"file" };
    let read = Request::Read { handle: CURRENT, offset: 0, length: 100 };
    let message = request(0, 1, &[attach, open, read], 0);
    for _ in 0..20 {
        raw.send(&message);
        let (header, _) = raw.receive().unwrap();
        assert_eq!(header.kind, Kind::Reply);
        // The reply is lost; the client joins its session again and repeats the request.
        raw = joined(setup.port(), &welcome);
    }
    raw.send(&message);
    raw.receive().unwrap();
    assert_eq!(open_descriptors(&path), 1);
}

/// The session goes on after its lane has ended, and so do its slots.
#[test]
fn the_slot_of_a_malformed_request_is_free_again() {
    let setup = setup(EngineWish::Automatic);
    let (mut raw, welcome) = Raw::greeted(setup.port());
    let malformed = |slot, body: &[u8]| message(Header::new(Kind::Request, slot, 1), body, &[]);
    let mut of_disk = towline_wire::request::encode_compound(&[Request::DiskInfo { disk: 1 }]);
    of_disk.push(0);
    for (slot, body) in [(0, &[0xff][..]), (1, &of_disk)] {
        // Whoever repeats it is thrown out again.
        for _ in 0..2 {
            raw.send(&malformed(slot, body));
            assert!(raw.thrown_out());
            raw = joined(setup.port(), &welcome);
        }
        raw.send(&request(slot, 2, &[Request::Attach { name: b"dir" }], 0));
        let (header, body) = raw.receive().unwrap();
        assert_eq!((header.slot, header.sequence), (slot, 2));
        assert!(matches!(parse_results(&body).unwrap()[..], [Reply::Opened { .. }]));
    }
}

#[test]
fn a_write_whose_data_was_wrong_goes_on_when_it_is_sent_again() {
    let setup = setup(EngineWish::Automatic);
    let (mut raw, welcome) = Raw::greeted(setup.port());
    let attach = Request::Attach { name: b"dir" };
    let open = Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: b"file" };
    let write = Request::Write { handle: CURRENT, offset: 0, length: 4, flags: 0 };
    let offer = request(0, 1, &[attach, open, write], 4);
    let data = |offset| {
        let mut header = Header::new(Kind::Data, 0, 1);
        header.offset = offset;
        message(header, &[], b"data")
    };
    raw.send(&offer);
    assert_eq!(raw.receive().unwrap().0.kind, Kind::Grant);
    raw.send(&data(1));
    assert!(raw.thrown_out());
    raw = joined(setup.port(), &welcome);
    raw.send(&offer);
    assert_eq!(raw.receive().unwrap().0.kind, Kind::Grant);
    raw.send(&data(0));
    let (_, body) = raw.receive().unwrap();
    let results = parse_results(&body).unwrap();
    assert!(matches!(results[2], Reply::Wrote { length: 4, .. }), "{results:?}");
    assert_eq!(std::fs::read(setup.data.join("file")).unwrap(), b"data");
}
