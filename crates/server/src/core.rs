//! A core: one thread with an event loop, lanes and sessions.

mod abreast;
mod giving_way;
mod mail;
mod moving;
mod news;
mod order;
mod receiving;
mod resting;
mod round;
mod staying;

use crate::caller::Callers;
use crate::disks::Disks;
use crate::ending::Orphan;
use crate::exports::Exports;
use crate::failure::Failure;
use crate::families::Families;
use crate::grants::Running;
use crate::kept::Kept;
use crate::lane::Lane;
use crate::mailbox::{Mail, Mailbox};
use crate::native::{self, Taken};
use crate::nbd::driver::{CoreDriver, Late};
use crate::nbd::{self, Nbd};
use crate::pools::Pools;
use crate::priority::Queue;
use crate::sessions::Sessions;
use crate::stats::{CoreStatistics, SENT_BYTES_MIN, Stages};
use crate::waiting::Waiting;
pub(crate) use moving::{Homes, Moving};
use order::Order;
pub(crate) use order::Place;
use parking_lot::{Mutex, RwLock};
use resting::Resting;
use staying::Staying;
pub(crate) use staying::Stays;
use std::collections::BinaryHeap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use towline_block::{Engine, Moved};
use towline_mem::Pool;
use towline_net::address::Listener;
use towline_net::{Flushed, Link, LinkKind, Pipe, ShmLink, Spin};
use towline_reactor::{Event, Finished, Reactor};
use towline_session::Closed;
use towline_session::locks::{Locks, Owner, Waiter};
use towline_session::state::State;
use towline_store::directory::requests_arrived;
use towline_wire::Header;

/// State shared by all cores.
pub(crate) struct Shared {
    pub(crate) exports: Exports,
    pub(crate) disks: Arc<Disks>,
    /// Time that an NBD client has to choose its disk.
    pub(crate) nbd_handshake: Duration,
    /// How long cores spin before they sleep.
    pub(crate) spin: Duration,
    pub(crate) locks: Mutex<Locks>,
    /// When the server was started.
    pub(crate) started: Instant,
    /// How long after a restart the locks of clients that are not back are held.
    pub(crate) lock_grace: Duration,
    pub(crate) mailboxes: Vec<Mailbox>,
    pub(crate) pools: Pools,
    pub(crate) boot_epoch: u32,
    /// Number of the local socket to which clients on this machine move from TCP; zero: none.
    pub(crate) local_socket: u64,
    pub(crate) next_core: AtomicUsize,
    pub(crate) next_session: AtomicU64,
    pub(crate) homes: Homes,
    pub(crate) stays: Arc<Stays>,
    pub(crate) families: Families,
    /// Listings that other threads than cores have.
    pub(crate) listings: Arc<AtomicUsize>,
    pub(crate) identity: bool,
    pub(crate) squash_root: bool,
    /// Keeps sessions across a restart.
    pub(crate) state: Option<Arc<State>>,
    pub(crate) kept: Option<Arc<Kept>>,
    pub(crate) failure: Failure,
    /// Statistics of each core.
    pub(crate) cores: Vec<Arc<CoreStatistics>>,
    /// The first core accepts connections from these; while it hangs, the watching thread does. Empty once
    /// the server ends.
    pub(crate) listeners: RwLock<Vec<(Listener, Protocol)>>,
}

impl Shared {
    /// Returns the core for the next connection; cores that hang are left out. `None`: all of them hang.
    pub(crate) fn core_for_newcomer(&self) -> Option<usize> {
        let next = || self.next_core.fetch_add(1, Ordering::Relaxed) % self.cores.len();
        (0..self.cores.len()).map(|_| next()).find(|core| self.cores[*core].turns.waiting() == 0)
    }

    /// Returns the core on which a session lives: the one that its number says, unless it has moved.
    pub(crate) fn home(&self, session: u64) -> usize {
        let first = (session % self.mailboxes.len() as u64) as usize;
        self.homes.get(session).unwrap_or(first)
    }

    /// Puts the boot epoch and the server's time for the request into the header of a reply.
    pub(crate) fn sign(&self, reply: &mut Header, server_ns: u64) {
        reply.word_a = self.boot_epoch;
        reply.word_b = u32::try_from(server_ns).unwrap_or(u32::MAX);
    }

