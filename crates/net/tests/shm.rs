//! Links over shared memory: their bells, waiting by several threads, and files read into their rings.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use towline_mem::{Aggregate, Segment, SharedMemory};
use towline_net::{
    Counters, Doorbell, Flushed, Link, Pipe, SHM_BYTES, SendQueue, ShmLink, ShmSide, Wait,
    send_descriptors,
};
use towline_wire::{Errno, Header, Kind};

fn pair() -> [Arc<Link>; 2] {
    pair_over(&Arc::new(SharedMemory::create("test", SHM_BYTES).unwrap()))
}

fn pair_over(memory: &Arc<SharedMemory>) -> [Arc<Link>; 2] {
    let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let bell = Doorbell::new(bell);
    let (near, far) = UnixStream::pair().unwrap();
    let end = |side, socket: UnixStream| {
        ShmLink::new(memory.clone(), side, bell.clone(), socket.into()).unwrap()
    };
    [end(ShmSide::Client, near), end(ShmSide::Server, far)]
        .map(|link| Arc::new(Link::Shm(Box::new(link))))
}

#[test]
fn a_bell_between_two_never_waits() {
    let (near, far) = UnixStream::pair().unwrap();
    let [near, far] = [near, far].map(|end| Doorbell::between(end.into()));
    near.clear();
    for _ in 0..100_000 {
        near.ring();
    }
    let rings = || {
        let mut watched = [PollFd::new(far.fd(), PollFlags::IN)];
        poll(&mut watched, Some(&Timespec::default())).unwrap() == 1
    };
    assert!(rings());
    while rings() {
        far.clear();
    }
    near.ring();
    assert!(rings());
    drop(near);
    far.ring();
}

/// Its peer may have made it wait.
#[test]
fn descriptors_do_not_wait_for_room_in_a_socket_that_does() {
    let (near, _far) = UnixStream::pair().unwrap();
    let memory = SharedMemory::create("test", 4096).unwrap();
    let send = || send_descriptors(&near, &[0; 16], &[memory.fd()], Wait::No);
    let full = std::iter::repeat_with(send).find_map(Result::err).unwrap();
    assert_eq!(full.kind(), std::io::ErrorKind::WouldBlock, "{full}");
}

/// A sender fills the ring while a receiver, which has seen only half of it, takes that half.
#[test]
fn a_sender_is_woken_when_half_of_the_ring_was_taken_at_once() {
    const HALF: usize = 512 * 1024;
    let [client, server] = pair();
    let (Link::Shm(near), Link::Shm(far)) = (&*client, &*server) else { unreachable!() };
    let (counters, bytes, start) = (Counters::default(), vec![7; HALF], Barrier::new(2));
    for round in 0..300 {
        assert_eq!(server.send(&[&bytes], &counters).unwrap(), HALF);
        let sleeps = std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                start.wait();
                assert_eq!(server.send(&[&bytes], &Counters::default()).unwrap(), HALF);
                far.prepare_wait(true)
            });
            let mut taken = vec![0; HALF];
            start.wait();
            for _ in 0..round * 20 {
                std::hint::spin_loop();
            }
            assert_eq!(client.receive(&mut taken, &counters).unwrap(), HALF);
            sending.join().unwrap()
        });
        assert!(!sleeps || !near.peer_sleeps(), "half of the ring is free, and nobody says so");
        while client.receive(&mut [0; 65536], &counters).is_ok() {}
    }
}

fn file_of(bytes: &[u8]) -> Segment {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    Segment::File(Arc::new(file.into()))
}

fn with_header(file: &Segment, from: u64, length: u64) -> Aggregate {
    let mut message = Aggregate::from_vec(b"header".to_vec());
    message.append(file.clone(), from, length);
    message
}

/// Here the ring is often full, and one message promises more than the file has: zeros come, and behind them
/// what they are.
#[test]
fn files_are_sent_through_the_ring() {
    let bytes = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>();
    let file = file_of(&bytes);
    let [client, server] = pair();
    let (counters, received) = (Counters::default(), Counters::default());
    let (mut queue, mut pipe) = (SendQueue::default(), Pipe::none());
    let (mut sent, mut got) = (Vec::new(), Vec::new());
    for (slot, from, length) in [(0, 0, 3_000_000), (1, 17, 700_001), (2, 3_999_000, 2000)] {
        queue.push(with_header(&file, from, length), slot, 7);
        let end = (from + length) as usize;
        let held = bytes.len().min(end);
        sent.extend_from_slice(b"header");
        sent.extend_from_slice(&bytes[from as usize..held]);
        sent.resize(sent.len() + end - held, 0);
    }
    let mut told = Header::new(Kind::Data, 2, 7);
    told.word_a = Errno::EIO.0.into();
    sent.extend_from_slice(&told.to_bytes());
    let mut room = vec![0; 100_000];
    let mut is_full = false;
    while got.len() < sent.len() {
        is_full |= queue.flush(&server, &mut pipe, &counters).unwrap() == Flushed::Blocked;
        let count = client.receive(&mut room, &received).unwrap();
        got.extend_from_slice(&room[..count]);
    }
    assert!(is_full && queue.is_empty());
    assert!(got == sent);
    assert_eq!(counters.bytes_sent_copied.load(Ordering::Relaxed), sent.len() as u64);
}

