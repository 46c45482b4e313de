//! A small NBD client that keeps a number of requests under way and records when each answer and its first
//! data arrive.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use towline_net::address::{connect_stream, connect_unix_stream};

/// Input buffer for short replies, many of which arrive at a time.
const INPUT_BYTES: usize = 64 * 1024;
/// Input buffer for long replies: only the header goes through it. The data is received straight into its
/// place.
const HEADER_BYTES: usize = 256;
const LONG_REPLY_BYTES: usize = 32 * 1024;
/// Requests are collected up to this length before they are sent.
const OUTPUT_BYTES: usize = 64 * 1024;
/// A server that is silent for this long is considered stuck.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Where a server listens: `HOST:PORT`, or `unix:///PATH`.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Tcp(String),
    Unix(PathBuf),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

impl std::str::FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix://") {
            Some(path) if path.starts_with('/') => Ok(Self::Unix(path.into())),
            None if text.contains(':') && !text.contains("://") => Ok(Self::Tcp(text.to_owned())),
            _ => Err(format!("\"{text}\": expected HOST:PORT or unix:///PATH")),
        }
    }
}

/// The order in which the pieces of a read may arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Simple replies: one stream, in ascending order.
    Ascending,
    /// Structured replies: pieces as the disk delivers them.
    Any,
}

/// The requests to make.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) writes: bool,
    /// Use random offsets, until the limit.
    pub(super) random: bool,
    /// Bytes of each request.
    pub(super) size: usize,
    pub(super) outstanding: usize,
    /// Bytes of the disk that the requests cover, once.
    pub(super) span: u64,
    /// Start again at the end of the span.
    pub(super) again: bool,
    pub(super) limit: Duration,
}

/// The result of a load.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    /// When the load began.
    pub(super) began: Option<Instant>,
    pub(super) answered: Answered,
    /// Microseconds from each request to the end of its answer, and from each read to its first data.
    pub(super) whole_us: Vec<f64>,
    pub(super) first_us: Vec<f64>,
}

/// Counts of answered requests, by millisecond. A list of times would be memory that the client touches for
/// the first time, and the kernel would have to fill its pages: 5 MiB for 300 thousand requests, and as much
/// again each time the list is moved to grow.
#[derive(Clone, Debug, Default)]
pub(super) struct Answered {
    first: Option<Instant>,
    last: Option<Instant>,
    counts: Vec<u32>,
}

impl Answered {
    /// Counts one request that was answered at this time.
    pub(super) fn note(&mut self, at: Instant) {
        let first = *self.first.get_or_insert(at);
        let millisecond = at.duration_since(first).as_millis() as usize;
        if millisecond >= self.counts.len() {
            self.counts.resize(millisecond + 1, 0);
        }
        self.counts[millisecond] += 1;
        self.last = Some(at);
    }

    /// Returns the number of answered requests.
    pub(super) fn count(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum()
    }

    /// Returns the number of requests answered after this moment and the rest of its millisecond.
    pub(super) fn after(&self, at: Instant) -> u64 {
        let skipped = match self.first.and_then(|first| at.checked_duration_since(first)) {
            Some(since) => since.as_millis() as usize + 1,
            None => 0,
        };
        self.counts.iter().skip(skipped).map(|count| u64::from(*count)).sum()
    }

    /// Returns when the last request was answered.
    pub(super) fn last(&self) -> Option<Instant> {
        self.last
    }
}

struct Slot {
    /// The data of a read. For a write, the header and the data, so that both are one system call, one packet
    /// and one wake-up of the server. The header in front also keeps the kernel from copying the data from
    /// the start of a page to 28 bytes behind one, which takes some processors three times as long.
    buffer: Vec<u8>,
    offset: u64,
    since: Instant,
    first: Option<Instant>,
}

/// A load in progress.
pub(super) struct Run {
    load: Load,
    start: Instant,
    offsets: Offsets,
    slots: Vec<Slot>,
    under_way: usize,
    outcome: Outcome,
}

impl Run {
    /// Returns true while requests are under way.
    pub(super) fn goes_on(&self) -> bool {
        self.under_way > 0
    }
}

/// A socket with a time limit. The kernel reports as `EAGAIN` that it has passed, which says nothing to a user.
struct Connection(File);

fn told(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            let what = format!("no answer within {} s", PATIENCE.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, what)
        }
        _ => error,
    }
}

impl Read for Connection {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.0.read(target).map_err(told)
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(told)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

pub(super) struct Client {
    input: BufReader<Connection>,
    /// Requests that have not been sent yet.
    output: Vec<u8>,
    order: Order,
    /// Bytes of the disk.
    size: u64,
    /// The server has a command to flush.
    flushes: bool,
}

/// The offsets of the requests of a load.
pub(super) struct Offsets {
    load: Load,
    next: u64,
}

impl Offsets {
    /// The offsets from the start of a load.
    pub(super) fn new(load: Load) -> Self {
        Self { load, next: 0 }
    }

