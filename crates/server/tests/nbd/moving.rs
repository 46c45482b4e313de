//! Connections that move to the core on the processor of their client.

use super::client::{Client, FLUSH, Form, WRITE};
use super::processors::processors;
use super::{World, wait_longer};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use towline_net::address::Address;
use towline_server::{CacheMode, DiskKind, EngineWish};

const CLIENTS: u64 = 16;
const PIECE: u64 = 32 * 1024;
/// Pieces of each client.
const PIECES: u64 = 8;
/// How often some connection moves.
const MOVES: u64 = 20;
/// Rounds of a client before it goes to the other processor: several turns.
const ROUNDS: u64 = 5;
/// Writes of a client under way at a time.
const WINDOW: u64 = 1;

/// Writes and reads all the time, pieces that nobody else writes, each time with other bytes, on one processor and then
/// on the other one.
fn run(at: SocketAddr, number: u64, processors: &[CpuSet; 2], over: &AtomicBool) {
    let socket = TcpStream::connect(at).unwrap();
    socket.set_nodelay(true).unwrap();
    let form = [Form::Simple, Form::Structured, Form::Extended][number as usize % 3];
    let mut client = Client::over(OwnedFd::from(socket).into(), form, "");
    let data = |round: u64, piece| vec![(number * 31 + round * 7 + piece) as u8; PIECE as usize];
    let mut round = 0;
    while !over.load(Ordering::Relaxed) {
        round += 1;
        // Connections are distributed to the cores in turn, so on each processor are some of both.
        sched_setaffinity(None, &processors[(number / 2 + round / ROUNDS) as usize % 2]).unwrap();
        let offset = |piece| (number * PIECES + piece) * PIECE;
        // Several at a time, so that a request arrives while the answer to another one is due.
        for piece in 0..PIECES + WINDOW {
            if piece < PIECES {
                let data = data(round, piece);
                let bytes = client.request_bytes(WRITE, 0, piece, offset(piece), PIECE, &data);
                client.send(&bytes);
                client.request(FLUSH, 0, piece, 0, 0);
            }
            if piece >= WINDOW {
                assert_eq!((client.outcome().unwrap(), client.outcome().unwrap()), (0, 0));
            }
        }
        for piece in 0..PIECES {
            assert!(client.read(offset(piece), PIECE).unwrap() == data(round, piece));
        }
    }
}

#[test]
fn who_moves_reads_what_it_wrote() {
    let Some(processors) = processors() else {
        let what = "SKIPPED NBD connections that move between cores: there is one processor";
        return drop(writeln!(std::io::stderr(), "{what}"));
    };
    let bytes = CLIENTS * PIECES * PIECE;
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(bytes).unwrap();
    let file = || DiskKind::File(image.path().to_path_buf(), CacheMode::Cached);
    let of_both = [EngineWish::Automatic, EngineWish::Epoll];
    let all = of_both.map(|engine| [(engine, DiskKind::Memory(bytes)), (engine, file())]);
    for (engine, kind) in all.into_iter().flatten() {
        let world = World::with(kind, |config| {
            config.nbd = vec![Address::parse("tcp://127.0.0.1:0").unwrap()];
            config.engine = engine;
        });
        let Address::Tcp(at) = world.server.nbd_addresses()[0] else { panic!("no TCP") };
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                let (over, processors) = (&over, &processors);
                scope.spawn(move || run(at, number, processors, over));
            }
            let have_moved = || world.counter("lanes_moved") >= MOVES;
            let outcome =
                catch_unwind(AssertUnwindSafe(|| wait_longer(6, "some have moved", have_moved)));
            over.store(true, Ordering::Relaxed);
            outcome.unwrap_or_else(|cause| resume_unwind(cause));
        });
    }
}
