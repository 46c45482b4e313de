//! Locks last until everything is carried out that was asked for under them, also by processes that were killed.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::brittle::{Brittle, Gate, answer, ask, config_of, greeted_on, peer_on};
use common::{
    CREATE, Raw, ShmRaw, counter, eventually, hello, hello_message, message, pattern, request,
    setup,
};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use towline_client::{Client, Options, Transport};
use towline_net::address::Address;
use towline_server::{EngineWish, Export, ExportKind, OwnStore, Server};
use towline_store::FileStore;
use towline_wire::hello::resumed;
use towline_wire::reply::parse_results;
use towline_wire::request::{CURRENT, lock, open_flag};
use towline_wire::{Errno, Header, Hello, Kind, Reply, Request, Welcome};

/// The number of the process that ends.
const PROCESS: u64 = 7;
const FAMILY: u64 = 0x5eed;

/// A server with an export whose calls threads make (`b`), one whose calls hold up a core (`local`), and one in
/// memory (`mem`).
struct World {
    server: Server,
    port: u16,
    /// Of `b` and `local`.
    gates: [Arc<Gate>; 2],
}

impl World {
    fn new(may_hang: bool) -> Self {
        Self::on(2, may_hang)
    }

    fn on(cores: usize, may_hang: bool) -> Self {
        let (store, local) = (Brittle { may_hang, ..Brittle::default() }, Brittle::default());
        let gates = [store.gate.clone(), local.gate.clone()];
        let mut config = config_of(store, Address::parse("tcp://127.0.0.1:0").unwrap(), cores);
        let local = OwnStore(Arc::new(local) as Arc<dyn FileStore>);
        config.exports.push(Export::new("local", ExportKind::Own(local)));
        config.exports.push(Export::new("mem", ExportKind::Memory(1 << 20)));
        let server = Server::start(&config).unwrap();
        let Some(Address::Tcp(at)) = server.addresses().first().cloned() else { panic!() };
        Self { server, port: at.port(), gates }
    }

    /// A peer whose session lives on this core.
    fn peer(&self, core: u64, family: u64, process: u64) -> Raw {
        peer_on(core, self.port, &Hello { family, process, ..hello() })
    }
}

/// Opens a file, with the first two requests of a peer; returns its handle.
fn open(peer: &mut Raw, export: &[u8], path: &[u8]) -> u64 {
    let root = ask(peer, 1, &[Request::Attach { name: export }]).unwrap();
    // Such writes to `b` wait for its threads.
    let flags = common::CREATE | open_flag::DATA_SYNC;
    ask(peer, 2, &[Request::Open { base: root, flags, mode: 0o600, path }]).unwrap()
}

fn locking(handle: u64, family: u8) -> Request<'static> {
    let (kind, owner) = (lock::EXCLUSIVE, PROCESS);
    Request::Lock { handle, owner, family, kind, wait: 0, start: 0, length: 0 }
}

/// A request to write seven bytes.
fn writing(slot: u16, sequence: u32, handle: u64) -> Vec<u8> {
    let write = Request::Write { handle, offset: 0, length: 7, flags: 0 };
    let body = towline_wire::request::encode_compound(&[write]);
    message(Header::new(Kind::Request, slot, sequence), &body, b"written")
}

/// Sends a write, with the fourth request of the peer, that a thread of this gate's store begins and cannot end.
/// `more` follows in the same message.
fn write_held_up(gate: &Gate, peer: &mut Raw, handle: u64, more: &[u8]) {
    peer.send(&[&writing(0, 4, handle), more].concat());
    eventually("a thread writes", || gate.knocks.load(Ordering::Relaxed) > 0);
}

/// Asks for a lock, from the fourth request of the peer on, until it is granted.
fn eventually_locks(what: &str, peer: &mut Raw, lock: Request<'static>) {
    let mut sequence = 3;
    eventually(what, || {
        sequence += 1;
        ask(peer, sequence, &[lock]).is_ok()
    });
}

/// Reports the end of the process in the third request, and returns once the server has begun with that.
fn report(keeper: &mut Raw) {
    let ended = Request::ProcessEnded { owner: PROCESS };
    let mut bytes = request(0, 3, &[ended], 0);
    bytes.extend(request(1, 1, &[Request::Inquire { what: 0 }], 0));
    keeper.send(&bytes);
    let (header, _) = keeper.receive().unwrap();
    assert_eq!(header.slot, 1);
}

