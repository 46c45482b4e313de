//! Connections move to the core that runs on the processor of their client, or to one that has time.
//!
//! Over TCP that is the processor where bytes arrive: of a client on the same machine, the one on which it runs; of
//! others, the one that handles the interrupts of the network card. Over Unix sockets and shared memory the client says
//! where it runs. If the connection's core runs there too, no other processor has to be woken for an answer, and
//! sockets, buffers and the counters of pages stay in the caches of one processor.
//!
//! The kernel also leaves more clients on one processor than on another, as few of them run at a time. So what counts is
//! how long all connections of a core need for one turn each: none moves to where that takes much longer, and if it takes
//! much shorter somewhere, connections move there from the processor on which they are at home.
//!
//! A connection is looked at when its turn comes while others wait or many ask all the time, and moves when nothing of it is under way. A
//! session moves with its lane.

use super::giving_way::Whereabouts;
use super::{Core, NBD_TOKENS, Shared};
use crate::grants::Served;
use crate::lane::Lane;
use crate::lanes::SHM_LANES_MAX;
use crate::mailbox::Mail;
use crate::stats::CoreStatistics;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use towline_net::address::is_within_machine;
use towline_net::{Link, LinkKind};

/// How much longer, in percent, the turns of all may take on the processor of a client than where its connection is, for
/// it to move there. Without any slack most would have to wait until another one moves the other way.
const HOME_PERCENT: u64 = 15;
/// How much longer, in percent, the turns of all must take there than elsewhere for a connection to leave it. One that is
/// away costs both processors more, so it bounds how differently clients are served, instead of serving them alike.
const AWAY_PERCENT: u64 = 40;

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
        self.cores[to].coming.fetch_add(1, Ordering::Relaxed);
        self.mailboxes[to].send(mail);
    }

    /// Returns the core other than `from` to which a connection should move whose client runs on `processor`. `is_home`:
    /// the core `from` runs there. `is_shm`: the connection is a lane over shared memory.
    fn core_for(&self, processor: u32, is_home: bool, is_shm: bool, from: usize) -> Option<usize> {
        let here = Load::of(&self.cores[from]);
        let has_room = |core: &CoreStatistics| {
            !is_shm || core.shm_lanes.load(Ordering::Relaxed) < 2 * SHM_LANES_MAX as u64
        };
        // Long before the watching thread finds that a core hangs, it does not take what was handed over to it.
        let works = |core: &CoreStatistics| {
            core.turns.waiting() == 0 && core.coming.load(Ordering::Relaxed) == 0
        };
        let others = self.cores.iter().enumerate();
        let others =
            others.filter(|(core, other)| *core != from && works(other) && has_room(other));
        let is_near = |core: &CoreStatistics| core.processor.load(Ordering::Relaxed) == processor;
        others
            .filter(|(_, other)| is_home || is_near(other))
            .map(|(core, other)| (core, Load::of(other).with_turns_like(here)))
            .min_by_key(|(_, there)| there.round())
            .filter(|(_, there)| there.is_better(here, is_home))
            .map(|(core, _)| core)
    }
}

/// What the connections of a core ask of it. Idle ones, of which there may be many, do not count.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// Connections that ask all the time.
    active: u64,
    /// How long a turn of one of them takes; zero if that is not known.
    turn_ns: u64,
}

impl Load {
    fn of(core: &CoreStatistics) -> Self {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Self { active: load(&core.active), turn_ns: load(&core.turn_ns) }
    }

    /// Assumes that turns take as long as elsewhere if how long they take is not known.
    fn with_turns_like(self, elsewhere: Self) -> Self {
        let turn_ns = if self.turn_ns == 0 { elsewhere.turn_ns } else { self.turn_ns };
        Self { turn_ns, ..self }
    }

    /// Returns how long it takes until each active connection has had a turn.
    fn round(self) -> u64 {
        self.turn_ns.max(1).saturating_mul(self.active)
    }

    /// Returns true if a round takes longer than one with the load `other` by more than so many percent.
    fn is_longer(self, other: Self, percent: u64) -> bool {
        self.round().saturating_mul(100) > other.round().saturating_mul(100 + percent)
    }

    /// Returns true if a connection should leave a core with the load `here` for one with this load. `is_home`: its
    /// client runs on the processor of the former, otherwise of the latter.
    fn is_better(self, here: Self, is_home: bool) -> bool {
        let here = here.with_turns_like(self);
        if is_home {
            let more = Self { active: self.active.saturating_add(1), ..self };
            let less = Self { active: here.active.saturating_sub(1), ..here };
            here.is_longer(self, AWAY_PERCENT) && !more.is_longer(less, 0)
        } else {
            !self.is_longer(here, HOME_PERCENT)
        }
    }
}