    pub(crate) fn notify(&self, granted: Vec<Waiter>) {
        for waiter in granted {
            self.mailboxes[self.home(waiter.session)].send(Mail::Granted(waiter));
        }
    }

    /// Notes that a session or family that may have had locks before a restart is back.
    pub(crate) fn returned(&self, owner: u64) {
        if self.state.is_some() {
            self.locks.lock().returned(owner);
        }
    }

    /// Releases all locks of an open file or a process.
    pub(crate) fn release_locks(&self, owner: Owner) {
        let released = self.locks.lock().release(owner);
        self.notify(released.granted);
        self.ask_again(released.orphaned);
    }

    /// Tries again these requests for locks, which need not wait any longer.
    pub(crate) fn ask_again(&self, waiters: Vec<Waiter>) {
        for waiter in waiters {
            self.mailboxes[self.home(waiter.session)].send(Mail::AskAgain(waiter));
        }
    }
}

const LISTENER_TOKENS: u64 = 1 << 32;
const BELL_TOKEN: u64 = 1 << 33;
pub(crate) const NBD_TOKENS: u64 = 1 << 34;
/// Doorbells of lanes over shared memory, by lane.
pub(crate) const LANE_BELL_TOKENS: u64 = 1 << 35;
/// Size of the receive buffer, of which a core has one for all its lanes.
const SCRATCH_BYTES: usize = 128 * 1024;
/// Maximum number of finished requests that are not yet in the histograms after a turn.
pub(crate) const TIMED_MAX: usize = 32;
/// How often to check for clients that wait too long, while there may be some.
const TICK: Duration = Duration::from_secs(1);
/// How long new clients wait for free descriptors before the next try.
pub(crate) const REFUSING: Duration = Duration::from_millis(100);
/// How often a lack of descriptors is logged.
pub(crate) const REFUSING_TOLD: Duration = Duration::from_secs(60);
/// Connections do not ask all the time if nothing has happened for so long.
const IDLE: Duration = Duration::from_millis(20);
/// How long a server that shuts down waits for requests under way.
const DRAIN: Duration = Duration::from_secs(5);

/// Protocol of a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// Towline's own.
    Towline,
    /// NBD.
    Nbd,
}

/// A request to a disk; the engine returns it to the front that sent the request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ticket {
    /// NBD.
    Nbd(nbd::Tag),
    /// A session.
    Native(native::Tag),
}

