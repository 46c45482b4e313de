//! Memory that clients on the server's machine read in place: contents against a model, loans that
//! hold and come back, peers that forge them, and who gets none.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{CREATE, Random, Setup, TRUNCATE, counter, eventually, pattern, seed, setup_with};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use towline_client::{Client, Errno, File, Options, SetAttr, Transport};
use towline_mem::SharedMemory;
use towline_net::{
    Counters, Doorbell, Link, SHM_BYTES, ShmLink, ShmSide, Wait, receive_descriptors,
    send_descriptors,
};
use towline_server::EngineWish;
use towline_wire::extents::{Extent, Extents};
use towline_wire::header::{reply_flag, request_flag};
use towline_wire::hello::{MAGIC, want};
use towline_wire::limits::{HEADER_BYTES, LENT_BYTES_MAX};
use towline_wire::reply::parse_results;
use towline_wire::request::encode_compound;
use towline_wire::{Attr, Header, Hello, Kind, Reply, Request, Welcome};

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

/// A client of another user than the server's, over shared memory; `None` without the right to be
/// somebody else.
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
    // The user of a thread is its own, and that of a connection whose who connected.
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
                // Begun now, taken later: by then it says what was true in between.
                let offset = random.below(size + 1);
                let buffer = vec![0xee; random.below(600_000) as usize];
                let end = model.len().min(offset as usize + buffer.len());
                let expected = model[offset as usize..end].to_vec();
                // Answered before anything is changed.
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
                let mut buffer = vec![0xee; random.below(1_500_000) as usize];
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
fn small_reads_and_files_of_directories_are_not_lent() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let client = connect(&setup.transports[2]);
    let data = pattern(300_000, 1);
    for (export, length) in [(&b"mem"[..], 4096), (b"dir", 300_000)] {
        let root = client.attach(export).unwrap();
        root.write_path(b"f", CREATE, 0o600, &data).unwrap();
        let mut buffer = vec![0; length];
        let file = root.open(b"f", 0, 0).unwrap();
        assert_eq!(file.read_at(&mut buffer, 0).unwrap(), length);
        assert!(buffer == data[..length]);
    }
    assert_eq!(counter(&client, "replies_lent"), 0);
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

/// A begun read, whose answer has come and was lent, but was not taken.
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
    // Its blocks go to another file before it is written anew: a pattern is the same in each block,
    // so they must not get their bytes from this one again.
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

/// A peer over shared memory that says what it likes.
struct Raw {
    link: Link,
    welcome: Welcome,
    socket: UnixStream,
    memories: Vec<SharedMemory>,
    received: Vec<u8>,
    sequences: [u32; 64],
}

impl Raw {
    fn connect(setup: &Setup, session: u64, secret: u64) -> Self {
        let socket = UnixStream::connect(socket(setup)).unwrap();
        let hello = Hello { want: want::SHARED_MEMORY, session, secret, ..common::hello() };
        std::io::Write::write_all(&mut &socket, &common::hello_message(&hello)).unwrap();
        let mut bytes = [0; 512];
        let (count, descriptors) = receive_descriptors(&socket, &mut bytes, Wait::Any).unwrap();
        let welcome = Welcome::parse(&bytes[HEADER_BYTES..count]).unwrap();
        let [memory, bell] = <[_; 2]>::try_from(descriptors).unwrap();
        let memory = Arc::new(SharedMemory::open(memory, SHM_BYTES, true).unwrap());
        let link = ShmLink::new(
            memory,
            ShmSide::Client,
            Doorbell::new(bell),
            socket.try_clone().unwrap().into(),
        );
        let link = Link::Shm(Box::new(link.unwrap()));
        Self { link, welcome, socket, memories: vec![], received: vec![], sequences: [0; 64] }
    }

    fn shm(&self) -> &ShmLink {
        match &self.link {
            Link::Shm(link) => link,
            _ => unreachable!("made as one"),
        }
    }

    fn send(&self, bytes: &[u8]) {
        assert_eq!(self.link.send(&[bytes], &Counters::default()).unwrap(), bytes.len());
    }

