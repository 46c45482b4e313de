//! Servers and connections lost at a bad moment: while files are being reopened, or closed.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, Process, Raw, eventually, message};
use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use towline_client::{Client, Errno, Error, File, Lock, Options, Transport};
use towline_net::address::Address;
use towline_server::{Config, Export, ExportKind, Server};
use towline_wire::request::{lock, rename_flag};

#[test]
#[ignore = "not a test: the server that other tests kill"]
fn child_server() {
    common::child_server();
}

/// Returns what kills and restarts a server.
fn restarting(server: &Arc<Mutex<Process>>) -> impl Fn() + Clone + Send + use<> {
    let server = server.clone();
    move || {
        let mut server = server.lock().unwrap();
        server.kill();
        server.restart();
    }
}

/// Forwards connections. Cuts connection number `cut`, counted from 1, after `messages` messages
/// from the server, and calls `before` first.
fn cutter(target: u16, cut: usize, messages: usize, before: impl Fn() + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let before = Arc::new(Mutex::new(before));
    std::thread::spawn(move || {
        let mut number = 0;
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(("127.0.0.1", target)) else {
                continue; // the server is not there yet
            };
            number += 1;
            let (mut from, mut to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            let limit = if number == cut { messages } else { usize::MAX };
            let before = before.clone();
            std::thread::spawn(move || {
                let (mut from, mut to) = (Raw(far), near);
                for _ in 0..limit {
                    let Some((header, rest)) = from.receive() else { break };
                    let (body, payload) = rest.split_at(header.body_bytes as usize);
                    if to.write_all(&message(header, body, payload)).is_err() {
                        break;
                    }
                }
                if limit < usize::MAX {
                    before.lock().unwrap()();
                }
                let _ = to.shutdown(Shutdown::Both);
                let _ = from.0.shutdown(Shutdown::Both);
            });
        }
    });
    port
}

#[test]
fn locks_are_had_again_though_the_lane_is_lost_meanwhile() {
    // Messages from the server: the welcome, and the answers to opening the root, opening the file,
    // locking it, and opening another one.
    for messages in 1..6 {
        let directory = TempDir::new().unwrap();
        let mut server = Process::start(directory.path());
        let port = cutter(server.port, 2, messages, || ());
        let transport = Transport::Tcp("127.0.0.1".into(), port);
        let client = Client::connect(&transport, Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        let file = root.open(b"file", CREATE, 0o600).unwrap();
        let other = root.open(b"other", CREATE, 0o600).unwrap();
        let exclusive =
            Lock { family: lock::OPEN_FILE, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 0 };
        file.lock(&exclusive, false).unwrap();
        server.kill();
        server.restart();
        other.stat().unwrap();
        let attr = file.stat();
        assert!(attr.is_ok(), "after {messages} messages: {}", attr.unwrap_err());
    }
}

/// The server has been told that nothing more will be opened again, so the next connection joins the session.
#[test]
fn a_file_is_lost_though_the_connection_on_which_that_turned_out_is_lost_too() {
    let directory = TempDir::new().unwrap();
    let started = Process::start_with(directory.path(), true, Duration::from_secs(60));
    let (to, near) = (started.port, started.tcp());
    let server = Mutex::new(started);
    // After the welcome and the answer to opening the root of the memory again.
    let port = cutter(to, 2, 2, move || {
        let client = Client::connect(&near, Options::default()).unwrap();
        eventually("it is told", || client.statistics().unwrap().contains("\"Reclaimed\":1"));
    });
    let client =
        Client::connect(&Transport::Tcp("127.0.0.1".into(), port), Options::default()).unwrap();
    let root = client.attach(b"mem").unwrap();
    let mut server = server.lock().unwrap();
    server.kill();
    server.restart();
    assert_eq!(root.stat().unwrap_err().errno(), Errno::ESTALE);
}

/// The server has made an append, whose answer was lost with its connection, and is killed before the client can
/// send the request again.
#[test]
fn what_was_sent_on_an_earlier_connection_is_not_sent_to_the_next_server() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    let log = directory.path().join("data/log");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let appended = log.clone();
    std::thread::spawn(move || {
        let to = server.port;
        let accept =
            || (listener.accept().unwrap().0, TcpStream::connect(("127.0.0.1", to)).unwrap());
        let pass = |from: &mut Raw, to: &mut TcpStream| {
            let (header, rest) = from.receive().unwrap();
            let (body, payload) = rest.split_at(header.body_bytes as usize);
            to.write_all(&message(header, body, payload)).unwrap();
        };
        let copy = |from: &TcpStream, to: &TcpStream| {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        };
        let (mut near, far) = accept();
        copy(&near, &far);
        let mut far = Raw(far);
        // The welcome, and the answers to opening the root and the file.
        (0..3).for_each(|_| pass(&mut far, &mut near));
        eventually("it is appended", || std::fs::metadata(&appended).unwrap().len() > 0);
        // Before what it sends after a while, the client looks whether the server is there.
        std::thread::sleep(Duration::from_millis(50));
        let _ = near.shutdown(Shutdown::Both);
        let (near, mut far) = accept();
        let mut near = Raw(near);
        pass(&mut near, &mut far);
        let (header, body) = Raw(far).receive().unwrap();
        server.kill();
        server.restart();
        // In one packet with the end.
        rustix::net::sockopt::set_tcp_cork(&near.0, true).unwrap();
        near.send(&message(header, &body, &[]));
        near.0.shutdown(Shutdown::Both).unwrap();
        let (near, far) = accept();
        copy(&near, &far);
        copy(&far, &near);
        std::thread::park();
    });
    let client =
        Client::connect(&Transport::Tcp("127.0.0.1".into(), port), Options::default()).unwrap();
    let root = client.attach(b"dir").unwrap();
    let file = root.open(b"log", CREATE, 0o600).unwrap();
    assert_eq!(file.append(b"once"), Err(Error::Unknown));
    assert_eq!(std::fs::read(log).unwrap(), b"once");
}