/// One core of a server.
pub(crate) struct Core {
    pub(crate) index: usize,
    pub(crate) shared: Arc<Shared>,
    pub(crate) statistics: Arc<CoreStatistics>,
    pub(crate) mailbox: Mailbox,
    pub(crate) reactor: Reactor,
    spin: Spin,
    /// For pages of files on their way to any of the lanes.
    pub(crate) pipe: Pipe,
    /// Listeners that have more clients than are accepted in one turn.
    pub(crate) accepting: Vec<usize>,
    /// Listeners whose clients wait for free descriptors, and since when.
    pub(crate) refusing: Vec<(usize, Instant)>,
    /// When the lack of descriptors was last logged.
    pub(crate) refusing_told: Option<Instant>,
    pub(crate) lanes: Vec<Option<Lane>>,
    pub(crate) free_lanes: Vec<usize>,
    pub(crate) shm_lanes: Vec<usize>,
    pub(crate) sessions: Sessions,
    /// Sessions of processes that have ended.
    pub(crate) orphans: Vec<Orphan>,
    /// Sessions that have ended, but have requests under way.
    pub(crate) ending: Vec<u64>,
    pub(crate) callers: Callers,
    pub(crate) nbd: Nbd,
    /// Moves the bytes of disks for all fronts.
    pub(crate) engine: Engine<Ticket>,
    /// A client has used a disk.
    pub(crate) serves_disks: bool,
    /// What the engine has moved, as published in the statistics.
    pub(crate) moved_told: Moved,
    /// Transfers that the ring has finished; kept to reuse the allocation.
    pub(crate) finished: Vec<Finished>,
    /// Work of disks that simulate a delay.
    pub(crate) late: BinaryHeap<Late>,
    pub(crate) pool: Arc<Pool>,
    /// Bytes of buffers that hold writes to stores that may hang.
    pub(crate) bytes_elsewhere: Arc<AtomicU64>,
    /// Transfers that wait for their next grant, in turn.
    pub(crate) grant_queue: Queue<(u64, u16)>,
    /// The same for transfers to disks.
    pub(crate) disk_grants: Queue<(u64, u16)>,
    /// Requests that are held back before they begin.
    pub(crate) waiting: Waiting,
    /// Sizes of disks by identity, as read for the writes of this turn.
    pub(crate) disk_sizes: Vec<(u64, u64)>,
    /// Writes taken while they are still in a ring, from the lane that is being received.
    pub(crate) taken: Vec<Taken>,
    /// Allocation of an answered request, for the next one.
    pub(crate) spare: Option<Box<Running>>,
    /// Buffer in which messages are built.
    pub(crate) message: Vec<u8>,
    /// Times of finished requests that are counted but not yet in the histograms. They are recorded when the
    /// core has nothing else to do, or many at once, and not while a client waits for an answer.
    pub(crate) timed: Vec<Stages>,
    /// Lanes with messages to send after this turn.
    pub(crate) dirty: Vec<usize>,
    /// The lane that was last sent to.
    answered: Option<usize>,
    /// Files to close after the answers of this turn are sent: closing takes a while.
    pub(crate) closing: Vec<Closed>,
    /// Lanes that can no longer be sent to, see [`Core::end_failed`].
    failed: Vec<(usize, Arc<Link>, io::Error)>,
    /// Bytes moved at the time of the last guess.
    guessed_at: u64,
    /// Bytes moved when the core last had nothing to do.
    idle_at: u64,
    resting: Resting,
    /// Connections that can be read.
    order: Order,
    staying: Staying,
    pub(crate) draining: Option<Instant>,
    /// Work for this core panicked.
    broken: bool,
    /// Some client may have to be ended because it waits too long.
    pub(crate) ticking: bool,
    pub(crate) ticked: Instant,
}

impl Core {
    pub(crate) fn new(
        index: usize,
        shared: Arc<Shared>,
        statistics: Arc<CoreStatistics>,
        mut reactor: Reactor,
        pool: Arc<Pool>,
        disk_limits: towline_block::Limits,
    ) -> io::Result<Self> {
        let mailbox = shared.mailboxes[index].clone();
        use std::os::fd::AsFd;
        reactor.watch(mailbox.bell.fd().as_fd(), BELL_TOKEN)?;
        // The first core accepts connections and hands them out to all cores.
        if index == 0 {
            for (number, (listener, _)) in shared.listeners.read().iter().enumerate() {
                reactor.watch(listener.fd(), LISTENER_TOKENS + number as u64)?;
            }
        }
        let callers = Callers::new(shared.identity, shared.squash_root);
        // The first core ends sessions from before the restart that do not return.
        let ticking = index == 0 && shared.state.is_some();
        Ok(Self {
            index,
            statistics,
            mailbox,
            reactor,
            spin: Spin::new(shared.spin),
            pipe: Pipe::one_of(shared.cores.len()),
            accepting: Vec::new(),
            refusing: Vec::new(),
            refusing_told: None,
            lanes: Vec::new(),
            free_lanes: Vec::new(),
            shm_lanes: Vec::new(),
            sessions: Sessions::default(),
            orphans: Vec::new(),
            ending: Vec::new(),
            callers,
            nbd: Nbd::new(),
            engine: Engine::new(disk_limits),
            serves_disks: false,
            moved_told: Moved::default(),
            finished: Vec::new(),
            late: BinaryHeap::new(),
            pool,
            bytes_elsewhere: Arc::default(),
            grant_queue: Queue::default(),
            disk_grants: Queue::default(),
            waiting: Waiting::default(),
            disk_sizes: Vec::new(),
            taken: Vec::new(),
            spare: None,
            message: Vec::new(),
            timed: Vec::new(),
            dirty: Vec::new(),
            answered: None,
            closing: Vec::new(),
            failed: Vec::new(),
            guessed_at: 0,
            idle_at: 0,
            resting: Resting::default(),
            order: Order::default(),
            staying: Staying::default(),
            draining: None,
            broken: false,
            ticking,
            ticked: Instant::now(),
            shared,
        })
    }

