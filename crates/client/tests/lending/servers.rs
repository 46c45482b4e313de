//! Servers that lend memory they do not have: the client accepts none of it.

use super::common::pattern;
use super::raw::Raw;
use super::{KIB, common, connect};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use towline_client::{Errno, Transport};
use towline_mem::SharedMemory;
use towline_net::{Counters, Doorbell, Link, SHM_BYTES, ShmLink, ShmSide, send_descriptors};
use towline_wire::extents::{Extent, Extents};
use towline_wire::header::{notice, reply_flag, request_flag};
use towline_wire::hello::{MAGIC, want};
use towline_wire::limits::HEADER_BYTES;
use towline_wire::{Attr, Header, Kind, Reply, Request, Welcome};

/// How a read is answered: how far behind the results the list of extents is said to begin, the
/// extents, and the number of their memory.
type Forged = (u64, Vec<Extent>, u32);

/// A server that answers reads of clients that borrow with a forged loan, and other reads with
/// sevens. Before that it hands over memories, with the lengths it claims, and before each read it
/// says that it has forgotten some of them. Returns the flags of the reads.
fn fake_server(
    path: PathBuf,
    memories: Vec<(SharedMemory, usize)>,
    forgotten: Vec<u64>,
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
        send_descriptors(&socket, &greeting, &[ring.fd(), bell.as_fd()], towline_net::Wait::Any)
            .unwrap();
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
        for (memory, length) in memories {
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
                for number in &forgotten {
                    let mut notice = Header::new(Kind::Notice, 0, 0);
                    (notice.flags, notice.offset) = (notice::FORGOTTEN, *number);
                    raw.send(&notice.to_bytes());
                }
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

/// Returns what a client makes of this answer to two reads of 64 KiB, and the flags of its reads.
fn read_from_fake(
    memory: Option<(SharedMemory, usize)>,
    forged: Forged,
) -> (Result<Vec<u8>, Errno>, Vec<u8>) {
    read_from_forgetful(memory.into_iter().collect(), vec![], forged)
}

/// The same from a server that forgets these memories before each read.
fn read_from_forgetful(
    memories: Vec<(SharedMemory, usize)>,
    forgotten: Vec<u64>,
    forged: Forged,
) -> (Result<Vec<u8>, Errno>, Vec<u8>) {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("socket");
    let server = fake_server(path.clone(), memories, forgotten, forged);
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
fn nothing_is_read_from_memory_that_was_forgotten() {
    let length = 64 * KIB;
    let memories = || {
        let memory = |seed| {
            let memory = SharedMemory::create("lent", length).unwrap();
            memory.copy_in(0, &pattern(length, seed));
            (memory, length)
        };
        vec![memory(1), memory(2)]
    };
    let extents = vec![Extent { offset: Some(0), length: length as u32 }];
    // The first was never lent from.
    let (result, _) = read_from_forgetful(memories(), vec![0], (0, extents.clone(), 1));
    assert!(result.unwrap() == pattern(length, 2));
    for forgotten in [vec![0], vec![0, 1, 2], vec![u64::MAX]] {
        let (result, _) =
            read_from_forgetful(memories(), forgotten.clone(), (0, extents.clone(), 0));
        assert!(result.is_err(), "{forgotten:?}");
    }
}

#[test]
fn memory_that_cannot_be_mapped_is_asked_for_as_bytes() {
    // It claims to be longer than it is: reading behind its end would be a fault.
    let memory = SharedMemory::create("lent", 4096).unwrap();
    let forged = (0, vec![Extent { offset: Some(0), length: 64 * KIB as u32 }], 0);
    let (result, flags) = read_from_fake(Some((memory, 1 << 30)), forged);
    assert!(result.unwrap() == [7; 64 * KIB]);
    assert_eq!(flags, [request_flag::BORROWS, 0, 0], "it asks again, and then for bytes at once");
}
