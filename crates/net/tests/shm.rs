//! Tests that several client threads can wait for one shared-memory link.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use towline_mem::SharedMemory;
use towline_net::{Counters, Doorbell, Link, SHM_BYTES, ShmLink, ShmSide, Wait, send_descriptors};

fn pair() -> [Arc<Link>; 2] {
    let memory = Arc::new(SharedMemory::create("test", SHM_BYTES).unwrap());
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