    /// The next message: header, body, payload.
    fn receive(&mut self) -> (Header, Vec<u8>, Vec<u8>) {
        let fill = |received: &mut Vec<u8>, wanted: usize| {
            while received.len() < wanted {
                let mut part = vec![0; 64 * KIB];
                let count = self
                    .link
                    .receive_wait(
                        &mut towline_net::Target::Own(&mut part),
                        &mut towline_net::Spin::new(Duration::ZERO),
                        false,
                    )
                    .unwrap();
                received.extend_from_slice(&part[..count]);
            }
        };
        fill(&mut self.received, HEADER_BYTES);
        let header = Header::parse(self.received.first_chunk().unwrap()).unwrap();
        let body = HEADER_BYTES + header.body_bytes as usize;
        let end = body + header.payload_bytes as usize;
        fill(&mut self.received, end);
        let message: Vec<u8> = self.received.drain(..end).collect();
        (header, message[HEADER_BYTES..body].to_vec(), message[body..].to_vec())
    }

    fn request(&mut self, slot: u16, request: Request<'_>) -> (Header, Vec<u8>, Vec<u8>) {
        let sequence = &mut self.sequences[usize::from(slot)];
        *sequence += 1;
        let mut header = Header::new(Kind::Request, slot, *sequence);
        header.flags = request_flag::BORROWS;
        self.send(&common::message(header, &encode_compound(&[request]), &[]));
        let (mut reply, body, mut payload) = self.receive();
        while reply.kind == Kind::Data {
            let (next, body, rest) = self.receive();
            payload.extend(rest);
            if next.kind == Kind::Reply {
                return (next, body, payload);
            }
            reply = next;
        }
        assert_eq!((reply.kind, reply.slot), (Kind::Reply, slot));
        (reply, body, payload)
    }

    fn open(&mut self, path: &[u8]) -> u64 {
        let handle = |body: &[u8]| match parse_results(body).unwrap()[0] {
            Reply::Opened { handle, .. } => handle,
            other => panic!("not opened: {other:?}"),
        };
        let (_, body, _) = self.request(0, Request::Attach { name: b"mem" });
        let base = handle(&body);
        let (_, body, _) = self.request(0, Request::Open { base, flags: 2, mode: 0, path });
        handle(&body)
    }

    /// Reads; where it is lent, if it is.
    fn read(&mut self, slot: u16, handle: u64, offset: u64, length: usize) -> Option<Extents> {
        let length = length as u32;
        let (header, body, _) = self.request(slot, Request::Read { handle, offset, length });
        if header.flags & reply_flag::LENT == 0 {
            return None;
        }
        let extents = Extents::parse(&body[header.offset as usize..]).unwrap();
        assert_eq!(extents.bytes(), u64::from(length));
        if extents.memory as usize == self.memories.len() {
            let (fd, length) = self.shm().take_over().unwrap();
            self.memories.push(SharedMemory::open(fd, length, false).unwrap());
        }
        Some(extents)
    }

    fn bytes(&self, lent: &Extents) -> Vec<u8> {
        let mut bytes = Vec::new();
        for extent in &lent.extents {
            let mut part = vec![0; extent.length as usize];
            if let Some(offset) = extent.offset {
                self.memories[lent.memory as usize].copy_out(offset as usize, &mut part);
            }
            bytes.extend(part);
        }
        bytes
    }

    fn release(&self, slot: u16, sequence: u32) {
        self.send(&Header::new(Kind::Release, slot, sequence).to_bytes());
    }
}

