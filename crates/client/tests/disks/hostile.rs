//! Peers that send what no client would.

use crate::common::{Raw, hello, hello_message, message, request, say_ahead};
use crate::setup::{Disks, SIZE, disks, start};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use towline_client::Transport;
use towline_mem::SharedMemory;
use towline_net::{
    Counters, Doorbell, Link, SHM_BYTES, ShmLink, ShmSide, Spin, Target, Wait, receive_descriptors,
};
use towline_server::{DiskExport, DiskKind};
use towline_wire::disk::{checksums, disk_flag};
use towline_wire::header::{data_flag, reply_flag};
use towline_wire::hello::{Hello, want};
use towline_wire::limits::HEADER_BYTES;
use towline_wire::reply::parse_results;
use towline_wire::{Errno, Header, Kind, Reply, Request, Welcome};

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

/// The server looks at the next request before it checks it, to prefetch the memory that it is
/// about.
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
    // Data of another length than granted, and data for another place; received into a buffer, and
    // straight into the disk.
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

/// Otherwise the disk would get what others had left in the buffer.
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
    // Under grants: the server grants nothing more once a part is wrong.
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

/// A part is still being written when the connection is lost, and the write is not answered yet.
#[test]
fn a_write_that_was_refused_is_told_on_the_next_connection() {
    const FRAGMENT: usize = 128 << 10;
    // Long enough for all messages of this test to arrive meanwhile.
    let slow = DiskKind::Delay(SIZE as u64, Duration::from_secs(1), 0);
    let disks = start(TempDir::new().unwrap(), vec![DiskExport::new("slow", slow)]);
    let (mut raw, welcome) = Raw::greeted(disks.port());
    raw.send(&request(0, 1, &[Request::DiskOpen { disk: 5, name: b"slow" }], 0));
    raw.receive().unwrap();
    let data = vec![2; 2 * FRAGMENT];
    let mut sums = checksums(&data);
    *sums.last_mut().unwrap() ^= 1;
    let length = data.len() as u32;
    let flags = disk_flag::CHECKSUMS;
    let write = Request::DiskWrite { disk: 5, flags, offset: 0, length, checksums: &sums };
    let write = request(0, 2, &[write], length.into());
    raw.send(&write);
    for _ in 0..2 {
        let (granted, _) = raw.receive().expect("thrown out");
        assert_eq!((granted.kind, granted.word_a), (Kind::Grant, FRAGMENT as u32));
        let mut header = Header::new(Kind::Data, 0, 2);
        header.offset = granted.offset;
        raw.send(&message(header, &[], &data[..FRAGMENT]));
    }
    raw.send(&request(1, 1, &[Request::DiskList { skip: 0 }], 0));
    assert_eq!(raw.receive().expect("thrown out").0.slot, 1, "not answered yet");
    let mut raw = Raw::connect(disks.port());
    let Welcome { session, secret, .. } = welcome;
    raw.send(&hello_message(&Hello { session, secret, ..hello() }));
    raw.receive().unwrap();
    raw.send(&write);
    assert_eq!(errno(&mut raw), Errno::EBADMSG);
}

/// A peer that sends ahead without leave has to send its data twice. Data announced as sent ahead
/// may not arrive as granted data.
#[test]
fn data_ahead_without_leave_has_no_place() {
    const LENGTH: u32 = 100_000;
    let disks = disks();
    let disk = disks.client().disk(b"memory").unwrap();
    let ask = |raw: &mut Raw, sequence, ahead, data_flags, seed| {
        let write =
            Request::DiskWrite { disk: 5, flags: 0, offset: 0, length: LENGTH, checksums: b"" };
        let mut bytes = request(1, sequence, &[write], LENGTH.into());
        if ahead {
            say_ahead(&mut bytes, LENGTH as usize);
        }
        let mut header = Header::new(Kind::Data, 1, sequence);
        header.flags = data_flags;
        raw.send(&[bytes, message(header, &[], &vec![seed; LENGTH as usize])].concat());
    };
    let held = |seed: u8| {
        let mut found = vec![0; LENGTH as usize];
        disk.read_at(&mut found, 0).unwrap();
        found.iter().all(|byte| *byte == seed)
    };
    let mut raw = opened_as(&disks, b"memory");
    ask(&mut raw, 1, true, data_flag::AHEAD, 1);
    let (grant, _) = raw.receive().expect("no grant");
    assert_eq!((grant.kind, grant.word_a), (Kind::Grant, LENGTH));
    raw.send(&message(Header::new(Kind::Data, 1, 1), &[], &[2; LENGTH as usize]));
    let (reply, _) = raw.receive().expect("thrown out");
    assert!(reply.kind == Kind::Reply && reply.flags & reply_flag::AHEAD != 0);
    assert!(held(2));
    ask(&mut raw, 2, true, data_flag::AHEAD, 3);
    let (reply, _) = raw.receive().expect("thrown out");
    assert!(reply.kind == Kind::Reply && reply.flags & reply_flag::AHEAD != 0);
    assert!(held(3));
    ask(&mut raw, 3, true, 0, 4);
    assert!(raw.thrown_out());
}

