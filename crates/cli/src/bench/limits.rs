//! `towline bench limits`: the best that this machine can do, as one JSON object.

use super::processor;
use super::raw;
use super::raw_args::{self, Kind, Op};
use super::result::Measured;
use crate::report::say;
use clap::ValueEnum;
use rustix::fs::{AtFlags, CWD, Dir, MemfdFlags, Mode, OFlags};
use serde_json::{Map, Value, json};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of a request, and of a reply with attributes alone or with 4 KiB of data.
const REQUEST_BYTES: u64 = 60;
const REPLIES: [(&str, u64); 2] = [("round_trip_us", 180), ("4k_round_trip_us", 4140)];
/// Bytes of the file that is sent over and over.
const FILE_BYTES: usize = 64 << 20;

const EXAMPLES: &str = "\
Examples:
  towline bench limits
  towline bench limits --op memcpy,sendfile --secs 2
  towline bench limits --op stat,scan --dir /srv/data/tree/d000

Exit status: 0 measured, 1 an operation failed or a value is beyond its limits, 2 wrong usage.";

/// Arguments of `bench limits`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// What to measure; default: everything.
    #[arg(long, value_enum, value_name = "LIMIT,...", value_delimiter = ',')]
    op: Vec<Limit>,
    /// Seconds for each measurement.
    #[arg(long, default_value_t = 0.3)]
    secs: f64,
    /// Local directory to list and stat.
    #[arg(long, default_value = "/usr/bin")]
    dir: PathBuf,
}

/// A limit of this machine.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
#[value(rename_all = "snake_case")]
enum Limit {
    /// Round trips over TCP.
    Tcp,
    /// Round trips over Unix sockets.
    Unix,
    /// Round trips through shared memory, both ends spinning.
    Shm,
    /// Round trips through shared memory, both ends sleeping on futexes.
    Futex,
    /// A stream over TCP from memory.
    Stream,
    /// A stream over TCP from the pages of a file.
    Sendfile,
    /// Copying memory.
    Memcpy,
    /// A system call that does nothing.
    SystemCall,
    /// Attributes of one local file.
    Stat,
    /// Attributes of all files of a local directory.
    Scan,
}

/// Runs the measurements and prints the results.
pub(super) fn run(args: &Args) -> Result<(), String> {
    if !(0.001..=3600.0).contains(&args.secs) {
        return Err("--secs: expected 0.001 to 3600".into());
    }
    let usable = processor::usable();
    let mut found = Map::new();
    for limit in Limit::value_variants() {
        if args.op.is_empty() || args.op.contains(limit) {
            measure(*limit, args, &usable, &mut found)?;
        }
    }
    found.insert("processors".into(), json!(usable.len()));
    say(Value::Object(found))
}

/// Measures one limit, and adds what it is to `found`.
fn measure(
    limit: Limit,
    args: &Args,
    usable: &[usize],
    found: &mut Map<String, Value>,
) -> Result<(), String> {
    let (secs, length) = (args.secs, Duration::from_secs_f64(args.secs));
    let failed = |error| format!("{}: {error}", args.dir.display());
    let mut both_sizes = |kind: Kind| {
        for (name, reply) in REPLIES {
            found
                .insert(format!("{}_{name}", kind.name()), round_trips(kind, reply, secs, usable)?);
        }
        Ok(())
    };
    let (name, value) = match limit {
        Limit::Tcp => return both_sizes(Kind::Tcp),
        Limit::Unix => return both_sizes(Kind::Unix),
        Limit::Shm => return both_sizes(Kind::Shm),
        Limit::Futex => return both_sizes(Kind::Futex),
        Limit::Stream => ("tcp_stream_bytes_per_s", stream(secs, usable, None)?),
        Limit::Sendfile => {
            let file = warm_file().map_err(|error| format!("file in memory: {error}"))?;
            let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
            ("tcp_sendfile_bytes_per_s", stream(secs, usable, Some(path.into()))?)
        }
        Limit::Memcpy => ("memcpy_bytes_per_s", json!(memcpy(length))),
        Limit::SystemCall => ("system_call_us", json!(system_call(length))),
        Limit::Stat => ("local_stat_us", json!(local_stat(&args.dir, length).map_err(failed)?)),
        Limit::Scan => {
            ("local_scan_entries_per_s", json!(local_scan(&args.dir, length).map_err(failed)?))
        }
    };
    found.insert(name.into(), value);
    Ok(())
}