impl Core {
    /// Hands a connection over to another core if it should move and nothing of it is under way. Returns true if it did.
    pub(super) fn hand_over(&mut self, token: u64) -> bool {
        let Some((link, is_home, to)) = self.better_core(token) else { return false };
        let mail = match token.checked_sub(NBD_TOKENS) {
            Some(index) => self.take_nbd(index as usize).map(Mail::NbdMoved),
            None => self.take_lane(token as usize).map(Mail::Moved),
        };
        let Some(mail) = mail else { return false };
        self.statistics.lanes_moved.fetch_add(1, Ordering::Relaxed);
        self.order.round.left(is_home);
        self.shared.hand_over(mail, to, self.index);
        // Not under the lock, as this also starts transfers of disks. The new core may watch it already.
        match token.checked_sub(NBD_TOKENS) {
            Some(_) => {
                if let Some(fd) = link.fd() {
                    let _ = self.reactor.unwatch(fd, token);
                }
            }
            None => self.unwatch_link(token as usize, &link),
        }
        true
    }

    /// Returns a connection's link, whether it is at home, and the core to which it should move.
    fn better_core(&mut self, token: u64) -> Option<(Arc<Link>, bool, usize)> {
        if self.draining.is_some() {
            return None;
        }
        self.stay();
        let here = rustix::thread::sched_getcpu() as u32;
        self.statistics.processor.store(here, Ordering::Relaxed);
        let (link, place, told) = match token.checked_sub(NBD_TOKENS) {
            Some(index) => {
                let (link, place) = self.nbd.link_and_place(index as usize)?;
                (link, place, None)
            }
            None => {
                let lane = self.lanes.get_mut(token as usize)?.as_mut()?;
                (&lane.link, &mut lane.place, lane.told)
            }
        };
        let client_on = match link.kind() {
            LinkKind::Tcp => link.arrives_on(),
            _ => told,
        }?;
        let before = place.client_on.replace(client_on);
        let is_home = client_on == here;
        let most = std::mem::take(&mut place.most);
        let from = *place.slept_from.get_or_insert_with(|| slept_from(link));
        place.is_local = from < u64::MAX && most >= from;
        place.client = match (is_home, place.is_local) {
            (false, _) => Whereabouts::Elsewhere,
            (true, true) => Whereabouts::Here,
            (true, false) => Whereabouts::Unknown,
        };
        // Once may be chance, when a thread has just moved.
        let is_sure = before == Some(client_on);
        place.looks_again = !is_home && !is_sure;
        if !is_sure || is_home && !self.order.round.may_leave_home() {
            return None;
        }
        let is_shm = link.kind() == LinkKind::Shm;
        let core = self.shared.core_for(client_on, is_home, is_shm, self.index)?;
        Some((link.clone(), is_home, core))
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

    /// Returns true for a session that another core is handing over: it is in the mailbox.
    pub(crate) fn is_coming(&self, session: u64) -> bool {
        self.shared.homes.get(session) == Some(self.index) && self.sessions.get(session).is_none()
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
        self.serves_disks |= served.disks.has_open();
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

/// Returns how many bytes requests have to move for a core to sleep for the client of a connection; `u64::MAX` if it is not
/// surely on this machine, or would have to ring for each request, as over shared memory. Over Unix sockets, short ones
/// gain nothing.
fn slept_from(link: &Link) -> u64 {
    match link.kind() {
        LinkKind::Tcp if is_within_machine(link) => 0,
        LinkKind::Tcp | LinkKind::Shm => u64::MAX,
        _ => 16 * 1024,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_move_home_and_to_cores_with_time() {
        let unknown = |active| Load { active, turn_ns: 0 };
        let measured = |active, turn_ns| Load { active, turn_ns };
        // (here, there, whether a connection moves home to there, whether one that is at home here does)
        for (here, there, home, away) in [
            (unknown(92), unknown(92), true, false),
            (unknown(92), unknown(105), true, false),
            (unknown(92), unknown(106), false, false),
            (unknown(92), unknown(65), true, true),
            (unknown(92), unknown(66), true, false),
            (unknown(2), unknown(0), true, true),
            // Of few connections one is a large part: it moves if that makes them more equal.
            (unknown(5), unknown(3), true, true),
            (unknown(4), unknown(3), true, false),
            (unknown(2), unknown(1), true, false),
            (unknown(1), unknown(0), true, false),
            (measured(92, 700), unknown(92), true, false),
            (unknown(92), measured(92, 700), true, false),
            (measured(93, 850), measured(91, 600), true, true),
            (measured(93, 800), measured(91, 600), true, false),
            (measured(91, 600), measured(93, 700), false, false),
            (measured(70, 600), measured(40, 2000), false, false),
            (measured(u64::MAX, u64::MAX), measured(1, 1), true, true),
        ] {
            let there = there.with_turns_like(here);
            assert_eq!(there.is_better(here, false), home, "{here:?} {there:?}");
            assert_eq!(there.is_better(here, true), away, "{here:?} {there:?}");
        }
    }
}
