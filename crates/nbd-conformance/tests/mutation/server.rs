//! A small server in this process that keeps every rule except for one fault, selected by name. It shares
//! only the protocol's constants with the kit.

mod options;

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use nbd_conformance::wire::*;

use super::transmission;

/// Size of the export in bytes.
pub(super) const SIZE: u64 = 4 << 20;
/// Announced block sizes.
pub(super) const MINIMUM: u64 = 512;
pub(super) const MAXIMUM: u64 = 1 << 20;
/// Granularity of the allocation map in bytes.
pub(super) const GRAIN: usize = 4096;
/// This many bytes at the start of the export are not zero at first.
const PATTERNED: usize = 512 << 10;
/// Metadata contexts; a context's identifier is its index here plus one.
pub(super) const CONTEXTS: [&str; 2] = ["base:allocation", "x-kit:parity"];
const DESCRIPTION: &str = "a disk that is wrong on purpose";

/// What the server offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setup {
    /// Everything.
    Full,
    /// The baseline of the text, without block sizes.
    Plain,
    /// Everything, but read-only.
    ReadOnly,
    /// Everything but FAST_ZERO.
    Slow,
    /// Everything, with the largest blocks that the text allows.
    Coarse,
    /// Everything, and an ACK to STARTTLS.
    Tls,
}

impl Setup {
    /// Returns the smallest unit of requests in bytes.
    pub(super) fn block(self) -> u64 {
        if self == Self::Coarse { 64 << 10 } else { MINIMUM }
    }
}

pub(super) struct Disk {
    pub(super) bytes: Vec<u8>,
    pub(super) holes: Vec<bool>,
    /// Trimmed grains, for the fault that loses writes to them.
    pub(super) trimmed: HashSet<usize>,
}

pub(super) struct Server {
    pub(super) setup: Setup,
    fault: &'static str,
    disk: Mutex<Disk>,
    dead: AtomicBool,
    connections: AtomicU64,
    pub(super) writes: AtomicU64,
}

/// A running server. Dropping it ends the server.
pub(super) struct Running {
    pub(super) path: PathBuf,
    server: Arc<Server>,
    _directory: tempfile::TempDir,
}

impl Running {
    pub(super) fn start(setup: Setup, fault: &'static str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let mut bytes = vec![0; SIZE as usize];
        for (place, byte) in bytes[..PATTERNED].iter_mut().enumerate() {
            *byte = (place % 251) as u8 + 1;
        }
        let mut holes = vec![true; SIZE as usize / GRAIN];
        holes[..PATTERNED / GRAIN].fill(false);
        let disk = Mutex::new(Disk { bytes, holes, trimmed: HashSet::new() });
        let server = Arc::new(Server {
            setup,
            fault,
            disk,
            dead: AtomicBool::new(false),
            connections: AtomicU64::new(0),
            writes: AtomicU64::new(0),
        });
        let accepting = server.clone();
        std::thread::spawn(move || accepting.accept(&listener));
        Self { path, server, _directory: directory }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.server.dead.store(true, Ordering::SeqCst);
        // Wakes the accepting thread, which then ends.
        let _ = UnixStream::connect(&self.path);
    }
}

impl Server {
    /// Returns true if the server has that fault.
    pub(super) fn has(&self, fault: &str) -> bool {
        self.fault == fault
    }

