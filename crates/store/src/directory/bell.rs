//! Checks without a system call whether an event queue is still empty.
//!
//! An io_uring that polls a descriptor is notified by the task that causes an event, before that
//! task's system call returns: the kernel sets a bit in the ring's memory. Each thread that checks
//! has a ring of its own, which polls nothing else.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use towline_reactor::{Engine, Reactor};

/// Maximum number of threads with a bell. Each may keep one old queue alive until it checks again,
/// and a user may have 128 inotify instances by default.
const BELLS_MAX: usize = 16;

static BELLS: AtomicUsize = AtomicUsize::new(0);

/// The token of the only watched descriptor.
const QUEUE: u64 = 0;

/// A thread's means to check a queue.
#[derive(Debug)]
pub(super) struct Bell {
    ring: Ring,
    /// The generation of the queue it is attached to, and until when that is valid.
    attached: Option<(u64, Instant)>,
}

#[derive(Debug)]
enum Ring {
    NotTried,
    /// Not available, not wanted, or too many threads have one.
    None,
    Some(Reactor, Place),
}

impl Bell {
    pub(super) const fn new() -> Self {
        Self { ring: Ring::NotTried, attached: None }
    }

    /// Removes the ring: the thread checks by system calls instead.
    pub(super) fn remove(&mut self) {
        (self.ring, self.attached) = (Ring::None, None);
    }

    /// Returns true if nothing was added to the queue of this generation since the bell was
    /// attached. False may mean anything.
    pub(super) fn is_silent(&mut self, generation: u64, now: Instant) -> bool {
        let good = self.attached.is_some_and(|(to, until)| to == generation && now < until);
        match &mut self.ring {
            Ring::Some(reactor, _) if good => !reactor.is_ready(),
            _ => false,
        }
    }

    /// Attaches the bell to this queue instead of any other. Read the queue only after this call.
    pub(super) fn attach(&mut self, queue: &OwnedFd, generation: u64, until: Instant) {
        if matches!(self.ring, Ring::NotTried) {
            self.ring = ring();
        }
        let Ring::Some(reactor, _) = &mut self.ring else { return };
        let is_new = self.attached.is_none_or(|(to, _)| to != generation);
        let mut attach = || {
            if is_new && self.attached.is_some() {
                reactor.unwatch(queue.as_fd(), QUEUE)?;
            }
            if is_new {
                reactor.watch(queue.as_fd(), QUEUE)?;
            }
            // Takes earlier notifications, and makes the kernel start to poll.
            reactor.wait(Some(Duration::ZERO), &mut Vec::new())
        };
        match attach() {
            Ok(()) => self.attached = Some((generation, until)),
            Err(_) => self.remove(),
        }
    }
}

fn ring() -> Ring {
    let reactor = || Reactor::new(Some(Engine::Uring)).ok().filter(Reactor::tells_at_once);
    let made = Place::take().and_then(|place| Some((reactor()?, place)));
    made.map_or(Ring::None, |(reactor, place)| Ring::Some(reactor, place))
}

/// One of the [`BELLS_MAX`] bells, until dropped.
#[derive(Debug)]
struct Place;

impl Place {
    fn take() -> Option<Self> {
        let more = |bells| (bells < BELLS_MAX).then_some(bells + 1);
        BELLS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        BELLS.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bells_of_threads_that_ended_are_given_to_others() {
        let queue = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::NONBLOCK).unwrap();
        let has_bell = || {
            let mut bell = Bell::new();
            let now = Instant::now();
            bell.attach(&queue, 1, now + Duration::from_secs(60));
            bell.is_silent(1, now)
        };
        if !has_bell() {
            println!("SKIPPED bells of threads that ended: there is no io_uring");
            return;
        }
        assert!((0..2 * BELLS_MAX).all(|_| has_bell()));
    }
}
