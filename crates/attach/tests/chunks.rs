//! What a caller makes of a server that answers in chunks, of legal ones and of others.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use support::{HAS_FLAGS, handshake, words};
use tempfile::TempDir;
use towline_attach::nbd::{CallError, Caller, Source};

const SIZE: u64 = 1 << 20;
/// What a read of so many bytes at an offset is answered with, which has this cookie.
type Answer<'a> = dyn Fn(u64, u32, &[u8]) -> Vec<u8> + 'a;

/// What is sent as the body of a chunk.
fn chunk(flags: u16, kind: u16, cookie: &[u8], body: &[u8]) -> Vec<u8> {
    let mut out = 0x668e_33ef_u32.to_be_bytes().to_vec();
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(cookie);
    out.extend((body.len() as u32).to_be_bytes());
    out.extend(body);
    out
}

fn data(flags: u16, cookie: &[u8], offset: u64, bytes: &[u8]) -> Vec<u8> {
    chunk(flags, 1, cookie, &[&offset.to_be_bytes()[..], bytes].concat())
}

fn hole(flags: u16, cookie: &[u8], offset: u64, length: u32) -> Vec<u8> {
    chunk(flags, 2, cookie, &[&offset.to_be_bytes()[..], &length.to_be_bytes()].concat())
}

/// Serves connections until told to stop, and yields how many there were; `read` says what a read is answered with.
fn server(
    listener: UnixListener,
    read: impl Fn(u64, u32, &[u8]) -> Vec<u8> + Send + 'static,
    stop: Arc<AtomicBool>,
) -> JoinHandle<usize> {
    std::thread::spawn(move || {
        let mut connections = 0;
        loop {
            let (mut stream, _) = listener.accept().unwrap();
            if stop.load(Ordering::Acquire) {
                return connections;
            }
            connections += 1;
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            // The client hangs up when it has enough of it.
            let _ = serve(&mut stream, &read);
        }
    })
}

fn serve(stream: &mut UnixStream, read: &Answer<'_>) -> std::io::Result<()> {
    handshake(stream, SIZE, HAS_FLAGS)?;
    loop {
        let mut request = [0; 28];
        stream.read_exact(&mut request)?;
        let cookie = &request[8..16];
        let offset = u64::from_be_bytes(request[16..24].try_into().unwrap());
        let length = u32::from_be_bytes(request[24..].try_into().unwrap());
        stream.write_all(&match request[7] {
            0 => read(offset, length, cookie),
            7 => chunk(1, 5, cookie, &words(&[9, 4096, 3, length, 0])),
            2 => return Ok(()),
            other => panic!("command {other}"),
        })?;
    }
}

struct World {
    directory: TempDir,
    served: JoinHandle<usize>,
    stop: Arc<AtomicBool>,
}

impl World {
    fn new(read: impl Fn(u64, u32, &[u8]) -> Vec<u8> + Send + 'static) -> (Self, Caller) {
        let directory = tempfile::tempdir().unwrap();
        let (path, stop) = (directory.path().join("socket"), Arc::new(AtomicBool::new(false)));
        let served = server(UnixListener::bind(&path).unwrap(), read, stop.clone());
        let source = Source::parse(&format!("nbd+unix:///?socket={}", path.display())).unwrap();
        let caller = Caller::connect(&source, Some(Duration::from_secs(10))).unwrap();
        (Self { directory, served, stop }, caller)
    }

    /// How many connections there were.
    fn end(self) -> usize {
        self.stop.store(true, Ordering::Release);
        UnixStream::connect(self.directory.path().join("socket")).unwrap();
        self.served.join().unwrap()
    }
}

