//! Peers that forge, flood, stall or die are refused or cut off, and other peers do not notice.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{LIMIT, Via, bytes, link, node, options, serve};
use rustix::fs::MemfdFlags;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;
use towline_mem::SharedMemory;
use towline_net::{SHM_BYTES, Wait, receive_descriptors, send_descriptors};
use towline_transfer::{
    Access, Address, Choice, Errno, Error, Global, Intent, Node, Options, Part, Strategy, Way,
    import,
};
use towline_wire::{Header, Kind};

const GREETING_BYTES: usize = 80;

/// A peer that sends raw bytes.
struct Raw(TcpStream);

impl Raw {
    fn connect(node: &Node) -> Self {
        let Address::Tcp(address) = node.addresses()[0].clone() else { panic!() };
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(LIMIT).unwrap();
        stream.write_all(&hello(0)).unwrap();
        stream.read_exact(&mut [0; GREETING_BYTES]).unwrap();
        Self(stream)
    }

    fn control(&mut self, body: &[u8]) -> std::io::Result<()> {
        let mut message = header(Kind::Request, body.len() as u32, 0).to_bytes().to_vec();
        message.extend_from_slice(body);
        self.0.write_all(&message)
    }

    /// Receives a message: its kind, and its body or payload.
    fn message(&mut self) -> (u8, Vec<u8>) {
        let mut head = [0; 32];
        self.0.read_exact(&mut head).unwrap();
        let header = Header::parse(&head).unwrap();
        let mut rest = vec![0; (header.body_bytes + header.payload_bytes) as usize];
        self.0.read_exact(&mut rest).unwrap();
        (head[0], rest)
    }

    /// True when the node has closed the link.
    fn is_cut(&mut self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match self.0.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }
}

/// The greeting of a node that wants these features.
fn hello(wants: u32) -> Vec<u8> {
    let mut hello = header(Kind::Hello, 48, 0).to_bytes().to_vec();
    hello.extend_from_slice(&0x3153_4e41_5254_4c57u64.to_le_bytes());
    hello.extend_from_slice(&wants.to_le_bytes());
    hello.resize(GREETING_BYTES, 7);
    hello
}

fn header(kind: Kind, body: u32, payload: u32) -> Header {
    let mut header = Header::new(kind, 0, 0);
    (header.body_bytes, header.payload_bytes) = (body, payload);
    header
}

fn ranges(part: &Part, count: u16) -> Vec<u8> {
    let mut out = count.to_le_bytes().to_vec();
    for _ in 0..count {
        out.extend_from_slice(&part.handle.to_le_bytes());
        out.extend_from_slice(&part.generation.to_le_bytes());
        out.extend_from_slice(&part.offset.to_le_bytes());
        out.extend_from_slice(&part.length.to_le_bytes());
    }
    out
}

fn fetch(operation: u64, strategy: u8, granted: u64, part: &Part) -> Vec<u8> {
    let mut body = vec![3];
    body.extend_from_slice(&operation.to_le_bytes());
    body.push(strategy);
    body.extend_from_slice(&granted.to_le_bytes());
    body.extend_from_slice(&ranges(part, 1));
    body
}

fn grant(operation: u64, until: u64) -> Vec<u8> {
    let mut body = vec![4];
    body.extend_from_slice(&operation.to_le_bytes());
    body.push(0);
    body.extend_from_slice(&until.to_le_bytes());
    body
}

fn update(operation: u64, strategy: u8, part: &Part) -> Vec<u8> {
    let mut body = vec![11];
    body.extend_from_slice(&operation.to_le_bytes());
    body.push(strategy);
    body.extend_from_slice(&0u64.to_le_bytes());
    body.extend_from_slice(&ranges(part, 1));
    body
}

/// An owner with something to read and something to write, and an honest peer that uses it.
struct Scene {
    owner: Node,
    honest: Node,
    data: Vec<u8>,
    readable: Global,
    writable: Global,
    _served: common::Served,
}

fn scene(pool_buffers: usize) -> Scene {
    let owner = node(Via::Tcp, Options { pool_buffers, ..options(Via::Tcp) });
    let honest = node(Via::Tcp, options(Via::Tcp));
    let served = serve(&owner);
    link(Via::Tcp, &honest, &owner);
    let data = bytes(1_000_000, 1);
    let readable = owner.globalize(import::host(data.clone()), Access::Read).unwrap();
    let writable = owner.globalize(import::host(vec![0; 400_000]), Access::ReadWrite).unwrap();
    Scene { owner, honest, data, readable, writable, _served: served }
}

