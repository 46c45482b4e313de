//! Memory that clients on the server's machine read in place: contents against a model, loans that
//! hold and are given back, peers that forge them, and clients that get none.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod borrowers;
#[path = "../common/mod.rs"]
mod common;
mod raw;
mod servers;

use common::{CREATE, Random, Setup, TRUNCATE, counter, eventually, pattern, seed, setup_with};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use towline_client::{Client, File, Options, SetAttr, Transport};
use towline_net::address::Address;
use towline_server::{Config, EngineWish, Export, ExportKind, RateLimit, Server};

const KIB: usize = 1024;
const MIB: usize = 1 << 20;
const OTHER_USER: u32 = 54321;

fn socket(setup: &Setup) -> PathBuf {
    match &setup.transports[2] {
        Transport::Shm(path) => path.clone(),
        _ => panic!("no shared memory"),
    }
}

fn connect(transport: &Transport) -> Client {
    let mut options = Options::default();
    options.reconnect = Duration::from_secs(20);
    Client::connect(transport, options).unwrap()
}

/// A client of another user than the server's, over shared memory; `None` if this process may not
/// change its user.
fn connect_as_other(setup: &Setup) -> Option<Client> {
    if !rustix::process::geteuid().is_root() {
        common::skipped("a borrower of another user: only root can connect as one");
        return None;
    }
    let path = socket(setup);
    let open = |path: &std::path::Path| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    };
    open(path.parent().unwrap());
    open(&path);
    let transport = setup.transports[2].clone();
    // A thread has a user of its own, and a connection has the user of the thread that connected.
    let other = std::thread::spawn(move || {
        let user = rustix::process::Uid::from_raw(OTHER_USER);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        connect(&transport)
    });
    Some(other.join().unwrap())
}

fn set_size(file: &File, size: u64) {
    file.set_attr(b"", true, &SetAttr { size: Some(size), ..SetAttr::default() }).unwrap();
}

#[test]
fn clients_with_and_without_the_memory_agree_with_a_model() {
    let setup = setup_with(EngineWish::Automatic, 64 << 20);
    let mapped = connect(&setup.transports[2]);
    let plain = connect_as_other(&setup).unwrap_or_else(|| connect(&setup.transports[1]));
    let roots = [mapped.attach(b"mem").unwrap(), plain.attach(b"mem").unwrap()];
    roots[0].write_path(b"f", CREATE, 0o666, b"").unwrap();
    let files = roots.each_ref().map(|root| root.open(b"f", 2, 0).unwrap());
    let mut random = Random::new(seed());
    let mut model: Vec<u8> = Vec::new();
    let mut later = Vec::new();
    for round in 0..800u32 {
        let size = model.len() as u64;
        let file = random.pick(&files);
        match random.below(10) {
            0..=3 => {
                let offset = random.below(size + 100_000);
                let data = pattern(random.any_size(400_000) as usize, round as u8);
                assert_eq!(file.write_at(&data, offset).unwrap(), data.len());
                let end = offset as usize + data.len();
                model.resize(model.len().max(end), 0);
                model[offset as usize..end].copy_from_slice(&data);
            }
            4 => {
                let size = random.below(2 * MIB as u64);
                set_size(file, size);
                model.resize(size as usize, 0);
            }
            5 => {
                let (offset, length) = (random.below(size + 1), random.any_size(300_000));
                file.allocate(3, offset, length).unwrap();
                let end = (offset + length).min(size) as usize;
                model[offset as usize..end].fill(0);
            }
            6 => {
                // Started now, taken later: it returns what was true when it was answered.
                let offset = random.below(size + 1);
                let buffer = vec![0xee; random.below(600_000) as usize];
                let end = model.len().min(offset as usize + buffer.len());
                let expected = model[offset as usize..end].to_vec();
                // The second call ensures that the read is answered before anything changes.
                let operation = file.start_read_at(buffer, offset).unwrap();
                file.stat().unwrap();
                later.push((operation, expected));
                if later.len() > 20 {
                    let at = random.below(later.len() as u64) as usize;
                    let (operation, expected) = later.swap_remove(at);
                    let (count, buffer) = operation.wait().unwrap();
                    assert!(buffer[..count] == expected[..], "round {round}, taken later");
                }
            }
            _ => {
                let offset = random.below(size + 1);
                let most = *random.pick(&[20_000, 1_500_000]);
                let mut buffer = vec![0xee; random.below(most) as usize];
                let count = file.read_at(&mut buffer, offset).unwrap();
                let end = model.len().min(offset as usize + buffer.len());
                assert_eq!(count, end - offset as usize, "round {round}");
                assert!(buffer[..count] == model[offset as usize..end], "round {round}");
                assert!(buffer[count..].iter().all(|byte| *byte == 0xee), "round {round}");
            }
        }
    }
    for (operation, expected) in later {
        let (count, buffer) = operation.wait().unwrap();
        assert!(buffer[..count] == expected[..]);
    }
    assert!(counter(&plain, "replies_lent") > 100, "nothing was lent, so nothing was tested");
    drop((files, roots));
    drop(mapped);
    eventually("the loans of a client that left come back", || {
        counter(&plain, "bytes_on_loan") == 0
    });
}

