//! Sessions of a family share their open files and the locks of these; each has process locks of
//! its own.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, Raw, counter, eventually, hello, hello_message, request, setup};
use towline_client::{Client, Connection, Errno, File, Lock, Options, Transport};
use towline_server::EngineWish;
use towline_wire::reply::parse_results;
use towline_wire::request::lock::{EXCLUSIVE, FLOCK, OPEN_FILE, PROCESS, SHARED, UNLOCK};
use towline_wire::{Hello, Kind, Reply, Request};

fn member(transport: &Transport) -> Client {
    let mut options = Options::default();
    options.family = 0x5eed;
    // Like a library inside another program, whose descriptor numbers it must not take.
    options.hide = |fd| Ok(rustix::io::fcntl_dupfd_cloexec(fd, 200)?);
    Client::connect(transport, options).unwrap()
}

fn whole(family: u8, owner: u64) -> Lock {
    Lock { family, kind: EXCLUSIVE, owner, start: 0, length: 0 }
}

#[test]
fn a_file_outlives_the_session_that_opened_it() {
    let setup = setup(EngineWish::Automatic);
    for transport in &setup.transports {
        let (first, second) = (member(transport), member(transport));
        assert!(std::os::fd::AsRawFd::as_raw_fd(&first.fd().unwrap()) >= 200);
        let root = first.attach(b"dir").unwrap();
        let file = root.open(b"shared", CREATE, 0o600).unwrap();
        file.write_at(b"from the first", 0).unwrap();
        root.unlink(b"shared", false).unwrap();
        file.lock(&whole(FLOCK, 0), false).unwrap();
        let (inode, handle) = (file.attr().identity(), file.into_handle());
        drop(root);
        first.close();

        let file = File::from_handle(&second, handle, b"dir", b"shared", CREATE, inode);
        let mut back = [0; 14];
        eventually("the session has ended", || file.read_at(&mut back, 0) == Ok(14));
        assert_eq!(&back, b"from the first");
        // The lock belongs to the open file, whichever session uses it.
        file.lock(&whole(FLOCK, 0), false).unwrap();
        file.close().unwrap();
        let stranger = Client::connect(transport, Options::default()).unwrap();
        let other = File::from_handle(&stranger, handle, b"dir", b"shared", CREATE, inode);
        assert_eq!(other.stat().unwrap_err().errno(), Errno::EBADF);
        let _ = other.into_handle();
        second.close();
    }
}

/// As when one process has connected, and another one needs a connection.
#[test]
fn a_session_that_was_begun_for_another_process_goes_on_there() {
    let setup = setup(EngineWish::Automatic);
    let observer = setup.client();
    for transport in &setup.transports[..2] {
        let keeper = member(transport);
        let root = keeper.attach(b"dir").unwrap();
        let file = root.open(b"handed", CREATE, 0o600).unwrap();
        let (inode, handle) = (file.attr().identity(), file.into_handle());
        let mut options = Options::default();
        options.family = 0x5eed;
        for is_cut in [false, true] {
            let connection = Connection::begin(transport, &options).unwrap();
            assert!(!connection.is_lost() && keeper.hand_over(&connection, 7));
            let (bytes, socket) = connection.to_parts().unwrap();
            let passed = || socket.try_clone_to_owned().unwrap();
            assert!(Connection::from_parts(transport, &bytes[1..], passed()).is_none());
            let there = Connection::from_parts(transport, &bytes, passed()).unwrap();
            if is_cut {
                rustix::net::shutdown(socket, rustix::net::Shutdown::Both).unwrap();
                assert!(there.is_lost());
            }
            drop(connection);
            let mut own = options.clone();
            own.process = 7;
            let client = Client::over(there, own).unwrap();
            assert_eq!(client.boot_epoch(), keeper.boot_epoch());
            let file = File::from_handle(&client, handle, b"dir", b"handed", CREATE, inode);
            file.write_at(b"handed", 0).unwrap();
            file.lock(&whole(PROCESS, 7), false).unwrap();
            let _ = file.into_handle();
            client.close();
        }
        let unused = Connection::begin(transport, &options).unwrap();
        unused.close();
        keeper.close_handle(handle);
        drop(root);
        keeper.close();
        eventually("a session is left", || counter(&observer, "sessions") == 1);
    }
}

