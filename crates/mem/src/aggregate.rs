//! Ordered lists of slices of segments, combined without copying.

use crate::Segment;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Part of a segment.
#[derive(Clone, Debug)]
pub struct Slice {
    /// What it is a part of.
    pub segment: Segment,
    /// First byte within the segment.
    pub offset: u64,
    /// Bytes; never zero inside an aggregate.
    pub length: u64,
}

/// An ordered list of slices of segments; the unit that transfers move.
///
/// No method copies payload except [`Aggregate::copy_to`], which says so.
#[derive(Clone, Debug, Default)]
pub struct Aggregate {
    slices: VecDeque<Slice>,
    length: u64,
}

impl Aggregate {
    /// An empty aggregate.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// All of an ordinary buffer.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let length = bytes.len() as u64;
        let mut aggregate = Self::new();
        aggregate.append(Segment::Host(Arc::new(bytes)), 0, length);
        aggregate
    }

    /// Bytes in all slices.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.length
    }

    /// True when there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The slices, in order.
    pub fn slices(&self) -> impl ExactSizeIterator<Item = &Slice> {
        self.slices.iter()
    }

    /// Adds part of a segment at the end; neighbours of the same segment become one slice.
    pub fn append(&mut self, segment: Segment, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        self.length += length;
        if let Some(last) = self.slices.back_mut()
            && last.segment.same(&segment)
            && last.offset + last.length == offset
        {
            last.length += length;
            return;
        }
        self.slices.push_back(Slice { segment, offset, length });
    }

    /// Adds part of a segment at the front: how a header goes before its data.
    pub fn prepend(&mut self, segment: Segment, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        self.length += length;
        self.slices.push_front(Slice { segment, offset, length });
    }

    /// Adds all slices of `other` at the end.
    pub fn concatenate(&mut self, other: Self) {
        for slice in other.slices {
            self.append(slice.segment, slice.offset, slice.length);
        }
    }

    /// Takes the first `count` bytes off and returns them; all of them if there are fewer.
    #[must_use]
    pub fn split_to(&mut self, count: u64) -> Self {
        let mut head = Self::new();
        while head.length < count {
            let missing = count - head.length;
            let Some(first) = self.slices.front_mut() else { break };
            if first.length <= missing {
                let slice = self.slices.pop_front().expect("front was just seen");
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

    /// Drops the first `count` bytes; all of them if there are fewer.
    pub fn advance(&mut self, count: u64) {
        drop(self.split_to(count));
    }

    /// Copies the bytes into `target`, which is filled from its start; returns how many.
    ///
    /// # Errors
    /// Reading a file segment failed, or the file ends before the slice does (`UnexpectedEof`).
    pub fn copy_to(&self, target: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        for slice in &self.slices {
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
                Segment::File(file) => read_exact_at(file, part, slice.offset)?,
            }
            done += wanted;
        }
        Ok(done)
    }

    /// All bytes, copied into one buffer.
    ///
    /// # Errors
    /// As [`Aggregate::copy_to`].
    pub fn to_vec(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.length).expect("aggregates fit into memory")];
        self.copy_to(&mut bytes)?;
        Ok(bytes)
    }
}

fn read_exact_at(file: impl AsFd, mut target: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !target.is_empty() {
        match rustix::io::pread(&file, &mut *target, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                target = &mut target[count..];
                offset += count as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