/// Like a program that starts in a `towline run` after a restart of the server, which restarts once
/// more meanwhile.
#[test]
fn what_others_opened_is_had_again_though_the_server_is_killed_meanwhile() {
    // Messages from the server before it is killed: the welcome, and the answers to opening the
    // root and each of the files.
    for messages in 1..5 {
        let directory = TempDir::new().unwrap();
        let server = Arc::new(Mutex::new(Process::start(directory.path())));
        let (port, near) = {
            let server = server.lock().unwrap();
            (server.port, server.tcp())
        };
        let again = restarting(&server);
        let member = |transport: &Transport| {
            let mut options = Options::default();
            options.family = 0x5eed;
            Client::connect(transport, options).unwrap()
        };
        let first = member(&near);
        let root = first.attach(b"dir").unwrap();
        let open = |name: &str| root.open(name.as_bytes(), CREATE, 0o600).unwrap();
        let files = ["a", "b", "c"].map(open);
        again();
        let port = cutter(port, 1, messages, again);
        let second = member(&Transport::Tcp("127.0.0.1".into(), port));
        let begun = second.boot_epoch();
        let same = |file: &File, name: &str, flags| {
            let inode = file.attr().identity();
            File::from_handle(&second, file.handle(), b"dir", name.as_bytes(), flags, inode)
        };
        let flags = (libc::O_PATH | libc::O_DIRECTORY) as u32;
        let mut known = vec![same(&root, "", flags)];
        known.extend(files.iter().zip(["a", "b", "c"]).map(|(file, name)| same(file, name, 2)));
        second.reclaim().unwrap();
        assert_ne!(second.boot_epoch(), begun, "it was not killed meanwhile");
        for (number, file) in known.into_iter().enumerate() {
            let attr = file.stat();
            assert!(attr.is_ok(), "{number} after {messages} messages: {}", attr.unwrap_err());
            let _ = file.into_handle();
        }
    }
}

/// The server may have answered the close but not the write when it is killed: the write is then
/// resent to a server that has to reopen the file for it.
#[test]
fn what_was_begun_before_a_file_is_closed_is_done_though_the_server_is_killed() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    let client = Client::connect(&server.tcp(), Options::default()).unwrap();
    let root = client.attach(b"dir").unwrap();
    let file = root.open(b"file", CREATE, 0o600).unwrap();
    let path = directory.path().canonicalize().unwrap().join("data/file");
    let write = file.start_write_at(vec![7; 4 << 20], 0).unwrap();
    file.close().unwrap();
    server.kill();
    server.restart();
    assert_eq!(write.wait().map(|(written, _)| written), Ok(4 << 20));
    assert_eq!(std::fs::read(&path).unwrap(), vec![7; 4 << 20]);
    root.stat().unwrap();
    assert!(!server.has_open(&path), "it is closed");
}

