//! Lets a command that a signal ends first stop at a point where nothing is left half done.

use crate::report::note;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// How long a command may take to stop; it may, for example, wait for a server that does not answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often to check for a second signal.
const LOOK: Duration = Duration::from_millis(100);

/// Records whether a signal asked this process to end: SIGHUP, SIGINT or SIGTERM, unless it was ignored from
/// the start.
pub(crate) struct Interrupt(Arc<AtomicI32>);

impl Interrupt {
    /// Catches the first of these signals. On the second one, or after five seconds, the process prints
    /// `left` and ends at once. If no thread can be created, the first signal ends the process.
    pub(crate) fn new(left: &'static str) -> Self {
        let came = Arc::new(AtomicI32::new(0));
        let told = came.clone();
        let (ready, is_ready) = channel();
        // Without the thread, signals have their default effect.
        let _ = std::thread::Builder::new().spawn(move || wait(&told, left, ready));
        // Fails if nothing is caught.
        let _ = is_ready.recv();
        Self(came)
    }

    /// Returns true once the command should stop.
    pub(crate) fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Ends the process as the signal would have done, if one has come.
    pub(crate) fn end(&self) {
        let signal = self.0.load(Ordering::Relaxed);
        if signal != 0 {
            // If the process cannot be ended, nobody is left to report that to.
            let _ = emulate_default_handler(signal);
        }
    }
}

/// Waits for the first signal and records it; `ready`: from now on. Ends the process on the next one, or after
/// [`PATIENCE`].
fn wait(told: &AtomicI32, left: &str, ready: Sender<()>) {
    let Some(ignored) = ignored() else { return };
    let wanted = [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|n| ignored >> (n - 1) & 1 == 0);
    let Ok(mut signals) = Signals::new(wanted) else { return };
    let _ = ready.send(());
    let Some(first) = signals.forever().next() else { return };
    told.store(first, Ordering::Relaxed);
    let end = Instant::now() + PATIENCE;
    let signal = loop {
        if let Some(next) = signals.pending().next() {
            break next;
        }
        if Instant::now() >= end {
            break first;
        }
        std::thread::sleep(LOOK);
    };
    note(left);
    let _ = emulate_default_handler(signal);
}

/// Returns the signals that this process ignores, one bit for each, or `None` if they cannot be read.
fn ignored() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}
