//! The receiver's side: opens contexts on buffers of other nodes, and writes them back.

use crate::Error;
use crate::choose::{Choice, Strategy};
use crate::counters::Way;
use crate::limits::FRAGMENTS_AHEAD;
use crate::message::{Control, Place, Range, Want, stream};
use crate::operation::{Held, Job, Operation, Run, Stage, from_wire, wire_number};
use crate::owner::{PUSH_BIT, TAG_BYTES};
use crate::state::{BUFFER_BYTES, Hungry, OWN, PeerId, State};
use crate::{Intent, ProtocolError};
use std::io;
use std::sync::Arc;
use towline_mem::{Aggregate, Region, Segment, SharedMemory, read_process};
use towline_net::{Wait, receive_descriptors};
use towline_wire::Errno;

impl State {
    /// Adds an operation whose runs are prepared. It starts when it has its buffers.
    pub(crate) fn enter(&mut self, number: u64, job: Job, runs: Vec<Run>, group: Option<u64>) {
        let unfinished = runs.len();
        let operation = Operation { job, runs, unfinished, error: None, group, is_finished: false };
        self.operations.insert(number, operation);
        if unfinished == 0 {
            self.finish(number);
        } else {
            self.hungry.push_back(Hungry::Operation(number));
            self.feed();
        }
    }

    /// Refuses runs that need more buffers than there are.
    pub(crate) fn check_pool(&self, runs: &[Run]) -> Result<(), Error> {
        let needed = runs.iter().map(Run::buffers_needed).sum::<u64>();
        let needed = needed.saturating_mul(BUFFER_BYTES); // a forged name may be 2^64 bytes long
        let pool = (self.options.pool_buffers - self.reserved()) as u64 * BUFFER_BYTES;
        if needed > pool {
            return Err(Error::TooLarge { needed, pool });
        }
        Ok(())
    }

    /// Takes the buffers that an operation needs, and starts it when it has all of them. Returns false
    /// if there are not enough yet; the operation keeps those it got.
    pub(crate) fn feed_operation(&mut self, number: u64) -> bool {
        let Some(operation) = self.operations.get_mut(&number) else { return true };
        if operation.is_finished {
            return true;
        }
        for run in &mut operation.runs {
            while (run.buffers.len() as u64) < run.buffers_needed() {
                let Some(buffer) = self.pool.take() else { return false };
                run.buffers.push(buffer);
            }
        }
        for index in 0..operation.runs.len() {
            self.start_run(number, index);
        }
        true
    }

    /// Starts one run: requests its data from the owner, or starts to write it back.
    fn start_run(&mut self, number: u64, index: usize) {
        let Some(operation) = self.operations.get_mut(&number) else { return };
        let writes = matches!(operation.job, Job::Close { .. });
        let Some(run) = operation.runs.get_mut(index) else { return };
        if operation.is_finished {
            return;
        }
        match run.stage {
            Stage::Waiting => {}
            // Nothing to move: its own buffers, or data pushed before.
            Stage::InPlace => {
                let (way, length) = (run.way, run.length);
                self.counts.at(way).operations += 1;
                if way == Way::Own {
                    self.counts.at(way).bytes_in += length;
                }
                self.run_finished(number, index);
                return;
            }
            // It was started before another one had to wait again.
            Stage::Asked | Stage::Done => return,
        }
        let peer = run.peer;
        if !self.peers.contains_key(&peer) {
            self.fail(number, Error::PeerLost);
            return;
        }
        run.stage = Stage::Asked;
        if writes {
            self.start_update(number, index);
            return;
        }
        run.granted = run.length.min(FRAGMENTS_AHEAD * BUFFER_BYTES);
        let fetch = Control::Fetch {
            operation: wire_number(number, index),
            want: run.strategy.map_or(Want::Lease, Want::Data),
            granted: run.granted,
            ranges: run.ranges.clone(),
        };
        let way = run.way;
        if run.strategy.is_some() {
            self.counts.at(way).operations += 1;
        }
        self.post(peer, &fetch);
    }