/// Nor does anything stay open that was opened for a process which has ended before it took it.
#[test]
fn a_directory_that_nobody_has_taken_goes_with_the_session_that_opened_it() {
    const DIRECTORY: u32 = 0o200_000;
    let setup = setup(EngineWish::Automatic);
    for transport in &setup.transports {
        for export in [&b"dir"[..], b"mem"] {
            let (first, second) = (member(transport), member(transport));
            let root = first.attach(export).unwrap();
            let open = || root.start_open_listing(b".", DIRECTORY, true).unwrap().wait().unwrap();
            let [(taken, listing), (lost, _)] = [open(), open()];
            assert!(listing.is_some_and(|(_, is_all)| is_all));
            taken.keep().unwrap();
            let inode = taken.attr().identity();
            let handles = [root, taken, lost].map(File::into_handle);
            let are_open = || {
                handles.map(|handle| {
                    let file = File::from_handle(&second, handle, export, b"", DIRECTORY, inode);
                    let found = file.stat();
                    let _ = file.into_handle();
                    found.is_ok()
                })
            };
            assert_eq!(are_open(), [true; 3]);
            first.close();
            eventually("it is still open", || are_open() == [true, true, false]);
            second.close();
        }
    }
}

/// Wherever the answer is when that becomes clear.
#[test]
fn what_is_opened_for_nobody_is_closed() {
    let setup = setup(EngineWish::Automatic);
    std::fs::write(setup.data.join("unwanted"), "x").unwrap();
    let opened = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = all.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        links.filter(|link| *link == setup.data.join("unwanted")).count()
    };
    let client = setup.client();
    let root = client.attach(b"dir").unwrap();
    let start = || root.start_open_reading(b"unwanted", 0, 1).unwrap();
    for is_answered in [false, true] {
        let operation = start();
        if is_answered {
            root.stat().unwrap(); // requests are answered in order
            assert_eq!(opened(), 1);
        }
        drop(operation);
        eventually("it is still open", || root.stat().is_ok() && opened() == 0);
    }
    // So many that answers are set aside for others.
    let many: Vec<_> = (0..200).map(|_| start()).collect();
    drop(many);
    eventually("some are still open", || root.stat().is_ok() && opened() == 0);
}

#[test]
fn a_lock_that_cannot_be_converted_is_given_up() {
    let setup = setup(EngineWish::Automatic);
    let clients = [(); 2].map(|()| member(&setup.transports[0]));
    let open =
        |client: &Client| client.attach(b"dir").unwrap().open(b"converted", CREATE, 0o600).unwrap();
    let [one, other] = clients.each_ref().map(open);
    let lock = |kind| Lock { kind, ..whole(FLOCK, 0) };
    one.lock(&lock(SHARED), false).unwrap();
    other.lock(&lock(SHARED), false).unwrap();
    assert_eq!(one.lock(&lock(EXCLUSIVE), false).unwrap_err().errno(), Errno::EAGAIN);
    assert!(!clients[0].has_locked(one.handle()), "nothing to take again after a restart");
    other.lock(&lock(EXCLUSIVE), false).unwrap();
}