#[test]
fn files_that_the_client_has_renamed_are_opened_again() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    for transport in server.transports() {
        let client = Client::connect(&transport, Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        root.make_directory(b"d", 0o700).unwrap();
        let below = root.open(b"d", 0, 0).unwrap();
        let files = ["a", "d/b", "d/c"].map(|name| {
            let file = root.open(name.as_bytes(), CREATE, 0o600).unwrap();
            file.write_at(name.as_bytes(), 0).unwrap();
            file
        });
        let outside = below.open(b"../a", 0, 0).unwrap();
        root.rename(b"a", &below, b"a", 0).unwrap();
        below.rename(b"b", &root, b"e", 0).unwrap();
        root.rename(b"e", &below, b"c", rename_flag::EXCHANGE).unwrap();
        root.rename(b"d", &root, b"f", 0).unwrap();
        server.kill();
        server.restart();
        for (file, name) in files.iter().zip(["a", "d/b", "d/c"]) {
            let mut back = [0; 8];
            let count = file.read_at(&mut back, 0).unwrap();
            assert_eq!(&back[..count], name.as_bytes());
        }
        assert!(below.stat_path(b"a", false).unwrap().inode == files[0].attr().inode);
        // `..` is not followed by the client.
        assert_eq!(outside.stat().unwrap_err().errno(), Errno::ESTALE);
        below.unlink(b"a", false).unwrap();
        below.unlink(b"c", false).unwrap();
        root.unlink(b"e", false).unwrap();
        root.unlink(b"f", true).unwrap();
    }
}

