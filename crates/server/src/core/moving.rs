//! Connections move to the core that runs on the processor where their bytes arrive.
//!
//! From a client on the same machine, bytes arrive on the processor on which it runs; from elsewhere, on the one that
//! handles the interrupts of the network card. If the connection's core runs there too, no other processor has to be
//! woken for an answer, and sockets, buffers and the counters of pages stay in the caches of one processor. The kernel
//! rarely moves threads of a busy machine, so cores are not bound to processors: the connections follow.
//!
//! A connection is looked at when its turn comes while others wait, and moves when nothing of it is under way. A
//! session moves with its lane.

use super::{Core, NBD_TOKENS, Shared};
use crate::grants::Served;
use crate::lane::Lane;
use crate::mailbox::Mail;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use towline_net::Link;

/// Where sessions live that are not on the core that their number says.
#[derive(Default)]
pub(crate) struct Homes(RwLock<Moved>);

#[derive(Default)]
struct Moved {
    cores: HashMap<u64, usize>,
    /// The server ends: a core that is handed something may be gone.
    is_over: bool,
}

impl Homes {
    pub(crate) fn get(&self, session: u64) -> Option<usize> {
        self.0.read().cores.get(&session).copied()
    }

    /// Forgets a session that has ended.
    pub(crate) fn remove(&self, session: u64) {
        if self.get(session).is_some() {
            self.0.write().cores.remove(&session);
        }
    }
}

/// A lane and its session on their way to another core.
pub(crate) struct Moving {
    lane: Lane,
    served: Served,
}

impl Shared {
    /// Tells all cores to end. What one has handed over to another by now arrives before that; nothing will later.
    pub(crate) fn tell_to_end(&self) {
        self.homes.0.write().is_over = true;
        for mailbox in &self.mailboxes {
            mailbox.send(Mail::Shutdown);
        }
    }

    /// Hands something over to the core `to`. If the server ends, that core may be gone: then `from` keeps it.
    fn hand_over(&self, mail: Mail, to: usize, from: usize) {
        let mut homes = self.homes.0.write();
        let to = if homes.is_over { from } else { to };
        if let Mail::Moved(moving) = &mail {
            homes.cores.insert(moving.served.session.id, to);
        }
        self.cores[from].lanes.fetch_sub(1, Ordering::Relaxed);
        self.cores[to].lanes.fetch_add(1, Ordering::Relaxed);
        // Before it arrives, so that not too many move to a core that is slow to read its mail.
        self.cores[to].active.fetch_add(1, Ordering::Relaxed);
        self.mailboxes[to].send(mail);
    }

    /// Returns another core than `from` that runs on this processor, unless it hangs or more connections are active
    /// there. Idle ones, of which there may be many, do not count.
    fn core_on(&self, processor: u32, from: usize) -> Option<usize> {
        let active = |core: usize| self.cores[core].active.load(Ordering::Relaxed);
        (0..self.cores.len()).find(|core| {
            let statistics = &self.cores[*core];
            *core != from
                && statistics.processor.load(Ordering::Relaxed) == processor
                && active(*core) <= active(from)
                && statistics.turns.waiting() == 0
        })
    }
}

impl Core {
    /// Hands a connection over to the core on the processor where its bytes arrive, if it is not this one and nothing
    /// of the connection is under way. Returns true if it did.
    pub(super) fn hand_over(&mut self, token: u64) -> bool {
        let Some((link, to)) = self.better_core(token) else { return false };
        let mail = match token.checked_sub(NBD_TOKENS) {
            Some(index) => self.take_nbd(index as usize).map(Mail::NbdMoved),
            None => self.take_lane(token as usize).map(Mail::Moved),
        };
        let Some(mail) = mail else { return false };
        self.statistics.lanes_moved.fetch_add(1, Ordering::Relaxed);
        self.order.left();
        self.shared.hand_over(mail, to, self.index);
        // Not under the lock, as this also starts transfers of disks. The new core may watch it already.
        if let Some(fd) = link.fd() {
            let _ = self.reactor.unwatch(fd, token);
        }
        true
    }

    /// Returns a connection's link, and the core to which it should move.
    fn better_core(&mut self, token: u64) -> Option<(Arc<Link>, usize)> {
        if self.shared.cores.len() < 2 || self.draining.is_some() {
            return None;
        }
        let here = rustix::thread::sched_getcpu() as u32;
        self.statistics.processor.store(here, Ordering::Relaxed);
        let (link, place) = match token.checked_sub(NBD_TOKENS) {
            Some(index) => self.nbd.link_and_place(index as usize)?,
            None => {
                let lane = self.lanes.get_mut(token as usize)?.as_mut()?;
                (&lane.link, &mut lane.place)
            }
        };
        let arrives = link.arrives_on()?;
        let before = place.arrived_on.replace(arrives);
        // Once may be chance, when a thread has just moved.
        if arrives == here || before != Some(arrives) {
            return None;
        }
        Some((link.clone(), self.shared.core_on(arrives, self.index)?))
    }

    /// Removes a lane and its session if nothing of them is under way.
    fn take_lane(&mut self, index: usize) -> Option<Box<Moving>> {
        let id = self.movable_session(index)?;
        let mut lane = self.lanes.get_mut(index)?.take()?;
        self.free_lanes.push(index);
        let mut served = self.sessions.remove(id)?;
        self.statistics.sessions.fetch_sub(1, Ordering::Relaxed);
        for owner in [lane.reads.take(), served.disks.take_owner()].into_iter().flatten() {
            self.engine.remove_owner(owner);
        }
        Some(Box::new(Moving { lane, served }))
    }

    /// Returns the session of a lane if nothing of either is under way.
    fn movable_session(&self, index: usize) -> Option<u64> {
        let lane = self.lanes.get(index)?.as_ref()?;
        let served = self.sessions.get(lane.session?)?;
        let is_its = served.lane == Some(index as u64);
        let id = served.session.id;
        let is_ending =
            !self.failed.is_empty() || !self.orphans.is_empty() || !self.ending.is_empty();
        (is_its
            && lane.is_at_rest()
            && served.is_at_rest()
            && !self.waiting.holds(id)
            && !is_ending)
            .then_some(id)
    }

    /// Serves a lane, and its session, that another core has handed over.
    pub(super) fn take_over(&mut self, moving: Moving) {
        let Moving { mut lane, mut served } = moving;
        let watched = self.watch_lane(&lane.link);
        served.lane = watched.map(|index| index as u64);
        if watched.is_none() {
            served.laneless_since = Instant::now();
            served.suspend_transfers();
            self.statistics.lanes.fetch_sub(1, Ordering::Relaxed);
        }
        self.sessions.insert(served);
        self.statistics.sessions.fetch_add(1, Ordering::Relaxed);
        self.ticking = true;
        if let Some(index) = watched {
            lane.arrive(self.statistics.clone());
            self.lanes[index] = Some(lane);
            // It has sent something.
            self.queue(index as u64);
        }
    }
}
