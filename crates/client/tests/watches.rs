//! Watched files: who watches is told what anybody does to them, once each, whatever happens to connections and servers.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::proxy::Proxy;
use common::{CREATE, Process, Raw, eventually, hello, hello_message, request, seed, setup};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use towline_client::{Client, Errno, File, Happening, Happenings, Options, Transport};
use towline_server::EngineWish;
use towline_wire::event::{self, Events};
use towline_wire::reply::parse_results;
use towline_wire::{Hello, Kind, Reply, Request};

/// Long enough for any machine: who waits longer waits for ever.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a client is told, by a thread that asks and asks.
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

    /// All that is told up to the first event of this kind with this name.
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

/// Both halves of a move.
const MOVES: u32 = event::MOVED_FROM | event::MOVED_TO;

/// Names of what was told of this kind, in order.
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
    // Bits that are asked for later come to the others, and nothing is told twice.
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
    // The one before may still have been on its way.
    let mut removed = names(&told[0], event::DELETE);
    assert_eq!(removed.pop(), Some("last"));
    assert!(removed.len() <= 1 && removed.iter().all(|name| *name == "f49"), "{removed:?}");
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
        // The watch is the family's: it stays when the session ends that asked for it.
        let handle = root.into_handle();
        watcher.close();
        std::fs::write(setup.data.join(name("b")), b"").unwrap();
        let told = ear.until(event::CREATE, &name("b"));
        assert_eq!(names(&told, event::CREATE), [name("b")]);
        // Until somebody of it closes the file.
        let third = member(transport);
        third.with_handle(handle, 0, |file| file.watch(event::DELETE)).unwrap();
        std::fs::remove_file(setup.data.join(name("b"))).unwrap();
        ear.until(event::DELETE, &name("b"));
        third.close_handle(handle);
        assert_eq!(third.watch(handle, event::DELETE).unwrap_err().errno(), Errno::EBADF);
    }
}

/// Connects, again when that very connection is cut.
fn connect(port: u16) -> Client {
    loop {
        let transport = Transport::Tcp("127.0.0.1".into(), port);
        if let Ok(client) = Client::connect(&transport, Options::default()) {
            return client;
        }
    }
}

#[test]
fn nothing_is_lost_or_told_twice_though_connections_are_cut() {
    let setup = setup(EngineWish::Automatic);
    let proxy = Proxy::start(setup.port(), seed(), 3000);
    let client = connect(proxy.port);
    let root = client.attach(b"dir").unwrap();
    root.watch(event::CREATE | MOVES).unwrap();
    let ear = Ear::of(&client);
    let mut told = Vec::new();
    let rounds = 400;
    for round in 0..rounds {
        let [made, moved] = ["made", "moved"].map(|what| setup.data.join(format!("{what}{round}")));
        std::fs::write(&made, b"").unwrap();
        std::fs::rename(&made, &moved).unwrap();
        if round % 3 == 0 {
            // It waits again, most likely, and the next cut finds it so.
            told.extend(ear.until(event::MOVED_TO, &format!("moved{round}")));
        }
    }
    if told.last().is_none_or(|last| last.name != format!("moved{}", rounds - 1).as_bytes()) {
        told.extend(ear.until(event::MOVED_TO, &format!("moved{}", rounds - 1)));
    }
    assert!(proxy.cuts.load(Ordering::Relaxed) > 5, "{:?}", proxy.cuts);
    let names_of = |what: &str| (0..rounds).map(|n| format!("{what}{n}")).collect::<Vec<_>>();
    assert_eq!(names(&told, event::CREATE), names_of("made"));
    assert_eq!(names(&told, event::MOVED_FROM), names_of("made"));
    assert_eq!(names(&told, event::MOVED_TO), names_of("moved"));
}

