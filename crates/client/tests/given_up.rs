//! A server that stays away for longer than its clients wait: requests fail, and once it is back, the clients go on
//! in new sessions.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, EXCLUSIVE, Process, counter, eventually, setup};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use towline_client::{Client, Errno, Error, File, Lock, Options, Transport};
use towline_server::EngineWish;
use towline_wire::event;
use towline_wire::request::lock;

#[test]
#[ignore = "not a test: the server that other tests kill"]
fn child_server() {
    common::child_server();
}

/// A client that soon gives up a server that is away.
fn impatient(transport: &Transport, family: u64) -> Client {
    let mut options = Options::default();
    options.family = family;
    (options.reconnect, options.greeting) = (Duration::from_millis(50), Duration::from_secs(1));
    Client::connect(transport, options).unwrap()
}

/// A way to a server, which can be closed.
struct Road {
    transport: Transport,
    /// The connections that use it; `None` while it is closed.
    used: Arc<Mutex<Option<Vec<TcpStream>>>>,
}

impl Road {
    fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let used = Arc::new(Mutex::new(Some(Vec::new())));
        let all = used.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let mut all = all.lock().unwrap();
                let Some(all) = all.as_mut() else { continue };
                let far = TcpStream::connect(("127.0.0.1", target)).unwrap();
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
                all.extend([near, far]);
            }
        });
        Self { transport: Transport::Tcp("127.0.0.1".into(), port), used }
    }

    fn close(&self) {
        for connection in self.used.lock().unwrap().take().into_iter().flatten() {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    fn open(&self) {
        *self.used.lock().unwrap() = Some(Vec::new());
    }
}

fn patient(transport: &Transport) -> Client {
    Client::connect(transport, Options::default()).unwrap()
}

fn open(client: &Client, name: &[u8]) -> File {
    client.attach(b"dir").unwrap().open(name, CREATE, 0o600).unwrap()
}

/// Uses the client until it has a session again.
fn goes_on(client: &Client) {
    eventually("the client goes on", || client.restore().is_ok());
}

fn is_away<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Connection { .. }))
}

const WHOLE: Lock =
    Lock { family: lock::FLOCK, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 0 };

#[test]
fn a_client_goes_on_when_the_server_is_back_and_repeats_nothing() {
    for (keeps_state, transport) in [(false, 0), (false, 2), (true, 1)] {
        let directory = TempDir::new().unwrap();
        let mut server =
            Process::start_with(directory.path(), keeps_state, Duration::from_secs(30));
        let data = directory.path().join("data");
        let transport = server.transports()[transport].clone();
        let client = impatient(&transport, 0);
        let root = client.attach(b"dir").unwrap();
        let [kept, removed] = [b"kept", b"gone"].map(|name| open(&client, name));
        assert_eq!(kept.write_at(b"before", 0), Ok(6));
        kept.lock(&WHOLE, false).unwrap();
        server.stop(); // so that the request is sent, and never read
        let unanswered = root.start_create(b"unanswered", CREATE | EXCLUSIVE, 0o600).unwrap();
        server.kill();
        assert!(is_away(unanswered.wait()));
        assert!(is_away(kept.stat()) && is_away(root.make_directory(b"later", 0o700)));
        std::fs::remove_file(data.join("gone")).unwrap();
        server.restart();
        goes_on(&client);
        let mut back = [0; 6];
        assert_eq!(kept.read_at(&mut back, 0), Ok(6));
        assert_eq!(&back, b"before");
        let others = open(&patient(&transport), b"kept");
        assert_eq!(others.lock(&WHOLE, false).unwrap_err().errno(), Errno::EAGAIN);
        // With a state, the server may have kept it.
        assert!(keeps_state || removed.stat().unwrap_err().errno() == Errno::ESTALE);
        assert_eq!(std::fs::read_dir(&data).unwrap().count(), 1, "nothing was asked for again");
        root.make_directory(b"now", 0o700).unwrap();
        root.unlink(b"now", true).unwrap();
        // From here on, the server is away anew.
        server.kill();
        assert!(is_away(kept.stat()));
        server.restart();
        goes_on(&client);
        assert_eq!(kept.write_at(b"after", 0), Ok(5));
    }
}

