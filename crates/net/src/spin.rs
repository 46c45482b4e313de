//! Looking again for a while before sleeping.
//!
//! A sleeper has to be woken, which costs the peer a system call and both some ten microseconds, in
//! virtual machines five times that. Who looks again and again instead sees what comes at once, but
//! holds the processor meanwhile. So it is worth it only where something does come soon and nobody
//! else wants the processor. [`Spin`] learns both from what happens: it needs no knowledge of the
//! network, or of where the peer runs.

use rustix::thread::sched_yield;
use std::time::{Duration, Instant};

/// After spinning in vain again and again so many waits sleep at once before the next try.
const PAUSE_IN_VAIN: u32 = 15;
/// The same while somebody else wants the processor, who may keep it for milliseconds when asked.
const PAUSE_CONTENDED: u32 = 1023;
/// What comes this soon is not worth asking whether somebody else wants the processor.
const SOON: Duration = Duration::from_micros(5);
/// Asking takes longer than this only when somebody did.
const YIELDED: Duration = Duration::from_micros(5);
/// Two looks are this far apart only when something else ran on the processor between them.
const PREEMPTED: Duration = Duration::from_micros(30);

/// Looks at memory that cost about as much as one at the clock.
const LOOKS: usize = 32;

/// Looks at memory again and again, about as long as a look at the clock takes.
pub fn look_often(is_there: impl Fn() -> bool) -> bool {
    (0..LOOKS).any(|_| {
        std::hint::spin_loop();
        is_there()
    })
}

/// How long to look before sleeping, and whether at all.
#[derive(Debug)]
pub struct Spin {
    limit: Duration,
    /// Waits that sleep at once before the next try.
    pause: u32,
    /// The length of the next pause, when the next try is in vain, too.
    next_pause: u32,
}

impl Spin {
    /// Looks for at most `limit` each time; zero never looks.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self { limit, pause: 0, next_pause: 0 }
    }

    /// Calls `look` until it finds something. `None` after the limit, or at once where spinning was
    /// in vain lately: it is time to sleep. Each time in vain after the first the pause until the next
    /// try doubles; it becomes much longer while somebody else wants the processor.
    pub fn until<T>(&mut self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if self.limit.is_zero() {
            return None;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        // What is there already says nothing about spinning, and the clock need not be asked.
        if let Some(found) = look() {
            return Some(found);
        }
        let start = Instant::now();
        let (mut last, mut asked) = (start, false);
        loop {
            if let Some(found) = look() {
                self.next_pause = 0;
                return Some(found);
            }
            let mut now = Instant::now();
            let mut contended = now - last > PREEMPTED;
            if !asked && now - start >= SOON {
                asked = true;
                sched_yield();
                let before = std::mem::replace(&mut now, Instant::now());
                contended |= now - before > YIELDED;
            }
            if contended {
                self.pause = self.next_pause.max(1);
                self.next_pause = (self.pause * 4 + 1).min(PAUSE_CONTENDED);
                return look();
            }
            if now - start >= self.limit {
                self.pause = self.next_pause.min(PAUSE_IN_VAIN);
                self.next_pause = self.pause * 2 + 1;
                return None;
            }
            last = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_comes_while_it_looks() {
        let mut spin = Spin::new(Duration::from_secs(60));
        let mut looks = 0;
        let found = spin.until(|| {
            looks += 1;
            (looks == 3).then_some("it")
        });
        // The machine may have been busy for a moment: then it gives up, which is right.
        assert!(found == Some("it") || spin.pause > 0);
    }

    #[test]
    fn spins_less_and_less_in_vain_and_at_once_again_after_a_find() {
        let mut spin = Spin::new(Duration::from_nanos(1));
        let tries = |spin: &mut Spin, waits: usize| {
            let mut tried = 0;
            for _ in 0..waits {
                let mut looked = false;
                spin.until(|| {
                    looked = true;
                    None::<()>
                });
                tried += usize::from(looked);
            }
            tried
        };
        // Five tries lead to the longest pause, from then on one of 16 waits looks.
        assert!(tries(&mut spin, 1000) <= 5 + 1000 / 16 + 1);
        for _ in 0..=PAUSE_CONTENDED {
            let mut looks = 0;
            spin.until(|| {
                looks += 1;
                (looks == 2).then_some(())
            });
        }
        assert_eq!((spin.pause, spin.next_pause), (0, 0));
        assert_eq!(tries(&mut spin, 1), 1);
    }

    #[test]
    fn a_limit_of_zero_never_looks() {
        let mut spin = Spin::new(Duration::ZERO);
        assert_eq!(spin.until(|| Some(())), None);
    }
}
