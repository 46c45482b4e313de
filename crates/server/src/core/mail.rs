//! Messages from other threads to a core, and its shutdown.

use super::{Core, DRAIN, LISTENER_TOKENS};
use crate::mailbox::Mail;
use std::sync::atomic::Ordering;
use std::time::Instant;
use towline_wire::{Header, Kind};

impl Core {
    /// Counts a connection that another core has handed over.
    fn joined(&mut self) {
        self.order.round.joined();
        self.statistics.coming.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn mail(&mut self, mail: Mail, scratch: &mut [u8]) {
        match mail {
            Mail::Lane(link) => self.add_lane(link, None, scratch),
            Mail::Join(link, hello, peer) => self.add_lane(link, Some((hello, peer)), scratch),
            Mail::Moved(moving) => {
                self.joined();
                self.take_over(*moving);
            }
            Mail::NbdMoved(lane) => {
                self.joined();
                self.take_over_nbd(*lane);
            }
            Mail::Unblocked { session, slot, sequence, result, took } => {
                let Some(mut running) = self.take_running(session, slot, sequence) else { return };
                running.stages.storage += took;
                running.stages.disk += took;
                self.forget_expected(session, &mut running);
                running.compound.unblocked(result);
                self.drive(session, slot, running, Instant::now());
            }
            Mail::Returned(back) => self.returned(back),
            Mail::Granted(waiter) => {
                let session = waiter.session;
                let Some(mut running) = self.take_running(session, waiter.slot, waiter.sequence)
                else {
                    return;
                };
                running.compound.locked(Ok(true));
                self.drive(session, waiter.slot, running, Instant::now());
            }
            Mail::NbdLane(link, over) => self.add_nbd_lane(link, over, scratch),
            Mail::Transferred { token, result, buffer } => {
                self.finish_transfer(token, result, buffer);
            }
            Mail::Answered { token, result } => self.engine.answered(token, result),
            Mail::AskAgain(waiter) => {
                let session = waiter.session;
                if let Some(running) = self.take_running(session, waiter.slot, waiter.sequence) {
                    self.drive(session, waiter.slot, running, Instant::now());
                }
            }
            Mail::Happened { session, slot, sequence } => {
                if let Some(mut running) = self.take_running(session, slot, sequence) {
                    // The time in which nothing happened does not count as the server's.
                    running.arrived = Instant::now();
                    let now = running.arrived;
                    self.drive(session, slot, running, now);
                }
            }
            Mail::Orphan { session, locks } => {
                let home = self.shared.home(session);
                // One that is coming is not over: this gets in line behind it.
                match home == self.index && !self.is_coming(session) {
                    true => self.orphan(session, locks),
                    false => self.shared.mailboxes[home].send(Mail::Orphan { session, locks }),
                }
            }
            Mail::LocksReleased { session, slot, sequence } => {
                if let Some(mut running) = self.take_running(session, slot, sequence) {
                    running.compound.process_ended();
                    self.drive(session, slot, running, Instant::now());
                }
            }
            Mail::Groups(user, found) => self.learn_groups(user, found),
            Mail::Reconfigured => {
                self.callers.doubt();
                self.waiting.limits_changed();
                self.nbd.limits_changed();
            }
            Mail::Broken => self.broken = true,
            Mail::Shutdown => self.begin_shutdown(),
        }
    }

    fn begin_shutdown(&mut self) {
        self.draining = Some(Instant::now());
        if self.index == 0 {
            let mut listeners = self.shared.listeners.write();
            for (number, (listener, _)) in listeners.iter().enumerate() {
                // Fails only if the event loop is broken, which it reports itself.
                let _ = self.reactor.unwatch(listener.fd(), LISTENER_TOKENS + number as u64);
            }
            listeners.clear();
        }
        self.refusing.clear();
        self.shared.disks.shut_down();
    }

    pub(super) fn drained(&self) -> bool {
        let Some(since) = self.draining else { return false };
        // Requests that wait for others may wait forever; the client repeats them with the next server.
        let running = self.sessions.all().any(|s| s.disks.is_busy() || s.is_at_work());
        let unsent = self.lanes.iter().flatten().any(|l| !l.out.is_empty());
        (!running && !unsent && !self.nbd.has_unanswered(&self.engine)) || since.elapsed() > DRAIN
    }

    /// Tells the clients that what they were not answered was not begun. Afterwards this core must begin
    /// nothing.
    pub(super) fn tell_of_end(&mut self) {
        let mut header = Header::new(Kind::Notice, 0, 0);
        header.flags = towline_wire::header::notice::SHUTDOWN;
        for index in 0..self.lanes.len() {
            let Some(lane) = &mut self.lanes[index] else { continue };
            let served = lane.session.and_then(|id| self.sessions.get_mut(id));
            let is_over = served.is_some_and(|s| !s.disks.is_busy() && !s.is_at_work());
            // What is at work after all this time has begun, and stays unanswered.
            if is_over && lane.out.is_empty() {
                lane.send_header(&header);
                self.dirty.push(index);
            }
        }
        self.flush_dirty();
    }
}
