//! Connections that are cut, servers that are restarted, and clients that do not listen.

use super::common::proxy::Proxy;
use super::common::{Process, eventually, seed, setup};
use super::{Ear, MOVES, member, names, once};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tempfile::TempDir;
use towline_client::{Client, Happenings, Options, Transport};
use towline_server::EngineWish;
use towline_wire::event;

/// Connects, and tries again if that very connection is cut.
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
            // Most likely the client waits again, and the next cut finds it waiting.
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
        // Nothing has happened to any of these. The third client asks only once the server is back.
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
            assert_eq!(once(&clients[2].0), Happenings { events: vec![], lost: true });
            for root in clients.iter().map(|(_, root)| root).chain([&of_run]) {
                root.watch(event::CREATE).unwrap();
            }
            let name = format!("seen{round}");
            std::fs::write(directory.path().join("data").join(&name), b"").unwrap();
            for ear in &ears {
                assert_eq!(names(&ear.until(event::CREATE, &name), event::CREATE), [&name]);
            }
            let told = once(&clients[2].0);
            assert_eq!((names(&told.events, event::CREATE), told.lost), (vec![&name[..]], false));
        }
    }
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
    // It continues to listen.
    let mut number = 0;
    eventually("nothing is told any more", || {
        number += 1;
        let name = format!("later{number}");
        std::fs::rename(&here, data.join(&name)).unwrap();
        std::fs::rename(data.join(&name), &here).unwrap();
        ear.next().events.iter().any(|event| event.name.starts_with(b"later"))
    });
}
