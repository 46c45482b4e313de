//! Threads that may block, for work that waits for a device.

use crate::guarded::unless_panics;
use crate::mailbox::{Mail, Mailbox};
use crate::priority::Queue;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;
use towline_reactor::processor;
use towline_store::Caller;

/// Maximum number of threads in a pool: enough to keep a device's queue busy.
pub(crate) const THREADS_MAX: usize = 16;
/// How long a thread stays idle before it ends.
const IDLE: Duration = Duration::from_secs(5);

/// One piece of work. Its result, if it has one, is a message to `reply_to`.
pub(crate) struct Job {
    pub(crate) work: Box<dyn FnOnce() -> Option<Mail> + Send>,
    pub(crate) reply_to: Mailbox,
    /// The work is for a client of low priority.
    pub(crate) low: bool,
}

#[derive(Default)]
struct State {
    jobs: Queue<Job>,
    threads: usize,
    idle: usize,
    /// The last attempt to start a thread failed, which is logged.
    lacking: bool,
}

/// A pool of threads that grows when all are busy and shrinks when they are idle.
#[derive(Clone)]
pub(crate) struct Offload {
    shared: Arc<(Mutex<State>, Condvar)>,
    threads_max: usize,
}

impl Offload {
    pub(crate) fn new(threads_max: usize) -> Self {
        Self { shared: Arc::default(), threads_max }
    }

    #[cfg(test)]
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(crate) fn run(&self, job: Job) {
        let mut state = self.shared.0.lock();
        state.jobs.push(job.low, job);
        if state.idle >= state.jobs.len() {
            self.shared.1.notify_one();
        } else if state.threads < self.threads_max {
            let shared = self.shared.clone();
            match processor::spawn("towline-block", move || work(&shared)) {
                Ok(_) => {
                    state.threads += 1;
                    if std::mem::take(&mut state.lacking) {
                        log::warn!("threads for blocking work can be created again");
                    }
                }
                // If there are other threads, the job waits for one of them; if not, it would wait forever.
                Err(error) if state.threads == 0 => {
                    // Logged once, not for each request.
                    if !std::mem::replace(&mut state.lacking, true) {
                        log::error!(
                            "cannot create a thread for blocking work, which now delays other requests: \
                             {error}; has the limit of processes been reached (ulimit -u, pids.max)?"
                        );
                    }
                    let job = state.jobs.pop();
                    drop(state);
                    if let Some((_, job)) = job {
                        execute(job);
                    }
                }
                Err(_) => {}
            }
        }
    }
}

fn execute(job: Job) {
    match unless_panics(job.work) {
        Some(Some(mail)) => job.reply_to.send(mail),
        Some(None) => {}
        None => job.reply_to.send(Mail::Broken),
    }
}

fn work(shared: &(Mutex<State>, Condvar)) {
    let (state, changed) = shared;
    let mut state = state.lock();
    loop {
        if let Some((_, job)) = state.jobs.pop() {
            parking_lot::MutexGuard::unlocked(&mut state, || execute(job));
            continue;
        }
        state.idle += 1;
        let timed_out = changed.wait_for(&mut state, IDLE).timed_out();
        state.idle -= 1;
        if timed_out && state.jobs.is_empty() {
            state.threads -= 1;
            return;
        }
    }
}

/// Returns the caller for a server that acts as the user who runs it.
pub(crate) fn own_caller() -> Caller {
    let uid = rustix::process::geteuid().as_raw();
    let gid = rustix::process::getegid().as_raw();
    Caller { uid, gid, groups: Arc::new([]), enforce: false }
}
