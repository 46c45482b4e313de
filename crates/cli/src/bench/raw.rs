//! `towline bench net`: round trips and streams between two processes without Towline, the limit for
//! Towline's own figures.
//!
//! The process that runs the measurement is the near end. It starts the same program again as the far end,
//! which inherits its socket or memory as standard input.

use super::check_length;
use super::processes::cpu_seconds;
use super::processor::{self, Pinned, end_with_parent};
use super::raw_clients;
use super::result::{Measured, summary};
use super::shared::{self, End};
use crate::report::say;
use crate::serve::parse_bytes;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use towline_mem::SharedMemory;
use towline_net::address::{Address, Listener, connect_stream};

/// Bytes that a stream sends and receives per call: the fastest size from 64 KiB to 1 MiB, as a limit should
/// be. With 1 MiB, sendfile is a quarter slower.
const PIECE_BYTES: usize = 256 << 10;
/// Largest message in bytes.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

const EXAMPLES: &str = "\
Examples:
  towline bench net --kind tcp --request 60 --reply 4140 --pin 0,1
  towline bench net --stream --sendfile /srv/data/big
  towline bench net --procs 184 --reply 65536 --sendfile /srv/data/big

Exit status: 0 measured, 1 an operation failed or a value is beyond its limits, 2 wrong usage.";

/// Arguments of `bench net`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// What to send over.
    #[arg(long, value_enum, default_value = "tcp")]
    pub(super) kind: Kind,
    /// Bytes of each request.
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub(super) request: usize,
    /// Bytes of each reply.
    #[arg(long, value_name = "N", default_value_t = 180)]
    pub(super) reply: usize,
    /// Seconds to measure.
    #[arg(long, default_value_t = 1.0)]
    pub(super) secs: f64,
    /// Seconds to run before that, which are not measured.
    #[arg(long, value_name = "SECS", default_value_t = 0.0)]
    pub(super) ramp: f64,
    /// Poll sockets instead of sleeping (shm always does).
    #[arg(long)]
    pub(super) spin: bool,
    /// Processors of the two ends; default: left to the scheduler.
    #[arg(long, value_name = "NEAR,FAR", value_delimiter = ',')]
    pub(super) pin: Vec<usize>,
    /// Send one way instead of there and back: 256 KiB of warm memory, over and over.
    #[arg(long)]
    pub(super) stream: bool,
    /// With --stream: bytes of memory to receive into, one piece after the other. A reader with four requests
    /// of 1 MiB under way fills 4M, which is evicted from the processor's caches sooner than 256K.
    #[arg(long, value_name = "N", value_parser = parse_bytes, default_value = "256K", requires = "stream")]
    pub(super) into: u64,
    /// Send pages of this file with sendfile, as a stream or as replies.
    #[arg(long, value_name = "FILE")]
    pub(super) sendfile: Option<PathBuf>,
    /// Client processes with a connection each. The far end has a thread for each processor.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) procs: usize,
    /// Run as the far end; a measurement starts it by itself.
    #[arg(long, hide = true)]
    pub(super) far: bool,
    /// Run as one of several client processes, over the socket that is at this address.
    #[arg(long, hide = true)]
    pub(super) near: Option<SocketAddr>,
}

/// The channels to send bytes over.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// TCP over loopback.
    Tcp,
    /// A pair of Unix stream sockets.
    Unix,
    /// Shared memory, both ends spinning.
    Shm,
    /// Shared memory, both ends sleeping on futexes.
    Futex,
}

impl Kind {
    fn shares_memory(self) -> bool {
        matches!(self, Self::Shm | Self::Futex)
    }

    /// The name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Shm => "shm",
            Self::Futex => "futex",
        }
    }
}