    pub(super) fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap()
    }

    /// Makes the server dead for good: it accepts no further client.
    pub(super) fn die(&self) {
        self.dead.store(true, Ordering::SeqCst);
    }

    fn accept(self: &Arc<Self>, listener: &UnixListener) {
        for stream in listener.incoming() {
            if self.dead.load(Ordering::SeqCst) {
                return;
            }
            let number = self.connections.fetch_add(1, Ordering::SeqCst);
            let server = self.clone();
            let client = Client {
                server,
                stream: stream.unwrap(),
                number,
                structured: false,
                extended: false,
                contexts: Vec::new(),
                contexts_of: String::new(),
                no_zeroes: false,
                lists: 0,
            };
            // An error only ends the connection.
            std::thread::spawn(move || client.run().ok());
        }
    }

    pub(super) fn flags(&self, chunks: bool, extended: bool) -> u16 {
        let mut flags = FLAG_HAS_FLAGS;
        if self.setup != Setup::Plain {
            flags |= FLAG_SEND_FLUSH | FLAG_SEND_FUA | FLAG_SEND_TRIM | FLAG_SEND_WRITE_ZEROES;
            flags |= FLAG_CAN_MULTI_CONN | FLAG_SEND_CACHE | FLAG_SEND_FAST_ZERO;
            if (chunks || extended) && !self.has("df-unannounced-ok") || self.has("df-always") {
                flags |= FLAG_SEND_DF;
            }
            if extended || self.has("payload-always") {
                flags |= FLAG_BLOCK_STAT_PAYLOAD;
            }
        }
        if self.setup == Setup::Slow {
            flags &= !FLAG_SEND_FAST_ZERO;
        }
        if self.setup == Setup::ReadOnly {
            flags |= FLAG_READ_ONLY;
        }
        if self.has("no-has-flags") {
            flags &= !FLAG_HAS_FLAGS;
        }
        if self.has("fast-zero-without-zeroes") {
            flags &= !FLAG_SEND_WRITE_ZEROES;
        }
        flags
    }
}

/// One connection.
pub(super) struct Client {
    pub(super) server: Arc<Server>,
    pub(super) stream: UnixStream,
    number: u64,
    pub(super) structured: bool,
    pub(super) extended: bool,
    /// Identifiers of selected contexts.
    pub(super) contexts: Vec<u32>,
    contexts_of: String,
    no_zeroes: bool,
    lists: u64,
}

/// The phase after an option.
enum Next {
    On,
    Transmission,
}

impl Client {
    pub(super) fn has(&self, fault: &str) -> bool {
        self.server.has(fault)
    }

    pub(super) fn recv(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Like `recv`; with the fault, ends the connection if one read does not return all bytes.
    pub(super) fn recv_or(&mut self, length: usize, fault: &str) -> io::Result<Vec<u8>> {
        if !self.has(fault) {
            return self.recv(length);
        }
        let mut bytes = vec![0; length];
        if self.stream.read(&mut bytes)? < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes)
    }

    pub(super) fn send(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        self.stream.write_all(&parts.concat())
    }

    fn run(mut self) -> io::Result<()> {
        let mut magic = GREETING_MAGIC;
        let mut flags = FLAG_FIXED_NEWSTYLE;
        if self.server.setup != Setup::Plain {
            flags |= FLAG_NO_ZEROES;
        }
        if self.has("greet-magic") {
            magic += 1;
        }
        if self.has("greet-not-fixed") {
            flags &= !FLAG_FIXED_NEWSTYLE;
        }
        if self.has("greet-reserved") {
            flags |= 4;
        }
        self.send(&[&magic.to_be_bytes(), &OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()])?;
        let bytes = self.recv_or(4, "flags-in-one-read")?;
        let client = u32::from_be_bytes(bytes.try_into().unwrap());
        let mut known = C_FIXED_NEWSTYLE | C_NO_ZEROES;
        if flags & FLAG_NO_ZEROES == 0 && !self.has("no-zeroes-unoffered-kept") {
            known = C_FIXED_NEWSTYLE;
        }
        if client & !known != 0 && !self.has("client-flag-kept") {
            return Ok(());
        }
        if client & C_FIXED_NEWSTYLE == 0 && self.has("not-fixed-refused") {
            return Ok(());
        }
        self.no_zeroes = client & C_NO_ZEROES != 0;
        for count in 0.. {
            if count == 8 && self.has("eight-options") {
                return Ok(());
            }
            if let Next::Transmission = self.option()? {
                return transmission::run(self);
            }
        }
        Ok(())
    }
}
