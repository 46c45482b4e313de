//! Watches of a compound, and the request that waits for their events.

use super::{Compound, Context, Step};
use crate::files::Files;
use crate::watches::{Teller, Told};
use std::sync::Arc;
use towline_mem::Aggregate;
use towline_wire::{Errno, Reply, event};

impl Compound {
    /// Watches an open file for the events of `mask` that it is not watched for yet.
    pub(super) fn watch(
        &mut self,
        context: &mut Context<'_>,
        handle: u64,
        mask: u32,
    ) -> Result<(), Errno> {
        if mask == 0 || mask & !event::ALL != 0 {
            return Err(Errno::EINVAL);
        }
        let handle = self.handle(handle)?;
        let opened = self.at(context, handle)?.into_owned();
        let queue = context.files.with(Files::events);
        // Earlier events are not reported to a client that has not asked for any yet.
        let value = queue.first();
        let missing = opened.watches.missing(mask);
        if missing != 0 {
            let teller = Teller::new(queue, handle, missing, &opened.watches);
            let tells = teller.tells;
            let watch = opened.file.watch(tells & event::ALL, Arc::new(teller))?;
            context.files.with(|files| files.keep_watch(handle, tells, watch))?;
        }
        self.result(&Reply::Number { value });
        Ok(())
    }

    /// Reports what has happened, or waits for it.
    pub(super) fn events(&mut self, context: &mut Context<'_>, seen: u64) -> Option<Step> {
        let queue = context.files.with(Files::events);
        let turn = *self.turn.get_or_insert_with(|| queue.ask());
        let Some(Told { next, lost, bytes }) = queue.tell(turn, seen) else {
            return Some(Step::Events(queue, turn));
        };
        self.turn = None;
        self.result(&Reply::Events { next, lost: lost.into(), length: bytes.len() as u32 });
        self.data = Aggregate::from_vec(bytes);
        None
    }

    /// True while it waits for events.
    #[must_use]
    pub fn waits_for_events(&self) -> bool {
        self.turn.is_some()
    }

    /// Stops waiting for events; run again afterwards.
    pub fn interrupted(&mut self) {
        self.turn = None;
        self.fail(Errno::EINTR);
    }
}
