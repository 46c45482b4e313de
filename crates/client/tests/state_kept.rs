//! Locks, handles and files after a server that was killed has been restarted with the state it left.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, Process, Raw, counter, eventually, hello, hello_message, message, request};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;
use tempfile::TempDir;
use towline_client::{Client, Errno, File, Lock, Options, Transport};
use towline_wire::hello::resumed;
use towline_wire::reply::parse_results;
use towline_wire::request::{CURRENT, lock};
use towline_wire::{Header, Hello, Kind, Reply, Request, Welcome};

#[test]
#[ignore = "not a test: the server that the others kill"]
fn child_server() {
    common::child_server();
}

const GRACE: Duration = Duration::from_secs(60);
/// `O_TMPFILE | O_RDWR`.
const TEMPORARY: u32 = 0o20_200_002;

fn exclusive() -> Lock {
    Lock { family: lock::OPEN_FILE, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 0 }
}

/// A client of a family.
fn member(transport: &Transport) -> Client {
    let mut options = Options::default();
    options.family = 0x5eed;
    Client::connect(transport, options).unwrap()
}

#[test]
fn locks_are_not_taken_from_a_client_that_comes_back() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), true, GRACE);
    let open = || {
        let client = Client::connect(&server.tcp(), Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        root.open(b"f", CREATE, 0o600).unwrap()
    };
    let (holder, other) = (open(), open());
    holder.lock(&exclusive(), false).unwrap();
    for _ in 0..2 {
        server.kill();
        server.restart();
        // The holder does not know yet that the server was killed.
        assert_eq!(other.lock(&exclusive(), false).unwrap_err().errno(), Errno::EAGAIN);
    }
    holder.stat().unwrap();
    assert_eq!(other.lock(&exclusive(), false).unwrap_err().errno(), Errno::EAGAIN);
    holder.lock(&Lock { kind: lock::UNLOCK, ..exclusive() }, false).unwrap();
    server.kill();
    server.restart();
    other.lock(&exclusive(), false).unwrap();
}

/// Like the programs of a `towline run` that have locked something and sleep: only the keeper comes back.
#[test]
fn locks_of_a_family_are_held_for_members_that_do_not_come_back() {
    // Over each transport, as the keeper, which does not wait for anything, has to notice that the server is gone.
    for transport in 0..3 {
        hold_for_a_family(transport);
    }
}

fn hold_for_a_family(transport: usize) {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), true, Duration::from_millis(100));
    let transport = server.transports()[transport].clone();
    let member = |reports_ends| {
        let mut options = Options::default();
        (options.family, options.reports_ends) = (0x5eed, reports_ends);
        Client::connect(&transport, options).unwrap()
    };
    let open = |client: &Client, name: &str| {
        let root = client.attach(b"dir").unwrap();
        root.open(name.as_bytes(), CREATE, 0o600).unwrap()
    };
    let (keeper, program) = (member(true), member(false));
    let [stranger, absent] = [(); 2].map(|()| Client::connect(&transport, Options::default()));
    let (stranger, absent) = (stranger.unwrap(), absent.unwrap());
    let others = ["a", "b", "c"].map(|name| open(&stranger, name));
    let (opened, owned) = (open(&program, "a"), open(&program, "b"));
    opened.lock(&Lock { family: lock::FLOCK, ..exclusive() }, false).unwrap();
    owned.lock(&Lock { family: lock::PROCESS, owner: 7, ..exclusive() }, false).unwrap();
    open(&absent, "c").lock(&exclusive(), false).unwrap();
    server.kill();
    server.restart();
    keeper.restore().unwrap();
    let is_lost = towline_net::peer_closed(keeper.fd().unwrap().as_fd());
    assert!(!is_lost, "the connection is not replaced");
    // This client does not come back in time.
    others[2].lock(&exclusive(), true).unwrap();
    let locks = [
        Lock { family: lock::FLOCK, ..exclusive() },
        Lock { family: lock::PROCESS, owner: 8, ..exclusive() },
    ];
    let taken = |at: usize| others[at].lock(&locks[at], false).map_err(|error| error.errno());
    assert_eq!([0, 1].map(taken), [Err(Errno::EAGAIN); 2], "of a program that sleeps");
    keeper.end_process(7);
    keeper.close_handle(opened.handle());
    for at in [0, 1] {
        eventually("the lock ends with its owner", || {
            keeper.progress();
            taken(at).is_ok()
        });
    }
}

/// The sessions of a family come back one by one, and some end at once.
#[test]
fn locks_of_a_family_outlast_a_member_that_leaves_before_their_owner_is_back() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), true, GRACE);
    let transport = server.tcp();
    let member = || member(&transport);
    let open = |client: &Client| client.attach(b"dir").unwrap().open(b"a", CREATE, 0o600).unwrap();
    let stranger = Client::connect(&transport, Options::default()).unwrap();
    let (file, other) = (open(&member()), open(&stranger));
    let flock = Lock { family: lock::FLOCK, ..exclusive() };
    file.lock(&flock, false).unwrap();
    let taken = || other.lock(&flock, false).map_err(|error| error.errno());
    server.kill();
    server.restart();
    drop(member());
    eventually("it has left", || counter(&stranger, "sessions") == 1);
    assert_eq!(taken(), Err(Errno::EAGAIN), "before its owner is back");
    file.stat().unwrap();
    assert_eq!(taken(), Err(Errno::EAGAIN));
    file.lock(&Lock { kind: lock::UNLOCK, ..flock }, false).unwrap();
    assert_eq!(taken(), Ok(()));
}

