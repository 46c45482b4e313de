//! The order in which a directory lists its names, so that names with outdated attributes can be requested
//! again from the right place on. It is a guess: a request from there does not find a name that was
//! removed.

use crate::hash::hash;

/// One cookie is kept for this many names.
const STEP: usize = 64;

/// The beginning of a directory, as far as it was listed; 4 bytes per name.
#[derive(Default)]
pub(super) struct Order {
    hashes: Vec<u32>,
    /// The cookie before each group of [`STEP`] names.
    cookies: Vec<u64>,
    /// The cookie from which the listing continues, if it does.
    next: u64,
    has_ended: bool,
    /// Where a name was found last: most programs look at names in order.
    last: usize,
    /// Number of searches still skipped after one found nothing, and the length of the last such pause.
    pause: u32,
    pauses: u32,
}

impl Order {
    /// Maximum number of names remembered: 4 MiB.
    pub(super) const MAX: usize = 1 << 20;

    pub(super) fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Adds names that follow `cookie`, each with the cookie behind it, if they continue the known part.
    /// `end` says that no names follow.
    pub(super) fn add<'a>(
        &mut self,
        cookie: u64,
        mut entries: impl Iterator<Item = (&'a [u8], u64)>,
        end: bool,
    ) {
        if cookie == 0 && end {
            *self = Self::default();
        }
        // A part may have been listed before, when the program had no room for more.
        if cookie != self.next && !entries.any(|(_, behind)| behind == self.next) {
            return;
        }
        for (name, behind) in entries.take(Self::MAX - self.hashes.len()) {
            if self.hashes.len().is_multiple_of(STEP) {
                self.cookies.push(self.next);
            }
            self.hashes.push(hash(0, name));
            self.next = behind;
        }
        self.has_ended = end;
    }

    /// Returns the cookie behind which unlisted names follow, if there are any and they can be remembered.
    pub(super) fn rest(&self) -> Option<u64> {
        let goes_on = !self.has_ended && (1..Self::MAX).contains(&self.hashes.len());
        goes_on.then_some(self.next)
    }

    /// Notes that the name with this hash is not where it was found.
    pub(super) fn forget(&mut self, hash: u32) {
        if let Some(of) = self.hashes.get_mut(self.last).filter(|of| **of == hash) {
            *of = 0;
        }
    }

    /// Returns the cookie behind which a name with this hash follows, after fewer than [`STEP`] others.
    pub(super) fn find(&mut self, hash: u32) -> Option<u64> {
        if self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        let (before, after) = self.hashes.split_at(self.last);
        let find = |all: &[u32]| {
            // Whole blocks without an early exit, so that the compiler vectorizes the loop.
            let has = |block: &[u32]| block.iter().fold(false, |found, h| found | (*h == hash));
            let block = all.chunks(STEP).position(has)? * STEP;
            Some(block + all[block..].iter().position(|h| *h == hash)?)
        };
        let found = find(after).map(|place| self.last + place).or_else(|| find(before));
        if let Some(place) = found {
            (self.last, self.pauses) = (place, 0);
        } else if self.hashes.len() > STEP {
            self.pauses = (2 * self.pauses + 1).min(63);
            self.pause = self.pauses;
        }
        Some(self.cookies[found? / STEP])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(order: &mut Order, cookie: u64, names: std::ops::Range<u64>, end: bool) {
        let all = names.map(|n| (n.to_string().into_bytes(), n + 1)).collect::<Vec<_>>();
        order.add(cookie, all.iter().map(|(name, behind)| (&name[..], *behind)), end);
    }

    fn find(order: &mut Order, name: u64) -> Option<u64> {
        order.find(hash(0, name.to_string().as_bytes()))
    }

    #[test]
    fn a_name_stands_less_than_a_step_behind_its_cookie() {
        let mut order = Order::default();
        add(&mut order, 0, 0..1000, false);
        add(&mut order, 900, 900..2000, false); // lists a part of it again
        add(&mut order, 5000, 5000..5100, false); // what is between is not known
        assert_eq!(order.len(), 2000);
        for name in (0..2000).chain([1999, 0, 1234, 63, 64]) {
            assert_eq!(find(&mut order, name), Some(name / 64 * 64), "{name}");
        }
        add(&mut order, 0, 7..9, true);
        assert_eq!((order.len(), find(&mut order, 8)), (2, Some(0)));
    }

    #[test]
    fn the_rest_begins_where_the_listing_stopped() {
        let mut order = Order::default();
        assert_eq!(order.rest(), None, "nothing is known of it");
        add(&mut order, 0, 0..100, false);
        assert_eq!(order.rest(), Some(100));
        add(&mut order, 50, 50..80, false); // in the midst, again
        assert_eq!(order.rest(), Some(100));
        add(&mut order, 100, 100..130, true);
        assert_eq!((order.rest(), order.len()), (None, 130));
        add(&mut order, 0, 0..10, true);
        assert_eq!((order.rest(), order.len()), (None, 10));
    }

    #[test]
    fn names_that_are_not_there_are_looked_for_less_and_less() {
        let mut order = Order::default();
        add(&mut order, 0, 0..100, false);
        order.forget(hash(0, b"0"));
        assert_eq!(find(&mut order, 0), None);
        assert_eq!(find(&mut order, 70), None, "a pause");
        assert_eq!(find(&mut order, 70), Some(64));
        assert_eq!(find(&mut order, 99), Some(64));
    }

    #[test]
    fn a_directory_without_end_is_remembered_in_bounds() {
        let mut order = Order::default();
        for begin in (0..Order::MAX as u64 + 5000).step_by(1000) {
            add(&mut order, begin, begin..begin + 1000, false);
        }
        assert_eq!(order.len(), Order::MAX);
    }
}