#[test]
fn process_locks_belong_to_a_process_of_the_family() {
    let setup = setup(EngineWish::Automatic);
    let [first, second, third] = [(); 3].map(|()| member(&setup.transports[0]));
    let root = first.attach(b"dir").unwrap();
    let file = root.open(b"locked", CREATE, 0o600).unwrap();
    let inode = file.attr().identity();
    let seen_by =
        |client| File::from_handle(client, file.handle(), b"dir", b"locked", CREATE, inode);
    let (same, other) = (seen_by(&second), seen_by(&third));
    file.lock(&whole(PROCESS, 1), false).unwrap();
    assert_eq!(other.lock(&whole(PROCESS, 2), false).unwrap_err().errno(), Errno::EAGAIN);
    // The process continues in another session, as after an `exec`.
    same.lock(&whole(PROCESS, 1), false).unwrap();
    first.close();
    second.close();
    eventually("the lock falls with the last session of its process", || {
        other.lock(&whole(PROCESS, 2), false).is_ok()
    });
    drop(root);
    let _ = (same.into_handle(), other.into_handle(), file.into_handle());
}

/// A process whose connection was cut, and which sends nothing, does not know of it.
#[test]
fn process_locks_last_until_their_end_is_reported() {
    let setup = setup(EngineWish::Automatic);
    let mut options = Options::default();
    (options.family, options.reports_ends) = (0x5eed, true);
    let keeper = Client::connect(&setup.transports[0], options).unwrap();
    let [process, other] = [(); 2].map(|()| member(&setup.transports[0]));
    let open =
        |client: &Client| client.attach(b"dir").unwrap().open(b"locked", CREATE, 0o600).unwrap();
    let (file, same) = (open(&process), open(&other));
    file.lock(&whole(PROCESS, 1), false).unwrap();
    let _ = file.into_handle();
    process.close();
    eventually("the session has ended", || counter(&other, "sessions") == 2);
    assert_eq!(same.lock(&whole(PROCESS, 2), false).unwrap_err().errno(), Errno::EAGAIN);
    keeper.end_process(1);
    eventually("the lock falls when the process is reported", || {
        same.lock(&whole(PROCESS, 2), false).is_ok()
    });
}

/// A client that waits for a lock may be gone: it does not get the lock before it is known to be
/// there.
#[test]
fn who_lost_its_connection_waits_on_when_it_is_back() {
    let setup = setup(EngineWish::Automatic);
    for transport in &setup.transports {
        let mut names = (0..5).map(|number| format!("waited{number}"));
        let is_seen = names.any(|name| waits_on_when_it_is_back(transport, name.as_bytes()));
        assert!(is_seen, "who is gone gets the lock each time, over {transport:?}");
    }
}

/// Returns false if the lock went to who is gone: on a busy machine, the end of the connection may reach the
/// server after the unlock.
fn waits_on_when_it_is_back(transport: &Transport, name: &[u8]) -> bool {
    let connect = || {
        let client = Client::connect(transport, Options::default()).unwrap();
        let root = client.attach(b"dir").unwrap();
        (root.open(name, CREATE, 0o600).unwrap(), client)
    };
    let [(holder, _first), (waiter, lost), (third, _third)] = [connect(), connect(), connect()];
    let range = whole(OPEN_FILE, 0);
    let unlock = Lock { kind: UNLOCK, ..range };
    holder.lock(&range, false).unwrap();
    let waits = waiter.start_lock(&range).unwrap();
    // Once this is answered, the lock request waits.
    waiter.stat().unwrap();
    rustix::net::shutdown(lost.fd().unwrap(), rustix::net::Shutdown::Both).unwrap();
    holder.lock(&unlock, false).unwrap();
    match third.lock(&range, false) {
        Err(error) if error.errno() == Errno::EAGAIN => return false,
        locked => locked.unwrap(),
    };
    let granted = std::thread::spawn(move || waits.wait());
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!granted.is_finished(), "two have the lock, over {transport:?}");
    third.lock(&unlock, false).unwrap();
    granted.join().unwrap().unwrap();
    assert_eq!(third.lock(&range, false).unwrap_err().errno(), Errno::EAGAIN);
    true
}

