//! Servers that break the protocol: their clients end the session with an error, and lose nothing else.

use super::common::message;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use towline_client::{Client, Error, File, Happenings, Options, Transport};
use towline_wire::codec::Field;
use towline_wire::event::{self, Event};
use towline_wire::header::reply_flag;
use towline_wire::hello::{MAGIC, VERSION, resumed};
use towline_wire::limits::{
    EVENTS_BYTES_MAX, FRAGMENT_BYTES_MAX, HEADER_BYTES, TRANSFER_BYTES_MAX,
};
use towline_wire::request::open_flag;
use towline_wire::{Attr, Header, Kind, Reply, Welcome};

/// Long enough to need grants.
const LONG: usize = 4 * FRAGMENT_BYTES_MAX;

/// One connection of a client to a false server.
struct Peer(TcpStream);

impl Peer {
    fn receive(&mut self) -> Option<Header> {
        let mut head = [0; HEADER_BYTES];
        self.0.read_exact(&mut head).ok()?;
        let header = Header::parse(&head).unwrap();
        let rest = header.body_bytes as usize + header.payload_bytes as usize;
        self.0.read_exact(&mut vec![0; rest]).ok()?;
        Some(header)
    }

    /// Returns the next request.
    fn request(&mut self) -> Header {
        loop {
            let header = self.receive().expect("the client is gone");
            if header.kind == Kind::Request {
                return header;
            }
        }
    }

    /// Returns false if the client takes nothing more.
    fn send(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).is_ok()
    }

    fn answer(&mut self, request: &Header, replies: &[Reply<'_>]) {
        let mut body = Vec::new();
        for reply in replies {
            reply.encode(&mut body);
        }
        let header = Header::new(Kind::Reply, request.slot, request.sequence);
        assert!(self.send(&message(header, &body, &[])));
    }

    fn welcome(&mut self, resumed: u16) {
        self.receive();
        let welcome = Welcome {
            magic: MAGIC,
            version: VERSION,
            session: 1,
            slots: 4,
            resumed,
            ..Default::default()
        };
        let mut body = Vec::new();
        welcome.encode(&mut body);
        self.send(&message(Header::new(Kind::Welcome, 0, 0), &body, &[]));
    }
}

/// Returns a client with an open file of a false server. Once the file is open, the server does
/// this and nothing more.
fn served_by(lies: impl FnOnce(&mut Peer) + Send + 'static) -> (Client, File, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = std::thread::spawn(move || {
        let mut peer = Peer(listener.accept().unwrap().0);
        peer.welcome(resumed::NEW);
        let request = peer.request();
        peer.answer(&request, &[Reply::Opened { handle: 1, attr: Attr::default() }]);
        lies(&mut peer);
    });
    let mut options = Options::default();
    options.reconnect = Duration::from_millis(10);
    let client = Client::connect(&Transport::Tcp("127.0.0.1".into(), port), options).unwrap();
    let file = client.attach(b"any").unwrap();
    (client, file, serving)
}

/// A server that welcomes everybody and closes each connection after this many answers. It is gone
/// after 200 connections. Returns where it listens and the number of connections so far.
fn curt(answers: usize) -> (Transport, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().take(200) {
            let mut peer = Peer(stream.unwrap());
            let is_first = count.fetch_add(1, Ordering::Relaxed) == 0;
            peer.welcome(if is_first { resumed::NEW } else { resumed::JOINED });
            for _ in 0..answers {
                let Some(request) = peer.receive() else { break };
                peer.answer(&request, &[Reply::Opened { handle: 1, attr: Attr::default() }]);
            }
        }
    });
    (Transport::Tcp("127.0.0.1".into(), port), connections)
}

#[test]
fn a_server_that_drops_every_connection_is_not_asked_for_ever() {
    let (server, connections) = curt(0);
    let mut options = Options::default();
    options.reconnect = Duration::from_millis(300);
    let client = Client::connect(&server, options).unwrap();
    let error = client.attach(b"any").err().unwrap().to_string();
    assert!(error.contains("has dropped each new one"), "{error}");
    let connections = connections.load(Ordering::Relaxed);
    assert!((3..50).contains(&connections), "{connections} connections");
}

/// Only losses without an answer in between count together.
#[test]
fn a_server_that_answers_before_each_loss_is_asked_again() {
    let (server, connections) = curt(1);
    let mut options = Options::default();
    options.reconnect = Duration::ZERO;
    let client = Client::connect(&server, options).unwrap();
    let roots: Vec<File> = (0..6).map(|_| client.attach(b"any").unwrap()).collect();
    assert_eq!(connections.load(Ordering::Relaxed), 6);
    roots.into_iter().for_each(std::mem::forget); // nobody would answer their closes
}

