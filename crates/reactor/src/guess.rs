//! Guesses which descriptor became ready.
//!
//! A client that receives an answer and sends its next request at once has often done so before the
//! server looks again; always if both run on one processor. If it was the only one that was ready
//! last time, the server need not ask the ring which one is ready this time: receiving from it shows both
//! whether it is, and what it wants. That saves a quarter of a microsecond per request.

use crate::Event;

/// Guesses after the ring reported one descriptor alone, and the limit if it reports the same one
/// repeatedly. Other descriptors wait for at most this many turns with small requests.
const GUESSES: u32 = 7;
const GUESSES_MAX: u32 = 31;
/// Most opportunities skipped after wrong guesses.
const PAUSE: u32 = 255;

/// The only descriptor that was ready last time, and how good the guesses were lately.
#[derive(Debug, Default)]
pub(crate) struct Guess {
    last: Option<Event>,
    /// Guesses between two queries of the ring, and how many of them are left.
    guesses: u32,
    left: u32,
    /// Opportunities to skip before the next guess, and the basis for the number after a wrong one.
    pause: u32,
    next_pause: u32,
}

impl Guess {
    /// Records what the ring reported when it was asked.
    pub(crate) fn told(&mut self, events: &[Event]) {
        let alone = match events {
            [event] if event.readable && !event.writable && !event.hung => Some(*event),
            _ => None,
        };
        let is_again = alone.is_some() && alone == self.last;
        self.guesses = if is_again { (self.guesses * 2 + 1).min(GUESSES_MAX) } else { GUESSES };
        self.left = self.guesses;
        self.last = alone;
    }

    /// Returns the event that the ring would most likely report, given that it has something to report.
    /// `took` is the time since the last guess in units of small requests, at least one.
    pub(crate) fn next(&mut self, took: u32) -> Option<Event> {
        let event = self.last?;
        if self.left < took {
            self.left = 0;
            return None;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        self.left -= took;
        // A wrong guess costs twice what a right one saves, so guesses have to be right twice as often.
        self.next_pause = self.next_pause.saturating_sub(1);
        Some(event)
    }

    /// Records that the last guess was wrong.
    pub(crate) fn was_wrong(&mut self) {
        self.last = None;
        self.pause = ((self.next_pause + 1) * 2).min(PAUSE);
        self.next_pause = self.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEWS: Event = Event { token: 3, readable: true, writable: false, hung: false };

    #[test]
    fn only_who_was_alone_and_only_for_a_while() {
        let mut guess = Guess::default();
        assert_eq!(guess.next(1), None);
        for guesses in [GUESSES, 2 * GUESSES + 1, GUESSES_MAX, GUESSES_MAX] {
            guess.told(&[NEWS]);
            for _ in 0..guesses {
                assert_eq!(guess.next(1), Some(NEWS));
            }
            assert_eq!(guess.next(1), None);
        }
        // Only few guesses for requests that take long.
        guess.told(&[NEWS]);
        assert_eq!(guess.next(GUESSES_MAX - 2), Some(NEWS));
        assert_eq!(guess.next(3), None);
        assert_eq!(guess.next(1), None);
        for others in [
            &[][..],
            &[NEWS, Event { token: 4, ..NEWS }],
            &[Event { hung: true, ..NEWS }],
            &[Event { writable: true, ..NEWS }],
            &[Event { readable: false, ..NEWS }],
        ] {
            guess.told(others);
            assert_eq!(guess.next(1), None, "{others:?}");
        }
        // A descriptor that was not alone gets no more trust than any other.
        guess.told(&[NEWS]);
        assert_eq!(guess.left, GUESSES);
    }

    #[test]
    fn wrong_guesses_become_rare_and_right_ones_often() {
        let mut guess = Guess::default();
        let guesses = |guess: &mut Guess, right: bool| {
            let mut made = 0;
            for _ in 0..10_000 {
                guess.told(&[NEWS]);
                if guess.next(1).is_some() {
                    made += 1;
                    if !right {
                        guess.was_wrong();
                    }
                }
            }
            made
        };
        let wrong = guesses(&mut guess, false);
        assert!((30..70).contains(&wrong), "{wrong}");
        assert!(guesses(&mut guess, true) > 9_000);
        assert_eq!(guess.next_pause, 0);
    }
}