    /// Returns the next offset, or `None` at the end of the span.
    pub(super) fn next(&mut self) -> Option<u64> {
        let Load { random, span, again, .. } = self.load;
        let size = self.load.size as u64;
        let offset = self.next;
        if random {
            // A linear congruential generator is random enough to defeat read-ahead.
            self.next = offset.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            return Some((self.next >> 20) % (span / size) * size);
        }
        let offset = if offset + size <= span { offset } else { Some(0).filter(|_| again)? };
        self.next = offset + size;
        Some(offset)
    }
}

const REQUEST_BYTES: usize = 28;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED: u32 = 8;
/// Longest reply to an option that is accepted: two strings of 4096 bytes, with room to spare.
const OPTION_REPLY_BYTES_MAX: usize = 64 * 1024;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: [u8; 2] = [0; 2];
/// The transmission flag of servers that have the command FLUSH.
const SEND_FLUSH: u64 = 1 << 2;

fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Client {
    /// Connects to a disk of a server.
    pub(super) fn connect(place: &Place, export: &str, order: Order) -> io::Result<Self> {
        let socket: OwnedFd = match place {
            Place::Tcp(address) => connect_stream(address.as_str(), PATIENCE)?.into(),
            Place::Unix(path) => connect_unix_stream(path, PATIENCE)?.into(),
        };
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
        let input = BufReader::with_capacity(HEADER_BYTES, Connection(File::from(socket)));
        let mut this = Self { input, output: Vec::new(), order, size: 0, flushes: false };
        this.take::<18>()?;
        this.output.extend_from_slice(&3u32.to_be_bytes());
        if order == Order::Any && !this.option(OPTION_STRUCTURED, &[])? {
            // The server supports only simple replies.
            this.order = Order::Ascending;
        }
        let mut go = (export.len() as u32).to_be_bytes().to_vec();
        go.extend_from_slice(export.as_bytes());
        go.extend_from_slice(&[0; 2]);
        match this.option(OPTION_GO, &go)? {
            true => Ok(this),
            false => Err(wrong(format!("there is no disk \"{export}\""))),
        }
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.send_before_waiting()?;
        self.input.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn send_before_waiting(&mut self) -> io::Result<()> {
        if self.input.buffer().is_empty() { self.send() } else { Ok(()) }
    }

    /// Sends an option. Returns false if the server refuses it.
    fn option(&mut self, option: u32, payload: &[u8]) -> io::Result<bool> {
        self.output.extend_from_slice(b"IHAVEOPT");
        self.output.extend_from_slice(&option.to_be_bytes());
        self.output.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        self.output.extend_from_slice(payload);
        loop {
            let header = self.take::<20>()?;
            let kind = number(&header[12..16]) as u32;
            let length = number(&header[16..20]) as usize;
            if length > OPTION_REPLY_BYTES_MAX {
                return Err(wrong(format!("a reply of {length} bytes to an option")));
            }
            let mut text = vec![0; length];
            self.input.read_exact(&mut text)?;
            match kind {
                REPLY_ACK => return Ok(true),
                kind if kind >> 31 == 1 => return Ok(false),
                REPLY_INFO if text.len() == 12 && text[..2] == INFO_EXPORT => {
                    self.size = number(&text[2..10]);
                    self.flushes = number(&text[10..]) & SEND_FLUSH != 0;
                }
                _ => {}
            }
        }
    }

    /// Queues a request without data, to be sent with others.
    fn request(&mut self, kind: u16, cookie: usize, offset: u64, length: usize) {
        self.output.extend_from_slice(&header(kind, cookie, offset, length));
    }

    /// Sends or queues a write. The message starts with room for the header.
    fn write(&mut self, cookie: usize, offset: u64, message: &mut [u8]) -> io::Result<()> {
        let length = message.len() - REQUEST_BYTES;
        message[..REQUEST_BYTES].copy_from_slice(&header(WRITE, cookie, offset, length));
        if length < OUTPUT_BYTES {
            self.output.extend_from_slice(message);
            return Ok(());
        }
        self.send()?;
        self.input.get_mut().write_all(message)
    }

    /// Makes everything written so far durable, if the server has a command for it.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        if !self.flushes {
            return Ok(());
        }
        self.request(FLUSH, 0, 0, 0);
        let mut slots =
            [Slot { buffer: Vec::new(), offset: 0, since: Instant::now(), first: None }];
        while self.reply(&mut slots, false)?.is_none() {}
        Ok(())
    }

