//! A core stays on its processor while many clients on that processor ask all the time.
//!
//! The kernel moves threads of a busy machine rarely. But when it moves a core, all its connections have to follow, and
//! until they have, each of their requests wakes another processor and finds nothing in its caches. Clients that are moved
//! cost that only for themselves, so the kernel can still share out the work by moving those.

use super::Core;
use parking_lot::Mutex;
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
    /// Keeps the calling thread on a processor, unless another core of its server stays there.
    fn on(processor: u32, stays: &Arc<Stays>) -> Option<Self> {
        if stays.is_refused.load(Ordering::Relaxed) || !stays.processors.lock().insert(processor) {
            return None;
        }
        let stay = processor::Stay::on(processor as usize);
        match stay {
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
            self.stay = Stay::on(processor, &self.shared.stays);
        }
    }

    /// Ends the stay when fewer ask.
    pub(super) fn leave_unless_crowded(&mut self) {
        if self.stay.is_some() && !self.order.is_crowded() {
            self.stay = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_core_stays_on_a_processor() {
        let stays = Arc::default();
        let here = rustix::thread::sched_getcpu() as u32;
        let first = Stay::on(here, &stays).unwrap();
        let other_stays = stays.clone();
        let other = move || Stay::on(here, &other_stays).is_some();
        assert!(!std::thread::spawn(other.clone()).join().unwrap());
        drop(first);
        assert!(std::thread::spawn(other).join().unwrap());
        assert!(stays.processors.lock().is_empty());
    }

    #[test]
    fn a_core_that_cannot_stay_does_not_try_again() {
        let stays = Arc::default();
        assert!(Stay::on(u32::MAX, &stays).is_none());
        let here = rustix::thread::sched_getcpu() as u32;
        assert!(Stay::on(here, &stays).is_none());
        assert!(stays.processors.lock().is_empty());
    }
}
