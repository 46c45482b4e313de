//! Watched files: a watcher learns what anybody does to them, once each, whatever happens to
//! connections and servers.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

#[path = "../common/mod.rs"]
mod common;
mod lost;
mod raw;

use common::{CREATE, has_whiteouts, setup, skipped};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::HashMap;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use towline_client::{Client, Errno, File, Happening, Happenings, Options, SetAttr, Transport};
use towline_server::EngineWish;
use towline_wire::event;
use towline_wire::request::rename_flag;

/// Long enough for any machine: a longer wait would never end.
const PATIENCE: Duration = Duration::from_secs(60);

/// The events of a client, which a thread keeps asking for.
struct Ear(mpsc::Receiver<Happenings>);

impl Ear {
    fn of(client: &Client) -> Self {
        let (tell, told) = mpsc::channel();
        let client = client.clone();
        std::thread::spawn(move || {
            while let Ok(happenings) = client.events() {
                if tell.send(happenings).is_err() {
                    return;
                }
            }
        });
        Self(told)
    }

    fn next(&self) -> Happenings {
        self.0.recv_timeout(PATIENCE).expect("nothing is told")
    }

    /// Returns all events up to the first one of this kind with this name.
    fn until(&self, mask: u32, name: &str) -> Vec<Happening> {
        let mut told = Vec::new();
        let is_it = |event: &Happening| event.mask & mask != 0 && event.name == name.as_bytes();
        while !told.iter().any(is_it) {
            let happenings = self.next();
            assert!(!happenings.lost, "events are lost");
            told.extend(happenings.events);
        }
        told
    }
}

/// Asks for events once.
fn once(client: &Client) -> Happenings {
    let (tell, told) = mpsc::channel();
    let client = client.clone();
    std::thread::spawn(move || tell.send(client.events().unwrap()));
    told.recv_timeout(PATIENCE).expect("nothing is told")
}

/// Both halves of a move.
const MOVES: u32 = event::MOVED_FROM | event::MOVED_TO;

/// Names in the events of this kind, in order.
fn names(told: &[Happening], mask: u32) -> Vec<&str> {
    let of_kind = told.iter().filter(|event| event.mask & mask != 0);
    of_kind.map(|event| std::str::from_utf8(&event.name).unwrap()).collect()
}

#[test]
fn changes_by_others_are_told_whatever_the_export_and_the_connection() {
    let setup = setup(EngineWish::Automatic);
    for transport in &setup.transports {
        for export in [&b"dir"[..], b"mem"] {
            let client = Client::connect(transport, Options::default()).unwrap();
            let watched = client.attach(export).unwrap();
            watched.watch(event::ALL & !event::ACCESS).unwrap();
            let ear = Ear::of(&client);
            let other = setup.client();
            let root = other.attach(export).unwrap();
            root.write_path(b"a", CREATE, 0o600, b"text").unwrap();
            root.rename(b"a", &root, b"b", 0).unwrap();
            root.unlink(b"b", false).unwrap();
            root.make_directory(b"made", 0o700).unwrap();
            let told = ear.until(event::CREATE, "made");
            assert!(told.iter().all(|event| event.handle == watched.handle()));
            assert_eq!(names(&told, event::CREATE), ["a", "made"]);
            assert_eq!(names(&told, event::MODIFY), ["a"]);
            assert_eq!(names(&told, event::CLOSE_WRITE), ["a"]);
            assert_eq!(names(&told, event::DELETE), ["b"]);
            let moves: Vec<&Happening> = told.iter().filter(|e| e.mask & MOVES != 0).collect();
            assert_eq!(names(&told, MOVES), ["a", "b"]);
            assert!(moves[0].cookie != 0 && moves[0].cookie == moves[1].cookie, "{moves:?}");
            let made = told.iter().rfind(|event| event.mask & event::CREATE != 0).unwrap();
            assert!(made.mask & event::ISDIR != 0, "{made:?}");
            // The watch ends with the file.
            watched.close().unwrap();
            root.unlink(b"made", true).unwrap();
            let again = client.attach(export).unwrap();
            again.watch(event::DELETE).unwrap();
            root.write_path(b"c", CREATE, 0o600, b"").unwrap();
            root.unlink(b"c", false).unwrap();
            let told = ear.until(event::DELETE, "c");
            let of_it: Vec<_> = told.into_iter().filter(|e| e.handle == again.handle()).collect();
            assert_eq!((of_it.len(), names(&of_it, event::DELETE)), (1, vec!["c"]));
        }
    }
}

