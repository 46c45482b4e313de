//! Groups consecutive numbers.

use std::ops::Range;

/// Groups ascending numbers into ranges of consecutive ones.
pub(crate) fn runs(numbers: impl Iterator<Item = u32>) -> impl Iterator<Item = Range<u32>> {
    let mut numbers = numbers.peekable();
    std::iter::from_fn(move || {
        let start = numbers.next()?;
        let mut end = start + 1;
        while numbers.next_if_eq(&end).is_some() {
            end += 1;
        }
        Some(start..end)
    })
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn numbers_side_by_side_are_one_range() {
        let found: Vec<_> = runs([3, 4, 5, 9, 11, 12].into_iter()).collect();
        assert_eq!(found, [3..6, 9..10, 11..13]);
        assert_eq!(runs([].into_iter()).count(), 0);
    }
}