/// As from a client that has its leave from a file. Other parts are granted while the discarded
/// data is still arriving.
#[test]
fn data_ahead_of_another_length_than_the_first_fragment_has_no_place() {
    const LENGTH: usize = 1 << 20;
    let disks = disks();
    let disk = disks.client().disk(b"memory").unwrap();
    let mut raw = opened_as(&disks, b"memory");
    let write = |raw: &mut Raw, sequence, ahead: &[usize], seed| {
        let write = Request::DiskWrite {
            disk: 5,
            flags: 0,
            offset: 0,
            length: LENGTH as u32,
            checksums: b"",
        };
        let mut bytes = request(1, sequence, &[write], LENGTH as u64);
        let first: usize = ahead.iter().sum();
        if first > 0 {
            say_ahead(&mut bytes, first);
            let mut header = Header::new(Kind::Data, 1, sequence);
            (header.flags, header.payload_bytes) = (data_flag::AHEAD, first as u32);
            bytes.extend(header.to_bytes());
        }
        raw.send(&bytes);
        let mut grants = Vec::new();
        for part in ahead {
            // Once all of this part has arrived, the server has begun with the next one.
            grants.push(raw.receive().expect("thrown out").0);
            raw.send(&vec![seed + 1; *part]);
        }
        loop {
            let header = match grants.is_empty() {
                true => raw.receive().expect("thrown out").0,
                false => grants.remove(0),
            };
            if header.kind == Kind::Reply {
                return header.flags & reply_flag::AHEAD != 0;
            }
            let mut data = Header::new(Kind::Data, 1, sequence);
            data.offset = header.offset;
            raw.send(&message(data, &[], &vec![seed; header.word_a as usize]));
        }
    };
    assert!(write(&mut raw, 1, &[], 1));
    assert!(write(&mut raw, 2, &[128 << 10, 128 << 10], 2));
    let mut found = vec![0; LENGTH];
    disk.read_at(&mut found, 0).unwrap();
    assert!(found.iter().all(|byte| *byte == 2));
}

/// A granted part is being received straight into the disk's memory.
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

/// A peer over shared memory that sends arbitrary messages.
struct Ring(Link, Vec<u8>);

impl Ring {
    /// Connects and opens three disks, under the numbers 5, 6 and 7.
    fn opened(disks: &Disks) -> Self {
        let path = disks.transports.iter().find_map(|transport| match transport {
            Transport::Shm(path) => Some(path),
            _ => None,
        });
        let socket = UnixStream::connect(path.unwrap()).unwrap();
        let hello = Hello { want: want::SHARED_MEMORY, ..hello() };
        (&socket).write_all(&hello_message(&hello)).unwrap();
        let (_, descriptors) = receive_descriptors(&socket, &mut [0; 512], Wait::Any).unwrap();
        let [memory, bell] = <[_; 2]>::try_from(descriptors).unwrap();
        let memory = Arc::new(SharedMemory::open(memory, SHM_BYTES, true).unwrap());
        let bell = Doorbell::new(bell);
        let link = ShmLink::new(memory, ShmSide::Client, bell, socket.into()).unwrap();
        let mut ring = Self(Link::Shm(Box::new(link)), Vec::new());
        for (slot, name) in [(0, &b"memory"[..]), (1, b"read-only"), (2, b"cached")] {
            let open = Request::DiskOpen { disk: 5 + u32::from(slot), name };
            ring.send(&request(slot, 1, &[open], 0));
            assert!(matches!(ring.answer(), (_, 1, Ok(None))));
        }
        ring
    }

    fn send(&self, bytes: &[u8]) {
        assert_eq!(self.0.send(&[bytes], &Counters::default()).unwrap(), bytes.len());
    }

    /// Returns false if the server has ended the link.
    fn fill(&mut self, wanted: usize) -> bool {
        while self.1.len() < wanted {
            let mut part = [0; 4096];
            let mut target = Target::Own(&mut part);
            match self.0.receive_wait(&mut target, &mut Spin::new(Duration::ZERO), false) {
                Ok(count) if count > 0 => self.1.extend_from_slice(&part[..count]),
                _ => return false,
            }
        }
        true
    }