#[test]
fn a_connection_that_ends_while_nothing_happens_is_gone_on_with() {
    let setup = setup(EngineWish::Automatic);
    for (round, transport) in setup.transports.iter().enumerate() {
        let client = Client::connect(transport, Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        root.watch(event::CREATE).unwrap();
        let ear = Ear::of(&client);
        for cut in 0..5 {
            root.stat().unwrap();
            rustix::net::shutdown(client.fd().unwrap(), rustix::net::Shutdown::Both).unwrap();
            let name = format!("{round}-{cut}");
            std::fs::write(setup.data.join(&name), b"").unwrap();
            assert_eq!(names(&ear.until(event::CREATE, &name), event::CREATE), [&name]);
        }
    }
}

#[test]
fn a_restart_of_the_server_is_told_and_watching_goes_on() {
    for keeps_state in [false, true] {
        let directory = TempDir::new().unwrap();
        let mut server = Process::start_with(directory.path(), keeps_state, Duration::ZERO);
        let clients = server.transports().map(|transport| {
            let client = Client::connect(&transport, Options::default()).unwrap();
            let root = client.attach(b"dir").unwrap();
            (client, root)
        });
        let (keeper, runner) = (member(&server.tcp()), member(&server.tcp()));
        // Nothing has happened to any of these. The third one asks only when the server is there again.
        let begins = keeper.start_events().unwrap().wait().unwrap();
        assert_eq!(begins, Happenings::default());
        let ears = [Ear::of(&clients[0].0), Ear::of(&clients[1].0), Ear::of(&keeper)];
        let of_run = runner.attach(b"dir").unwrap();
        for root in clients.iter().map(|(_, root)| root).chain([&of_run]) {
            root.watch(event::CREATE).unwrap();
        }
        for round in 0..2 {
            server.kill();
            let unseen = directory.path().join("data").join(format!("unseen{round}"));
            std::fs::write(unseen, b"").unwrap();
            server.restart();
            of_run.stat().unwrap();
            for ear in &ears {
                assert_eq!(ear.next(), Happenings { events: vec![], lost: true });
            }
            let third = &clients[2].0;
            assert!(third.events().unwrap().lost);
            for root in clients.iter().map(|(_, root)| root).chain([&of_run]) {
                root.watch(event::CREATE).unwrap();
            }
            let name = format!("seen{round}");
            std::fs::write(directory.path().join("data").join(&name), b"").unwrap();
            for ear in &ears {
                assert_eq!(names(&ear.until(event::CREATE, &name), event::CREATE), [&name]);
            }
            let told = third.events().unwrap();
            assert_eq!((names(&told.events, event::CREATE), told.lost), (vec![&name[..]], false));
        }
    }
}

#[test]
#[ignore = "not a test: the server that other tests kill"]
fn child_server() {
    common::child_server();
}

#[test]
fn who_does_not_listen_loses_events_and_the_server_keeps_its_memory() {
    let directory = TempDir::new().unwrap();
    let server = Process::start(directory.path());
    let client = Client::connect(&server.tcp(), Options::default()).unwrap();
    let root = client.attach(b"dir").unwrap();
    root.watch(MOVES).unwrap();
    let data = directory.path().join("data");
    let [here, there] = ["h", "t"].map(|letter| data.join(letter.repeat(250)));
    std::fs::write(&here, b"").unwrap();
    let before = server.memory();
    // 33 MiB of events, if all were kept.
    for _ in 0..30_000 {
        std::fs::rename(&here, &there).unwrap();
        std::fs::rename(&there, &here).unwrap();
    }
    root.stat().unwrap();
    let grown = server.memory().saturating_sub(before);
    assert!(grown < 16, "{grown} MiB more");
    let ear = Ear::of(&client);
    let (mut told, mut loses) = (0, false);
    while !loses {
        let Happenings { events, lost } = ear.next();
        (told, loses) = (told + events.len(), lost);
    }
    assert!((1..=20_000).contains(&told), "{told} events");
    // And goes on listening.
    let mut number = 0;
    eventually("nothing is told any more", || {
        number += 1;
        let name = format!("later{number}");
        std::fs::rename(&here, data.join(&name)).unwrap();
        std::fs::rename(data.join(&name), &here).unwrap();
        ear.next().events.iter().any(|event| event.name.starts_with(b"later"))
    });
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
        // Of two that ask, the first one is told nothing.
        let first = client.start_events().unwrap();
        let second = client.start_events().unwrap();
        assert_eq!(first.wait().unwrap(), Happenings::default());
        let name = format!("f{round}");
        std::fs::write(setup.data.join(&name), b"").unwrap();
        // What is told to nobody is told to the next, and once.
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
        // Answered behind it, so that it waits.
        client.attach(b"dir").unwrap();
    }
    let start = Instant::now();
    setup.server.take().unwrap().stop();
    // It would wait for five for requests under way.
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    drop(waits);
}

/// A session that speaks raw bytes, and its open root.
struct Speaker {
    raw: Raw,
    session: Hello,
    root: u64,
}

impl Speaker {
    fn begin(port: u16) -> Self {
        let (mut raw, welcome) = Raw::greeted(port);
        let session = Hello { session: welcome.session, secret: welcome.secret, ..hello() };
        raw.send(&request(0, 1, &[Request::Attach { name: b"dir" }], 0));
        let (_, body) = raw.receive().unwrap();
        let Some(Reply::Opened { handle, .. }) = parse_results(&body).unwrap().pop() else {
            panic!("no root")
        };
        Self { raw, session, root: handle }
    }

    /// Goes on over another connection.
    fn come_back(&mut self, port: u16) {
        self.raw = Raw::connect(port);
        self.raw.send(&hello_message(&self.session));
        assert_eq!(self.raw.receive().unwrap().0.kind, Kind::Welcome);
    }

    fn send(&mut self, slot: u16, sequence: u32, what: Request<'_>) {
        self.raw.send(&request(slot, sequence, &[what], 0));
    }

