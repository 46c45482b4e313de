//! Requests that are sent again because their reply was lost, where the server does not remember
//! the reply.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{Raw, hello, hello_message, request, setup};
use std::path::Path;
use towline_server::EngineWish;
use towline_wire::request::CURRENT;
use towline_wire::{Hello, Kind, Request, Welcome};

/// Counts descriptors of this process that refer to a file.
fn open_descriptors(path: &Path) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|fd| std::fs::read_link(fd.as_ref().unwrap().path()).is_ok_and(|to| to == path))
        .count()
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
        raw = Raw::connect(setup.port());
        let session = Hello { session: welcome.session, secret: welcome.secret, ..hello() };
        raw.send(&hello_message(&session));
        let (_, body) = raw.receive().unwrap();
        assert_ne!(Welcome::parse(&body).unwrap().resumed, 0);
    }
    raw.send(&message);
    raw.receive().unwrap();
    assert_eq!(open_descriptors(&path), 1);
}
