//! Peers that send what no client would.

use crate::common::{Raw, message, request};
use crate::setup::{Disks, SIZE, disks};
use towline_wire::disk::{checksums, disk_flag};
use towline_wire::reply::parse_results;
use towline_wire::{Errno, Header, Kind, Reply, Request};

fn opened(disks: &Disks) -> Raw {
    opened_as(disks, b"delay")
}

fn opened_as(disks: &Disks, name: &[u8]) -> Raw {
    let (mut raw, _) = Raw::greeted(disks.port());
    raw.send(&request(0, 1, &[Request::DiskOpen { disk: 5, name }], 0));
    let (_, body) = raw.receive().unwrap();
    assert!(matches!(parse_results(&body).unwrap()[..], [Reply::Disk { .. }]));
    raw
}

fn errno(raw: &mut Raw) -> Errno {
    let (header, body) = raw.receive().expect("thrown out");
    assert_eq!(header.kind, Kind::Reply);
    match parse_results(&body).unwrap()[..] {
        [Reply::Failed { errno }] => Errno(errno),
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn hostile_ranges_are_refused_and_the_session_goes_on() {
    let disks = disks();
    let mut raw = opened(&disks);
    let size = SIZE as u64;
    let read = |offset, length| Request::DiskRead { disk: 5, flags: 0, offset, length };
    let write =
        |offset, length| Request::DiskWrite { disk: 5, flags: 0, offset, length, checksums: b"" };
    let zero = |offset, length| Request::DiskZero { disk: 5, flags: !1, offset, length };
    let status = |kind, length| Request::DiskStatus { disk: 5, kind, offset: 0, length, most: 0 };
    let cases = [
        (read(size, 1), 0, Errno::EINVAL),
        (read(u64::MAX, u32::MAX), 0, Errno::EINVAL),
        (read(0, u32::MAX), 0, Errno::EINVAL),
        (write(size - 1, 1 << 20), 1 << 20, Errno::ENOSPC),
        (write(u64::MAX - 5, 1 << 20), 1 << 20, Errno::EINVAL),
        (zero(1, u64::MAX), 0, Errno::EINVAL),
        (zero(u64::MAX, u64::MAX), 0, Errno::EINVAL),
        (status(2, 1), 0, Errno::EINVAL),
        (status(0, u64::MAX), 0, Errno::EINVAL),
        (Request::DiskCache { disk: 5, offset: 1, length: u64::MAX }, 0, Errno::EINVAL),
        (Request::DiskFlush { disk: 6 }, 0, Errno::EBADF),
        (Request::DiskClose { disk: u32::MAX }, 0, Errno::EBADF),
        (Request::DiskOpen { disk: 7, name: &[0xff; 4000] }, 0, Errno::ENOENT),
    ];
    for (number, (case, offered, expected)) in cases.iter().enumerate() {
        raw.send(&request(0, number as u32 + 2, std::slice::from_ref(case), *offered));
        assert_eq!(errno(&mut raw), *expected, "{case:?}");
    }
}

/// What is behind a request is looked at before it is checked, to fetch the memory that it is about.
#[test]
fn hostile_ranges_behind_another_request_are_refused() {
    let disks = disks();
    let mut raw = opened_as(&disks, b"memory");
    let size = SIZE as u64;
    let cases = [
        (5, u64::MAX - 5, Errno::EINVAL),
        (5, u64::MAX, Errno::EINVAL),
        (5, size - 8, Errno::ENOSPC),
        (5, size, Errno::ENOSPC),
        (5, u64::MAX / 2, Errno::ENOSPC),
        (6, 0, Errno::EBADF),
    ];
    for (number, (disk, offset, expected)) in cases.into_iter().enumerate() {
        let write = |slot, disk, offset| {
            let write = Request::DiskWrite { disk, flags: 0, offset, length: 16, checksums: b"" };
            let body = towline_wire::request::encode_compound(&[write]);
            message(Header::new(Kind::Request, slot, number as u32 + 2), &body, &[7; 16])
        };
        raw.send(&[write(0, 5, 0), write(1, disk, offset)].concat());
        let (_, body) = raw.receive().unwrap();
        assert!(matches!(parse_results(&body).unwrap()[..], [Reply::Stored { .. }]));
        assert_eq!(errno(&mut raw), expected, "{offset}");
    }
}

#[test]
fn what_is_no_legal_request_ends_the_connection() {
    let disks = disks();
    let write = Request::DiskWrite { disk: 5, flags: 0, offset: 0, length: 4096, checksums: b"" };
    let read = Request::DiskRead { disk: 5, flags: 0, offset: 0, length: 1 };
    let long =
        Request::DiskWrite { disk: 5, flags: 0, offset: 0, length: u32::MAX, checksums: b"" };
    let cases = [
        request(1, 1, &[read, read], 0),
        request(1, 1, &[write], 0),
        request(1, 1, &[write], 4095),
        request(1, 1, &[read], 10),
        request(1, 1, &[long], u32::MAX.into()),
        message(Header::new(Kind::Request, 1, 1), &[36, 1, 2], &[]),
    ];
    for case in cases {
        let mut raw = opened(&disks);
        raw.send(&case);
        assert!(raw.thrown_out(), "{case:?}");
    }
    // Data of another length than granted, data for another place; received into a buffer, and into the disk.
    let names = [&b"delay"[..], b"memory"];
    let wrong = [(0, 100), (0, 65537), (4096, 65536)];
    for (name, (offset, length)) in names.into_iter().flat_map(|n| wrong.map(|w| (n, w))) {
        let mut raw = opened_as(&disks, name);
        let write =
            Request::DiskWrite { disk: 5, flags: 0, offset: 0, length: 65536, checksums: b"" };
        raw.send(&request(1, 1, &[write], 65536));
        let (grant, _) = raw.receive().unwrap();
        assert_eq!((grant.kind, grant.word_a), (Kind::Grant, 65536));
        let mut header = Header::new(Kind::Data, 1, 1);
        header.offset = offset;
        raw.send(&message(header, &[], &vec![0; length]));
        assert!(raw.thrown_out(), "{offset} {length}");
    }
    for name in names {
        let disk = disks.client().disk(name).unwrap();
        disk.flush().unwrap();
        let mut behind = vec![1; SIZE - 65536];
        disk.read_at(&mut behind, 65536).unwrap();
        assert!(behind.iter().all(|byte| *byte == 0), "nothing lies behind what was granted");
    }
}

/// Else the beginning of what is written would be what the buffer held before, of others.
#[test]
fn data_that_begins_before_its_grant_is_taken_whole_or_not_at_all() {
    let disks = disks();
    let length = 3 * 65536;
    for name in [&b"delay"[..], b"memory"] {
        let disk = disks.client().disk(name).unwrap();
        disk.write_at(&vec![1; length], length as u64).unwrap();
        let mut raw = opened_as(&disks, name);
        let write = Request::DiskWrite {
            disk: 5,
            flags: 0,
            offset: 0,
            length: length as u32,
            checksums: b"",
        };
        let mut bytes = request(1, 1, &[write], length as u64);
        bytes.extend(message(Header::new(Kind::Data, 1, 1), &[], &vec![2; length]));
        let (early, late) = bytes.split_at(bytes.len() - length / 2);
        raw.send(early);
        let granted = raw.receive().map(|(header, _)| header.kind);
        raw.send(late);
        let is_taken = granted == Some(Kind::Grant)
            && raw.receive().is_some_and(|(header, _)| header.kind == Kind::Reply);
        let mut found = vec![0; length];
        disk.read_at(&mut found, 0).unwrap();
        let allowed: &[u8] = if is_taken { &[2] } else { &[0, 2] };
        assert!(found.iter().all(|byte| allowed.contains(byte)), "{name:?} {is_taken}");
    }
}

#[test]
fn wrong_checksums_keep_data_away_from_the_disk() {
    let disks = disks();
    let disk = disks.client().disk(b"delay").unwrap();
    disk.write_at(&vec![1; 1 << 20], 0).unwrap();
    let mut raw = opened(&disks);
    let data = vec![2; 1 << 20];
    let mut sums = checksums(&data);
    sums[3] ^= 1;
    let write = |length| Request::DiskWrite {
        disk: 5,
        flags: disk_flag::CHECKSUMS,
        offset: 0,
        length,
        checksums: &sums[..(length as usize).div_ceil(4096) * 4],
    };
    // Inline.
    let body = towline_wire::request::encode_compound(&[write(8192)]);
    raw.send(&message(Header::new(Kind::Request, 0, 2), &body, &data[..8192]));
    assert_eq!(errno(&mut raw), Errno::EBADMSG);
    // Under grants: nothing more is granted once a part is wrong.
    raw.send(&request(0, 3, &[write(1 << 20)], 1 << 20));
    let mut granted = 0;
    let refused = loop {
        let (header, body) = raw.receive().expect("thrown out");
        if header.kind == Kind::Reply {
            break parse_results(&body).unwrap().first().copied().map(|r| format!("{r:?}"));
        }
        granted += header.word_a as usize;
        let mut data_header = Header::new(Kind::Data, 0, 3);
        data_header.offset = header.offset;
        let from = header.offset as usize;
        raw.send(&message(data_header, &[], &data[from..from + header.word_a as usize]));
    };
    assert_eq!(refused.unwrap(), format!("{:?}", Reply::Failed { errno: Errno::EBADMSG.0 }));
    assert!(granted < 1 << 20);
    let mut found = vec![0; 1 << 20];
    disk.read_at(&mut found, 0).unwrap();
    assert!(found.iter().all(|byte| *byte == 1));
}

/// The disk is memory that a granted part is being received into.
#[test]
fn a_disk_that_becomes_shorter_takes_no_more_of_a_write() {
    let disks = disks();
    let disk = disks.client().disk(b"memory").unwrap();
    let mut raw = opened_as(&disks, b"memory");
    let (from, length) = (SIZE as u64 - 131_072, 131_072);
    let write = Request::DiskWrite { disk: 5, flags: 0, offset: from, length, checksums: b"" };
    raw.send(&request(1, 1, &[write], length.into()));
    let (grant, _) = raw.receive().unwrap();
    assert_eq!((grant.kind, grant.word_a), (Kind::Grant, length));
    let data = message(Header::new(Kind::Data, 1, 1), &[], &vec![7; length as usize]);
    raw.send(&data[..60_000]);
    let mut tries = 0;
    let mut byte = [0];
    while byte != [7] {
        disk.read_at(&mut byte, from + 50_000).unwrap();
        tries += 1;
        assert!(tries < 6000, "half of it never came");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    disk.resize(from + 65_536).unwrap();
    raw.send(&data[60_000..]);
    assert_eq!(errno(&mut raw), Errno::EIO);
    disk.resize(SIZE as u64).unwrap();
    let mut found = vec![1; length as usize];
    disk.read_at(&mut found, from).unwrap();
    assert!(found[65_536..].iter().all(|byte| *byte == 0));
    // The session goes on.
    raw.send(&request(1, 2, &[Request::DiskFlush { disk: 5 }], 0));
    let (_, body) = raw.receive().unwrap();
    assert!(matches!(parse_results(&body).unwrap()[..], [Reply::Stored { .. }]));
}
