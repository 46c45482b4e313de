//! Guessing who has news.
//!
//! A client that has an answer and asks again at once has often done so before its server looks again: always where both
//! run on one processor. If it was the only one with news the last time, the ring need not be asked who it is this time, which
//! saves a quarter of a microsecond of each request: to receive from it tells both whether it was, and what it wants.

use crate::Event;

/// Guesses after the ring has told of somebody alone, and most of them where it tells of the same one again and again. Others
/// wait for so many turns with small requests, at most.
const GUESSES: u32 = 7;
const GUESSES_MAX: u32 = 31;
/// Most chances left out after guesses that were wrong.
const PAUSE: u32 = 255;

/// Who had news the last time, and how good it was lately to guess that nobody else has.
#[derive(Debug, Default)]
pub(crate) struct Guess {
    last: Option<Event>,
    /// Guesses between the last question to the ring and the next, and those that are left.
    guesses: u32,
    left: u32,
    /// Chances to leave out before the next guess, and the same after that one, if it is wrong.
    pause: u32,
    next_pause: u32,
}

impl Guess {
    /// What the ring told, when it was asked.
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

    /// What the ring would most likely tell, given that it has something to tell. What was done since the last guess took as long
    /// as so many small requests, at least one.
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
        // Being wrong costs twice what being right saves: so it has to be right twice as often.
        self.next_pause = self.next_pause.saturating_sub(1);
        Some(event)
    }

    /// The last guess was wrong.
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
        // Few of those that take long.
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
        // Whoever was not alone is trusted no further than anybody.
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