#[test]
fn readers_never_see_a_write_in_part() {
    const PIECE: usize = 256 * KIB;
    let setup = setup_with(EngineWish::Automatic, 64 << 20);
    let client = connect(&setup.transports[2]);
    let root = client.attach(b"mem").unwrap();
    root.write_path(b"f", CREATE, 0o600, &vec![0; 4 * PIECE]).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let writer = connect(&setup.transports[1]);
            let file = writer.attach(b"mem").unwrap().open(b"f", 2, 0).unwrap();
            for round in 0..300u32 {
                let place = u64::from(round % 4) * PIECE as u64;
                file.write_at(&vec![round as u8; PIECE], place).unwrap();
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let file = root.open(b"f", 0, 0).unwrap();
                let mut buffer = vec![0; 4 * PIECE];
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), buffer.len());
                    for piece in buffer.chunks(PIECE) {
                        assert!(piece.iter().all(|byte| *byte == piece[0]), "mixed bytes");
                    }
                }
            });
        }
    });
    assert!(counter(&client, "replies_lent") > 0);
}

#[test]
fn holes_are_read_as_zeros_and_lend_nothing() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let client = connect(&setup.transports[2]);
    let root = client.attach(b"mem").unwrap();
    let file = root.open(b"sparse", CREATE, 0o600).unwrap();
    set_size(&file, 1 << 40);
    let mut buffer = vec![0xee; 3 * MIB];
    assert_eq!(file.read_at(&mut buffer, 5 << 30).unwrap(), buffer.len());
    assert!(buffer.iter().all(|byte| *byte == 0));
    assert_eq!((counter(&client, "replies_lent"), counter(&client, "bytes_on_loan")), (1, 0));
    file.write_at(b"x", (5 << 30) + MIB as u64).unwrap();
    buffer.fill(0xee);
    assert_eq!(file.read_at(&mut buffer, 5 << 30).unwrap(), buffer.len());
    assert_eq!(buffer.iter().position(|byte| *byte != 0), Some(MIB));
    assert_eq!(buffer[MIB], b'x');
    assert_eq!(buffer.iter().filter(|byte| **byte != 0).count(), 1);
    assert_eq!(counter(&client, "replies_lent"), 2);
}

#[test]
fn files_of_directories_are_not_lent() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let client = connect(&setup.transports[2]);
    let data = pattern(300_000, 1);
    let root = client.attach(b"dir").unwrap();
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let mut buffer = vec![0; data.len()];
    assert_eq!(root.open(b"f", 0, 0).unwrap().read_at(&mut buffer, 0).unwrap(), data.len());
    assert!(buffer == data);
    assert_eq!(counter(&client, "replies_lent"), 0);
}

