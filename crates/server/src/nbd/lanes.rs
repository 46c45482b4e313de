//! NBD connections of a core: how they begin and end, and the turns in which they are served.

use super::driver::{CoreDriver, Late};
use super::in_place;
use super::lane::{NbdLane, Phase};
use super::serving::Serving;
use crate::complaints;
use crate::core::{Core, NBD_TOKENS, Ticket};
use crate::waiting::client_of;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use towline_block::{DEPTH_MAX, Output};
use towline_mem::PoolBuffer;
use towline_nbd::constants::REPLIES_BYTES_MAX;
use towline_nbd::{Catalogue, Ended, ProtocolError, Received, Receiver, header_bytes};
use towline_net::{Counters, Flushed, Link};
use towline_reactor::Event;
use towline_wire::limits::CLIENT_STALL_SECONDS;

/// Receives from one lane before others get their turn.
const RECEIVES_MAX: usize = 8;
/// Maximum number of turns for which requests stay peeked at: more than it takes to collect as many as are
/// removed together.
const TURNS_BEHIND_MAX: u32 = 64;
/// Payload of at least this many bytes is received to where it is written from.
pub(super) const PLACED_BYTES_MIN: u64 = 16 * 1024;
/// Rounds of reading from disks and sending within one turn.
const ROUNDS_MAX: usize = 8;
/// How often to check for lanes that hold memory and do not move.
const TICK: Duration = Duration::from_secs(1);

/// The result of a receive.
#[derive(PartialEq, Eq)]
enum Reading {
    Goes,
    /// There is nothing more to read.
    Drained,
    /// Reading has to wait for something else.
    Paused,
}

impl Core {
    pub(crate) fn add_nbd_lane(
        &mut self,
        link: Arc<Link>,
        over: Option<Sender<()>>,
        scratch: &mut [u8],
    ) {
        let Some(index) = self.watch_nbd(&link) else { return };
        let owner = self.engine.add_owner();
        self.nbd.lanes[index] = Some(NbdLane::new(link, owner, over));
        self.statistics.lanes.fetch_add(1, Ordering::Relaxed);
        self.nbd.ticking = true;
        self.mark(index);
        self.receive_nbd(index, scratch);
    }

    /// Watches a new connection. Returns its index; `None`: it cannot be watched.
    pub(super) fn watch_nbd(&mut self, link: &Link) -> Option<usize> {
        self.serves_disks = true;
        let nbd = &mut self.nbd;
        let index = nbd.free.pop().unwrap_or_else(|| {
            nbd.lanes.push(None);
            nbd.lanes.len() - 1
        });
        let token = NBD_TOKENS + index as u64;
        if let Some(Err(error)) = link.fd().map(|fd| self.reactor.watch(fd, token)) {
            complaints::warn(format_args!("cannot watch a connection: {error}"));
            nbd.free.push(index);
            return None;
        }
        Some(index)
    }

    pub(super) fn mark(&mut self, index: usize) {
        if let Some(Some(lane)) = self.nbd.lanes.get_mut(index)
            && !lane.is_dirty
        {
            lane.is_dirty = true;
            self.nbd.dirty.push(index);
        }
    }

    pub(crate) fn nbd_event(&mut self, index: usize, event: Event) {
        if event.writable
            && self
                .nbd
                .lanes
                .get(index)
                .is_some_and(|l| l.as_ref().is_some_and(|lane| !lane.is_drained()))
        {
            self.mark(index);
        }
        let Some(Some(lane)) = self.nbd.lanes.get_mut(index) else { return };
        // Asked again: earlier in this turn the lane may have ended, and another one may have got its number.
        lane.hung |= event.hung && lane.link.peer_closed();
        if lane.hung
            && lane.is_throttled
            && let Phase::Serving(receiver, _) = &lane.phase
        {
            let form = receiver.agreed().form;
            if let Err(error) = lane.check_leaving(form, &self.statistics.counters) {
                self.close_nbd(index, &error);
            }
        }
    }