impl Scene {
    fn others_do_not_notice(&self) {
        let context = self.honest.open(&self.readable, Intent::Read, Choice::Automatic).unwrap();
        assert!(context.to_vec().unwrap() == self.data);
        context.close().unwrap();
    }

    fn part(&self) -> Part {
        self.readable.parts().next().unwrap().clone()
    }
}

fn of(part: Part) -> Global {
    let mut global = Global::new();
    global.append(part).unwrap();
    global
}

#[test]
fn forged_names_are_refused_and_nothing_else_happens() {
    let s = scene(8);
    let good = s.part();
    let forged = [
        (Part { generation: good.generation ^ 1, ..good.clone() }, Errno::ESTALE),
        (Part { handle: 77, ..good.clone() }, Errno::ESTALE),
        (Part { handle: u32::MAX, ..good.clone() }, Errno::ESTALE),
        (Part { offset: 1, ..good.clone() }, Errno::ERANGE),
        (Part { length: u64::MAX >> 20, offset: 1 << 60, ..good.clone() }, Errno::ERANGE),
    ];
    for (part, expected) in forged {
        let mut small = of(part);
        let small = small.split_to(10_000_000.min(small.len()));
        for strategy in [Strategy::Pull, Strategy::Inline] {
            match s.honest.open(&small, Intent::Read, Choice::Forced(strategy)) {
                Err(Error::Refused(errno)) => assert_eq!(errno, expected, "{small:?}"),
                Err(Error::Strategy(_) | Error::TooLarge { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    // Its length in whole buffers is more than 2^64.
    let endless = of(Part { length: u64::MAX, ..good.clone() });
    let refused = s.honest.open(&endless, Intent::Read, Choice::Forced(Strategy::Pull));
    assert!(matches!(refused, Err(Error::TooLarge { .. })), "{refused:?}");
    // A descriptor that claims more access than was granted.
    let claimed = of(Part { access: Access::ReadWrite, length: 100, ..good });
    let refused = s.honest.open(&claimed, Intent::Write, Choice::Automatic);
    assert!(matches!(refused, Err(Error::Refused(Errno::EACCES))), "{refused:?}");
    assert_eq!(s.honest.peers().len(), 1, "the link is the same");
    assert_eq!(s.honest.pool_in_use().0, 0);
    s.others_do_not_notice();
    s.owner.reclaim(&s.readable, LIMIT).unwrap();
}

#[test]
fn peers_that_break_the_protocol_are_cut_off() {
    let s = scene(8);
    let part = s.part();
    let mut ungranted = header(Kind::Data, 0, 100);
    ungranted.flags = 2;
    ungranted.word_b = 1 << 31;
    let mut ungranted = ungranted.to_bytes().to_vec();
    ungranted.resize(132, 1);
    let mut lying = fetch(1, 3, 0, &part);
    lying.push(0);
    let mut empty = part.clone();
    empty.length = 0;
    let messages: Vec<(&str, Vec<u8>)> = vec![
        ("noise", bytes(200, 3)),
        ("data without a grant", ungranted),
        ("an unknown tag", framed(&[200, 1, 2])),
        ("an empty body", framed(&[])),
        ("bytes behind the message", framed(&lying)),
        ("an empty range", framed(&fetch(1, 3, 0, &empty))),
        ("an unknown strategy", framed(&fetch(1, 9, 0, &part))),
        ("the number of a push", framed(&fetch(1 << 63, 3, 0, &part))),
        (
            "one number twice",
            [framed(&fetch(1, 3, 0, &part)), framed(&fetch(1, 3, 0, &part))].concat(),
        ),
        (
            "a write-back of nothing pushed",
            framed(&update(1, 2, s.writable.parts().next().unwrap())),
        ),
        (
            "memory given over tcp",
            framed(&[
                7, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0,
                0,
            ]),
        ),
        ("another greeting", header(Kind::Hello, 0, 0).to_bytes().to_vec()),
    ];
    for (what, message) in messages {
        let mut raw = Raw::connect(&s.owner);
        let _ = raw.0.write_all(&message);
        assert!(raw.is_cut(), "{what}");
        s.others_do_not_notice();
    }
    let closed = s.owner.acknowledged(&s.readable, 0, LIMIT).unwrap();
    assert_eq!(closed.lost, 1, "the lease of the one that had asked rightly before is gone");
    s.owner.reclaim(&s.readable, LIMIT).unwrap();
}

fn framed(body: &[u8]) -> Vec<u8> {
    let mut message = header(Kind::Request, body.len() as u32, 0).to_bytes().to_vec();
    message.extend_from_slice(body);
    message
}

#[test]
fn a_peer_that_asks_and_does_not_read_is_bounded() {
    let s = scene(8);
    let mut raw = Raw::connect(&s.owner);
    raw.0.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    // Opens, closes and opens again without ever reading an answer, until the node closes the link.
    let mut cut = false;
    for operation in 0..2_000_000u64 {
        let mut body = vec![9];
        body.extend_from_slice(&operation.to_le_bytes());
        body.push(1);
        let part = Part { length: 16, ..s.part() };
        if raw.control(&fetch(operation, 1, 0, &part)).is_err() || raw.control(&body).is_err() {
            cut = true;
            break;
        }
    }
    assert!(cut, "the node went on answering to nobody");
    s.others_do_not_notice();
    // Grants are answered by messages as well, and they may be as small as a byte.
    let mut raw = Raw::connect(&s.owner);
    raw.0.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    raw.control(&fetch(1, 3, 0, &s.part())).unwrap();
    let cut = (0..1000u64).any(|thousand| {
        let grants = (1..=1000).map(|byte| framed(&grant(1, thousand * 1000 + byte)));
        raw.0.write_all(&grants.collect::<Vec<_>>().concat()).is_err()
    });
    assert!(cut, "the node queued a message for each byte");
    s.others_do_not_notice();
    // A single grant of a whole long file does not queue all of it.
    let file = std::fs::File::from(rustix::fs::memfd_create("long", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(1 << 32).unwrap();
    let long = import::file(file, 0, 1 << 32).unwrap();
    let long = s.owner.globalize(long, Access::Read).unwrap();
    let before = s.owner.counts().of(Way::Pull).bytes_out;
    let mut raw = Raw::connect(&s.owner);
    raw.control(&fetch(1, 3, u64::MAX, long.parts().next().unwrap())).unwrap();
    raw.0.read_exact(&mut [0; 32]).unwrap();
    let queued = s.owner.counts().of(Way::Pull).bytes_out - before;
    assert_eq!(queued, 1 << 20);
    drop(raw);
    // Leases are bounded too: further ones are refused with EAGAIN, which is not a protocol error.
    let mut raw = Raw::connect(&s.owner);
    for operation in 0..1000 {
        raw.control(&fetch(operation, 3, 0, &s.part())).unwrap();
    }
    s.others_do_not_notice();
    drop(raw);
    s.owner.reclaim(&s.readable, LIMIT).unwrap();
}

/// A thousand times a thousand pieces take 40 MB and the time of all peers.
#[test]
fn a_short_request_does_not_name_a_million_pieces() {
    let s = scene(8);
    let mut pieces = towline_mem::Aggregate::new();
    for byte in 0..1024 {
        pieces.concatenate(import::host(vec![byte as u8]));
    }
    let pieces = s.owner.globalize(pieces, Access::Read).unwrap();
    let part = pieces.parts().next().unwrap();
    let mut raw = Raw::connect(&s.owner);
    for (times, tag) in [(16, 5), (1024, 8)] {
        let mut body = fetch(times, 3, 1 << 20, part);
        body.truncate(body.len() - ranges(part, 1).len());
        body.extend_from_slice(&ranges(part, times as u16));
        raw.control(&body).unwrap();
        let answer = std::iter::from_fn(|| Some(raw.message())).find(|(kind, _)| *kind == 3);
        let (_, answer) = answer.unwrap();
        assert_eq!((answer[0], &answer[1..9]), (tag, &times.to_le_bytes()[..]));
        assert!(tag == 5 || answer[9..] == Errno::E2BIG.0.to_le_bytes(), "{answer:?}");
    }
    s.others_do_not_notice();
}

#[test]
fn messages_that_nobody_takes_are_bounded() {
    let s = scene(8);
    let mut raw = Raw::connect(&s.owner);
    let mut body = vec![1, 0];
    body.extend_from_slice(&60_000u32.to_le_bytes());
    body.resize(60_006, 0);
    for _ in 0..3 {
        let _ = raw.control(&body);
    }
    assert!(raw.is_cut());
    s.others_do_not_notice();
    // An honest peer waits instead.
    let (to, _) = s.honest.peers()[0];
    let sender = s.honest.clone();
    let sending = std::thread::spawn(move || {
        for number in 0..20u8 {
            sender.send(to, &vec![number; 60_000]).unwrap();
        }
    });
    let mut seen = Vec::new();
    while seen.len() < 20 {
        let message = s.owner.receive(LIMIT).unwrap();
        if message.bytes.first() == Some(&(seen.len() as u8)) && message.bytes.len() == 60_000 {
            seen.push(message.bytes[0]);
        }
    }
    sending.join().unwrap();
    assert_eq!(seen, (0..20).collect::<Vec<u8>>());
}

#[test]
fn messages_of_lost_links_are_bounded() {
    let links = 4;
    let receiver = node(Via::Tcp, Options { peers_max: links, ..options(Via::Tcp) });
    let served = serve(&receiver);
    for round in 0..3 * links as u8 {
        let mut raw = Raw::connect(&receiver);
        for number in 0..2 {
            let mut body = vec![1, 0];
            body.extend_from_slice(&65_536u32.to_le_bytes());
            body.resize(65_542, round * 2 + number);
            raw.control(&body).unwrap();
        }
        raw.0.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(raw.is_cut());
    }
    drop(served);
    let soon = Some(Duration::from_millis(100));
    let left: Vec<u8> = std::iter::from_fn(|| receiver.receive(soon).ok())
        .map(|message| message.bytes[0])
        .collect();
    assert_eq!(left, (16..24).collect::<Vec<u8>>(), "the latest, as many as fit into all windows");
}

#[test]
fn slow_writers_hold_no_more_than_the_pool() {
    let s = scene(4);
    let part = Part { length: 300_000, ..s.writable.parts().next().unwrap().clone() };
    // Forty write-backs announced, and not a byte of them sent.
    let mut slow: Vec<Raw> = (0..10).map(|_| Raw::connect(&s.owner)).collect();
    for (operation, raw) in slow.iter_mut().enumerate() {
        for number in 0..4 {
            raw.control(&update(operation as u64 * 4 + number, 3, &part)).unwrap();
        }
    }
    s.others_do_not_notice(); // reading needs no memory of the owner
    assert!(s.owner.pool_in_use().1 <= 4);
    // When they are gone, waiting operations continue.
    drop(slow);
    let mut context = s.honest.open(&s.writable, Intent::Write, Choice::Automatic).unwrap();
    context.write_at(0, &vec![9; 400_000]).unwrap();
    context.close().unwrap();
    let found = s.owner.reclaim(&s.writable, LIMIT).unwrap().to_vec().unwrap();
    assert!(found == vec![9; 400_000]);
    assert!(s.owner.pool_in_use().1 <= 4);
}

#[test]
fn a_lost_peer_gives_its_leases_back() {
    for via in common::ALL {
        let (owner, receiver) = (node(via, options(via)), node(via, options(via)));
        let served = serve(&owner);
        let peer = link(via, &receiver, &owner);
        let global = owner.globalize(import::host(bytes(50_000, 1)), Access::Read).unwrap();
        let choice = Choice::Forced(Strategy::Pull);
        let context = receiver.open(&global, Intent::Read, choice).unwrap();
        let soon = Some(Duration::from_millis(50));
        let busy = owner.reclaim(&global, soon);
        assert!(matches!(busy, Err(Error::TimedOut)), "{via:?}: a context is open: {busy:?}");
        let refused = receiver.open(&global, Intent::Read, choice);
        assert!(matches!(refused, Err(Error::Refused(Errno::ESTALE))), "{refused:?}");
        receiver.disconnect(peer);
        owner.reclaim(&global, LIMIT).unwrap();
        assert!(!context.to_vec().unwrap().is_empty(), "what was brought stays");
        drop(context);
        assert_eq!(receiver.pool_in_use().0, 0);
        drop(served);
        // With no owner left, an operation in progress ends with an error instead of waiting for ever.
        let (owner, receiver) = (node(via, options(via)), node(via, options(via)));
        let served = serve(&owner);
        link(via, &receiver, &owner);
        let global = owner.globalize(import::host(bytes(50_000, 1)), Access::Read).unwrap();
        drop(served);
        let operation = receiver.start_open(&global, Intent::Read, choice, None).unwrap();
        drop(owner);
        let lost = receiver.wait(operation, LIMIT);
        assert!(matches!(lost, Err(Error::PeerLost)), "{via:?}: {lost:?}");
        assert!(matches!(receiver.wait(operation, LIMIT), Err(Error::NoOperation)));
        assert_eq!(receiver.pool_in_use().0, 0);
    }
}

/// A peer that shares an eventfd can make reading and writing it wait for ever.
#[test]
fn a_peer_over_shared_memory_gets_nothing_that_the_node_waits_on() {
    let owner = node(Via::Rings, options(Via::Rings));
    let _served = serve(&owner);
    let Address::Unix(path) = owner.addresses()[0].clone() else { panic!() };
    let mut socket = UnixStream::connect(path).unwrap();
    socket.set_read_timeout(LIMIT).unwrap();
    socket.write_all(&hello(3)).unwrap();
    let mut welcome = [0; GREETING_BYTES];
    let (count, given) = receive_descriptors(&socket, &mut welcome, Wait::Any).unwrap();
    assert_eq!(count, GREETING_BYTES);
    let kinds: Vec<_> = given
        .iter()
        .map(|fd| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap())
        .collect();
    assert_eq!(kinds.len(), 2, "a socket and the memory: {kinds:?}");
    assert!(kinds[0].to_string_lossy().starts_with("socket:"), "{kinds:?}");
    assert!(kinds[1].to_string_lossy().starts_with("/memfd:"), "{kinds:?}");
}

#[test]
fn a_node_without_rings_takes_none() {
    let path = common::socket_path();
    let listener = UnixListener::bind(&path).unwrap();
    for (features, rings, takes) in [(2, false, true), (3, false, false), (3, true, true)] {
        let node = Node::new(Options { rings, ..Options::default() }).unwrap();
        let linked = std::thread::scope(|scope| {
            let answering = scope.spawn(|| {
                let (mut socket, _) = listener.accept().unwrap();
                socket.read_exact(&mut [0; GREETING_BYTES]).unwrap();
                let mut welcome = hello(features);
                let kind = header(Kind::Welcome, 48, 0).to_bytes();
                welcome[..kind.len()].copy_from_slice(&kind);
                let (channel, other) = UnixStream::pair().unwrap();
                let memory = SharedMemory::create("test", SHM_BYTES).unwrap();
                let given = [channel.as_fd(), memory.fd()];
                let given = &given[..if features == 3 { 2 } else { 1 }];
                send_descriptors(&socket, &welcome, given, Wait::Any).unwrap();
                (socket, other)
            });
            let linked = node.connect(&Address::Unix(path.clone()));
            drop(answering.join().unwrap());
            linked
        });
        match takes {
            true => assert!(linked.is_ok(), "{features} {rings}: {linked:?}"),
            false => assert!(matches!(linked, Err(Error::PeerLost)), "{linked:?}"),
        }
    }
    std::fs::remove_file(path).unwrap();
}

/// With memory granted to push into, little is received at once, so that many messages take several turns.
#[test]
fn what_a_peer_sent_before_it_left_arrives() {
    let via = Via::Rings;
    let (receiver, sender) = (node(via, options(via)), node(via, options(via)));
    let served = serve(&receiver);
    let to = link(via, &sender, &receiver);
    drop(served);
    receiver.grant_push(receiver.peers()[0].0, 1).unwrap();
    for number in 0..300u32 {
        sender.send(to, &[&number.to_le_bytes()[..], &[7; 200]].concat()).unwrap();
    }
    sender.disconnect(to);
    for number in 0..300u32 {
        let message = receiver.receive(Some(Duration::from_secs(5))).unwrap();
        assert_eq!(message.bytes[..4], number.to_le_bytes());
    }
    receiver.serve(Duration::from_millis(10)).unwrap();
    assert!(receiver.peers().is_empty(), "the link ends when its ring is empty");
}

#[test]
fn an_operation_that_was_given_up_leaves_nothing() {
    let (owner, receiver) = (node(Via::Tcp, options(Via::Tcp)), node(Via::Tcp, options(Via::Tcp)));
    let served = serve(&owner);
    link(Via::Tcp, &receiver, &owner);
    drop(served);
    let global = owner.globalize(import::host(bytes(600_000, 1)), Access::Read).unwrap();
    let choice = Choice::Forced(Strategy::Pull);
    let operation = receiver.start_open(&global, Intent::Read, choice, None).unwrap();
    let soon = Some(Duration::from_millis(20));
    let late = receiver.wait(operation, soon);
    assert!(matches!(late, Err(Error::TimedOut)), "the owner does nothing: {late:?}");
    assert_eq!(receiver.pool_in_use().0, 3);
    receiver.cancel(operation).unwrap();
    assert_eq!(receiver.pool_in_use().0, 0);
    assert!(matches!(receiver.cancel(operation), Err(Error::NoOperation)));
    // The owner answers an operation that was given up; the link goes on, and the lease has ended.
    let _served = serve(&owner);
    let context = receiver.open(&global, Intent::Read, choice).unwrap();
    assert!(context.to_vec().unwrap() == bytes(600_000, 1));
    context.close().unwrap();
    // A finished operation can be given up as well.
    let operation = receiver.start_open(&global, Intent::Read, choice, None).unwrap();
    receiver.serve(Duration::from_millis(100)).unwrap();
    receiver.cancel(operation).unwrap();
    assert_eq!(receiver.pool_in_use().0, 0);
    owner.reclaim(&global, LIMIT).unwrap();
}

#[test]
fn a_write_back_that_was_given_up_leaves_nothing() {
    let (owner, receiver) = (node(Via::Tcp, options(Via::Tcp)), node(Via::Tcp, options(Via::Tcp)));
    let served = serve(&owner);
    link(Via::Tcp, &receiver, &owner);
    let global = owner.globalize(import::host(vec![1; 600_000]), Access::ReadWrite).unwrap();
    let choice = Choice::Forced(Strategy::Pull);
    let mut context = receiver.open(&global, Intent::Write, choice).unwrap();
    context.write_at(0, &vec![2; 600_000]).unwrap();
    drop(served);
    let operation = context.start_close(None);
    let late = receiver.wait(operation, Some(Duration::from_millis(20)));
    assert!(matches!(late, Err(Error::TimedOut)), "the owner does nothing: {late:?}");
    receiver.cancel(operation).unwrap();
    // The answer to a later request shows that the owner has seen all that came before.
    let _served = serve(&owner);
    receiver.open(&global, Intent::Read, choice).unwrap().close().unwrap();
    assert_eq!(owner.pool_in_use().0, 0, "no buffer waits for the rest, and no link is cut for it");
    owner.reclaim(&global, LIMIT).unwrap();
}

#[test]
fn threads_wait_without_taking_each_others_results() {
    let s = scene(8);
    let threads: Vec<_> = (0..4)
        .map(|index| {
            let (node, global) = (s.honest.clone(), s.readable.clone());
            let expected = s.data.clone();
            std::thread::spawn(move || {
                let group = node.group();
                for round in 0..20 {
                    let mut rest = global.clone();
                    drop(rest.split_to(index * 1000 + round));
                    let part = rest.split_to(20_000);
                    let from = (index * 1000 + round) as usize;
                    let group = (round % 2 == 0).then_some(group);
                    let choice = Choice::Automatic;
                    let started = node.start_open(&part, Intent::Read, choice, group).unwrap();
                    let result = match group {
                        Some(group) => {
                            let (operation, result) = node.wait_group(group, LIMIT).unwrap();
                            assert_eq!(operation, started);
                            result
                        }
                        None => node.wait(started, LIMIT),
                    };
                    let Ok(towline_transfer::Finished::Opened(context)) = result else { panic!() };
                    assert!(context.to_vec().unwrap() == expected[from..from + 20_000]);
                    context.close().unwrap();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    // Any: of two operations in progress, each is returned once.
    let choice = Choice::Automatic;
    let mut started: Vec<_> = (0..2)
        .map(|_| s.honest.start_open(&s.readable, Intent::Read, choice, None).unwrap())
        .collect();
    while !started.is_empty() {
        let (operation, result) = s.honest.wait_any(LIMIT).unwrap();
        result.unwrap();
        let at = started.iter().position(|other| *other == operation).unwrap();
        started.remove(at);
    }
    assert!(matches!(s.honest.wait_any(LIMIT), Err(Error::NoOperation)));
}
