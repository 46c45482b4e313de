//! Formats the figures as text.

use super::{DiskName, Figures, Point};
use std::fmt::Write;

/// The systems in the order of the paper; those that are only bounds come last.
pub(super) const SYSTEMS: [&str; 8] =
    ["staged", "sendfile", "direct", "synchronised", "streams", "disk", "network", "formula"];

/// Returns the disks with figures.
pub(super) fn disks(figures: &Figures) -> Vec<DiskName> {
    let mut disks = Vec::new();
    for point in &figures.points {
        if !disks.contains(&point.disk) {
            disks.push(point.disk);
        }
    }
    disks
}

/// Returns the numbers of requests under way that have figures.
pub(super) fn outstanding(figures: &Figures) -> Vec<usize> {
    let mut all: Vec<usize> = figures.points.iter().map(|point| point.outstanding).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns the points of one line of a plot, by size.
pub(super) fn line<'a>(
    figures: &'a Figures,
    disk: DiskName,
    writes: bool,
    outstanding: usize,
    system: &str,
) -> Vec<&'a Point> {
    let is = |p: &&Point| {
        (p.disk, p.writes, p.outstanding, p.system) == (disk, writes, outstanding, system)
    };
    let mut line: Vec<&Point> = figures.points.iter().filter(is).collect();
    line.sort_by_key(|point| point.size);
    line
}

pub(super) fn size_name(size: u64) -> String {
    match size {
        size if size % (1 << 20) == 0 => format!("{}M", size >> 20),
        size => format!("{}K", size >> 10),
    }
}

/// Formats all tables.
pub(super) fn text(figures: &Figures) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = tables(figures, &mut out);
    out
}

fn tables(figures: &Figures, out: &mut String) -> std::fmt::Result {
    for disk in disks(figures) {
        for writes in [false, true] {
            for outstanding in outstanding(figures) {
                let what = if writes { "writes" } else { "reads" };
                writeln!(out, "{disk:?} disk, {what}, {outstanding} outstanding, MB/s")?;
                bandwidths(figures, disk, writes, outstanding, out)?;
            }
        }
    }
    writeln!(out, "One read at a time: us for disk alone, both, network alone; CPU s/GiB")?;
    for point in figures.points.iter().filter(|p| p.outstanding == 1 && !p.writes) {
        if let Some([disk, both, network]) = point.stages_us {
            let cpu = point.cpu_s_per_gib.unwrap_or_default();
            writeln!(
                out,
                "{:8} {:>5} {:14}{disk:10.0}{both:10.0}{network:10.0}{cpu:8.3}",
                format!("{:?}", point.disk),
                size_name(point.size),
                point.system
            )?;
        }
    }
    if !figures.interference.is_empty() {
        writeln!(out, "\nSlowdown of a memory-bound program on another processor")?;
    }
    for row in &figures.interference {
        let (slowdown, rate) = (row.slowdown * 100.0, row.bytes_per_s / 1e6);
        writeln!(out, "{:14}{slowdown:8.1} %  beside reads of {rate:.0} MB/s", row.system)?;
    }
    Ok(())
}

fn bandwidths(
    figures: &Figures,
    disk: DiskName,
    writes: bool,
    outstanding: usize,
    out: &mut String,
) -> std::fmt::Result {
    let lines: Vec<_> = SYSTEMS
        .iter()
        .map(|system| (system, line(figures, disk, writes, outstanding, system)))
        .filter(|(_, points)| !points.is_empty())
        .collect();
    write!(out, "{:>8}", "size")?;
    lines.iter().try_for_each(|(system, _)| write!(out, "{system:>14}"))?;
    writeln!(out)?;
    let sizes: Vec<u64> =
        lines.first().map_or(Vec::new(), |(_, points)| points.iter().map(|p| p.size).collect());
    for size in sizes {
        write!(out, "{:>8}", size_name(size))?;
        for (_, points) in &lines {
            let rate = points.iter().find(|point| point.size == size).map(|p| p.bytes_per_s);
            write!(out, "{:>14.1}", rate.unwrap_or(f64::NAN) / 1e6)?;
        }
        writeln!(out)?;
    }
    writeln!(out)
}
