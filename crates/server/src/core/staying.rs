//! A core stays on its processor while many clients on that processor ask all the time.
//!
//! The kernel moves threads of a busy machine rarely. But when it moves a core, all its connections have to follow, and
//! until they have, each of their requests wakes another processor and finds nothing in its caches. Clients that are moved
//! cost that only for themselves, so the kernel can still share out the work by moving those.

use super::Core;
use parking_lot::Mutex;
use rustix::thread::{CpuSet, sched_getaffinity};
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_reactor::processor;

/// Processors on which cores of a server stay: at most one on each.
#[derive(Debug, Default)]
pub(crate) struct Stays {
    processors: Mutex<HashSet<u32>>,
    /// The kernel does not let threads stay, for instance because a filter of system calls forbids it.
    is_refused: AtomicBool,
}

/// A core's stay on its processor.
#[derive(Debug)]
pub(super) struct Stay {
    processor: u32,
    stays: Arc<Stays>,
    _stay: processor::Stay,
}

impl Stay {
    /// Keeps the calling thread on the processor `here`, or on another if a core of its server stays there already.
    fn near(here: u32, stays: &Arc<Stays>) -> Option<Self> {
        let processor = stays.take(here)?;
        match processor::Stay::on(processor as usize) {
            Ok(stay) => Some(Self { processor, stays: stays.clone(), _stay: stay }),
            Err(error) => {
                stays.processors.lock().remove(&processor);
                stays.refuse(processor, &error);
                None
            }
        }
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.stays.processors.lock().remove(&self.processor);
    }
}

impl Stays {
    /// Takes the processor `here` or, if that is taken, the first one that is free.
    fn take(&self, here: u32) -> Option<u32> {
        if self.is_refused.load(Ordering::Relaxed) {
            return None;
        }
        let mut processors = self.processors.lock();
        let allowed = sched_getaffinity(None).ok()?;
        let others = (0..CpuSet::MAX_CPU).filter(|other| allowed.is_set(*other));
        let mut free = std::iter::once(here).chain(others.map(|other| other as u32));
        free.find(|processor| processors.insert(*processor))
    }

    fn refuse(&self, processor: u32, error: &io::Error) {
        if !self.is_refused.swap(true, Ordering::Relaxed) {
            log::info!(
                "cores cannot stay on their processors while many ask (here {processor}): {error}"
            );
        }
    }
}

impl Core {
    /// Starts to stay on the processor on which the core runs if that helps its clients.
    pub(super) fn stay(&mut self, processor: u32) {
        if self.stay.is_none() && self.order.has_local_crowd() {
            self.stay = Stay::near(processor, &self.shared.stays);
        }
    }

    /// Ends the stay when far fewer ask.
    pub(super) fn leave_when_emptied(&mut self) {
        if self.stay.is_some() && self.order.has_emptied() {
            self.stay = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::sched_getcpu;
    use std::sync::Barrier;
    use std::sync::mpsc::channel;

    #[test]
    fn each_core_has_a_processor_for_itself() {
        let stays: Arc<Stays> = Arc::default();
        let here = sched_getcpu() as u32;
        let count = sched_getaffinity(None).unwrap().count();
        let (all_stay, told) = (Arc::new(Barrier::new(count as usize + 1)), channel());
        for _ in 0..count {
            let (stays, all_stay, tell) = (stays.clone(), all_stay.clone(), told.0.clone());
            std::thread::spawn(move || {
                let stay = Stay::near(here, &stays).unwrap();
                tell.send((stay.processor, sched_getcpu() as u32)).unwrap();
                all_stay.wait();
            });
        }
        let taken: Vec<_> = told.1.iter().take(count as usize).collect();
        assert!(taken.iter().any(|(processor, _)| *processor == here));
        assert!(taken.iter().all(|(processor, ran_on)| processor == ran_on), "{taken:?}");
        assert_eq!(taken.iter().collect::<HashSet<_>>().len(), taken.len());
        assert!(Stay::near(here, &stays).is_none(), "no processor is left");
        all_stay.wait();
    }

    #[test]
    fn a_processor_is_free_again_after_a_stay() {
        let stays = Arc::default();
        let here = sched_getcpu() as u32;
        for _ in 0..2 {
            assert_eq!(Stay::near(here, &stays).unwrap().processor, here);
        }
        assert!(stays.processors.lock().is_empty());
    }

    #[test]
    fn a_core_that_cannot_stay_does_not_try_again() {
        let stays = Arc::default();
        assert!(Stay::near(u32::MAX, &stays).is_none());
        let here = sched_getcpu() as u32;
        assert!(Stay::near(here, &stays).is_none());
        assert!(stays.processors.lock().is_empty());
    }
}
