//! A core: one thread with its event loop, lanes and sessions.

use crate::caller::Callers;
use crate::exports::Exports;
use crate::grants::{Grant, Running, Served};
use crate::handshake;
use crate::lane::{Lane, UNSENT_BYTES_MAX};
use crate::mailbox::{Mail, Mailbox};
use crate::messages::send_reply;
use crate::offload::{Job, Offload};
use crate::serving::Serving;
use crate::stats::CoreStatistics;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use towline_mem::{Aggregate, Pool};
use towline_net::address::Listener;
use towline_net::{Flushed, Incoming, Link, LinkKind, ShmLink};
use towline_reactor::{Event, Reactor};
use towline_session::locks::{Locked, Locks, Owner, Waiter};
use towline_session::{Context, Session, Step};
use towline_wire::hello::{VERSION, want};
use towline_wire::limits::{CLIENT_STALL_SECONDS, SESSION_LEASE_SECONDS};
use towline_wire::{Errno, Header, Hello, Kind};

/// What all cores share.
pub(crate) struct Shared {
    pub(crate) exports: Exports,
    pub(crate) locks: Mutex<Locks>,
    pub(crate) mailboxes: Vec<Mailbox>,
    pub(crate) offload: Offload,
    pub(crate) boot_epoch: u32,
    pub(crate) next_core: AtomicUsize,
    pub(crate) next_session: AtomicU64,
    pub(crate) identity: bool,
    pub(crate) squash_root: bool,
}

impl Shared {
    /// The core that a session lives on is part of its number.
    fn home(&self, session: u64) -> usize {
        (session % self.mailboxes.len() as u64) as usize
    }

    fn notify(&self, granted: Vec<Waiter>) {
        for waiter in granted {
            self.mailboxes[self.home(waiter.owner.session)].send(Mail::Granted(waiter));
        }
    }
}

const LISTENER_TOKENS: u64 = 1 << 32;
const BELL_TOKEN: u64 = 1 << 33;
/// Bytes read at once from any lane; one such buffer serves all lanes of a core.
const SCRATCH_BYTES: usize = 128 * 1024;
/// How long to look for more work in shared memory before sleeping.
const SPIN: Duration = Duration::from_micros(20);
/// How long a server that shuts down waits for requests under way.
const DRAIN: Duration = Duration::from_secs(5);

/// One core of a server.
pub(crate) struct Core {
    index: usize,
    pub(crate) shared: Arc<Shared>,
    pub(crate) statistics: Arc<CoreStatistics>,
    mailbox: Mailbox,
    reactor: Reactor,
    listeners: Vec<Listener>,
    pub(crate) lanes: Vec<Option<Lane>>,
    free_lanes: Vec<usize>,
    shm_lanes: Vec<usize>,
    pub(crate) sessions: HashMap<u64, Served>,
    pub(crate) callers: Callers,
    pool: Arc<Pool>,
    /// Transfers that wait for their next grant, in turn.
    pub(crate) grant_queue: VecDeque<(u64, u16)>,
    /// Lanes with something to send after this turn.
    pub(crate) dirty: Vec<usize>,
    /// Lanes whose input was left unread and can be read now.
    resumable: Vec<usize>,
    draining: Option<Instant>,
}

impl Core {
    pub(crate) fn new(
        index: usize,
        shared: Arc<Shared>,
        statistics: Arc<CoreStatistics>,
        mut reactor: Reactor,
        listeners: Vec<Listener>,
        pool: Arc<Pool>,
    ) -> io::Result<Self> {
        let mailbox = shared.mailboxes[index].clone();
        use std::os::fd::AsFd;
        reactor.watch(mailbox.bell.fd().as_fd(), BELL_TOKEN)?;
        for (number, listener) in listeners.iter().enumerate() {
            reactor.watch(listener.fd(), LISTENER_TOKENS + number as u64)?;
        }
        let callers = Callers::new(shared.identity, shared.squash_root);
        Ok(Self {
            index,
            statistics,
            mailbox,
            reactor,
            listeners,
            lanes: Vec::new(),
            free_lanes: Vec::new(),
            shm_lanes: Vec::new(),
            sessions: HashMap::new(),
            callers,
            pool,
            grant_queue: VecDeque::new(),
            dirty: Vec::new(),
            resumable: Vec::new(),
            draining: None,
            shared,
        })
    }

