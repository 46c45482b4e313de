//! Buffers of requests under way: owned, or lent by a caller that waits.
#![allow(unsafe_code)]

use smallvec::SmallVec;
use std::io::{IoSlice, IoSliceMut};

/// Consecutive pieces of memory to be sent; mostly one.
pub(crate) type Pieces = SmallVec<[*const [u8]; 1]>;

/// Parts of a buffer that is not in one piece: the end of each within the buffer, and its address. None is empty.
pub(crate) struct Parts(Box<[(usize, *mut u8)]>);

impl Parts {
    /// `length` bytes of `all`, without the first `from`.
    fn of(all: impl Iterator<Item = (*mut u8, usize)>, from: usize, length: usize) -> Self {
        let (mut before, mut end) = (from, 0);
        let parts = all.filter_map(|(address, bytes)| {
            let skipped = before.min(bytes);
            before -= skipped;
            let taken = (bytes - skipped).min(length - end);
            end += taken;
            (taken > 0).then_some((end, address.wrapping_add(skipped)))
        });
        Self(parts.collect())
    }

    fn len(&self) -> usize {
        self.0.last().map_or(0, |(end, _)| *end)
    }

    /// What is at `from`, as far as that is one piece; `None` at the end.
    fn at(&self, from: usize) -> Option<(*mut u8, usize)> {
        let number = self.0.partition_point(|(end, _)| *end <= from);
        let (end, address) = *self.0.get(number)?;
        let start = number.checked_sub(1).map_or(0, |before| self.0[before].0);
        Some((address.wrapping_add(from - start), end - from))
    }
}

/// Memory of a request, at a fixed address until the request is over.
pub(crate) enum Buffer {
    /// Moved into the request.
    Owned(Vec<u8>),
    /// Lent to be sent from.
    Source(*const u8, usize),
    /// Lent to be received into.
    Target(*mut u8, usize),
    /// As `Source`, in several parts.
    Sources(Parts),
    /// As `Target`, in several parts.
    Targets(Parts),
}

// SAFETY: the lender waits until the request is over (see the constructors), whichever thread moves
// the bytes meanwhile, and only one thread does: sending is under the lock of the send queue,
// receiving is done by the one leader.
unsafe impl Send for Buffer {}

impl Buffer {
    /// An empty buffer.
    pub(crate) fn none() -> Self {
        Self::Owned(Vec::new())
    }

    /// # Safety
    /// The caller must not return, nor let `bytes` go, before the request is over.
    pub(crate) unsafe fn source(bytes: &[u8]) -> Self {
        Self::Source(bytes.as_ptr(), bytes.len())
    }

    /// # Safety
    /// The caller must not return, nor use `bytes`, before the request is over.
    pub(crate) unsafe fn target(bytes: &mut [u8]) -> Self {
        Self::Target(bytes.as_mut_ptr(), bytes.len())
    }

