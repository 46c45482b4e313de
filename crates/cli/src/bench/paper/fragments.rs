//! Finds the best length of fragments: measures the time of a single read by fragment length.
//!
//! If disk and network work at the same time, a read of `l` bytes in equal fragments of `c` bytes takes T =
//! l/r_disk + c/r_net: the disk's own time, and then the time to send the last fragment. A read that is sent
//! only after the disk has finished is the case c = l. So shorter fragments are better, except for the cost
//! of each one.

use super::measure::{delay_seconds, export, fill, one};
use super::server::Server;
use super::table::size_name;
use super::{Args, DiskName, Files, limit, local, median};
use crate::bench::nbd_client::{Load, Order};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use towline_server::SHORTEST_FRAGMENT;

/// Bytes of the reads.
const SIZES: [u64; 2] = [1 << 20, 8 << 20];

/// The result for one length of fragments on a disk.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    disk: DiskName,
    /// Bytes of a read.
    size: u64,
    /// Bytes of its fragments. `None`: the whole read at once, the network after the disk.
    fragment: Option<u64>,
    /// Tenth percentile of the reads of each round, median of the rounds.
    measured_us: f64,
    /// The formula for equal fragments of this length.
    formula_us: f64,
    /// The formula with the actual, shorter length of the last fragments.
    formula_short_us: f64,
    cpu_s_per_gib: f64,
}

#[derive(Default)]
struct Samples {
    us: Vec<f64>,
    cpu: Vec<f64>,
}

/// Measures all lengths of `--fragments`, and reads without overlap.
pub(super) fn sweep(args: &Args, files: &Files) -> Result<Vec<Row>, String> {
    let disks = [DiskName::Plain, DiskName::Delay].into_iter().filter(|d| args.disks.contains(d));
    let mut servers = Vec::new();
    for disk in disks {
        let direct = if disk == DiskName::Plain { ":direct" } else { "" };
        for fragment in args.fragments.iter().copied().map(Some).chain([None]) {
            let serial = if fragment.is_none() { ":serial" } else { "" };
            let options = format!("{direct}{serial}");
            let server = Server::start(&export(disk, files, args, &options), None, fragment)?;
            servers.push((disk, fragment, server));
        }
    }
    let network = Server::start(&format!("d=mem:{}", args.span), None, None)?;
    fill(&network, args.span).map_err(|error| format!("filling memory: {error}"))?;
    let sizes = SIZES.into_iter().filter(|size| *size <= args.span);
    let mut rows = Vec::new();
    for size in sizes {
        let load = Load {
            writes: false,
            random: false,
            size: size as usize,
            outstanding: 1,
            span: args.span,
            again: false,
            limit: limit(args),
        };
        let (mut disk_us, mut network_us) = (Vec::new(), Vec::new());
        let mut samples: BTreeMap<usize, Samples> = BTreeMap::new();
        for _ in 0..args.rounds {
            let alone = local::direct(&files.plain(), load).map_err(|error| error.to_string())?;
            disk_us.push(undisturbed(alone.whole_us));
            network_us.push(undisturbed(one(&network, Order::Any, load)?.0.whole_us));
            for (at, (_, _, server)) in servers.iter().enumerate() {
                let (outcome, _, cpu) = one(server, Order::Any, load)?;
                let entry = samples.entry(at).or_default();
                entry.us.push(undisturbed(outcome.whole_us));
                entry.cpu.push(cpu / (outcome.bytes as f64 / f64::from(1 << 30)).max(1e-9));
            }
        }
        let (disk_us, network_us) = (median(disk_us), median(network_us));
        for (at, samples) in samples {
            let (disk, fragment, _) = servers[at];
            let alone = match disk {
                DiskName::Delay => delay_seconds(size) * 1e6,
                _ => disk_us,
            };
            let formula = |c: u64| alone + network_us * c as f64 / size as f64;
            let short = fragment.map_or(size, |c| c.min(SHORTEST_FRAGMENT));
            rows.push(Row {
                disk,
                size,
                fragment,
                measured_us: median(samples.us),
                formula_us: formula(fragment.unwrap_or(size)),
                formula_short_us: formula(short),
                cpu_s_per_gib: median(samples.cpu),
            });
        }
    }
    Ok(rows)
}

/// Returns the tenth percentile, since the formula ignores other processes that use the processors.
fn undisturbed(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 10).copied().unwrap_or_default()
}

/// Formats one table for each disk and size.
pub(super) fn text(rows: &[Row]) -> String {
    let mut out = String::new();
    let mut last = None;
    for row in rows {
        if last.replace((row.disk, row.size)) != Some((row.disk, row.size)) {
            let (disk, size) = (row.disk, size_name(row.size));
            // Writing to a string cannot fail.
            let _ = writeln!(
                out,
                "{disk:?} disk, reads of {size}, one at a time, us\n{:>10}{:>10}{:>10}{:>12}{:>10}",
                "fragment", "measured", "formula", "short ends", "CPU s/GiB"
            );
        }
        let fragment = row.fragment.map_or_else(|| "serial".to_owned(), size_name);
        let Row { measured_us, formula_us, formula_short_us, cpu_s_per_gib, .. } = row;
        let _ = writeln!(
            out,
            "{fragment:>10}{measured_us:>10.0}{formula_us:>10.0}{formula_short_us:>12.0}{cpu_s_per_gib:>10.3}"
        );
    }
    out
}
