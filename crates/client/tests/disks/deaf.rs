//! Clients that ask for much of a disk and do not receive it.

use crate::common::{Raw, request};
use std::sync::mpsc::channel;
use std::time::Duration;
use towline_client::{Client, Options, Transport};
use towline_net::address::Address;
use towline_server::{Config, DiskExport, DiskKind, Server};
use towline_wire::Request;
use towline_wire::limits::CLIENT_STALL_SECONDS;

const MIB: u64 = 1 << 20;

/// They hold buffers, which are few: when others wait for buffers, clients that receive nothing are
/// thrown out.
#[test]
fn who_takes_no_answers_does_not_keep_the_buffers_of_others() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let disk = DiskKind::Delay(64 * MIB, Duration::from_micros(100), 0);
    let config = Config {
        disks: vec![DiskExport::new("delay", disk)],
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap(), Address::Unix(socket.clone())],
        cores: 1,
        buffer_limit: 4 * MIB,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!("no TCP") };
    // The zeroes of a memory disk are holes, which need no buffer.
    let transport = Transport::Unix(socket);
    let client = Client::connect(&transport, Options::default()).unwrap();
    let disk = client.disk(b"delay").unwrap();
    disk.write_at(&vec![7; 64 << 20], 0).unwrap();
    let mut deaf = Vec::new();
    for _ in 0..8 {
        let (mut raw, _) = Raw::greeted(address.port());
        raw.send(&request(0, 1, &[Request::DiskOpen { disk: 5, name: b"delay" }], 0));
        raw.receive().unwrap();
        for slot in 0..32 {
            let read = Request::DiskRead { disk: 5, flags: 0, offset: 0, length: 8 << 20 };
            raw.send(&request(slot + 1, 1, &[read], 0));
        }
        deaf.push(raw);
    }
    // The server sends as much as their sockets take.
    std::thread::sleep(Duration::from_secs(2));
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 20];
        disk.read_at(&mut bytes, 0).unwrap();
        tell.send(bytes.iter().all(|byte| *byte == 7)).unwrap();
    });
    let stall = Duration::from_secs(CLIENT_STALL_SECONDS);
    assert!(told.recv_timeout(2 * stall).expect("nobody gives up its buffers"));
    drop(deaf);
    server.stop();
}