/// Checks that the answer ended the client's session, for this reason.
fn assert_illegal(result: Result<usize, Error>, reason: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains("sent an invalid message") && error.contains(reason), "{error}");
}

fn header_of(kind: Kind, request: &Header, from: usize, length: usize) -> Header {
    let mut header = Header::new(kind, request.slot, request.sequence);
    header.offset = from as u64;
    if kind == Kind::Grant {
        header.word_a = length as u32;
    }
    header
}

/// Grants these parts of a long write; returns the client's result.
fn write_granted(parts: &'static [(usize, usize)]) -> Result<usize, Error> {
    let (client, file, serving) = served_by(move |peer| {
        let request = peer.request();
        for (from, length) in parts {
            peer.send(&header_of(Kind::Grant, &request, *from, *length).to_bytes());
        }
        while peer.receive().is_some() {}
    });
    let written = file.write_at(&vec![1; LONG], 0);
    drop((file, client));
    serving.join().unwrap();
    written
}

#[test]
fn grants_are_for_each_byte_once() {
    const PART: usize = FRAGMENT_BYTES_MAX;
    assert_illegal(write_granted(&[(0, 0)]), "more grants");
    assert_illegal(write_granted(&[(0, PART), (0, PART)]), "more grants");
    assert_illegal(write_granted(&[(0, PART), (PART - 1, 1)]), "more grants");
    assert_illegal(write_granted(&[(PART, PART), (0, PART)]), "more grants");
    assert_illegal(write_granted(&[(LONG - 1, 2)]), "beyond");
}

/// Otherwise the server would keep the session's locks for as long as the client lives.
#[test]
fn a_session_that_is_given_up_ends_its_connection() {
    let (client, file, serving) = served_by(|peer| {
        let request = peer.request();
        peer.send(&header_of(Kind::Grant, &request, LONG, 1).to_bytes());
        peer.0.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(peer.0.read(&mut [0]).unwrap(), 0);
    });
    assert_illegal(file.write_at(&vec![1; LONG], 0), "beyond");
    serving.join().unwrap();
    drop((file, client));
}

#[test]
fn grants_of_what_is_over_are_ignored() {
    let (_client, file, serving) = served_by(|peer| {
        let request = peer.request();
        peer.answer(&request, &[Reply::Wrote { length: LONG as u32, offset: 0 }]);
        peer.send(&header_of(Kind::Grant, &request, 0, LONG).to_bytes());
        let next = peer.receive().unwrap();
        assert_eq!(next.kind, Kind::Request, "data of a write that was answered");
        peer.answer(&next, &[Reply::Done {}]);
    });
    assert_eq!(file.write_at(&vec![1; LONG], 0).unwrap(), LONG);
    file.sync(0).unwrap();
    serving.join().unwrap();
}

/// Answers a read of 8192 bytes with these messages: length of the data, and number of checksums.
fn read_summed(parts: &'static [(usize, usize)]) -> Result<usize, Error> {
    let (client, file, serving) = served_by(move |peer| {
        let request = peer.request();
        for (length, sums) in parts {
            let header = header_of(Kind::Data, &request, 0, 0);
            peer.send(&message(header, &vec![0; sums * 4], &vec![2; *length]));
        }
        while peer.receive().is_some() {}
    });
    let read = file.read_at(&mut [0; 8192], 0);
    drop((file, client));
    serving.join().unwrap();
    read
}

#[test]
fn checksums_are_of_data_that_was_asked_for() {
    assert_illegal(read_summed(&[(0, 1)]), "checksums");
    assert_illegal(read_summed(&[(4096, 2)]), "checksums");
    assert_illegal(read_summed(&[(4096, 1), (4096, 1), (4096, 1)]), "checksums");
}

/// A call that writes; returns how much.
type Writing = fn(&File) -> Result<u64, Error>;

#[test]
fn no_more_is_written_than_was_to_be() {
    let writes: [Writing; 4] = [
        |file| file.write_at(&vec![1; LONG], 0).map(|count| count as u64),
        |file| file.append(&vec![1; LONG]).map(|(count, _)| count as u64),
        |file| file.start_write_at(vec![1; LONG], 0)?.wait().map(|(count, _)| count as u64),
        |file| file.copy_range(0, file, 0, LONG as u64),
    ];
    for length in [LONG as u32 + 1, u32::MAX] {
        for (number, write) in writes.into_iter().enumerate() {
            let (_client, file, serving) = served_by(move |peer| {
                let request = peer.request();
                let copied = Reply::Number { value: length.into() };
                let wrote = Reply::Wrote { length, offset: 0 };
                peer.answer(&request, &[if number == 3 { copied } else { wrote }]);
                while peer.receive().is_some() {}
            });
            assert!(write(&file).is_err(), "write {number} of {length} bytes");
            drop((file, _client));
            serving.join().unwrap();
        }
    }
}