    fn start_update(&mut self, number: u64, index: usize) {
        let operation = wire_number(number, index);
        let is_forced = self.operations.get(&number).is_some_and(|op| {
            matches!(op.job, Job::Close { choice: Choice::Forced(Strategy::Push), .. })
        });
        let Some(peer) = self.asked(None, operation).map(|run| run.peer) else { return };
        let granted = self.granted_by(peer);
        let Some(run) = self.asked(None, operation) else { return };
        // Another write-back has used the grant since the strategy was chosen.
        if run.strategy == Some(Strategy::Push) && run.source.len() > granted && !is_forced {
            (run.strategy, run.way) = (Some(Strategy::Pull), Way::Pull);
        }
        let (way, ranges) = (run.way, run.ranges.clone());
        let strategy = run.strategy.unwrap_or(Strategy::Pull);
        let mut update = Control::Update { operation, strategy, pushed: 0, ranges };
        match strategy {
            Strategy::Inline => {
                let data = std::mem::take(&mut run.source);
                self.count_out(peer, way, &data);
                self.post_with(peer, &update, data);
            }
            Strategy::Push => {
                let data = std::mem::take(&mut run.source);
                let push = PUSH_BIT | self.number();
                if !self.push(peer, push, data) {
                    self.fail(number, Error::Strategy("peer has granted no memory to push into"));
                    return;
                }
                if let Control::Update { pushed, .. } = &mut update {
                    *pushed = push;
                }
                self.post(peer, &update);
            }
            _ => self.post(peer, &update),
        }
    }

    /// Sends data into memory that `peer` granted. Returns false if it did not grant enough.
    pub(crate) fn push(&mut self, peer: PeerId, number: u64, mut data: Aggregate) -> bool {
        let Some(to) = self.peers.get_mut(&peer) else { return false };
        let buffers = u32::try_from(data.len().div_ceil(BUFFER_BYTES)).unwrap_or(u32::MAX);
        let Some(left) = to.push_out.checked_sub(buffers) else { return false };
        to.push_out = left;
        self.count_out(peer, Way::Push, &data);
        let mut offset = 0;
        while !data.is_empty() {
            let fragment = data.split_to(BUFFER_BYTES);
            let length = fragment.len();
            self.post_data(peer, stream::PUSH, number, offset, fragment);
            offset += length;
        }
        true
    }

    /// Returns the bytes of a peer's memory that this node may push into.
    pub(crate) fn granted_by(&self, peer: PeerId) -> u64 {
        self.peers.get(&peer).map_or(0, |peer| u64::from(peer.push_out) * BUFFER_BYTES)
    }

    /// Sends what the owner granted of a write-back.
    pub(crate) fn send_update(&mut self, peer: PeerId, operation: u64, until: u64) {
        while let Some(run) = self.asked(Some(peer), operation) {
            let room = until.saturating_sub(run.sent);
            if room == 0 || run.source.is_empty() {
                return;
            }
            let fragment = run.source.split_to(room.min(BUFFER_BYTES));
            let offset = run.sent;
            run.sent += fragment.len();
            self.count_out(peer, Way::Pull, &fragment);
            self.post_data(peer, stream::UPDATE, operation, offset, fragment);
        }
    }

    /// Returns the run with this number if it was requested and belongs to `peer`.
    pub(crate) fn asked(&mut self, peer: Option<PeerId>, number: u64) -> Option<&mut Run> {
        let (operation, index) = from_wire(number);
        let operation = self.operations.get_mut(&operation).filter(|op| !op.is_finished)?;
        let run = operation.runs.get_mut(index)?;
        (run.stage == Stage::Asked && peer.is_none_or(|peer| peer == run.peer)).then_some(run)
    }

    /// Handles the arrival of data of a fetch.
    pub(crate) fn received(&mut self, peer: PeerId, number: u64, count: u64) {
        let Some(run) = self.asked(Some(peer), number) else { return };
        run.received += count;
        let way = run.way;
        let ahead = run.granted - run.received;
        let mut grant = None;
        if run.granted < run.length && ahead <= FRAGMENTS_AHEAD * BUFFER_BYTES / 2 {
            run.granted = (run.received + FRAGMENTS_AHEAD * BUFFER_BYTES).min(run.length);
            grant = Some(run.granted);
        }
        let counts = self.counts.at(way);
        counts.bytes_in += count;
        counts.bytes_copied += count;
        if let Some(until) = grant {
            self.post(peer, &Control::Grant { operation: number, owner: false, until });
        }
    }