    /// The next answer: its slot, what it says, and its events.
    fn answer(&mut self) -> (u16, Result<(u64, bool), Errno>, Vec<Happening>) {
        let (header, bytes) = self.raw.receive().expect("thrown out");
        let (body, payload) = bytes.split_at(header.body_bytes as usize);
        let events = Events::new(payload).map(|event| event.unwrap().into()).collect();
        let said = match parse_results(body).unwrap()[..] {
            [Reply::Events { next, lost, length }] => {
                assert_eq!(length as usize, payload.len());
                Ok((next, lost != 0))
            }
            [Reply::Number { value }] => Ok((value, false)),
            [Reply::Failed { errno }] => Err(Errno(errno)),
            ref other => panic!("{other:?}"),
        };
        (header.slot, said, events)
    }
}

#[test]
fn who_asks_and_disappears_is_told_when_it_is_back() {
    let setup = setup(EngineWish::Automatic);
    let mut speaker = Speaker::begin(setup.port());
    let mask = event::CREATE;
    speaker.send(1, 1, Request::Watch { handle: speaker.root, mask });
    let (_, first, _) = speaker.answer();
    let (mut seen, _) = first.unwrap();
    for sequence in 1..20 {
        let asks = Request::Events { seen };
        speaker.send(2, sequence, asks);
        // Answered behind it, so that it waits.
        speaker.send(3, sequence, Request::Watch { handle: speaker.root, mask });
        assert_eq!(speaker.answer().0, 3);
        if sequence % 2 == 0 {
            speaker.come_back(setup.port());
            speaker.send(2, sequence, asks);
        }
        if sequence % 3 == 0 {
            speaker.raw = Raw::connect(setup.port());
        }
        let name = format!("f{sequence}");
        std::fs::write(setup.data.join(&name), b"").unwrap();
        if sequence % 3 == 0 {
            speaker.come_back(setup.port());
            speaker.send(2, sequence, asks);
        }
        let (_, said, told) = speaker.answer();
        assert_eq!(names(&told, event::CREATE), [&name]);
        // The answer is lost: it is given again, over another connection, with what has happened since.
        speaker.come_back(setup.port());
        let late = format!("late{sequence}");
        std::fs::write(setup.data.join(&late), b"").unwrap();
        eventually("what has happened is told to who asks again", || {
            speaker.come_back(setup.port());
            speaker.send(2, sequence, asks);
            let (_, said, told) = speaker.answer();
            (seen, _) = said.unwrap();
            assert_eq!(told[0].name, name.as_bytes());
            told.len() == 2 && told[1].name == late.as_bytes()
        });
        assert_eq!(seen, said.unwrap().0 + 1);
    }
}

#[test]
fn a_client_cannot_ask_for_what_there_is_not() {
    let setup = setup(EngineWish::Automatic);
    let mut speaker = Speaker::begin(setup.port());
    let handle = speaker.root;
    let all = [
        (handle, 0, Errno::EINVAL),
        (handle, event::IGNORED, Errno::EINVAL),
        (handle, event::ALL | 0x1000, Errno::EINVAL),
        (handle, u32::MAX, Errno::EINVAL),
        (0, event::CREATE, Errno::EBADF),
        (handle + 1, event::CREATE, Errno::EBADF),
        (u64::MAX, event::CREATE, Errno::EBADF),
        (handle | 1 << 63, event::CREATE, Errno::EBADF),
    ];
    for (sequence, (handle, mask, errno)) in (1..).zip(all) {
        speaker.send(1, sequence, Request::Watch { handle, mask });
        assert_eq!(speaker.answer().1, Err(errno), "{mask:#x} of {handle:#x}");
    }
    // Whoever has no number gets one; an absurd one is told to be so, and at once.
    speaker.send(2, 1, Request::Events { seen: 0 });
    let (next, lost) = speaker.answer().1.unwrap();
    assert!(next != 0 && !lost);
    for (sequence, absurd) in (2..).zip([1, next - 1, next + 1, u64::MAX]) {
        speaker.send(2, sequence, Request::Events { seen: absurd });
        assert_eq!(speaker.answer().1, Ok((next, true)), "{absurd:#x}");
    }
    // Of many that wait all but the last are answered with nothing.
    for slot in 3..63 {
        speaker.send(slot, 1, Request::Events { seen: next });
    }
    for slot in 3..62 {
        assert_eq!(speaker.answer(), (slot, Ok((next, false)), vec![]));
    }
    speaker.send(1, 9, Request::Watch { handle, mask: event::CREATE });
    assert_eq!(speaker.answer().1, Ok((next, false)));
    std::fs::write(setup.data.join("made"), b"").unwrap();
    let (slot, said, told) = speaker.answer();
    assert_eq!((slot, said, told.len()), (62, Ok((next + 1, false)), 1));
    // Who waits must not wait for what it asks for itself.
    let together = [Request::Watch { handle, mask: 1 }, Request::Events { seen: 0 }];
    speaker.raw.send(&request(1, 10, &together, 0));
    assert!(speaker.raw.thrown_out());
    setup.client().attach(b"dir").unwrap().stat().unwrap();
}
