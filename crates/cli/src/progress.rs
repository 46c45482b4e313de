//! Progress of a copy: a bar on a terminal, or else a line each second if requested.

use crate::report::note;
use crate::text::human;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Milliseconds between two lines where there is no terminal.
const LINE_MS: u64 = 1000;

enum Show {
    Nothing,
    Bar(ProgressBar),
    Lines,
}

/// Counts files and bytes. All workers share it.
pub(crate) struct Progress {
    show: Show,
    started: Instant,
    files_total: AtomicU64,
    files: AtomicU64,
    bytes_total: AtomicU64,
    bytes: AtomicU64,
    /// Bytes that were there already. They count neither as copied nor in the total, so that rate and time left
    /// are those of the copy.
    already: AtomicU64,
    line_ms: AtomicU64,
    summary: bool,
}

impl Progress {
    /// Shows a bar if standard error is a terminal; lines if it is not and `forced`.
    pub(crate) fn new(forced: bool, quiet: bool) -> Self {
        let show = match (quiet, std::io::stderr().is_terminal()) {
            (true, _) => Show::Nothing,
            (false, true) => Show::Bar(bar()),
            (false, false) if forced => Show::Lines,
            (false, false) => Show::Nothing,
        };
        Self {
            show,
            started: Instant::now(),
            files_total: AtomicU64::new(0),
            files: AtomicU64::new(0),
            bytes_total: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            already: AtomicU64::new(0),
            line_ms: AtomicU64::new(LINE_MS),
            summary: forced && !quiet,
        }
    }

    /// Returns the bar, so that messages can be printed above it.
    pub(crate) fn bar(&self) -> Option<ProgressBar> {
        if let Show::Bar(bar) = &self.show { Some(bar.clone()) } else { None }
    }

    /// Adds to the totals. For anything that is not a file, only the bytes count.
    pub(crate) fn found(&self, files: u64, bytes: u64) {
        self.files_total.fetch_add(files, Ordering::Relaxed);
        self.bytes_total.fetch_add(bytes, Ordering::Relaxed);
        self.refresh();
    }

    /// Says how many bytes of data a file had after all, instead of those that were [found](Self::found).
    pub(crate) fn counted(&self, found: u64, counted: u64) {
        self.bytes_total.fetch_add(counted, Ordering::Relaxed);
        self.bytes_total.fetch_sub(found, Ordering::Relaxed);
        self.refresh();
    }

    /// Adds bytes of a file that are done.
    pub(crate) fn bytes(&self, count: u64) {
        self.bytes.fetch_add(count, Ordering::Relaxed);
        self.refresh();
    }

    /// Adds bytes of a file that were there already.
    pub(crate) fn already(&self, count: u64) {
        self.already.fetch_add(count, Ordering::Relaxed);
        self.refresh();
    }

    /// Adds a file that is done.
    pub(crate) fn file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
        self.refresh();
    }

    /// Removes the bar at the end and, if requested, prints a summary.
    pub(crate) fn finish(&self) {
        if let Show::Bar(bar) = &self.show {
            bar.finish_and_clear();
        }
        if self.summary {
            let (files, bytes) = (read(&self.files), read(&self.bytes));
            let seconds = self.started.elapsed().as_secs_f64();
            note(format_args!("{}", summary(files, bytes, read(&self.already), seconds)));
        }
    }

    fn to_copy(&self) -> u64 {
        read(&self.bytes_total).saturating_sub(read(&self.already)).max(read(&self.bytes))
    }

    fn refresh(&self) {
        match &self.show {
            Show::Nothing => (),
            Show::Bar(bar) => {
                bar.set_length(self.to_copy());
                bar.set_position(read(&self.bytes));
                let (files, total) = (read(&self.files), read(&self.files_total));
                if total > 0 {
                    bar.set_message(format!(", {files}/{total} files"));
                }
            }
            Show::Lines => self.line(),
        }
    }

    fn line(&self) {
        let elapsed = self.started.elapsed();
        let now = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let due = read(&self.line_ms);
        let next = now + LINE_MS;
        let order = Ordering::Relaxed;
        if now < due || self.line_ms.compare_exchange(due, next, order, order).is_err() {
            return;
        }
        let (bytes, total) = (read(&self.bytes), self.to_copy());
        let files = match read(&self.files_total) {
            0 => String::new(),
            total => format!("{}/{total} files, ", read(&self.files)),
        };
        let already = there_already(read(&self.already));
        note(format_args!("{files}{}{already}", rates(bytes, total, elapsed)));
    }
}

fn bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    let template = "{bytes}/{total_bytes} [{wide_bar}] {binary_bytes_per_sec}, {eta} left{msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn rates(bytes: u64, total: u64, elapsed: Duration) -> String {
    let rate = bytes as f64 / elapsed.as_secs_f64().max(1e-9);
    let left = if rate > 0.0 { total.saturating_sub(bytes) as f64 / rate } else { 0.0 };
    format!("{}/{} bytes, {}/s, {left:.0} s left", human(bytes), human(total), human(rate as u64))
}

fn summary(files: u64, bytes: u64, already: u64, seconds: f64) -> String {
    let rate = human((bytes as f64 / seconds.max(1e-9)) as u64);
    let files = if files > 0 { format!("{files} files, ") } else { String::new() };
    let already = there_already(already);
    format!("{files}{} bytes in {seconds:.2} s ({rate}/s){already}", human(bytes))
}

fn there_already(bytes: u64) -> String {
    if bytes > 0 { format!(", {} were there already", human(bytes)) } else { String::new() }
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_times_follow_from_the_counts() {
        let text = rates(1 << 20, 3 << 20, Duration::from_secs(2));
        assert_eq!(text, "1.0M/3.0M bytes, 512K/s, 4 s left");
        assert_eq!(rates(0, 0, Duration::ZERO), "0/0 bytes, 0/s, 0 s left");
        assert_eq!(summary(2, 1024, 0, 1.0), "2 files, 1.0K bytes in 1.00 s (1.0K/s)");
    }

    #[test]
    fn what_was_there_already_is_not_copied() {
        let progress = Progress::new(false, true);
        progress.found(2, 3 << 20);
        progress.already(1 << 20);
        progress.bytes(1 << 20);
        assert_eq!((read(&progress.bytes), progress.to_copy()), (1 << 20, 2 << 20));
        // A file had more data than its attributes told, another one less.
        progress.bytes(2 << 20);
        assert_eq!((read(&progress.bytes), progress.to_copy()), (3 << 20, 3 << 20));
        progress.counted(1 << 20, 4 << 20);
        assert_eq!(progress.to_copy(), 5 << 20);
        progress.counted(2 << 20, 0);
        assert_eq!(progress.to_copy(), 3 << 20);
        let text = summary(2, 1024, 700 << 20, 1.0);
        assert_eq!(text, "2 files, 1.0K bytes in 1.00 s (1.0K/s), 700M were there already");
    }
}