    /// `length` bytes of several slices one after the other, without the first `from`.
    ///
    /// # Safety
    /// As [`Buffer::source`].
    pub(crate) unsafe fn sources(all: &[IoSlice<'_>], from: usize, length: usize) -> Self {
        let all = all.iter().map(|one| (one.as_ptr().cast_mut(), one.len()));
        Self::Sources(Parts::of(all, from, length))
    }

    /// As [`Buffer::sources`], to receive into.
    ///
    /// # Safety
    /// As [`Buffer::target`].
    pub(crate) unsafe fn targets(all: &mut [IoSliceMut<'_>], from: usize, length: usize) -> Self {
        let all = all.iter_mut().map(|one| (one.as_mut_ptr(), one.len()));
        Self::Targets(Parts::of(all, from, length))
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Owned(bytes) => bytes.len(),
            Self::Source(_, length) | Self::Target(_, length) => *length,
            Self::Sources(parts) | Self::Targets(parts) => parts.len(),
        }
    }

    /// A range to be sent, which must lie inside. The pointers are valid while the request lives, which the caller must
    /// ensure: requests are completed only between uses of their buffers.
    pub(crate) fn pieces(&self, from: usize, length: usize) -> Pieces {
        assert!(from + length <= self.len(), "a range beyond the end of a buffer");
        let one = |address: *const u8| {
            let piece = std::ptr::slice_from_raw_parts(address.wrapping_add(from), length);
            Pieces::from_elem(piece, 1)
        };
        match self {
            Self::Owned(bytes) => one(bytes.as_ptr()),
            Self::Source(address, _) => one(*address),
            Self::Target(address, _) => one(*address),
            Self::Sources(parts) | Self::Targets(parts) => {
                let (mut at, end) = (from, from + length);
                let next = || {
                    let (address, bytes) = parts.at(at).filter(|_| at < end)?;
                    let bytes = bytes.min(end - at);
                    at += bytes;
                    Some(std::ptr::slice_from_raw_parts(address.cast_const(), bytes))
                };
                std::iter::from_fn(next).collect()
            }
        }
    }

    /// Where to receive a range into, or its first part if it is in several; `None` beyond the end or for a buffer that can
    /// only be sent from.
    pub(crate) fn part_mut(&mut self, from: usize, length: usize) -> Option<*mut [u8]> {
        if from.checked_add(length)? > self.len() {
            return None;
        }
        let (address, length) = match self {
            Self::Owned(bytes) => (bytes[from..].as_mut_ptr(), length),
            Self::Target(address, _) => (address.wrapping_add(from), length),
            Self::Targets(parts) => {
                let (address, bytes) = parts.at(from)?;
                (address, bytes.min(length))
            }
            Self::Source(..) | Self::Sources(_) => return None,
        };
        Some(std::ptr::slice_from_raw_parts_mut(address, length))
    }

    /// Calls `fill` with each part of a range that is received into, and how far it is from the start of the range. Returns
    /// false if the range reaches beyond the end, or if the buffer can only be sent from.
    pub(crate) fn each_part(
        &mut self,
        from: usize,
        length: usize,
        mut fill: impl FnMut(usize, &mut [u8]),
    ) -> bool {
        let mut done = 0;
        while done < length {
            let Some(part) = self.part_mut(from + done, length - done) else { return false };
            fill(done, exclusive(part));
            done += part.len();
        }
        true
    }

    /// Returns owned memory; empty for lent memory.
    pub(crate) fn into_owned(self) -> Vec<u8> {
        match self {
            Self::Owned(bytes) => bytes,
            _ => Vec::new(),
        }
    }
}

/// Reads through a pointer of [`Buffer::pieces`] while the request is known to be alive.
pub(crate) fn shared<'a>(bytes: *const [u8]) -> &'a [u8] {
    // SAFETY: as `Buffer::pieces` says, a request whose parts wait to be sent is not over. Only the
    // sending thread reads parts, with the queue locked, and only those of the queue's lane. The
    // lane is replaced or ended with the queue locked, and then earlier parts no longer count.
    // While a request takes its slot, its source exists.
    unsafe { &*bytes }
}

/// Writes through a pointer of [`Buffer::part_mut`] while the request is known to be alive.
pub(crate) fn exclusive<'a>(bytes: *mut [u8]) -> &'a mut [u8] {
    // SAFETY: as `shared`; only the leader receives, and into one place at a time.
    unsafe { &mut *bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of a range, as they are sent.
    fn sent(buffer: &Buffer, from: usize, length: usize) -> Vec<u8> {
        buffer.pieces(from, length).into_iter().flat_map(shared).copied().collect()
    }

    #[test]
    fn buffers_in_parts_are_as_those_in_one_piece() {
        let mut whole: Vec<u8> = (0..40).collect();
        let mut parts = whole.clone();
        let (one, rest) = parts.split_at_mut(7);
        let (two, three) = rest.split_at_mut(20);
        let all = [IoSlice::new(one), IoSlice::new(&[]), IoSlice::new(two), IoSlice::new(three)];
        for (skipped, length) in (0..=40).flat_map(|from| (0..=40 - from).map(move |l| (from, l))) {
            // SAFETY: the memory outlives the buffer.
            let sources = unsafe { Buffer::sources(&all, skipped, length) };
            assert_eq!(sources.len(), length);
            for from in 0..=length {
                let expected = &whole[skipped + from..skipped + length];
                assert_eq!(sent(&sources, from, length - from), expected);
            }
        }
        let mut all = [IoSliceMut::new(one), IoSliceMut::new(two), IoSliceMut::new(three)];
        // SAFETY: as above.
        let mut targets = unsafe { Buffer::targets(&mut all, 3, 30) };
        for at in 0..30 {
            let part = exclusive(targets.part_mut(at, 30 - at).unwrap());
            assert_eq!(part.len(), [4, 24, 30][[4, 24, 30].partition_point(|e| *e <= at)] - at);
            part[0] += 100;
        }
        assert!(targets.part_mut(30, 0).is_none() && targets.part_mut(29, 2).is_none());
        whole[3..33].iter_mut().for_each(|byte| *byte += 100);
        assert_eq!(parts, whole);
    }
}