/// The old session has its locks until the client is back, and nobody else can tell who that is.
#[test]
fn the_session_that_the_server_still_has_is_ended() {
    let setup = setup(EngineWish::Automatic);
    let road = Road::to(setup.port());
    let (client, other) = (impatient(&road.transport, 0), setup.client());
    let sessions = || counter(&other, "sessions");
    let before = sessions();
    let [files, others] =
        [&client, &other].map(|client| [b"free", b"want"].map(|name| open(client, name)));
    files.iter().for_each(|file| file.lock(&WHOLE, false).unwrap());
    let waits = others[1].start_lock(&WHOLE).unwrap();
    road.close();
    assert!(is_away(files[0].stat()));
    assert_eq!(others[0].lock(&WHOLE, false).unwrap_err().errno(), Errno::EAGAIN);
    road.open();
    goes_on(&client);
    assert_eq!(files[0].write_at(b"mine", 0), Ok(4));
    assert_eq!(others[0].lock(&WHOLE, false).unwrap_err().errno(), Errno::EAGAIN);
    // Who had waited was first.
    waits.wait().unwrap();
    assert_eq!(files[1].stat().unwrap_err().errno(), Errno::ESTALE);
    assert_eq!(sessions(), before);
}

/// The others of the family keep it open.
#[test]
fn what_was_closed_while_the_server_was_away_is_closed_when_it_is_back() {
    const FAMILY: u64 = 0x5eed;
    let setup = setup(EngineWish::Automatic);
    let road = Road::to(setup.port());
    let (client, other) =
        (impatient(&road.transport, FAMILY), impatient(&setup.transports[0], FAMILY));
    let files = [b"dropped", b"waitfor", b"remains"].map(|name| open(&client, name));
    let whole = Lock { family: lock::PROCESS, owner: 7, ..WHOLE };
    files.iter().for_each(|file| file.lock(&whole, false).unwrap());
    let handles = files.each_ref().map(File::handle);
    let [dropped, waited, remains] = files;
    road.close();
    assert!(is_away(remains.stat()));
    drop(dropped);
    assert!(is_away(waited.close()));
    client.end_process(7);
    assert!(client.is_idle(), "as far as anybody can tell");
    road.open();
    goes_on(&client);
    remains.stat().unwrap();
    let is_open = |handle: &u64| other.with_handle(*handle, 0, File::stat).is_ok();
    eventually("they are closed", || handles.each_ref().map(is_open) == [false, false, true]);
    let stranger = open(&setup.client(), b"remains");
    eventually("the lock goes", || stranger.lock(&WHOLE_OF_ANOTHER, false).is_ok());
}

/// The lock of another process.
const WHOLE_OF_ANOTHER: Lock = Lock { family: lock::PROCESS, owner: 8, ..WHOLE };

#[test]
fn all_threads_go_on_in_one_session() {
    let setup = setup(EngineWish::Automatic);
    let road = Road::to(setup.port());
    let (client, other) = (impatient(&road.transport, 0), setup.client());
    let before = counter(&other, "sessions");
    let root = client.attach(b"dir").unwrap();
    road.close();
    assert!(is_away(root.stat()));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| eventually("the thread goes on", || root.stat().is_ok()));
        }
        road.open();
    });
    assert_eq!(counter(&other, "sessions"), before);
}

#[test]
fn who_watches_is_told_that_events_were_lost() {
    let setup = setup(EngineWish::Automatic);
    let road = Road::to(setup.port());
    let client = impatient(&road.transport, 0);
    let root = client.attach(b"dir").unwrap();
    root.watch(event::CREATE).unwrap();
    let waits = client.start_events().unwrap();
    road.close();
    assert!(is_away(waits.wait()) && is_away(client.events()));
    std::fs::write(setup.data.join("missed"), "").unwrap();
    road.open();
    goes_on(&client);
    assert!(client.events().unwrap().lost);
    root.watch(event::CREATE).unwrap();
    std::fs::write(setup.data.join("told"), "").unwrap();
    let told = client.events().unwrap();
    assert_eq!(told.events.first().unwrap().name, b"told");
}

/// What the server has answered is as durable as before, since it has not ended.
#[test]
fn disks_go_on_with_what_was_written() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    let road = Road::to(server.port);
    let client = impatient(&road.transport, 0);
    let disk = client.disk(b"memory").unwrap();
    disk.write_at(&[7; 512], 0).unwrap();
    road.close();
    assert!(is_away(disk.write_at(&[8; 512], 512)));
    road.open();
    goes_on(&client);
    let mut back = [0; 1024];
    disk.read_at(&mut back, 0).unwrap();
    assert_eq!(back.map(|byte| byte / 7), [[1; 512], [0; 512]].concat()[..]);
    disk.flush().unwrap();
    server.kill();
}
