//! Signals that end a command which should first stop where nothing half-done is left.

use crate::report::note;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// How long a command may take to stop, for example since a server does not answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often is looked whether somebody is less patient.
const LOOK: Duration = Duration::from_millis(100);

/// Whether a signal asked for the end: SIGHUP, SIGINT or SIGTERM, unless ignored since the beginning.
pub(crate) struct Interrupt(Arc<AtomicI32>);

impl Interrupt {
    /// Takes the first such signal from now on. With the second one, or when five seconds have passed, the process ends
    /// at once, and says `left`. Where no thread can be made for that, the first one ends it.
    pub(crate) fn new(left: &'static str) -> Self {
        let came = Arc::new(AtomicI32::new(0));
        let told = came.clone();
        // Without threads all is as without this.
        let _ = std::thread::Builder::new().spawn(move || wait(&told, left));
        Self(came)
    }

    /// True when it is time to stop.
    pub(crate) fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Ends the process as the signal would have done, if one came.
    pub(crate) fn end(&self) {
        let signal = self.0.load(Ordering::Relaxed);
        if signal != 0 {
            // There is nobody to tell that the process cannot end.
            let _ = emulate_default_handler(signal);
        }
    }
}

fn wait(told: &AtomicI32, left: &str) {
    let Some(ignored) = ignored() else { return };
    let wanted = [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|n| ignored >> (n - 1) & 1 == 0);
    let Ok(mut signals) = Signals::new(wanted) else { return };
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

/// The signals that this process ignores, a bit for each; `None` where nobody knows.
fn ignored() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}
