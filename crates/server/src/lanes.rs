//! Lanes and sessions of a core: how they begin and end.

use crate::caller::{Peer, user_of};
use crate::complaints;
use crate::core::{Core, LANE_BELL_TOKENS, Protocol, REFUSING, REFUSING_TOLD};
use crate::grants::Served;
use crate::handshake::{self, Rings};
use crate::lane::Lane;
use crate::loans::{Loans, may_borrow};
use crate::mailbox::Mail;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use towline_mem::Aggregate;
use towline_net::address::is_same_host;
use towline_net::{Link, LinkKind};
use towline_session::Session;
use towline_wire::hello::{resumed, want};
use towline_wire::limits::{
    AHEAD_KEPT_SECONDS, CLIENT_STALL_SECONDS, FAMILY_LEASE_SECONDS, LANELESS_SESSIONS_MAX,
    SESSION_LEASE_SECONDS,
};
use towline_wire::{Hello, Welcome};

/// Maximum number of lanes over shared memory that begin on one core: each costs memory and a check in every turn.
/// Further clients that ask for shared memory stay on their Unix socket, as do all if the system has no
/// descriptors or memory left. Twice as many may move there.
pub(crate) const SHM_LANES_MAX: usize = 64;

/// Clients accepted before other work gets its turn.
const ACCEPTS_MAX: usize = 16;