/// Like a thread of a program that closes a file while another thread waits for a lock on it.
#[test]
fn who_waits_for_a_lock_of_a_file_that_is_closed_is_told() {
    let setup = setup(EngineWish::Automatic);
    let [first, second, stranger] = [(); 3].map(|()| member(&setup.transports[0]));
    let open = |client: &Client| client.attach(b"dir").unwrap().open(b"closed", CREATE, 0o600);
    let (holder, file) = (open(&stranger).unwrap(), open(&first).unwrap());
    holder.lock(&whole(FLOCK, 0), false).unwrap();
    let same = |client: &Client| {
        File::from_handle(client, file.handle(), b"dir", b"closed", CREATE, file.attr().identity())
    };
    // One waits in the closing session and one in another, as in a `towline run`.
    let (near, far) = (same(&first), same(&second));
    let waits = [near.start_lock(&whole(FLOCK, 0)), far.start_lock(&whole(FLOCK, 0))];
    // Once these are answered, the lock requests wait.
    near.stat().unwrap();
    far.stat().unwrap();
    file.close().unwrap();
    for operation in waits {
        assert_eq!(operation.unwrap().wait().unwrap_err().errno(), Errno::EBADF);
    }
    let _ = (near.into_handle(), far.into_handle());
    drop(holder);
}

/// Like the processes of a `towline run` whose network is down for longer than their sessions last.
#[test]
fn a_family_whose_sessions_all_ended_has_its_own_files_again() {
    let mut setup = setup(EngineWish::Automatic);
    let server = setup.server.take().unwrap();
    let Transport::Unix(socket) = &setup.transports[1] else { panic!("no socket") };
    let away = socket.with_extension("away");
    let [first, second] = [(); 2].map(|()| member(&setup.transports[1]));
    let epoch = first.boot_epoch();
    assert_eq!(second.boot_epoch(), epoch);
    let root = first.attach(b"dir").unwrap();
    let files = [b"a", b"b", b"c"].map(|name| {
        let file = root.open(name, CREATE, 0o600).unwrap();
        file.write_at(name, 0).unwrap();
        file
    });
    let seen_by = |client: &Client, number: usize| {
        let (file, name) = (&files[number], [b"a", b"b", b"c"][number]);
        let inode = file.attr().identity();
        File::from_handle(client, file.handle(), b"dir", name, CREATE, inode)
    };
    let of_second: Vec<File> = (0..3).map(|number| seen_by(&second, number)).collect();

    std::fs::rename(socket, &away).unwrap();
    for client in [&first, &second] {
        rustix::net::shutdown(client.fd().unwrap(), rustix::net::Shutdown::Both).unwrap();
    }
    let watcher = setup.client();
    eventually("the sessions end", || counter(&watcher, "sessions") == 1);
    std::fs::rename(&away, socket).unwrap();

    // The first one opens as many others as were open, before the second one is back.
    let others = [b"d", b"e", b"f", b"g"].map(|name| {
        let file = root.open(name, CREATE, 0o600).unwrap();
        file.write_at(name, 0).unwrap();
        file
    });
    let third = member(&setup.transports[1]);
    assert_ne!(third.boot_epoch(), epoch, "a member that joins now has to reopen the files");
    let of_third: Vec<File> = (0..3).map(|number| seen_by(&third, number)).collect();
    third.reclaim().unwrap();
    for (number, name) in [b"a", b"b", b"c"].into_iter().enumerate() {
        for file in [&files[number], &of_second[number], &of_third[number]] {
            let mut back = [0; 2];
            assert_eq!(file.read_at(&mut back, 0).unwrap(), 1);
            assert_eq!(back[..1], name[..]);
            assert_eq!(file.write_at(name, 0).unwrap(), 1);
        }
    }
    for (file, name) in others.iter().zip([b"d", b"e", b"f", b"g"]) {
        assert_eq!(
            std::fs::read(setup.data.join(std::str::from_utf8(name).unwrap())).unwrap(),
            name
        );
        let mut back = [0; 2];
        assert_eq!(file.read_at(&mut back, 0).unwrap(), 1);
    }
    assert_eq!((second.boot_epoch(), first.boot_epoch()), (third.boot_epoch(), third.boot_epoch()));
    for file in of_second.into_iter().chain(of_third) {
        let _ = file.into_handle();
    }
    drop((files, others, root));
    server.stop();
}