#[test]
fn what_is_lent_stays_until_it_is_given_back() {
    let setup = setup_with(EngineWish::Automatic, 64 << 20);
    let client = connect(&setup.transports[1]);
    let root = client.attach(b"mem").unwrap();
    let data = pattern(MIB, 1);
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let file = root.open(b"f", 2, 0).unwrap();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    let lent = raw.read(1, handle, 0, MIB).expect("not lent");
    // Written over, cut, punched, removed; and the space used again.
    file.write_at(&pattern(300_000, 2), 1000).unwrap();
    assert!(raw.bytes(&lent) == data, "after a write");
    file.allocate(3, 500_000, 200_000).unwrap();
    assert!(raw.bytes(&lent) == data, "after a hole was punched");
    set_size(&file, 10);
    root.unlink(b"f", false).unwrap();
    root.write_path(b"g", CREATE, 0o600, &pattern(8 * MIB, 3)).unwrap();
    assert!(raw.bytes(&lent) == data, "after it was removed");
    assert!(raw.shm().loans_hold());
    assert_eq!(counter(&client, "bytes_on_loan"), MIB as u64);
    raw.release(1, raw.sequences[1]);
    eventually("what is released comes back", || counter(&client, "bytes_on_loan") == 0);
    // The next request of a slot gives back what its last reply lent.
    let handle = raw.open(b"g");
    assert!(raw.read(2, handle, 0, 128 * KIB).is_some());
    assert_eq!(counter(&client, "bytes_on_loan"), 128 * KIB as u64);
    assert!(raw.read(2, handle, 0, 64 * KIB).is_some());
    assert_eq!(counter(&client, "bytes_on_loan"), 64 * KIB as u64);
    let Raw { socket, link, memories, .. } = raw;
    drop((socket, link));
    eventually("a client that is gone gives back", || counter(&client, "bytes_on_loan") == 0);
    drop(memories);
}

#[test]
fn the_memory_cannot_be_written_by_a_borrower() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let root = connect(&setup.transports[1]).attach(b"mem").unwrap();
    root.write_path(b"f", CREATE, 0o600, &pattern(MIB, 1)).unwrap();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    assert!(raw.read(1, handle, 0, MIB).is_some());
    let memory = &raw.memories[0];
    let descriptor = || memory.fd().try_clone_to_owned().unwrap();
    assert!(rustix::io::pwrite(memory.fd(), b"x", 0).is_err());
    assert!(rustix::fs::ftruncate(memory.fd(), 0).is_err());
    assert!(SharedMemory::open(descriptor(), memory.len(), true).is_err());
    assert!(memory.punch(0, 4096).is_err());
}

#[test]
fn forged_releases_have_no_effect() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let client = connect(&setup.transports[1]);
    let root = client.attach(b"mem").unwrap();
    let data = pattern(MIB, 1);
    root.write_path(b"f", CREATE, 0o600, &data).unwrap();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    let lent = raw.read(1, handle, 0, MIB).unwrap();
    let sequence = raw.sequences[1];
    for (slot, sequence) in
        [(1, sequence + 1), (1, sequence.wrapping_sub(1)), (2, sequence), (63, 0), (0, u32::MAX)]
    {
        raw.release(slot, sequence);
    }
    raw.request(3, Request::Stat { base: handle, flags: 0, path: b"" });
    assert_eq!(counter(&client, "bytes_on_loan"), MIB as u64);
    // Another client's loan is not its own, and what is given back twice counts once.
    let mut second = Raw::connect(&setup, 0, 0);
    let other = second.open(b"f");
    second.release(1, sequence);
    assert!(second.read(1, other, 0, MIB).is_some());
    assert_eq!(counter(&client, "bytes_on_loan"), 2 * MIB as u64);
    for _ in 0..3 {
        second.release(1, second.sequences[1]);
    }
    second.request(3, Request::Stat { base: other, flags: 0, path: b"" });
    assert_eq!(counter(&client, "bytes_on_loan"), MIB as u64);
    assert!(raw.bytes(&lent) == data);
    assert_eq!(counter(&client, "protocol_errors"), 0);
}

#[test]
fn a_new_lane_of_the_session_ends_the_loans_of_the_old_one() {
    let setup = setup_with(EngineWish::Automatic, 16 << 20);
    let client = connect(&setup.transports[1]);
    let root = client.attach(b"mem").unwrap();
    root.write_path(b"f", CREATE, 0o600, &pattern(MIB, 1)).unwrap();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    assert!(raw.read(1, handle, 0, MIB).is_some());
    assert!(raw.shm().loans_hold());
    let next = Raw::connect(&setup, raw.welcome.session, raw.welcome.secret);
    assert_eq!(next.welcome.resumed, 1);
    assert!(!raw.shm().loans_hold(), "ended without a word");
    assert_eq!(counter(&client, "bytes_on_loan"), 0);
}