    /// Handles the owner's report that it has sent or applied everything.
    pub(crate) fn done(
        &mut self,
        peer: PeerId,
        number: u64,
        payload: &[u8],
    ) -> Result<(), ProtocolError> {
        let (operation, index) = from_wire(number);
        let Some(run) = self.asked(Some(peer), number) else { return Ok(()) };
        let length = payload.len() as u64;
        if matches!(run.strategy, Some(Strategy::Map | Strategy::PullDirect)) {
            return Err(ProtocolError { what: "answer of another strategy", at: 0 });
        }
        if run.way == Way::Inline && run.source.is_empty() && run.strategy.is_some() {
            // A write-back has no buffers, and its answer no payload.
            let expected = if run.buffers.is_empty() { 0 } else { run.length };
            if length != expected {
                return Err(ProtocolError { what: "inline data is not as long as asked", at: 0 });
            }
            if let Some(buffer) = run.buffers.first_mut() {
                buffer.bytes_mut()[..payload.len()].copy_from_slice(payload);
                let counts = self.counts.at(Way::Inline);
                counts.bytes_in += length;
                counts.bytes_copied += 2 * length; // off the link, then into the buffer
            }
        } else if length > 0 {
            return Err(ProtocolError { what: "unexpected payload", at: 0 });
        } else if run.strategy.is_some() && !run.buffers.is_empty() && run.received != run.length {
            return Err(ProtocolError { what: "less data than asked for", at: 0 });
        } else if !run.source.is_empty() {
            return Err(ProtocolError {
                what: "write-back acknowledged before it was sent",
                at: 0,
            });
        }
        self.run_finished(operation, index);
        Ok(())
    }

    /// Handles the owner's answer to a direct fetch: reads its memory at these places.
    pub(crate) fn read_regions(
        &mut self,
        peer: PeerId,
        number: u64,
        regions: &[Region],
    ) -> Result<(), ProtocolError> {
        let (operation, index) = from_wire(number);
        let direct = self.peers.get(&peer).and_then(|peer| peer.direct);
        let Some(run) = self.asked(Some(peer), number) else { return Ok(()) };
        let total = regions.iter().try_fold(0u64, |sum, r| sum.checked_add(r.length));
        let (Some(direct), Some(Strategy::PullDirect)) = (direct, run.strategy) else {
            return Err(ProtocolError { what: "regions that were not asked for", at: 0 });
        };
        if total != Some(run.length) {
            return Err(ProtocolError { what: "regions are not as long as asked", at: 0 });
        }
        let length = run.length;
        match read_regions(direct, regions, run) {
            Ok(()) => {
                let counts = self.counts.at(Way::PullDirect);
                counts.bytes_in += length;
                counts.bytes_copied += length;
                self.run_finished(operation, index);
            }
            Err(error) => self.fail(operation, error.into()),
        }
        Ok(())
    }

    /// Handles the owner's answer to a mapping fetch: maps the memory that it passed.
    pub(crate) fn map(
        &mut self,
        peer: PeerId,
        number: u64,
        memories: u8,
        places: &[Place],
    ) -> Result<(), ProtocolError> {
        let (operation, index) = from_wire(number);
        let Some(channel) = self.peers.get(&peer).and_then(|peer| peer.channel.as_ref()) else {
            return Err(ProtocolError { what: "memory given over a link that cannot", at: 0 });
        };
        // Receive the descriptors even if they are no longer wanted, so that the next ones are the right
        // ones.
        let mut given = Vec::new();
        for _ in 0..memories {
            given.push(loop {
                let mut tag = [0; TAG_BYTES];
                let missing = ProtocolError { what: "memory was promised and not given", at: 0 };
                let (count, fds) =
                    receive_descriptors(channel, &mut tag, Wait::No).map_err(|_| missing)?;
                let (Ok([fd]), TAG_BYTES) = (<[_; 1]>::try_from(fds), count) else {
                    return Err(missing);
                };
                let (of, length) = tag.split_at(8);
                // Memory of another operation was left when the socket took only a part of it, and the
                // owner refused that operation.
                if *of == number.to_le_bytes() {
                    let mut bytes = [0; 8];
                    bytes.copy_from_slice(length);
                    break (fd, u64::from_le_bytes(bytes));
                }
            });
        }
        let writes = self.operations.get(&operation).is_some_and(|op| {
            matches!(op.job, Job::Open { intent: Intent::ReadWrite | Intent::Write, .. })
        });
        let Some(run) = self.asked(Some(peer), number) else { return Ok(()) };
        if run.strategy != Some(Strategy::Map) {
            return Err(ProtocolError { what: "memory that was not asked for", at: 0 });
        }
        let total = places.iter().try_fold(0u64, |sum, place| sum.checked_add(place.length));
        if total != Some(run.length) {
            return Err(ProtocolError { what: "places are not as long as asked", at: 0 });
        }
        let mapped: io::Result<Vec<Arc<SharedMemory>>> = given
            .into_iter()
            .map(|(fd, length)| {
                let length = usize::try_from(length).unwrap_or(usize::MAX);
                SharedMemory::open(fd, length, writes).map(Arc::new)
            })
            .collect();
        let mapped = match mapped {
            Ok(mapped) => mapped,
            Err(error) => {
                self.fail(operation, error.into());
                return Ok(());
            }
        };
        for place in places {
            let memory = mapped.get(usize::from(place.memory));
            let end = place.offset.checked_add(place.length);
            match (memory, end) {
                (Some(memory), Some(end)) if end <= memory.len() as u64 => {
                    let segment = Segment::Shared(memory.clone(), None);
                    run.in_place.append(segment, place.offset, place.length);
                }
                _ => return Err(ProtocolError { what: "place outside of its memory", at: 0 }),
            }
        }
        self.counts.at(Way::Map).bytes_in += total.unwrap_or(0);
        self.run_finished(operation, index);
        Ok(())
    }