impl Args {
    /// The arguments of a command line without other flags.
    pub(super) fn new(kind: Kind, secs: f64) -> Self {
        Self {
            kind,
            request: 60,
            reply: 180,
            secs,
            ramp: 0.0,
            spin: false,
            pin: Vec::new(),
            stream: false,
            into: PIECE_BYTES as u64,
            sendfile: None,
            procs: 1,
            far: false,
            near: None,
        }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let sizes = 1..=MESSAGE_BYTES_MAX;
        if !sizes.contains(&self.request) || !sizes.contains(&self.reply) {
            return Err(format!("--request, --reply: expected 1 to {MESSAGE_BYTES_MAX}"));
        }
        let piece = PIECE_BYTES as u64;
        if !(piece..=1 << 30).contains(&self.into) || !self.into.is_multiple_of(piece) {
            return Err("--into: expected a multiple of 256K, up to 1G".into());
        }
        check_length(self.ramp, self.secs)?;
        if !matches!(self.pin.len(), 0 | 2) {
            return Err("--pin: expected two processors, NEAR,FAR".into());
        }
        let spins = self.spin || self.kind == Kind::Shm;
        if spins && self.pin.len() == 2 && self.pin[0] == self.pin[1] {
            return Err("spinning on both ends needs two processors: try --pin 0,1".into());
        }
        if self.kind.shares_memory() && self.stream {
            return Err(
                "--stream is for sockets; the limit of shared memory is memcpy, see `bench limits`"
                    .into(),
            );
        }
        if self.kind.shares_memory() && self.sendfile.is_some() {
            return Err("--sendfile is for sockets".into());
        }
        if !(1..=raw_clients::PROCS_MAX).contains(&self.procs) {
            return Err(format!("--procs: expected 1 to {}", raw_clients::PROCS_MAX));
        }
        let plain = self.kind == Kind::Tcp && !self.stream && !self.spin && self.pin.is_empty();
        if self.procs > 1 && !plain {
            return Err("--procs is for requests over TCP, without --spin and --pin".into());
        }
        if self.kind == Kind::Futex && self.spin {
            return Err("--kind futex always sleeps; use --kind shm to spin".into());
        }
        Ok(())
    }
}

/// Runs the measurement and prints the result, or runs as its far end.
pub(super) fn run(args: &Args) -> Result<(), String> {
    if args.far {
        return far_end(args).map_err(|error| format!("far end: {error}"));
    }
    if let Some(address) = args.near {
        return raw_clients::near_end(args, address);
    }
    if args.procs > 1 {
        return say(summary(&raw_clients::measure(args)?));
    }
    let (measured, far_seconds) = measure_both(args)?;
    let mut summary = summary(&[measured]);
    summary["far_cpu_secs"] = far_seconds.into();
    say(summary)
}

/// Runs one measurement.
pub(super) fn measure(args: &Args) -> Result<Measured, String> {
    measure_both(args).map(|(measured, _)| measured)
}

/// Runs one measurement; also returns the CPU seconds of the far end.
fn measure_both(args: &Args) -> Result<(Measured, f64), String> {
    args.check()?;
    let usable = processor::usable();
    if let Some(absent) = args.pin.iter().find(|processor| !usable.contains(processor)) {
        return Err(format!("--pin: processor {absent} is not one of {usable:?}"));
    }
    let name = args.kind.name();
    let failed = |error: io::Error| format!("{name}: {error}");
    let _pinned = args.pin.first().map(|processor| Pinned::to(*processor)).transpose()?;
    if args.kind.shares_memory() {
        let memory = SharedMemory::create("towline-bench", shared::bytes(args)).map_err(failed)?;
        let far = memory.fd().try_clone_to_owned().map_err(failed)?;
        let far = Far::start(args, far).map_err(failed)?;
        let mut end = End::new(args, memory);
        let outcome = repeat(args, || {
            end.ask();
            Ok(())
        });
        return Ok((outcome.map_err(failed)?, cpu_seconds(&far.0)));
    }
    let (near, far) = pair(args.kind).map_err(failed)?;
    let far = Far::start(args, far).map_err(failed)?;
    let outcome = if args.stream { take(&near, args) } else { ask(&near, args) };
    Ok((outcome.map_err(failed)?, cpu_seconds(&far.0)))
}

/// Receives a stream.
fn take(socket: &OwnedFd, args: &Args) -> io::Result<Measured> {
    let mut memory = vec![0; args.into as usize];
    let mut next = 0;
    let mut measured = repeat(args, || {
        let piece = &mut memory[next..][..PIECE_BYTES];
        next = (next + PIECE_BYTES) % args.into as usize;
        receive(socket, piece, args.spin)
    })?;
    measured.read_bytes = measured.operations * PIECE_BYTES as u64;
    Ok(measured)
}

