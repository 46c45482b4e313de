//! What is known of the content of a file that this process writes: parts that it has written or read lately, and
//! where the file ends.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

/// Most bytes of a part: what is moved in longer pieces is hardly ever wanted back.
pub(crate) const PART_BYTES_MAX: usize = 64 << 10;
/// Maximum number of parts of a file, and of their bytes in all.
const PARTS_MAX: usize = 64;
const BYTES_MAX: usize = 128 << 10;

/// What is known of a file.
#[derive(Default)]
pub(crate) struct Content {
    /// Later ones replace what earlier ones say of the same bytes.
    parts: VecDeque<Part>,
    /// Number of bytes of all parts.
    bytes: usize,
    end: Option<End>,
}

struct Part {
    range: Range<u64>,
    /// Empty if it was too long to be kept.
    data: Vec<u8>,
    /// When it is too old.
    until: Instant,
}

#[derive(Clone, Copy)]
struct End {
    size: u64,
    /// From here on, what no part tells is zero: the file ended here once.
    blank: u64,
    /// When this is too old.
    until: Instant,
}

impl Part {
    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.range.start < range.end && range.start < self.range.end
    }
}

impl Content {
    /// Of a file of which only the size is known, until this moment.
    pub(crate) fn of_size(size: u64, until: Instant) -> Self {
        Self { end: Some(End { size, blank: size, until }), ..Self::default() }
    }

    /// Returns the size, if it is known.
    pub(crate) fn size(&self, now: Instant) -> Option<u64> {
        self.end_at(now).map(|end| end.size)
    }

    fn end_at(&self, now: Instant) -> Option<End> {
        self.end.filter(|end| now <= end.until)
    }

    /// Notes what was written, which may be used until this moment.
    pub(crate) fn wrote(&mut self, at: u64, data: &[u8], now: Instant, until: Instant) {
        self.end = self.end_at(now);
        self.add(at, data, until);
        if let Some(end) = &mut self.end
            && !data.is_empty()
        {
            end.size = end.size.max(at + data.len() as u64);
        }
    }

    /// Notes what the server has answered to a read of this many bytes.
    pub(crate) fn was_read(&mut self, at: u64, wanted: usize, data: &[u8], until: Instant) {
        let end = at + data.len() as u64;
        let is_last = data.len() < wanted;
        let is_changed = |known: End| if is_last { known.size > end } else { known.size < end };
        let is_beyond = |part: &Part| is_last && part.range.end > end;
        if self.end.is_some_and(is_changed) || self.parts.iter().any(is_beyond) {
            // By somebody else.
            *self = Self::default();
        }
        if is_last && (at == 0 || !data.is_empty()) {
            self.end = Some(End { size: end, blank: end, until });
        }
        // Who has not written will hardly read it again.
        if !self.parts.is_empty() {
            self.add(at, data, until);
        }
    }

    fn add(&mut self, at: u64, data: &[u8], until: Instant) {
        if data.is_empty() {
            return;
        }
        let kept = if data.len() <= PART_BYTES_MAX { data } else { &[] };
        while self.parts.len() == PARTS_MAX || self.bytes + kept.len() > BYTES_MAX {
            let Some(first) = self.parts.pop_front() else { break };
            self.bytes -= first.data.len();
            if let Some(end) = &mut self.end {
                end.blank = end.blank.max(first.range.end);
            }
        }
        self.bytes += kept.len();
        let range = at..at + data.len() as u64;
        self.parts.push_back(Part { range, data: kept.to_vec(), until });
    }

    /// Returns what a read of this many bytes at an offset returns; `None` if not all of that is known.
    pub(crate) fn read(&self, wanted: usize, at: u64, now: Instant) -> Option<Vec<u8>> {
        let end = self.end_at(now);
        let left = end.map_or(u64::MAX, |end| end.size.saturating_sub(at));
        let count = usize::try_from(left).map_or(wanted, |left| left.min(wanted));
        if count > BYTES_MAX {
            return None;
        }
        let (mut data, range) = (vec![0; count], at..at.checked_add(count as u64)?);
        let blank = end.map_or(u64::MAX, |end| end.blank);
        let is_known = self.visit(self.parts.len(), range, (blank, now), &mut |range, part| {
            let from = (range.start - part.range.start) as usize;
            let target = &mut data[(range.start - at) as usize..(range.end - at) as usize];
            target.copy_from_slice(&part.data[from..from + target.len()]);
        });
        is_known.then_some(data)
    }