#[test]
fn who_never_gives_back_gets_little_and_costs_no_space() {
    let limit = 16 * MIB as u64;
    let setup = setup_with(EngineWish::Automatic, limit);
    let client = connect(&setup.transports[1]);
    let root = client.attach(b"mem").unwrap();
    let free = || root.stat_fs().unwrap().blocks_free;
    let empty = free();
    let length = 14 * MIB;
    let data = pattern(length, 1);
    let file = root.open(b"f", CREATE, 0o600).unwrap();
    assert_eq!(file.write_at(&data, 0).unwrap(), length);
    let used = free();
    let mut raw = Raw::connect(&setup, 0, 0);
    let handle = raw.open(b"f");
    let mut lent = Vec::new();
    for slot in 1..60u16 {
        let offset = (usize::from(slot) * 200 * KIB) as u64;
        if let Some(extents) = raw.read(slot, handle, offset, 200 * KIB) {
            lent.push((offset as usize, extents));
        }
    }
    let on_loan = counter(&client, "bytes_on_loan");
    assert!(on_loan > 0 && on_loan <= (limit / 8).min(LENT_BYTES_MAX), "{on_loan} bytes on loan");
    assert!(!lent.is_empty() && lent.len() < 59, "{} reads lent", lent.len());
    assert!(counter(&client, "loans_exhausted") > 0);
    assert_eq!(free(), used, "lending charges nothing");
    // The whole of the file can be written over, and its space had again, as if nothing were lent.
    assert_eq!(file.write_at(&pattern(length, 2), 0).unwrap(), length);
    set_size(&file, 0);
    let inode = 1;
    assert!(empty - free() <= inode, "cut, so free");
    assert_eq!(file.write_at(&pattern(length, 3), 0).unwrap(), length);
    assert_eq!(free(), used);
    let more = file.write_at(&pattern(4 * MIB, 4), length as u64);
    assert!(more.is_err() || more.unwrap() < 4 * MIB, "beyond the limit of the export");
    for (offset, extents) in &lent {
        assert!(raw.bytes(extents) == data[*offset..offset + 200 * KIB], "at {offset}");
    }
    // With all slots used for something else, everything is back and can be lent again.
    for slot in 1..60 {
        raw.request(slot, Request::Stat { base: handle, flags: 0, path: b"" });
    }
    assert_eq!(counter(&client, "bytes_on_loan"), 0);
    assert!(raw.read(1, handle, 0, MIB).is_some());
}

/// How a read is answered: how far behind the results the list of extents is said to begin, the
/// extents, and the number of their memory.
type Forged = (u64, Vec<Extent>, u32);

/// A server that answers reads of clients that borrow with a forged loan, and others with sevens.
/// Before, it hands memory over, and says how long that is. Yields the flags of the reads.
fn fake_server(
    path: PathBuf,
    memory: Option<(SharedMemory, usize)>,
    forged: Forged,
) -> std::thread::JoinHandle<Vec<u8>> {
    let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let mut bytes = [0; 512];
        std::io::Read::read(&mut &socket, &mut bytes).unwrap();
        let welcome = Welcome {
            magic: MAGIC,
            version: towline_wire::hello::VERSION,
            granted: want::SHARED_MEMORY,
            session: 1,
            secret: 1,
            boot_epoch: 1,
            slots: 64,
            ..Welcome::default()
        };
        let mut body = Vec::new();
        welcome.encode(&mut body);
        let ring = Arc::new(SharedMemory::create("ring", SHM_BYTES).unwrap());
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        let greeting = common::message(Header::new(Kind::Welcome, 0, 0), &body, &[]);
        send_descriptors(&socket, &greeting, &[ring.fd(), bell.as_fd()]).unwrap();
        let bell = Doorbell::new(bell);
        let link = ShmLink::new(ring, ShmSide::Server, bell, socket.try_clone().unwrap().into());
        let mut raw = Raw {
            link: Link::Shm(Box::new(link.unwrap())),
            welcome,
            socket,
            memories: vec![],
            received: vec![],
            sequences: [0; 64],
        };
        if let Some((memory, length)) = memory {
            raw.shm().hand_over(memory.fd(), length).unwrap();
        }
        let mut seen = Vec::new();
        loop {
            let mut head = [0; HEADER_BYTES];
            let mut done = 0;
            while done < head.len() {
                match raw.link.receive(&mut head[done..], &Counters::default()) {
                    Ok(count) => done += count,
                    Err(_) if raw.shm().peer_closed() => return seen,
                    Err(_) => std::thread::yield_now(),
                }
            }
            let request = Header::parse(&head).unwrap();
            raw.received = head.to_vec();
            if request.kind != Kind::Request {
                raw.received.clear();
                continue;
            }
            let (_, body, _) = raw.receive();
            let mut header = Header::new(Kind::Reply, request.slot, request.sequence);
            let mut results = Vec::new();
            let mut payload = Vec::new();
            let requests = towline_wire::request::parse_compound(&body).unwrap();
            use towline_wire::codec::Field;
            if let Request::Read { length, .. } = requests[0] {
                seen.push(request.flags);
                Reply::Read { length, errno: 0 }.encode(&mut results);
                if request.flags == request_flag::BORROWS {
                    let (offset, extents, memory) = forged.clone();
                    header.flags = reply_flag::LENT;
                    header.offset = offset + results.len() as u64;
                    Extents { memory, extents: extents.into() }.encode(&mut results);
                } else {
                    payload = vec![7; length as usize];
                }
            } else {
                Reply::Opened { handle: 1, attr: Attr::default() }.encode(&mut results);
            }
            raw.send(&common::message(header, &results, &payload));
        }
    })
}

