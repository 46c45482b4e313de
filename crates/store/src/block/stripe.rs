//! A disk striped over several others (RAID 0): a large request is spread over all members, which
//! work in parallel.

use super::continuity;
use crate::block_store::{
    BlockStore, Continuity, Direction, Extent, Geometry, Layout, Now, Place, ZeroHow,
};
use std::cmp::Ordering;
use std::io;
use std::sync::Arc;
use towline_mem::Aggregate;

/// Stripes over disks of equal role.
#[derive(Debug)]
pub struct StripeDisk {
    members: Vec<Arc<dyn BlockStore>>,
    /// Bytes on one member before the next member's turn.
    chunk: u64,
    /// The size in it is not used.
    geometry: Geometry,
}

/// A range on one member.
struct Part {
    member: usize,
    offset: u64,
    length: u64,
}

/// The last extent that a member has told.
#[derive(Clone, Copy)]
struct Found {
    extent: Extent,
    /// Where it ends on the member.
    end: u64,
}

impl StripeDisk {
    /// Creates a disk of stripes with `chunk` bytes per member. Of longer members, only the length
    /// of the shortest is used, in whole chunks.
    ///
    /// # Errors
    /// `InvalidInput`, with a message: there are no members, a member is shorter than a chunk, all
    /// together are longer than a disk can be, or the chunk is no multiple of their blocks.
    pub fn new(members: Vec<Arc<dyn BlockStore>>, chunk: u64) -> io::Result<Arc<Self>> {
        let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
        let each: Vec<Geometry> = members.iter().map(|member| member.geometry()).collect();
        let shortest = each.iter().map(|g| g.size).min();
        let shortest = shortest.ok_or_else(|| wrong("a stripe without members".into()))?;
        let chunks = shortest.checked_div(chunk).unwrap_or(0);
        if chunks == 0 {
            let what = format!("a member of {shortest} bytes is smaller than a chunk of {chunk}");
            return Err(wrong(what));
        }
        let size = (chunks * chunk).checked_mul(members.len() as u64);
        if size.is_none_or(|size| i64::try_from(size).is_err()) {
            return Err(wrong("all members are longer than a disk can be".into()));
        }
        let minimum = each.iter().map(|g| g.block_minimum).max().unwrap_or(1);
        if !chunk.is_multiple_of(minimum.into()) {
            let what = format!("a chunk of {chunk} bytes is not a multiple of blocks of {minimum}");
            return Err(wrong(what));
        }
        let geometry = Geometry {
            size: 0,
            block_minimum: minimum,
            block_preferred: each.iter().map(|g| g.block_preferred).max().unwrap_or(4096),
            rotational: each.iter().any(|g| g.rotational),
            read_only: each.iter().any(|g| g.read_only),
        };
        Ok(Arc::new(Self { members, chunk, geometry }))
    }

    /// Returns the first part of a range, up to the end of its chunk.
    fn part(&self, offset: u64, length: u64) -> Part {
        let (chunk, within) = (offset / self.chunk, offset % self.chunk);
        let count = self.members.len() as u64;
        Part {
            member: (chunk % count) as usize,
            offset: chunk / count * self.chunk + within,
            length: length.min(self.chunk - within),
        }
    }

    /// Calls `work` for each part of a range, with the offset of the part within the range.
    fn each(
        &self,
        offset: u64,
        length: u64,
        mut work: impl FnMut(&dyn BlockStore, Part, usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let part = self.part(offset + done, length - done);
            let count = part.length;
            work(&*self.members[part.member], part, done as usize)?;
            done += count;
        }
        Ok(())
    }

    /// Returns how much of one member lies before `offset`.
    fn before(&self, offset: u64, member: usize) -> u64 {
        let (chunk, within) = (offset / self.chunk, offset % self.chunk);
        let count = self.members.len() as u64;
        let more = match (member as u64).cmp(&(chunk % count)) {
            Ordering::Less => self.chunk,
            Ordering::Equal => within,
            Ordering::Greater => 0,
        };
        chunk / count * self.chunk + more
    }

