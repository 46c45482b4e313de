//! Requests under way: each runs until it is answered or waits for a lock, a thread, events or data.

use crate::core::{Core, elapsed_ns, nanoseconds};
use crate::elsewhere::{SHARE_OF_BUFFERS, Task};
use crate::grants::{GRANTS_SCARCE, Grant, Running, grant_message};
use crate::guarded::guarded;
use crate::lane::Lane;
use crate::mailbox::{Mail, Mailbox};
use crate::messages::{Carries, send_reply};
use crate::offload::Job;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use towline_mem::Aggregate;
use towline_net::Link;
use towline_session::files::Table;
use towline_session::locks::{Locked, Peer};
use towline_session::{Blocking, BlockingResult, Context, Step};
use towline_wire::header::reply_flag;
use towline_wire::limits::{FRAGMENT_BYTES_MAX, GRANTS_MAX};
use towline_wire::request::lock;
use towline_wire::{Errno, Header, Kind, Request};

/// The lane of a request that waits for a lock.
struct Asker(Arc<Link>);

impl Peer for Asker {
    fn is_there(&self) -> bool {
        !self.0.peer_closed()
    }
}

/// Returns work of a request as a job, whose result goes to this mailbox.
fn job(
    (session, slot, sequence): (u64, u16, u32),
    low: bool,
    work: Blocking,
    reply_to: &Mailbox,
) -> Job {
    let work = move || {
        let start = Instant::now();
        let result = guarded(work).unwrap_or_else(BlockingResult::broken);
        let took = elapsed_ns(start);
        Some(Mail::Unblocked { session, slot, sequence, result, took })
    };
    Job { work: Box::new(work), reply_to: reply_to.clone(), low }
}

impl Core {
    pub(crate) fn take_running(
        &mut self,
        session: u64,
        slot: u16,
        sequence: u32,
    ) -> Option<Box<Running>> {
        let place = self.sessions.get_mut(session)?.running.get_mut(usize::from(slot))?;
        place.take_if(|running| running.sequence == sequence)
    }

    /// Runs a request until it is answered or waits. Reads the clock as rarely as possible: `now` is the time
    /// of the call.
    pub(crate) fn drive(&mut self, session: u64, slot: u16, running: Box<Running>, now: Instant) {
        self.drive_only(session, slot, running, now, None);
    }

    /// Does the same for a request that has just begun; `only` is its operation if it has just one.
    pub(crate) fn drive_only(
        &mut self,
        session: u64,
        slot: u16,
        mut running: Box<Running>,
        mut now: Instant,
        only: Option<&Request<'_>>,
    ) {
        loop {
            let Some(served) = self.sessions.get_mut(session) else { return };
            let mut files = served.session.files.lock();
            let mut context = Context {
                files: Table::Held(&mut files),
                exports: &self.shared.exports,
                caller: &running.caller,
                session,
            };
            let step = guarded(|| running.compound.run(only, &mut context)).unwrap_or_else(|| {
                running.compound.broken();
                Step::Finished
            });
            drop(files);
            let start = std::mem::replace(&mut now, Instant::now());
            let took = nanoseconds(now - start);
            running.stages.storage += took;
            if matches!(step, Step::Finished) {
                let server = if start == running.arrived {
                    took
                } else {
                    nanoseconds(now - running.arrived)
                };
                return self.reply(session, slot, running, now, server);
            }
            match self.follow(session, slot, running, step, now) {
                Some(again) => running = again,
                None => return,
            }
        }
    }

