//! NBD connections move to other cores, see `core/moving.rs`.

use super::lane::{NbdLane, Phase};
use crate::core::{Core, NBD_TOKENS, Place};
use std::sync::atomic::Ordering;

impl NbdLane {
    /// Returns true if nothing is under way but, perhaps, the header of a request.
    fn is_at_rest(&self) -> bool {
        let waits = self.paused || self.is_throttled || self.is_starving || self.is_behind;
        let ends = self.closing || self.hung || self.is_leaving;
        // What was filled last may still be noted.
        let receives = self.awaits_payload() || !self.held.is_empty();
        matches!(self.phase, Phase::Serving(..))
            && !(waits || ends || receives || self.speaking || self.is_dirty)
            && self.statuses == 0
            && self.unreleased == 0
            && self.is_drained()
    }
}

impl Core {
    /// Removes a connection, which moves to another core, if nothing of it is under way.
    pub(crate) fn take_nbd(&mut self, index: usize) -> Option<Box<NbdLane>> {
        // It may be for this connection, though its request is no longer counted.
        if self.engine.has_output() {
            return None;
        }
        let engine = &self.engine;
        let is_at_rest =
            |lane: &mut NbdLane| lane.is_at_rest() && engine.requests_of(lane.owner) == 0;
        let mut lane = self.nbd.lanes.get_mut(index)?.take_if(is_at_rest)?;
        self.nbd.free.push(index);
        self.engine.remove_owner(lane.owner);
        lane.filling = None;
        Some(Box::new(lane))
    }

    /// Serves a connection that another core has handed over.
    pub(crate) fn take_over_nbd(&mut self, mut lane: NbdLane) {
        let Some(index) = self.watch_nbd(&lane.link) else {
            self.statistics.lanes.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        lane.owner = self.engine.add_owner();
        lane.place = Place::default();
        self.nbd.lanes[index] = Some(lane);
        self.nbd.ticking = true;
        // It has sent something.
        self.queue(NBD_TOKENS + index as u64);
    }
}