/// The keeper closes a file that another process has opened, and the server is killed before it answers.
#[test]
fn a_lock_ends_with_a_close_that_was_under_way() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), true, GRACE);
    let transport = server.tcp();
    let member = || member(&transport);
    let (keeper, program) = (member(), member());
    let open = |client: &Client| client.attach(b"dir").unwrap().open(b"a", CREATE, 0o600).unwrap();
    let stranger = Client::connect(&transport, Options::default()).unwrap();
    let (file, other) = (open(&program), open(&stranger));
    file.lock(&exclusive(), false).unwrap();
    server.kill();
    keeper.close_handle(file.handle());
    server.restart();
    eventually("the lock ends with the file", || {
        keeper.progress();
        other.lock(&exclusive(), false).is_ok()
    });
}

/// The caller may take the answer only after a restart of the server.
#[test]
fn a_lock_is_known_from_its_answer_on() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), false, Duration::ZERO);
    let open = |server: &Process| {
        let client = Client::connect(&server.tcp(), Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        (root.open(b"f", CREATE, 0o600).unwrap(), client)
    };
    let (holder, client) = open(&server);
    for kind in [lock::EXCLUSIVE, lock::UNLOCK] {
        let asked = holder.start_lock(&Lock { kind, ..exclusive() }).unwrap();
        eventually("the lock is answered", || {
            client.progress();
            client.is_idle()
        });
        server.kill();
        server.restart();
        holder.stat().unwrap();
        asked.wait().unwrap();
        let expected = if kind == lock::UNLOCK { None } else { Some(Errno::EAGAIN) };
        let (other, _client) = open(&server);
        let got = other.lock(&exclusive(), false).err().map(|error| error.errno());
        assert_eq!(got, expected, "after kind {kind}");
    }
}

#[test]
fn locks_of_a_client_that_stays_away_are_given_to_others() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), true, Duration::from_millis(100));
    let open = || {
        let client = Client::connect(&server.tcp(), Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        root.open(b"f", CREATE, 0o600).unwrap()
    };
    let (holder, other) = (open(), open());
    holder.lock(&exclusive(), false).unwrap();
    server.kill();
    server.restart();
    other.lock(&exclusive(), true).unwrap();
    // A client that comes back too late gets an error.
    assert_eq!(holder.stat().unwrap_err().errno(), Errno::ESTALE);
}

/// The client has a connection again, and does not say which locks it had.
#[test]
fn locks_of_a_client_that_comes_back_and_stops_are_given_to_others() {
    let directory = TempDir::new().unwrap();
    // Longer than the interval at which the server checks whether new connections say anything.
    let mut server = Process::start_with(directory.path(), true, Duration::from_secs(3));
    let other = Client::connect(&server.tcp(), Options::default()).unwrap();
    let file = other.attach(b"dir").unwrap().open(b"f", CREATE, 0o600).unwrap();
    let (mut holder, welcome) = Raw::greeted(server.port);
    let Lock { family, kind, owner, start, length } = exclusive();
    let locked = Request::Lock { handle: CURRENT, owner, family, kind, wait: 0, start, length };
    let attached = Request::Attach { name: b"dir" };
    let opened = Request::Open { base: CURRENT, flags: 2, mode: 0, path: b"f" };
    holder.send(&request(0, 1, &[attached, opened, locked], 0));
    assert!(holder.receive().is_some());
    assert_eq!(file.lock(&exclusive(), false).unwrap_err().errno(), Errno::EAGAIN);
    server.kill();
    server.restart();
    let mut holder = Raw::connect(server.port);
    let Welcome { session, secret, .. } = welcome;
    holder.send(&hello_message(&Hello { session, secret, ..hello() }));
    let (_, body) = holder.receive().unwrap();
    assert_eq!(Welcome::parse(&body).unwrap().resumed, resumed::REMEMBERED);
    let waiting = std::thread::spawn(move || file.lock(&exclusive(), true));
    eventually("the lock is given", || waiting.is_finished());
    waiting.join().unwrap().unwrap();
}

