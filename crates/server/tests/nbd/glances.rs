//! Requests that arrive one by one over a Unix socket, which the server peeks at before it removes them.

use crate::World;
use crate::client::{DISCONNECT, Form, READ};
use std::io::{ErrorKind, Read, Write};
use std::time::Duration;
use towline_server::DiskKind;

const MIB: u64 = 1 << 20;

/// Small requests, then long ones, then several at once, in many rounds.
#[test]
fn single_short_requests_go_before_and_behind_all_others() {
    let world = World::with(DiskKind::Memory(4 * MIB), |config| config.cores = 1);
    for form in [Form::Simple, Form::Structured, Form::Extended] {
        let mut client = world.client(form);
        for round in 1..60u8 {
            let long = vec![round; 100_000];
            assert_eq!(client.write(0, 4096 * u64::from(round), &long), 0);
            for at in 0..u64::from(round) {
                let data = client.read(4096 * (u64::from(round) + at % 20), 512).unwrap();
                assert!(data == [round; 512], "round {round}, {at}");
            }
            assert_eq!(client.write(0, 0, &[round; 1024]), 0);
            assert!(client.read(0, 1024).unwrap() == [round; 1024]);
            for cookie in 0..20 {
                client.request(READ, 0, cookie, 0, 512);
            }
            for _ in 0..20 {
                match form {
                    Form::Simple => assert_eq!(client.bytes(16 + 512).unwrap()[16], round),
                    _ => assert_eq!(client.chunks().unwrap().len(), 1),
                }
            }
        }
    }
    assert_eq!(world.counter("protocol_errors"), 0);
}

/// A socket that is closed with unread input is reset, which the client would see as an error.
#[test]
fn a_client_that_says_goodbye_sees_the_end() {
    let world = World::with(DiskKind::Memory(MIB), |config| config.cores = 1);
    for reads in 0..40 {
        let mut client = world.client(Form::Simple);
        for _ in 0..reads {
            client.read(0, 512).unwrap();
        }
        client.request(DISCONNECT, 0, 0, 0, 0);
        assert_eq!(client.socket.read(&mut [0]).unwrap(), 0, "after {reads} reads");
    }
}

/// Input that was peeked at but not removed fills the client's socket if its buffer is small.
#[test]
fn a_client_with_a_small_socket_may_always_send_again() {
    let world = World::with(DiskKind::Memory(MIB), |config| config.cores = 1);
    let mut client = world.client(Form::Simple);
    client.socket.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&client.socket, 1).unwrap();
    for _ in 0..300 {
        client.read(0, 512).unwrap();
    }
    // Without waiting for answers, and in parts that wait for room.
    client.socket.set_nonblocking(true).unwrap();
    let request = client.request_bytes(READ, 0, 1, 0, 512, &[]);
    let (mut asked, mut answered) = (0, 0);
    let mut reply = [0; 4096];
    while answered < 300 * (16 + 512) {
        crate::wait_until("room, or an answer", || {
            let sent = asked < 300 && client.socket.write(&request).is_ok_and(|count| count == 28);
            asked += u32::from(sent);
            let received = match client.socket.read(&mut reply) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
                other => other.unwrap(),
            };
            answered += received;
            sent || received > 0
        });
    }
}
