//! Round trips and streams without Towline: the limits that its figures are compared with.

use super::result::{Measured, summary};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Arguments of `bench net`.
#[derive(clap::Args, Clone)]
pub(crate) struct Args {
    /// What to send over.
    #[arg(long, value_enum, default_value = "tcp")]
    pub(crate) kind: Kind,
    /// Bytes of each request.
    #[arg(long, default_value_t = 60)]
    pub(crate) request: usize,
    /// Bytes of each reply.
    #[arg(long, default_value_t = 180)]
    pub(crate) reply: usize,
    /// Seconds to measure.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) secs: f64,
    /// One way instead of there and back: pages of this file by sendfile, over and over.
    #[arg(long, value_name = "FILE")]
    pub(crate) stream: Option<std::path::PathBuf>,
}

/// Kinds of sockets.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// TCP over loopback.
    Tcp,
    /// A pair of Unix stream sockets.
    Unix,
}

trait Stream: Read + Write + Send + std::os::fd::AsFd {}
impl Stream for TcpStream {}
impl Stream for UnixStream {}

fn pair(kind: Kind) -> std::io::Result<(Box<dyn Stream>, Box<dyn Stream>)> {
    if kind == Kind::Unix {
        let (near, far) = UnixStream::pair()?;
        return Ok((Box::new(near), Box::new(far)));
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    Ok((Box::new(near), Box::new(far)))
}

/// Runs the measurement and prints it.
pub(super) fn run(args: &Args) -> Result<(), String> {
    let measured = measure(args).map_err(|error| error.to_string())?;
    println!("{}", summary(&[measured]));
    Ok(())
}

/// One measurement.
pub(super) fn measure(args: &Args) -> std::io::Result<Measured> {
    match &args.stream {
        Some(path) => stream(args, &File::open(path)?),
        None => ping_pong(args),
    }
}

fn ping_pong(args: &Args) -> std::io::Result<Measured> {
    let (mut near, mut far) = pair(args.kind)?;
    let (request, reply) = (args.request.max(1), args.reply.max(1));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut incoming, outgoing) = (vec![0; request], vec![1; reply]);
            // Ends when the other end closes.
            while far.read_exact(&mut incoming).is_ok() && far.write_all(&outgoing).is_ok() {}
        });
        let (outgoing, mut incoming) = (vec![1; request], vec![0; reply]);
        let mut measured = Measured::new();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs_f64(args.secs) {
            let one = Instant::now();
            near.write_all(&outgoing)?;
            near.read_exact(&mut incoming)?;
            measured.one(one.elapsed(), false);
        }
        measured.seconds = start.elapsed().as_secs_f64();
        drop(near);
        Ok(measured)
    })
}

fn stream(args: &Args, file: &File) -> std::io::Result<Measured> {
    let (mut near, far) = pair(args.kind)?;
    let length = file.metadata()?.len();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            loop {
                let mut offset = 0;
                while offset < length {
                    if rustix::fs::sendfile(&far, file, Some(&mut offset), 1 << 20).is_err() {
                        return;
                    }
                }
            }
        });
        let mut buffer = vec![0; 1 << 20];
        let mut measured = Measured::new();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs_f64(args.secs) {
            let one = Instant::now();
            near.read_exact(&mut buffer)?;
            measured.one(one.elapsed(), false);
            measured.read_bytes += buffer.len() as u64;
        }
        measured.seconds = start.elapsed().as_secs_f64();
        drop(near);
        Ok(measured)
    })
}