    /// Calls `found` with each piece of a range that is in a part, one of the first `parts`, and with the part. Returns
    /// false if not all of the range is known; what is in no part is zero.
    fn visit(
        &self,
        parts: usize,
        range: Range<u64>,
        (blank, now): (u64, Instant),
        found: &mut impl FnMut(Range<u64>, &Part),
    ) -> bool {
        if range.is_empty() {
            return true;
        }
        let newest = self.parts.range(..parts).rposition(|part| part.overlaps(&range));
        let Some(place) = newest else {
            return range.start >= blank;
        };
        let part = &self.parts[place];
        // What it replaces is older still.
        if now > part.until || part.data.is_empty() {
            return false;
        }
        let (from, to) = (range.start.max(part.range.start), range.end.min(part.range.end));
        found(from..to, part);
        self.visit(place, range.start..from, (blank, now), found)
            && self.visit(place, to..range.end, (blank, now), found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Numbers that look random (xorshift).
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 20) % limit
        }
    }

    #[test]
    fn what_was_written_is_read_back_with_holes_and_the_end() {
        let now = Instant::now();
        let mut content = Content::of_size(0, now);
        assert_eq!(content.read(352, 0, now), Some(vec![]));
        content.wrote(3, b"abc", now, now);
        content.wrote(4, b"X", now, now);
        assert_eq!(content.read(100, 0, now), Some(b"\0\0\0aXc".to_vec()));
        assert_eq!(content.read(1, 4, now), Some(b"X".to_vec()));
        assert_eq!(content.read(1, 9, now), Some(vec![]));
        assert_eq!(content.size(now), Some(6));
        assert_eq!(content.read(5, u64::MAX - 1, now), Some(vec![]));
    }

    #[test]
    fn what_is_not_known_is_not_told() {
        let now = Instant::now();
        let mut content = Content::of_size(10, now);
        assert_eq!(content.read(1, 0, now), None);
        assert_eq!(content.read(1, 10, now), Some(vec![]));
        content.wrote(5, b"abc", now, now);
        assert_eq!(content.read(3, 5, now), Some(b"abc".to_vec()));
        assert_eq!(content.read(4, 5, now), None);
        let mut unknown = Content::default();
        unknown.wrote(5, b"abc", now, now);
        assert_eq!(unknown.size(now), None);
        assert_eq!(unknown.read(3, 5, now), Some(b"abc".to_vec()));
        assert_eq!(unknown.read(4, 5, now), None, "it may end there");
    }

    /// What replaces something may be newer, and is not older than it seems.
    #[test]
    fn what_is_old_is_not_told_and_hides_what_is_older() {
        let now = Instant::now();
        let [soon, later] = [1, 2].map(|seconds| now + Duration::from_secs(seconds));
        let mut content = Content::of_size(0, later);
        content.wrote(0, b"aaaa", now, later);
        content.wrote(1, b"b", now, now);
        assert_eq!(content.read(4, 0, now), Some(b"abaa".to_vec()));
        assert_eq!(content.read(4, 0, soon), None);
        assert_eq!(content.read(4, 2, soon), Some(b"aa".to_vec()));
        let mut ends = Content::of_size(0, now);
        ends.wrote(0, b"a", soon, later);
        assert_eq!((ends.size(now), ends.read(2, 0, now)), (None, None));
        assert_eq!(ends.read(1, 0, soon), Some(b"a".to_vec()));
    }

    /// What was replaced does not come to light again.
    #[test]
    fn what_is_too_long_to_be_kept_hides_what_it_replaces() {
        let now = Instant::now();
        let mut content = Content::of_size(0, now);
        content.wrote(0, b"aaaaaaaa", now, now);
        content.wrote(4, b"bbbb", now, now);
        content.wrote(6, &[b'c'; PART_BYTES_MAX + 1], now, now);
        assert_eq!(content.read(6, 0, now), Some(b"aaaabb".to_vec()));
        assert_eq!(content.read(7, 0, now), None);
        content.wrote(6, b"d", now, now);
        assert_eq!(content.read(7, 0, now), Some(b"aaaabbd".to_vec()));
        assert_eq!(content.size(now), Some(6 + PART_BYTES_MAX as u64 + 1));
    }

    #[test]
    fn what_others_have_changed_is_noticed() {
        let now = Instant::now();
        let written = || {
            let mut content = Content::of_size(0, now);
            content.wrote(0, b"abcdef", now, now);
            content
        };
        let mut shorter = written();
        shorter.was_read(0, 9, b"xy", now);
        assert_eq!((shorter.size(now), shorter.read(9, 0, now)), (Some(2), None));
        let mut gone = written();
        gone.was_read(4, 9, b"", now);
        assert_eq!((gone.size(now), gone.read(1, 0, now)), (None, None));
        let mut longer = written();
        longer.was_read(5, 3, b"fgh", now);
        assert_eq!((longer.size(now), longer.read(3, 5, now)), (None, None));
        let mut same = written();
        same.was_read(4, 9, b"eX", now);
        assert_eq!(same.read(9, 0, now), Some(b"abcdeX".to_vec()));
    }

    /// Whatever is told is right, and memory is bounded.
    #[test]
    fn random_writes_and_reads_are_as_in_memory() {
        const LONG: u64 = PART_BYTES_MAX as u64 * 5 / 4;
        let now = Instant::now();
        for seed in 1..40 {
            let mut random = Random(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
            let (mut file, mut content) = (Vec::new(), Content::of_size(0, now));
            let (mut told, room) = (0, if seed % 2 == 0 { 4096 } else { 1 << 20 });
            for step in 0..3000u32 {
                let at = random.below(room);
                let longest = if random.below(20) == 0 { LONG } else { room / 16 };
                let length = random.below(longest);
                let range = at as usize..(at + length) as usize;
                if random.below(2) == 0 {
                    let data = vec![step as u8 | 1; length as usize];
                    content.wrote(at, &data, now, now);
                    if length > 0 {
                        file.resize(file.len().max(range.end), 0);
                        file[range].copy_from_slice(&data);
                    }
                    continue;
                }
                let wanted = file.get(range.start..file.len().min(range.end).max(range.start));
                let wanted = wanted.unwrap_or_default();
                match content.read(length as usize, at, now) {
                    Some(is) => {
                        assert!(is == wanted, "seed {seed}, step {step}");
                        told += 1;
                    }
                    None => content.was_read(at, length as usize, wanted, now),
                }
                assert!(content.size(now).is_none_or(|size| size == file.len() as u64));
                let bytes: usize = content.parts.iter().map(|part| part.data.len()).sum();
                assert!(bytes == content.bytes && bytes <= BYTES_MAX);
                assert!(content.parts.len() <= PARTS_MAX);
            }
            assert!(told > 20, "{told}");
        }
    }
}
