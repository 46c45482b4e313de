//! Messages that break the protocol: they end the connection and open nothing.

use super::common::{CREATE, Random, Raw, counter, hello, hello_message, message, request, seed};
use super::{ATTACH, big_write, header, results, start};
use std::time::Duration;
use towline_client::{Errno, Lock, SetAttr};
use towline_wire::reply::parse_results;
use towline_wire::request::lock::{EXCLUSIVE, FLOCK};
use towline_wire::request::{CURRENT, DIRECTORY, encode_compound};
use towline_wire::{Header, Hello, Kind, Reply, Request};

const WRITE: Request<'_> = Request::Write { handle: CURRENT, offset: 0, length: 1, flags: 0 };

/// A part of length one at offset zero.
const ONE_BYTE: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];

fn parts(parts: &[u8]) -> Request<'_> {
    Request::WriteParts { handle: CURRENT, parts }
}

#[test]
fn illegal_messages_end_the_connection_and_are_counted() {
    let (_directory, process, mut honest) = start();
    let body = |tag: u8| message(Header::new(Kind::Request, 0, 1), &[tag; 30], &[]);
    let read = Request::Read { handle: CURRENT, offset: 0, length: 1 };
    let after_hello: Vec<(&str, Vec<u8>)> = vec![
        ("noise", (0..200u8).rev().collect()),
        ("second hello", hello_message(&hello())),
        ("absurd body", header(|h| h.body_bytes = u32::MAX)),
        ("absurd payload", header(|h| h.payload_bytes = u32::MAX)),
        ("payload beyond what rides along", header(|h| h.payload_bytes = 256 * 1024)),
        ("slot beyond the last", header(|h| h.slot = 64)),
        ("highest slot", header(|h| h.slot = u16::MAX)),
        (
            "no kind",
            header(|_| {}).iter().enumerate().map(|(i, b)| if i == 0 { 0 } else { *b }).collect(),
        ),
        ("request without operations", header(|_| {})),
        ("unknown operation", body(200)),
        ("cut operation", body(2)),
        ("too many operations", request(0, 1, &[ATTACH; 17], 0)),
        ("zero in a path", request(0, 1, &[Request::Stat { base: 1, flags: 0, path: b"a\0b" }], 0)),
        (
            "long path",
            request(0, 1, &[Request::Stat { base: 1, flags: 0, path: &[b'x'; 4096] }], 0),
        ),
        ("two writes", request(0, 1, &[ATTACH, WRITE, WRITE], 2)),
        ("two reads", request(0, 1, &[ATTACH, read, read], 0)),
        ("write without its bytes", request(0, 1, &[ATTACH, WRITE], 0)),
        ("parts without their bytes", request(0, 1, &[ATTACH, parts(&ONE_BYTE)], 0)),
        ("offer of parts", request(0, 1, &[ATTACH, parts(&ONE_BYTE)], 1)),
        ("write and parts", request(0, 1, &[ATTACH, WRITE, parts(&ONE_BYTE)], 0)),
        ("half a part", request(0, 1, &[ATTACH, parts(&ONE_BYTE[..11])], 0)),
        ("part beyond the largest offset", request(0, 1, &[ATTACH, parts(&[0xff; 12])], 0)),
        ("too many parts", request(0, 1, &[ATTACH, parts(&[0; 12 * 1025])], 0)),
        ("offer of more than the write", request(0, 1, &[ATTACH, WRITE], 1 << 40)),
        ("offer without write", request(0, 1, &[ATTACH], 1)),
        ("offer beyond all numbers", {
            let mut header = Header::new(Kind::Request, 0, 1);
            header.offset = u64::MAX;
            message(header, &encode_compound(&[ATTACH, WRITE]), &[7])
        }),
        (
            "write longer than the limit",
            request(
                0,
                1,
                &[
                    ATTACH,
                    Request::Write { handle: CURRENT, offset: 0, length: u32::MAX, flags: 0 },
                ],
                u32::MAX.into(),
            ),
        ),
        (
            "sequence that jumps",
            [request(0, 1, &[ATTACH], 0), request(0, 3, &[ATTACH], 0)].concat(),
        ),
        (
            "sequence that falls",
            [request(0, 9, &[ATTACH], 0), request(0, 8, &[ATTACH], 0)].concat(),
        ),
        (
            "slot that is busy",
            [
                request(
                    0,
                    1,
                    &[
                        ATTACH,
                        Request::Write { handle: CURRENT, offset: 0, length: 100_000, flags: 0 },
                    ],
                    100_000,
                ),
                request(
                    1,
                    1,
                    &[
                        ATTACH,
                        Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: b"busy" },
                        Request::Write { handle: CURRENT, offset: 0, length: 100_000, flags: 0 },
                    ],
                    100_000,
                ),
                request(1, 2, &[ATTACH], 0),
            ]
            .concat(),
        ),
        ("reply to a server", header(|h| h.kind = Kind::Reply)),
        ("grant to a server", header(|h| h.kind = Kind::Grant)),
        ("notice to a server", header(|h| h.kind = Kind::Notice)),
        ("welcome to a server", header(|h| h.kind = Kind::Welcome)),
    ];
    let mut errors = counter(&honest.client, "protocol_errors");
    let mut judge = |name: &str, mut peer: Raw| {
        assert!(peer.thrown_out(), "{name}: not thrown out");
        let now = counter(&honest.client, "protocol_errors");
        assert!(now > errors, "{name}: not counted");
        errors = now;
        honest.check(name);
    };
    for (name, bytes) in after_hello {
        let (mut peer, _) = Raw::greeted(process.port);
        peer.send(&bytes);
        judge(name, peer);
    }
    for (name, bytes) in [
        ("noise for a hello", vec![0xff; 72]),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n".to_vec()),
        ("request before the hello", request(0, 1, &[ATTACH], 0)),
        ("goodbye before the hello", header(|h| h.kind = Kind::Goodbye)),
        ("data before the hello", message(Header::new(Kind::Data, 0, 1), &[], &[0; 100])),
        ("wrong magic", hello_message(&Hello { magic: 1, ..hello() })),
        ("cut hello", message(Header::new(Kind::Hello, 0, 0), &[0; 20], &[])),
        ("long hello", message(Header::new(Kind::Hello, 0, 0), &[0; 100], &[])),
    ] {
        let mut peer = Raw::connect(process.port);
        peer.send(&bytes);
        judge(name, peer);
    }
}

