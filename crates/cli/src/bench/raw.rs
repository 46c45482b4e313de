//! `towline bench net`: round trips and streams between two processes without Towline, the limit for
//! Towline's own figures.
//!
//! The process that runs the measurement is the near end. It starts the same program again as the far end,
//! which inherits its socket or memory as standard input.

use super::processes::cpu_seconds;
use super::processor::{self, Pinned, end_with_parent};
use super::raw_args::{Args, Kind};
use super::raw_clients;
use super::result::{Measured, summary};
use super::shared::{self, End};
use crate::report::say;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use towline_mem::SharedMemory;
use towline_net::address::{Address, Listener, connect_stream};

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
        let outcome = repeat(args, |now| {
            end.ask();
            Ok(now)
        });
        return Ok((outcome.map_err(failed)?, cpu_seconds(&far.0)));
    }
    let (near, far) = pair(args.kind).map_err(failed)?;
    let far = Far::start(args, far).map_err(failed)?;
    let outcome = if args.is_stream() { take(&near, args) } else { ask(&near, args) };
    Ok((outcome.map_err(failed)?, cpu_seconds(&far.0)))
}

/// Receives a stream.
fn take(socket: &OwnedFd, args: &Args) -> io::Result<Measured> {
    let (mut memory, bytes) = (vec![0; args.target_bytes()], args.bytes());
    let mut next = 0;
    let mut measured = repeat(args, |now| {
        let piece = &mut memory[next..][..bytes];
        next = (next + bytes) % args.target_bytes();
        receive(socket, piece, args.spin).map(|()| now)
    })?;
    measured.read_bytes = measured.operations * bytes as u64;
    Ok(measured)
}

/// Sends requests and waits for their replies, with as many under way as `--qd` says.
pub(super) fn ask(socket: &OwnedFd, args: &Args) -> io::Result<Measured> {
    let (request, mut reply) = (vec![1; args.request_bytes()], vec![0; args.bytes()]);
    // When the requests under way were sent.
    let mut sent = VecDeque::from(vec![Instant::now(); args.qd - 1]);
    for _ in 1..args.qd {
        send(socket, &request)?;
    }
    let mut measured = repeat(args, |now| {
        sent.push_back(now);
        send(socket, &request)?;
        receive(socket, &mut reply, args.spin)?;
        Ok(sent.pop_front().unwrap_or(now))
    })?;
    measured.read_bytes = measured.operations * args.bytes() as u64;
    measured.written_bytes = measured.operations * args.request;
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
        if file.is_some() && length < args.bytes() as u64 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("the file to send has {length} bytes, fewer than a reply"),
            ));
        }
        let (request, reply) = (vec![0; args.request_bytes()], vec![1; args.bytes()]);
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

/// Times `one` over and over. It gets the time, and returns when what it has ended began. The first calls are not counted,
/// since the far end is still starting, nor is what `--ramp` excludes.
fn repeat(
    args: &Args,
    mut one: impl FnMut(Instant) -> io::Result<Instant>,
) -> io::Result<Measured> {
    let mut measured = Measured::new();
    let mut now = Instant::now();
    let begin = now + Duration::from_secs_f64(args.ramp);
    // All that may have been under way while the far end started.
    for _ in 0..args.qd {
        one(Instant::now())?;
    }
    loop {
        now = Instant::now();
        if now >= begin {
            break;
        }
        one(now)?;
    }
    measured.start(0.0);
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(args.secs);
    let mut now = start;
    while now < end {
        let began = one(now)?;
        now = Instant::now();
        measured.one(now - began, false);
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
    if !args.is_stream() {
        let mut answers = Answers::new(args)?;
        loop {
            answers.one(&given)?;
        }
    }
    if let Some(path) = &args.sendfile {
        return send_file(&given, &File::open(path)?, args.bytes());
    }
    let piece = vec![1; args.bytes()];
    loop {
        send(&given, &piece)?;
    }
}

fn send_file(socket: &OwnedFd, file: &File, piece: usize) -> io::Result<()> {
    let length = file.metadata()?.len();
    if length == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file to send is empty"));
    }
    loop {
        let mut offset = 0;
        while offset < length {
            if rustix::fs::sendfile(socket, file, Some(&mut offset), piece)? == 0 {
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
        command.args(["--request", &args.request.to_string(), "--bs", &args.bytes().to_string()]);
        if let [near, far] = args.pin[..] {
            command.args(["--pin", &format!("{near},{far}")]);
        }
        command.args(args.spin.then_some("--spin"));
        if args.is_stream() {
            command.args(["--op", "stream"]);
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

    /// Its other end would wait for ever.
    #[test]
    fn an_empty_file_is_not_sent_over_and_over() {
        let (near, _far) = UnixStream::pair().unwrap();
        let empty = tempfile::tempfile().unwrap();
        let refused = send_file(&near.into(), &empty, 4096).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn both_ends_of_shared_memory_see_each_round() {
        let args = Args { bs: Some(4096), ..Args::new(Kind::Futex, 1.0) };
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
