//! Ordered lists of slices of segments, combined without copying.

use crate::Segment;
use std::collections::{VecDeque, vec_deque};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Part of a segment.
#[derive(Clone, Debug)]
pub struct Slice {
    /// The segment that it is part of.
    pub segment: Segment,
    /// First byte within the segment.
    pub offset: u64,
    /// Length in bytes; never zero inside an aggregate.
    pub length: u64,
}

/// An ordered list of slices of segments; the unit that transfers move.
///
/// No method copies payload except [`Aggregate::copy_to`] and those that return a `Vec`, which say so.
#[derive(Clone, Debug, Default)]
pub struct Aggregate {
    /// Kept here so that an aggregate of one slice needs no allocation. If it is `None`, `others` is
    /// empty too.
    first: Option<Slice>,
    others: VecDeque<Slice>,
    length: u64,
}

/// The slices of an [`Aggregate`], in order.
#[derive(Clone, Debug)]
pub struct Slices<'a> {
    first: Option<&'a Slice>,
    others: vec_deque::Iter<'a, Slice>,
}

impl<'a> Iterator for Slices<'a> {
    type Item = &'a Slice;

    fn next(&mut self) -> Option<&'a Slice> {
        self.first.take().or_else(|| self.others.next())
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let count = usize::from(self.first.is_some()) + self.others.len();
        (count, Some(count))
    }
}

impl ExactSizeIterator for Slices<'_> {}

impl Aggregate {
    /// Returns an empty aggregate.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an aggregate of all bytes of an ordinary buffer.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self::from_shared(Arc::new(bytes))
    }

    /// Returns an aggregate of all bytes of a buffer that others may share.
    #[must_use]
    pub fn from_shared(bytes: Arc<Vec<u8>>) -> Self {
        let length = bytes.len() as u64;
        let mut aggregate = Self::new();
        aggregate.append(Segment::Host(bytes), 0, length);
        aggregate
    }

    /// Returns the number of bytes in all slices.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.length
    }

    /// True when there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the slices, in order.
    #[must_use]
    pub fn slices(&self) -> Slices<'_> {
        Slices { first: self.first.as_ref(), others: self.others.iter() }
    }

    /// Adds part of a segment at the end. Adjacent ranges of the same segment become one slice.
    pub fn append(&mut self, segment: Segment, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        self.length += length;
        if let Some(last) = self.others.back_mut().or(self.first.as_mut())
            && last.segment.same(&segment)
            && last.offset + last.length == offset
        {
            last.length += length;
            return;
        }
        let slice = Slice { segment, offset, length };
        match self.first {
            None => self.first = Some(slice),
            Some(_) => self.others.push_back(slice),
        }
    }

    /// Adds part of a segment at the front, for example a header before its data.
    pub fn prepend(&mut self, segment: Segment, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        self.length += length;
        if let Some(second) = self.first.replace(Slice { segment, offset, length }) {
            self.others.push_front(second);
        }
    }

    /// Adds all slices of `other` at the end.
    pub fn concatenate(&mut self, other: Self) {
        for slice in other.first.into_iter().chain(other.others) {
            self.append(slice.segment, slice.offset, slice.length);
        }
    }

    /// Removes the first `count` bytes, or all if there are fewer, and returns them.
    #[must_use]
    pub fn split_to(&mut self, count: u64) -> Self {
        let mut head = Self::new();
        while head.length < count {
            let missing = count - head.length;
            let Some(first) = self.first.as_mut() else { break };
            if first.length <= missing {
                let next = self.others.pop_front();
                let slice = std::mem::replace(&mut self.first, next).expect("it was just seen");
                self.length -= slice.length;
                head.append(slice.segment, slice.offset, slice.length);
            } else {
                head.append(first.segment.clone(), first.offset, missing);
                first.offset += missing;
                first.length -= missing;
                self.length -= missing;
            }
        }
        head
    }

    /// Drops the first `count` bytes, or all if there are fewer.
    pub fn advance(&mut self, count: u64) {
        drop(self.split_to(count));
    }

    /// Drops the aggregate, but keeps short buffers that nothing else refers to for [`Fresh`](crate::Fresh).
    pub fn let_go(self) {
        for slice in self.first.into_iter().chain(self.others) {
            if let Segment::Host(buffer) = slice.segment {
                crate::spare::keep(buffer);
            }
        }
    }

    /// Copies the bytes to `target`, from its start, and returns how many were copied.
    ///
    /// # Errors
    /// Reading a file segment failed, or the file ends before the slice does (`UnexpectedEof`).
    pub fn copy_to(&self, target: &mut [u8]) -> io::Result<usize> {
        let wanted = usize::try_from(self.length).unwrap_or(usize::MAX).min(target.len());
        let done = self.copy_until_end(target)?;
        if done < wanted {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(done)
    }

    /// The same, but stops where a file ends before its slice does.
    fn copy_until_end(&self, target: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        for slice in self.slices() {
            if done == target.len() {
                break;
            }
            let wanted =
                usize::try_from(slice.length).unwrap_or(usize::MAX).min(target.len() - done);
            let part = &mut target[done..done + wanted];
            let from = slice.offset as usize;
            match &slice.segment {
                Segment::Host(bytes) => part.copy_from_slice(&bytes[from..from + wanted]),
                Segment::Registered(buffer) => {
                    part.copy_from_slice(&buffer.bytes()[from..from + wanted]);
                }
                Segment::Shared(memory, _) => memory.copy_out(from, part),
                Segment::File(file) => {
                    let count = read_until_end(file, part, slice.offset)?;
                    if count < wanted {
                        return Ok(done + count);
                    }
                }
            }
            done += wanted;
        }
        Ok(done)
    }

    /// Copies all bytes into one buffer.
    ///
    /// # Errors
    /// As [`Aggregate::copy_to`].
    pub fn to_vec(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.length).expect("aggregates fit into memory")];
        self.copy_to(&mut bytes)?;
        Ok(bytes)
    }

    /// Copies all bytes into one buffer, up to where a file ends that has become shorter.
    ///
    /// # Errors
    /// Reading a file segment failed.
    pub fn to_vec_until_end(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.length).expect("aggregates fit into memory")];
        let count = self.copy_until_end(&mut bytes)?;
        bytes.truncate(count);
        Ok(bytes)
    }
}

