//! The memory of a server is bounded.

use crate::client::{Client, Form, READ, WRITE};
use crate::stores::Gated;
use crate::{World, long, pattern, wait_until};
use towline_server::{CacheMode, DiskKind};

const MIB: u64 = 1 << 20;

#[test]
fn a_long_read_holds_its_fragments_not_its_length() {
    let disk = Gated::new(64 * MIB);
    let world = World::new(disk);
    let mut client = world.client(Form::Structured);
    client.request(READ, 0, 1, 0, 32 * MIB);
    // The client does not read the answer: the fragments under way fill up and stay.
    wait_until("the read is under way", || world.counter("buffer_bytes_in_use") > 0);
    std::thread::sleep(std::time::Duration::from_millis(100));
    let mut covered = 0;
    while covered < 32 * MIB {
        let (_, chunk, _) = client.chunk().unwrap();
        if let crate::client::Chunk::Data(_, bytes) = chunk {
            covered += bytes.len() as u64;
        }
    }
    let peak = world.counter("buffer_bytes_peak");
    assert!(peak <= MIB, "{peak} bytes were held");
    wait_until("all is given back", || world.counter("buffer_bytes_in_use") == 0);
}

/// Counts the engine's buffers. An outstanding read of 8 MiB holds at most 1 MiB of them, in each form and on
/// each kind of disk, even while the client takes no answer. Eight reads on one connection hold no more, and
/// eight connections at most eight times as much.
#[test]
fn an_outstanding_read_of_8_mib_holds_at_most_1_mib() {
    let files: Vec<_> = (0..2)
        .map(|_| {
            let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            std::fs::write(file.path(), pattern(0, 16 << 20, 5)).unwrap();
            file
        })
        .collect();
    let path = || files[0].path().to_path_buf();
    let both: Vec<_> = files.iter().map(|file| file.path().to_path_buf()).collect();
    let kinds = [
        DiskKind::File(path(), CacheMode::Cached),
        DiskKind::File(path(), CacheMode::Direct),
        DiskKind::File(path(), CacheMode::ReadDirect),
        DiskKind::Memory(16 * MIB),
        DiskKind::Stripe(64 << 10, both, CacheMode::Direct),
        DiskKind::Delay(16 * MIB, std::time::Duration::from_micros(200), 1 << 30),
    ];
    for kind in kinds {
        // These use the most memory.
        let is_hard = matches!(kind, DiskKind::File(_, CacheMode::Direct) | DiskKind::Stripe(..));
        for form in [Form::Simple, Form::Structured, Form::Extended] {
            for (connections, requests) in [(1, 1), (1, 8), (8, 1)] {
                if requests + connections > 2 && !long() && !is_hard {
                    continue;
                }
                let world = World::with(kind.clone(), |_| {});
                let mut clients: Vec<_> = (0..connections).map(|_| world.client(form)).collect();
                for client in &mut clients {
                    for cookie in 0..requests {
                        client.request(READ, 0, cookie, 0, 8 * MIB);
                    }
                }
                // The clients take nothing for a while.
                std::thread::sleep(std::time::Duration::from_millis(20));
                let mut covered = 0;
                for client in &mut clients {
                    covered += take_reads(client, requests, 8 * MIB);
                }
                assert_eq!(covered, connections * requests * 8 * MIB);
                let peak = world.counter("buffer_bytes_peak");
                let what = format!("{kind:?} {form:?}, {connections} x {requests}");
                // The sum of the peaks of two pools, which may have occurred at different times; the engine's
                // own test counts the pools together.
                let most = connections * (MIB + MIB / 8);
                assert!(peak <= most, "{what}: {peak} bytes were held");
                if matches!(kind, DiskKind::File(_, CacheMode::Direct)) {
                    assert!(peak > 0, "{what}: no buffer was counted");
                }
                drop(clients);
                wait_until("all is given back", || world.counter("buffer_bytes_in_use") == 0);
            }
        }
    }
}

