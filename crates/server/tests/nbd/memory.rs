//! The memory of a server is bounded.

use crate::client::{Form, READ, WRITE};
use crate::stores::Gated;
use crate::{World, pattern, wait_until};
use towline_server::DiskKind;

const MIB: u64 = 1 << 20;

#[test]
fn a_long_read_holds_its_fragments_not_its_length() {
    let disk = Gated::new(64 * MIB);
    let world = World::new(disk);
    let mut client = world.client(Form::Structured);
    client.request(READ, 0, 1, 0, 32 * MIB);
    // Nobody reads the answer: what is under way fills up and stays.
    wait_until("the read is under way", || world.counter("buffer_bytes_in_use") > 0);
    std::thread::sleep(std::time::Duration::from_millis(100));
    let mut covered = 0;
    while covered < 32 * MIB {
        let (_, chunk, _) = client.chunk().unwrap();
        if let crate::client::Chunk::Data(_, bytes) = chunk {
            covered += bytes.len() as u64;
        }
    }
    let peak = world.counter("buffer_bytes_peak");
    assert!(peak <= MIB, "{peak} bytes were held");
    wait_until("all is given back", || world.counter("buffer_bytes_in_use") == 0);
}

/// Many clients share little memory, and each gets its turn.
#[test]
fn a_tight_limit_slows_but_stops_nobody() {
    let limit = |config: &mut towline_server::Config| config.buffer_limit = 2 * MIB;
    let disk = DiskKind::Delay(64 * MIB, std::time::Duration::from_micros(100), 0);
    let world = World::with(disk, limit);
    std::thread::scope(|scope| {
        for number in 0..24u64 {
            let mut client = world.client(match number % 3 {
                0 => Form::Simple,
                1 => Form::Structured,
                _ => Form::Extended,
            });
            scope.spawn(move || {
                let data = pattern(number, 1 << 20, number);
                for _ in 0..4 {
                    assert_eq!(client.write(0, number * MIB, &data), 0);
                    assert!(client.read(number * MIB, MIB).unwrap() == data, "client {number}");
                }
            });
        }
    });
    // Twice the limit at most: one share for files, one for disks.
    let peak = world.counter("buffer_bytes_peak");
    assert!(peak <= 4 * MIB, "{peak} bytes were held");
}

/// Thousands of small requests on one connection whose answers nobody takes.
#[test]
fn a_client_that_never_listens_holds_little() {
    let world = World::with(DiskKind::Memory(16 * MIB), |_| {});
    let mut deaf = world.client(Form::Simple);
    deaf.socket.set_nonblocking(true).unwrap();
    let request = deaf.request_bytes(READ, 0, 1, 0, 32 * 1024, &[]);
    let flood = request.repeat(1000);
    use std::io::Write;
    let mut sent = 0;
    // Until the server stops reading.
    for _ in 0..200 {
        match deaf.socket.write(&flood) {
            Ok(count) => sent += count,
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
        }
    }
    assert!(sent > 0);
    let received = world.counter("bytes_received");
    assert!(received < 512 * 1024, "{received} bytes of requests were taken in");
    // Others are served meanwhile.
    let mut other = world.client(Form::Structured);
    let bytes = other.request_bytes(WRITE, 0, 1, 0, 5, b"hello");
    other.send(&bytes);
    assert_eq!(other.outcome().unwrap(), 0);
    assert_eq!(other.read(0, 5).unwrap(), b"hello");
}
