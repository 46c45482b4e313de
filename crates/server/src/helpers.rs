//! Lets other threads make listings of a session that asks for many, while other cores have nothing to do.
//!
//! All requests of a session arrive at one core. A listing with attributes keeps it busy for about a microsecond an
//! entry, since each entry takes a system call, while the session's other requests wait. So a listing that another
//! request follows goes to a thread that may block, if there are idle cores, and the core makes the next one itself
//! meanwhile. Whoever has only one request under way never waits for another thread.

use crate::core::Core;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

/// Most listings that other threads have for each core that has nothing to do: one is made while the others wait, so that
/// the thread always finds one. Their results are not counted as memory of their lanes; they are no longer than a
/// megabyte each.
const LISTINGS_EACH: usize = 6;

thread_local! {
    /// The processors that this thread may use, and the one of them that it keeps off.
    static KEPT_OFF: Cell<Option<(CpuSet, usize)>> = const { Cell::new(None) };
}

/// A place among the listings that other threads have.
pub(crate) struct Helper {
    taken: Arc<AtomicUsize>,
    /// Processor and thread of the core that is helped.
    busy: usize,
    core: ThreadId,
}

impl Helper {
    /// Takes a place; `None` if `most` are taken.
    fn one_of(most: usize, taken: &Arc<AtomicUsize>) -> Option<Self> {
        let more = |taken: usize| (taken < most).then_some(taken + 1);
        taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        Some(Self { taken: taken.clone(), busy: sched_getcpu(), core: std::thread::current().id() })
    }

    /// Keeps the calling thread off the processor of the core that it helps. The kernel likes to wake a thread where the
    /// one runs that wakes it, and then the core would wait for it, while another processor has nothing to do.
    pub(crate) fn keep_off(&self) {
        if std::thread::current().id() == self.core {
            return; // no thread could be created
        }
        let allowed = match KEPT_OFF.get() {
            Some((_, busy)) if busy == self.busy => return,
            Some((allowed, _)) => Some(allowed),
            None => sched_getaffinity(None).ok(),
        };
        let Some(allowed) = allowed else { return };
        KEPT_OFF.set(Some((allowed, self.busy)));
        if let Some(others) = without(allowed, self.busy) {
            // If that is refused, the listing takes longer.
            let _ = sched_setaffinity(None, &others);
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns these processors without one of them; `None` if none is left.
fn without(mut processors: CpuSet, one: usize) -> Option<CpuSet> {
    if one < CpuSet::MAX_CPU {
        processors.unset(one);
    }
    (processors.count() > 0).then_some(processors)
}

impl Core {
    /// Returns a place for a listing that another thread shall make, if there is one.
    pub(crate) fn helper(&self) -> Option<Helper> {
        let others = self.shared.cores.iter().enumerate().filter(|(index, _)| *index != self.index);
        let idle = others.filter(|(_, core)| core.active.load(Ordering::Relaxed) == 0).count();
        Helper::one_of(idle * LISTINGS_EACH, &self.shared.listings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_back() {
        let taken = Arc::default();
        let both = [Helper::one_of(2, &taken), Helper::one_of(2, &taken)];
        assert!(both.iter().all(Option::is_some));
        assert!(Helper::one_of(2, &taken).is_none());
        drop(both);
        assert!(Helper::one_of(0, &taken).is_none());
        assert!(Helper::one_of(1, &taken).is_some());
    }

    #[test]
    fn a_helper_keeps_off_the_processor_of_whom_it_helps() {
        let all = sched_getaffinity(None).unwrap();
        let core = std::thread::current().id();
        let of = move |busy| Helper { taken: Arc::new(AtomicUsize::new(1)), busy, core };
        of(sched_getcpu()).keep_off();
        assert_eq!(sched_getaffinity(None).unwrap(), all, "it is the core itself");
        std::thread::spawn(move || {
            for busy in (0..CpuSet::MAX_CPU).filter(|processor| all.is_set(*processor)) {
                of(busy).keep_off();
                let wanted = without(all, busy).unwrap_or(all);
                assert_eq!(sched_getaffinity(None).unwrap(), wanted);
            }
        })
        .join()
        .unwrap();
        let mut alone = CpuSet::new();
        alone.set(3);
        assert!(without(alone, 3).is_none());
        assert_eq!(without(alone, 4).unwrap(), alone);
    }
}