/// What a client makes of such an answer to two reads of 64 KiB; and the flags of its reads.
fn read_from_fake(
    memory: Option<(SharedMemory, usize)>,
    forged: Forged,
) -> (Result<Vec<u8>, Errno>, Vec<u8>) {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("socket");
    let server = fake_server(path.clone(), memory, forged);
    let client = connect(&Transport::Shm(path));
    let root = client.attach(b"x").unwrap();
    let mut buffer = vec![0; 64 * KIB];
    let mut read = || root.read_at(&mut buffer, 0).map(|count| buffer[..count].to_vec());
    let result = read().and_then(|_| read());
    drop((root, client));
    (result.map_err(|error| error.errno()), server.join().unwrap())
}

#[test]
fn forged_extents_are_refused_by_the_client() {
    let length = 64 * KIB;
    let memory = || {
        let memory = SharedMemory::create("lent", 2 * length).unwrap();
        memory.copy_in(0, &pattern(2 * length, 5));
        Some((memory, 2 * length))
    };
    let extent = |offset: usize, length: usize| Extent {
        offset: Some(offset as u64),
        length: length as u32,
    };
    let good = vec![extent(100, length)];
    let (result, _) = read_from_fake(memory(), (0, good.clone(), 0));
    assert!(result.unwrap() == pattern(2 * length, 5)[100..100 + length], "a legal loan");
    let illegal = [
        ("beyond the end", memory(), (0, vec![extent(length + 1, length)], 0)),
        ("far beyond it", memory(), (0, vec![extent(usize::MAX - length, length)], 0)),
        ("more than asked for", memory(), (0, vec![extent(0, length), extent(0, 1)], 0)),
        ("holes without end", None, (0, vec![Extent { offset: None, length: u32::MAX }; 3], 0)),
        ("never handed over", None, (0, good.clone(), 0)),
        ("a later memory", memory(), (0, good.clone(), 1)),
        ("a list outside of the body", memory(), (1 << 40, good.clone(), 0)),
        ("half a list", memory(), (1, good.clone(), 0)),
    ];
    for (what, memory, forged) in illegal {
        let (result, _) = read_from_fake(memory, forged);
        assert!(result.is_err(), "{what}");
    }
}

#[test]
fn memory_that_cannot_be_mapped_is_asked_for_as_bytes() {
    // Said to be longer than it is: what is behind its end would be a fault.
    let memory = SharedMemory::create("lent", 4096).unwrap();
    let forged = (0, vec![Extent { offset: Some(0), length: 64 * KIB as u32 }], 0);
    let (result, flags) = read_from_fake(Some((memory, 1 << 30)), forged);
    assert!(result.unwrap() == [7; 64 * KIB]);
    assert_eq!(flags, [request_flag::BORROWS, 0, 0], "it asks again, and then for bytes at once");
}
