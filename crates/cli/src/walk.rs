//! Walks through the directories of a tree in order; the next ones are listed ahead, so that their round trips overlap.

/// Directories that are listed ahead.
const AHEAD: usize = 16;

/// Directories still to be listed: `D` tells which, `L` is a listing under way.
pub(crate) struct Walk<D, L> {
    /// The next one is the last.
    stack: Vec<(D, Option<L>)>,
    /// Listings under way.
    under_way: usize,
}

impl<D, L> Walk<D, L> {
    /// Starts at the top of a tree.
    pub(crate) fn new(top: D) -> Self {
        Self { stack: vec![(top, None)], under_way: 0 }
    }

    /// Adds the directories in the one that was taken last. They are the next ones, in this order.
    pub(crate) fn enter(&mut self, below: Vec<D>) {
        self.stack.extend(below.into_iter().rev().map(|directory| (directory, None)));
    }

    /// Takes the next directory and its listing, after starting it and those behind it with `start`. There is no
    /// listing if that returned none: the caller lists the directory itself, and tells why it cannot be listed.
    pub(crate) fn take(
        &mut self,
        mut start: impl FnMut(&mut D) -> Option<L>,
    ) -> Option<(D, Option<L>)> {
        // Some may be under way for directories that come after those found since.
        let room = (2 * AHEAD).saturating_sub(self.under_way);
        let next = self.stack.iter_mut().rev().take(AHEAD);
        for (directory, listing) in next.filter(|(_, listing)| listing.is_none()).take(room) {
            *listing = start(directory);
            self.under_way += usize::from(listing.is_some());
        }
        let (directory, listing) = self.stack.pop()?;
        self.under_way -= usize::from(listing.is_some());
        Some((directory, listing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_come_in_order_and_few_are_under_way() {
        let names = |directory: &str| -> Vec<String> {
            (0..20).map(|index| format!("{directory}/{index:02}")).collect()
        };
        let mut walk = Walk::new("top".to_owned());
        let mut started = Vec::new();
        let (mut taken, mut most) = (Vec::new(), 0);
        while let Some((directory, listing)) = walk.take(|directory| {
            started.push(directory.clone());
            Some(directory.clone())
        }) {
            most = most.max(started.len() - taken.len());
            assert_eq!(listing.as_ref(), Some(&directory));
            if directory.matches('/').count() < 3 {
                walk.enter(names(&directory));
            }
            taken.push(directory);
        }
        assert_eq!(taken.len(), 1 + 20 + 20 * 20 + 20 * 20 * 20);
        assert!(taken.is_sorted());
        assert_eq!((started.len(), most), (taken.len(), 2 * AHEAD));
    }
}