/// Returns how many bytes there were.
fn read_until_end(file: impl AsFd, target: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < target.len() {
        match rustix::io::pread(&file, &mut target[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pool, SharedMemory};
    use proptest::prelude::*;

    const BYTES: u64 = 64;

    /// Segments of every kind, with the bytes that they hold.
    fn segments() -> Vec<(Segment, Vec<u8>)> {
        let byte = |kind: u8, at: u8| at.wrapping_mul(5).wrapping_add(kind);
        let bytes = |kind| (0..BYTES as u8).map(|at| byte(kind, at)).collect::<Vec<u8>>();
        let mut buffer = Pool::new(BYTES as usize, 1).take().unwrap();
        buffer.bytes_mut().copy_from_slice(&bytes(1));
        let shared = |kind| {
            let memory = SharedMemory::create("test", BYTES as usize).unwrap();
            memory.copy_in(0, &bytes(kind));
            Arc::new(memory)
        };
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(rustix::io::write(&file, &bytes(4)), Ok(BYTES as usize));
        let segments = [
            Segment::Host(Arc::new(bytes(0))),
            Segment::Registered(Arc::new(buffer)),
            Segment::Shared(shared(2), None),
            Segment::Shared(shared(3), Some(Arc::new(()))),
            Segment::File(Arc::new(file)),
        ];
        segments.into_iter().zip((0..).map(bytes)).collect()
    }

    /// Which of the segments, from where, and how long.
    type Part = (usize, u64, u64);

    #[derive(Clone, Debug)]
    enum Step {
        Append(Part),
        Prepend(Part),
        Concatenate(Vec<Part>),
        SplitTo(u64),
        Advance(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        // Of eighths, so that many parts follow each other.
        let part = (0usize..5, 0..8u64, 0..8u64).prop_map(|(which, from, length)| {
            let eighth = BYTES / 8;
            (which, from * eighth, length.min(8 - from) * eighth)
        });
        prop_oneof![
            part.clone().prop_map(Step::Append),
            part.clone().prop_map(Step::Prepend),
            proptest::collection::vec(part, 0..4).prop_map(Step::Concatenate),
            (0u64..80).prop_map(Step::SplitTo),
            (0u64..20).prop_map(Step::Advance),
        ]
    }

    proptest! {
        #[test]
        fn an_aggregate_behaves_like_its_bytes(
            steps in proptest::collection::vec(step(), 0..40),
            most in 0usize..500,
        ) {
            let segments = segments();
            let bytes_of = |(which, from, length): Part| {
                &segments[which].1[from as usize..(from + length) as usize]
            };
            let append = |aggregate: &mut Aggregate, (which, from, length): Part| {
                aggregate.append(segments[which].0.clone(), from, length);
            };
            let (mut aggregate, mut bytes) = (Aggregate::new(), Vec::new());
            for step in steps {
                match step {
                    Step::Append(part) => {
                        bytes.extend_from_slice(bytes_of(part));
                        append(&mut aggregate, part);
                    }
                    Step::Prepend(part) => {
                        let (which, from, length) = part;
                        bytes.splice(0..0, bytes_of(part).iter().copied());
                        aggregate.prepend(segments[which].0.clone(), from, length);
                    }
                    Step::Concatenate(parts) => {
                        let mut other = Aggregate::new();
                        for part in parts {
                            bytes.extend_from_slice(bytes_of(part));
                            append(&mut other, part);
                        }
                        aggregate.concatenate(other);
                    }
                    Step::SplitTo(count) => {
                        let head = aggregate.split_to(count);
                        let at = (count as usize).min(bytes.len());
                        let rest = bytes.split_off(at);
                        prop_assert_eq!(head.to_vec().unwrap(), bytes);
                        bytes = rest;
                    }
                    Step::Advance(count) => {
                        aggregate.advance(count);
                        bytes.drain(..(count as usize).min(bytes.len()));
                    }
                }
                prop_assert_eq!(aggregate.len(), bytes.len() as u64);
                prop_assert_eq!(aggregate.to_vec().unwrap(), bytes.clone());
                prop_assert!(aggregate.slices().all(|slice| slice.length > 0));
                let mut front = vec![0; most];
                let copied = aggregate.copy_to(&mut front).unwrap();
                prop_assert_eq!(&front[..copied], &bytes[..most.min(bytes.len())]);
            }
        }
    }

    #[test]
    fn what_follows_in_the_same_segment_becomes_one_slice_unless_it_is_guarded() {
        for (segment, bytes) in segments() {
            let mut aggregate = Aggregate::new();
            let mut then = |from, length| {
                aggregate.append(segment.clone(), from, length);
                aggregate.slices().len()
            };
            let is_guarded = matches!(segment, Segment::Shared(_, Some(_)));
            let expected = if is_guarded { [1, 2, 3, 4] } else { [1, 1, 2, 3] };
            let slices = [then(0, 10), then(10, 5), then(20, 5), then(24, 5)];
            assert_eq!(slices, expected, "{segment:?}");
            let all = [&bytes[..15], &bytes[20..25], &bytes[24..29]].concat();
            assert_eq!(aggregate.to_vec().unwrap(), all, "{segment:?}");
        }
    }

    #[test]
    fn a_file_that_has_become_shorter_ends_what_is_copied() {
        let (Segment::File(file), bytes) = segments().pop().unwrap() else { panic!("no file") };
        let mut aggregate = Aggregate::from_vec(vec![7; 3]);
        aggregate.append(Segment::File(file), 60, 8);
        aggregate.append(Segment::Host(Arc::new(vec![8; 3])), 0, 3);
        let error = aggregate.to_vec().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let until_end = aggregate.to_vec_until_end().unwrap();
        assert_eq!(until_end, [&[7; 3], &bytes[60..]].concat());
        // What is wanted of it is there.
        assert_eq!(aggregate.copy_to(&mut [0; 7]).unwrap(), 7);
    }

    #[test]
    fn pools_are_bounded_and_take_buffers_back() {
        let pool = Pool::new(16, 2);
        let (first, second) = (pool.take().unwrap(), pool.take().unwrap());
        assert!(pool.take().is_none());
        drop(first);
        assert!(pool.take().is_some());
        drop(second);
        assert_eq!(pool.in_use(), (0, 2));
        let beside = pool.beside(100, 1);
        let large = beside.take().unwrap();
        assert_eq!(pool.bytes_in_use(), (100, 100));
        let small = pool.take().unwrap();
        assert_eq!(beside.bytes_in_use(), (116, 116));
        drop((large, small));
        assert_eq!(pool.bytes_in_use(), (0, 116));
    }
}
