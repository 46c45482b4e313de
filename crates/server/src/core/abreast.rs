//! How many clients have their turns at a time.
//!
//! When a core gives way and the kernel lets two clients run before the core runs again, it serves both at once. That takes
//! fewer switches than one at a time. But among clients of other sessions or control groups, the kernel lets the core run
//! after each of them. Then two at a time only drive each other's memory out of the caches nearest to the processor. So the
//! core tries two from time to time.

/// Turns after which it is decided whether two at a time stay.
const TRIED: u32 = 64;
/// They do if the core has given way less often than this meanwhile.
const GIVEN_MIN: u32 = 16;
/// Turns until two at a time are tried again.
const ALONE: u32 = 1024;

#[derive(Debug)]
pub(super) struct Abreast {
    is_alone: bool,
    /// Turns begun since that was decided.
    turns: u32,
    /// How often the core gave way meanwhile, and how many requests those sent whose turn it was.
    given: u32,
    asked: u32,
}

impl Default for Abreast {
    fn default() -> Self {
        Self::tried(false)
    }
}

impl Abreast {
    fn tried(is_alone: bool) -> Self {
        Self { is_alone, turns: 0, given: 0, asked: 0 }
    }

    /// Returns how many clients have their turns at a time now.
    pub(super) fn number(&self) -> usize {
        if self.is_alone { 1 } else { 2 }
    }

    /// Notes that a turn begins.
    pub(super) fn begins(&mut self) {
        self.turns += 1;
        if self.is_alone && self.turns >= ALONE {
            *self = Self::tried(false);
        } else if !self.is_alone && self.turns >= TRIED {
            // Nearer to one request each time than to two.
            let is_alone = self.asked < self.given.saturating_add(self.given / 2);
            *self = Self::tried(is_alone && self.given >= GIVEN_MIN);
        }
    }

    /// Notes that the core gives way.
    pub(super) fn gives(&mut self) {
        self.given = self.given.saturating_add(1);
    }

    /// Notes that one of those whose turn it is has asked.
    pub(super) fn asks(&mut self) {
        self.asked = self.asked.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In each of so many turns, the core gives way ten times.
    fn turns(abreast: &mut Abreast, count: u32, asked_each: u32) {
        for _ in 0..count {
            abreast.begins();
            (0..10).for_each(|_| abreast.gives());
            (0..10 * asked_each).for_each(|_| abreast.asks());
        }
    }

    #[test]
    fn two_at_a_time_stay_while_both_ask_before_the_core_runs() {
        let mut abreast = Abreast::default();
        turns(&mut abreast, 10 * TRIED, 2);
        assert_eq!(abreast.number(), 2);
        turns(&mut abreast, 2 * TRIED, 1);
        assert_eq!(abreast.number(), 1);
        turns(&mut abreast, ALONE - TRIED, 1);
        assert_eq!(abreast.number(), 2, "tried again");
        turns(&mut abreast, TRIED, 1);
        assert_eq!(abreast.number(), 1);
        turns(&mut abreast, ALONE, 1);
        turns(&mut abreast, 2 * TRIED, 2);
        assert_eq!(abreast.number(), 2);
    }

    #[test]
    fn two_at_a_time_stay_while_the_core_never_gives_way() {
        let mut abreast = Abreast::default();
        (0..10 * TRIED).for_each(|_| abreast.begins());
        assert_eq!(abreast.number(), 2);
    }
}