#[test]
fn another_version_is_told_so() {
    let (_directory, process, mut honest) = start();
    let mut peer = Raw::connect(process.port);
    peer.send(&hello_message(&Hello { version: 999, ..hello() }));
    let (kind, body) = peer.receive().map(|(header, body)| (header.kind, body)).unwrap();
    let welcome = towline_wire::Welcome::parse(&body).unwrap();
    assert_eq!((kind, welcome.errno, welcome.session), (Kind::Welcome, Errno::EPROTO.0, 0));
    // It got no session, so requests are not served.
    peer.send(&request(0, 1, &[ATTACH], 0));
    assert!(peer.thrown_out());
    honest.check("another version");
}

/// The places of what comes later are kept by refusing it now. A client that was refused may try again.
#[test]
fn unknown_ways_of_authentication_and_encryption_are_refused() {
    let (_directory, process, mut honest) = start();
    let none = hello();
    for (asked, what) in [
        (Hello { authentication: 7, ..none }, "authentication"),
        (Hello { encryption: 7, ..none }, "encryption"),
        (Hello { authentication: u16::MAX, encryption: 1, ..none }, "both"),
    ] {
        let mut peer = Raw::connect(process.port);
        peer.send(&hello_message(&asked));
        let (kind, body) = peer.receive().map(|(header, body)| (header.kind, body)).unwrap();
        let welcome = towline_wire::Welcome::parse(&body).unwrap();
        assert_eq!((kind, welcome.session, welcome.secret), (Kind::Welcome, 0, 0), "{what}");
        assert_eq!(welcome.errno, Errno::EPROTONOSUPPORT.0, "{what}");
        assert_eq!(
            (welcome.authentication, welcome.encryption),
            (0, 0),
            "{what}: what is accepted"
        );
        // It got no session, so requests are not served.
        peer.send(&request(0, 1, &[ATTACH], 0));
        assert!(peer.thrown_out(), "{what}");
        honest.check(what);
    }
}