impl Core {
    pub(crate) fn accept(&mut self, number: usize, scratch: &mut [u8]) {
        for _ in 0..ACCEPTS_MAX {
            let shared = self.shared.clone();
            let listeners = shared.listeners.read();
            let Some((listener, protocol)) = listeners.get(number) else { return };
            let (accepted, protocol) = (listener.accept(), *protocol);
            drop(listeners);
            match accepted {
                Ok(link) => {
                    let link = Arc::new(link);
                    let core = self.shared.core_for_newcomer().unwrap_or(self.index);
                    match protocol {
                        Protocol::Towline if core == self.index => {
                            self.add_lane(link, None, scratch);
                        }
                        Protocol::Nbd if core == self.index => {
                            self.add_nbd_lane(link, None, scratch);
                        }
                        Protocol::Towline => self.shared.mailboxes[core].send(Mail::Lane(link)),
                        Protocol::Nbd => {
                            self.shared.mailboxes[core].send(Mail::NbdLane(link, None));
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::ECONNABORTED | libc::EINTR)) => {}
                Err(error) => {
                    // Out of descriptors: the clients stay in the listen queue until one is free. No event
                    // will report them again.
                    if self.refusing.iter().all(|(other, _)| *other != number) {
                        if self.refusing_told.is_none_or(|then| then.elapsed() >= REFUSING_TOLD) {
                            self.refusing_told = Some(Instant::now());
                            log::warn!(
                                "cannot accept connections for now: {error}; they wait until others close"
                            );
                        }
                        self.refusing.push((number, Instant::now()));
                    }
                    return;
                }
            }
        }
        // No event will report the remaining clients.
        if !self.accepting.contains(&number) {
            self.accepting.push(number);
        }
    }

    /// Continues to accept where other work had its turn, and tries again where descriptors were lacking.
    pub(crate) fn accept_again(&mut self, scratch: &mut [u8]) {
        if !self.accepting.is_empty() {
            for number in std::mem::take(&mut self.accepting) {
                self.accept(number, scratch);
            }
        }
        if self.refusing.first().is_some_and(|(_, since)| since.elapsed() >= REFUSING) {
            for (number, _) in std::mem::take(&mut self.refusing) {
                self.accept(number, scratch);
            }
        }
    }

    /// Serves a new connection. If another core hands it over, that core knows its hello and peer.
    pub(crate) fn add_lane(
        &mut self,
        link: Arc<Link>,
        greeted: Option<(Hello, Option<Peer>)>,
        scratch: &mut [u8],
    ) {
        let Some(index) = self.watch_lane(&link) else { return };
        self.statistics.lanes.fetch_add(1, Ordering::Relaxed);
        let peer = match &greeted {
            Some((_, peer)) => peer.clone(),
            None => self.callers.peer_of(&link),
        };
        self.lanes[index] = Some(Lane::new(link, self.statistics.clone(), peer));
        self.ticking = true;
        match greeted {
            Some((hello, _)) => self.greet(index, &hello),
            None => self.receive(index, scratch),
        }
    }

    /// Watches a connection that becomes a lane. Returns the lane's index; `None`: it cannot be watched.
    pub(crate) fn watch_lane(&mut self, link: &Link) -> Option<usize> {
        let index = self.free_lanes.pop().unwrap_or_else(|| {
            self.lanes.push(None);
            self.lanes.len() - 1
        });
        if let Err(error) = self.watch_link(index, link) {
            complaints::warn(format_args!("cannot watch a connection: {error}"));
            self.unwatch_link(index, link);
            self.free_lanes.push(index);
            return None;
        }
        Some(index)
    }

    fn watch_link(&mut self, index: usize, link: &Link) -> io::Result<()> {
        let token = index as u64;
        if let Some(fd) = link.fd() {
            self.reactor.watch(fd, token)?;
        }
        if let Link::Shm(link) = link {
            self.reactor.watch(link.doorbell().fd().as_fd(), LANE_BELL_TOKENS + token)?;
            self.shm_lanes.push(index);
            self.count_shm_lanes();
        }
        Ok(())
    }

    /// Stops watching a link, if it is watched.
    pub(crate) fn unwatch_link(&mut self, index: usize, link: &Link) {
        let token = index as u64;
        if let Some(fd) = link.fd() {
            let _ = self.reactor.unwatch(fd, token);
        }
        if let Link::Shm(link) = link {
            let bell = link.doorbell().fd().as_fd();
            let _ = self.reactor.unwatch(bell, LANE_BELL_TOKENS + token);
            self.shm_lanes.retain(|lane| *lane != index);
            self.count_shm_lanes();
        }
    }

    fn count_shm_lanes(&self) {
        self.statistics.shm_lanes.store(self.shm_lanes.len() as u64, Ordering::Relaxed);
    }

    pub(crate) fn greet(&mut self, index: usize, hello: &Hello) {
        let epoch = self.shared.boot_epoch;
        let Some(lane) = self.lanes[index].as_mut() else { return };
        if let Some(errno) = handshake::objection(hello) {
            let refusal = handshake::message(&handshake::refusal(epoch, errno));
            lane.out.push(Aggregate::from_vec(refusal), 0, 0);
            self.dirty.push(index);
            return;
        }
        let home = self.shared.home(hello.session);
        let is_coming = self.is_coming(hello.session); // the lane gets in line behind it
        if hello.session != 0 && (home != self.index || is_coming) {
            let Some(lane) = self.lanes[index].take() else { return };
            self.unwatch_link(index, &lane.link);
            self.free_lanes.push(index);
            self.statistics.lanes.fetch_sub(1, Ordering::Relaxed);
            self.shared.mailboxes[home].send(Mail::Join(lane.link, *hello, lane.peer));
            return;
        }
        if self.is_early(index, hello) {
            return;
        }
        let mut welcome = handshake::welcome(epoch);
        let is_its = |s: &&mut Served| s.session.secret == hello.secret && !s.has_ended;
        let known = self.sessions.get_mut(hello.session).filter(is_its);
        let session = if let Some(served) = known {
            served.is_low = hello.want & want::LOW_PRIORITY != 0;
            // A barrier against late requests: the old lane ends before the new one is served.
            let old = served.lane.replace(index as u64);
            served.suspend_transfers();
            welcome.resumed = resumed::JOINED;
            (welcome.session, welcome.secret) = (hello.session, hello.secret);
            if served.session.reclaiming {
                // The client starts again to open and lock what it had.
                served.session.restart_reclaiming();
                welcome.resumed = resumed::REMEMBERED;
            }
            if let Some(old) = old.filter(|old| *old != index as u64) {
                self.drop_lane(old as usize);
            }
            self.withdraw_locks(hello.session);
            self.suspend_disks(hello.session);
            hello.session
        } else if let Some(session) = self.remembered(hello) {
            welcome.resumed = resumed::REMEMBERED;
            self.begin_session(session, hello, index, &mut welcome)
        } else {
            let number = self.shared.next_session.fetch_add(1, Ordering::Relaxed);
            let id = number * self.shared.mailboxes.len() as u64 + self.index as u64;
            let secret = random();
            let mut session = Session::new(id, secret, self.shared.families.epoch());
            session.journal = self.shared.state.as_ref().and_then(|s| s.begin(id, secret));
            self.begin_session(session, hello, index, &mut welcome)
        };
        if let Some(served) = self.sessions.get(session).filter(|served| served.session.family) {
            welcome.boot_epoch = served.session.files.lock().epoch();
        }
        let Some(lane) = self.lanes[index].as_mut() else { return };
        lane.session = Some(session);
        if is_same_host(&lane.link) {
            welcome.local_socket = self.shared.local_socket;
        }
        if hello.want & want::SHARED_MEMORY != 0
            && lane.link.kind() == LinkKind::Unix
            && self.shm_lanes.len() < SHM_LANES_MAX
            && let Some(rings) = rings_of(lane)
        {
            welcome.granted |= want::SHARED_MEMORY;
            match rings.send(&welcome) {
                Ok(link) => {
                    let link = Arc::new(link);
                    if let Some(uid) = user_of(&lane.link)
                        && may_borrow(uid, self.shared.identity, self.shared.squash_root)
                    {
                        lane.loans = Some(Loans::new(link.clone(), self.statistics.clone()));
                    }
                    let socket = lane.move_to(link.clone());
                    self.unwatch_link(index, &socket);
                    if let Err(error) = self.watch_link(index, &link) {
                        self.close_lane(index, &error);
                    }
                }
                Err(error) => self.close_lane(index, &error),
            }
            return;
        }
        lane.out.push(Aggregate::from_vec(handshake::message(&welcome)), 0, 0);
        self.dirty.push(index);
    }

    /// Returns a session from before the server restarted.
    fn remembered(&self, hello: &Hello) -> Option<Session> {
        let kept = self.shared.state.as_ref()?.claim(hello.session, hello.secret)?;
        Some(Session::kept(hello.session, hello.secret, self.shared.families.epoch(), kept))
    }

    fn begin_session(
        &mut self,
        mut session: Session,
        hello: &Hello,
        index: usize,
        welcome: &mut Welcome,
    ) -> u64 {
        let id = session.id;
        if hello.family != 0 {
            session.family = true;
            session.reports_ends = hello.want & want::REPORTS_ENDS != 0;
            session.process = hello.process;
            let families = &self.shared.families;
            session.files = families.join(hello.family, &session);
            let owner = session.files.lock().owner;
            self.shared.returned(owner);
        } else {
            let has_lost_one = hello.session != 0 && hello.secret != session.secret;
            let lost = has_lost_one.then_some(hello.secret);
            self.shared.locks.lock().session_begins(id, session.secret, lost);
        }
        // Who does not come back after a restart needs no files then. Numbers of sessions are known to all.
        if let Some(kept) = self.shared.kept.as_ref().filter(|_| session.journal.is_some()) {
            let owner = if session.family { hello.family } else { session.secret };
            kept.add(&session.files, owner);
        }
        (welcome.session, welcome.secret) = (id, session.secret);
        let mut served = Served::new(session, index as u64);
        served.is_low = hello.want & want::LOW_PRIORITY != 0;
        self.sessions.insert(served);
        self.statistics.sessions.fetch_add(1, Ordering::Relaxed);
        id
    }

    fn drop_lane(&mut self, index: usize) -> Option<Lane> {
        let lane = self.lanes.get_mut(index).and_then(Option::take)?;
        if let Some(fd) = lane.link.fd() {
            // Ends the connection at once, even while the event loop still holds the socket. Fails only if
            // the peer closed first.
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
        }
        self.unwatch_link(index, &lane.link);
        if let Some(reads) = lane.reads {
            self.engine.remove_owner(reads);
        }
        self.free_lanes.push(index);
        self.statistics.lanes.fetch_sub(1, Ordering::Relaxed);
        Some(lane)
    }

    pub(crate) fn close_lane(&mut self, index: usize, error: &io::Error) {
        // Counted first, so that a client that sees the connection end finds it counted.
        if error.kind() == io::ErrorKind::InvalidData
            && self.lanes.get(index).is_some_and(Option::is_some)
        {
            self.statistics.protocol_errors.fetch_add(1, Ordering::Relaxed);
            complaints::warn(format_args!(
                "closing a connection whose peer broke the protocol: {error}"
            ));
        }
        if let Some(id) = self.lanes.get(index).and_then(|lane| lane.as_ref()?.session) {
            self.begin_all_of(id);
        }
        let Some(lane) = self.drop_lane(index) else { return };
        let Some(id) = lane.session else { return };
        if let Some(served) = self.sessions.get_mut(id).filter(|s| s.lane == Some(index as u64)) {
            served.lane = None;
            served.laneless_since = Instant::now();
            self.ticking = true;
            served.suspend_transfers();
            self.suspend_disks(id);
            self.withdraw_locks(id);
            self.end_one_too_many();
        }
    }

    /// Ends one of too many sessions without a lane: clients that come and go must not fill the memory. One that
    /// has nothing open loses least; else it is the one that has been without a lane for longest.
    fn end_one_too_many(&mut self) {
        let is_laneless = |served: &&Served| served.lane.is_none() && !served.has_ended;
        let laneless = || self.sessions.all().filter(is_laneless);
        let is_too_many = |count| count > LANELESS_SESSIONS_MAX;
        if !is_too_many(self.sessions.len()) || !is_too_many(laneless().count()) {
            return;
        }
        let has_open =
            |served: &Served| served.disks.has_open() || !served.session.files.lock().is_empty();
        let least = laneless().min_by_key(|served| (has_open(served), served.laneless_since));
        if let Some(id) = least.map(|served| served.session.id) {
            self.end_session(id);
        }
    }

    /// Gives up requests for locks of a session without a lane: its client may have been killed.
    pub(crate) fn withdraw_locks(&self, session: u64) {
        self.shared.locks.lock().withdraw(session);
    }

    /// Ends what waited too long: sessions without a lane, lanes without a hello, unused grants.
    pub(crate) fn tick(&mut self) {
        self.ticked = Instant::now();
        let stall = Duration::from_secs(CLIENT_STALL_SECONDS);
        let kept = Duration::from_secs(AHEAD_KEPT_SECONDS);
        let lease = |s: &Served| match s.session.family {
            true => Duration::from_secs(FAMILY_LEASE_SECONDS),
            false => Duration::from_secs(SESSION_LEASE_SECONDS),
        };
        let ended = |s: &Served| s.lane.is_none() && s.laneless_since.elapsed() > lease(s);
        let ended: Vec<u64> =
            self.sessions.all().filter(|s| ended(s)).map(|s| s.session.id).collect();
        for id in ended {
            self.end_session(id);
        }
        for served in self.sessions.all_mut() {
            served.leaves.retain(|leave| leave.given.elapsed() <= kept);
        }
        self.greet_returning();
        self.ticking = self.sessions.all().any(|s| s.lane.is_none() || !s.leaves.is_empty());
        if self.index == 0 {
            self.ticking |= self.end_unclaimed();
        }
        for index in 0..self.lanes.len() {
            let Some(lane) = &mut self.lanes[index] else { continue };
            // A fragment may take long on a slow network, as long as something of it arrives.
            if std::mem::take(&mut lane.progressed) {
                lane.since = self.ticked;
            }
            let waiting = lane.session.is_none() || lane.granted > 0;
            self.ticking |= waiting || lane.untaken.is_some();
            if waiting && lane.since.elapsed() > stall {
                self.close_lane(index, &io::ErrorKind::TimedOut.into());
            }
        }
        if self.ticking && self.shared.exports.are_overfull() {
            self.end_deaf(stall, |_| true);
        }
    }

    /// Ends those lanes of which the peer has not taken a byte of its answers for the time `stall`.
    pub(crate) fn end_deaf(&mut self, stall: Duration, may_end: impl Fn(&Lane) -> bool) {
        for index in 0..self.lanes.len() {
            let Some(lane) = &self.lanes[index] else { continue };
            let is_deaf = lane.untaken.is_some_and(|since| since.elapsed() > stall);
            if is_deaf && may_end(lane) {
                self.close_lane(index, &io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Stops waiting for clients from before the restart once their time is over. Returns true if some are
    /// still awaited.
    fn end_unclaimed(&self) -> bool {
        let Some(state) = &self.shared.state else { return false };
        let running = u32::try_from(self.shared.started.elapsed().as_secs()).unwrap_or(u32::MAX);
        // Who comes back now waits until all of its lost session is released.
        let mut locks = self.shared.locks.lock();
        let ended = state.end_unclaimed(running, SESSION_LEASE_SECONDS as u32);
        for (session, secret) in ended {
            self.shared.notify(locks.leave(session, Some(session), false));
            locks.session_ended(session, secret);
        }
        if locks.awaits() {
            let grace = u32::try_from(self.shared.lock_grace.as_secs()).unwrap_or(u32::MAX);
            let now = seconds();
            locks.note_running(now);
            self.shared.notify(locks.end_awaited(now.saturating_sub(grace)));
        }
        state.has_unclaimed() || locks.awaits()
    }
}

/// Creates what a lane over shared memory needs; `None` if the system refuses it.
fn rings_of(lane: &Lane) -> Option<Rings> {
    let rings = Rings::of(&lane.link);
    let told = |error: &io::Error| log::debug!("no shared memory for a client: {error}");
    rings.inspect_err(told).ok()
}

/// Seconds since the machine was started, from 1 on: what is kept of a server does not outlive that.
pub(crate) fn seconds() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    u32::try_from(now.tv_sec).unwrap_or(u32::MAX).saturating_add(1)
}

/// A number that nobody can guess.
///
/// # Panics
/// The kernel refuses random numbers: sessions would be open to whoever guesses their secrets.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    let got = rustix::io::retry_on_intr(|| rustix::rand::getrandom(&mut bytes[..], flags));
    assert_eq!(got, Ok(bytes.len()), "getrandom(2) gives no random numbers");
    u64::from_le_bytes(bytes)
}
