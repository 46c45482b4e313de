//! A core stays on its processor while many clients of its machine ask all the time.
//!
//! The kernel moves threads of a busy machine rarely. But when it moves a core, all its connections have to follow, and
//! until they have, each of their requests wakes another processor and finds nothing in its caches. Clients that are moved
//! cost that only for themselves, so the kernel can still share out the work by moving those.
//!
//! No stay is long: after it, the kernel may move the core for a moment. So a core gets away from what keeps its processor
//! and cannot be moved, be it a program that is bound to it or a core of another server.

use super::Core;
use parking_lot::Mutex;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu};
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use towline_reactor::processor;

/// How long a core stays at most.
const STAY: Duration = Duration::from_secs(1);
/// How long it may be moved before it stays again.
const ROAM: Duration = Duration::from_millis(20);

/// Processors on which cores of a server stay: at most one on each.
#[derive(Debug, Default)]
pub(crate) struct Stays {
    processors: Mutex<HashSet<u32>>,
    /// The log says that the kernel does not let cores stay.
    is_told: AtomicBool,
}

impl Stays {
    /// Takes the processor `here` or, if a core stays there, the first one where none stays and none `is_busy`.
    fn take(&self, here: u32, is_busy: impl Fn(u32) -> bool) -> io::Result<Option<u32>> {
        let allowed = sched_getaffinity(None)?;
        let allowed = (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor));
        let others = allowed.map(|other| other as u32).filter(|other| !is_busy(*other));
        let mut processors = self.processors.lock();
        Ok(std::iter::once(here).chain(others).find(|processor| processors.insert(*processor)))
    }

    fn tell(&self, error: &io::Error) {
        if !self.is_told.swap(true, Ordering::Relaxed) {
            log::info!("cores cannot stay on their processors while many ask: {error}");
        }
    }
}

/// A place of a core among [`Stays`].
#[derive(Debug)]
struct Place {
    processor: u32,
    stays: Arc<Stays>,
    _stay: processor::Stay,
}

impl Place {
    /// Keeps the calling thread on a processor; see [`Stays::take`]. `None`: there is none.
    fn near(
        here: u32,
        is_busy: impl Fn(u32) -> bool,
        stays: &Arc<Stays>,
    ) -> io::Result<Option<Self>> {
        let Some(processor) = stays.take(here, is_busy)? else { return Ok(None) };
        let stay = processor::Stay::on(processor as usize);
        if stay.is_err() {
            stays.processors.lock().remove(&processor);
        }
        Ok(Some(Self { processor, stays: stays.clone(), _stay: stay? }))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.stays.processors.lock().remove(&self.processor);
    }
}

/// Whether a core stays.
#[derive(Debug, Default)]
pub(super) struct Staying {
    place: Option<Place>,
    /// When the last stay, or try, began or ended.
    since: Option<Instant>,
}

impl Staying {
    fn set(&mut self, place: Option<Place>, now: Instant) {
        (self.place, self.since) = (place, Some(now));
    }

    fn has_lasted(&self, time: Duration, now: Instant) -> bool {
        self.since.is_none_or(|since| now.saturating_duration_since(since) >= time)
    }

    pub(super) fn stays(&self) -> bool {
        self.place.is_some()
    }
}

impl Core {
    /// Starts to stay if that helps the clients.
    pub(super) fn stay(&mut self) {
        if self.staying.stays() || !self.order.has_local_crowd() {
            return;
        }
        let now = Instant::now();
        if !self.staying.has_lasted(ROAM, now) {
            return;
        }
        let others = self.shared.cores.iter().enumerate().filter(|(core, _)| *core != self.index);
        let is_busy = |processor| {
            others.clone().any(|(_, core)| core.processor.load(Ordering::Relaxed) == processor)
        };
        let place = Place::near(sched_getcpu() as u32, is_busy, &self.shared.stays);
        let place = place.unwrap_or_else(|error| {
            self.shared.stays.tell(&error);
            None
        });
        self.staying.set(place, now);
    }

    /// Ends a stay that is long enough, or when far fewer ask.
    pub(super) fn roam(&mut self) {
        if !self.staying.stays() {
            return;
        }
        let now = Instant::now();
        if self.order.has_emptied() || self.staying.has_lasted(STAY, now) {
            self.staying.set(None, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::mpsc::channel;

    fn near(here: u32, stays: &Arc<Stays>) -> Option<Place> {
        Place::near(here, |_| false, stays).unwrap()
    }

    #[test]
    fn each_core_has_a_processor_for_itself() {
        let stays: Arc<Stays> = Arc::default();
        let here = sched_getcpu() as u32;
        let count = sched_getaffinity(None).unwrap().count() as usize;
        let (all_stay, (tell, told)) = (Arc::new(Barrier::new(count + 1)), channel());
        for _ in 0..count {
            let (stays, all_stay, tell) = (stays.clone(), all_stay.clone(), tell.clone());
            std::thread::spawn(move || {
                let place = near(here, &stays).unwrap();
                tell.send((place.processor, sched_getcpu() as u32)).unwrap();
                all_stay.wait();
            });
        }
        drop(tell);
        let taken: Vec<_> = told.iter().take(count).collect();
        assert_eq!(taken.len(), count, "one could not stay");
        assert!(taken.iter().any(|(processor, _)| *processor == here));
        assert!(taken.iter().all(|(processor, ran_on)| processor == ran_on), "{taken:?}");
        assert_eq!(taken.iter().collect::<HashSet<_>>().len(), count);
        assert!(near(here, &stays).is_none(), "no processor is left");
        all_stay.wait();
    }

    #[test]
    fn a_processor_is_free_again_after_a_stay() {
        let stays = Arc::default();
        let here = sched_getcpu() as u32;
        for _ in 0..2 {
            assert_eq!(near(here, &stays).unwrap().processor, here);
        }
        assert!(Place::near(u32::MAX, |_| false, &stays).is_err());
        assert!(stays.processors.lock().is_empty());
    }

    #[test]
    fn nobody_goes_where_another_core_runs() {
        let stays = Arc::default();
        let here = sched_getcpu() as u32;
        let _first = near(here, &stays);
        assert!(Place::near(here, |_| true, &stays).unwrap().is_none());
    }

    #[test]
    fn no_stay_and_no_pause_is_long() {
        let (mut staying, now) = (Staying::default(), Instant::now());
        assert!(staying.has_lasted(ROAM, now), "it has not stayed yet");
        staying.set(None, now);
        assert!(!staying.has_lasted(ROAM, now));
        assert!(staying.has_lasted(ROAM, now + ROAM) && !staying.has_lasted(STAY, now + ROAM));
        assert!(staying.has_lasted(STAY, now + STAY));
    }
}