/// Receives the replies to `count` reads, whose chunks may be mixed; returns how many bytes they covered.
fn take_reads(client: &mut crate::client::Client, count: u64, length: u64) -> u64 {
    use crate::client::Chunk;
    let mut covered = 0;
    if client.form == Form::Simple {
        for _ in 0..count {
            assert_eq!(client.simple().unwrap().0, 0);
            covered += client.bytes(length as usize).unwrap().len() as u64;
        }
    }
    while covered < count * length {
        match client.chunk().unwrap().1 {
            Chunk::Data(_, bytes) => covered += bytes.len() as u64,
            Chunk::Hole(_, bytes) => covered += u64::from(bytes),
            Chunk::End => {}
            Chunk::Error(error, _) => panic!("error {error}"),
        }
    }
    covered
}

/// Many clients share little memory, and each gets its turn.
#[test]
fn a_tight_limit_slows_but_stops_nobody() {
    let limit = |config: &mut towline_server::Config| config.buffer_limit = 2 * MIB;
    let disk = DiskKind::Delay(64 * MIB, std::time::Duration::from_micros(100), 0);
    let world = World::with(disk, limit);
    std::thread::scope(|scope| {
        for number in 0..24u64 {
            let mut client = world.client(match number % 3 {
                0 => Form::Simple,
                1 => Form::Structured,
                _ => Form::Extended,
            });
            scope.spawn(move || {
                let data = pattern(number, 1 << 20, number);
                for _ in 0..4 {
                    assert_eq!(client.write(0, number * MIB, &data), 0);
                    assert!(client.read(number * MIB, MIB).unwrap() == data, "client {number}");
                }
            });
        }
    });
    // At most twice the limit: one share for files and one for disks.
    let peak = world.counter("buffer_bytes_peak");
    assert!(peak <= 4 * MIB, "{peak} bytes were held");
}

/// Thousands of small requests on one connection that takes no answers.
#[test]
fn a_client_that_never_listens_holds_little() {
    let world = World::with(DiskKind::Memory(16 * MIB), |_| {});
    let mut deaf = world.client(Form::Simple);
    deaf.socket.set_nonblocking(true).unwrap();
    let request = deaf.request_bytes(READ, 0, 1, 0, 32 * 1024, &[]);
    let flood = request.repeat(1000);
    use std::io::Write;
    let mut sent = 0;
    // Until the server stops reading.
    for _ in 0..200 {
        match deaf.socket.write(&flood) {
            Ok(count) => sent += count,
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
        }
    }
    assert!(sent > 0);
    let received = world.counter("bytes_received");
    assert!(received < 512 * 1024, "{received} bytes of requests were taken in");
    // Other clients are served meanwhile.
    let mut other = world.client(Form::Structured);
    let bytes = other.request_bytes(WRITE, 0, 1, 0, 5, b"hello");
    other.send(&bytes);
    assert_eq!(other.outcome().unwrap(), 0);
    assert_eq!(other.read(0, 5).unwrap(), b"hello");
}