    /// Handles the other side's report that it cannot do its part of an operation.
    pub(crate) fn failed(&mut self, number: u64, peer: PeerId, errno: u16) {
        let (operation, index) = from_wire(number);
        let Some(all) = self.operations.get(&operation) else { return };
        let intent = match all.job {
            Job::Open { intent, choice: Choice::Automatic } => Some(intent),
            _ => None,
        };
        let holds_none = all.runs.iter().all(|run| run.buffers.is_empty());
        let intent = intent.filter(|_| Errno(errno) == Errno::EOPNOTSUPP);
        let Some(run) = self.asked(Some(peer), number) else { return };
        // Only the owner knows whether its memory is in too many pieces to be read directly, or is more
        // memories than can be passed.
        match (run.strategy, intent) {
            (Some(Strategy::PullDirect), Some(_)) => {
                run.strategy = Some(Strategy::Pull);
                (run.way, run.stage) = (Way::Pull, Stage::Waiting);
                self.start_run(operation, index);
            }
            // This needs buffers that the operation has not taken. It may wait for them only if it holds
            // none, for which the others would wait.
            (Some(Strategy::Map), Some(intent)) if holds_none => {
                run.strategy = (intent != Intent::Write).then_some(Strategy::Pull);
                (run.way, run.stage) = (Way::Pull, Stage::Waiting);
                let checked = self.operations.get(&operation).map(|op| self.check_pool(&op.runs));
                if let Some(Err(error)) = checked {
                    self.fail(operation, error);
                } else {
                    self.hungry.push_back(Hungry::Operation(operation));
                    self.feed();
                }
            }
            _ => self.fail(operation, Error::Refused(Errno(errno))),
        }
    }

    fn run_finished(&mut self, number: u64, index: usize) {
        let Some(operation) = self.operations.get_mut(&number) else { return };
        if let Some(run) = operation.runs.get_mut(index) {
            run.stage = Stage::Done;
        }
        operation.unfinished -= 1;
        if operation.unfinished == 0 {
            self.finish(number);
        }
    }

    /// Fails an operation as a whole: everything it holds is given back.
    pub(crate) fn fail(&mut self, number: u64, error: Error) {
        let Some(operation) = self.operations.get_mut(&number) else { return };
        if operation.is_finished {
            return;
        }
        operation.error = Some(error);
        let is_open = matches!(operation.job, Job::Open { .. });
        let mut held = Vec::new();
        for (index, run) in operation.runs.iter_mut().enumerate() {
            run.buffers.clear();
            run.source = Aggregate::new();
            // An owner also has to know that the rest of a write-back will not come: it keeps a buffer for it.
            if run.stage == Stage::Asked || is_open && run.stage != Stage::Waiting {
                held.push(Held {
                    peer: run.peer,
                    number: run.pushed.unwrap_or(wire_number(number, index)),
                    is_push: run.pushed.is_some(),
                });
            }
        }
        for lease in held {
            self.give_back(lease, false);
        }
        self.finish(number);
        self.feed();
    }