#[test]
fn small_reads_are_lent_once_the_client_has_read_much() {
    let setup = setup_with(EngineWish::Automatic, 64 << 20);
    let client = connect(&setup.transports[2]);
    let root = client.attach(b"mem").unwrap();
    // All of a region of 2 MiB, wherever the file begins, and parts of others.
    let mut data = pattern(6 * MIB, 1);
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let file = root.open(b"f", 2, 0).unwrap();
    let read = |offset: usize, length: usize, data: &[u8]| {
        let before = counter(&client, "replies_lent");
        let mut buffer = vec![0; length];
        assert_eq!(file.read_at(&mut buffer, offset as u64).unwrap(), length);
        assert!(buffer == data[offset..offset + length], "{offset} {length}");
        counter(&client, "replies_lent") - before
    };
    for offset in (0..2 * MIB).step_by(4 * KIB) {
        assert_eq!(read(offset, 4 * KIB, &data), 0, "the client would have to map it first");
    }
    // What began in the middle of a region still lacks bytes of it.
    let again: u64 = (0..4 * MIB).step_by(4 * KIB).map(|at| read(at, 4 * KIB, &data)).sum();
    assert!((1..=512).contains(&again), "{again}");
    assert_eq!(read(MIB, 4 * KIB, &data), 1);
    assert_eq!(read(MIB + 100, 2 * KIB - 1, &data), 0, "sending it costs less");
    // What is lent may be written, and the next read sees that.
    assert_eq!(file.write_at(b"new", MIB as u64).unwrap(), 3);
    data[MIB..MIB + 3].copy_from_slice(b"new");
    assert_eq!(read(MIB, 16 * KIB, &data), 1);
    // So is the start of a file that is opened only for that.
    let (before, mut start) = (counter(&client, "replies_lent"), vec![0; 64 * KIB]);
    assert_eq!(root.read_path(b"f", 0, &mut start).unwrap(), start.len());
    assert!(start == data[..start.len()]);
    assert_eq!(counter(&client, "replies_lent") - before, 1);
    // The next request has given back what the last read lent.
    assert_eq!(counter(&client, "bytes_on_loan"), 0);
}

#[test]
fn more_reads_are_begun_than_there_are_slots_before_any_is_taken() {
    const PIECE: usize = 64 * KIB;
    const SLOTS: usize = towline_wire::limits::SLOTS_MAX;
    let setup = setup_with(EngineWish::Automatic, 64 << 20);
    let other = connect(&setup.transports[1]);
    let client = connect(&setup.transports[2]);
    let root = client.attach(b"mem").unwrap();
    let data = pattern(4 * MIB, 1);
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let file = root.open(b"f", 0, 0).unwrap();
    let place = |number| number * PIECE % data.len();
    let begin = |number| file.start_read_at(vec![0; PIECE], place(number) as u64).unwrap();
    for lane_is_lost in [false, true] {
        let before = counter(&other, "replies_lent");
        let mut operations: Vec<_> = (0..SLOTS).map(begin).collect();
        if lane_is_lost {
            let lent = || counter(&other, "replies_lent") - before;
            eventually("all of them are answered", || lent() == SLOTS as u64);
            rustix::net::shutdown(client.fd().unwrap(), rustix::net::Shutdown::Both).unwrap();
            eventually("a lost lane gives back", || counter(&other, "bytes_on_loan") == 0);
        }
        operations.extend((SLOTS..3 * SLOTS).map(begin));
        for (number, operation) in operations.into_iter().enumerate() {
            let (count, buffer) = operation.wait().unwrap();
            assert!(buffer[..count] == data[place(number)..][..PIECE], "read {number}");
        }
    }
}

#[test]
fn another_user_gets_the_bytes_but_not_the_memory() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let Some(other) = connect_as_other(&setup) else { return };
    let root = other.attach(b"mem").unwrap();
    let data = pattern(MIB, 3);
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let mut buffer = vec![0; MIB];
    let file = root.open(b"f", 0, 0).unwrap();
    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), MIB);
    assert!(buffer == data);
    assert_eq!(counter(&other, "replies_lent"), 0, "lent to another user");
    let own = connect(&setup.transports[2]);
    let file = own.attach(b"mem").unwrap().open(b"f", 0, 0).unwrap();
    assert_eq!(file.read_at(&mut buffer, 0).unwrap(), MIB);
    assert_eq!(counter(&other, "replies_lent"), 1, "not lent to the server's own user");
}

/// A started read whose answer has arrived and was lent, but was not taken.
fn lent_but_not_taken(
    setup: &Setup,
    data: &[u8],
) -> (Client, File, towline_client::Operation<(usize, Vec<u8>)>) {
    let client = connect(&setup.transports[2]);
    let root = client.attach(b"mem").unwrap();
    root.write_path(b"f", CREATE, 0o600, data).unwrap();
    let file = root.open(b"f", 0, 0).unwrap();
    let operation = file.start_read_at(vec![0; data.len()], 0).unwrap();
    eventually("the reply is lent", || counter(&client, "replies_lent") == 1);
    (client, file, operation)
}