/// Sends requests and waits for the reply to each.
pub(super) fn ask(socket: &OwnedFd, args: &Args) -> io::Result<Measured> {
    let (request, mut reply) = (vec![1; args.request], vec![0; args.reply]);
    let mut measured = repeat(args, || {
        send(socket, &request)?;
        receive(socket, &mut reply, args.spin)
    })?;
    measured.read_bytes = measured.operations * args.reply as u64;
    measured.written_bytes = measured.operations * args.request as u64;
    Ok(measured)
}

/// Answers requests, one after the other.
pub(super) struct Answers {
    spin: bool,
    request: Vec<u8>,
    reply: Vec<u8>,
    file: Option<File>,
    length: u64,
    offset: u64,
}

impl Answers {
    /// # Errors
    /// The file to send cannot be opened, or is shorter than a reply.
    pub(super) fn new(args: &Args) -> io::Result<Self> {
        let file = args.sendfile.as_ref().map(File::open).transpose()?;
        let length = file.as_ref().map_or(Ok(0), |file| file.metadata().map(|data| data.len()))?;
        if file.is_some() && length < args.reply as u64 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("the file to send has {length} bytes, fewer than a reply"),
            ));
        }
        let (request, reply) = (vec![0; args.request], vec![1; args.reply]);
        Ok(Self { spin: args.spin, request, reply, file, length, offset: 0 })
    }

    /// Receives a request and sends the reply.
    pub(super) fn one(&mut self, socket: &OwnedFd) -> io::Result<()> {
        receive(socket, &mut self.request, self.spin)?;
        let Some(file) = &self.file else { return send(socket, &self.reply) };
        let bytes = self.reply.len() as u64;
        if self.offset + bytes > self.length {
            self.offset = 0;
        }
        let end = self.offset + bytes;
        while self.offset < end {
            let left = (end - self.offset) as usize;
            if rustix::fs::sendfile(socket, file, Some(&mut self.offset), left)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }
}

/// Times `one` over and over. The first call is not counted, since the far end is still starting, nor is what `--ramp`
/// excludes.
fn repeat(args: &Args, mut one: impl FnMut() -> io::Result<()>) -> io::Result<Measured> {
    let mut measured = Measured::new();
    let begin = Instant::now() + Duration::from_secs_f64(args.ramp);
    one()?;
    while Instant::now() < begin {
        one()?;
    }
    measured.start(0.0);
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(args.secs);
    let mut now = start;
    while now < end {
        one()?;
        let then = Instant::now();
        measured.one(then - now, false);
        now = then;
    }
    measured.end();
    Ok(measured)
}

fn far_end(args: &Args) -> io::Result<()> {
    end_with_parent();
    let pinned = args.pin.get(1).map(|processor| Pinned::to(*processor)).transpose();
    let _pinned = pinned.map_err(io::Error::other)?;
    let given = io::stdin().as_fd().try_clone_to_owned()?;
    if args.kind.shares_memory() {
        let mut end = End::new(args, SharedMemory::open(given, shared::bytes(args), true)?);
        loop {
            end.answer();
        }
    }
    if !args.stream {
        let mut answers = Answers::new(args)?;
        loop {
            answers.one(&given)?;
        }
    }
    if let Some(path) = &args.sendfile {
        return send_file(&given, &File::open(path)?);
    }
    let piece = vec![1; PIECE_BYTES];
    loop {
        send(&given, &piece)?;
    }
}