    /// Closes one lease of a context.
    pub(crate) fn give_back(&mut self, lease: Held, acknowledged: bool) {
        let Held { peer, number, is_push } = lease;
        if is_push {
            self.release_pushed(peer, number, acknowledged);
        } else if peer == OWN {
            self.end_lease(OWN, number, Some(acknowledged));
        } else {
            self.post(peer, &Control::Close { operation: number, acknowledged });
        }
    }

    /// Marks an operation as finished, and ends the leases of contexts that it closes.
    fn finish(&mut self, number: u64) {
        let Some(operation) = self.operations.get_mut(&number) else { return };
        operation.is_finished = true;
        let group = operation.group;
        if let Job::Close { leases, acknowledged, .. } = &mut operation.job {
            let (leases, acknowledged) = (std::mem::take(leases), *acknowledged);
            let acknowledged = acknowledged && operation.error.is_none();
            operation.runs.clear();
            for lease in leases {
                self.give_back(lease, acknowledged);
            }
        }
        match group {
            Some(group) => self.groups.entry(group).or_default().push_back(number),
            None => self.finished.push_back(number),
        }
    }

    /// Fails the operations that wait for something over a lost link.
    pub(crate) fn fail_runs_of(&mut self, peer: PeerId) {
        let needs = |op: &Operation| {
            let waits = |run: &Run| matches!(run.stage, Stage::Waiting | Stage::Asked);
            !op.is_finished && op.runs.iter().any(|run| run.peer == peer && waits(run))
        };
        let failed: Vec<u64> =
            self.operations.iter().filter(|(_, op)| needs(op)).map(|(number, _)| *number).collect();
        for number in failed {
            self.fail(number, Error::PeerLost);
        }
    }

    /// Finds pushed data of the peer that covers all of `ranges`; returns the number of that push and
    /// the data.
    pub(crate) fn find_pushed(&self, peer: PeerId, ranges: &[Range]) -> Option<(u64, Aggregate)> {
        let cover = |pushed: &crate::state::Pushed| {
            let mut found = Aggregate::new();
            for range in ranges {
                let mut before = 0;
                let at = pushed.ranges.iter().find_map(|have| {
                    let start = before;
                    before += have.length;
                    let inside = have.handle == range.handle
                        && have.generation == range.generation
                        && have.offset <= range.offset
                        && range.offset + range.length <= have.offset + have.length;
                    inside.then(|| start + (range.offset - have.offset))
                })?;
                let (mut at, end) = (at, at + range.length);
                while at < end {
                    let inside = at % BUFFER_BYTES;
                    let count = (BUFFER_BYTES - inside).min(end - at);
                    let buffer = pushed.buffers.get((at / BUFFER_BYTES) as usize)?;
                    found.append(Segment::Registered(buffer.clone()), inside, count);
                    at += count;
                }
            }
            Some(found)
        };
        self.pushed
            .iter()
            .filter(|(key, pushed)| key.0 == peer && pushed.holders > 0)
            .find_map(|(key, pushed)| Some((key.1, cover(pushed)?)))
    }
}

/// Copies an owner's memory into the buffers of a run. Reads the proof along with it, which shows that
/// the process is still the one that sent the greeting.
fn read_regions(direct: crate::state::Direct, regions: &[Region], run: &mut Run) -> io::Result<()> {
    let mut proof = [0; 8];
    let mut from = vec![Region { address: direct.proof_address, length: 8 }];
    from.extend_from_slice(regions);
    let length = run.length;
    let mut targets: Vec<&mut [u8]> = vec![&mut proof];
    for (index, buffer) in run.buffers.iter_mut().enumerate() {
        let count = (length - index as u64 * BUFFER_BYTES).min(BUFFER_BYTES) as usize;
        targets.push(&mut buffer.bytes_mut()[..count]);
    }
    let count = read_process(direct.process, &from, &mut targets)?;
    if count as u64 != length + 8 || u64::from_le_bytes(proof) != direct.proof_value {
        return Err(io::Error::from_raw_os_error(Errno::EIO.0.into()));
    }
    Ok(())
}
