//! Serves a queue from a disk of a Towline server, by a session of our own protocol. The session itself
//! reconnects, repeats unanswered requests, and knows what a restart of the server lost. The sessions of a device
//! share that knowledge: the kernel may write through one queue and flush through another.
//!
//! The queue's thread does all the work: it starts requests, and receives when the descriptor of
//! the session is readable. The session therefore stays on TCP or a Unix socket: shared memory
//! has no descriptor that could be waited for together with the kernel's requests.

use crate::ublk::Event;
use crate::{Backend, BackendOptions, Error, Finished, Geometry, Operation as Do, Request};
use std::collections::VecDeque;
use std::future::Future;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};
use towline_client::{Client, Disk, DiskInfo, Operation, Options, Transport, Url, ZeroHow};

/// Stands for "for ever".
const EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Interval for checking what cannot be waited for: room in a full socket.
const LOOK: Duration = Duration::from_millis(10);
/// Longest transfer of a session, bytes.
const TRANSFER_BYTES_MAX: u32 = towline_wire::limits::TRANSFER_BYTES_MAX as u32;

/// Tags whose requests may have finished.
#[derive(Default)]
struct Woken(Mutex<Vec<u16>>);

/// Waker of one tag.
struct Tag(u16, Arc<Woken>);

impl Wake for Tag {
    fn wake(self: Arc<Self>) {
        self.1.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

struct Pending {
    operation: Operation<Vec<u8>>,
    /// Buffer of a request that moves no data, kept until the request ends.
    buffer: Option<Vec<u8>>,
}

/// A session that serves a queue as its [`Backend`].
pub struct Native {
    client: Client,
    disk: Disk,
    descriptor: OwnedFd,
    /// The session was given up: its descriptor stays ready for ever, and nothing will arrive.
    given_up: bool,
    /// Size of the disk in bytes, as the device knows it.
    size: u64,
    tell: Sender<Event>,
    pending: Vec<Option<Pending>>,
    under_way: usize,
    woken: Arc<Woken>,
    finished: VecDeque<Finished>,
}

impl std::fmt::Debug for Native {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Native").field("under_way", &self.under_way).finish_non_exhaustive()
    }
}

fn failed(url: &Url) -> impl Fn(towline_client::Error) -> Error {
    move |error| Error::System {
        what: url.to_string(),
        source: std::io::Error::other(error.to_string()),
    }
}

/// Returns a transport to the same server that has a descriptor to wait for.
fn socket_of(transport: &Transport) -> Transport {
    match transport {
        Transport::Nearest(host, port) => Transport::Tcp(host.clone(), *port),
        Transport::Shm(path) => Transport::Unix(path.clone()),
        other => other.clone(),
    }
}

fn geometry(info: &DiskInfo) -> Geometry {
    Geometry {
        size: info.size,
        block_minimum: info.block_minimum,
        block_preferred: info.block_preferred,
        transfer_maximum: TRANSFER_BYTES_MAX,
        // The device stays what it is while the disk refuses changes for a time.
        read_only: info.read_only && !info.failed,
        rotational: info.rotational,
        flush: true,
        fua: true,
        trim: true,
        zero: true,
        connections: true,
    }
}

impl Native {
    /// Connects and opens the disk. Changes of the disk's size are reported through `tell`.
    ///
    /// # Errors
    /// If the server cannot be reached, has no such disk, or has lost changes.
    pub fn connect(
        url: &Url,
        options: &BackendOptions,
        tell: Sender<Event>,
    ) -> Result<Self, Error> {
        let mut session = Options::default();
        session.reconnect = options.patience.unwrap_or(EVER);
        session.coalesce = u32::from(options.depth / 2);
        let client = Client::connect(&socket_of(&url.transport), session).map_err(failed(url))?;
        let disk = client.disk_sharing(&url.export, &options.durability).map_err(failed(url))?;
        let descriptor = client.fd().map_err(Error::system(url))?;
        Ok(Self {
            size: disk.size(),
            tell,
            client,
            disk,
            descriptor,
            given_up: false,
            pending: Vec::new(),
            under_way: 0,
            woken: Arc::default(),
            finished: VecDeque::new(),
        })
    }

    /// Returns size, block sizes and abilities of the disk.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        geometry(&self.disk.info())
    }

