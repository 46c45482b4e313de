//! Watching files: the server reports what happens to them, whoever does it.
//!
//! The server keeps the events it reports until the next request says that they were seen. So the
//! client simply asks again if an answer is lost, and of two threads that receive the same events
//! only the first one passes them on.

use crate::convert::{number, unexpected};
use crate::operation::Operation;
use crate::{Client, Error, File};
use std::sync::atomic::Ordering;
use towline_wire::event::{Event, Events};
use towline_wire::limits::EVENTS_BYTES_MAX;
use towline_wire::{Reply, Request};

/// What has happened to watched files, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // as in the answer
pub struct Happenings {
    /// The events that are known.
    pub events: Vec<Happening>,
    /// Events are missing, or the server was restarted. After a restart it watches nothing, and
    /// files have to be watched again.
    pub lost: bool,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // as in the protocol
pub struct Happening {
    /// Handle of the watched file ([`File::handle`]), which may have been closed meanwhile.
    pub handle: u64,
    /// What happened: bits of [`towline_wire::event`].
    pub mask: u32,
    /// Common to both halves of a move; otherwise zero.
    pub cookie: u32,
    /// Name in the watched directory; empty for the watched file itself.
    pub name: Vec<u8>,
}

impl From<Event<'_>> for Happening {
    fn from(event: Event<'_>) -> Self {
        let Event { handle, mask, cookie, name } = event;
        Self { handle, mask, cookie, name: name.to_vec() }
    }
}

impl File {
    /// Watches this file, or the entries of this directory, until it is closed. `mask` has bits of
    /// [`towline_wire::event`] up to `ALL`, which are added to those already watched.
    /// [`Client::events`] reports what happens from then on.
    ///
    /// # Errors
    /// `EINVAL` if `mask` has no bits or unknown ones, `EOPNOTSUPP` if the file cannot be watched,
    /// `ENOSPC` if the server may watch no more files, and as `inotify_add_watch(2)`.
    pub fn watch(&self, mask: u32) -> Result<(), Error> {
        let value = self.one(Request::Watch { handle: self.handle, mask }, number)?;
        // A client that has not asked for events yet starts from this number: it misses none, and
        // learns of a restart of the server in between.
        let _ = self.core.seen.compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire);
        Ok(())
    }
}

impl Client {
    /// [`File::watch`] for an open file of this family with a known handle.
    ///
    /// # Errors
    /// As [`File::watch`], and `EBADF` if it is not open.
    pub fn watch(&self, handle: u64, mask: u32) -> Result<(), Error> {
        self.with_handle(handle, 0, |file| file.watch(mask))
    }

    /// Waits for new events of watched files of this session or its family. Only one such request
    /// waits: it returns nothing if another thread of this client or another session of the family
    /// asks meanwhile.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn events(&self) -> Result<Happenings, Error> {
        loop {
            let begins = self.core.seen.load(Ordering::Acquire) == 0;
            let happenings = self.start_events()?.wait()?;
            if !begins || happenings != Happenings::default() {
                return Ok(happenings);
            }
        }
    }

    /// [`Client::events`], completed later. The first one of a client that has watched nothing
    /// itself completes at once. [`Operation::cancel`] gives it up. The events of an operation that
    /// is dropped go to the next one.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_events(&self) -> Result<Operation<Happenings>, Error> {
        let core = self.core.clone();
        let asked = core.seen.load(Ordering::Acquire);
        let place = vec![0; EVENTS_BYTES_MAX];
        self.core.start(
            &[Request::Events { seen: asked }],
            Vec::new(),
            place,
            move |outcome, bytes| {
                let Reply::Events { next, lost, length } = outcome.single()? else {
                    return Err(unexpected());
                };
                let told =
                    bytes.get(..outcome.payload).filter(|told| told.len() == length as usize);
                let events = Events::new(told.ok_or_else(unexpected)?);
                let events =
                    events.map(|event| event.map(Happening::from)).collect::<Result<_, _>>()?;
                if next == 0 {
                    return Err(unexpected());
                }
                // Otherwise another operation received the same events and was faster.
                let seen =
                    core.seen.compare_exchange(asked, next, Ordering::AcqRel, Ordering::Acquire);
                Ok(seen.map_or_else(
                    |_| Happenings::default(),
                    |_| Happenings { events, lost: lost != 0 },
                ))
            },
        )
    }
}
