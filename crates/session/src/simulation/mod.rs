//! Simulation of sessions, slots, compounds and the state without sockets, driven by a random schedule:
//! requests arrive, are lost and are repeated, and the server is killed anywhere and restarted. In the
//! end every operation must have taken effect exactly once, according to a model. A seed reproduces a
//! run.

mod clients;
pub(crate) mod fragile;

use crate::files::{Table, Terms};
use crate::slots::Arrival;
use crate::state::{STATE_BYTES, State};
use crate::{Compound, Context, Exports, Session, Step};
use fragile::{Fragile, Killed, light};
use rustix::fs::MemfdFlags;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use towline_mem::SharedMemory;
use towline_store::memory::MemoryStore;
use towline_store::{Caller, FileStore};
use towline_wire::codec::Field;
use towline_wire::{Header, Kind, Reply, Request};

const BOOT: [u8; 16] = [7; 16];
/// The slot in which clients reopen what they had.
const RECLAIM_SLOT: u16 = 63;

/// A small random number generator (xorshift64*).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns a number below `end`.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) % end
    }
}

/// Exports one store, under every name.
pub(crate) struct One(pub(crate) Arc<dyn FileStore>, pub(crate) Terms);

impl Exports for One {
    fn find(&self, _: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)> {
        Some((self.0.clone(), self.1))
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

pub(crate) fn caller() -> Caller {
    Caller { uid: 0, gid: 0, groups: Arc::new([]), enforce: false }
}

/// A request as its client keeps it until it is answered.
#[derive(Clone)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    /// Sent with the request, or offered with `header.offset`.
    pub(super) data: Vec<u8>,
}

/// A server that can be killed; the files and the state survive.
pub(super) struct Server {
    pub(super) store: Arc<dyn FileStore>,
    file: OwnedFd,
    state: Arc<State>,
    sessions: HashMap<u64, Session>,
    /// Requests that wait for more data, and how many bytes of it they have.
    waiting: HashMap<(u64, u16), (Compound, usize)>,
    pub(super) epoch: u32,
    next_session: u64,
    pub(super) kills: u64,
    /// Answers that came from the state.
    pub(super) recorded: u64,
    /// Operations whose outcome is unknown.
    undecided: u64,
}

fn memory(file: &OwnedFd) -> SharedMemory {
    SharedMemory::of_file(file.try_clone().unwrap(), STATE_BYTES).unwrap()
}

impl Server {
    pub(super) fn start() -> Self {
        let file = rustix::fs::memfd_create("state", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, STATE_BYTES as u64).unwrap();
        let state = Arc::new(State::create(memory(&file), &BOOT, 1).unwrap());
        let inner = MemoryStore::new("m", 64 << 20).unwrap();
        let store = Arc::new(Fragile { inner, unstored: None });
        let (sessions, waiting) = (HashMap::new(), HashMap::new());
        let (epoch, next_session, kills, recorded, undecided) = (1, 1, 0, 0, 0);
        Self {
            store,
            file,
            state,
            sessions,
            waiting,
            epoch,
            next_session,
            kills,
            recorded,
            undecided,
        }
    }

    /// Kills the server and starts it again.
    pub(super) fn restart(&mut self) {
        light(None);
        self.kills += 1;
        self.epoch += 1;
        self.sessions.clear();
        self.waiting.clear();
        self.state = Arc::new(State::open(memory(&self.file), &BOOT, self.epoch).unwrap());
    }

