//! Measures how much a busy server slows down a memory-bound program: bzip2 in the paper, here a loop that
//! copies memory. The program has a processor of its own; server and client share another one.

use super::measure::export;
use super::server::Server;
use super::{Args, DiskName, Files, Interference, local, median};
use crate::bench::nbd_client::{Client, Load, Order};
use crate::bench::processor;
use crate::report::note;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Each system's name and the options of its disk, which also decide whether its file stays in the page
/// cache.
const SYSTEMS: [(&str, &str); 3] =
    [("staged", ":cached:staged"), ("sendfile", ":cached:sendfile"), ("direct", ":direct")];

/// Measures all systems. Returns nothing if there is only one processor.
pub(super) fn all(args: &Args, files: &Files) -> Result<Vec<Interference>, String> {
    let usable = processor::usable();
    let &[ours, theirs, ..] = usable.as_slice() else {
        note("towline: the interference test needs two processors: skipped");
        return Ok(Vec::new());
    };
    let mut rows = Vec::new();
    let mut samples: Vec<(Vec<f64>, Vec<f64>)> = vec![Default::default(); SYSTEMS.len()];
    let servers: Result<Vec<Server>, String> = SYSTEMS
        .iter()
        .map(|(_, options)| {
            Server::start(&export(DiskName::Plain, files, args, options), Some(ours), None)
        })
        .collect();
    let servers = servers?;
    for _ in 0..args.rounds {
        for (server, (slowdowns, rates)) in servers.iter().zip(&mut samples) {
            let idle = beside(args, theirs, |length| {
                std::thread::sleep(length);
                Ok(0.0)
            })?;
            let busy = beside(args, theirs, |length| load(args, files, server, ours, length))?;
            slowdowns.push(idle.0 / busy.0 - 1.0);
            rates.push(busy.1);
        }
    }
    for ((name, _), (slowdowns, rates)) in SYSTEMS.iter().zip(samples) {
        let (slowdown, bytes_per_s) = (median(slowdowns), median(rates));
        rows.push(Interference { system: name, slowdown, bytes_per_s });
    }
    Ok(rows)
}

/// Runs the memory-bound program beside some work. Returns the MiB per second of the program and the result
/// of the work.
fn beside(
    args: &Args,
    processor: usize,
    work: impl FnOnce(Duration) -> Result<f64, String>,
) -> Result<(f64, f64), String> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let program = scope.spawn(|| local::memory_bound(processor, &over));
        let done = work(Duration::from_secs_f64(args.secs.max(0.2)));
        over.store(true, Ordering::Relaxed);
        let rate = program.join().map_err(|_| "the memory-bound program failed".to_owned())??;
        Ok((rate, done?))
    })
}

/// Reads the whole file again and again, 1 MiB at a time with four requests under way. Returns bytes per
/// second.
fn load(
    args: &Args,
    files: &Files,
    server: &Server,
    processor: usize,
    length: Duration,
) -> Result<f64, String> {
    let _pinned = processor::Pinned::to(processor)?;
    let failed = |error: std::io::Error| error.to_string();
    let mut client = Client::connect(&server.nbd, "", Order::Any).map_err(failed)?;
    let (start, mut bytes) = (Instant::now(), 0);
    while start.elapsed() < length {
        files.forget().map_err(failed)?;
        let limit = length.saturating_sub(start.elapsed());
        let size = args.span.min(1 << 20) as usize;
        let load = Load {
            writes: false,
            random: false,
            size,
            outstanding: 4,
            span: args.span,
            again: false,
            limit,
        };
        bytes += client.run(load).map_err(failed)?.bytes;
    }
    Ok(bytes as f64 / start.elapsed().as_secs_f64())
}
