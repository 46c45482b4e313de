//! What is compared with the server or runs beside it: the disk itself, and a memory-bound program.

use crate::bench::nbd_client::{Load, Outcome};
use rustix::fs::{Advice, Mode, OFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use towline_mem::aligned_zeroes;

/// Creates a file with `length` bytes of data and writes it to the disk.
pub(super) fn make(path: &Path, length: u64) -> io::Result<()> {
    use std::io::Write;
    let mut file = std::fs::File::create(path)?;
    let block: Vec<u8> =
        (0..1 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for _ in 0..length.div_ceil(block.len() as u64) {
        file.write_all(&block)?;
    }
    file.set_len(length)?;
    file.sync_all()
}

/// Drops a file from the page cache, after syncing it so that all its pages are clean.
pub(super) fn forget(path: &Path) -> io::Result<()> {
    let file = std::fs::File::open(path)?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?)
}

/// Runs the same load on a local file or device, bypassing the page cache, with one thread for each request
/// under way.
pub(super) fn direct(path: &Path, load: Load) -> io::Result<Outcome> {
    let access = if load.writes { OFlags::RDWR } else { OFlags::RDONLY };
    let file = rustix::fs::open(path, access | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?;
    let (next, start) = (AtomicU64::new(0), Instant::now());
    let results: Vec<io::Result<Vec<f64>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..load.outstanding)
            .map(|_| scope.spawn(|| one_thread(&file, load, &next, start)))
            .collect();
        let failed = |_| Err(io::Error::other("a thread failed"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(failed)).collect()
    });
    let mut outcome = Outcome::default();
    for times in results {
        outcome.whole_us.extend(times?);
    }
    if load.writes {
        rustix::fs::fdatasync(&file)?;
    }
    outcome.bytes = outcome.whole_us.len() as u64 * load.size as u64;
    outcome.seconds = start.elapsed().as_secs_f64();
    Ok(outcome)
}

fn one_thread(
    file: &OwnedFd,
    load: Load,
    next: &AtomicU64,
    start: Instant,
) -> io::Result<Vec<f64>> {
    let (mut buffer, at) = aligned_zeroes(load.size);
    let buffer = &mut buffer[at..at + load.size];
    buffer.fill(1);
    let mut times = Vec::new();
    // Make at least one request, however slow the device is.
    while times.is_empty() || start.elapsed() < load.limit {
        let offset = next.fetch_add(load.size as u64, Ordering::Relaxed);
        if offset + load.size as u64 > load.span {
            break;
        }
        let since = Instant::now();
        let moved = match load.writes {
            true => rustix::io::pwrite(file, &*buffer, offset)?,
            false => rustix::io::pread(file, &mut *buffer, offset)?,
        };
        if moved != load.size {
            return Err(io::Error::other("a short transfer"));
        }
        times.push(since.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// Runs a memory-bound program on one processor until `over` is set. Returns the MiB that it copies per
/// second.
pub(super) fn memory_bound(processor: usize, over: &AtomicBool) -> Result<f64, String> {
    let _pinned = crate::bench::processor::Pinned::to(processor)?;
    // More than the cache of any core holds.
    const BYTES: usize = 64 << 20;
    let (from, mut to) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    to.copy_from_slice(&from);
    let (start, mut copied) = (Instant::now(), 0);
    while !over.load(Ordering::Relaxed) || start.elapsed() < Duration::from_millis(50) {
        for (target, source) in to.chunks_mut(1 << 20).zip(from.chunks(1 << 20)) {
            target.copy_from_slice(source);
        }
        std::hint::black_box(&mut to);
        copied += BYTES >> 20;
    }
    Ok(copied as f64 / start.elapsed().as_secs_f64())
}