#[test]
fn chunks_come_in_any_order_and_errors_in_the_middle() {
    let (world, caller) = World::new(|offset, length, cookie| {
        let half = length / 2;
        let ones = vec![1; half as usize];
        let behind = offset + u64::from(half);
        match offset {
            // The second half first, and a chunk that says nothing but that this was all.
            0 => {
                [data(0, cookie, behind, &ones), hole(0, cookie, 0, half), chunk(1, 0, cookie, &[])]
                    .concat()
            }
            4096 => [hole(0, cookie, behind, half), data(1, cookie, offset, &ones)].concat(),
            // An error for a part, though the rest came; and one with a text and an offset.
            8192 => [
                data(0, cookie, offset, &ones),
                chunk(1, 1 << 15 | 1, cookie, &[0, 0, 0, 28, 0, 0]),
            ]
            .concat(),
            12288 => {
                let told = [&[0, 0, 0, 5, 0, 3][..], b"why", &offset.to_be_bytes()].concat();
                [chunk(0, 1 << 15 | 2, cookie, &told), hole(1, cookie, offset, length)].concat()
            }
            // A half is left out.
            16384 => data(1, cookie, offset, &ones),
            _ => hole(1, cookie, offset, length),
        }
    });
    let extents: Vec<_> = caller.extents().unwrap().iter().map(|e| (e.length, e.hole)).collect();
    assert_eq!(extents, [(4096, true), (SIZE - 4096, false)]);
    let page = || vec![7; 4096];
    let bytes = caller.read(page(), 0).unwrap();
    assert!(bytes[..2048].iter().all(|b| *b == 0) && bytes[2048..].iter().all(|b| *b == 1));
    let bytes = caller.read(page(), 4096).unwrap();
    assert!(bytes[..2048].iter().all(|b| *b == 1) && bytes[2048..].iter().all(|b| *b == 0));
    assert_eq!(caller.read(page(), 8192), Err(CallError::Server(28)));
    assert_eq!(caller.read(page(), 12288), Err(CallError::Server(5)));
    assert_eq!(
        caller.read(page(), 16384),
        Err(CallError::Server(5)),
        "what is left out is not there"
    );
    // All of that on one connection, which goes on.
    let many = caller.read(vec![7; SIZE as usize / 2], SIZE / 2).unwrap();
    assert!(many.iter().all(|byte| *byte == 0));
    drop(caller);
    assert_eq!(world.end(), 1);
}

/// Whoever breaks the rules is hung up on and asked again, where it may do better.
#[test]
fn chunks_that_cannot_be_end_the_connection() {
    type Wrong = fn(u64, u32, &[u8]) -> Vec<u8>;
    let wrong: [Wrong; 11] = [
        |offset, length, cookie| hole(1, cookie, offset + 1, length),
        |offset, _, cookie| hole(1, cookie, offset.wrapping_sub(1), 1),
        |_, _, cookie| hole(1, cookie, u64::MAX, u32::MAX),
        |offset, length, cookie| data(1, cookie, offset, &vec![0; length as usize + 1]),
        |offset, length, cookie| {
            [hole(0, cookie, offset, length), hole(1, cookie, offset, length)].concat()
        },
        // As many bytes as were asked for, but not all of them.
        |offset, length, cookie| {
            [hole(0, cookie, offset, length / 2), hole(1, cookie, offset, length / 2)].concat()
        },
        // In parts that are not next to each other, more of them than any server has a reason for.
        |offset, length, cookie| {
            let bytes = (0..u64::from(length)).step_by(2);
            let holes = bytes.map(|at| hole(0, cookie, offset + at, 1));
            holes.collect::<Vec<_>>().concat()
        },
        |offset, _, cookie| data(1, cookie, offset, &[]),
        |_, _, cookie| chunk(1, 1 << 15 | 1, cookie, &vec![0; 9000]),
        |_, _, _| hole(1, &[9; 8], 0, 1),
        |_, _, cookie| chunk(1, 5, cookie, &words(&[9, 1, 1])),
    ];
    for (number, answer) in wrong.into_iter().enumerate() {
        let first = AtomicBool::new(true);
        let (world, caller) =
            World::new(move |offset, length, cookie| match first.swap(false, Ordering::Relaxed) {
                true => answer(offset, length, cookie),
                false => data(1, cookie, offset, &vec![5; length as usize]),
            });
        let read = caller.read(vec![7; 4096], 4096);
        assert_eq!(read, Ok(vec![5; 4096]), "answer {number}");
        drop(caller);
        assert_eq!(world.end(), 2, "answer {number}: asked again on a new connection");
    }
}
