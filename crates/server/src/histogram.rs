//! How often which times were measured. Each request is counted in three of these, so that has to cost next to nothing.

/// Values below this have a place each; above, each power of two has half as many places.
const PLACES: u64 = 128;
/// Longer ones count as this.
const LONGEST_NS: u64 = 100_000_000_000;

/// Counts of nanoseconds, each known to a part in 64.
#[derive(Clone)]
pub(crate) struct Histogram {
    counts: Box<[u64]>,
    sum: u64,
    max: u64,
}

fn place(ns: u64) -> usize {
    let shift = (ns | (PLACES - 1)).ilog2() - (PLACES - 1).ilog2();
    ((u64::from(shift) * (PLACES / 2)) + (ns >> shift)) as usize
}

/// The longest time with this place.
fn longest(place: usize) -> u64 {
    let place = place as u64;
    if place < PLACES {
        return place;
    }
    let shift = place / (PLACES / 2) - 1;
    ((place - shift * (PLACES / 2) + 1) << shift) - 1
}

impl Histogram {
    pub(crate) fn new() -> Self {
        Self { counts: vec![0; place(LONGEST_NS) + 1].into(), sum: 0, max: 0 }
    }

    pub(crate) fn record(&mut self, ns: u64) {
        let ns = ns.min(LONGEST_NS);
        self.counts[place(ns)] += 1;
        self.sum += ns;
        self.max = self.max.max(ns);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// How many were recorded.
    pub(crate) fn len(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Mean in nanoseconds; zero of none.
    pub(crate) fn mean(&self) -> f64 {
        self.sum as f64 / self.len().max(1) as f64
    }

    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// The time that this share of all does not exceed; zero of none.
    pub(crate) fn quantile(&self, share: f64) -> u64 {
        let wanted = ((self.len() as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let reaches = |count: &u64| {
            seen += count;
            seen >= wanted
        };
        self.counts.iter().position(reaches).map_or(0, |place| longest(place).min(self.max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_has_a_place_that_says_it_to_a_part_in_64() {
        let mut last = 0;
        for ns in (0..100_000).chain((17..36).flat_map(|bit| [(1 << bit) - 1, 1 << bit, 3 << bit]))
        {
            let at = place(ns);
            assert!(at == last || ns > 100_000 || at == last + 1, "{ns}: {last}, then {at}");
            last = at;
            let said = longest(at);
            assert!(said >= ns && said - ns <= ns / 64, "{ns} is told as {said}");
            assert_eq!(place(said), at);
        }
    }

    #[test]
    fn what_is_told_is_that_of_all() {
        let (mut one, mut other) = (Histogram::new(), Histogram::new());
        (1..=900).for_each(|ns| one.record(ns * 1000));
        (901..=1000).for_each(|ns| other.record(ns * 1000));
        one.add(&other);
        assert_eq!((one.len(), one.max()), (1000, 1_000_000));
        assert!((one.mean() - 500_500.0).abs() < 1e-6);
        for (share, exact) in [(0.5, 500_000), (0.99, 990_000), (0.999, 999_000)] {
            let told = one.quantile(share);
            assert!((exact..=exact + exact / 64).contains(&told), "{share}: {told}");
        }
        other.record(u64::MAX);
        assert_eq!((other.max(), other.quantile(1.0)), (LONGEST_NS, LONGEST_NS));
        assert_eq!((Histogram::new().quantile(0.5), Histogram::new().mean()), (0, 0.0));
    }
}