/// The session of the client had ended, as in an outage, and what another one had locked then is not in the state.
#[test]
fn locks_that_were_lost_before_a_restart_are_not_taken_again() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), true, GRACE);
    let other = Client::connect(&server.tcp(), Options::default()).unwrap();
    let file = other.attach(b"dir").unwrap().open(b"f", CREATE, 0o600).unwrap();
    let (mut holder, welcome) = Raw::greeted(server.port);
    let Lock { family, kind, owner, start, length } = exclusive();
    let locking = |handle, wait| Request::Lock { handle, owner, family, kind, wait, start, length };
    let attached = Request::Attach { name: b"dir" };
    let opened = Request::Open { base: CURRENT, flags: 2, mode: 0, path: b"f" };
    holder.send(&request(0, 1, &[attached, opened, locking(CURRENT, 0)], 0));
    let (_, body) = holder.receive().unwrap();
    let results = parse_results(&body).unwrap();
    let [_, Reply::Opened { handle, attr }, Reply::Locked { .. }] = results[..] else {
        panic!("{results:?}");
    };
    holder.send(&message(Header::new(Kind::Goodbye, 0, 0), &[], &[]));
    eventually("the session ends", || counter(&other, "sessions") == 1);
    for kind in [kind, lock::UNLOCK] {
        file.lock(&Lock { kind, ..exclusive() }, false).unwrap();
    }
    server.kill();
    server.restart();
    let mut holder = Raw::connect(server.port);
    let Welcome { session, secret, .. } = welcome;
    holder.send(&hello_message(&Hello { session, secret, ..hello() }));
    holder.receive().unwrap();
    let (export, path, inode) = (&b"dir"[..], &b"f"[..], attr.identity());
    let again = Request::Reclaim { handle, flags: 2, inode, export, path };
    holder.send(&request(0, 1, &[again, locking(handle, lock::AGAIN)], 0));
    let (_, body) = holder.receive().unwrap();
    let results = parse_results(&body).unwrap();
    let refused = Errno::EAGAIN.0;
    assert!(matches!(results[..], [_, Reply::Failed { errno }] if errno == refused), "{results:?}");
}

/// Like the processes of a `towline run`, some of which start only after a restart of the server.
#[test]
fn members_of_a_family_come_back_one_after_the_other() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), false, Duration::ZERO);
    let transport = server.tcp();
    let member = || member(&transport);
    let first = member();
    let root = first.attach(b"dir").unwrap();
    let open = |root: &File, name: String| root.open(name.as_bytes(), CREATE, 0o600).unwrap();
    let files: Vec<File> = (0..4).map(|number| open(&root, format!("f{number}"))).collect();
    for (number, file) in files.iter().enumerate() {
        file.write_at(&[number as u8], 0).unwrap();
    }
    server.kill();
    server.restart();
    // This one knows the root as a path, and opens files before the first one reopens its own.
    let second = member();
    assert_ne!(second.boot_epoch(), first.boot_epoch());
    let flags = (libc::O_PATH | libc::O_DIRECTORY) as u32;
    let same =
        File::from_handle(&second, root.handle(), b"dir", b"", flags, root.attr().identity());
    assert_eq!(same.stat().unwrap_err().errno(), Errno::EBADF, "not open there yet");
    second.reclaim().unwrap();
    let others: Vec<File> = (0..8).map(|number| open(&same, format!("g{number}"))).collect();
    for (number, file) in files.iter().enumerate() {
        let mut found = [9];
        assert_eq!(file.read_at(&mut found, 0), Ok(1));
        assert_eq!(found, [number as u8]);
    }
    assert_eq!((root.stat().unwrap(), others[7].stat().unwrap().size), (same.stat().unwrap(), 0));
    let _ = same.into_handle();
}

#[test]
fn what_was_in_memory_is_gone_and_says_so() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), true, GRACE);
    let client = Client::connect(&server.tcp(), Options::default()).unwrap();
    let memory = client.attach(b"mem").unwrap();
    memory.make_directory(b"d", 0o700).unwrap();
    server.kill();
    server.restart();
    assert_eq!(memory.make_directory(b"e", 0o700).unwrap_err().errno(), Errno::ESTALE);
    let again = client.attach(b"mem").unwrap();
    assert!(again.open(b".", 0, 0).unwrap().list_all(false).unwrap().is_empty());
}

/// File systems give the inode number of a removed file to the next one.
#[test]
fn another_file_in_the_place_of_an_open_one_is_not_taken_for_it() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start_with(directory.path(), true, GRACE);
    let client = Client::connect(&server.tcp(), Options::default()).unwrap();
    let root = client.attach(b"dir").unwrap();
    let named = root.open(b"f", CREATE, 0o600).unwrap();
    let nameless = root.open(b".", TEMPORARY, 0o600).unwrap();
    for file in [&named, &nameless] {
        file.write_at(b"data", 0).unwrap();
    }
    server.kill();
    let path = directory.path().join("data/f");
    std::fs::remove_file(&path).unwrap();
    // Any of them may get the number.
    let others: Vec<_> =
        (0..100).map(|n| directory.path().join(format!("data/other{n}"))).collect();
    for other in &others {
        std::fs::write(other, b"").unwrap();
    }
    let inode = named.attr().inode;
    match others.iter().find(|other| std::fs::metadata(other).unwrap().ino() == inode) {
        Some(other) => std::fs::rename(other, &path).unwrap(),
        None => println!("SKIPPED another file with the same inode number: there is none here"),
    }
    server.restart();
    for file in [&named, &nameless] {
        assert_eq!(file.stat().unwrap_err().errno(), Errno::ESTALE);
        assert_eq!(file.write_at(b"more", 4).unwrap_err().errno(), Errno::ESTALE);
    }
    assert_eq!(std::fs::read(&path).unwrap_or_default(), b"");
}
