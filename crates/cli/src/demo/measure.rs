//! The measurements of the tour: the same five, locally and over each route.

use super::sample::Plan;
use crate::remote::Place;
use crate::report::{Failure, Outcome};
use crate::text::human;
use std::collections::VecDeque;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Numbers of repetitions, and the time after which there are no more.
const REPEAT: usize = 2000;
const REPEAT_FEW: usize = 15;
const TIME_MAX: Duration = Duration::from_millis(400);
/// Bytes read from a file in "open, read, close".
const SMALL_BYTES: usize = 4096;
/// Bytes per call of a sequential read, and the maximum read from the largest file.
const PIECE_BYTES: usize = 1 << 20;
const SEQUENTIAL_BYTES_MAX: u64 = 256 << 20;
/// Number of listings under way in a scan.
const AHEAD: usize = 16;

/// The medians of one column.
pub(super) struct Figures {
    stat: Duration,
    read: Duration,
    list: Duration,
    scan: Duration,
    sequential: Option<Duration>,
}

/// Returns the median time of `action`, called with 0, 1, 2 and so on.
fn median(repeat: usize, mut action: impl FnMut(usize) -> Outcome<()>) -> Outcome<Duration> {
    let started = Instant::now();
    let mut times = Vec::with_capacity(repeat);
    // The first call warms up caches and connections and is not measured.
    action(0)?;
    for round in 0..repeat {
        let before = Instant::now();
        action(round)?;
        times.push(before.elapsed());
        if started.elapsed() > TIME_MAX && round >= 2 {
            break;
        }
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// Measures the local file system.
pub(super) fn local(plan: &Plan) -> Outcome<Figures> {
    let path = |round: usize| plan.top.join(&plan.files[round % plan.files.len()]);
    let mut buffer = vec![0; PIECE_BYTES];
    let stat = median(REPEAT, |round| Ok(fs::symlink_metadata(path(round)).map(drop)?))?;
    let read = median(REPEAT, |round| {
        let mut file = fs::File::open(path(round))?;
        // Files may be shorter.
        let _ = file.read(&mut buffer[..SMALL_BYTES])?;
        Ok(())
    })?;
    let fullest = plan.top.join(&plan.fullest.0);
    let list = median(REPEAT_FEW, |_| list_local(&fullest).map(drop))?;
    let scan = median(REPEAT_FEW, |_| {
        for directory in &plan.directories {
            // Directories that cannot be listed are skipped on both sides.
            let _ = list_local(&plan.top.join(directory));
        }
        Ok(())
    })?;
    let sequential = sequential(plan, |path| {
        let file = fs::File::open(plan.top.join(path))?;
        Ok(move |buffer: &mut [u8], offset| Ok(file.read_at(buffer, offset)?))
    })?;
    Ok(Figures { stat, read, list, scan, sequential })
}

fn list_local(directory: &Path) -> Outcome<usize> {
    let mut count = 0;
    for entry in fs::read_dir(directory)? {
        entry?.metadata()?;
        count += 1;
    }
    Ok(count)
}

/// Measures one route.
pub(super) fn remote(plan: &Plan, root: &Place) -> Outcome<Figures> {
    let bytes = |path: &PathBuf| path.as_os_str().as_bytes().to_vec();
    let paths: Vec<Vec<u8>> = plan.files.iter().map(bytes).collect();
    let path = |round: usize| paths[round % paths.len()].as_slice();
    let mut buffer = vec![0; PIECE_BYTES];
    let stat = median(REPEAT, |round| Ok(root.base.stat_path(path(round), false).map(drop)?))?;
    let read = median(REPEAT, |round| {
        root.base.read_path(path(round), 0, &mut buffer[..SMALL_BYTES])?;
        Ok(())
    })?;
    let fullest = root.child(&bytes(&plan.fullest.0));
    let list = median(REPEAT_FEW, |_| list_remote(&fullest))?;
    let directories: Vec<Place> = plan.directories.iter().map(|d| root.child(&bytes(d))).collect();
    let scan = median(REPEAT_FEW, |_| scan_remote(&directories))?;
    let sequential = sequential(plan, |path| {
        let file = root.base.open(&bytes(path), 0, 0)?;
        Ok(move |buffer: &mut [u8], offset| Ok(file.read_at(buffer, offset)?))
    })?;
    Ok(Figures { stat, read, list, scan, sequential })
}

fn list_remote(directory: &Place) -> Outcome<()> {
    let (entries, end) = directory.base.start_list_path(directory.path(), 0, true)?.wait()?;
    if !end {
        let cookie = entries.last().map_or(0, |entry| entry.cookie);
        let open = directory.base.open(directory.path(), crate::remote::flag::DIRECTORY, 0)?;
        list_rest(&open, cookie)?;
    }
    Ok(())
}

fn list_rest(open: &towline_client::File, mut cookie: u64) -> Outcome<()> {
    loop {
        let (entries, end) = open.list(cookie, true)?;
        match entries.last() {
            Some(entry) if !end => cookie = entry.cookie,
            _ => return Ok(()),
        }
    }
}

fn scan_remote(directories: &[Place]) -> Outcome<()> {
    let mut under_way = VecDeque::with_capacity(AHEAD);
    let mut next = directories.iter();
    loop {
        while under_way.len() < AHEAD {
            let Some(directory) = next.next() else { break };
            let started = directory.base.start_list_path(directory.path(), 0, true)?;
            under_way.push_back((directory, started));
        }
        let Some((directory, operation)) = under_way.pop_front() else { return Ok(()) };
        match operation.wait() {
            Ok((_, true)) => (),
            Ok((_, false)) => list_remote(directory)?,
            // As locally, directories that cannot be listed are skipped.
            Err(towline_client::Error::Errno(_)) => (),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Measures reading the largest file piece by piece. Returns `None` if no file is large enough.
fn sequential<R: Fn(&mut [u8], u64) -> Outcome<usize>>(
    plan: &Plan,
    open: impl Fn(&PathBuf) -> Outcome<R>,
) -> Outcome<Option<Duration>> {
    let length = plan.largest.1.min(SEQUENTIAL_BYTES_MAX);
    if length < PIECE_BYTES as u64 {
        return Ok(None);
    }
    let read = open(&plan.largest.0)?;
    let mut buffer = vec![0; PIECE_BYTES];
    let time = median(REPEAT_FEW, |_| {
        let mut at = 0;
        while at < length {
            match read(&mut buffer, at)? {
                0 => return Err(Failure::new("the file became shorter while it was read")),
                count => at += count as u64,
            }
        }
        Ok(())
    })?;
    Ok(Some(time))
}

/// Formats the medians of all columns.
pub(super) fn table(plan: &Plan, columns: &[(String, Figures)]) -> String {
    let each = |show: &dyn Fn(&Figures) -> String| -> Vec<String> {
        columns.iter().map(|(_, figures)| show(figures)).collect()
    };
    let rate = |time: Duration, amount: f64| amount / time.as_secs_f64().max(1e-9);
    let entries = plan.entries as f64;
    let length = plan.largest.1.min(SEQUENTIAL_BYTES_MAX) as f64;
    let rows = [
        (String::new(), columns.iter().map(|(name, _)| name.clone()).collect()),
        ("stat, different files".to_owned(), each(&|f| micros(f.stat))),
        (format!("open, read {SMALL_BYTES}, close"), each(&|f| micros(f.read))),
        (format!("list {} entries with attributes", plan.fullest.1), each(&|f| micros(f.list))),
        (
            format!("scan {} entries in {} directories", plan.entries, plan.directories.len()),
            each(&|f| format!("{:.0} k/s", rate(f.scan, entries) / 1e3)),
        ),
        (
            format!("read {} in pieces of 1M", human(length as u64)),
            each(&|f| {
                let shown = |time| format!("{}/s", human(rate(time, length) as u64));
                f.sequential.map_or("-".to_owned(), shown)
            }),
        ),
    ];
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut text = String::from("Medians, one request after the other (16 at once in the scan):\n");
    for (name, cells) in &rows {
        text.push_str(&format!("  {name:<42}"));
        for cell in cells {
            text.push_str(&format!("{cell:>12}"));
        }
        text.push('\n');
    }
    text.push_str(&format!(
        "\nClient and server share the {cpus} processors of this machine, and a file used before is in \
         its\nmemory: local access is the limit, not a rival. `towline bench` measures with more \
         care."
    ));
    text
}

fn micros(time: Duration) -> String {
    format!("{:.1} us", time.as_secs_f64() * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle() {
        let mut calls = 0;
        let time = median(5, |_| {
            calls += 1;
            Ok(())
        });
        assert!(time.unwrap() < TIME_MAX);
        assert_eq!(calls, 6, "one to warm up");
        assert!(median(5, |_| Err(Failure::new("no"))).is_err());
    }
}