/// As by the kernel: what a rename leaves at the old name is not told, but what becomes of it is.
#[test]
fn whiteouts_are_told_when_they_change() {
    let setup = setup(EngineWish::Automatic);
    for export in [&b"dir"[..], b"mem"] {
        if export == b"dir" && !has_whiteouts(&setup.data) {
            skipped("whiteouts of a directory: its file system has none");
            continue;
        }
        let client = setup.client();
        let watched = client.attach(export).unwrap();
        watched.watch(event::ALL & !event::ACCESS).unwrap();
        let ear = Ear::of(&client);
        let other = setup.client();
        let root = other.attach(export).unwrap();
        root.write_path(b"a", CREATE, 0o600, b"text").unwrap();
        root.rename(b"a", &root, b"b", rename_flag::WHITEOUT).unwrap();
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        root.set_attr(b"a", true, &set).unwrap();
        root.unlink(b"a", false).unwrap();
        root.make_directory(b"made", 0o700).unwrap();
        let told = ear.until(event::CREATE, "made");
        assert_eq!(names(&told, event::CREATE), ["a", "made"]);
        assert_eq!(names(&told, MOVES), ["a", "b"]);
        assert_eq!(names(&told, event::ATTRIB), ["a"]);
        assert_eq!(names(&told, event::DELETE), ["a"]);
    }
}

#[test]
fn changes_by_local_programs_are_told() {
    let setup = setup(EngineWish::Automatic);
    let client = setup.client();
    let watched = client.attach(b"dir").unwrap();
    watched.watch(event::ALL).unwrap();
    let ear = Ear::of(&client);
    let at = |name: &str| setup.data.join(name);
    std::fs::write(at("a"), b"text").unwrap();
    std::fs::read(at("a")).unwrap();
    std::fs::rename(at("a"), at("b")).unwrap();
    std::fs::remove_file(at("b")).unwrap();
    let told = ear.until(event::DELETE, "b");
    let masks: Vec<u32> = told.iter().map(|event| event.mask).collect();
    let written = [event::CREATE, event::OPEN, event::MODIFY, event::CLOSE_WRITE];
    let read = [event::OPEN, event::ACCESS, event::CLOSE_NOWRITE];
    let moved = [event::MOVED_FROM, event::MOVED_TO, event::DELETE];
    assert_eq!(masks, [&written[..], &read, &moved].concat());
}

#[test]
fn the_bits_are_those_of_the_kernel() {
    let kernels = [
        libc::IN_ACCESS,
        libc::IN_MODIFY,
        libc::IN_ATTRIB,
        libc::IN_CLOSE_WRITE,
        libc::IN_CLOSE_NOWRITE,
        libc::IN_OPEN,
        libc::IN_MOVED_FROM,
        libc::IN_MOVED_TO,
        libc::IN_CREATE,
        libc::IN_DELETE,
        libc::IN_DELETE_SELF,
        libc::IN_MOVE_SELF,
    ];
    let ours = [
        event::ACCESS,
        event::MODIFY,
        event::ATTRIB,
        event::CLOSE_WRITE,
        event::CLOSE_NOWRITE,
        event::OPEN,
        event::MOVED_FROM,
        event::MOVED_TO,
        event::CREATE,
        event::DELETE,
        event::DELETE_SELF,
        event::MOVE_SELF,
    ];
    assert_eq!(ours, kernels);
    assert_eq!(event::ALL, libc::IN_ALL_EVENTS);
    assert_eq!((event::IGNORED, event::ISDIR), (libc::IN_IGNORED, libc::IN_ISDIR));
}