    /// Runs a part of the server, and restarts the server if it is killed meanwhile.
    pub(super) fn survive<T>(&mut self, part: impl FnOnce(&mut Self) -> T) -> Option<T> {
        match catch_unwind(AssertUnwindSafe(|| part(self))) {
            Ok(result) => Some(result),
            Err(panic) if panic.is::<Killed>() => {
                self.restart();
                None
            }
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Begins a session; returns its number.
    pub(super) fn begin(&mut self) -> u64 {
        let id = self.next_session;
        self.next_session += 1;
        let mut session = Session::new(id, id * 3, self.epoch);
        session.journal = self.state.begin(id, id * 3);
        assert!(session.journal.is_some());
        self.sessions.insert(id, session);
        id
    }

    /// Lets a client come back after a restart.
    pub(super) fn join(&mut self, id: u64) {
        assert!(self.state.claim(id, id * 3 + 1).is_none(), "joined with a wrong secret");
        let kept = self.state.claim(id, id * 3).expect("a session was lost");
        self.sessions.insert(id, Session::kept(id, id * 3, self.epoch, kept));
    }

    /// Executes one request of a client that reopens what it had.
    pub(super) fn reclaim(&mut self, id: u64, sequence: u32, request: &Request<'_>) -> Vec<u8> {
        let mut body = Vec::new();
        request.encode(&mut body);
        let header = Header::new(Kind::Request, RECLAIM_SLOT, sequence);
        self.arrive(id, &Message { header, body, data: Vec::new() }).expect("answered at once")
    }

    /// Handles the arrival of a request, or of the next part of its data. Returns the results when it is
    /// done.
    pub(super) fn arrive(&mut self, id: u64, message: &Message) -> Option<Vec<u8>> {
        let slot = message.header.slot;
        if let Some((mut compound, done)) = self.waiting.remove(&(id, slot)) {
            let end = message.data.len().min(done + message.data.len() / 3 + 1);
            if compound.write_fragment(&message.data[done..end]) {
                return self.drive(id, message, compound);
            }
            self.waiting.insert((id, slot), (compound, end));
            return None;
        }
        let session = self.sessions.get_mut(&id).expect("its client has joined it");
        match session.slots.arrive(&message.header).unwrap() {
            Arrival::Replay(reply) => Some(reply),
            Arrival::Running => panic!("nothing runs while nothing waits"),
            Arrival::Execute => {
                let offered = message.header.offset;
                let inline = if offered == 0 { &message.data[..] } else { &[] };
                let sequence = message.header.sequence;
                let mut compound =
                    Compound::new(slot, sequence, &message.body, inline, offered).unwrap();
                let recorded = session.take_recorded(slot);
                let journal = session.journal.as_ref().expect("every session is kept");
                self.recorded += u64::from(compound.keep(journal, recorded));
                self.drive(id, message, compound)
            }
        }
    }

    fn drive(&mut self, id: u64, message: &Message, mut compound: Compound) -> Option<Vec<u8>> {
        let exports = One(self.store.clone(), Terms::default());
        let session = self.sessions.get_mut(&id).expect("its client has joined it");
        let slot = message.header.slot;
        loop {
            let mut files = session.files.lock();
            let caller = caller();
            let files = Table::Held(&mut files);
            let context = &mut Context { files, exports: &exports, caller: &caller, session: id };
            match compound.run(None, context) {
                Step::Finished => break,
                Step::NeedsData => {
                    self.waiting.insert((id, slot), (compound, 0));
                    return None;
                }
                Step::ReleaseLocks(..) | Step::Reclaimed => {}
                Step::Block(..)
                | Step::Share(..)
                | Step::Lock(..)
                | Step::TestLock(..)
                | Step::EndProcess(_)
                | Step::HandOver(..)
                | Step::Elsewhere(_)
                | Step::Events(..) => panic!("none asked for"),
            }
        }
        self.undecided += u64::from(compound.is_undecided());
        let (results, data, modifies, _) = compound.reply();
        let results = std::mem::take(results);
        let kept = modifies && data.is_empty();
        session.slots.answer(slot, kept.then_some([&results, b""]));
        Some(results)
    }
}

/// Returns the failure that a reply reports, if any.
pub(super) fn failure(results: &[u8]) -> Option<towline_wire::Errno> {
    match towline_wire::reply::parse_results(results).unwrap().last() {
        Some(Reply::Failed { errno }) => Some(towline_wire::Errno(*errno)),
        _ => None,
    }
}

#[test]
fn operations_take_effect_once_whenever_the_server_is_killed() {
    let seeds = match std::env::var("TOWLINE_SEED") {
        Ok(seed) => {
            let seed: u64 = seed.parse().expect("TOWLINE_SEED is not a number");
            seed..seed + 1
        }
        // Set TOWLINE_SEEDS for more.
        Err(_) => 0..std::env::var("TOWLINE_SEEDS").map_or(30, |n| n.parse().expect("no number")),
    };
    let (mut kills, mut recorded, mut operations) = (0, 0, 0);
    for seed in seeds {
        let ran = catch_unwind(|| clients::run(seed));
        let Ok((server, done)) = ran else {
            panic!("run it again with TOWLINE_SEED={seed}");
        };
        assert_eq!(server.undecided, 0, "TOWLINE_SEED={seed}: operations could not be decided");
        kills += server.kills;
        recorded += server.recorded;
        operations += done;
    }
    eprintln!("{operations} operations, {kills} kills, {recorded} answered from the state");
}

/// Returns a server with one client, which has a root directory and a log of eleven bytes, and the handles.
fn one_client() -> (Server, u64, u64, u64) {
    let mut server = Server::start();
    let id = server.begin();
    let mut open = |sequence, request: &Request<'_>| {
        let results = server.reclaim(id, sequence, request);
        match towline_wire::reply::parse_results(&results).unwrap()[..] {
            [Reply::Opened { handle, .. }] => handle,
            ref other => panic!("{other:?}"),
        }
    };
    let root = open(1, &Request::Attach { name: b"" });
    let log = open(2, &Request::Open { base: root, flags: 0o102, mode: 0o600, path: b"log" });
    let message = request(1, &append(log), b"hello world");
    assert_eq!(failure(&server.arrive(id, &message).unwrap()), None);
    let top = server.store.root().unwrap();
    server.store.make_directory(&caller(), (&*top, b"sub"), 0o700).unwrap();
    (server, id, root, log)
}

fn append(log: u64) -> Request<'static> {
    let flags = towline_wire::request::write_flag::APPEND;
    Request::Write { handle: log, offset: 0, length: 11, flags }
}

fn request(sequence: u32, request: &Request<'_>, data: &[u8]) -> Message {
    let mut body = Vec::new();
    request.encode(&mut body);
    Message { header: Header::new(Kind::Request, 0, sequence), body, data: data.to_vec() }
}

/// Kills the server in the middle of a request, changes the files outside it, and repeats the request.
fn behind_its_back(
    what: impl Fn(u64, u64) -> Request<'static>,
    places: u32,
    change: impl Fn(&dyn FileStore),
) -> (Server, Option<towline_wire::Errno>) {
    let (mut server, id, root, log) = one_client();
    let data: &[u8] = if what(root, log) == append(log) { b"again hello" } else { b"" };
    let message = request(2, &what(root, log), data);
    light(Some(places));
    assert_eq!(server.survive(|server| server.arrive(id, &message)), None, "it was not killed");
    change(&*server.store);
    server.join(id);
    for (sequence, handle, path) in [(1, root, &b""[..]), (2, log, b"log")] {
        let top = server.store.root().unwrap();
        let inode = server.store.stat(&caller(), (&*top, path), false).unwrap().identity();
        let flags = if path.is_empty() { 0 } else { 2 };
        let again = Request::Reclaim { handle, flags, inode, export: b"", path };
        assert_eq!(failure(&server.reclaim(id, sequence, &again)), None);
    }
    let failed = failure(&server.arrive(id, &message).unwrap());
    (server, failed)
}

#[test]
fn what_nobody_can_know_is_said_and_not_guessed() {
    use towline_wire::Errno;
    let root = |store: &dyn FileStore| store.root().unwrap();
    let shorten = |store: &dyn FileStore| {
        let set = towline_store::SetAttr { size: Some(5), ..Default::default() };
        store.set_attr(&caller(), (&*root(store), b"log"), true, &set).unwrap();
    };
    // Kill points: the intent's record, before the write, in the middle of it, after it.
    for places in [1, 2, 3] {
        let (server, failed) = behind_its_back(|_, log| append(log), places, shorten);
        assert_eq!((failed, server.undecided), (Some(Errno::EIO), 1), "killed at {places}");
        let (server, failed) = behind_its_back(|_, log| append(log), places, |_| {});
        assert_eq!((failed, server.undecided), (None, 0), "killed at {places}");
    }
    // Something else is where a directory was to be made.
    let make = |root, _| Request::MakeDir { base: root, mode: 0o700, path: b"d" };
    let other = |store: &dyn FileStore| {
        store.make_node(&caller(), (&*root(store), b"d"), 0o600, 0).unwrap();
    };
    let (server, failed) = behind_its_back(make, 1, other);
    assert_eq!((failed, server.undecided), (Some(Errno::EIO), 1));
    // The parent directory has been renamed meanwhile, whether or not it contains the new one. Kill
    // points: a look (two), the intent's record, before the change, after it.
    let make = |root, _| Request::MakeDir { base: root, mode: 0o700, path: b"sub/d" };
    let moved = |store: &dyn FileStore| {
        let root = root(store);
        store.rename(&caller(), (&*root, b"sub"), (&*root, b"other"), 0).unwrap();
    };
    for places in [3, 4] {
        let (server, failed) = behind_its_back(make, places, moved);
        assert_eq!((failed, server.undecided), (Some(Errno::EIO), 1), "killed at {places}");
    }
    let name = |root, _| Request::SetXattr {
        base: root,
        flags: 0,
        how: towline_wire::request::xattr_how::CREATE,
        path: b"sub",
        name: b"user.a",
        value: b"b",
    };
    for places in [3, 4] {
        let (server, failed) = behind_its_back(name, places, moved);
        assert_eq!((failed, server.undecided), (Some(Errno::EIO), 1), "killed at {places}");
    }
    // An append to a file in which other bytes were written meanwhile.
    let overwrite = |store: &dyn FileStore| {
        let how = towline_store::OpenHow { flags: 2, mode: 0 };
        let (file, _) = store.open(&caller(), (&*root(store), b"log"), how).unwrap();
        file.write(11, b"other bytes", false).unwrap();
    };
    let (server, failed) = behind_its_back(|_, log| append(log), 3, overwrite);
    assert_eq!((failed, server.undecided), (Some(Errno::EIO), 1));
}
