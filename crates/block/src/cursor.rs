//! The order in which the fragments of a read are started, and their lengths.

use smallvec::SmallVec;
use towline_store::Layout;

/// Length in bytes of the first fragment and the last ones of a long read in one stream. Each fragment costs
/// some microseconds, whatever its length.
pub const SHORTEST_FRAGMENT: u64 = 32 * 1024;
/// Reads shorter than this are cut into equal fragments.
const RAMPED_BYTES_MIN: u64 = 256 * 1024;

/// The part of a read that is not yet started.
///
/// On a disk of several members, a read whose data may be sent in any order is started as one stream for each
/// member, in turns, so that all members work, however long their chunks are. In a single stream the first
/// fragment and the last ones are short: the network starts early, and little is left to send when the disk
/// is done.
#[derive(Debug)]
pub(crate) struct Cursor {
    /// Next byte of each stream.
    streams: SmallVec<[u64; 4]>,
    turn: usize,
    layout: Option<Layout>,
    end: u64,
    length: u64,
    begun: u64,
}

impl Cursor {
    /// Covers a whole range. `in_order`: the bytes are wanted in ascending order.
    pub(crate) fn new(range: std::ops::Range<u64>, layout: Option<Layout>, in_order: bool) -> Self {
        let mut streams = SmallVec::new();
        if !range.is_empty() {
            streams.push(range.start);
        }
        if let Some(layout) = layout.filter(|_| !in_order) {
            let mut next = layout.chunk_end(range.start);
            for _ in 1..layout.members {
                if next >= range.end {
                    break;
                }
                streams.push(next);
                next += layout.chunk;
            }
        }
        let layout = layout
            .map(|layout| Layout { members: if in_order { 1 } else { layout.members }, ..layout });
        let length = range.end.saturating_sub(range.start);
        Self { streams, turn: 0, layout, end: range.end, length, begun: 0 }
    }

    /// Returns the number of bytes not yet started.
    pub(crate) fn rest(&self) -> u64 {
        self.length - self.begun
    }

    /// Returns the next byte, and how many bytes from there on lie together on one member.
    pub(crate) fn peek(&self) -> Option<(u64, u64)> {
        let next = *self.streams.get(self.turn)?;
        let end = self.layout.map_or(self.end, |layout| layout.chunk_end(next).min(self.end));
        Some((next, end - next))
    }

    /// Returns the length of the next fragment, at most `most`.
    pub(crate) fn fragment(&self, most: u64) -> u64 {
        let here = self.peek().map_or(0, |(_, here)| here).min(most);
        if self.length < RAMPED_BYTES_MIN || self.streams.len() > 1 {
            return here;
        }
        let short = self.begun == 0 || self.rest() < most;
        if short { here.min(SHORTEST_FRAGMENT) } else { here }
    }

    /// Notes that `count` bytes from [`Cursor::peek`]'s offset are started, at most as many as it returned.
    pub(crate) fn advance(&mut self, count: u64) {
        self.begun += count;
        let Some(next) = self.streams.get_mut(self.turn) else { return };
        *next += count;
        if let Some(layout) = self.layout
            && layout.chunk_end(*next) - *next == layout.chunk
        {
            *next += layout.chunk * u64::from(layout.members - 1);
        }
        if *next >= self.end {
            self.streams.remove(self.turn);
        } else {
            self.turn += 1;
        }
        if self.turn >= self.streams.len() {
            self.turn = 0;
        }
    }

    /// Drops the rest: nothing more is started.
    pub(crate) fn finish(&mut self) {
        self.streams.clear();
    }

    /// Returns true if nothing is left to start.
    pub(crate) fn is_done(&self) -> bool {
        self.streams.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fragments(mut cursor: Cursor, most: u64) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        while let Some((offset, _)) = cursor.peek() {
            let count = cursor.fragment(most);
            all.push((offset, count));
            cursor.advance(count);
        }
        assert!(cursor.is_done());
        all
    }

    #[test]
    fn all_members_work_at_once() {
        let layout = Layout { chunk: 256 << 10, members: 2, shift: 0 };
        let begun = fragments(Cursor::new(0..1 << 20, Some(layout), false), 128 << 10);
        let kib: Vec<u64> = begun.iter().map(|(offset, _)| offset >> 10).collect();
        assert_eq!(kib, [0, 256, 128, 384, 512, 768, 640, 896]);
    }

    #[test]
    fn the_first_and_the_last_fragments_are_short() {
        let begun = fragments(Cursor::new(0..1 << 20, None, false), 128 << 10);
        let kib: Vec<u64> = begun.iter().map(|(_, length)| length >> 10).collect();
        assert_eq!(kib, [32, 128, 128, 128, 128, 128, 128, 128, 32, 32, 32]);
        let short = fragments(Cursor::new(0..200 << 10, None, false), 128 << 10);
        assert_eq!(short, [(0, 128 << 10), (128 << 10, 72 << 10)]);
    }

    proptest! {
        #[test]
        fn each_byte_is_begun_once_and_no_fragment_crosses_members(
            start in 0u64..3_000_000,
            length in 0u64..3_000_000,
            chunk in 1u64..40,
            members in 1u32..6,
            shift in 0u64..1000,
            whole in any::<bool>(),
            in_order in any::<bool>(),
        ) {
            let layout = Layout { chunk: chunk * 16384, members, shift: shift * 512 };
            let layout = (!whole).then_some(layout);
            let cursor = Cursor::new(start..start + length, layout, in_order);
            let mut begun = fragments(cursor, 131_072);
            if let Some(layout) = layout {
                for (offset, count) in &begun {
                    prop_assert!(offset + count <= layout.chunk_end(*offset));
                }
            }
            prop_assert!(begun.iter().all(|(_, count)| (1..=131_072).contains(count)));
            if in_order {
                prop_assert!(begun.is_sorted());
            }
            begun.sort_unstable();
            let mut at = start;
            for (offset, count) in begun {
                prop_assert_eq!(offset, at);
                at += count;
            }
            prop_assert_eq!(at, start + length);
        }
    }
}
