//! Panics outside of a single request, and event loops that fail: they end the whole server, with an error.
//!
//! The state that a panicked core left behind cannot be trusted, and its sessions have no other core. So all cores end, as
//! when the server is stopped: clients lose their connections, look for a server anew, and go on with the next one.

use crate::core::Shared;
use crate::guarded::unless_panics;
use crate::mailbox::Mail;
use parking_lot::Mutex;

type Tell = Box<dyn FnOnce(&str) + Send>;

/// Whether the server has failed, and who wants to know.
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
    /// Has this called when the server fails, or now if it has failed.
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

/// Does all the work of a core, which says why it cannot go on if it does not end because it was told to.
pub(crate) fn work_of_core(
    shared: &Shared,
    core: usize,
    work: impl FnOnce() -> Result<(), String>,
) {
    let why = match unless_panics(work) {
        Some(Ok(())) => return,
        Some(Err(why)) => format!("core {core} cannot go on: {why}; the server ends"),
        None => format!("core {core} failed by a mistake in the server, which ends"),
    };
    log::error!("{why}");
    for mailbox in &shared.mailboxes {
        mailbox.send(Mail::Shutdown);
    }
    // Nobody else does what this core had to: not to keep clients waiting who come, or are handed over.
    shared.cores[core].turns.sleeps();
    shared.mailboxes[core].take();
    if core == 0 {
        shared.listeners.write().clear();
    }
    shared.failure.set(&why);
}
