//! Disks that lend pages which cannot be sent.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use towline_client::{Client, Errno, Options, Transport};
use towline_mem::{Aggregate, Segment};
use towline_net::address::Address;
use towline_server::{Config, DiskExport, DiskKind, OwnStore, Server};
use towline_store::{BlockStore, Extent, Geometry, ZeroHow};

/// A disk whose second half cannot be read, although it lends its pages.
#[derive(Debug)]
struct Torn;

const SIZE: u64 = 1 << 20;

impl BlockStore for Torn {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: SIZE,
            block_minimum: 512,
            block_preferred: 4096,
            rotational: false,
            read_only: false,
        }
    }

    fn lend(&self, offset: u64, length: u64) -> Option<Aggregate> {
        let unreadable = std::fs::File::open("/").ok().filter(|_| offset >= SIZE / 2)?;
        let mut pages = Aggregate::new();
        pages.append(Segment::File(Arc::new(unreadable.into())), offset, length);
        Some(pages)
    }

    fn read(&self, _: u64, target: &mut [u8]) -> io::Result<()> {
        target.fill(7);
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

/// The reply that announced the pages has left by then. The lane ends at once, though nothing else
/// wakes the core; the client asks again and gets the error.
#[test]
fn pages_that_cannot_be_sent_fail_their_read_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let config = Config {
        disks: vec![DiskExport::new("torn", DiskKind::Own(OwnStore(Arc::new(Torn))))],
        listen: vec![Address::Unix(socket.clone())],
        cores: 1,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let client = Client::connect(&Transport::Unix(socket), Options::default()).unwrap();
        let disk = client.disk(b"torn").unwrap();
        // By then no timer is running.
        std::thread::sleep(Duration::from_millis(2500));
        for _ in 0..2 {
            let read = disk.read_at(&mut vec![0; 64 << 10], SIZE / 2).map_err(|e| e.errno());
            tell.send(read).unwrap();
        }
        let mut sound = vec![0; 64 << 10];
        disk.read_at(&mut sound, 0).unwrap();
        assert!(sound.iter().all(|byte| *byte == 7));
        tell.send(Ok(())).unwrap();
    });
    for expected in [Err(Errno::EISDIR), Err(Errno::EISDIR), Ok(())] {
        let read = told.recv_timeout(Duration::from_secs(15));
        assert_eq!(read.expect("nobody ends the lane"), expected);
    }
    server.stop();
}