    /// Serves until the server shuts down.
    ///
    /// # Errors
    /// The reason why the core cannot continue.
    pub(crate) fn run(mut self) -> Result<(), String> {
        self.statistics.turns.begin();
        let mut scratch = vec![0; SCRATCH_BYTES];
        let mut events = Vec::with_capacity(256);
        loop {
            // A lane that failed while answers of disks were sent is ended in the next turn, and perhaps
            // nothing else would start that turn.
            let has_work = !self.accepting.is_empty()
                || !self.failed.is_empty()
                || self.serves_disks && (self.nbd.is_busy() || self.engine.has_work());
            let busy = has_work
                || !self.order.is_empty()
                || self.has_low_request()
                || self.spin_or_prepare_sleep();
            let gives_way = self.give_way(has_work);
            if !busy || gives_way.is_some() || !self.try_guess(&mut scratch) {
                let timeout = if busy {
                    Some(gives_way.unwrap_or_default())
                } else {
                    self.take_looked();
                    self.timeout()
                };
                let since = (!busy).then(Instant::now);
                self.statistics.turns.sleeps();
                let waited = self.reactor.wait(timeout, &mut events);
                self.statistics.turns.wakes();
                waited.map_err(|error| format!("its event loop failed: {error}"))?;
                if let Some(since) = since {
                    if since.elapsed() >= IDLE {
                        self.order.round.nobody_asks();
                    }
                    self.tell_load();
                }
                self.statistics.reactor_calls.store(self.reactor.system_calls(), Ordering::Relaxed);
            }
            self.finish_transfers();
            self.finish_late();
            self.accept_again(&mut scratch);
            self.finish_sends();
            for event in events.drain(..) {
                self.event(event, &mut scratch);
            }
            self.look_at_rings();
            self.serve_next(&mut scratch);
            if !self.ending.is_empty() || !self.orphans.is_empty() {
                self.finish_ending();
            }
            // Before grants, since a request that starts may need data.
            self.resume_throttled();
            self.begin_low();
            self.grant();
            self.flush_dirty();
            if !self.failed.is_empty() {
                self.end_failed(&mut scratch);
            }
            if self.serves_disks {
                self.turn_disks(&mut scratch);
                self.take_looked_at_last();
            }
            if self.ticking && self.ticked.elapsed() >= TICK {
                self.tick();
            }
            if self.timed.len() >= TIMED_MAX {
                self.statistics.record_times(&mut self.timed);
            }
            if self.broken {
                return Err("a disk request failed because of a bug in the server".to_owned());
            }
            if self.drained() {
                self.tell_of_end();
                self.leave();
                return Ok(());
            }
        }
    }

    /// Ends the core without waiting for what it drops.
    fn leave(mut self) {
        self.take_looked();
        self.statistics.record_times(&mut self.timed);
        let mut sessions = std::mem::take(&mut self.sessions);
        for served in sessions.all_mut() {
            let files = served.session.files.clone();
            self.close_elsewhere(served, Some(&files));
        }
    }

    /// Returns true if a client waits for memory of disks; then clients that hold memory without using it are
    /// ended.
    pub(crate) fn is_starving(&self) -> bool {
        self.nbd.is_starving() || self.engine.is_starved() || !self.disk_grants.is_empty()
    }

    /// Returns true if connections that use disks have to be checked for stalls.
    pub(crate) fn wants_ticks(&self) -> bool {
        self.nbd.wants_ticks() || self.is_starving()
    }

    /// Returns the engine of disks, and the driver that does its work on devices.
    pub(crate) fn engine_and_driver(&mut self) -> (&mut Engine<Ticket>, CoreDriver<'_>) {
        let driver = CoreDriver {
            reactor: &mut self.reactor,
            late: &mut self.late,
            pools: &self.shared.pools,
            mailbox: &self.mailbox,
        };
        (&mut self.engine, driver)
    }