/// The header of a file wakes nobody, so whatever follows it has to.
#[test]
fn who_waits_for_a_file_is_woken() {
    let file = file_of(&[7; 100]);
    let full = vec![0; SHM_BYTES];
    let mut filled = Aggregate::from_vec(full);
    filled.append(file.clone(), 0, 100);
    let cases = [
        ("a file", with_header(&file, 0, 100)),
        ("a file that is too short", with_header(&file, 50, 100)),
        ("a file that has ended", with_header(&file, 100, 10)),
        ("a full ring", filled),
    ];
    for (what, message) in cases {
        let [client, server] = pair();
        let [Link::Shm(near), Link::Shm(far)] = [&*client, &*server] else { panic!("not shared") };
        assert!(near.prepare_wait(false) && far.peer_sleeps(), "{what}");
        let mut queue = SendQueue::default();
        queue.push(message, 0, 1);
        queue.flush(&server, &mut Pipe::none(), &Counters::default()).unwrap();
        assert!(!far.peer_sleeps(), "{what}");
    }
}

/// Where the positions of a ring are, and its size.
const RINGS: [(usize, usize); 2] = [(256, 512 * 1024), (512, 1024 * 1024)];
/// The position of its reader, behind that of its writer.
const READ: usize = 128;

#[test]
fn a_position_that_cannot_be_is_an_error_for_whoever_receives_or_sends() {
    let counters = Counters::default();
    for (number, (words, bytes)) in RINGS.into_iter().enumerate() {
        let ring = bytes as u64;
        let over = || {
            let memory = Arc::new(SharedMemory::create("test", SHM_BYTES).unwrap());
            let mut links = pair_over(&memory);
            links.rotate_left(number);
            let [sender, receiver] = links;
            assert_eq!(sender.send(&[&[7; 100]], &counters).unwrap(), 100);
            assert_eq!(receiver.receive(&mut [0; 60], &counters).unwrap(), 60);
            (memory, sender, receiver)
        };
        let is_impossible = |what: &str, result: std::io::Result<usize>| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{what}: {error}");
        };
        for written in [0, 59, 60 + ring + 1, 1 << 63, u64::MAX] {
            let (memory, _sender, receiver) = over();
            memory.word64(words).store(written, Ordering::Release);
            let Link::Shm(link) = &*receiver else { unreachable!() };
            assert!(link.readable(), "who sleeps would not find out: {written}");
            is_impossible("receives", receiver.receive(&mut [0; 60], &counters));
        }
        for read in [101, 100u64.wrapping_sub(ring + 1), 1 << 63, u64::MAX - ring] {
            let (memory, sender, _receiver) = over();
            memory.word64(words + READ).store(read, Ordering::Release);
            let Link::Shm(link) = &*sender else { unreachable!() };
            assert!(link.writable(), "who sleeps would not find out: {read}");
            is_impossible("sends", sender.send(&[&vec![7; bytes]], &counters));
        }
    }
}

/// One thread waits for room in the ring, another one, started later, for data.
#[test]
fn all_who_wait_are_woken() {
    const STEP: Duration = Duration::from_millis(20);
    let late = || {
        let [client, server] = pair();
        let counters = Counters::default();
        while client.send(&[&[0; 65536]], &counters).is_ok() {}
        let near = client.clone();
        let room = std::thread::spawn(move || near.wait_writable(None));
        std::thread::sleep(STEP);
        let reads = std::thread::spawn(move || {
            client.wait_readable(Duration::from_secs(1)).unwrap();
            Instant::now()
        });
        std::thread::sleep(STEP);
        let sent = Instant::now();
        server.send(&[&[1]], &counters).unwrap();
        let late = reads.join().unwrap() - sent;
        room.join().unwrap().unwrap();
        late
    };
    let least = (0..5).map(|_| late()).min().unwrap();
    assert!(least < Duration::from_millis(40), "woken after {least:?}");
}