    /// Returns slot, flags and result of the next answer: the epoch of a change, its error, or
    /// neither.
    fn answer(&mut self) -> (u16, u32, Result<Option<u64>, Errno>) {
        assert!(self.fill(HEADER_BYTES));
        let header = Header::parse(self.1.first_chunk().unwrap()).unwrap();
        let end = HEADER_BYTES + header.body_bytes as usize;
        assert!(self.fill(end));
        let message: Vec<u8> = self.1.drain(..end).collect();
        let result = match parse_results(&message[HEADER_BYTES..]).unwrap()[..] {
            [Reply::Stored { epoch }] => Ok(Some(epoch)),
            [Reply::Failed { errno }] => Err(Errno(errno)),
            [Reply::Disk { .. }] => Ok(None),
            ref other => panic!("{other:?}"),
        };
        (header.slot, header.sequence, result)
    }
}

/// The server takes plain ones together, but each is answered by itself, once, and done in its
/// turn.
#[test]
fn writes_that_stand_in_a_ring_together_are_answered_each_for_itself() {
    let disks = disks();
    let mut ring = Ring::opened(&disks);
    let size = SIZE as u64;
    let write = |slot: u16, sequence, disk, offset, flags, length: usize, fill: u8| {
        let data = vec![fill; length];
        let sums =
            if flags & disk_flag::CHECKSUMS == 0 { Vec::new() } else { checksums(&[9; 4096]) };
        let write =
            Request::DiskWrite { disk, flags, offset, length: length as u32, checksums: &sums };
        let body = towline_wire::request::encode_compound(&[write]);
        message(Header::new(Kind::Request, slot, sequence), &body, &data)
    };
    let stored = |result: &Result<Option<u64>, Errno>| matches!(result, Ok(Some(_)));
    // The messages, and how they end: zero or an error number.
    let cases = [
        (write(10, 1, 5, 0, 0, 4096, 1), 0),
        (write(11, 1, 5, 4096, disk_flag::DURABLE, 4096, 2), 0),
        (write(12, 1, 5, 2048, 0, 4096, 3), 0),
        (write(13, 1, 6, 0, 0, 4096, 4), Errno::EROFS.0),
        (write(14, 1, 5, size - 4095, 0, 4096, 4), Errno::ENOSPC.0),
        (write(15, 1, 5, u64::MAX - 4095, 0, 4096, 4), Errno::EINVAL.0),
        (write(16, 1, 8, 0, 0, 4096, 4), Errno::EBADF.0),
        (write(17, 1, 5, 0, disk_flag::CHECKSUMS, 4096, 4), Errno::EBADMSG.0),
        (write(18, 1, 5, 8192, disk_flag::CHECKSUMS, 4096, 9), 0),
        // Sent again: answered, but not done again.
        (write(10, 1, 5, 0, 0, 4096, 5), 0),
        (write(19, 1, 5, 1 << 20, 0, 4096, 6), 0),
        (write(20, 1, 5, size - 4096, 0, 4096, 7), 0),
        (write(21, 1, 5, 12288, 0, 16384, 8), 0),
        (write(11, 2, 5, 1 << 20, 0, 4096, 9), 0),
    ];
    ring.send(&cases.iter().flat_map(|(message, _)| message.clone()).collect::<Vec<_>>());
    for (number, (sent, errno)) in cases.iter().enumerate() {
        let header = Header::parse(sent.first_chunk().unwrap()).unwrap();
        let (slot, sequence, result) = ring.answer();
        assert_eq!((slot, sequence), (header.slot, header.sequence), "case {number}");
        match errno {
            0 => assert!(stored(&result), "case {number}: {result:?}"),
            errno => assert_eq!(result, Err(Errno(*errno)), "case {number}"),
        }
    }
    let mut model = vec![0; SIZE];
    let parts =
        [(0, 2048, 1), (2048, 4096, 3), (6144, 2048, 2), (8192, 4096, 9), (12288, 16384, 8)];
    for (at, length, fill) in parts.into_iter().chain([(1 << 20, 4096, 9), (SIZE - 4096, 4096, 7)])
    {
        model[at..at + length].fill(fill);
    }
    let mut found = vec![1; SIZE];
    let disk = disks.client().disk(b"memory").unwrap();
    disk.read_at(&mut found, 0).unwrap();
    assert_eq!((0..SIZE).find(|at| found[*at] != model[*at]), None);
    // Requests before an illegal one are done, and those after it are not.
    let illegal = message(Header::new(Kind::Request, 30, 1), &[36, 1, 2], &[0; 4096]);
    let parts = [write(22, 1, 5, 0, 0, 4096, 11), illegal, write(23, 1, 5, 4096, 0, 4096, 12)];
    ring.send(&parts.concat());
    while ring.fill(ring.1.len() + 1) {}
    disk.read_at(&mut found[..8192], 0).unwrap();
    model[..4096].fill(11);
    assert!(found[..8192] == model[..8192]);
}