    fn event(&mut self, event: Event, scratch: &mut [u8]) {
        match event.token {
            BELL_TOKEN => {
                self.mailbox.bell.clear();
                // Waiting requests continue, and others may have changed files meanwhile.
                requests_arrived(Instant::now());
                for mail in self.mailbox.take() {
                    self.mail(mail, scratch);
                }
            }
            // The rings of all these lanes are checked in every turn.
            token if token >= LANE_BELL_TOKENS => {}
            token if token >= NBD_TOKENS => {
                self.nbd_event((token - NBD_TOKENS) as usize, event);
                if event.readable {
                    self.queue(token);
                }
            }
            token if token >= LISTENER_TOKENS => {
                self.accept((token - LISTENER_TOKENS) as usize, scratch);
            }
            token => {
                let index = token as usize;
                if event.writable {
                    self.dirty.push(index);
                }
                if event.readable {
                    // Asked again: earlier in this turn the lane may have ended, and another one may have
                    // got its number.
                    if event.hung
                        && let Some(Some(lane)) = self.lanes.get_mut(index)
                        && lane.link.peer_closed()
                    {
                        lane.hung = true;
                    }
                    match shm_link(&self.lanes, index) {
                        Some(_) => self.check_end(index, scratch),
                        None => self.queue(token),
                    }
                }
            }
        }
    }

    pub(crate) fn flush_dirty(&mut self) {
        let mut next = 0;
        while let Some(index) = self.dirty.get(next).copied() {
            self.flush(index);
            next += 1;
        }
        self.dirty.clear();
        if !self.closing.is_empty() {
            self.closing.clear();
        }
    }

    pub(crate) fn flush(&mut self, index: usize) {
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        self.answered = Some(index);
        lane.drop_untaken();
        let before = lane.out.bytes();
        let begun = (before >= SENT_BYTES_MIN).then(Instant::now);
        match lane.out.flush(&lane.link, &mut self.pipe, &self.statistics.counters) {
            Ok(flushed) => {
                let sent = before.saturating_sub(lane.out.bytes());
                lane.place.spend(sent);
                if let Some(begun) = begun.filter(|_| sent >= SENT_BYTES_MIN) {
                    self.statistics.sent(elapsed_ns(begun));
                }
                if flushed == Flushed::Blocked
                    && lane.link.kind() != LinkKind::Shm
                    && let Err(error) = self.reactor.watch_writable(index as u64)
                {
                    return self.failed.push((index, lane.link.clone(), error));
                }
                if let Some(reads) = lane.reads {
                    self.engine.set_unsent(reads, lane.out.bytes());
                }
                if lane.out.is_empty() {
                    lane.untaken = None;
                } else if sent > 0 || lane.untaken.is_none() {
                    lane.untaken = Some(Instant::now());
                    self.ticking = true;
                }
                if lane.paused && lane.out.is_empty() && !lane.is_full() {
                    // No event will report its unread input, since that is not new.
                    self.queue(index as u64);
                }
            }
            Err(error) => {
                let session = lane.session.and_then(|id| self.sessions.get_mut(id));
                if error.kind() == io::ErrorKind::UnexpectedEof
                    && let Some(served) = session
                {
                    // The client sends the request again, and can then be told how much there is, or the error.
                    served.promise_broken = Some(Instant::now());
                }
                self.failed.push((index, lane.link.clone(), error));
            }
        }
    }

    /// Ends lanes that can no longer be sent to. First reads everything their peers have sent: no peer waits
    /// for the answers, but the requests are executed.
    fn end_failed(&mut self, scratch: &mut [u8]) {
        for (index, link, error) in std::mem::take(&mut self.failed) {
            // Another lane may have this index by now.
            let is_same = |lane: &Lane| Arc::ptr_eq(&lane.link, &link);
            if self.lanes[index].as_ref().is_some_and(is_same) {
                // A client that is still there sends the unread requests again.
                match error.kind() {
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => {
                        self.receive(index, scratch);
                        self.close_lane(index, &error);
                    }
                    _ => self.receive_rest(index, scratch),
                }
            }
        }
    }
}

pub(crate) fn elapsed_ns(since: Instant) -> u64 {
    nanoseconds(since.elapsed())
}

pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn shm_link(lanes: &[Option<Lane>], index: usize) -> Option<&ShmLink> {
    match &*lanes.get(index)?.as_ref()?.link {
        Link::Shm(link) => Some(link),
        _ => None,
    }
}
