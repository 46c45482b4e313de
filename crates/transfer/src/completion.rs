//! Starts operations and waits for them: for one, for any, or for those of a group.

use crate::choose::{Choice, Situation, Strategy, choose, least_capable};
use crate::context::{Context, Piece};
use crate::counters::Way;
use crate::global::{Access, Global, Part};
use crate::limits::{MAPPED_PARTS_MAX, REGIONS_MAX};
use crate::message::Range;
use crate::node::Node;
use crate::operation::{Finished, Group, Job, OperationId, Run, Stage, wire_number};
use crate::owner::PUSH_BIT;
use crate::state::{BUFFER_BYTES, OWN, PeerId, State};
use crate::{Error, Intent};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use towline_wire::limits::INLINE_BYTES_MAX;

impl Node {
    /// Opens a context on a global aggregate and waits until its data has arrived.
    ///
    /// # Errors
    /// See [`Node::start_open`] and [`Node::wait`].
    pub fn open(&self, global: &Global, intent: Intent, choice: Choice) -> Result<Context, Error> {
        let operation = self.start_open(global, intent, choice, None)?;
        match self.wait(operation, None)? {
            Finished::Opened(context) => Ok(context),
            Finished::Closed => Err(Error::NoOperation),
        }
    }

    /// Starts to open a context. First connects to owners that are not linked yet, and waits for that.
    /// The operation then takes all the pool memory that it needs, in the order of the calls, and waits
    /// while other operations occupy it.
    ///
    /// # Errors
    /// `Unreachable`: there is no link to an owner, and none can be established; `TooLarge`: needs more
    /// than the pool has, apart from what is reserved for pushes; `Strategy`: the forced one cannot be used;
    /// `Invalid`: too many parts, or for writing although the descriptor allows only reading;
    /// `Refused(ESTALE)` for this node's own buffers.
    pub fn start_open(
        &self,
        global: &Global,
        intent: Intent,
        choice: Choice,
        group: Option<Group>,
    ) -> Result<OperationId, Error> {
        global.check_limits()?;
        if intent != Intent::Read && global.parts().any(|part| part.access == Access::Read) {
            return Err(Error::Invalid("buffers were globalized for reading"));
        }
        let own = self.number();
        let mut links: HashMap<u64, PeerId> = HashMap::from([(own, OWN)]);
        for home in global.homes() {
            if let Entry::Vacant(link) = links.entry(home.node) {
                link.insert(self.0.reach(home)?);
            }
        }
        self.0.with(|state| {
            let mut runs = Vec::new();
            let parts: Vec<&Part> = global.parts().collect();
            for parts in parts.chunk_by(|a, b| a.home.node == b.home.node) {
                let peer = links[&parts[0].home.node];
                runs.push(fetch(state, peer, parts, intent, choice)?);
            }
            state.check_pool(&runs)?;
            let number = state.number();
            for (index, run) in runs.iter().enumerate() {
                if run.peer == OWN {
                    let begun = state.begin_lease(OWN, wire_number(number, index), &run.ranges);
                    if let Err(errno) = begun {
                        for (earlier, run) in runs[..index].iter().enumerate() {
                            if run.peer == OWN {
                                let lease = wire_number(number, earlier);
                                state.end_lease(OWN, lease, Some(false));
                            }
                        }
                        return Err(Error::Refused(errno));
                    }
                }
            }
            for run in &runs {
                if let Some(push) = run.pushed
                    && let Some(pushed) = state.pushed.get_mut(&(run.peer, push))
                {
                    pushed.holders += 1;
                }
            }
            start(state, number, Job::Open { intent, choice }, runs, group);
            Ok(OperationId(number))
        })
    }

    /// Waits for one operation.
    ///
    /// # Errors
    /// `TimedOut`: the operation continues; `Refused`, `PeerLost` and others: why it failed; `NoOperation`.
    pub fn wait(&self, operation: OperationId, limit: Option<Duration>) -> Result<Finished, Error> {
        self.0.wait_until(limit, |state| {
            match state.operations.get(&operation.0).map(|op| op.is_finished) {
                None => Some(Err(Error::NoOperation)),
                Some(false) => None,
                Some(true) => Some(self.result(state, operation.0)),
            }
        })?
    }

    /// Waits for any operation without a group, and takes the one that finished first.
    ///
    /// # Errors
    /// `TimedOut`; `NoOperation`: none is in progress and none has finished.
    pub fn wait_any(
        &self,
        limit: Option<Duration>,
    ) -> Result<(OperationId, Result<Finished, Error>), Error> {
        self.0.wait_until(limit, |state| {
            if let Some(number) = state.finished.pop_front() {
                return Some(Ok((OperationId(number), self.result(state, number))));
            }
            let none = !state.operations.values().any(|op| op.group.is_none());
            none.then_some(Err(Error::NoOperation))
        })?
    }

    /// Creates a group of operations.
    #[must_use]
    pub fn group(&self) -> Group {
        Group(self.0.with(State::number))
    }

    /// Waits for any operation of a group.
    ///
    /// # Errors
    /// See [`Node::wait_any`].
    pub fn wait_group(
        &self,
        group: Group,
        limit: Option<Duration>,
    ) -> Result<(OperationId, Result<Finished, Error>), Error> {
        self.0.wait_until(limit, |state| {
            let first = state.groups.get(&group.0).and_then(VecDeque::front);
            if let Some(number) = first.copied() {
                return Some(Ok((OperationId(number), self.result(state, number))));
            }
            let none = !state.operations.values().any(|op| op.group == Some(group.0));
            none.then_some(Err(Error::NoOperation))
        })?
    }

