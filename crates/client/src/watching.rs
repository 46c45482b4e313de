//! Being told what happens to watched files, by whomever.
//!
//! What a server tells it keeps until the next request says that it was seen. So an answer that was lost is simply asked for again, and of
//! two threads that were told the same only the first one passes it on.

use crate::convert::{number, unexpected};
use crate::operation::Operation;
use crate::{Client, Error, File};
use std::sync::atomic::Ordering;
use towline_wire::event::{Event, Events};
use towline_wire::limits::EVENTS_BYTES_MAX;
use towline_wire::{Reply, Request};

/// What has happened to watched files, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // what an answer says
pub struct Happenings {
    /// What is known of it.
    pub events: Vec<Happening>,
    /// There was more, or the server was started again: then it watches nothing any more, and what is to be watched has to be asked for anew.
    pub lost: bool,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // as the event is in the protocol
pub struct Happening {
    /// Handle of the watched file ([`File::handle`]), which may be closed by now.
    pub handle: u64,
    /// What happened: bits of [`towline_wire::event`].
    pub mask: u32,
    /// The same for both halves of a move; else zero.
    pub cookie: u32,
    /// Name in the watched directory; empty: the watched file itself.
    pub name: Vec<u8>,
}

impl From<Event<'_>> for Happening {
    fn from(event: Event<'_>) -> Self {
        let Event { handle, mask, cookie, name } = event;
        Self { handle, mask, cookie, name: name.to_vec() }
    }
}

impl File {
    /// Watches this file, or the entries of this directory, until it is closed: `mask` has bits of [`towline_wire::event`] up to
    /// `ALL`, which are added to those that are watched for already. [`Client::events`] tells what happens from now on.
    ///
    /// # Errors
    /// `EINVAL` for no bits or others, `EOPNOTSUPP` where nothing can be watched, `ENOSPC` where the server may watch no more, and as
    /// `inotify_add_watch(2)`.
    pub fn watch(&self, mask: u32) -> Result<(), Error> {
        let value = self.one(Request::Watch { handle: self.handle, mask }, number)?;
        // Who has not asked for events yet is told of this one, and whether a restart of the server came between.
        let _ = self.core.seen.compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire);
        Ok(())
    }
}

impl Client {
    /// [`File::watch`] of an open file of this family whose handle is known.
    ///
    /// # Errors
    /// As that, and `EBADF` when it is not open.
    pub fn watch(&self, handle: u64, mask: u32) -> Result<(), Error> {
        self.with_handle(handle, 0, |file| file.watch(mask))
    }

    /// Waits until something has happened to watched files of this session, or of its family, that was not told yet. There is nothing
    /// to tell when another thread of this client, or another session of the family, asks meanwhile: one of them waits.
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

    /// [`Client::events`], completed later; the first one of a client that has watched nothing itself at once. [`Operation::cancel`] gives
    /// it up. What was told to one that is dropped is told to the next.
    ///
    /// # Errors
    /// When it cannot be started.
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
                // Else another one was told the same, and was faster.
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
