//! Threads that stay on one processor for a while.
//!
//! A thread inherits from the one that creates it which processors it may use. So threads that may stay on one create
//! others with [`spawn`], which gives these the choice that their creator had before.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::cell::Cell;
use std::io;
use std::thread::JoinHandle;

thread_local! {
    /// The processors that this thread may use when it does not stay on one.
    static OTHERWISE: Cell<Option<CpuSet>> = const { Cell::new(None) };
}

/// The calling thread stays on a processor until this is dropped, by the same thread.
#[derive(Debug)]
#[must_use]
pub struct Stay {
    only: CpuSet,
    /// Neither sent to nor shared with another thread.
    _same_thread: std::marker::PhantomData<*const ()>,
}

impl Stay {
    /// Keeps the calling thread on the processor with this number (`sched_setaffinity(2)`).
    ///
    /// # Errors
    /// What the kernel says; `AlreadyExists` if the thread stays on one already; `InvalidInput` for numbers that are too
    /// large (1024 and more).
    pub fn on(processor: usize) -> io::Result<Self> {
        if OTHERWISE.get().is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if processor >= CpuSet::MAX_CPU {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let before = sched_getaffinity(None)?;
        let mut only = CpuSet::new();
        only.set(processor);
        sched_setaffinity(None, &only)?;
        OTHERWISE.set(Some(before));
        Ok(Self { only, _same_thread: std::marker::PhantomData })
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let before = OTHERWISE.take();
        // If somebody else has changed it meanwhile, or the processor is gone, that holds.
        if let Some(before) = before
            && sched_getaffinity(None).is_ok_and(|now| now == self.only)
        {
            use_again(&before);
        }
    }
}

/// Lets the calling thread use these processors. If they were all that it could have, it may also use those that are added
/// to the machine or its control group later. If that is refused, it only takes longer.
fn use_again(before: &CpuSet) {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|processor| all.set(processor));
    let now = sched_setaffinity(None, &all).and_then(|()| sched_getaffinity(None));
    if now != Ok(*before) {
        let _ = sched_setaffinity(None, before);
    }
}

/// Creates a thread as [`std::thread::Builder::spawn`] does. It may use all processors that the calling thread may use
/// when that does not stay on one; it begins on the one on which that stays.
///
/// # Errors
/// If no thread could be created.
pub fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let processors = OTHERWISE.get();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        if let Some(processors) = processors {
            use_again(&processors);
        }
        body()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processors() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect()
    }

    #[test]
    fn a_thread_stays_alone_and_only_for_a_while() {
        let all = processors();
        for processor in all.clone() {
            let stay = Stay::on(processor).unwrap();
            assert_eq!(processors(), [processor]);
            assert_eq!(Stay::on(processor).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(spawn("free", processors).unwrap().join().unwrap(), all);
            drop(stay);
            assert_eq!(processors(), all);
            assert_eq!(spawn("free", processors).unwrap().join().unwrap(), all);
        }
        assert_eq!(Stay::on(CpuSet::MAX_CPU).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(Stay::on(CpuSet::MAX_CPU - 1).is_err(), "no machine has so many");
        assert_eq!(processors(), all);
    }

    #[test]
    fn what_others_have_chosen_meanwhile_holds() {
        let all = processors();
        let (first, last) = (*all.first().unwrap(), *all.last().unwrap());
        let thread = std::thread::spawn(move || {
            let stay = Stay::on(first).unwrap();
            let mut chosen = CpuSet::new();
            chosen.set(last);
            sched_setaffinity(None, &chosen).unwrap();
            drop(stay);
            processors()
        });
        // On a machine with one processor, nobody can choose another.
        assert_eq!(thread.join().unwrap(), if first == last { all } else { vec![last] });
    }
}