    /// Gives up an operation, finished or not: its buffers and leases are returned. Part of what was
    /// being written may have reached its owner.
    ///
    /// # Errors
    /// `NoOperation`.
    pub fn cancel(&self, operation: OperationId) -> Result<(), Error> {
        let result = self.0.with(|state| {
            state.fail(operation.0, Error::TimedOut);
            self.result(state, operation.0)
        });
        // An open context is dropped here, without holding the lock.
        match result {
            Err(Error::NoOperation) => Err(Error::NoOperation),
            _ => Ok(()),
        }
    }

    /// Takes the result of a finished operation.
    fn result(&self, state: &mut State, number: u64) -> Result<Finished, Error> {
        let operation = state.operations.remove(&number).ok_or(Error::NoOperation)?;
        match operation.group {
            Some(group) => {
                if let Entry::Occupied(mut finished) = state.groups.entry(group) {
                    finished.get_mut().retain(|other| *other != number);
                    if finished.get().is_empty() {
                        finished.remove();
                    }
                }
            }
            None => state.finished.retain(|other| *other != number),
        }
        if let Some(error) = operation.error {
            return Err(error);
        }
        match operation.job {
            Job::Close { .. } => Ok(Finished::Closed),
            Job::Open { intent, choice } => {
                let runs = operation.runs.into_iter().enumerate();
                let pieces = runs.map(|(index, run)| Piece::of(run, number, index)).collect();
                Ok(Finished::Opened(Context::new(self.clone(), pieces, intent, choice)))
            }
        }
    }
}

/// Adds an operation to the state.
pub(crate) fn start(
    state: &mut State,
    number: u64,
    job: Job,
    runs: Vec<Run>,
    group: Option<Group>,
) {
    debug_assert_eq!(number & (PUSH_BIT >> 16), 0, "numbers stay below those of pushes");
    state.enter(number, job, runs, group.map(|group| group.0));
}

/// Returns the run that fetches the parts of one owner.
fn fetch(
    state: &State,
    peer: PeerId,
    parts: &[&Part],
    intent: Intent,
    choice: Choice,
) -> Result<Run, Error> {
    let ranges: Vec<Range> = parts.iter().map(|part| Range::of(part)).collect();
    if peer == OWN {
        let in_place = state.resolve(&ranges, intent != Intent::Read).map_err(Error::Refused)?;
        let mut run = Run::new(OWN, ranges, Way::Own);
        (run.in_place, run.stage) = (in_place, Stage::InPlace);
        return Ok(run);
    }
    let length = ranges.iter().map(|range| range.length).sum::<u64>();
    let may_be_pushed = intent == Intent::Read
        && matches!(choice, Choice::Automatic | Choice::Forced(Strategy::Push));
    if let Some((number, in_place)) =
        may_be_pushed.then(|| state.find_pushed(peer, &ranges)).flatten()
    {
        let mut run = Run::new(peer, ranges, Way::Push);
        (run.in_place, run.pushed, run.stage) = (in_place, Some(number), Stage::InPlace);
        return Ok(run);
    }
    let link = state.ready_peer(peer)?;
    let reads_memory = link.direct.is_some()
        && parts.len() <= REGIONS_MAX
        && length.div_ceil(BUFFER_BYTES) <= REGIONS_MAX as u64;
    let passes_descriptors = link.channel.is_some() && parts.len() <= MAPPED_PARTS_MAX;
    let situation = Situation {
        length,
        kind: least_capable(parts.iter().map(|part| part.kind)),
        passes_descriptors,
        reads_memory: reads_memory && intent != Intent::Write,
        granted: 0,
        writes: false,
    };
    let strategy = match choice {
        // Data that will be overwritten is not fetched, unless it is written where the owner has it.
        Choice::Automatic => choose(&situation),
        Choice::Forced(strategy) => forced(strategy, &situation, intent)?,
    };
    let way = match strategy {
        Strategy::Inline => Way::Inline,
        Strategy::Push | Strategy::Pull => Way::Pull,
        Strategy::PullDirect => Way::PullDirect,
        Strategy::Map => Way::Map,
    };
    let only_lease = intent == Intent::Write && strategy != Strategy::Map;
    let mut run = Run::new(peer, ranges, if only_lease { Way::Pull } else { way });
    run.strategy = (!only_lease).then_some(strategy);
    Ok(run)
}

/// Checks whether the strategy that the caller wants can be used.
fn forced(strategy: Strategy, s: &Situation, intent: Intent) -> Result<Strategy, Error> {
    match strategy {
        Strategy::Inline if s.length > INLINE_BYTES_MAX as u64 => {
            Err(Error::Strategy("inline data is at most 16 KiB"))
        }
        // Written data can be pushed to its owner; the existing data is fetched with a pull.
        Strategy::Push if intent != Intent::Read => Ok(Strategy::Pull),
        Strategy::Push => Err(Error::Strategy("the owner did not push this data with a message")),
        Strategy::PullDirect if !s.reads_memory && intent != Intent::Write => {
            Err(Error::Strategy("memory of the owner cannot be read from here"))
        }
        Strategy::Map if !s.passes_descriptors => {
            Err(Error::Strategy("the link passes no descriptors, or there are too many parts"))
        }
        other => Ok(other),
    }
}
