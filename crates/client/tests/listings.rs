//! Many listings of one session at once: other threads make some of them while the other core is idle.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{Raw, Setup, counter, eventually, request, setup};
use std::collections::BTreeSet;
use towline_server::EngineWish;
use towline_wire::entry::Entries;
use towline_wire::reply::parse_results;
use towline_wire::request::{CURRENT, listed, open_flag};
use towline_wire::{Errno, Kind, Reply, Request};

/// Directories, and files in each. One is a file itself, which cannot be listed.
const DIRECTORIES: u16 = 16;
const FILES: usize = 60;
const NO_DIRECTORY: u16 = 5;
/// Flags of files that are made.
const CREATE_NEW: u32 = open_flag::CREATE | open_flag::EXCLUSIVE | 1;

fn name_of(directory: u16) -> String {
    format!("d{directory}")
}

fn names_in(directory: u16) -> BTreeSet<Vec<u8>> {
    let files = (0..FILES).map(|file| format!("{directory}.{file}"));
    files.chain([".".to_owned(), "..".to_owned()]).map(String::into_bytes).collect()
}

/// Makes the directories in both exports.
fn fill(setup: &Setup) {
    let client = setup.client();
    for export in [&b"dir"[..], b"mem"] {
        let top = client.attach(export).unwrap();
        for directory in 0..DIRECTORIES {
            let path = name_of(directory);
            if directory == NO_DIRECTORY {
                top.start_create(path.as_bytes(), CREATE_NEW, 0o644).unwrap().wait().unwrap();
                continue;
            }
            top.make_directory(path.as_bytes(), 0o755).unwrap();
            for name in names_in(directory).iter().filter(|name| !name.starts_with(b".")) {
                top.start_create(&[path.as_bytes(), b"/", name].concat(), CREATE_NEW, 0o644)
                    .unwrap()
                    .wait()
                    .unwrap();
            }
        }
    }
}

/// A session that lists the directories of an export.
struct Lister {
    raw: Raw,
    top: u64,
    sequence: u32,
}

impl Lister {
    fn new(setup: &Setup, export: &[u8]) -> Self {
        let (mut raw, _) = Raw::greeted(setup.port());
        raw.send(&request(0, 1, &[Request::Attach { name: export }], 0));
        let (_, body) = raw.receive().unwrap();
        let Reply::Opened { handle: top, .. } = parse_results(&body).unwrap()[0] else {
            panic!("not attached");
        };
        Self { raw, top, sequence: 1 }
    }

    /// Lists all directories, `together` at a time.
    fn list_all(&mut self, together: u16) {
        self.sequence += 1;
        for first in (0..DIRECTORIES).step_by(together.into()) {
            let asked: Vec<u16> = (first..DIRECTORIES.min(first + together)).collect();
            // One packet, so that they arrive at once.
            let all: Vec<u8> = asked.iter().flat_map(|directory| self.ask(*directory)).collect();
            self.raw.send(&all);
            let answered: BTreeSet<u16> = asked.iter().map(|_| self.take_answer()).collect();
            assert!(answered.into_iter().eq(asked));
        }
    }

    fn ask(&self, directory: u16) -> Vec<u8> {
        let path = name_of(directory);
        let (base, path) = (self.top, path.as_bytes());
        let requests = [
            Request::Open { base, flags: open_flag::NO_FOLLOW, mode: 0, path },
            Request::ReadDir {
                handle: CURRENT,
                cookie: 0,
                length: 1 << 16,
                attributes: listed::ATTRIBUTES,
            },
            Request::Close { handle: CURRENT },
        ];
        request(directory, self.sequence, &requests, 0)
    }

    /// Checks an answer and returns its slot, the number of the directory.
    fn take_answer(&mut self) -> u16 {
        let (header, body) = self.raw.receive().unwrap();
        assert_eq!((header.kind, header.sequence), (Kind::Reply, self.sequence));
        let (results, payload) = body.split_at(header.body_bytes as usize);
        let results = parse_results(results).unwrap();
        if header.slot == NO_DIRECTORY {
            assert_eq!(results.len(), 2);
            assert_eq!(results[1], Reply::Failed { errno: Errno::ENOTDIR.0 });
            return header.slot;
        }
        assert!(matches!(results[1], Reply::Listed { end: 1, .. }), "{results:?}");
        assert_eq!(results[2], Reply::Done {});
        let entries: Vec<_> = Entries::new(payload).collect::<Result<_, _>>().unwrap();
        assert!(entries.iter().all(|entry| entry.attr.is_some() || entry.name == b".."));
        let names: BTreeSet<_> = entries.iter().map(|entry| entry.name.to_vec()).collect();
        assert_eq!((names.len(), names), (entries.len(), names_in(header.slot)));
        header.slot
    }
}

#[test]
fn listings_that_come_together_are_made_by_several_threads() {
    let setup = setup(EngineWish::Automatic);
    fill(&setup);
    let by_others = || counter(&setup.client(), "listings_handed_over");
    let mut lister = Lister::new(&setup, b"dir");
    // No other waits for these, so they need no other thread.
    lister.list_all(1);
    assert_eq!(by_others(), 0);
    // The other core may still have something to do.
    eventually("some are made by others", || {
        let before = by_others();
        lister.list_all(DIRECTORIES);
        let more = by_others() - before;
        assert!(more < DIRECTORIES.into(), "the core itself makes the last one");
        more > 0
    });
    // A listing of memory takes hardly longer than handing it over.
    let before = by_others();
    Lister::new(&setup, b"mem").list_all(DIRECTORIES);
    assert_eq!(by_others(), before);
}
