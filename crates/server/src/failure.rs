//! Panics outside of a single request, and failures of an event loop: they end the whole server, with an
//! error.
//!
//! The state of a panicked core cannot be trusted, and its sessions have no other core. So all cores end, as
//! when the server is stopped. Clients lose their connections, look for a server again, and continue with the
//! next one.

use crate::core::Shared;
use crate::guarded::unless_panics;
use parking_lot::Mutex;

type Tell = Box<dyn FnOnce(&str) + Send>;

/// The state of the server, and the callback to call when it fails.
#[derive(Default)]
pub(crate) struct Failure(Mutex<State>);

#[derive(Default)]
enum State {
    #[default]
    Unwatched,
    Watched(Tell),
    Failed(String),
}

impl Failure {
    /// Sets the callback for a failure; calls it at once if the server has already failed.
    pub(crate) fn watch(&self, tell: Tell) {
        let mut state = self.0.lock();
        match &*state {
            State::Failed(why) => tell(why),
            _ => *state = State::Watched(tell),
        }
    }

    fn set(&self, why: &str) {
        let before = std::mem::replace(&mut *self.0.lock(), State::Failed(why.to_owned()));
        if let State::Watched(tell) = before {
            tell(why);
        }
    }
}

/// Runs the work of a core, which returns an error if it ends without having been told to.
pub(crate) fn work_of_core(
    shared: &Shared,
    core: usize,
    work: impl FnOnce() -> Result<(), String>,
) {
    let why = match unless_panics(work) {
        Some(Ok(())) => return,
        Some(Err(why)) => format!("core {core} cannot continue: {why}; the server stops"),
        None => format!("core {core} failed because of a bug in the server, which stops"),
    };
    log::error!("{why}");
    shared.tell_to_end();
    // No other thread does this core's work, so new clients, or those handed over, must not be left waiting.
    shared.cores[core].turns.sleeps();
    shared.mailboxes[core].take();
    if core == 0 {
        shared.listeners.write().clear();
    }
    shared.failure.set(&why);
}
