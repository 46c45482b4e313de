//! Requests that a server cannot carry out: they fail, or the server hangs up whenever it is asked.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::io::{self, Read};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use support::{HAS_FLAGS, handshake};
use towline_attach::nbd::{CallError, Caller, Source};
use towline_attach::{Backend, BackendOptions, Operation, Origin, Request};
use towline_net::address::Address;
use towline_server::{Config, DiskExport, DiskKind, OwnStore, Server};
use towline_store::{BlockStore, Extent, Geometry, ZeroHow};

const SIZE: u64 = 1 << 20;
/// Where a read of the whole disk fails: the server has sent other fragments by then.
const BROKEN: u64 = SIZE - 4096;

/// A disk with a block that cannot be read.
#[derive(Debug)]
struct Broken;

impl BlockStore for Broken {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: SIZE,
            block_minimum: 512,
            block_preferred: 4096,
            rotational: false,
            read_only: false,
        }
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        if offset + target.len() as u64 > BROKEN {
            // The fragments before it leave first.
            std::thread::sleep(Duration::from_millis(50));
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        target.fill(1);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8], _: bool) -> io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, _: u64, _: u64, _: ZeroHow) -> io::Result<()> {
        Ok(())
    }

    fn trim(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn cache(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn extents(&self, _: u64, length: u64, tell: &mut dyn FnMut(Extent) -> bool) -> io::Result<()> {
        tell(Extent { length, hole: false, zero: false });
        Ok(())
    }
}

/// Reads on a queue of a device, and returns the result.
fn read(queue: &mut dyn Backend, offset: u64, length: u32) -> Result<(), i32> {
    let (operation, buffer) = (Operation::Read, vec![0; length as usize]);
    queue.begin(Request { tag: 0, operation, offset, length, buffer });
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        queue.turn();
        if let Some(finished) = queue.finished() {
            return finished.result;
        }
        assert!(Instant::now() < end, "the read does not finish");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_read_that_fails_after_its_beginning_was_sent_is_told_as_such() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let config = Config {
        disks: vec![DiskExport::new("disk", DiskKind::Own(OwnStore(Arc::new(Broken))))],
        nbd: vec![Address::Unix(socket.clone())],
        cores: 1,
        ..Config::default()
    };
    let _server = Server::start(&config).unwrap();
    let url = format!("nbd+unix:///disk?socket={}", socket.display());
    let options = BackendOptions { depth: 1, ..BackendOptions::default() };
    let mut queue = Origin::parse(&url).unwrap().backend(&options, mpsc::channel().0).unwrap();
    assert_eq!(read(&mut *queue, 0, SIZE as u32), Err(libc::EIO));
    assert_eq!(read(&mut *queue, 0, 4096), Ok(()));
}

#[test]
fn a_server_that_hangs_up_whenever_it_is_asked_is_away() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            count.fetch_add(1, Ordering::Relaxed);
            handshake(&mut stream, 0, HAS_FLAGS).unwrap();
            let _ = stream.read_exact(&mut [0; 28]);
        }
    });
    let source = Source::parse(&format!("nbd+unix:///?socket={}", socket.display())).unwrap();
    let caller = Caller::connect(&source, Some(Duration::from_millis(500))).unwrap();
    assert_eq!(caller.read(vec![0; 512], 0), Err(CallError::Lost));
    // The pauses between them grow.
    let connections = connections.load(Ordering::Relaxed);
    assert!((2..10).contains(&connections), "{connections} connections");
}