    /// Does what a request stopped for, or waits for it. Returns the request if it can continue at once.
    pub(crate) fn follow(
        &mut self,
        session: u64,
        slot: u16,
        mut running: Box<Running>,
        step: Step,
        now: Instant,
    ) -> Option<Box<Running>> {
        let served = self.sessions.get_mut(session)?;
        running.waits = matches!(step, Step::Lock(..) | Step::Events(..) | Step::EndProcess(_));
        // If the request does not reach its data in this step, data sent ahead finds no place and is
        // discarded; the client sends it again under a grant.
        let ahead = running.ahead.take();
        match step {
            Step::Finished => {
                let server = nanoseconds(now - running.arrived);
                self.reply(session, slot, running, now, server);
                return None;
            }
            Step::NeedsData => {
                running.data_since = Some(now);
                let lane = served.lane.and_then(|lane| self.lanes.get_mut(lane as usize)?.as_mut());
                if let (Some((buffer, length)), Some(lane)) = (ahead, lane)
                    && let Some((offset, _)) =
                        running.next_grant(GRANTS_SCARCE).filter(|(_, most)| length <= *most)
                {
                    running.grants.push_back(Grant {
                        offset,
                        length,
                        buffer,
                        placed: 0,
                        ahead: true,
                    });
                    running.granted += length as u64;
                    lane.note_grant(now);
                    self.ticking = true;
                }
                if running.next_grant(GRANTS_SCARCE).is_some() {
                    self.grant_queue.push(served.is_low, (session, slot));
                }
            }
            Step::Elsewhere(store) => {
                self.send_elsewhere(session, slot, running, store, Task::Run);
                return None;
            }
            Step::Block(store, work, bytes) => {
                running.expected = bytes;
                let request = (session, slot, running.sequence);
                let job = job(request, served.is_low, work, &self.mailbox);
                self.expect(session, |lane| lane.expected += bytes);
                self.shared.pools.of_files(&store).run(job);
            }
            Step::Share(store, work) => {
                self.statistics.listings_handed_over.fetch_add(1, Ordering::Relaxed);
                let helper = running.helper.take();
                let work = Box::new(move || {
                    helper.as_ref().inspect(|helper| helper.keep_off());
                    work()
                });
                let request = (session, slot, running.sequence);
                let job = job(request, served.is_low, work, &self.mailbox);
                self.shared.pools.of_listings(&store).run(job);
            }
            Step::Lock(_, _, true) if served.session.slots.is_cancelled(slot) => {
                running.compound.locked(Err(Errno::EINTR));
                return Some(running);
            }
            Step::Lock(file, mut waiter, wait) => {
                // The lock of a session that is not kept would be in its own way after a restart.
                waiter.is_kept &= served.session.family || served.session.journal.is_some();
                let lane = served.lane.and_then(|lane| self.lanes.get(lane as usize)?.as_ref());
                let asker = lane.map(|lane| Arc::new(Asker(lane.link.clone())));
                // Checked while the table is locked. Otherwise the lane could end, and its locks could be
                // released on its behalf, before it gets this one.
                let mut locks = self.shared.locks.lock();
                let is_there = asker.as_ref().is_some_and(|asker| asker.is_there());
                let mut let_in = Vec::new();
                let others = locks.is_new_to(file, waiter.owner);
                let outcome = if waiter.range.kind == lock::UNLOCK || is_there {
                    let_in = locks.give_up_converted(file, &waiter);
                    locks.lock(file, waiter, asker.filter(|_| wait).map(|asker| asker as _))
                } else {
                    // The client sends the request again, unless it was killed.
                    Ok(Locked::Waiting)
                };
                drop(locks);
                self.shared.notify(let_in);
                // As in the kernel, checked afterwards: others may have closed the file since the request was
                // run, and released its locks before this one was taken.
                let owner = waiter.owner;
                let is_closed =
                    !owner.process && served.session.files.lock().find(owner.id).is_err();
                match outcome {
                    Ok(Locked::Done(granted)) => {
                        self.shared.notify(granted);
                        if is_closed {
                            self.shared.release_locks(owner);
                        } else {
                            running.compound.locked(Ok(others));
                        }
                        return Some(running);
                    }
                    Err(errno) => {
                        running.compound.locked(Err(errno));
                        return Some(running);
                    }
                    // The request is run again.
                    Ok(Locked::Waiting) if is_closed => self.shared.release_locks(owner),
                    Ok(Locked::Waiting) => {}
                }
            }
            Step::Events(queue, turn) => {
                let (mailbox, sequence) = (self.mailbox.clone(), running.sequence);
                let wake = move || mailbox.send(Mail::Happened { session, slot, sequence });
                if !queue.wait(turn, Box::new(wake)) {
                    return Some(running);
                }
            }
            Step::TestLock(file, owner, range) => {
                let tested = self.shared.locks.lock().test(session, file, owner, &range);
                running.compound.tested(owner.session, tested);
                return Some(running);
            }
            Step::ReleaseLocks(owner, hold) => {
                self.release_closed(owner, hold);
                return Some(running);
            }
            Step::EndProcess(owner) => self.end_process(owner, (session, slot, running.sequence)),
            Step::HandOver(handed, secret, process) => {
                let files = &served.session.files;
                let done = self.shared.families.hand_over(files, (handed, secret), process);
                running.compound.handed_over(done);
                return Some(running);
            }
            Step::Reclaimed => {
                served.session.reclaiming = false;
                self.shared.returned(session);
                return Some(running);
            }
        }
        if let Some(served) = self.sessions.get_mut(session) {
            served.running[usize::from(slot)] = Some(running);
        }
        None
    }

    /// Continues a write after fragments of it were written.
    pub(crate) fn wrote(&mut self, session: u64, slot: u16, mut running: Box<Running>, last: bool) {
        if last {
            if let Some(since) = running.data_since.take() {
                running.stages.data += elapsed_ns(since);
            }
            // A write that stopped early has grants left, whose data will be discarded.
            let unused = std::mem::take(&mut running.grants).len();
            self.expect(session, |lane| lane.granted = lane.granted.saturating_sub(unused));
            return self.drive(session, slot, running, Instant::now());
        }
        if let Some(served) = self.sessions.get_mut(session) {
            self.grant_queue.push(served.is_low, (session, slot));
            served.running[usize::from(slot)] = Some(running);
        }
    }

    /// Notes that the bytes that a request was to fetch have arrived.
    pub(crate) fn forget_expected(&mut self, session: u64, running: &mut Running) {
        let expected = std::mem::take(&mut running.expected);
        self.expect(session, |lane| lane.expected = lane.expected.saturating_sub(expected));
        let index = self.sessions.get(session).and_then(|served| served.lane);
        let lane = index.and_then(|index| self.lanes.get(index as usize)?.as_ref());
        if lane.is_some_and(|lane| lane.is_gone) {
            // It may go on, even if this request has no answer yet.
            self.dirty.extend(index.map(|index| index as usize));
        }
    }

