//! What this machine can do at best, as one JSON object.

use super::raw::{self, Kind};
use super::result::Measured;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Arguments of `bench limits`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds for each.
    #[arg(long, default_value_t = 0.5)]
    secs: f64,
    /// A local directory to list and whose files to stat.
    #[arg(long, default_value = "/usr/include")]
    dir: PathBuf,
}

fn median_us(measured: &Measured) -> f64 {
    measured.latencies.value_at_quantile(0.5) as f64 / 1000.0
}

/// Runs all and prints them.
pub(super) fn run(args: &Args) -> Result<(), String> {
    let failed = |error: std::io::Error| error.to_string();
    let raw = |kind, reply| {
        let args = raw::Args { kind, request: 60, reply, secs: args.secs, stream: None };
        raw::measure(&args).map(|m| median_us(&m)).map_err(failed)
    };
    let length = Duration::from_secs_f64(args.secs);
    println!(
        "{}",
        serde_json::json!({
            "tcp_round_trip_us": raw(Kind::Tcp, 180)?,
            "tcp_4k_round_trip_us": raw(Kind::Tcp, 4140)?,
            "unix_round_trip_us": raw(Kind::Unix, 180)?,
            "unix_4k_round_trip_us": raw(Kind::Unix, 4140)?,
            "memcpy_bytes_per_s": memcpy(length),
            "local_stat_us": local_stat(&args.dir, length).map_err(failed)?,
            "local_scan_entries_per_s": local_scan(&args.dir, length).map_err(failed)?,
        })
    );
    Ok(())
}

/// Copies 1 MiB pieces of a buffer larger than the caches.
fn memcpy(length: Duration) -> f64 {
    let source = vec![1u8; 64 << 20];
    let mut target = vec![0u8; 64 << 20];
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

fn local_stat(path: &Path, length: Duration) -> std::io::Result<f64> {
    let mut measured = Measured::new();
    let start = Instant::now();
    while start.elapsed() < length {
        let one = Instant::now();
        std::fs::metadata(path)?;
        measured.one(one.elapsed(), false);
    }
    Ok(median_us(&measured))
}

fn local_scan(path: &Path, length: Duration) -> std::io::Result<f64> {
    let (start, mut entries) = (Instant::now(), 0u64);
    while start.elapsed() < length {
        for entry in std::fs::read_dir(path)? {
            // DirEntry::metadata is one statx relative to the directory.
            entry?.metadata()?;
            entries += 1;
        }
    }
    Ok(entries as f64 / start.elapsed().as_secs_f64())
}
