//! Guessing who has news.
//!
//! A client that has an answer and asks again at once has often done so before its server looks again: always where both
//! run on one processor. If it was the only one with news the last time, the ring need not be asked who it is this time, which
//! saves a quarter of a microsecond of each request: to receive from it tells both whether it was, and what it wants.

use crate::Event;

/// Guesses between two questions to the ring: others wait for so many turns, at most.
const GUESSES: u32 = 7;
/// Most chances left out after guesses that were wrong.
const PAUSE: u32 = 255;

/// Who had news the last time, and how good it was lately to guess that nobody else has.
#[derive(Debug, Default)]
pub(crate) struct Guess {
    last: Option<Event>,
    left: u32,
    /// Chances to leave out before the next guess, and the same after that one, if it is wrong.
    pause: u32,
    next_pause: u32,
}

impl Guess {
    /// What the ring told, when it was asked.
    pub(crate) fn told(&mut self, events: &[Event]) {
        self.left = GUESSES;
        self.last = match events {
            [event] if event.readable && !event.writable && !event.hung => Some(*event),
            _ => None,
        };
    }

    /// What the ring would most likely tell, given that it has something to tell.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let event = self.last?;
        if self.left == 0 {
            return None;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        self.left -= 1;
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
        assert_eq!(guess.next(), None);
        guess.told(&[NEWS]);
        for _ in 0..GUESSES {
            assert_eq!(guess.next(), Some(NEWS));
        }
        assert_eq!(guess.next(), None);
        for others in [
            &[][..],
            &[NEWS, Event { token: 4, ..NEWS }],
            &[Event { hung: true, ..NEWS }],
            &[Event { writable: true, ..NEWS }],
            &[Event { readable: false, ..NEWS }],
        ] {
            guess.told(others);
            assert_eq!(guess.next(), None, "{others:?}");
        }
    }

    #[test]
    fn wrong_guesses_become_rare_and_right_ones_often() {
        let mut guess = Guess::default();
        let guesses = |guess: &mut Guess, right: bool| {
            let mut made = 0;
            for _ in 0..10_000 {
                guess.told(&[NEWS]);
                if guess.next().is_some() {
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
