//! A server of disks, and a model of the contents of one.

use crate::common::{Random, pattern, port, transports};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use towline_client::{Client, Disk, Options, Transport, ZeroHow};
use towline_net::address::Address;
use towline_server::{CacheMode, Config, DiskExport, DiskKind, OwnStore, Server};
use towline_store::BlockStore;

/// Size of each disk in bytes.
pub(crate) const SIZE: usize = 4 << 20;

/// A server in this process and every way to reach it.
pub(crate) struct Disks {
    pub(crate) server: Option<Server>,
    pub(crate) transports: Vec<Transport>,
    directory: TempDir,
}

fn file(directory: &Path, name: &str, size: usize) -> std::path::PathBuf {
    let path = directory.join(name);
    std::fs::File::create(&path).unwrap().set_len(size as u64).unwrap();
    path
}

/// One disk of each kind, except direct files, which not every file system supports.
pub(crate) const KINDS: [&str; 4] = ["memory", "cached", "stripe", "delay"];

pub(crate) fn disks() -> Disks {
    let directory = TempDir::new().unwrap();
    let place = directory.path().to_path_buf();
    let members = vec![file(&place, "a", SIZE / 2), file(&place, "b", SIZE / 2)];
    let mut read_only = DiskExport::new("read-only", DiskKind::Memory(SIZE as u64));
    read_only.read_only = true;
    start(
        directory,
        vec![
            DiskExport::new("memory", DiskKind::Memory(SIZE as u64)),
            DiskExport::new("cached", DiskKind::File(file(&place, "c", SIZE), CacheMode::Cached)),
            DiskExport::new("stripe", DiskKind::Stripe(64 << 10, members, CacheMode::Cached)),
            DiskExport::new("delay", DiskKind::Delay(SIZE as u64, Duration::from_micros(200), 0)),
            read_only,
        ],
    )
}

/// A server of one disk that the test supplies.
pub(crate) fn own(store: Arc<dyn BlockStore>) -> Disks {
    start(TempDir::new().unwrap(), vec![DiskExport::new("own", DiskKind::Own(OwnStore(store)))])
}

pub(crate) fn start(directory: TempDir, disks: Vec<DiskExport>) -> Disks {
    let socket = directory.path().join("socket");
    let config = Config {
        disks,
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap(), Address::Unix(socket.clone())],
        cores: 2,
        state: Some(directory.path().join("state")),
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let transports = transports(&server, socket);
    Disks { server: Some(server), transports, directory }
}

impl Disks {
    pub(crate) fn port(&self) -> u16 {
        port(&self.transports)
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.transports[0], Options::default()).unwrap()
    }

    /// Has the server read its configuration again, with this disk.
    pub(crate) fn reload(&self, store: Arc<dyn BlockStore>) {
        let own = DiskExport::new("own", DiskKind::Own(OwnStore(store)));
        self.server.as_ref().unwrap().replace(&[], &[own]).unwrap();
    }

    /// Ends the server and starts another one in its place, with this disk.
    pub(crate) fn restart(&mut self, store: Arc<dyn BlockStore>) {
        let port = self.port();
        drop(self.server.take());
        let config = Config {
            disks: vec![DiskExport::new("own", DiskKind::Own(OwnStore(store)))],
            listen: vec![Address::parse(&format!("tcp://127.0.0.1:{port}")).unwrap()],
            cores: 1,
            state: Some(self.directory.path().join("state")),
            ..Config::default()
        };
        let mut tries = 0;
        self.server = loop {
            match Server::start(&config) {
                Ok(server) => break Some(server),
                // The kernel may hold the port for a moment.
                Err(error) if tries == 200 => panic!("not started again: {error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
            tries += 1;
        };
        assert!(self.directory.path().exists());
    }
}

/// The expected contents of a disk.
pub(crate) struct Model {
    pub(crate) bytes: Vec<u8>,
}

impl Model {
    /// For a disk of zeroes.
    pub(crate) fn new() -> Self {
        Self { bytes: vec![0; SIZE] }
    }

    /// Does something random to the disk, and checks what it reads.
    pub(crate) fn step(&mut self, disk: &Disk, random: &mut Random, what: &str) {
        let length = random.any_size(1 << 20) as usize;
        let offset = random.below((SIZE - length) as u64 + 1) as usize;
        let range = offset..offset + length;
        match random.below(10) {
            0..4 => {
                let data = pattern(length, random.next() as u8);
                match random.below(3) {
                    0 => disk.write_durable_at(&data, offset as u64).unwrap(),
                    1 => disk.write_at(&data, offset as u64).unwrap(),
                    _ => {
                        let written = disk.start_write_at(data.clone(), offset as u64, false);
                        assert_eq!(written.unwrap().wait().unwrap(), data);
                    }
                }
                self.bytes[range].copy_from_slice(&data);
            }
            4 => {
                let how = ZeroHow { allocate: random.below(2) == 0, fast: false };
                disk.zero(offset as u64, length as u64, how).unwrap();
                self.bytes[range].fill(0);
            }
            5 => disk.flush().unwrap(),
            _ => {
                let mut found = vec![1; length];
                if random.below(2) == 0 {
                    disk.read_at(&mut found, offset as u64).unwrap();
                } else {
                    found = disk.start_read_at(found, offset as u64).unwrap().wait().unwrap();
                }
                let wrong = (0..length).find(|at| found[*at] != self.bytes[offset + at]);
                assert_eq!(wrong, None, "{what}: read of {length} at {offset}");
            }
        }
    }
}