/// Callers divide by the sizes of blocks, and add blocks to the size of the disk.
#[test]
fn disks_that_cannot_be_are_not_opened() {
    let shapes = [(0, 4096, 1 << 20), (3, 4096, 1 << 20), (512, 0, 1 << 20), (512, 4096, u64::MAX)];
    for (block_minimum, block_preferred, size) in shapes {
        let (client, file, serving) = served_by(move |peer| {
            let (flags, identity, epoch) = (0, 1, 1);
            let disk = Reply::Disk { size, block_minimum, block_preferred, flags, identity, epoch };
            let request = peer.request();
            peer.answer(&request, &[disk]);
            while peer.receive().is_some() {}
        });
        let opened = client.disk(b"disk").map(|disk| disk.info());
        assert!(matches!(opened, Err(Error::Protocol(_))), "{opened:?}");
        drop((client, file));
        serving.join().unwrap();
    }
}

/// Otherwise a program would write the rest again, behind what may have been appended.
#[test]
fn a_long_append_that_may_have_taken_effect_is_not_called_short() {
    let (_client, file, serving) = served_by(|peer| {
        let opening = peer.request();
        peer.answer(&opening, &[Reply::Opened { handle: 2, attr: Attr::default() }]);
        let first = peer.request();
        let length = TRANSFER_BYTES_MAX as u32;
        peer.answer(&first, &[Reply::Wrote { length, offset: 0 }]);
        let mut unknown = header_of(Kind::Reply, &peer.request(), 0, 0);
        unknown.flags = reply_flag::UNKNOWN;
        peer.send(&unknown.to_bytes());
        while peer.receive().is_some() {}
    });
    let log = file.open(b"log", open_flag::APPEND | 1, 0).unwrap();
    let written = log.write_at(&vec![1; TRANSFER_BYTES_MAX + 1], 0);
    assert_eq!(written, Err(Error::Unknown));
    drop((log, file, _client));
    serving.join().unwrap();
}

/// The file was opened, but the server could not read its first byte.
#[test]
fn a_file_that_was_opened_and_could_not_be_read_is_closed() {
    let (client, file, serving) = served_by(|peer| {
        let request = peer.request();
        let mut failed = header_of(Kind::Data, &request, 0, 0);
        failed.word_a = 5;
        peer.send(&failed.to_bytes());
        let opened = Reply::Opened { handle: 2, attr: Attr::default() };
        peer.answer(&request, &[opened, Reply::Read { length: 4096, errno: 0 }]);
        let next = peer.request();
        peer.answer(&next, &[Reply::Done {}]);
    });
    let opened =
        file.open_reading(b"x", 0, 0, &mut [0; 4096]).map(|(file, read)| (file.handle(), read));
    drop(client);
    std::mem::forget(file);
    assert_eq!(opened.unwrap(), (2, None));
    serving.join().unwrap();
}

/// Answers a request for events in this way, and the next one correctly.
fn told(next: u64, length: usize, payload: Vec<u8>) -> Result<Happenings, Error> {
    let (client, file, serving) = served_by(move |peer| {
        let request = peer.request();
        let mut body = Vec::new();
        Reply::Events { next, lost: 0, length: length as u32 }.encode(&mut body);
        let header = Header::new(Kind::Reply, request.slot, request.sequence);
        assert!(peer.send(&message(header, &body, &payload)));
        let request = peer.request();
        peer.answer(&request, &[Reply::Events { next: 7, lost: 1, length: 0 }]);
        while peer.receive().is_some() {}
    });
    let told = client.start_events().unwrap().wait();
    let after = client.events().unwrap();
    assert_eq!(after, Happenings { events: Vec::new(), lost: true });
    drop((file, client));
    serving.join().unwrap();
    told
}

#[test]
fn events_are_looked_at_before_they_are_passed_on() {
    let event = Event { handle: 1, mask: event::CREATE, cookie: 0, name: b"name" };
    let encoded = |event: Event<'_>| {
        let mut bytes = Vec::new();
        event.encode(&mut bytes);
        bytes
    };
    let good = encoded(event);
    assert_eq!(told(5, good.len(), good.clone()).unwrap().events, [event.into()]);
    let is_refused = |next, length, payload| assert!(told(next, length, payload).is_err());
    is_refused(0, good.len(), good.clone());
    is_refused(5, good.len() - 1, good.clone());
    is_refused(5, good.len() + 1, good.clone());
    is_refused(5, u32::MAX as usize, good.clone());
    is_refused(5, good.len() - 1, good[1..].to_vec());
    for wrong in [Event { mask: 0, ..event }, Event { name: b"../up", ..event }] {
        let bytes = encoded(wrong);
        is_refused(5, bytes.len(), bytes);
    }
    let many = good.repeat(EVENTS_BYTES_MAX / good.len() + 1);
    is_refused(5, many.len(), many);
}