/// Says, with this request of slot 2, which process has got a session.
fn hand_over(peer: &mut Raw, sequence: u32, to: &Welcome, process: u64) -> Result<u64, Errno> {
    let Welcome { session, secret, .. } = *to;
    peer.send(&request(2, sequence, &[Request::HandOver { session, secret, process }], 0));
    answer(peer)
}

/// Nobody can say that of the sessions of others, or whom it does not know.
#[test]
fn only_a_session_of_the_family_without_a_process_is_handed_over() {
    let world = World::new(false);
    let begun = |family, process| greeted_on(0, world.port, &Hello { family, process, ..hello() });
    let ((mut keeper, _), (_ready, ready)) = (begun(FAMILY, 0), begun(FAMILY, 0));
    let ((mut stranger, _), (mut alone, itself)) = (begun(FAMILY + 1, 0), begun(0, 0));
    let (_other, other) = begun(FAMILY, PROCESS + 1);
    assert_eq!(hand_over(&mut stranger, 1, &ready, PROCESS), Err(Errno::ENOENT));
    assert_eq!(hand_over(&mut alone, 1, &ready, PROCESS), Err(Errno::ENOENT));
    assert_eq!(hand_over(&mut alone, 2, &itself, PROCESS), Err(Errno::ENOENT));
    let guessed = Welcome { secret: ready.secret ^ 1, ..ready };
    assert_eq!(hand_over(&mut keeper, 1, &guessed, PROCESS), Err(Errno::ENOENT));
    assert_eq!(hand_over(&mut keeper, 2, &ready, 0), Err(Errno::EINVAL));
    assert_eq!(hand_over(&mut keeper, 3, &other, PROCESS), Err(Errno::EBUSY));
    assert_eq!(hand_over(&mut keeper, 4, &ready, PROCESS), Ok(0));
    assert_eq!(hand_over(&mut keeper, 5, &ready, PROCESS), Ok(0), "as after a lost connection");
    assert_eq!(hand_over(&mut keeper, 6, &ready, PROCESS + 1), Err(Errno::EBUSY));
    world.server.stop();
}

#[test]
fn a_killed_process_has_its_locks_until_threads_have_done_its_writes() {
    for (may_hang, core) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
        let world = World::new(may_hang);
        let mut process = world.peer(0, FAMILY, PROCESS);
        let mut keeper = world.peer(core, FAMILY, 0);
        let mut stranger = world.peer(1, 0, 0);
        let handle = open(&mut process, b"b", b"stuck");
        open(&mut keeper, b"b", b"sound");
        let others = open(&mut stranger, b"b", b"stuck");
        ask(&mut process, 3, &[locking(handle, lock::PROCESS)]).unwrap();
        let gate = &world.gates[0];
        let closed = gate.lock.lock().unwrap();
        write_held_up(gate, &mut process, handle, b"");
        drop(process);
        report(&mut keeper);
        let lock = locking(others, lock::PROCESS);
        assert_eq!(ask(&mut stranger, 3, &[lock]), Err(Errno::EAGAIN));
        drop(closed);
        assert_eq!(answer(&mut keeper), Ok(0));
        assert_eq!(ask(&mut stranger, 4, &[lock]), Ok(0));
        world.server.stop();
    }
}

/// A client that comes back from a session which has ended, but for the write of a file that it had locked. Returns its
/// last connection and the handle of that file, too.
fn coming_back(world: &World) -> (Raw, Raw, u64) {
    let (mut client, Welcome { session, secret, .. }) = greeted_on(0, world.port, &hello());
    let handle = open(&mut client, b"b", b"stuck");
    ask(&mut client, 3, &[locking(handle, lock::FLOCK)]).unwrap();
    let goodbye = Header::new(Kind::Goodbye, 0, 0).to_bytes();
    write_held_up(&world.gates[0], &mut client, handle, &goodbye);
    let mut back = Raw::connect(world.port);
    back.send(&hello_message(&Hello { session, secret, ..hello() }));
    (back, client, handle)
}