    /// Calls `work` once for each member that a range touches: the chunks of the range that lie on
    /// one member follow each other there.
    fn each_member(
        &self,
        offset: u64,
        length: u64,
        mut work: impl FnMut(&dyn BlockStore, u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        for (number, member) in self.members.iter().enumerate() {
            let start = self.before(offset, number);
            let length = self.before(offset + length, number) - start;
            if length > 0 {
                work(&**member, start, length)?;
            }
        }
        Ok(())
    }

    /// Tells the extents of a part, and keeps the last one in `found`, which may go on beyond the
    /// part: the member is asked for everything up to `end`. Returns false once `tell` does, or if
    /// the member has become too short for the part.
    fn extents_of_part(
        &self,
        part: &Part,
        end: u64,
        found: &mut Option<Found>,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<bool> {
        let (mut at, part_end) = (part.offset, part.offset + part.length);
        let mut goes_on = true;
        if let Some(known) = found.filter(|known| known.end > at) {
            let length = known.end.min(part_end) - at;
            at += length;
            goes_on = tell(Extent { length, ..known.extent });
        }
        if goes_on && at < part_end {
            self.members[part.member].extents(at, end - at, &mut |extent| {
                let length = extent.length.min(part_end - at);
                at += extent.length;
                *found = Some(Found { extent, end: at });
                goes_on = tell(Extent { length, ..extent });
                goes_on && at < part_end
            })?;
        }
        // A member that becomes shorter meanwhile reports less: later extents would be at the wrong
        // place.
        Ok(goes_on && at >= part_end)
    }

    /// Returns the whole stripes from `offset` on that are of one kind on all members, as far as
    /// their last extents tell.
    fn alike(&self, offset: u64, found: &[Option<Found>]) -> Option<Extent> {
        let stripe = self.chunk * self.members.len() as u64;
        if !offset.is_multiple_of(stripe) {
            return None;
        }
        let Found { extent, mut end } = found[0]?;
        for other in &found[1..] {
            let other = (*other)?;
            if (other.extent.hole, other.extent.zero) != (extent.hole, extent.zero) {
                return None;
            }
            end = end.min(other.end);
        }
        let stripes = (end / self.chunk).saturating_sub(offset / stripe);
        (stripes > 0).then_some(Extent { length: stripes * stripe, ..extent })
    }

    /// Turns the outcome of several calls wrapped by [`now`] back into a [`Now`].
    fn all_now(&self, outcome: io::Result<()>) -> Now {
        match outcome {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Now::WouldBlock,
            other => Now::Done(other),
        }
    }
}

/// Turns [`Now::WouldBlock`] into an error of that kind, so that `?` works.
fn now(outcome: Now) -> io::Result<()> {
    match outcome {
        Now::Done(result) => result,
        Now::WouldBlock => Err(io::ErrorKind::WouldBlock.into()),
    }
}

impl BlockStore for StripeDisk {
    fn geometry(&self) -> Geometry {
        let sizes = self.members.iter().map(|member| member.geometry().size);
        let chunks = sizes.min().unwrap_or(0) / self.chunk;
        let size = (chunks * self.chunk).saturating_mul(self.members.len() as u64);
        Geometry { size, ..self.geometry }
    }

    fn refresh(&self) -> io::Result<u64> {
        for member in &self.members {
            member.refresh()?;
        }
        Ok(self.geometry().size)
    }

    fn resizes(&self) -> bool {
        self.members.iter().all(|member| member.resizes())
    }

    fn writes_extend(&self) -> bool {
        self.members.iter().any(|member| member.writes_extend())
    }

    fn resize(&self, size: u64) -> io::Result<()> {
        if !self.resizes() {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        // Whole stripes: one chunk on each member.
        let count = self.members.len() as u64;
        if size == 0 || !size.is_multiple_of(self.chunk.saturating_mul(count)) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let (before, each) = (self.refresh()? / count, size / count);
        for member in &self.members {
            // A member may be longer than its used part: make sure that old data there does not
            // become visible.
            if each > before && member.geometry().size > before {
                member.resize(before)?;
            }
        }
        let outcome: io::Result<()> = self.members.iter().try_for_each(|m| m.resize(each));
        if outcome.is_err() && each > before {
            // Back to the old length, so that the disk does not report a size that it does not
            // have, and to free the space.
            for member in &self.members {
                let _ = member.resize(before);
            }
        }
        outcome
    }

    fn layout(&self) -> Option<Layout> {
        Some(Layout { chunk: self.chunk, members: self.members.len() as u32, shift: 0 })
    }

    fn continuity(&self) -> Option<Continuity> {
        let members: Vec<_> = self.members.iter().map(|member| member.continuity()).collect();
        continuity::of_members(&members, self.chunk)
    }

    fn read_now(&self, offset: u64, target: &mut [u8]) -> Now {
        let length = target.len() as u64;
        self.all_now(self.each(offset, length, |member, part, at| {
            now(member.read_now(part.offset, &mut target[at..at + part.length as usize]))
        }))
    }

    fn hole_now(&self, offset: u64, length: u64) -> u64 {
        let mut done = 0;
        while done < length {
            let part = self.part(offset + done, length - done);
            let hole = self.members[part.member].hole_now(part.offset, part.length);
            done += hole;
            if hole < part.length {
                break;
            }
        }
        done
    }

    fn lend(&self, offset: u64, length: u64) -> Option<Aggregate> {
        let part = self.part(offset, length);
        self.members[part.member].lend(part.offset, part.length)
    }

    fn write_now(&self, offset: u64, data: &[u8], durable: bool) -> Now {
        let length = data.len() as u64;
        self.all_now(self.each(offset, length, |member, part, at| {
            now(member.write_now(part.offset, &data[at..at + part.length as usize], durable))
        }))
    }

    fn locate(&self, offset: u64, length: u64, direction: Direction) -> Option<Place> {
        let part = self.part(offset, length);
        self.members[part.member].locate(part.offset, part.length, direction)
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let length = target.len() as u64;
        self.each(offset, length, |member, part, at| {
            member.read(part.offset, &mut target[at..at + part.length as usize])
        })
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        self.each(offset, data.len() as u64, |member, part, at| {
            member.write(part.offset, &data[at..at + part.length as usize], durable)
        })
    }

    fn flush(&self) -> io::Result<()> {
        // Flush all members, even after an error: a later flush would not report it again.
        let outcomes: Vec<_> = self.members.iter().map(|member| member.flush()).collect();
        outcomes.into_iter().collect()
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        self.each_member(offset, length, |member, at, length| member.zero(at, length, how))
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.each_member(offset, length, |member, at, length| member.trim(at, length))
    }

    fn cache(&self, offset: u64, length: u64) -> io::Result<()> {
        self.each_member(offset, length, |member, at, length| member.cache(at, length))
    }

    fn populate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.each_member(offset, length, |member, at, length| member.populate(at, length))
    }

    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        // Nothing lies beyond the end of a member that became shorter, nor in the same stripe of
        // the other members.
        let end = (offset + length).min(self.refresh()?);
        if length > 0 && offset >= end {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let ends: Vec<_> = (0..self.members.len()).map(|member| self.before(end, member)).collect();
        let mut found = vec![None; self.members.len()];
        let mut at = offset;
        while at < end {
            if let Some(stripes) = self.alike(at, &found) {
                if !tell(stripes) {
                    break;
                }
                at += stripes.length;
                continue;
            }
            let part = self.part(at, end - at);
            let member = part.member;
            if !self.extents_of_part(&part, ends[member], &mut found[member], tell)? {
                break;
            }
            at += part.length;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