fn last_errno(body: &[u8]) -> Option<Errno> {
    match parse_results(body).unwrap().last() {
        Some(Reply::Failed { errno }) => Some(Errno(*errno)),
        _ => None,
    }
}

#[test]
fn forged_handles_and_sessions_open_nothing() {
    let (_directory, process, mut honest) = start();
    let seed = seed();
    let mut random = Random::new(seed);
    let (mut peer, welcome) = Raw::greeted(process.port);
    peer.send(&request(0, 1, &[ATTACH], 0));
    let body = results(&mut peer);
    let Some(Reply::Opened { handle, .. }) = parse_results(&body).unwrap().first().copied() else {
        panic!("not attached")
    };
    for sequence in 2..300 {
        // Close to the real one, and anywhere.
        let forged = match sequence % 3 {
            0 => handle ^ (1 << random.below(64)),
            1 => random.next(),
            _ => handle.wrapping_add(random.below(20) + 1),
        };
        let requests = match random.below(6) {
            0 => [Request::Stat { base: forged, flags: 0, path: b"" }],
            1 => [Request::Read { handle: forged, offset: 0, length: 100 }],
            2 => [Request::Close { handle: forged }],
            3 => [Request::Unlink { base: forged, flags: DIRECTORY, path: b"x" }],
            4 => [Request::ReadDir { handle: forged, cookie: 0, length: 4096, attributes: 1 }],
            _ => [Request::Lock {
                handle: forged,
                owner: 1,
                family: 1,
                kind: 1,
                wait: 1,
                start: 0,
                length: 0,
            }],
        };
        peer.send(&request(0, sequence, &requests, 0));
        assert_eq!(last_errno(&results(&mut peer)), Some(Errno::EBADF), "{requests:?}");
    }
    // CURRENT, with nothing opened in the same compound.
    peer.send(&request(1, 1, &[Request::Stat { base: CURRENT, flags: 0, path: b"" }], 0));
    assert_eq!(last_errno(&results(&mut peer)), Some(Errno::EBADF));
    // Reclaims files it never had, under all kinds of handles.
    for (sequence, at) in
        [0, 1, CURRENT, u64::MAX >> 1, 1 << 32 | 65_535, 1 << 32 | 65_536, 1 << 63 | 7]
            .into_iter()
            .enumerate()
    {
        let reclaim = Request::Reclaim {
            handle: at,
            flags: 0,
            inode: 12345,
            export: b"mem",
            path: b"honest",
        };
        peer.send(&request(2, sequence as u32 + 1, &[reclaim], 0));
        assert!(last_errno(&results(&mut peer)).is_some(), "reclaimed {at:#x}");
    }
    honest.check("forged handles");

    // Another client's session, without its secret: the peer gets a new one, and the other keeps
    // its lane.
    for secret in [0, 1, welcome.secret ^ 1, !welcome.secret] {
        let mut thief = Raw::connect(process.port);
        thief.send(&hello_message(&Hello { session: welcome.session, secret, ..hello() }));
        let (_, body) = thief.receive().unwrap();
        let theirs = towline_wire::Welcome::parse(&body).unwrap();
        assert_eq!(theirs.resumed, 0);
        assert_ne!(theirs.session, welcome.session);
        thief.send(&request(0, 1, &[Request::Stat { base: handle, flags: 0, path: b"" }], 0));
        assert_eq!(last_errno(&results(&mut thief)), Some(Errno::EBADF));
    }
    for session in [u64::MAX, 1, 2, 3, 1 << 40] {
        let mut thief = Raw::connect(process.port);
        thief.send(&hello_message(&Hello { session, ..hello() }));
        let (_, body) = thief.receive().unwrap();
        assert_eq!(towline_wire::Welcome::parse(&body).unwrap().resumed, 0);
    }
    peer.send(&request(3, 1, &[Request::Stat { base: handle, flags: 0, path: b"" }], 0));
    assert_eq!(last_errno(&results(&mut peer)), None, "the owner lost its lane to a thief");
    honest.check("stolen sessions");
}