/// Its own lock would be in its way, and what it asks for next could overtake what threads still do.
#[test]
fn a_client_is_back_once_its_last_session_is_over() {
    let world = World::new(false);
    let closed = world.gates[0].lock.lock().unwrap();
    let (mut back, ..) = coming_back(&world);
    drop(world.peer(0, 0, 0));
    back.0.set_nonblocking(true).unwrap();
    let early = back.0.peek(&mut [0]);
    assert!(early.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
    back.0.set_nonblocking(false).unwrap();
    drop(closed);
    let (_, body) = back.receive().unwrap();
    assert_eq!(Welcome::parse(&body).unwrap().resumed, resumed::NEW);
    let handle = open(&mut back, b"b", b"stuck");
    assert_eq!(ask(&mut back, 3, &[locking(handle, lock::FLOCK)]), Ok(0));
    world.server.stop();
}

/// A file system that hangs would keep it from all others.
#[test]
fn a_client_does_not_wait_for_long_for_the_end_of_its_last_session() {
    let world = World::new(true);
    let closed = world.gates[0].lock.lock().unwrap();
    let (mut back, _, before) = coming_back(&world);
    let (_, body) = back.receive().unwrap();
    assert_eq!(Welcome::parse(&body).unwrap().resumed, resumed::NEW);
    // Whoever still uses the old file does not get at this one.
    assert_ne!(open(&mut back, b"mem", b"file"), before);
    drop(closed);
    world.server.stop();
}

/// Another session would be begun for nobody.
#[test]
fn a_client_that_does_not_wait_for_the_end_of_its_last_session_gets_no_other() {
    let world = World::on(1, false);
    let to_it = Transport::Tcp("127.0.0.1".into(), world.port);
    let watcher = Client::connect(&to_it, Options::default()).unwrap();
    let lanes = || counter(&watcher, "lanes");
    let before = lanes();
    let closed = world.gates[0].lock.lock().unwrap();
    let (back, _last, _) = coming_back(&world);
    eventually("it is back", || lanes() == before + 2);
    drop(back);
    eventually("it has hung up", || lanes() == before + 1);
    drop(closed);
    eventually("its session is over", || counter(&watcher, "sessions") == 1);
    world.server.stop();
}

#[test]
fn a_killed_process_has_its_locks_until_its_requests_are_read() {
    has_its_locks_until_its_requests_are_read(false);
}

/// So it is with a session that begins without a process, although the server has read nothing of it yet.
#[test]
fn a_session_that_was_handed_over_is_its_processs() {
    has_its_locks_until_its_requests_are_read(true);
}

fn has_its_locks_until_its_requests_are_read(is_handed_over: bool) {
    let world = World::new(false);
    let named = if is_handed_over { 0 } else { PROCESS };
    let hello = Hello { family: FAMILY, process: named, ..hello() };
    let (mut process, welcome) = greeted_on(0, world.port, &hello);
    let mut blocking = world.peer(0, 0, 0);
    let mut keeper = world.peer(1, FAMILY, 0);
    let mut stranger = world.peer(1, 0, 0);
    let handle = open(&mut process, b"mem", b"file");
    open(&mut keeper, b"mem", b"file");
    let others = open(&mut stranger, b"mem", b"file");
    ask(&mut process, 3, &[locking(handle, lock::PROCESS)]).unwrap();
    let local = ask(&mut blocking, 1, &[Request::Attach { name: b"local" }]).unwrap();
    let gate = &world.gates[1];
    let closed = gate.lock.lock().unwrap();
    let stuck = Request::Stat { base: local, flags: 0, path: b"stuck" };
    blocking.send(&request(0, 2, &[stuck], 0));
    eventually("the core waits", || gate.knocks.load(Ordering::Relaxed) > 0);
    process.send(&writing(0, 4, handle));
    drop(process);
    if is_handed_over {
        hand_over(&mut keeper, 1, &welcome, PROCESS).unwrap();
    }
    report(&mut keeper);
    let lock = locking(others, lock::PROCESS);
    assert_eq!(ask(&mut stranger, 3, &[lock]), Err(Errno::EAGAIN));
    drop(closed);
    assert_eq!(answer(&mut keeper), Ok(0));
    assert_eq!(ask(&mut stranger, 4, &[lock]), Ok(0));
    stranger.send(&request(0, 5, &[Request::Read { handle: others, offset: 0, length: 9 }], 0));
    assert!(stranger.receive().unwrap().1.ends_with(b"written"), "it is written afterwards");
    world.server.stop();
}

/// Like one whose connection a child still has that was stopped right after the fork.
#[test]
fn the_connection_of_a_killed_process_is_cut_if_it_does_not_end() {
    let world = World::new(false);
    let mut process = world.peer(0, FAMILY, PROCESS);
    let mut other = world.peer(0, FAMILY, PROCESS + 1);
    let mut keeper = world.peer(1, FAMILY, 0);
    let mut stranger = world.peer(1, 0, 0);
    let handle = open(&mut process, b"mem", b"file");
    let same = open(&mut other, b"mem", b"file");
    open(&mut keeper, b"mem", b"file");
    let others = open(&mut stranger, b"mem", b"file");
    ask(&mut process, 3, &[locking(handle, lock::PROCESS)]).unwrap();
    report(&mut keeper);
    assert_eq!(answer(&mut keeper), Ok(0));
    assert!(process.thrown_out());
    assert_eq!(ask(&mut stranger, 3, &[locking(others, lock::PROCESS)]), Ok(0));
    let stat = Request::Stat { base: same, flags: 0, path: b"" };
    assert_eq!(ask(&mut other, 3, &[stat]), Ok(0), "it has not ended");
    world.server.stop();
}

#[test]
fn a_session_that_ends_has_its_locks_until_threads_have_done_its_writes() {
    for may_hang in [false, true] {
        let world = World::new(may_hang);
        let [mut ending, mut stranger] = [(); 2].map(|()| world.peer(0, 0, 0));
        let handle = open(&mut ending, b"b", b"stuck");
        let others = open(&mut stranger, b"b", b"stuck");
        ask(&mut ending, 3, &[locking(handle, lock::PROCESS)]).unwrap();
        let gate = &world.gates[0];
        let closed = gate.lock.lock().unwrap();
        // Both are read before the core looks at another connection.
        let goodbye = Header::new(Kind::Goodbye, 0, 0).to_bytes();
        write_held_up(gate, &mut ending, handle, &goodbye);
        let lock = locking(others, lock::PROCESS);
        assert_eq!(ask(&mut stranger, 3, &[lock]), Err(Errno::EAGAIN));
        drop(closed);
        eventually_locks("the session ends", &mut stranger, lock);
        world.server.stop();
    }
}

/// As locally, where the file stays open until then.
#[test]
fn a_file_that_is_closed_has_its_locks_until_threads_have_done_its_writes() {
    for (may_hang, family) in [(false, lock::FLOCK), (true, lock::OPEN_FILE)] {
        let world = World::new(may_hang);
        let mut process = world.peer(0, FAMILY, PROCESS);
        let mut keeper = world.peer(1, FAMILY, 0);
        let mut stranger = world.peer(1, 0, 0);
        let handle = open(&mut process, b"b", b"stuck");
        open(&mut keeper, b"b", b"sound");
        let others = open(&mut stranger, b"b", b"stuck");
        ask(&mut process, 3, &[locking(handle, family)]).unwrap();
        let gate = &world.gates[0];
        let closed = gate.lock.lock().unwrap();
        write_held_up(gate, &mut process, handle, b"");
        drop(process);
        assert_eq!(ask(&mut keeper, 3, &[Request::Close { handle }]), Ok(0));
        let lock = locking(others, family);
        assert_eq!(ask(&mut stranger, 3, &[lock]), Err(Errno::EAGAIN));
        drop(closed);
        eventually_locks("the file is closed", &mut stranger, lock);
        world.server.stop();
    }
}

/// The server reads no further while nobody takes its answers, until it learns that nobody ever will.
#[test]
fn what_a_killed_process_has_sent_behind_long_reads_is_carried_out() {
    const LONG: usize = 8 << 20;
    const ATTACH: Request<'static> = Request::Attach { name: b"dir" };
    let setup = setup(EngineWish::Automatic);
    let [_, Transport::Unix(socket), _] = &setup.transports[..] else { panic!("no Unix socket") };
    std::fs::write(setup.data.join("long"), pattern(LONG, 1)).unwrap();
    // What is read past the page cache is read by threads.
    for flags in [0, open_flag::DIRECT] {
        let messages = |name: &str| {
            let open = Request::Open { base: CURRENT, flags, mode: 0, path: b"long" };
            let read = Request::Read { handle: CURRENT, offset: 0, length: LONG as u32 };
            let path = name.as_bytes();
            let create = Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path };
            let mut bytes = request(0, 1, &[ATTACH, open, read], 0);
            bytes.extend(request(1, 1, &[ATTACH, open, read], 0));
            bytes.extend(request(2, 1, &[ATTACH, create], 0));
            bytes
        };
        let names = ["tcp", "unix", "shm"].map(|kind| format!("{kind}{flags}"));
        Raw::greeted(setup.port()).0.send(&messages(&names[0]));
        let mut unix = UnixStream::connect(socket).unwrap();
        unix.write_all(&hello_message(&hello())).unwrap();
        unix.read_exact(&mut [0; 32]).unwrap(); // the rest of the welcome may stay unread
        unix.write_all(&messages(&names[1])).unwrap();
        drop(unix);
        ShmRaw::greeted(socket).send(&messages(&names[2]));
        for name in &names {
            eventually(&format!("{name} is created"), || setup.data.join(name).exists());
        }
    }
}

