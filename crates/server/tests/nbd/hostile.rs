//! Clients that send nothing, half a message, or nonsense.

use crate::client::{Client, FLUSH, Form, READ, WRITE, WRITE_ZEROES};
use crate::{World, long, pattern, random, wait_until};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use towline_server::{DiskExport, DiskKind};

const MIB: u64 = 1 << 20;

fn option(number: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend_from_slice(&number.to_be_bytes());
    bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// The request behind another one is used for prefetching before it is checked.
#[test]
fn hostile_ranges_behind_another_request_are_refused() {
    let world = World::with(DiskKind::Memory(MIB), |_| {});
    for form in [Form::Simple, Form::Extended] {
        let mut client = world.client(form);
        for offset in [u64::MAX, u64::MAX - 5, MIB, MIB - 1, u64::MAX / 2] {
            let flush = client.request_bytes(FLUSH, 0, 1, 0, 0, &[]);
            let read = client.request_bytes(READ, 0, 2, offset, 512, &[]);
            let write = client.request_bytes(WRITE, 0, 3, offset, 16, &[7; 16]);
            client.send(&[flush, read, write].concat());
            let told: Vec<u32> = (0..3).map(|_| client.outcome().unwrap()).collect();
            assert!(told.contains(&0) && told.iter().filter(|error| **error == 0).count() == 1);
        }
    }
}

/// Clients that write much into memory are received from in other parts than others.
#[test]
fn the_payload_of_a_refused_write_is_skipped_in_long_parts() {
    let world = World::with(DiskKind::Memory(8 * MIB), |_| {});
    let mut client = world.client(Form::Simple);
    let data = pattern(0, 8 << 20, 1);
    assert_eq!(client.write(0, 0, &data), 0);
    let before = world.counter("system_calls");
    assert_eq!(client.write(0, MIB, &data), 28, "it is longer than the disk");
    let calls = world.counter("system_calls") - before;
    // A header's length at once would take 300,000.
    assert!(calls < 10_000, "{calls}");
    assert!(client.read(0, 8 * MIB).unwrap() == data);
}

/// Receives until the server hangs up. Returns false if it does not within a minute.
fn is_hung_up(socket: &mut UnixStream) -> bool {
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut bytes = [0; 65536];
    loop {
        match socket.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// An operator who watches the counter would look for a broken client.
#[test]
fn who_names_no_export_here_is_hung_up_on_but_broke_no_rule() {
    let world = World::with(DiskKind::Memory(MIB), |_| {});
    let mut socket = UnixStream::connect(world.socket()).unwrap();
    socket.write_all(&[&3u32.to_be_bytes()[..], &option(1, b"nothing")].concat()).unwrap();
    assert!(is_hung_up(&mut socket));
    wait_until("it is gone", || world.counter("lanes") == 0);
    assert_eq!(world.counter("protocol_errors"), 0);
}

#[test]
fn who_chooses_no_disk_in_time_is_hung_up_on() {
    let world = World::with(DiskKind::Memory(MIB), |config| {
        config.nbd_handshake = Duration::from_secs(1);
    });
    let mut chosen = world.client(Form::Simple);
    let mut silent = UnixStream::connect(world.socket()).unwrap();
    let mut halfway = UnixStream::connect(world.socket()).unwrap();
    halfway.write_all(b"\0\0\0\x03IHAVEOPT\0\0").unwrap();
    // This one asks for the list of exports forever.
    let mut talker = UnixStream::connect(world.socket()).unwrap();
    talker.write_all(&3u32.to_be_bytes()).unwrap();
    let mut ears = talker.try_clone().unwrap();
    let talking = std::thread::spawn(move || {
        for _ in 0..1200 {
            if talker.write_all(&option(3, &[])).is_err() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        false
    });
    assert!(is_hung_up(&mut silent), "who says nothing");
    assert!(is_hung_up(&mut halfway), "who says half an option");
    assert!(is_hung_up(&mut ears), "who talks and never chooses");
    assert!(talking.join().unwrap());
    wait_until("their places are free", || world.counter("lanes") == 1);
    assert_eq!(chosen.read(0, 512).unwrap(), [0; 512], "who has chosen may be idle");
}

#[test]
fn thousands_of_half_open_connections() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    let wanted = if long() { 8000 } else { 2000 };
    // Both ends are in this process, and other tests run at the same time.
    let may = limit.maximum.map_or(wanted, |most: u64| (most.saturating_sub(1000) / 2) as usize);
    let count = wanted.min(may);
    if count < wanted {
        eprintln!("SKIPPED: only {count} connections, the limit of descriptors allows no more");
    }
    let world = World::with(DiskKind::Memory(4 * MIB), |_| {});
    let mut worker = world.client(Form::Structured);
    let data = pattern(0, 1 << 20, 3);
    let words: [&[u8]; 4] =
        [b"", b"\0\0", b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\x10\0", b"\0\0\0\x01IHAVEOPT"];
    let mut open = Vec::new();
    for number in 0..count {
        let mut socket = UnixStream::connect(world.socket()).unwrap();
        socket.write_all(words[number % words.len()]).unwrap();
        open.push(socket);
        if number % 200 == 0 {
            assert_eq!(worker.write(0, 0, &data), 0);
            assert!(worker.read(0, MIB).unwrap() == data, "beside {number} others");
        }
    }
    wait_until("all are connected", || world.counter("lanes") == count as u64 + 1);
    assert!(world.client(Form::Extended).read(0, MIB).unwrap() == data, "one more is served");
    assert_eq!(world.counter("buffer_bytes_in_use"), 0, "they hold no buffers");
    drop(open);
    wait_until("all are gone", || world.counter("lanes") == 1);
}

/// Returns a valid conversation with requests of every kind.
fn conversation(next: &mut impl FnMut() -> u64) -> (Vec<u8>, Form) {
    let form = [Form::Simple, Form::Structured, Form::Extended][next() as usize % 3];
    let mut bytes = 3u32.to_be_bytes().to_vec();
    match form {
        Form::Simple => {}
        Form::Structured => bytes.extend(option(8, &[])),
        Form::Extended => bytes.extend(option(11, &[])),
    }
    match next() % 3 {
        0 => bytes.extend(option(3, &[])),
        1 => {
            let query = b"base:allocation";
            let mut payload = vec![0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, query.len() as u8];
            payload.extend_from_slice(query);
            bytes.extend(option(if next().is_multiple_of(2) { 9 } else { 10 }, &payload));
        }
        _ => bytes.extend(option(6, &[0, 0, 0, 0, 0, 1, 0, 3])),
    }
    bytes.extend(option(7, &[0, 0, 0, 0, 0, 0]));
    for cookie in 0..1 + next() % 6 {
        let (offset, length) = (next() % (2 * MIB), 1 + next() % 100_000);
        let kind = [READ, WRITE, FLUSH, WRITE_ZEROES, 4, 5, 7][next() as usize % 7];
        let payload = vec![7; if kind == WRITE { length as usize } else { 0 }];
        let (offset, length) = if kind == FLUSH { (0, 0) } else { (offset, length) };
        bytes.extend(Client::request_of(form, kind, 0, cookie, (offset, length), &payload));
    }
    (bytes, form)
}

/// Changes a few bytes, mostly of headers, or cuts the conversation short.
fn spoil(bytes: &mut Vec<u8>, next: &mut impl FnMut() -> u64) {
    for _ in 0..next() % 4 {
        let reach = if next().is_multiple_of(2) { bytes.len().min(200) } else { bytes.len() };
        let at = next() as usize % reach;
        match next() % 4 {
            0 => bytes[at] ^= 1 << (next() % 8),
            1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][next() as usize % 5],
            2 => drop(bytes.drain(at..(at + 1 + next() as usize % 8).min(bytes.len()))),
            _ => {
                let part = bytes[at..(at + 20).min(bytes.len())].to_vec();
                bytes.splice(at..at, part);
            }
        }
        if bytes.is_empty() {
            return;
        }
    }
    if next().is_multiple_of(4) {
        bytes.truncate(next() as usize % bytes.len());
    }
}

/// Whatever arrives, the server continues to serve others, keeps their data, and forgets these clients.
#[test]
fn spoiled_conversations() {
    let world = World::with(DiskKind::Memory(2 * MIB), |config| {
        let kind = DiskKind::Memory(2 * MIB);
        config.disks.push(DiskExport { name: "safe".into(), kind, ..config.disks[0].clone() });
    });
    let mut honest = Client::connect_to(world.socket(), Form::Structured, "safe");
    let data = pattern(0, 1 << 20, 9);
    assert_eq!(honest.write(0, 0, &data), 0);
    let rounds = if long() { 30_000 } else { 600 };
    let mut ended = 0;
    for seed in 1..=rounds {
        let mut next = random(seed);
        let (mut bytes, _) = conversation(&mut next);
        spoil(&mut bytes, &mut next);
        let socket = UnixStream::connect(world.socket()).unwrap();
        let mut out = socket.try_clone().unwrap();
        // The server may hang up in the middle.
        let sender = std::thread::spawn(move || {
            let _ = out.write_all(&bytes);
            let _ = out.shutdown(std::net::Shutdown::Write);
        });
        let mut socket = socket;
        assert!(is_hung_up(&mut socket), "seed {seed}: the server waits for a client that is gone");
        sender.join().unwrap();
        ended += 1;
        if seed % 200 == 0 {
            assert!(honest.read(0, MIB).unwrap() == data, "seed {seed}: somebody else's bytes");
        }
    }
    assert_eq!(ended, rounds);
    assert!(world.counter("protocol_errors") > rounds / 20, "some of it was nonsense");
    wait_until("all are gone", || world.counter("lanes") == 1);
    wait_until("all memory is back", || world.counter("buffer_bytes_in_use") == 0);
    assert!(honest.read(0, MIB).unwrap() == data);
}