#[test]
fn each_watcher_is_told_all_that_it_asked_for() {
    let setup = setup(EngineWish::Automatic);
    let clients: Vec<Client> = (0..3).map(|_| setup.client()).collect();
    // A read-only export can be watched like any other.
    let exports: [&[u8]; 3] = [b"dir", b"ro", b"dir"];
    let roots: Vec<File> =
        clients.iter().zip(exports).map(|(client, name)| client.attach(name).unwrap()).collect();
    roots[0].watch(event::CREATE).unwrap();
    roots[1].watch(event::CREATE | event::DELETE).unwrap();
    roots[2].watch(event::DELETE).unwrap();
    let ears: Vec<Ear> = clients.iter().map(Ear::of).collect();
    let at = |name: &str| setup.data.join(name);
    for number in 0..50 {
        std::fs::write(at(&format!("f{number}")), b"").unwrap();
        std::fs::remove_file(at(&format!("f{number}"))).unwrap();
    }
    // Bits that are asked for later are added, and nothing is reported twice.
    roots[0].watch(event::CREATE | event::DELETE).unwrap();
    roots[0].watch(event::DELETE).unwrap();
    std::fs::write(at("last"), b"").unwrap();
    std::fs::remove_file(at("last")).unwrap();
    let all: Vec<String> = (0..50).map(|number| format!("f{number}")).collect();
    let told: Vec<_> = ears.iter().map(|ear| ear.until(event::DELETE, "last")).collect();
    for who in [0, 1] {
        let made = names(&told[who], event::CREATE);
        assert_eq!(made[..50], all[..]);
        assert_eq!(made[50..], ["last"]);
    }
    // Earlier ones may still have been under way.
    let mut removed = names(&told[0], event::DELETE);
    assert_eq!(removed.pop(), Some("last"));
    assert_eq!(removed, all[50 - removed.len()..]);
    assert_eq!(names(&told[1], event::DELETE)[..50], all[..]);
    assert_eq!(names(&told[2], event::DELETE)[..50], all[..]);
    assert!(told[2].iter().all(|event| event.mask & event::CREATE == 0));
}

#[test]
fn the_end_of_what_is_watched_is_told() {
    let setup = setup(EngineWish::Automatic);
    let client = setup.client();
    let root = client.attach(b"dir").unwrap();
    let file = root.open(b"file", CREATE, 0o600).unwrap();
    let path = 0o10_000_000;
    let folder = {
        root.make_directory(b"folder", 0o700).unwrap();
        root.open(b"folder", path, 0).unwrap()
    };
    file.watch(event::MODIFY).unwrap();
    client.watch(folder.handle(), event::CREATE).unwrap();
    let ear = Ear::of(&client);
    file.write_at(b"x", 0).unwrap();
    root.unlink(b"file", false).unwrap();
    root.unlink(b"folder", true).unwrap();
    let mut told: HashMap<u64, Vec<u32>> = HashMap::new();
    while told.values().flatten().filter(|mask| *mask & event::IGNORED != 0).count() < 2 {
        for Happening { handle, mask, .. } in ear.next().events {
            told.entry(handle).or_default().push(mask & !event::ISDIR);
        }
    }
    let end = [event::DELETE_SELF, event::IGNORED];
    assert_eq!(told[&file.handle()], [&[event::MODIFY][..], &end].concat());
    assert_eq!(told[&folder.handle()], end);
}

fn member(transport: &Transport) -> Client {
    let mut options = Options::default();
    options.family = 0xfa17;
    Client::connect(transport, options).unwrap()
}

#[test]
fn a_family_watches_together() {
    let setup = setup(EngineWish::Automatic);
    for (round, transport) in setup.transports.iter().enumerate() {
        let (watcher, asker) = (member(transport), member(&setup.transports[0]));
        let ear = Ear::of(&asker);
        let root = watcher.attach(b"dir").unwrap();
        root.watch(event::CREATE).unwrap();
        let name = |what: &str| format!("{what}{round}");
        std::fs::write(setup.data.join(name("a")), b"").unwrap();
        let told = ear.until(event::CREATE, &name("a"));
        assert_eq!(told[0].handle, root.handle());
        // The watch belongs to the family: it stays when the session that asked for it ends,
        let handle = root.into_handle();
        watcher.close();
        std::fs::write(setup.data.join(name("b")), b"").unwrap();
        let told = ear.until(event::CREATE, &name("b"));
        assert_eq!(names(&told, event::CREATE), [name("b")]);
        // until a member closes the file.
        let third = member(transport);
        third.with_handle(handle, 0, |file| file.watch(event::DELETE)).unwrap();
        std::fs::remove_file(setup.data.join(name("b"))).unwrap();
        ear.until(event::DELETE, &name("b"));
        third.close_handle(handle);
        assert_eq!(third.watch(handle, event::DELETE).unwrap_err().errno(), Errno::EBADF);
    }
}