#[test]
fn data_has_to_match_its_grant() {
    let (_directory, process, mut honest) = start();
    let data = |edit: fn(&mut Header), length: usize| {
        let mut header = Header::new(Kind::Data, 0, 1);
        edit(&mut header);
        message(header, &[], &vec![7; length])
    };
    for (name, bytes, out) in [
        ("other offset", data(|h| h.offset = 1, 256 * 1024), true),
        ("offset beyond all", data(|h| h.offset = u64::MAX, 256 * 1024), true),
        ("less than granted", data(|_| {}, 100), true),
        ("more than granted", data(|_| {}, 256 * 1024 + 1), true),
        ("nothing", data(|_| {}, 0), true),
        // May be meant for a request that is over: ignored.
        ("other slot", data(|h| h.slot = 9, 1000), false),
        ("other sequence", data(|h| h.sequence = 5, 1000), false),
    ] {
        let (mut peer, _) = Raw::greeted(process.port);
        peer.send(&big_write(0, b"w"));
        let (header, _) = peer.receive().expect("no grant");
        assert_eq!((header.kind, header.word_a), (Kind::Grant, 256 * 1024));
        peer.send(&bytes);
        if out {
            assert!(peer.thrown_out(), "{name}: not thrown out");
        } else {
            peer.send(&request(1, 1, &[Request::Inquire { what: 0 }], 0));
            assert!(last_errno(&results(&mut peer)).is_none(), "{name}");
        }
        honest.check(name);
    }
    // Data that nobody asked for, without a request.
    let (mut peer, _) = Raw::greeted(process.port);
    for slot in 0..10 {
        peer.send(&message(Header::new(Kind::Data, slot, 1), &[], &vec![7; 200_000]));
    }
    peer.send(&request(1, 1, &[Request::Inquire { what: 0 }], 0));
    assert!(last_errno(&results(&mut peer)).is_none());
    honest.check("data without request");
}

/// The data was granted before the write failed, and is discarded.
#[test]
fn data_of_a_write_that_failed_is_counted_and_forgotten() {
    const FRAGMENT: usize = 256 * 1024;
    let (_directory, process, mut honest) = start();
    let root = honest.client.attach(b"mem").unwrap();
    root.write_path(b"w", CREATE, 0o600, b"").unwrap();
    let full = root.open(b"full", CREATE, 0o600).unwrap();
    let data = vec![1; 8 << 20];
    let mut end = 0;
    let error = loop {
        match full.write_at(&data, end) {
            Ok(written) => end += written as u64,
            Err(error) => break error,
        }
    };
    assert_eq!(error.errno(), Errno::ENOSPC);
    let before = counter(&honest.client, "payload_discarded");
    let (mut peer, _) = Raw::greeted(process.port);
    peer.send(&big_write(0, b"w"));
    for _ in 0..2 {
        let (header, _) = peer.receive().expect("no grant");
        assert_eq!((header.kind, header.word_a), (Kind::Grant, FRAGMENT as u32));
    }
    for offset in [0, FRAGMENT] {
        let mut header = Header::new(Kind::Data, 0, 1);
        header.offset = offset as u64;
        peer.send(&message(header, &[], &data[..FRAGMENT]));
    }
    assert_eq!(last_errno(&results(&mut peer)), Some(Errno::ENOSPC));
    peer.send(&request(1, 1, &[Request::Inquire { what: 0 }], 0));
    assert!(last_errno(&results(&mut peer)).is_none());
    assert_eq!(counter(&honest.client, "payload_discarded") - before, FRAGMENT as u64);
    drop(full);
    root.unlink(b"full", false).unwrap();
    honest.check("a failed write");
}