fn send_file(socket: &OwnedFd, file: &File) -> io::Result<()> {
    let length = file.metadata()?.len();
    if length == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file to send is empty"));
    }
    loop {
        let mut offset = 0;
        while offset < length {
            if rustix::fs::sendfile(socket, file, Some(&mut offset), PIECE_BYTES)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

fn send(socket: &OwnedFd, mut data: &[u8]) -> io::Result<()> {
    while !data.is_empty() {
        match rustix::net::send(socket, data, SendFlags::NOSIGNAL) {
            Ok(count) => data = &data[count..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn receive(socket: &OwnedFd, target: &mut [u8], spin: bool) -> io::Result<()> {
    let flags = if spin { RecvFlags::DONTWAIT } else { RecvFlags::WAITALL };
    let mut filled = 0;
    while filled < target.len() {
        match rustix::net::recv(socket, &mut target[filled..], flags) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((count, _)) => filled += count,
            Err(Errno::AGAIN) if spin => std::hint::spin_loop(),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Returns both ends of a connection.
fn pair(kind: Kind) -> io::Result<(OwnedFd, OwnedFd)> {
    if kind == Kind::Unix {
        let (near, far) = UnixStream::pair()?;
        return Ok((near.into(), far.into()));
    }
    let listener = listen()?;
    let near = connect(listener.local_addr()?)?;
    Ok((near, accept(&listener)?))
}

/// Listens as Towline's servers do, and [`connect`] connects as its clients do. Otherwise the pacing of BBR would be
/// measured.
pub(super) fn listen() -> io::Result<TcpListener> {
    let listener = match &Listener::bind(&Address::Tcp((Ipv4Addr::LOCALHOST, 0).into()))? {
        Listener::Tcp(listener, _) => listener.try_clone()?,
        _ => unreachable!("bound to TCP"),
    };
    listener.set_nonblocking(false)?;
    Ok(listener)
}

pub(super) fn connect(address: SocketAddr) -> io::Result<OwnedFd> {
    Ok(connect_stream(address, Duration::from_secs(5))?.into())
}

pub(super) fn accept(listener: &TcpListener) -> io::Result<OwnedFd> {
    let (far, _) = listener.accept()?;
    far.set_nodelay(true)?;
    Ok(far.into())
}

/// The process at the far end, which is killed when dropped.
struct Far(Child);

impl Far {
    fn start(args: &Args, socket: OwnedFd) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench", "net", "--far", "--kind", args.kind.name()]);
        command.args(["--request", &args.request.to_string(), "--reply", &args.reply.to_string()]);
        if let [near, far] = args.pin[..] {
            command.args(["--pin", &format!("{near},{far}")]);
        }
        for (flag, set) in [("--spin", args.spin), ("--stream", args.stream)] {
            command.args(set.then_some(flag));
        }
        if let Some(path) = &args.sendfile {
            command.arg("--sendfile").arg(path);
        }
        Ok(Self(command.stdin(Stdio::from(socket)).stdout(Stdio::null()).spawn()?))
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn measurements_without_sense_are_refused() {
        for (line, sense) in [
            ("x", true),
            ("x --pin 0", false),
            ("x --pin 0,1 --spin", true),
            ("x --pin 1,1 --spin", false),
            ("x --pin 1,1 --kind shm", false),
            ("x --pin 1,1 --kind futex", true),
            ("x --kind futex --spin", false),
            ("x --kind shm --stream", false),
            ("x --stream --into 4M", true),
            ("x --stream --into 300K", false),
            ("x --sendfile file", true),
            ("x --sendfile file --kind futex", false),
            ("x --procs 184", true),
            ("x --procs 0", false),
            ("x --procs 2 --kind unix", false),
            ("x --procs 2 --stream", false),
            ("x --procs 2 --pin 0,1", false),
            ("x --reply 0", false),
            ("x --secs nan", false),
            ("x --secs 0", false),
            ("x --ramp 1", true),
            ("x --ramp inf", false),
        ] {
            let args = Line::parse_from(line.split(' ')).args;
            assert_eq!(args.check().is_ok(), sense, "{line}");
        }
    }

    /// Its other end would wait for ever.
    #[test]
    fn an_empty_file_is_not_sent_over_and_over() {
        let (near, _far) = UnixStream::pair().unwrap();
        let empty = tempfile::tempfile().unwrap();
        let refused = send_file(&near.into(), &empty).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn both_ends_of_shared_memory_see_each_round() {
        let args = Line::parse_from("x --kind futex --reply 4096".split(' ')).args;
        let memory = SharedMemory::create("test", shared::bytes(&args)).unwrap();
        let fd = memory.fd().try_clone_to_owned().unwrap();
        let mut far = End::new(&args, SharedMemory::open(fd, shared::bytes(&args), true).unwrap());
        let mut near = End::new(&args, memory);
        std::thread::scope(|scope| {
            scope.spawn(move || (0..1000).for_each(|_| far.answer()));
            (0..1000).for_each(|_| near.ask());
        });
    }
}