#[test]
fn what_has_piled_up_is_told_in_several_answers() {
    let setup = setup(EngineWish::Automatic);
    let connect = |at| Client::connect(at, Options::default()).unwrap();
    let clients: Vec<Client> = setup.transports.iter().map(connect).collect();
    let roots: Vec<File> = clients.iter().map(|client| client.attach(b"mem").unwrap()).collect();
    roots.iter().for_each(|root| root.watch(event::CREATE).unwrap());
    let other = setup.client().attach(b"mem").unwrap();
    // A quarter of a MiB of events.
    let all: Vec<String> = (0..2000).map(|number| format!("{number:0>110}")).collect();
    for name in &all {
        other.write_path(name.as_bytes(), CREATE, 0o600, b"").unwrap();
    }
    for client in &clients {
        let told = Ear::of(client).until(event::CREATE, &all[1999]);
        assert!(names(&told, event::CREATE) == all, "{} are told", told.len());
    }
}

#[test]
#[ignore = "not a test: the server that other tests kill"]
fn child_server() {
    common::child_server();
}

#[test]
fn many_files_are_watched() {
    // Each open directory is a descriptor of the server, which is in this process.
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let setup = setup(EngineWish::Automatic);
    let client = setup.client();
    let root = client.attach(b"dir").unwrap();
    let count = 1000;
    let folders: Vec<File> = (0..count)
        .map(|number| {
            let name = format!("d{number}");
            std::fs::create_dir(setup.data.join(&name)).unwrap();
            let folder = root.open(name.as_bytes(), 0, 0).unwrap();
            folder.watch(event::CREATE).unwrap();
            folder
        })
        .collect();
    let ear = Ear::of(&client);
    for number in 0..count {
        std::fs::write(setup.data.join(format!("d{number}/f{number}")), b"").unwrap();
    }
    let told = ear.until(event::CREATE, &format!("f{}", count - 1));
    let told: Vec<_> = told.iter().map(|event| (event.handle, event.name.clone())).collect();
    let expected = folders.iter().enumerate();
    let expected: Vec<_> =
        expected.map(|(n, folder)| (folder.handle(), format!("f{n}").into_bytes())).collect();
    assert_eq!(told, expected);
}

#[test]
fn waiting_can_be_given_up_and_one_request_waits() {
    let setup = setup(EngineWish::Automatic);
    let client = setup.client();
    let root = client.attach(b"dir").unwrap();
    root.watch(event::CREATE).unwrap();
    for round in 0..20 {
        let waits = client.start_events().unwrap();
        waits.cancel();
        assert_eq!(waits.wait().unwrap_err().errno(), Errno::EINTR);
        // Of two requests that wait, the first one is answered with nothing.
        let first = client.start_events().unwrap();
        let second = client.start_events().unwrap();
        assert_eq!(first.wait().unwrap(), Happenings::default());
        let name = format!("f{round}");
        std::fs::write(setup.data.join(&name), b"").unwrap();
        // Events of a dropped request go to the next one, and once.
        if round % 2 == 0 {
            drop(second);
        } else {
            let told = second.wait().unwrap();
            assert_eq!(names(&told.events, event::CREATE), [&name]);
            continue;
        }
        let again = [client.start_events().unwrap(), client.start_events().unwrap()];
        let told = again.map(|asked| asked.wait().unwrap().events).concat();
        assert_eq!(names(&told, event::CREATE), [&name]);
    }
}

#[test]
fn a_server_stops_at_once_though_somebody_waits() {
    let mut setup = setup(EngineWish::Automatic);
    let connect = |at| Client::connect(at, Options::default()).unwrap();
    let clients: Vec<Client> = setup.transports.iter().map(connect).collect();
    for client in &clients {
        client.attach(b"dir").unwrap().watch(event::CREATE).unwrap();
    }
    let waits: Vec<_> = clients.iter().map(|client| client.start_events().unwrap()).collect();
    for client in &clients {
        // Once this is answered, the request for events waits.
        client.attach(b"dir").unwrap();
    }
    let start = Instant::now();
    setup.server.take().unwrap().stop();
    // For requests under way it would wait five seconds.
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    drop(waits);
}
