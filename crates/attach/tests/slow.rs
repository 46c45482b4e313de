//! A server that is slow, but there.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use support::{HAS_FLAGS, handshake, words};
use towline_attach::nbd::{Caller, Source};
use towline_wire::limits::PEER_SILENCE_SECONDS;

const WRITES: u64 = 24;
/// All together are more than sockets hold.
const LENGTH: usize = 1 << 20;

/// Takes no requests for longer than a silent server is waited for, and then all.
fn serve(listener: &TcpListener) {
    let (stream, _) = listener.accept().unwrap();
    let mut stream = UnixStream::from(OwnedFd::from(stream));
    handshake(&mut stream, WRITES * LENGTH as u64, HAS_FLAGS).unwrap();
    std::thread::sleep(Duration::from_secs(PEER_SILENCE_SECONDS) * 4 / 3);
    let mut data = vec![0; LENGTH];
    for _ in 0..WRITES {
        let mut head = [0; 28];
        stream.read_exact(&mut head).unwrap();
        assert_eq!((head[7], &head[24..]), (1, &(LENGTH as u32).to_be_bytes()[..]));
        stream.read_exact(&mut data).unwrap();
        let reply = [&words(&[0x6744_6698, 0])[..], &head[8..16]].concat();
        stream.write_all(&reply).unwrap();
    }
}

#[test]
fn a_server_that_takes_no_data_for_a_while_is_waited_for() {
    if std::env::var_os("TOWLINE_LONG").is_none() {
        return println!("SKIPPED a server that is slow for 40 s: `make test-long` tries it");
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let source = format!("nbd://{}/", listener.local_addr().unwrap());
    let served = std::thread::spawn(move || serve(&listener));
    let caller = Caller::connect(&Source::parse(&source).unwrap(), None).unwrap();
    let write = |number| caller.write(vec![1; LENGTH], number * LENGTH as u64).map(drop);
    let write = &write;
    std::thread::scope(|scope| {
        let writes: Vec<_> = (0..WRITES).map(|n| scope.spawn(move || write(n))).collect();
        for write in writes {
            assert_eq!(write.join().unwrap(), Ok(()));
        }
    });
    served.join().unwrap();
}