    /// Reports transfers that the ring has finished to the engine.
    pub(crate) fn finish_transfers(&mut self) {
        if !self.reactor.has_finished() {
            return;
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.reactor.take_finished(&mut finished);
        for done in finished.drain(..) {
            if done.registered
                && let Ok(count) = &done.result
            {
                let bytes = &self.statistics.disk_bytes_registered;
                bytes.fetch_add(*count as u64, Ordering::Relaxed);
            }
            self.finish_transfer(done.token, done.result, done.buffer);
        }
        self.finished = finished;
    }

    /// Does the work that is due for disks that simulate a delay.
    pub(crate) fn finish_late(&mut self) {
        if self.late.is_empty() {
            return;
        }
        let now = Instant::now();
        while self.late.peek().is_some_and(|late| late.at <= now)
            && let Some(Late { token, call, .. }) = self.late.pop()
        {
            let (result, buffer) = call();
            self.finish_transfer(token, result, buffer);
        }
    }

    pub(crate) fn finish_transfer(
        &mut self,
        token: u64,
        result: io::Result<usize>,
        buffer: PoolBuffer,
    ) {
        let (engine, mut driver) = self.engine_and_driver();
        engine.finished(token, result, buffer, &mut driver);
    }

    /// Returns true if there is something to start, or to report, for disks.
    fn has_disk_work(&self) -> bool {
        self.engine.has_work()
            || self.engine.is_starved()
            || !self.disk_grants.is_empty()
            || !self.dirty.is_empty()
            || self.nbd.has_work()
    }

    /// Ends a turn: starts fragments and sends answers, as long as one leads to the other.
    pub(crate) fn turn_disks(&mut self, scratch: &mut [u8]) {
        self.disk_sizes.clear();
        let rounds = if self.has_disk_work() { ROUNDS_MAX } else { 0 };
        for round in 0..rounds {
            self.grant_disks();
            let (engine, mut driver) = self.engine_and_driver();
            engine.pump(&mut driver);
            while let Some(output) = self.engine.next_output() {
                match output.tag() {
                    Ticket::Nbd(tag) => self.answer_nbd(output.with_tag(tag)),
                    Ticket::Native(tag) => self.answer_native(tag, output.with_tag(())),
                }
            }
            self.flush_dirty();
            self.flush_nbd_dirty();
            let mut woken = std::mem::take(&mut self.nbd.resumable);
            if round == 0 && !self.nbd.throttled.is_empty() {
                let now = Instant::now();
                let nbd = &mut self.nbd;
                nbd.throttled.retain(|(until, index)| {
                    let goes_on = *until <= now;
                    if goes_on {
                        if let Some(Some(lane)) = nbd.lanes.get_mut(*index) {
                            lane.is_throttled = false;
                        }
                        woken.push(*index);
                    }
                    !goes_on
                });
            }
            // Starving lanes are tried again once per turn; memory is released by completions.
            if round == 0 {
                for index in std::mem::take(&mut self.nbd.starving) {
                    if let Some(Some(lane)) = self.nbd.lanes.get_mut(index) {
                        lane.is_starving = false;
                    }
                    woken.push(index);
                }
            }
            if woken.is_empty() && !self.engine.has_work() && self.dirty.is_empty() {
                break;
            }
            for index in woken {
                self.receive_nbd(index, scratch);
            }
        }
        if self.engine.moved() != self.moved_told {
            self.moved_told = self.engine.moved();
            self.statistics.publish_moved(self.moved_told);
        }
        // Sends what the last round started to answer.
        self.flush_nbd_dirty();
        if self.wants_ticks() && self.nbd.ticked.elapsed() >= TICK {
            self.tick_nbd();
        }
    }

    fn answer_nbd(&mut self, output: Output<super::Tag>) {
        let super::Tag { lane: index, owner, .. } = output.tag();
        let Some(Some(lane)) = self.nbd.lanes.get_mut(index) else { return };
        // The lane may have ended in this turn, and another one may have its index.
        if lane.owner != owner {
            return;
        }
        match lane.answer(output, &self.statistics) {
            Ok(()) => self.mark(index),
            Err(error) => self.close_nbd(index, &error),
        }
    }

    fn flush_nbd_dirty(&mut self) {
        if self.nbd.dirty.is_empty() {
            return;
        }
        // Lanes that become dirty meanwhile wait for the next time.
        let meanwhile = std::mem::take(&mut self.nbd.spare);
        let mut dirty = std::mem::replace(&mut self.nbd.dirty, meanwhile);
        for index in dirty.drain(..) {
            self.flush_nbd(index);
        }
        self.nbd.spare = dirty;
    }

    fn flush_nbd(&mut self, index: usize) {
        let Some(Some(lane)) = self.nbd.lanes.get_mut(index) else { return };
        lane.is_dirty = false;
        let was_full = lane.glance.is_full();
        match lane.flush(&mut self.pipe, &self.statistics.counters) {
            Ok(flushed) => {
                if was_full {
                    lane.take_looked(&self.statistics.counters);
                }
                let (unsent, held, owner) = (lane.unsent(), lane.held(), lane.owner);
                let engine = &mut self.engine;
                engine.set_unsent(owner, held);
                if lane.closing && flushed == Flushed::All && engine.requests_of(owner) == 0 {
                    return self.drop_nbd(index);
                }
                let has_room = unsent == 0 && lane.may_start(engine.requests_of(owner));
                if lane.paused && has_room && !lane.is_starving && !lane.is_throttled {
                    // No event will report the unread input, since it is not new.
                    self.nbd.resumable.push(index);
                }
                match flushed {
                    Flushed::All => {}
                    Flushed::Blocked => self.wait_for_room(index),
                    Flushed::Kept => self.send_in_place(index),
                }
            }
            Err(error) => self.close_nbd(index, &error),
        }
    }

    /// At the end of a turn, makes sure that requests do not stay peeked at for long on a core that other
    /// clients keep awake.
    pub(crate) fn take_looked_at_last(&mut self) {
        if !self.nbd.behind.is_empty() {
            self.nbd.turns_behind += 1;
            if self.nbd.turns_behind > TURNS_BEHIND_MAX {
                self.take_looked();
            }
        }
    }

    /// Removes requests that were only peeked at, because the core is about to sleep or to end.
    pub(crate) fn take_looked(&mut self) {
        self.nbd.turns_behind = 0;
        while let Some(index) = self.nbd.behind.pop() {
            let Some(Some(lane)) = self.nbd.lanes.get_mut(index) else { continue };
            lane.is_behind = false;
            lane.take_looked(&self.statistics.counters);
        }
    }

    /// Flushes a lane again when its link accepts more.
    pub(super) fn wait_for_room(&mut self, index: usize) {
        if let Err(error) = self.reactor.watch_writable(NBD_TOKENS + index as u64) {
            self.close_nbd(index, &error);
        }
    }

    /// Reads from a lane as much as there is or as it may take.
    pub(crate) fn receive_nbd(&mut self, index: usize, scratch: &mut [u8]) {
        for _ in 0..RECEIVES_MAX {
            let Some(Some(lane)) = self.nbd.lanes.get_mut(index) else { return };
            if lane.closing {
                return;
            }
            // Taken out, so that the handlers can change the lane.
            let phase = std::mem::replace(&mut lane.phase, Phase::Taken);
            let (phase, outcome) = match phase {
                Phase::Haggling(haggle) => self.haggle(index, haggle, scratch),
                Phase::Serving(mut receiver, disk) => {
                    let outcome = self.serve(index, &mut receiver, &disk, scratch);
                    (Phase::Serving(receiver, disk), outcome)
                }
                Phase::Taken => return,
            };
            let Some(Some(lane)) = self.nbd.lanes.get_mut(index) else { return };
            lane.phase = phase;
            match outcome {
                Ok(Reading::Goes) => {}
                Ok(Reading::Drained | Reading::Paused) => return self.mark(index),
                Err(error) => return self.close_nbd(index, &error),
            }
        }
        self.mark(index);
        self.queue_last(NBD_TOKENS + index as u64);
    }

    fn haggle(
        &mut self,
        index: usize,
        mut haggle: Box<towline_nbd::Haggle>,
        scratch: &mut [u8],
    ) -> (Phase, io::Result<Reading>) {
        let Some(Some(lane)) = self.nbd.lanes.get_mut(index) else {
            return (Phase::Taken, Ok(Reading::Drained));
        };
        if lane.unsent() >= REPLIES_BYTES_MAX as u64 {
            lane.paused = true;
            return (Phase::Haggling(haggle), Ok(Reading::Paused));
        }
        // After a pause, first the options that arrived before it.
        if !std::mem::take(&mut lane.paused) || lane.held.is_empty() {
            let counters = &self.statistics.counters;
            let count = match receive_from(|| lane.link.receive(scratch, counters)) {
                Ok(Some(count)) => count,
                Ok(None) => return (Phase::Haggling(haggle), Ok(Reading::Drained)),
                Err(error) => return (Phase::Haggling(haggle), Err(error)),
            };
            lane.moved = Instant::now();
            lane.held.extend_from_slice(&scratch[..count]);
        }
        let held = std::mem::take(&mut lane.held);
        let catalogue: &dyn Catalogue = &*self.shared.disks;
        let progress = match haggle.receive(&held, &mut lane.batch, catalogue) {
            Ok(progress) => progress,
            Err(error) => {
                return (Phase::Haggling(haggle), Err(invalid(error)));
            }
        };
        lane.held = held[progress.used..].to_vec();
        match progress.ended {
            None => (Phase::Haggling(haggle), Ok(Reading::Goes)),
            Some(ended @ (Ended::Aborted | Ended::Refused(_))) => {
                if let Ended::Refused(why) = ended {
                    let line = format_args!("hanging up on an NBD client: {why}");
                    complaints::log(log::Level::Info, line);
                }
                lane.closing = true;
                self.nbd.ticking = true;
                (Phase::Taken, Ok(Reading::Paused))
            }
            Some(Ended::Agreed(agreed)) => {
                let Some(disk) = self.shared.disks.offered(&agreed.export) else {
                    let gone = io::Error::other("the disk is no longer exported as it was offered");
                    return (Phase::Taken, Err(gone));
                };
                // The rest of the input may already contain requests.
                lane.paused = true;
                let depth = disk.shape.depth as usize;
                lane.depth = if depth > 0 { depth } else { DEPTH_MAX as usize };
                lane.epoch = disk.epoch();
                lane.meter = client_of(&lane.link).map(|client| disk.meter(client));
                let ring_can = self.reactor.sends_zero_copy();
                lane.out.allow_in_place(in_place::begins(&disk, &lane.link, ring_can));
                let receiver = Box::new(Receiver::new(*agreed));
                (Phase::Serving(receiver, disk), Ok(Reading::Goes))
            }
        }
    }

    fn serve(
        &mut self,
        index: usize,
        receiver: &mut Receiver,
        disk: &Arc<towline_block::Disk>,
        scratch: &mut [u8],
    ) -> io::Result<Reading> {
        let form = receiver.agreed().form;
        receiver.grown(disk.geometry().size);
        let nbd = &mut self.nbd;
        let Some(Some(lane)) = nbd.lanes.get_mut(index) else { return Ok(Reading::Drained) };
        let was_paused = std::mem::replace(&mut lane.paused, false);
        let counters = &self.statistics.counters;
        let mut held = std::mem::take(&mut lane.held);
        let shutting_down = self.shared.disks.shutting_down();
        let mut serving = Serving {
            index,
            lane,
            disk,
            form,
            engine: &mut self.engine,
            driver: CoreDriver {
                reactor: &mut self.reactor,
                late: &mut self.late,
                pools: &self.shared.pools,
                mailbox: &self.mailbox,
            },
            statistics: &self.statistics,
            shutting_down,
            size: None,
            arrived: Instant::now(),
        };
        let mut drained = false;
        let received = if was_paused && !held.is_empty() {
            // First the input that could not be used before, and nothing more until it is used.
            let received = receiver.receive(&held, &mut serving).map_err(invalid)?;
            held.drain(..received.used);
            serving.lane.held = held;
            received
        } else if held.is_empty() && receiver.missing() >= PLACED_BYTES_MIN {
            let link = serving.lane.link.clone();
            serving.lane.glance.take(&link, counters)?;
            let missing = receiver.missing() as usize;
            match serving.target(missing) {
                None => Received { used: 0, blocked: true, disconnect: false },
                Some(mut target) => {
                    let wanted = target.len();
                    // Receives the next header with the same call.
                    let ahead = if wanted == missing { header_bytes(form) } else { 0 };
                    let ahead = &mut scratch[..ahead];
                    let room = wanted + ahead.len();
                    let received =
                        receive_from(|| link.receive_ahead(&mut target, ahead, counters))?;
                    let received = received.unwrap_or(0);
                    drained = received < room && !serving.lane.hung;
                    let count = received.min(wanted);
                    if count > 0 {
                        serving.lane.moved = Instant::now();
                        Counters::add(&counters.bytes_received_placed, count as u64);
                        receiver.placed(count);
                        serving.placed(count);
                    }
                    let input = &scratch[..received - count];
                    let received = receiver.receive(input, &mut serving).map_err(invalid)?;
                    serving.lane.held = input[received.used..].to_vec();
                    received
                }
            }
        } else {
            // From a client that writes much into memory, only short ends of payload are received here, since
            // they have to be copied. What is skipped is not.
            let bulk = serving.lane.expects_bulk
                && held.len() < header_bytes(form)
                && !receiver.is_skipping();
            let next = receiver.missing() as usize + header_bytes(form);
            let most = if bulk { next - held.len() } else { scratch.len() };
            let most = most.min(scratch.len());
            let scratch = &mut scratch[..most];
            let NbdLane { link, glance, moved, .. } = &mut *serving.lane;
            let received = receive_from(|| glance.receive(link, scratch, counters))?;
            if received.is_some() {
                *moved = Instant::now();
            }
            let count = received.unwrap_or(0);
            drained = count < scratch.len() && !serving.lane.hung;
            let input: &[u8] = if held.is_empty() {
                &scratch[..count]
            } else {
                held.extend_from_slice(&scratch[..count]);
                &held
            };
            let received = receiver.receive(input, &mut serving).map_err(invalid)?;
            serving.lane.held = input[received.used..].to_vec();
            received
        };
        // A write under way has been taken, whatever the limits for requests: it only lacks memory.
        let starves = received.blocked && receiver.missing() > 0;
        let waits = serving.waits().filter(|_| received.blocked && !starves);
        let lane = serving.lane;
        if lane.glance.is_behind() && !std::mem::replace(&mut lane.is_behind, true) {
            nbd.behind.push(index);
        }
        if received.disconnect {
            lane.closing = true;
            nbd.ticking = true;
            return Ok(Reading::Paused);
        }
        if received.blocked {
            lane.paused = true;
            if let Some(until) = waits {
                if lane.hung {
                    lane.check_leaving(form, counters)?;
                }
                if !std::mem::replace(&mut lane.is_throttled, true) {
                    nbd.throttled.push((until, index));
                }
            }
            if starves && !std::mem::replace(&mut lane.is_starving, true) {
                nbd.starving.push(index);
            }
            return Ok(Reading::Paused);
        }
        Ok(if drained { Reading::Drained } else { Reading::Goes })
    }

    pub(super) fn close_nbd(&mut self, index: usize, error: &io::Error) {
        if error.kind() == io::ErrorKind::InvalidData {
            self.statistics.protocol_errors.fetch_add(1, Ordering::Relaxed);
            complaints::warn(format_args!(
                "closing a connection whose NBD client broke the protocol: {error}"
            ));
            // What was answered before may still be sent.
            if let Some(Some(lane)) = self.nbd.lanes.get_mut(index) {
                let _ = lane.flush(&mut self.pipe, &self.statistics.counters);
            }
        }
        self.drop_nbd(index);
    }

    fn drop_nbd(&mut self, index: usize) {
        let Some(mut lane) = self.nbd.lanes.get_mut(index).and_then(Option::take) else { return };
        lane.take_looked(&self.statistics.counters);
        if let Some(fd) = lane.link.fd() {
            // Fails only if the peer closed first.
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
            let _ = self.reactor.unwatch(fd, NBD_TOKENS + index as u64);
        }
        if let Some(filling) = lane.filling {
            self.engine.abandon(filling.key);
        }
        self.engine.remove_owner(lane.owner);
        if lane.is_throttled {
            self.nbd.throttled.retain(|(_, other)| *other != index);
        }
        if lane.is_behind {
            self.nbd.behind.retain(|other| *other != index);
        }
        self.nbd.free.push(index);
        self.statistics.lanes.fetch_sub(1, Ordering::Relaxed);
    }

    /// Ends connections that take too long: those that choose no disk, whatever they send; those that are
    /// done but do not take their last replies; and, while memory is short, those that hold memory and do not
    /// move a byte.
    fn tick_nbd(&mut self) {
        self.nbd.ticked = Instant::now();
        self.nbd.ticking = false;
        let stall = Duration::from_secs(CLIENT_STALL_SECONDS);
        // Not if lanes only wait for a disk that hangs.
        let memory_is_short = self.is_starving() && self.engine.is_out_of_memory();
        if memory_is_short {
            // Those that hold memory of disks.
            self.end_deaf(stall, |lane| lane.reads.is_some());
        }
        for index in 0..self.nbd.lanes.len() {
            let Some(lane) = &self.nbd.lanes[index] else { continue };
            let too_late = match lane.phase {
                Phase::Haggling(_) => lane.since.elapsed() > self.shared.nbd_handshake,
                _ => {
                    let works = self.engine.requests_of(lane.owner) > 0;
                    lane.closing && !works && lane.moved.elapsed() > stall
                }
            };
            if too_late {
                self.close_nbd(index, &io::ErrorKind::TimedOut.into());
                continue;
            }
            self.nbd.ticking |= lane.closing || matches!(lane.phase, Phase::Haggling(_));
            if !memory_is_short {
                continue;
            }
            let holds = !lane.is_drained()
                || lane.unreleased > 0
                || lane.filling.as_ref().is_some_and(|filling| filling.buffer.is_some());
            let waits_for_us = self.nbd.starving.contains(&index);
            if holds && !waits_for_us && lane.moved.elapsed() > stall {
                self.close_nbd(index, &io::ErrorKind::TimedOut.into());
            }
        }
    }
}

fn invalid(error: ProtocolError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Receives from a link; `None`: there is nothing to receive.
fn receive_from(mut receive: impl FnMut() -> io::Result<usize>) -> io::Result<Option<usize>> {
    loop {
        match receive() {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => return Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