    /// Receives a piece of a reply. Returns the number of the request if this was its last piece.
    fn reply(&mut self, slots: &mut [Slot], reads: bool) -> io::Result<Option<usize>> {
        if self.order == Order::Ascending {
            let header = self.take::<16>()?;
            let cookie = number(&header[8..]) as usize;
            if number(&header[..4]) as u32 != SIMPLE_MAGIC {
                return Err(wrong("expected a reply header"));
            }
            no_error(number(&header[4..8]))?;
            let slot = slots.get_mut(cookie).ok_or_else(|| wrong("a reply to nothing"))?;
            if reads {
                // The first part shows when the first data arrived.
                let most = slot.buffer.len().min(4096);
                self.input.read_exact(&mut slot.buffer[..most])?;
                slot.first = Some(Instant::now());
                self.input.read_exact(&mut slot.buffer[most..])?;
            }
            return Ok(Some(cookie));
        }
        let header = self.take::<20>()?;
        if number(&header[..4]) as u32 != CHUNK_MAGIC {
            return Err(wrong("expected a chunk header"));
        }
        let (done, kind) = (header[5] & 1 == 1, number(&header[6..8]));
        let (cookie, length) = (number(&header[8..16]) as usize, number(&header[16..]));
        let slot = slots.get_mut(cookie).ok_or_else(|| wrong("a chunk for nothing"))?;
        match kind {
            0 if length == 0 => {}
            1 if length > 8 => {
                let offset = number(&self.take::<8>()?);
                let from = offset.checked_sub(slot.offset).ok_or_else(|| wrong("data before"))?;
                let end = from.checked_add(length - 8).ok_or_else(|| wrong("data behind"))?;
                let range = from as usize..end as usize;
                let place = slot.buffer.get_mut(range).ok_or_else(|| wrong("data behind"))?;
                slot.first.get_or_insert_with(Instant::now);
                self.input.read_exact(place)?;
            }
            2 if length == 12 => {
                self.take::<12>()?;
                slot.first.get_or_insert_with(Instant::now);
            }
            kind => {
                let error = number(&self.take::<4>()?);
                no_error(error)?;
                return Err(wrong(format!("a chunk of type {kind}")));
            }
        }
        Ok(done.then_some(cookie))
    }

    /// Runs the load: covers the span, once or again and again, until the time limit.
    pub(super) fn run(&mut self, load: Load) -> io::Result<Outcome> {
        let mut run = self.begin(load)?;
        while run.goes_on() {
            self.step(&mut run)?;
        }
        self.end(run)
    }

    /// Starts a load with its first requests.
    pub(super) fn begin(&mut self, load: Load) -> io::Result<Run> {
        let socket = Connection(self.input.get_ref().0.try_clone()?);
        let long = load.size >= LONG_REPLY_BYTES;
        // No request is under way, so the old buffer is empty.
        self.input =
            BufReader::with_capacity(if long { HEADER_BYTES } else { INPUT_BYTES }, socket);
        let start = Instant::now();
        let (mut offsets, mut slots, mut under_way) = (Offsets::new(load), Vec::new(), 0);
        let front = if load.writes { REQUEST_BYTES } else { 0 };
        for cookie in 0..load.outstanding {
            let buffer: Vec<u8> = (0..front + load.size).map(|at| (at % 251) as u8).collect();
            slots.push(Slot { buffer, offset: 0, since: start, first: None });
            under_way +=
                usize::from(self.again(load, &mut slots[cookie], cookie, offsets.next())?);
        }
        Ok(Run {
            load,
            start,
            offsets,
            slots,
            under_way,
            outcome: Outcome { began: Some(start), ..Outcome::default() },
        })
    }

    /// Waits for an answer or a piece of one, and starts the next request when one is complete.
    pub(super) fn step(&mut self, run: &mut Run) -> io::Result<()> {
        let Run { load, start, offsets, slots, under_way, outcome } = run;
        let Some(cookie) = self.reply(slots, !load.writes)? else { return Ok(()) };
        let (slot, now) = (&slots[cookie], Instant::now());
        let us = |at: Instant| at.duration_since(slot.since).as_secs_f64() * 1e6;
        outcome.whole_us.push(us(now));
        outcome.answered.note(now);
        outcome.first_us.extend(slot.first.map(us));
        outcome.bytes += load.size as u64;
        let goes_on = start.elapsed() < load.limit;
        if !goes_on || !self.again(*load, &mut slots[cookie], cookie, offsets.next())? {
            *under_way -= 1;
        }
        Ok(())
    }

    /// Returns the result after all requests have been answered.
    pub(super) fn end(&mut self, mut run: Run) -> io::Result<Outcome> {
        if run.load.writes {
            self.flush()?;
        }
        run.outcome.seconds = run.start.elapsed().as_secs_f64();
        Ok(run.outcome)
    }

