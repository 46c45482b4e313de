//! A session that was given up, and the one that is begun in its place.
//!
//! Nobody knows what the server has done with the requests that have failed then, and they are never sent
//! again. A later request begins another session, as after a restart of a server that does not know the old
//! one: files are opened and locked again. If the server still has the old session, that is ended first.

use super::reconnect::{Outage, unanswered_renames};
use super::waiting::FailOnPanic;
use super::{Core, Receiving, State, Status, connection_error};
use crate::Error;
use crate::disks::Closing;
use crate::handshake::Failure;
use crate::reclaim::{Renamed, RequestNumber};
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long after a failed try to begin a session the next one may follow; longer if that try took longer.
const AGAIN: Duration = Duration::from_millis(500);

/// Why there is no session at the moment.
pub(crate) struct GivenUp {
    /// What requests fail with.
    pub(super) error: Error,
    /// When another one may be begun. `None`: never, since nobody can receive.
    again: Option<Instant>,
    /// What the requests that have failed may have renamed.
    pub(super) renamed: Vec<(RequestNumber, Renamed)>,
}

impl Core {
    /// Ends all requests with this error, and later ones until another session can be begun.
    pub(super) fn give_up(&self, error: &Error) {
        self.fail_all(error, Some(Instant::now() + AGAIN));
    }

    /// Ends all requests with this error, and later ones until a session can be begun after `again`.
    pub(super) fn fail_all(&self, error: &Error, again: Option<Instant>) {
        let mut out = self.out.lock();
        let mut locked = self.state.lock();
        let state = &mut *locked;
        out.messages.clear();
        out.lane += 1;
        state.lane = out.lane;
        let renamed = unanswered_renames(&state.slots, &state.files);
        state.given_up = Some(GivenUp { error: error.clone(), again, renamed });
        if let Some(fd) = state.link.fd() {
            // Lets a server that is still there drop the session's state. Fails if the connection
            // has ended already.
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
        }
        for slot in 0..state.slots.len() {
            let found = &mut state.slots[slot];
            found.sending = 0;
            if matches!(found.status, Status::Waiting) {
                if let Some((handle, lock)) = &found.lock {
                    state.files.give_up(*handle, lock);
                }
                // The other sessions of a family may keep open what this one has closed.
                state.closing.extend(found.closes);
            }
            self.complete(state, slot, Err(error.clone()));
            self.tell(state, slot as u16);
        }
        self.slot_free.notify_all();
    }

    /// Begins another session if this one was given up.
    ///
    /// # Errors
    /// Why the session was given up, or why there is no other one.
    pub(crate) fn recover(self: &Arc<Self>) -> Result<(), Error> {
        let state = self.begin_anew(self.state.lock())?;
        self.leave(state);
        Ok(())
    }

    /// [`Core::recover`] with the state locked. All threads that come meanwhile wait for one try.
    pub(super) fn begin_anew<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
    ) -> Result<MutexGuard<'a, State>, Error> {
        while let Some(GivenUp { error, again, .. }) = &state.given_up {
            if again.is_none_or(|again| Instant::now() < again) {
                return Err(error.clone());
            }
            match state.receiving.take() {
                None => self.slot_free.wait(&mut state),
                Some(receiving) => {
                    drop(state);
                    state = self.try_anew(receiving);
                }
            }
        }
        Ok(state)
    }

    fn try_anew<'a>(self: &'a Arc<Self>, mut receiving: Box<Receiving>) -> MutexGuard<'a, State> {
        let panics = FailOnPanic(self);
        let began = Instant::now();
        let mut outage = receiving.outage.take().unwrap_or_else(Outage::begin);
        let failed = match self.go_on(&mut receiving) {
            Ok(Ok(())) => {
                outage.ends();
                None
            }
            Ok(Err(error)) => Some(self.lost_again(&error)),
            Err(Failure::Final(error)) => Some(error),
            Err(Failure::Io(error)) => {
                let what = "connection lost and not restored";
                Some(connection_error(&self.transport, what, &error))
            }
        };
        receiving.outage = Some(outage);
        std::mem::forget(panics);
        let mut state = self.state.lock();
        if let (Some(error), Some(given_up)) = (failed, &mut state.given_up) {
            given_up.error = error;
            given_up.again = Some(Instant::now() + began.elapsed().max(AGAIN));
        }
        self.slot_free.notify_all();
        self.put_back(&mut state, receiving);
        // What has ended meanwhile comes first.
        MutexGuard::unlocked(&mut state, || self.close_pending());
        state
    }
}

impl State {
    /// Forgets what is closed: it is not opened again.
    pub(super) fn forget(&mut self, closed: Closing) {
        match closed {
            Closing::File(handle) => self.files.forget(handle),
            Closing::Disk(disk) => self.disks.forget(disk),
            Closing::Process(owner) => self.files.end_process(owner),
        }
    }
}
