//! Watched files: who watches is told what anybody does to them, once each, whatever happens to connections and servers.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, setup};
use std::sync::mpsc;
use std::time::Duration;
use towline_client::{Client, Happening, Happenings, Options};
use towline_server::EngineWish;
use towline_wire::event;

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

/// Names of what was told of this kind, in order.
fn names(told: &[Happening], mask: u32) -> Vec<&str> {
    let of_kind = told.iter().filter(|event| event.mask & mask != 0);
    of_kind.map(|event| std::str::from_utf8(&event.name).unwrap()).collect()
}

#[test]
fn changes_by_other_clients_and_local_programs_are_told() {
    let setup = setup(EngineWish::Automatic);
    for (round, transport) in setup.transports.iter().enumerate() {
        let client = Client::connect(transport, Options::default()).unwrap();
        let watched = client.attach(b"dir").unwrap();
        watched.watch(event::ALL & !event::ACCESS).unwrap();
        let ear = Ear::of(&client);
        let other = setup.client();
        let root = other.attach(b"dir").unwrap();
        let name = |what: &str| format!("{what}{round}");
        root.write_path(name("a").as_bytes(), CREATE, 0o600, b"text").unwrap();
        root.rename(name("a").as_bytes(), &root, name("b").as_bytes(), 0).unwrap();
        root.unlink(name("b").as_bytes(), false).unwrap();
        std::fs::create_dir(setup.data.join(name("local"))).unwrap();
        let told = ear.until(event::CREATE, &name("local"));
        assert!(told.iter().all(|event| event.handle == watched.handle()));
        assert_eq!(names(&told, event::CREATE), [name("a"), name("local")]);
        assert_eq!(names(&told, event::MODIFY), [name("a")]);
        assert_eq!(names(&told, event::CLOSE_WRITE), [name("a")]);
        assert_eq!(names(&told, event::DELETE), [name("b")]);
        let moves = event::MOVED_FROM | event::MOVED_TO;
        assert_eq!(names(&told, moves), [name("a"), name("b")]);
        let cookies: Vec<u32> =
            told.iter().filter(|e| e.mask & moves != 0).map(|e| e.cookie).collect();
        assert!(cookies[0] != 0 && cookies[0] == cookies[1], "{cookies:?}");
        let made = told.iter().rfind(|event| event.mask & event::CREATE != 0).unwrap();
        assert!(made.mask & event::ISDIR != 0, "{made:?}");
        // The watch ends with the file.
        watched.close().unwrap();
        let again = client.attach(b"dir").unwrap();
        std::fs::write(setup.data.join(name("unseen")), b"").unwrap();
        again.watch(event::CREATE).unwrap();
        std::fs::write(setup.data.join(name("seen")), b"").unwrap();
        let told = ear.until(event::CREATE, &name("seen"));
        assert_eq!(names(&told, event::CREATE), [name("seen")]);
    }
}
