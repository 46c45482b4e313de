//! Waiting. A node has no thread of its own: one of the waiting threads polls for all, and handles what
//! it finds before it checks whether its own condition is met.

use crate::Error;
use crate::state::{Peer, PeerId, State};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_net::address::Listener;
use towline_net::{Doorbell, Link};

/// How long to spin on rings in shared memory before sleeping.
const SPIN: Duration = Duration::from_micros(20);
/// How long to sleep if a link cannot wake a sleeper: one inside the process.
const LOCAL_PAUSE: Duration = Duration::from_micros(20);
/// Longest sleep, after which stalled peers are looked for.
const SLEEP: Duration = Duration::from_secs(1);

pub(crate) struct Shared {
    pub(crate) state: Mutex<State>,
    changed: Condvar,
    waker: Doorbell,
    /// The value that other processes of the same user read to find out whether they can.
    _proof: Box<u64>,
}

impl Shared {
    pub(crate) fn new(state: State, waker: Doorbell, proof: Box<u64>) -> Self {
        Self { state: Mutex::new(state), changed: Condvar::new(), waker, _proof: proof }
    }

    /// Changes the state, and performs what follows from the change.
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let result = change(&mut state);
        self.after(&mut state);
        result
    }

    /// Feeds waiting operations, sends what is queued, and wakes the polling thread.
    fn after(&self, state: &mut MutexGuard<'_, State>) {
        state.feed();
        state.flush_all();
        if state.led {
            // The polling thread has to see new links, blocked links, and its own result.
            self.waker.ring();
            self.changed.notify_all();
        }
    }

    /// Waits until `ready` returns something, and makes progress for all operations meanwhile.
    pub(crate) fn wait_until<T>(
        &self,
        limit: Option<Duration>,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T, Error> {
        // A limit beyond what the clock can tell is none.
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = self.state.lock();
        loop {
            if let Some(found) = ready(&mut state) {
                self.after(&mut state);
                return Ok(found);
            }
            let rest = match deadline {
                None => SLEEP,
                Some(deadline) => match deadline.checked_duration_since(Instant::now()) {
                    Some(rest) if !rest.is_zero() => rest.min(SLEEP),
                    _ => return Err(Error::TimedOut),
                },
            };
            if state.led {
                let _ = self.changed.wait_for(&mut state, rest);
                continue;
            }
            state.led = true;
            self.turn(&mut state, rest);
            state.led = false;
            self.changed.notify_all();
        }
    }

    /// Waits once, for any event and at most `limit`, and handles it.
    fn turn(&self, state: &mut MutexGuard<'_, State>, limit: Duration) {
        state.flush_all();
        let watch = Watch::of(state);
        let found = MutexGuard::unlocked(state, || watch.wait(&self.waker, limit));
        drop(watch); // a link that is greeted is replaced, and must have no other holder
        for peer in found.peers {
            if state.peers.get(&peer).is_some_and(Peer::is_ready) {
                if let Some(peer) = state.peers.get_mut(&peer) {
                    peer.blocked = false;
                }
                state.receive_from(peer);
            } else {
                state.greeted(peer);
            }
        }
        for listener in found.listeners {
            state.accept(&listener);
        }
        // A peer that closed may have left data in its ring, and more than is received in one turn.
        for id in found.closed {
            let peer = state.peers.get(&id);
            if !peer.is_some_and(|p| matches!(&*p.link, Link::Shm(ring) if ring.readable())) {
                state.lose(id);
            }
        }
        state.cut_stalled();
        state.feed();
        state.flush_all();
    }
}

/// What a thread waits for, without holding the lock.
struct Watch {
    peers: Vec<(PeerId, Arc<Link>, bool)>,
    listeners: Vec<Arc<Listener>>,
}

#[derive(Default)]
struct Found {
    peers: Vec<PeerId>,
    closed: Vec<PeerId>,
    listeners: Vec<Arc<Listener>>,
}

impl Watch {
    fn of(state: &State) -> Self {
        let peers = state.peers.iter().map(|(id, p)| (*id, p.link.clone(), p.blocked)).collect();
        let accepts = Instant::now() >= state.accept_from;
        Self { peers, listeners: if accepts { state.listeners.clone() } else { Vec::new() } }
    }

    fn rings(&self) -> impl Iterator<Item = (&towline_net::ShmLink, bool)> {
        self.peers.iter().filter_map(|(_, link, blocked)| match &**link {
            Link::Shm(link) => Some((&**link, *blocked)),
            _ => None,
        })
    }

    fn wait(&self, waker: &Doorbell, limit: Duration) -> Found {
        let mut limit = limit;
        if self.rings().next().is_some() {
            let start = Instant::now();
            while start.elapsed() < SPIN && !self.rings().any(|(link, _)| link.readable()) {
                for _ in 0..32 {
                    std::hint::spin_loop();
                }
            }
            // Prepare all of them, so that each one rings.
            if self.rings().filter(|(link, blocked)| !link.prepare_wait(*blocked)).count() > 0 {
                limit = Duration::ZERO;
            }
        }
        if self.peers.iter().any(|(_, link, _)| matches!(**link, Link::Local(_))) {
            limit = limit.min(LOCAL_PAUSE);
        }
        self.poll(waker, limit)
    }

    fn poll(&self, waker: &Doorbell, limit: Duration) -> Found {
        let gone = PollFlags::RDHUP;
        let mut fds = vec![PollFd::new(waker.fd(), PollFlags::IN)];
        for listener in &self.listeners {
            fds.push(PollFd::from_borrowed_fd(listener.fd(), PollFlags::IN));
        }
        for (_, link, blocked) in &self.peers {
            let Some(socket) = link.fd() else { continue };
            let room = if *blocked { PollFlags::OUT } else { PollFlags::empty() };
            match &**link {
                Link::Shm(ring) => {
                    fds.push(PollFd::from_borrowed_fd(socket, gone));
                    if let Some(bell) = ring.own_bell() {
                        fds.push(PollFd::from_borrowed_fd(bell.fd().as_fd(), PollFlags::IN));
                    }
                }
                _ => fds.push(PollFd::from_borrowed_fd(socket, PollFlags::IN | room)),
            }
        }
        let limit =
            Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        if poll(&mut fds, Some(&limit)).is_err() {
            return Found::default(); // interrupted: the caller tries again
        }
        let mut events = fds.iter().map(PollFd::revents);
        if events.next().is_some_and(|event| !event.is_empty()) {
            waker.clear();
        }
        let mut found = Found::default();
        for listener in &self.listeners {
            if events.next().is_some_and(|event| !event.is_empty()) {
                found.listeners.push(listener.clone());
            }
        }
        for (id, link, _) in &self.peers {
            match &**link {
                Link::Shm(ring) => {
                    if events.next().is_some_and(|event| !event.is_empty()) {
                        found.closed.push(*id);
                    }
                    if let Some(bell) = ring.own_bell()
                        && events.next().is_some_and(|event| !event.is_empty())
                    {
                        bell.clear();
                    }
                    found.peers.push(*id); // checking the ring costs less than asking the kernel
                }
                Link::Local(_) => found.peers.push(*id),
                _ => {
                    if events.next().is_some_and(|event| !event.is_empty()) {
                        found.peers.push(*id);
                    }
                }
            }
        }
        found
    }
}