    /// Serves until told to shut down.
    pub(crate) fn run(mut self) {
        let mut scratch = vec![0; SCRATCH_BYTES];
        let mut events = Vec::with_capacity(256);
        loop {
            let timeout = self.timeout();
            let busy = self.spin_or_prepare_sleep();
            let timeout =
                if busy || !self.resumable.is_empty() { Some(Duration::ZERO) } else { timeout };
            if let Err(error) = self.reactor.wait(timeout, &mut events) {
                log::error!(
                    "core {}: event loop failed, the server cannot go on: {error}",
                    self.index
                );
                return;
            }
            self.statistics.reactor_calls.store(self.reactor.system_calls(), Ordering::Relaxed);
            for event in events.drain(..) {
                self.event(event, &mut scratch);
            }
            for index in self.shm_lanes.clone() {
                self.receive(index, &mut scratch);
            }
            for index in std::mem::take(&mut self.resumable) {
                self.resume(index, &mut scratch);
            }
            self.grant();
            self.flush_dirty();
            self.expire();
            if self.drained() {
                return;
            }
        }
    }

    /// Looks for work in shared memory for a while; true when there is some.
    fn spin_or_prepare_sleep(&mut self) -> bool {
        if self.shm_lanes.is_empty() {
            return false;
        }
        let start = Instant::now();
        loop {
            for _ in 0..32 {
                for index in &self.shm_lanes {
                    if let Some(link) = self.shm_link(*index)
                        && link.readable()
                    {
                        return true;
                    }
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= SPIN {
                break;
            }
        }
        let mut sleep = true;
        for index in &self.shm_lanes {
            if let Some(link) = self.shm_link(*index) {
                sleep &= link.prepare_sleep();
            }
        }
        !sleep
    }

    fn shm_link(&self, index: usize) -> Option<&ShmLink> {
        match &*self.lanes.get(index)?.as_ref()?.link {
            Link::Shm(link) => Some(link),
            _ => None,
        }
    }

    fn timeout(&self) -> Option<Duration> {
        if self.shm_lanes.iter().any(|i| self.lanes[*i].as_ref().is_some_and(|l| !l.out.is_empty()))
        {
            return Some(Duration::from_millis(1));
        }
        let waiting = self.draining.is_some()
            || self.sessions.values().any(|s| s.lane.is_none())
            || self.lanes.iter().flatten().any(|l| l.session.is_none() || l.granted > 0);
        waiting.then_some(Duration::from_secs(1))
    }

    fn event(&mut self, event: Event, scratch: &mut [u8]) {
        match event.token {
            BELL_TOKEN => {
                self.mailbox.bell.clear();
                for mail in self.mailbox.take() {
                    self.mail(mail, scratch);
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
                    self.receive(index, scratch);
                    // The socket beside shared memory carries nothing any more but its end.
                    if self.shm_link(index).is_some_and(ShmLink::peer_closed) {
                        self.close_lane(index, &io::ErrorKind::UnexpectedEof.into());
                    }
                }
            }
        }
    }

    fn mail(&mut self, mail: Mail, scratch: &mut [u8]) {
        match mail {
            Mail::Lane(link) => self.add_lane(link, None, scratch),
            Mail::Join(link, hello) => self.add_lane(link, Some(hello), scratch),
            Mail::Unblocked { session, slot, sequence, result, took } => {
                let Some(mut running) = self.take_running(session, slot, sequence) else { return };
                running.stages.storage += took;
                running.stages.disk += took;
                running.compound.unblocked(result);
                self.drive(session, slot, running);
            }
            Mail::Granted(waiter) => {
                let session = waiter.owner.session;
                let Some(mut running) = self.take_running(session, waiter.slot, waiter.sequence)
                else {
                    return;
                };
                running.compound.locked(Ok(()));
                self.drive(session, waiter.slot, running);
            }
            Mail::Shutdown => self.begin_shutdown(),
        }
    }

    fn begin_shutdown(&mut self) {
        self.draining = Some(Instant::now());
        for listener in &self.listeners {
            // The loop ends soon; a listener that is still watched would only be ignored.
            let _ = self.reactor.unwatch(listener.fd(), u64::MAX - 1);
        }
        self.listeners.clear();
        let mut header = Header::new(Kind::Notice, 0, 0);
        header.flags = towline_wire::header::notice::SHUTDOWN;
        for index in 0..self.lanes.len() {
            if let Some(lane) = &mut self.lanes[index] {
                lane.send_header(&header);
                self.dirty.push(index);
            }
        }
    }

    fn drained(&self) -> bool {
        let Some(since) = self.draining else { return false };
        let running = self
            .sessions
            .values()
            .any(|s| s.running.iter().flatten().any(|r| r.compound.missing().is_none()));
        let unsent = self.lanes.iter().flatten().any(|l| !l.out.is_empty());
        (!running && !unsent) || since.elapsed() > DRAIN
    }

    fn accept(&mut self, number: usize, scratch: &mut [u8]) {
        loop {
            let Some(listener) = self.listeners.get(number) else { return };
            match listener.accept() {
                Ok(link) => {
                    let link = Arc::new(link);
                    let cores = self.shared.mailboxes.len();
                    let core = self.shared.next_core.fetch_add(1, Ordering::Relaxed) % cores;
                    if core == self.index {
                        self.add_lane(link, None, scratch);
                    } else {
                        self.shared.mailboxes[core].send(Mail::Lane(link));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::ECONNABORTED | libc::EINTR)) => {}
                Err(error) => {
                    // Out of descriptors: those waiting stay in the queue until one is free.
                    log::warn!("cannot accept a connection: {error}");
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            }
        }
    }

    fn add_lane(&mut self, link: Arc<Link>, hello: Option<Hello>, scratch: &mut [u8]) {
        let index = self.free_lanes.pop().unwrap_or_else(|| {
            self.lanes.push(None);
            self.lanes.len() - 1
        });
        let token = index as u64;
        let watched = link.fd().map(|fd| self.reactor.watch(fd, token));
        if let Some(Err(error)) = watched {
            log::warn!("cannot watch a connection: {error}");
            self.free_lanes.push(index);
            return;
        }
        self.statistics.lanes.fetch_add(1, Ordering::Relaxed);
        self.lanes[index] = Some(Lane::new(link));
        match hello {
            Some(hello) => self.greet(index, &hello),
            None => self.receive(index, scratch),
        }
    }

    /// Reads from a lane what was left because too much was unsent.
    fn resume(&mut self, index: usize, scratch: &mut [u8]) {
        if let Some(Some(lane)) = self.lanes.get_mut(index)
            && lane.paused
            && lane.out.bytes() <= UNSENT_BYTES_MAX
        {
            lane.paused = false;
            self.receive(index, scratch);
        }
    }

    fn receive(&mut self, index: usize, scratch: &mut [u8]) {
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        let link = lane.link.clone();
        // Taken out, so that the messages it finds can change the core and the lane.
        let mut input = std::mem::take(&mut lane.input);
        let statistics = self.statistics.clone();
        let mut failure = None;
        loop {
            let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
            if lane.out.bytes() > UNSENT_BYTES_MAX {
                lane.paused = true;
                break;
            }
            if lane.hello.is_some() {
                break;
            }
            let mut sink = Serving { core: self, index };
            match input.receive(&link, scratch, None, &mut sink, &statistics.counters) {
                Ok(Incoming::Progress) => {}
                Ok(Incoming::Drained) => break,
                Ok(Incoming::Closed) => {
                    failure = Some(io::ErrorKind::UnexpectedEof.into());
                    break;
                }
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        lane.input = input;
        let hello = lane.hello.take();
        drop(link);
        match (failure, hello) {
            (Some(error), _) => self.close_lane(index, &error),
            (None, Some(hello)) => self.greet(index, &hello),
            (None, None) => self.dirty.push(index),
        }
    }

    fn greet(&mut self, index: usize, hello: &Hello) {
        let epoch = self.shared.boot_epoch;
        let Some(lane) = self.lanes[index].as_mut() else { return };
        if hello.version != VERSION {
            let refusal = handshake::message(&handshake::refusal(epoch, Errno::EPROTO));
            lane.out.push(Aggregate::from_vec(refusal), 0, 0);
            self.dirty.push(index);
            return;
        }
        let home = self.shared.home(hello.session);
        if hello.session != 0 && home != self.index {
            let Some(lane) = self.lanes[index].take() else { return };
            if let Some(fd) = lane.link.fd() {
                let _ = self.reactor.unwatch(fd, index as u64);
            }
            self.free_lanes.push(index);
            self.statistics.lanes.fetch_sub(1, Ordering::Relaxed);
            self.shared.mailboxes[home].send(Mail::Join(lane.link, *hello));
            return;
        }
        let mut welcome = handshake::welcome(epoch);
        let known =
            self.sessions.get_mut(&hello.session).filter(|s| s.session.secret == hello.secret);
        let session = if let Some(served) = known {
            // The barrier against stragglers: the old lane ends before the new one is served.
            let old = served.lane.replace(index as u64);
            served.drop_transfers();
            welcome.resumed = 1;
            (welcome.session, welcome.secret) = (hello.session, hello.secret);
            if let Some(old) = old.filter(|old| *old != index as u64) {
                self.drop_lane(old as usize);
            }
            hello.session
        } else {
            let number = self.shared.next_session.fetch_add(1, Ordering::Relaxed);
            let id = number * self.shared.mailboxes.len() as u64 + self.index as u64;
            let secret = random();
            let session = Session { id, secret, ..Session::default() };
            (welcome.session, welcome.secret) = (id, secret);
            self.sessions.insert(id, Served::new(session, index as u64));
            self.statistics.sessions.fetch_add(1, Ordering::Relaxed);
            id
        };
        let Some(lane) = self.lanes[index].as_mut() else { return };
        lane.session = Some(session);
        if hello.want & want::SHARED_MEMORY != 0 && lane.link.kind() == LinkKind::Unix {
            welcome.granted |= want::SHARED_MEMORY;
            match handshake::move_to_shared_memory(&lane.link, &welcome, &self.mailbox.bell) {
                Ok(link) => {
                    let socket = std::mem::replace(&mut lane.link, Arc::new(link));
                    self.shm_lanes.push(index);
                    self.rewatch(index, &socket);
                }
                Err(error) => self.close_lane(index, &error),
            }
            return;
        }
        lane.out.push(Aggregate::from_vec(handshake::message(&welcome)), 0, 0);
        self.dirty.push(index);
    }

    /// Watches a lane's new link in place of the old one.
    fn rewatch(&mut self, index: usize, old: &Link) {
        let watched = match (old.fd(), self.lanes[index].as_ref().and_then(|l| l.link.fd())) {
            (Some(old), Some(new)) => self
                .reactor
                .unwatch(old, index as u64)
                .and_then(|()| self.reactor.watch(new, index as u64)),
            _ => Ok(()),
        };
        if let Err(error) = watched {
            self.close_lane(index, &error);
        }
    }

    fn drop_lane(&mut self, index: usize) -> Option<Lane> {
        let lane = self.lanes.get_mut(index).and_then(Option::take)?;
        if let Some(fd) = lane.link.fd() {
            let _ = self.reactor.unwatch(fd, index as u64);
        }
        self.shm_lanes.retain(|i| *i != index);
        self.free_lanes.push(index);
        self.statistics.lanes.fetch_sub(1, Ordering::Relaxed);
        Some(lane)
    }

    fn close_lane(&mut self, index: usize, error: &io::Error) {
        let Some(lane) = self.drop_lane(index) else { return };
        if error.kind() == io::ErrorKind::InvalidData {
            self.statistics.protocol_errors.fetch_add(1, Ordering::Relaxed);
            log::warn!("closing a connection whose peer broke the protocol: {error}");
        }
        let Some(id) = lane.session else { return };
        if let Some(served) = self.sessions.get_mut(&id).filter(|s| s.lane == Some(index as u64)) {
            served.lane = None;
            served.laneless_since = Instant::now();
            served.drop_transfers();
        }
    }

    /// Ends what waited too long: sessions without lane, lanes without hello, unused grants.
    fn expire(&mut self) {
        let lease = Duration::from_secs(SESSION_LEASE_SECONDS);
        let stall = Duration::from_secs(CLIENT_STALL_SECONDS);
        if self.sessions.values().any(|s| s.lane.is_none()) {
            let ended = |s: &Served| s.lane.is_none() && s.laneless_since.elapsed() > lease;
            let ended: Vec<u64> =
                self.sessions.iter().filter(|(_, s)| ended(s)).map(|(id, _)| *id).collect();
            for id in ended {
                self.end_session(id);
            }
        }
        for index in 0..self.lanes.len() {
            let Some(lane) = &self.lanes[index] else { continue };
            let waiting = lane.session.is_none() || lane.granted > 0;
            if waiting && lane.since.elapsed() > stall {
                self.close_lane(index, &io::ErrorKind::TimedOut.into());
            }
        }
    }

    pub(crate) fn end_session(&mut self, id: u64) {
        if self.sessions.remove(&id).is_some() {
            self.statistics.sessions.fetch_sub(1, Ordering::Relaxed);
            let granted = self.shared.locks.lock().release(|owner| owner.session == id);
            self.shared.notify(granted);
        }
    }

    pub(crate) fn take_running(
        &mut self,
        session: u64,
        slot: u16,
        sequence: u32,
    ) -> Option<Box<Running>> {
        let place = self.sessions.get_mut(&session)?.running.get_mut(usize::from(slot))?;
        place.take_if(|running| running.sequence == sequence)
    }

    /// Goes on with a request until it is answered or waits.
    pub(crate) fn drive(&mut self, session: u64, slot: u16, mut running: Box<Running>) {
        loop {
            let Some(served) = self.sessions.get_mut(&session) else { return };
            let start = Instant::now();
            let mut context = Context {
                files: &mut served.session.files,
                exports: &self.shared.exports,
                caller: &running.caller,
                session,
            };
            let step = running.compound.run(&mut context);
            running.stages.storage += elapsed_ns(start);
            match step {
                Step::Finished => return self.reply(session, slot, running),
                Step::NeedsData => {
                    running.data_since = Some(Instant::now());
                    self.grant_queue.push_back((session, slot));
                }
                Step::Block(work) => {
                    let sequence = running.sequence;
                    let reply_to = self.mailbox.clone();
                    self.shared.offload.run(Job { work, reply_to, session, slot, sequence });
                }
                Step::Lock(file, waiter, wait) => {
                    let outcome = self.shared.locks.lock().lock(file, waiter, wait);
                    match outcome {
                        Ok(Locked::Done(granted)) => {
                            self.shared.notify(granted);
                            running.compound.locked(Ok(()));
                            continue;
                        }
                        Err(errno) => {
                            running.compound.locked(Err(errno));
                            continue;
                        }
                        Ok(Locked::Waiting) => {}
                    }
                }
                Step::TestLock(file, owner, range) => {
                    let conflict = self.shared.locks.lock().test(file, owner, &range);
                    running.compound.tested(session, conflict);
                    continue;
                }
                Step::ReleaseLocks(owner) => {
                    let granted = self.shared.locks.lock().release(|o: &Owner| *o == owner);
                    self.shared.notify(granted);
                    continue;
                }
            }
            if let Some(served) = self.sessions.get_mut(&session) {
                served.running[usize::from(slot)] = Some(running);
            }
            return;
        }
    }

    fn reply(&mut self, session: u64, slot: u16, running: Box<Running>) {
        let Running { compound, sequence, arrived, mut stages, .. } = *running;
        stages.server = elapsed_ns(arrived);
        self.statistics.record(compound.first_tag(), stages);
        let (results, data, modifies, is_read) = compound.into_reply();
        let Some(served) = self.sessions.get_mut(&session) else { return };
        let mut header = Header::new(Kind::Reply, slot, sequence);
        header.body_bytes = results.len() as u32;
        header.word_a = self.shared.boot_epoch;
        header.word_b = u32::try_from(stages.server).unwrap_or(u32::MAX);
        let remember = modifies && data.is_empty();
        // The request of a lost lane is only remembered: the client asks again on the next one.
        let index = served.lane.map(|lane| lane as usize);
        let lane = index.and_then(|index| self.lanes.get_mut(index)?.as_mut());
        let bytes = send_reply(lane, header, &results, data, is_read);
        served.session.slots.answer(slot, &bytes, remember);
        self.dirty.extend(index);
    }

    /// Gives buffers to transfers that wait for their data, in turn.
    fn grant(&mut self) {
        for _ in 0..self.grant_queue.len() {
            let Some((session, slot)) = self.grant_queue.pop_front() else { return };
            let Some(served) = self.sessions.get_mut(&session) else { continue };
            let Some(index) = served.lane.map(|lane| lane as usize) else { continue };
            let Some(Some(lane)) = self.lanes.get_mut(index) else { continue };
            let Some(running) = served.running[usize::from(slot)].as_mut() else { continue };
            let Some((offset, length)) = running.next_grant() else { continue };
            let Some(buffer) = self.pool.take() else {
                self.grant_queue.push_front((session, slot));
                return;
            };
            let mut header = Header::new(Kind::Grant, slot, running.sequence);
            header.offset = offset;
            header.word_a = length as u32;
            running.grants.push_back(Grant { offset, length, buffer });
            running.granted += length as u64;
            if lane.granted == 0 {
                lane.since = Instant::now();
            }
            lane.granted += 1;
            lane.send_header(&header);
            self.dirty.push(index);
            if running.next_grant().is_some() {
                self.grant_queue.push_back((session, slot));
            }
        }
    }

    fn flush_dirty(&mut self) {
        for index in std::mem::take(&mut self.dirty) {
            self.flush(index);
        }
    }

    fn flush(&mut self, index: usize) {
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        match lane.out.flush(&lane.link, &self.statistics.counters) {
            Ok(Flushed::All | Flushed::Blocked) => {
                if lane.paused && lane.out.is_empty() {
                    // No event will come for what is unread: it is no news.
                    self.resumable.push(index);
                }
            }
            Err(error) => self.close_lane(index, &error),
        }
    }
}

pub(crate) fn elapsed_ns(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // Fails only where the kernel has no random numbers at all; then sessions cannot be joined by
    // guessing either, since the server does not come this far.
    let _ = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(bytes)
}