/// The server has renamed the file, but was killed before its answer arrived.
#[test]
fn a_file_is_opened_again_though_its_rename_was_not_answered() {
    for keeps_state in [false, true] {
        let directory = TempDir::new().unwrap();
        let started = Process::start_with(directory.path(), keeps_state, Duration::from_secs(60));
        let (to, new) = (started.port, directory.path().join("data/new"));
        let server = Mutex::new(started);
        // After the welcome and the answers to opening the root and the file.
        let port = cutter(to, 1, 3, move || {
            eventually("it is renamed", || new.exists());
            let mut server = server.lock().unwrap();
            server.kill();
            server.restart();
        });
        let transport = Transport::Tcp("127.0.0.1".into(), port);
        let client = Client::connect(&transport, Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        let file = root.open(b"old", CREATE, 0o600).unwrap();
        assert_eq!(root.rename(b"old", &root, b"new", 0).is_ok(), keeps_state);
        file.stat().unwrap();
    }
}

/// The server has exchanged their names, but was killed before its answer arrived, and is killed once more later.
#[test]
fn files_are_opened_again_and_again_though_their_exchange_was_not_answered() {
    let directory = TempDir::new().unwrap();
    let data = directory.path().join("data");
    let started = Process::start_with(directory.path(), true, Duration::from_secs(60));
    let to = started.port;
    for name in ["one", "other"] {
        std::fs::write(data.join(name), name).unwrap();
    }
    let server = Arc::new(Mutex::new(started));
    let again = restarting(&server);
    // After the welcome and the answers to opening the root and the files.
    let port = cutter(to, 1, 4, {
        let again = again.clone();
        move || {
            let is_other = || std::fs::read(data.join("one")).unwrap() == b"other";
            eventually("the names are exchanged", is_other);
            again();
        }
    });
    let client =
        Client::connect(&Transport::Tcp("127.0.0.1".into(), port), Options::default()).unwrap();
    let root = client.attach(b"dir").unwrap();
    let files = ["one", "other"].map(|name| root.open(name.as_bytes(), 2, 0).unwrap());
    root.rename(b"one", &root, b"other", rename_flag::EXCHANGE).unwrap();
    again();
    for (file, name) in files.iter().zip(["one", "other"]) {
        let mut back = [0; 8];
        let count = file.read_at(&mut back, 0).unwrap();
        assert_eq!(&back[..count], name.as_bytes());
    }
}

/// The server has unlocked the file, but was killed before its answer arrived, and another client has it.
#[test]
fn a_lock_is_not_asked_for_again_though_giving_it_up_was_not_answered() {
    for (keeps_state, family) in
        [(false, lock::PROCESS), (true, lock::PROCESS), (true, lock::FLOCK)]
    {
        let directory = TempDir::new().unwrap();
        let server = Process::start_with(directory.path(), keeps_state, Duration::ZERO);
        let (to, near) = (server.port, server.tcp());
        let server = Mutex::new(server);
        let exclusive = Lock { family, kind: lock::EXCLUSIVE, owner: 1, start: 0, length: 0 };
        let other = Client::connect(&near, Options::default()).unwrap();
        let root = other.attach(b"dir").unwrap();
        let others = root.open(b"file", CREATE, 0o600).unwrap();
        // Messages from the server: the welcome, and the answers to opening the root and the file and to
        // locking it.
        let port = cutter(to, 1, 4, move || {
            others.lock(&Lock { owner: 2, ..exclusive }, true).unwrap();
            let mut server = server.lock().unwrap();
            server.kill();
            server.restart();
            others.stat().unwrap();
        });
        let transport = Transport::Tcp("127.0.0.1".into(), port);
        let client = Client::connect(&transport, Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        let file = root.open(b"file", CREATE, 0o600).unwrap();
        file.lock(&exclusive, false).unwrap();
        file.lock(&Lock { kind: lock::UNLOCK, ..exclusive }, false).unwrap();
        file.stat().unwrap();
        assert_eq!(file.lock(&exclusive, false).unwrap_err().errno(), Errno::EAGAIN);
    }
}

/// The paths of files that are opened one below the other can become longer than any request may have.
#[test]
fn a_file_too_deep_to_be_opened_again_is_lost_alone() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    let mut options = Options::default();
    options.reconnect = Duration::from_secs(3);
    let client = Client::connect(&server.tcp(), options).unwrap();
    let root = client.attach(b"dir").unwrap();
    let name = [b'd'; 250];
    let mut deep = root.open(b".", 0, 0).unwrap();
    for _ in 0..20 {
        deep.make_directory(&name, 0o755).unwrap();
        deep = deep.open(&name, 0, 0).unwrap();
    }
    server.kill();
    server.restart();
    assert!(root.stat().unwrap().is_directory());
    assert_eq!(deep.stat().unwrap_err().errno(), Errno::ESTALE);
    deep.close().unwrap();
}

/// A service that opens its files as root and then gives up its privileges keeps them.
#[test]
fn files_are_opened_again_by_the_user_who_opened_them() {
    if !rustix::process::geteuid().is_root() {
        return common::skipped("files of other users: only root can do that");
    }
    let directory = TempDir::new().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let port = common::free_port();
    let config = Config {
        exports: vec![Export::new("dir", ExportKind::Directory(directory.path().into()))],
        listen: vec![Address::parse(&format!("tcp://127.0.0.1:{port}")).unwrap()],
        identity: true,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let transport = Transport::Tcp("127.0.0.1".into(), port);
    let client = Client::connect(&transport, Options::default()).unwrap();
    client.act_as(2000, 2000);
    let root = client.attach(b"dir").unwrap();
    let log = root.open(b"log", CREATE, 0o600).unwrap();
    client.act_as(3000, 3000);
    server.stop();
    let _server = Server::start(&config).unwrap();
    assert_eq!(root.open(b"log", 0, 0).err().unwrap().errno(), Errno::EACCES);
    assert_eq!(log.write_at(b"line", 0).unwrap(), 4);
}

#[test]
fn locks_of_a_process_that_ended_are_not_taken_again() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    let connect = || Client::connect(&server.tcp(), Options::default()).unwrap();
    let (client, other) = (connect(), connect());
    let open =
        |client: &Client| client.attach(b"dir").unwrap().open(b"file", CREATE | 2, 0o600).unwrap();
    let (file, others) = (open(&client), open(&other));
    let lock = |owner| Lock {
        family: lock::PROCESS,
        kind: lock::EXCLUSIVE,
        owner,
        start: owner,
        length: 1,
    };
    for owner in [1, 2] {
        file.lock(&lock(owner), false).unwrap();
    }
    client.end_process(1);
    eventually("the server is told", || {
        client.progress();
        client.is_idle()
    });
    server.kill();
    server.restart();
    file.stat().unwrap();
    assert_eq!(others.lock(&lock(2), false).unwrap_err().errno(), Errno::EAGAIN);
    others.lock(&lock(1), false).unwrap();
}

/// A client that is back first, after a restart without `--state`, gets locks that another one still believes to have.
#[test]
fn locks_that_others_have_had_since_a_restart_are_not_taken_again() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    let connect = || Client::connect(&server.tcp(), Options::default()).unwrap();
    let (client, other) = (connect(), connect());
    let open = |client: &Client| {
        let root = client.attach(b"dir").unwrap();
        [b"a", b"b"].map(|name| root.open(name, CREATE | 2, 0o600).unwrap())
    };
    let (files, others) = (open(&client), open(&other));
    let exclusive =
        Lock { family: lock::FLOCK, kind: lock::EXCLUSIVE, owner: 0, start: 0, length: 0 };
    for file in &files {
        file.lock(&exclusive, false).unwrap();
    }
    server.kill();
    server.restart();
    others[0].lock(&exclusive, false).unwrap();
    others[0].lock(&Lock { kind: lock::UNLOCK, ..exclusive }, false).unwrap();
    assert_eq!(files[0].write_at(b"line", 0).unwrap_err().errno(), Errno::ESTALE);
    assert_eq!(files[1].write_at(b"line", 0).unwrap(), 4);
    assert_eq!(others[1].lock(&exclusive, false).unwrap_err().errno(), Errno::EAGAIN);
}

#[test]
fn a_client_may_wait_for_its_server_for_ever() {
    let directory = TempDir::new().unwrap();
    let mut server = Process::start(directory.path());
    let mut options = Options::default();
    options.reconnect = Duration::MAX;
    let client = Client::connect(&server.tcp(), options).unwrap();
    let root = client.attach(b"dir").unwrap();
    server.kill();
    server.restart();
    assert!(root.stat().unwrap().is_directory());
}