/// The data was granted before the write ran out of space, and arrives while the requests behind
/// the write wait.
#[test]
fn data_of_a_write_that_stopped_early_ends_nothing_that_follows() {
    const FRAGMENT: usize = 256 * 1024;
    let (_directory, process, mut honest) = start();
    let root = honest.client.attach(b"mem").unwrap();
    let held = root.open(b"w", CREATE, 0o600).unwrap();
    let range = Lock { family: FLOCK, kind: EXCLUSIVE, owner: 0, start: 0, length: 0 };
    held.lock(&range, false).unwrap();
    let full = root.open(b"full", CREATE, 0o600).unwrap();
    let data = vec![1; 8 << 20];
    let mut end = 0;
    while let Ok(written) = full.write_at(&data, end) {
        end += written as u64;
    }
    let size = Some(end - FRAGMENT as u64 / 2);
    full.set_attr(b"", true, &SetAttr { size, ..SetAttr::default() }).unwrap();
    let (mut peer, _) = Raw::greeted(process.port);
    let requests = [
        ATTACH,
        Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: b"w" },
        Request::Write { handle: CURRENT, offset: 0, length: 8 << 20, flags: 0 },
        Request::Lock {
            handle: CURRENT,
            owner: 0,
            family: FLOCK,
            kind: EXCLUSIVE,
            wait: 1,
            start: 0,
            length: 0,
        },
    ];
    peer.send(&request(0, 1, &requests, 8 << 20));
    for offset in [0, FRAGMENT] {
        assert_eq!(peer.receive().expect("no grant").0.kind, Kind::Grant);
        let mut header = Header::new(Kind::Data, 0, 1);
        header.offset = offset as u64;
        peer.send(&message(header, &[], &data[..FRAGMENT]));
    }
    peer.send(&request(1, 1, &[Request::Inquire { what: 0 }], 0));
    assert!(last_errno(&results(&mut peer)).is_none());
    held.close().unwrap();
    let body = results(&mut peer);
    let wrote = parse_results(&body).unwrap()[2..].to_vec();
    let half = FRAGMENT as u32 / 2;
    assert!(
        matches!(wrote[..], [Reply::Wrote { length, .. }, Reply::Locked { .. }] if length == half),
        "{wrote:?}"
    );
    drop(full);
    root.unlink(b"full", false).unwrap();
    honest.check("a write that stopped early");
}

#[test]
fn random_damage_to_legal_traffic_harms_nobody() {
    let (_directory, mut process, mut honest) = start();
    let seed = seed();
    let mut random = Random::new(seed);
    honest.check("nothing");
    for round in 0..400 {
        let open = Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: b"damaged" };
        let write = Request::Write { handle: CURRENT, offset: 0, length: 40_000, flags: 0 };
        let read = Request::Read { handle: CURRENT, offset: 0, length: 50_000 };
        let mut bytes = request(0, 1, &[ATTACH, open, write], 40_000);
        let mut data = Header::new(Kind::Data, 0, 1);
        data.offset = 0;
        bytes.extend(message(data, &[], &[9; 40_000]));
        bytes.extend(request(1, 1, &[ATTACH, open, read], 0));
        bytes.extend(request(
            2,
            1,
            &[ATTACH, Request::ReadDir { handle: CURRENT, cookie: 0, length: 9000, attributes: 1 }],
            0,
        ));
        for _ in 0..=random.below(3) {
            // Mostly in headers and bodies, where it matters more.
            let end = if random.below(3) == 0 { bytes.len() } else { 250 };
            let at = random.below(end as u64) as usize;
            bytes[at] = if random.below(2) == 0 {
                random.next() as u8
            } else {
                bytes[at] ^ (1 << random.below(8))
            };
        }
        let (mut peer, _) = Raw::greeted(process.port);
        peer.send(&bytes[..bytes.len() - random.below(100) as usize]);
        if random.below(2) == 0 {
            peer.0.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
            peer.thrown_out();
        }
        drop(peer);
        if round % 20 == 0 {
            honest.check("random damage");
        }
    }
    assert!(process.is_alive());
    honest.check_new(&process, "random damage");
}
