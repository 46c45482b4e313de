//! Clients that disappear in the middle of a request, and servers that do.

use crate::client::{Form, READ, WRITE};
use crate::stores::Gated;
use crate::{World, long, pattern, wait_until};
use towline_server::{CacheMode, DiskKind};

const MIB: u64 = 1 << 20;

fn requests_and_gone(world: &World, number: u64, payload: &[u8]) {
    let form = [Form::Simple, Form::Structured, Form::Extended][number as usize % 3];
    let mut client = world.client(form);
    let mut bytes = Vec::new();
    for request in 0..number % 5 + 1 {
        let length = [512, 4096, 65536, MIB][(number + request) as usize % 4];
        bytes.extend(client.request_bytes(READ, 0, request, request * 4096, length, &[]));
        let payload = &payload[..length as usize];
        bytes.extend(client.request_bytes(WRITE, 0, request, MIB, length, payload));
    }
    // Ends at any byte.
    let cut = (number as usize).wrapping_mul(7919) % bytes.len() + 1;
    client.socket.set_nonblocking(true).unwrap();
    use std::io::Write;
    let _ = client.socket.write(&bytes[..cut]);
}

#[test]
fn clients_vanish_by_the_thousand() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(8 * MIB).unwrap();
    for mode in [CacheMode::Cached, CacheMode::Direct] {
        let world = World::with(DiskKind::File(file.path().into(), mode), |_| {});
        let payload = pattern(0, 1 << 20, 1);
        for number in 0..if long() { 10_000 } else { 300 } {
            requests_and_gone(&world, number, &payload);
        }
        wait_until("all connections are gone", || world.counter("lanes") == 0);
        wait_until("all is given back", || world.counter("buffer_bytes_in_use") == 0);
        let mut client = world.client(Form::Structured);
        assert_eq!(client.write(0, 0, &payload[..4096]), 0);
        assert_eq!(client.read(0, 4096).unwrap(), payload[..4096]);
    }
}

#[test]
fn a_client_vanishes_while_the_disk_works_for_it() {
    let disk = Gated::new(8 * MIB);
    disk.close((0..32).map(|at| at * 256 * 1024));
    let world = World::new(disk.clone());
    for form in [Form::Simple, Form::Structured, Form::Extended] {
        let mut client = world.client(form);
        client.request(READ, 0, 1, 0, 4 * MIB);
        let payload = vec![1; 1 << 20];
        let bytes = client.request_bytes(WRITE, 0, 2, 4 * MIB, MIB, &payload);
        client.send(&bytes);
        wait_until("the disk works", || disk.waiting() > 4);
        drop(client);
        wait_until("the connection is gone", || world.counter("lanes") == 0);
        disk.open_all();
        wait_until("all is given back", || world.counter("buffer_bytes_in_use") == 0);
        disk.close((0..32).map(|at| at * 256 * 1024));
    }
    disk.open_all();
    assert!(world.client(Form::Simple).read(0, 512).is_ok());
}

#[test]
fn a_server_that_ends_answers_what_it_took() {
    let disk = Gated::new(MIB);
    disk.close([0]);
    let world = World::new(disk.clone());
    let mut client = world.client(Form::Structured);
    client.request(READ, 0, 1, 0, 512);
    wait_until("the disk works", || disk.waiting() == 1);
    let ending = std::thread::spawn(move || world.server.stop());
    std::thread::sleep(std::time::Duration::from_millis(50));
    client.request(READ, 0, 2, 0, 512);
    const ESHUTDOWN: u32 = 108;
    let (cookie, chunk, _) = client.chunk().unwrap();
    assert_eq!((cookie, chunk), (2, crate::client::Chunk::Error(ESHUTDOWN, None)));
    disk.open(0);
    let (cookie, chunk, _) = client.chunk().unwrap();
    assert!(cookie == 1 && matches!(chunk, crate::client::Chunk::Data(0, _)));
    ending.join().unwrap();
}