    /// Changes how much memory the answers take that a session's lane is waiting for.
    pub(crate) fn expect(&mut self, session: u64, change: impl FnOnce(&mut Lane)) {
        let lane = self.sessions.get(session).and_then(|served| served.lane);
        if let Some(Some(lane)) = lane.and_then(|lane| self.lanes.get_mut(lane as usize)) {
            change(lane);
        }
    }

    /// Answers a request that took `server` nanoseconds until `now`.
    fn reply(
        &mut self,
        session: u64,
        slot: u16,
        mut running: Box<Running>,
        now: Instant,
        server: u64,
    ) {
        running.stages.server = server;
        let Running { compound, sequence, borrows, stages, meter, fetched, .. } = &mut *running;
        self.statistics.count(compound.first_tag());
        self.timed.push(*stages);
        let is_undecided = compound.is_undecided();
        if let Some(closed) = compound.take_closed() {
            self.closing.push(closed);
        }
        let left = compound.left();
        let (results, data, modifies, is_read) = compound.reply();
        if let Some(meter) = meter {
            meter.charge(now, 0, data.len());
        }
        let Some(served) = self.sessions.get_mut(session) else { return };
        let mut header = Header::new(Kind::Reply, slot, *sequence);
        header.body_bytes = results.len() as u32;
        if is_undecided {
            header.flags |= reply_flag::UNKNOWN;
        }
        self.shared.sign(&mut header, stages.server);
        if *fetched
            && meter.is_none()
            && data.is_empty()
            && served.give_leave(&self.pool, FRAGMENT_BYTES_MAX, &mut header, now)
        {
            self.ticking = true;
        }
        let remember = modifies && data.is_empty();
        let left = left.filter(|_| !remember);
        // If the lane is lost, the reply is only remembered: the client asks again on its next lane.
        let index = served.lane.map(|lane| lane as usize);
        let mut lane = index.and_then(|index| self.lanes.get_mut(index)?.as_mut());
        if *borrows
            && is_read
            && !modifies
            // With the memory, a client could read all of it unnoticed.
            && meter.is_none()
            && let Some(loans) = lane.as_mut().and_then(|lane| lane.loans.as_mut())
            && loans.lend(&mut header, results, data)
        {
            *data = Aggregate::new();
        }
        let carries = if is_read { Carries::Read } else { Carries::Listing };
        let slots = &mut served.session.slots;
        send_reply(lane, slots, header, results, data, carries, remember);
        slots.note_left(slot, left);
        self.dirty.extend(index);
        running.clear();
        self.spare = Some(running);
    }

    /// Closes the file that a request opened whose reply was lost; the request is executed again.
    pub(crate) fn close_left(&mut self, session: u64, handle: u64) {
        let Some(served) = self.sessions.get_mut(session) else { return };
        let Ok(opened) = served.session.files.lock().remove(handle) else { return };
        if opened.store.may_hang() {
            let store = opened.store.clone();
            self.drop_elsewhere(&store, opened);
        }
    }

    /// Gives buffers to transfers that wait for data, in turn.
    pub(crate) fn grant(&mut self) {
        // One round for each fragment that a transfer may have under way, so that all are granted in one
        // turn.
        for _ in 0..GRANTS_MAX * self.grant_queue.len() {
            let Some((low, (session, slot))) = self.grant_queue.pop() else { return };
            let Some(served) = self.sessions.get_mut(session) else { continue };
            let Some(index) = served.lane.map(|lane| lane as usize) else { continue };
            let Some(Some(lane)) = self.lanes.get_mut(index) else { continue };
            let Some(running) = served.running[usize::from(slot)].as_mut() else { continue };
            let most = running.grants_max(low, lane.granted, &self.pool);
            let Some((offset, length)) = running.next_grant(most) else { continue };
            let elsewhere = running.compound.writes_elsewhere().is_some();
            let scarce = || {
                let most = self.pool.bytes() / SHARE_OF_BUFFERS;
                self.bytes_elsewhere.load(Ordering::Relaxed) + self.pool.buffer_bytes() as u64
                    > most
            };
            if elsewhere && scarce() {
                // Others must not have to wait for a store that may hang, or for a slow device.
                self.grant_queue.push(low, (session, slot));
                continue;
            }
            let Some(mut buffer) = self.pool.reserve() else {
                self.grant_queue.put_back(low, (session, slot));
                return;
            };
            if elsewhere {
                buffer = buffer.charged_to(&self.bytes_elsewhere);
            }
            let header = grant_message(slot, running.sequence, offset, length);
            running.grants.push_back(Grant { offset, length, buffer, placed: 0, ahead: false });
            running.granted += length as u64;
            lane.note_grant(Instant::now());
            self.ticking = true;
            lane.send_header(&header);
            self.dirty.push(index);
            if running.next_grant(most).is_some() {
                self.grant_queue.push(low, (session, slot));
            }
        }
    }
}