/// A client without a family whose session has ended, as it does in an outage of 90 s, comes back with another one.
#[test]
fn locks_that_others_have_had_since_a_session_ended_are_not_taken_again() {
    const PATHS: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];
    const FAMILIES: [u8; 4] = [lock::FLOCK, lock::FLOCK, lock::PROCESS, lock::PROCESS];
    let mut setup = setup(EngineWish::Automatic);
    let begin = |session, secret| {
        let mut peer = Raw::connect(setup.port());
        peer.send(&hello_message(&Hello { session, secret, ..hello() }));
        let (_, body) = peer.receive().unwrap();
        (peer, Welcome::parse(&body).unwrap())
    };
    let open_all = |peer: &mut Raw| {
        let open = |path| Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path };
        [0, 1, 2, 3].map(|number| {
            let compound = [Request::Attach { name: b"dir" }, open(PATHS[number])];
            peer.send(&request(number as u16, 1, &compound, 0));
            let (_, body) = peer.receive().unwrap();
            match parse_results(&body).unwrap().pop() {
                Some(Reply::Opened { handle, attr }) => (handle, attr.identity()),
                other => panic!("{other:?}"),
            }
        })
    };
    let locking = |number: usize, handle, kind, wait| {
        let (family, owner, start, length) = (FAMILIES[number], PROCESS, 0, 0);
        Request::Lock { handle, owner, family, kind, wait, start, length }
    };
    let (mut client, before) = begin(0, 0);
    let (mut other, _) = begin(0, 0);
    let (own, theirs) = (open_all(&mut client), open_all(&mut other));
    let exclusive = lock::EXCLUSIVE;
    for (number, (handle, _)) in own.into_iter().enumerate() {
        let locks = [locking(number, handle, exclusive, 0)];
        assert_eq!(ask(&mut client, number as u32 + 2, &locks), Ok(0));
    }
    let watcher = setup.client();
    let end = |mut peer: Raw| {
        peer.send(&message(Header::new(Kind::Goodbye, 0, 0), &[], &[]));
        drop(peer);
        eventually("the session ends", || counter(&watcher, "sessions") == 2);
    };
    end(client);
    for (sequence, number) in [(2, 0), (3, 2)] {
        let handle = theirs[number].0;
        let both = [exclusive, lock::UNLOCK].map(|kind| locking(number, handle, kind, 0));
        assert_eq!(ask(&mut other, sequence, &both), Ok(0));
    }
    // Others know the number of the session, but not its secret.
    end(begin(before.session, before.secret ^ 1).0);
    // As if it had lost the first new session before it could do more.
    for _ in 0..2 {
        let (mut client, after) = begin(before.session, before.secret);
        assert_ne!(after.session, before.session);
        let again = [0, 1, 2, 3].map(|number| {
            let ((handle, inode), path) = (own[number], PATHS[number]);
            let open = Request::Reclaim { handle, flags: CREATE, inode, export: b"dir", path };
            let lock = locking(number, handle, exclusive, lock::AGAIN);
            ask(&mut client, number as u32 + 1, &[open, lock]).map(drop)
        });
        assert_eq!(again, [Err(Errno::EAGAIN), Ok(()), Err(Errno::EAGAIN), Ok(())]);
        end(client);
    }
    drop(watcher);
    setup.server.take().unwrap().stop();
}
