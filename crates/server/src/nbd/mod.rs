//! Serving NBD: connections of a core, and what happens to their requests.
//!
//! A request's way: lane ([`lane`]) -> `nbd::Receiver` -> [`serving`] -> engine of disks -> answers
//! ([`answers`]) -> send queue of the lane. Small reads of what is in memory skip the engine.

mod answers;
pub(crate) mod driver;
mod in_place;
mod lane;
mod lanes;
mod serving;

use crate::core::{Place, Ticket};
use lane::NbdLane;
pub(crate) use serving::Tag;
use std::time::Instant;
use towline_block::Engine;

/// The NBD connections of a core.
pub(crate) struct Nbd {
    lanes: Vec<Option<NbdLane>>,
    free: Vec<usize>,
    /// Lanes with something to send.
    dirty: Vec<usize>,
    /// Empty; kept for its memory, which is that of `dirty` by turns.
    spare: Vec<usize>,
    /// Lanes with requests that were looked at and are not taken.
    behind: Vec<usize>,
    /// Turns since they began to be looked at.
    turns_behind: u32,
    /// Lanes with input that was left unread and may be read now.
    resumable: Vec<usize>,
    /// Lanes that wait for memory for the payload of a write.
    starving: Vec<usize>,
    /// Lanes that may not ask for more before this time.
    throttled: Vec<(Instant, usize)>,
    /// Some lane may have to be ended because it waits too long.
    ticking: bool,
    in_place: in_place::InPlace,
    ticked: Instant,
}

impl Nbd {
    pub(crate) fn new() -> Self {
        Self {
            lanes: Vec::new(),
            free: Vec::new(),
            dirty: Vec::new(),
            spare: Vec::new(),
            behind: Vec::new(),
            turns_behind: 0,
            resumable: Vec::new(),
            starving: Vec::new(),
            throttled: Vec::new(),
            ticking: false,
            in_place: in_place::InPlace::default(),
            ticked: Instant::now(),
        }
    }

    /// What is known of the turn of a connection, and whether it is within a request.
    pub(crate) fn place_of(&mut self, index: usize) -> Option<(&mut Place, bool)> {
        let lane = self.lanes.get_mut(index)?.as_mut()?;
        let is_within = lane.filling.is_some() || !lane.held.is_empty();
        Some((&mut lane.place, is_within))
    }

    /// There is something to do without waiting for an event.
    pub(crate) fn is_busy(&self) -> bool {
        !self.resumable.is_empty()
    }

    /// A lane is to be looked at.
    fn has_work(&self) -> bool {
        !self.dirty.is_empty()
            || !self.resumable.is_empty()
            || !self.throttled.is_empty()
            || !self.starving.is_empty()
    }

    /// Somebody waits for memory: those who hold it without using it have to be found.
    pub(crate) fn is_starving(&self) -> bool {
        !self.starving.is_empty()
    }

    /// Time alone may end something.
    pub(crate) fn wants_ticks(&self) -> bool {
        self.ticking || self.is_starving()
    }

    /// Limits have changed: who waits looks again.
    pub(crate) fn limits_changed(&mut self) {
        let now = Instant::now();
        self.throttled.iter_mut().for_each(|(until, _)| *until = now);
    }

    /// When the first of those that have to wait may go on.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.throttled.iter().map(|(until, _)| *until).min()
    }

    /// Requests are under way, or answers are not sent yet.
    pub(crate) fn has_unanswered(&self, engine: &Engine<Ticket>) -> bool {
        self.lanes.iter().flatten().any(|l| !l.is_drained() || engine.requests_of(l.owner) > 0)
    }
}