/// Returns the median round trips with both ends on one processor, on two processors, and placed by the
/// scheduler.
fn round_trips(kind: Kind, reply: u64, secs: f64, usable: &[usize]) -> Result<Value, String> {
    let measure = |pin: Vec<usize>| {
        let (request, bs) = (REQUEST_BYTES, Some(reply));
        let args = raw_args::Args { request, bs, pin, ..raw_args::Args::new(kind, secs) };
        raw::measure(&args).map(|measured| measured.median_us())
    };
    let mut times = Map::new();
    // Two ends that spin on one processor would measure the scheduler's time slice.
    if let Some(first) = usable.first().filter(|_| kind != Kind::Shm) {
        times.insert("together".into(), json!(measure(vec![*first, *first])?));
    }
    if let [first, second, ..] = usable {
        times.insert("apart".into(), json!(measure(vec![*first, *second])?));
        times.insert("free".into(), json!(measure(Vec::new())?));
    }
    Ok(Value::Object(times))
}

/// Returns the bytes per second sent in one direction. The ends run on different processors if there are two.
fn stream(secs: f64, usable: &[usize], sendfile: Option<PathBuf>) -> Result<Value, String> {
    let pin = if usable.len() > 1 { usable[..2].to_vec() } else { Vec::new() };
    let args =
        raw_args::Args { op: Op::Stream, sendfile, pin, ..raw_args::Args::new(Kind::Tcp, secs) };
    let measured = raw::measure(&args)?;
    Ok(json!(measured.read_bytes as f64 / measured.seconds))
}

/// Creates a file whose pages are all in memory.
fn warm_file() -> std::io::Result<std::fs::File> {
    let mut file =
        std::fs::File::from(rustix::fs::memfd_create("towline-bench", MemfdFlags::CLOEXEC)?);
    std::io::Write::write_all(&mut file, &vec![1; FILE_BYTES])?;
    Ok(file)
}

/// Copies a buffer larger than the caches in pieces of 1 MiB. Returns bytes per second.
fn memcpy(length: Duration) -> f64 {
    let source = vec![1u8; 64 << 20];
    let mut target = vec![2u8; 64 << 20];
    let (start, mut bytes) = (Instant::now(), 0);
    while start.elapsed() < length {
        for (from, to) in source.chunks(1 << 20).zip(target.chunks_mut(1 << 20)) {
            to.copy_from_slice(from);
            bytes += from.len();
        }
        std::hint::black_box(&mut target);
    }
    bytes as f64 / start.elapsed().as_secs_f64()
}

/// Returns the microseconds that a system call takes that does nothing.
fn system_call(length: Duration) -> f64 {
    const BATCH: u32 = 1000;
    let (start, mut calls) = (Instant::now(), 0.0);
    while start.elapsed() < length {
        for _ in 0..BATCH {
            std::hint::black_box(rustix::process::getppid());
        }
        calls += f64::from(BATCH);
    }
    start.elapsed().as_secs_f64() * 1e6 / calls
}

fn local_stat(path: &Path, length: Duration) -> rustix::io::Result<f64> {
    let mut measured = Measured::new();
    let start = Instant::now();
    while start.elapsed() < length {
        let one = Instant::now();
        rustix::fs::statat(CWD, path, AtFlags::empty())?;
        measured.one(one.elapsed(), false);
    }
    Ok(measured.median_us())
}

fn local_scan(path: &Path, length: Duration) -> rustix::io::Result<f64> {
    let (start, mut entries) = (Instant::now(), 0u64);
    while start.elapsed() < length {
        let directory = rustix::fs::openat(CWD, path, OFlags::DIRECTORY, Mode::empty())?;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            rustix::fs::statat(&directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
            entries += 1;
        }
    }
    Ok(entries as f64 / start.elapsed().as_secs_f64())
}