    /// Sends the queued requests. Otherwise they are sent before the client next waits for input.
    pub(super) fn send(&mut self) -> io::Result<()> {
        if !self.output.is_empty() {
            self.input.get_mut().write_all(&self.output)?;
            self.output.clear();
        }
        Ok(())
    }

    /// Returns true if received data has not been processed yet.
    pub(super) fn has_input(&self) -> bool {
        !self.input.buffer().is_empty()
    }

    /// The connection.
    pub(super) fn socket(&self) -> &File {
        &self.input.get_ref().0
    }

    /// Starts the next request of a slot. Returns false at the end of the span.
    fn again(
        &mut self,
        load: Load,
        slot: &mut Slot,
        cookie: usize,
        offset: Option<u64>,
    ) -> io::Result<bool> {
        let Some(offset) = offset else { return Ok(false) };
        (slot.offset, slot.since, slot.first) = (offset, Instant::now(), None);
        match load.writes {
            true => self.write(cookie, offset, &mut slot.buffer)?,
            false => self.request(READ, cookie, offset, load.size),
        }
        Ok(true)
    }
}

fn header(kind: u16, cookie: usize, offset: u64, length: usize) -> [u8; REQUEST_BYTES] {
    let mut header = [0; REQUEST_BYTES];
    header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    header[6..8].copy_from_slice(&kind.to_be_bytes());
    header[8..16].copy_from_slice(&(cookie as u64).to_be_bytes());
    header[16..24].copy_from_slice(&offset.to_be_bytes());
    header[24..].copy_from_slice(&(length as u32).to_be_bytes());
    header
}

fn no_error(error: u64) -> io::Result<()> {
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error as i32)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_server_that_is_silent_is_told_as_such() {
        let (near, _far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut socket = Connection(File::from(OwnedFd::from(near)));
        let error = socket.read_exact(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "no answer within 60 s");
    }

    #[test]
    fn only_a_server_that_can_flush_is_asked_to() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"NBDMAGICIHAVEOPT\0\x01").unwrap();
            // The client's flags, and GO with the name "x".
            stream.read_exact(&mut [0; 4 + 16 + 7]).unwrap();
            let reply = |kind: u32, data: &[u8]| {
                let head = [0x0003_e889_0455_65a9_u64.to_be_bytes(), [0, 0, 0, 7, 0, 0, 0, 0]];
                let mut bytes = head.concat();
                bytes[12..].copy_from_slice(&kind.to_be_bytes());
                bytes.extend((data.len() as u32).to_be_bytes());
                [&bytes[..], data].concat()
            };
            // A disk of 1 MiB whose only flag is that it has flags.
            stream.write_all(&reply(3, &[0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 1])).unwrap();
            stream.write_all(&reply(1, &[])).unwrap();
            stream.read(&mut [0; 64]).unwrap()
        });
        let mut client = Client::connect(&Place::Unix(path), "x", Order::Ascending).unwrap();
        assert_eq!(client.size(), 1 << 20);
        client.flush().unwrap();
        drop(client);
        assert_eq!(server.join().unwrap(), 0, "it was asked for something");
    }

    /// A connection to a server that says this, whatever it is asked.
    fn told_by(says: &[u8]) -> Client {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(says).unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        // It listens for as long as the client may send.
        std::thread::spawn(move || io::copy(&mut far, &mut io::sink()));
        let socket = Connection(File::from(OwnedFd::from(near)));
        let input = BufReader::with_capacity(HEADER_BYTES, socket);
        Client { input, output: Vec::new(), order: Order::Any, size: 0, flushes: false }
    }

    #[test]
    fn what_a_server_says_takes_no_more_memory_than_a_reply_may() {
        let mut says = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
        says.extend_from_slice(&[0, 0, 0, 7, 0, 0, 0, 3, 255, 255, 255, 255]);
        let error = told_by(&says).option(OPTION_GO, &[]).unwrap_err();
        assert_eq!(error.to_string(), "a reply of 4294967295 bytes to an option");
    }

    #[test]
    fn data_at_an_offset_beyond_all_others_is_an_error() {
        let mut says = CHUNK_MAGIC.to_be_bytes().to_vec();
        says.extend_from_slice(&[0, 1, 0, 1]);
        says.extend_from_slice(&0_u64.to_be_bytes());
        says.extend_from_slice(&512_u32.to_be_bytes());
        says.extend_from_slice(&u64::MAX.to_be_bytes());
        let slot = Slot { buffer: vec![0; 512], offset: 0, since: Instant::now(), first: None };
        let error = told_by(&says).reply(&mut [slot], true).unwrap_err();
        assert_eq!(error.to_string(), "data behind");
    }
}