/// Like two programs on different machines, one of which holds locks while its network is down for longer than its
/// sessions last.
#[test]
fn locks_that_others_have_had_since_a_family_lost_them_are_not_taken_again() {
    let mut setup = setup(EngineWish::Automatic);
    let server = setup.server.take().unwrap();
    let Transport::Unix(socket) = &setup.transports[1] else { panic!("no socket") };
    let away = socket.with_extension("away");
    let client = member(&setup.transports[1]);
    let root = client.attach(b"dir").unwrap();
    let names = [b"a", b"b", b"c", b"d"];
    let kinds = [(FLOCK, 0), (FLOCK, 0), (PROCESS, 7), (PROCESS, 7)].map(|(f, o)| whole(f, o));
    let files = names.map(|name| root.open(name, CREATE, 0o600).unwrap());
    for (file, wanted) in files.iter().zip(&kinds) {
        file.lock(wanted, false).unwrap();
        file.write_at(b"0", 0).unwrap();
    }

    std::fs::rename(socket, &away).unwrap();
    rustix::net::shutdown(client.fd().unwrap(), rustix::net::Shutdown::Both).unwrap();
    let other = setup.client();
    let others = other.attach(b"dir").unwrap();
    let theirs = names.map(|name| others.open(name, CREATE, 0o600).unwrap());
    for number in [0, 2] {
        let wanted = Lock { owner: 1, ..kinds[number] };
        theirs[number].lock(&wanted, true).unwrap();
        theirs[number].write_at(b"1", 0).unwrap();
        theirs[number].lock(&Lock { kind: UNLOCK, ..wanted }, false).unwrap();
    }
    std::fs::rename(&away, socket).unwrap();

    for (number, file) in files.iter().enumerate() {
        let written = file.write_at(b"2", 0).map_err(|error| error.errno());
        let wanted = Lock { owner: 1, ..kinds[number] };
        let locked = theirs[number].lock(&wanted, false).map_err(|error| error.errno());
        if number % 2 == 0 {
            assert_eq!((written, locked.is_ok()), (Err(Errno::ESTALE), true), "file {number}");
        } else {
            assert_eq!((written, locked), (Ok(1), Err(Errno::EAGAIN)), "file {number}");
        }
    }
    drop((files, root, theirs, others));
    server.stop();
}

/// Like a process that was stopped until its session ended, while others of its `towline run` went
/// on.
#[test]
fn what_the_family_still_has_open_is_had_again_wherever_it_is() {
    let setup = setup(EngineWish::Automatic);
    let first = member(&setup.transports[0]);
    for export in [&b"dir"[..], b"mem"] {
        let root = first.attach(export).unwrap();
        let file = root.open(b"unlinked", CREATE, 0o600).unwrap();
        root.unlink(b"unlinked", false).unwrap();
        let (known, known_inode) = (file.handle(), file.attr().identity());
        let mut again = Raw::connect(setup.port());
        again.send(&hello_message(&Hello { family: 0x5eed, ..hello() }));
        assert_eq!(again.receive().unwrap().0.kind, Kind::Welcome);
        let asked = [(known, known_inode), (known, known_inode + 1), (known + 1, known_inode)];
        for (number, (handle, inode)) in asked.into_iter().enumerate() {
            let reclaim =
                Request::Reclaim { handle, flags: CREATE, inode, export, path: b"unlinked" };
            again.send(&request(0, number as u32 + 1, &[reclaim], 0));
            let (_, body) = again.receive().unwrap();
            let found = matches!(
                parse_results(&body).unwrap()[0],
                Reply::Opened { handle, attr } if (handle, attr.identity()) == (known, known_inode)
            );
            assert_eq!(found, number == 0, "{}, number {number}", export.escape_ascii());
        }
    }
}