    /// Asks the server for the current properties of the disk.
    ///
    /// # Errors
    /// If the server cannot be reached, or has lost changes.
    pub fn ask(&self) -> Result<DiskInfo, Error> {
        self.disk.refresh().map_err(|error| Error::System {
            what: "the properties of the disk".to_owned(),
            source: std::io::Error::other(error.to_string()),
        })
    }

    /// Measures how long the server takes to answer: the shortest of three tries.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub fn round_trip(&self) -> Result<Duration, Error> {
        let mut shortest = Duration::MAX;
        for _ in 0..3 {
            let begun = Instant::now();
            self.ask()?;
            shortest = shortest.min(begun.elapsed());
        }
        Ok(shortest)
    }

    /// Returns the properties of the disk as last reported by the server.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    /// Returns true if the watched connection has ended.
    fn is_cut(&self) -> bool {
        towline_net::peer_closed(self.descriptor.as_fd())
    }

    fn start(&mut self, request: Request) -> Result<Pending, towline_client::Error> {
        let Request { operation, offset, length, buffer, .. } = request;
        let length = u64::from(length);
        let plain = |operation| Ok(Pending { operation, buffer: None });
        let operation = match operation {
            Do::Read => return plain(self.disk.start_read_at(buffer, offset)?),
            Do::Write { durable } => {
                return plain(self.disk.start_write_at(buffer, offset, durable)?);
            }
            Do::Flush => self.disk.start_flush()?,
            Do::Trim => self.disk.start_trim(offset, length)?,
            Do::Zero { allocate, durable } => {
                let how = ZeroHow { allocate, fast: false };
                self.disk.start_zero(offset, length, how, durable)?
            }
        };
        Ok(Pending { operation, buffer: Some(buffer) })
    }

    /// Polls the request of one tag, whose waker tells when to poll again.
    fn look(&mut self, tag: u16) {
        let Some(place) = self.pending.get_mut(usize::from(tag)) else { return };
        let Some(pending) = place else { return };
        let waker = Waker::from(Arc::new(Tag(tag, self.woken.clone())));
        let polled = Pin::new(&mut pending.operation).poll(&mut Context::from_waker(&waker));
        let Poll::Ready(result) = polled else { return };
        let kept = pending.buffer.take();
        *place = None;
        self.under_way -= 1;
        let finished = match result {
            Ok(buffer) => Finished { tag, result: Ok(()), buffer: kept.unwrap_or(buffer) },
            Err(error) => failure(tag, &error, kept.unwrap_or_default()),
        };
        self.finished.push_back(finished);
    }
}

fn failure(tag: u16, error: &towline_client::Error, buffer: Vec<u8>) -> Finished {
    log::warn!("a request failed: {error}");
    Finished { tag, result: Err(error.errno().0 as i32), buffer }
}

impl Backend for Native {
    fn begin(&mut self, request: Request) {
        let tag = request.tag;
        let place = usize::from(tag);
        if place >= self.pending.len() {
            self.pending.resize_with(place + 1, || None);
        }
        match self.start(request) {
            Ok(pending) => {
                self.pending[place] = Some(pending);
                self.under_way += 1;
                // Its first poll registers the waker.
                self.woken.0.lock().unwrap_or_else(PoisonError::into_inner).push(tag);
            }
            Err(error) => self.finished.push_back(failure(tag, &error, Vec::new())),
        }
    }

    fn turn(&mut self) {
        self.given_up = self.client.restore().is_err();
        let mut looked = false;
        loop {
            let woken =
                std::mem::take(&mut *self.woken.0.lock().unwrap_or_else(PoisonError::into_inner));
            if woken.is_empty() {
                break;
            }
            looked = true;
            for tag in woken {
                self.look(tag);
            }
        }
        // A lost connection has been replaced by now, but the old descriptor stays ready for ever.
        if !looked && !self.given_up && self.is_cut() {
            if let Ok(descriptor) = self.client.fd() {
                self.descriptor = descriptor;
            }
            let size = self.disk.size();
            if size != self.size {
                self.size = size;
                let _ = self.tell.send(Event::Resized(size));
            }
        }
    }

    fn finished(&mut self) -> Option<Finished> {
        self.finished.pop_front()
    }

    fn interest(&self) -> Option<(RawFd, bool)> {
        (!self.given_up).then(|| (self.descriptor.as_raw_fd(), false))
    }

    fn deadline(&self) -> Option<Instant> {
        (self.under_way > 0).then(|| Instant::now() + LOOK)
    }
}