#[test]
fn a_loan_that_ended_with_its_lane_is_read_again() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let other = connect(&setup.transports[1]);
    let (client, _file, operation) = lent_but_not_taken(&setup, &pattern(MIB, 1));
    assert!(counter(&other, "bytes_on_loan") >= MIB as u64);
    rustix::net::shutdown(client.fd().unwrap(), rustix::net::Shutdown::Both).unwrap();
    eventually("a lost lane gives back", || counter(&other, "bytes_on_loan") == 0);
    // Its blocks go to another file before it is rewritten: patterns repeat in each block, so this
    // file must not put its bytes into the old blocks again.
    let root = other.attach(b"mem").unwrap();
    root.write_path(b"f", CREATE | TRUNCATE, 0o600, b"").unwrap();
    root.write_path(b"g", CREATE, 0o600, &pattern(4 * MIB, 3)).unwrap();
    root.write_path(b"f", CREATE, 0o600, &pattern(MIB, 2)).unwrap();
    let (count, buffer) = operation.wait().unwrap();
    assert_eq!(count, MIB);
    assert!(buffer == pattern(MIB, 2), "bytes of a loan that had ended");
}

#[test]
fn a_loan_of_a_server_that_stopped_is_no_data() {
    let mut setup = setup_with(EngineWish::Automatic, 16 << 20);
    let (_client, _file, operation) = lent_but_not_taken(&setup, &pattern(MIB, 1));
    setup.server.take().unwrap().stop();
    assert!(operation.wait().is_err(), "the server gave the memory back");
}

/// While set, this process takes no more descriptors.
static TAKES_NONE: AtomicBool = AtomicBool::new(false);

fn hide(fd: OwnedFd) -> std::io::Result<OwnedFd> {
    match TAKES_NONE.load(Ordering::Relaxed) {
        true => Err(rustix::io::Errno::MFILE.into()),
        false => Ok(fd),
    }
}

#[test]
fn several_reads_are_under_way_when_memory_cannot_be_mapped() {
    const PIECE: usize = 64 * KIB;
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let mut options = Options::default();
    options.hide = hide;
    let client = Client::connect(&setup.transports[2], options).unwrap();
    let root = client.attach(b"mem").unwrap();
    let data = pattern(MIB, 1);
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let file = root.open(b"f", 0, 0).unwrap();
    TAKES_NONE.store(true, Ordering::Relaxed);
    let begin = |at: usize| file.start_read_at(vec![0; PIECE], at as u64).unwrap();
    let reads: Vec<_> = (0..MIB).step_by(PIECE).map(begin).collect();
    for (read, expected) in reads.into_iter().zip(data.chunks(PIECE)) {
        let (count, buffer) = read.wait().unwrap();
        assert!(buffer[..count] == *expected);
    }
}

/// With the memory, they could read all of it without being counted.
#[test]
fn limited_clients_are_lent_nothing() {
    let directory = tempfile::TempDir::new().unwrap();
    let socket = directory.path().join("socket");
    let export = |name: &str, bytes| Export {
        limit: RateLimit { bytes, ..RateLimit::default() },
        ..Export::new(name, ExportKind::Memory(8 << 20))
    };
    let config = Config {
        exports: vec![export("free", 0), export("limited", 1 << 30)],
        listen: vec![Address::Unix(socket.clone())],
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let client = connect(&Transport::Shm(socket));
    let data = pattern(MIB, 1);
    for (name, lent) in [("limited", 0), ("free", MIB as u64)] {
        let root = client.attach(name.as_bytes()).unwrap();
        root.write_path(b"f", CREATE, 0o600, &data).unwrap();
        let mut read = vec![0; MIB];
        assert_eq!(root.open(b"f", 0, 0).unwrap().read_at(&mut read, 0).unwrap(), MIB);
        assert!(read == data, "{name}");
        assert_eq!(counter(&client, "bytes_lent"), lent, "{name}");
    }
    server.stop();
}