/// Thousands of options, each of which asks for a long list, from a client that takes none at first.
#[test]
fn a_client_that_haggles_and_never_listens_holds_little() {
    use std::io::{Read, Write};
    const LIST: &[u8] = b"IHAVEOPT\0\0\0\x03\0\0\0\0";
    const ABORT: &[u8] = b"IHAVEOPT\0\0\0\x02\0\0\0\0";
    let world = World::with(DiskKind::Memory(MIB), |config| {
        config.cores = 1;
        let disk = config.disks[0].clone();
        config.disks.extend((0..10).map(|number| {
            let name = format!("disk {number} with a long name: {}", "a".repeat(100));
            towline_server::DiskExport { name, ..disk.clone() }
        }));
    });
    let connect = || {
        let mut socket = std::os::unix::net::UnixStream::connect(world.socket()).unwrap();
        socket.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        socket.write_all(&3u32.to_be_bytes()).unwrap();
        socket
    };
    let mut brief = connect();
    brief.write_all(&[LIST, ABORT].concat()).unwrap();
    let mut all = Vec::new();
    brief.read_to_end(&mut all).unwrap();
    let (greeting, acknowledged) = (18, 20);
    let list = all.len() - greeting - acknowledged;

    let mut deaf = connect();
    deaf.set_nonblocking(true).unwrap();
    let flood = LIST.repeat(60_000);
    let mut sent = 0;
    for _ in 0..20 {
        while let Some(rest) = flood.get(sent..)
            && let Ok(count @ 1..) = deaf.write(rest)
        {
            sent += count;
        }
        // The core serves others meanwhile, so it has had its turn with this one.
        world.client(Form::Simple);
    }
    assert!(sent < flood.len() / 2, "{sent} bytes of options were taken in");
    // It is answered as soon as it listens.
    deaf.set_nonblocking(false).unwrap();
    let mut replies = vec![0; greeting + sent / LIST.len() * list];
    deaf.read_exact(&mut replies).unwrap();
    assert!(replies.ends_with(&all[greeting..greeting + list]), "the last list is complete");
}

/// The answer to a short question for extents may be long, so only some of them are under way.
#[test]
fn a_client_that_asks_for_extents_again_and_again_waits_for_answers() {
    const BLOCK_STATUS: u16 = 7;
    let disk = Gated::new(MIB);
    disk.close([0]);
    let kind = towline_server::OwnStore(disk.clone() as std::sync::Arc<_>);
    let world = World::with(DiskKind::Own(kind), |config| config.cores = 1);
    let (mut client, _) = Client::with_contexts(world.socket(), &["base:allocation"]);
    for cookie in 0..12 {
        client.request(BLOCK_STATUS, 0, cookie, 0, 4096);
    }
    wait_until("eight are under way", || disk.waiting() == 8);
    // Another connection shows that the server has seen all of them.
    assert_eq!(world.client(Form::Simple).flush(), 0);
    assert_eq!(disk.waiting(), 8);
    disk.open_all();
    for _ in 0..12 {
        // A header, the id, the number of extents, and one extent.
        client.bytes(32 + 4 + 4 + 16).unwrap();
    }
}

/// Returns the anonymous memory of this process in bytes.
fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Pages sent by reference, and zeroes, need no buffers, but each piece takes some memory. So nothing is
/// started that the client does not take.
#[test]
fn who_asks_for_much_that_is_in_memory_and_never_listens_holds_little() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(file.path(), pattern(0, 32 << 20, 5)).unwrap();
    let cached = DiskKind::File(file.path().to_path_buf(), CacheMode::Cached);
    for kind in [cached, DiskKind::Memory(32 * MIB)] {
        let world = World::with(kind.clone(), |config| config.cores = 1);
        let mut other = world.client(Form::Structured);
        assert!(other.read(0, MIB).is_ok());
        let before = memory();
        let mut longest = std::time::Duration::ZERO;
        let mut deaf = Vec::new();
        for number in 0..8 {
            let mut client = world.client([Form::Simple, Form::Structured][number % 2]);
            let requests: Vec<u8> = (0..1000)
                .flat_map(|cookie| client.request_bytes(READ, 0, cookie, 0, 32 * MIB, &[]))
                .collect();
            client.send(&requests);
            let start = std::time::Instant::now();
            assert!(other.read(0, 512).is_ok());
            longest = longest.max(start.elapsed());
            deaf.push(client);
        }
        let grown = memory().saturating_sub(before);
        let what = format!("{kind:?}: others waited for {longest:?}");
        eprintln!("{what}, {} MiB", grown / MIB);
        assert!(grown < 16 * MIB, "{} MiB for 8 clients who never listen: {what}", grown / MIB);
    }
}
