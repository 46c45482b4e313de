//! Measures the cost of keeping the state: requests on a directory, without sockets, with and without it.
//!
//! `cargo bench -p towline-session --bench state [-- DIRECTORY]`. The two cases are measured in turns,
//! many times. The fastest turn of each is shown, because it is least disturbed by other load on the
//! machine.

#![allow(clippy::unwrap_used)] // a benchmark that cannot go on should say where

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_mem::SharedMemory;
use towline_session::files::{Files, Table, Terms};
use towline_session::state::{Journal, STATE_BYTES, State};
use towline_session::{Compound, Context, Exports, Step};
use towline_store::directory::DirectoryStore;
use towline_store::{Caller, FileStore};
use towline_wire::request::{CURRENT, DIRECTORY, encode_compound, write_flag};
use towline_wire::{Reply, Request};

/// Requests in one turn, and number of turns.
const REQUESTS: u32 = 500;
const TURNS: u32 = 100;

struct Names(Arc<dyn FileStore>);

impl Exports for Names {
    fn find(&self, _: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)> {
        Some((self.0.clone(), Terms::default()))
    }

    fn find_again(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)> {
        self.find(name)
    }

    fn names(&self) -> Vec<u8> {
        Vec::new()
    }

    fn statistics(&self) -> Vec<u8> {
        Vec::new()
    }
}

/// A case's name, its requests, and the data sent with them.
type Case<'a> = (&'a str, Vec<Vec<u8>>, &'a [u8]);

struct Bench {
    exports: Names,
    files: Files,
    caller: Caller,
    sequence: u32,
}

impl Bench {
    /// Runs a request as a server does, and returns the handle of the file that it opened first.
    fn run(&mut self, journal: Option<&Journal>, body: &[u8], data: &[u8]) -> u64 {
        self.sequence += 1;
        let mut compound = Compound::new(0, self.sequence, body, data, 0).unwrap();
        if let Some(journal) = journal {
            assert!(!compound.keep(journal, false));
        }
        let Self { exports, files, caller, .. } = self;
        let files = Table::Held(files);
        let context = &mut Context { files, exports, caller, session: 1 };
        while !matches!(compound.run(None, context), Step::Finished) {}
        let (results, ..) = compound.reply();
        let replies = towline_wire::reply::parse_results(results).unwrap();
        match replies[..] {
            [.., Reply::Failed { errno }] => panic!("errno {errno}"),
            [Reply::Opened { handle, .. }, ..] => handle,
            _ => 0,
        }
    }
}

fn main() {
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let place = wanted.map_or_else(std::env::temp_dir, PathBuf::from);
    let directory = tempfile::tempdir_in(&place).unwrap();
    let file = File::create_new(directory.path().join("sessions")).unwrap();
    file.set_len(STATE_BYTES as u64).unwrap();
    let file = File::options().read(true).write(true).open(directory.path().join("sessions"));
    let memory = SharedMemory::of_file(OwnedFd::from(file.unwrap()), STATE_BYTES).unwrap();
    let state = Arc::new(State::create(memory, &[1; 16], 1).unwrap());
    let journal = state.begin(1, 1).unwrap();
    let exports = Names(DirectoryStore::new(directory.path(), false).unwrap());
    let caller = Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false };
    let mut bench = Bench { exports, files: Files::new(1, 1), caller, sequence: 0 };
    let base = bench.run(None, &encode_compound(&[Request::Attach { name: b"a" }]), b"");
    let open = |flags, path| Request::Open { base, flags, mode: 0o600, path };
    let file = bench.run(None, &encode_compound(&[open(0o102, b"file")]), b"");
    let write = |flags| Request::Write { handle: file, offset: 0, length: 4096, flags };
    let (close, path) = (Request::Close { handle: CURRENT }, &b"name"[..]);
    let unlink = |flags| encode_compound(&[Request::Unlink { base, flags, path }]);
    let make = encode_compound(&[Request::MakeDir { base, mode: 0o700, path }]);
    let rename = |path, new_path| {
        encode_compound(&[Request::Rename { base, flags: 0, path, new_base: base, new_path }])
    };
    let page = [7; 4096];
    let cases: [Case<'_>; 6] = [
        (
            "create exclusively, unlink",
            vec![encode_compound(&[open(0o302, path), close]), unlink(0)],
            b"",
        ),
        ("create, unlink", vec![encode_compound(&[open(0o102, path), close]), unlink(0)], b""),
        ("mkdir, rmdir", vec![make, unlink(DIRECTORY)], b""),
        ("rename there, back", vec![rename(b"file", path), rename(path, b"file")], b""),
        ("write 4 KiB", vec![encode_compound(&[write(0)])], &page),
        ("append 4 KiB", vec![encode_compound(&[write(write_flag::APPEND)])], &page),
    ];
    println!("in {}, microseconds for a request:", place.display());
    println!("{:28} {:>9} {:>9} {:>9}", "", "without", "with", "more");
    for (name, bodies, data) in cases {
        let mut best = [Duration::MAX; 2];
        for turn in 0..2 * TURNS as usize {
            let journal = (turn % 2 == 1).then_some(&journal);
            let start = Instant::now();
            for _ in 0..REQUESTS / bodies.len() as u32 {
                for body in &bodies {
                    bench.run(journal, body, data);
                }
            }
            best[turn % 2] = best[turn % 2].min(start.elapsed());
            if name.starts_with("append") {
                std::fs::File::options()
                    .write(true)
                    .open(directory.path().join("file"))
                    .and_then(|file| file.set_len(0))
                    .unwrap();
            }
        }
        let each = best.map(|time| time.as_secs_f64() * 1e6 / f64::from(REQUESTS));
        println!("{name:28} {:9.2} {:9.2} {:9.2}", each[0], each[1], each[1] - each[0]);
    }
}
