//! Loans: blocks of a memory store that a client on this machine reads in place. They end when the client
//! says that it has read them, or at the latest when its lane ends.
//!
//! A client that maps the memory of an export can see all of it. So only a client that may read all of it
//! anyway may borrow ([`may_borrow`]). A store does not change a lent block: it writes to a copy.

use crate::stats::CoreStatistics;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use towline_mem::{Aggregate, Guard, Lending, Loan, Segment, SharedMemory};
use towline_net::{Counters, Link};
use towline_wire::extents::Extents;
use towline_wire::header::reply_flag;
use towline_wire::limits::{LENT_BYTES_MAX, LENT_BYTES_MIN, LENT_EXTENTS_MAX, SLOTS_MAX};
use towline_wire::{Header, Kind};

/// Shortest read that is lent though the client may not have mapped the memory yet. Before that it pays 3 us of
/// page faults for each 64 KiB, and then saves 0.3 to 2 us for 4 KiB (both measured).
const UNMAPPED_BYTES_MIN: u64 = 32 * 1024;
/// A region of memory. Shorter reads are lent when the client has read as many bytes of their region as it has.
const REGION_BYTES: u64 = 2 << 20;

/// The uid that the kernel reports for a user of another namespace that has no number in this one.
const OVERFLOW_USER: u32 = 65534;

/// Returns true if a local peer with this uid may see all bytes of a memory store.
pub(crate) fn may_borrow(peer: u32, identity: bool, squash_root: bool) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let same = peer == own && own != OVERFLOW_USER;
    match (identity, squash_root) {
        (false, _) => same || peer == 0,
        // Requests run as the peer and therefore have only its rights.
        (true, false) => peer == 0,
        (true, true) => false,
    }
}

/// A memory that a client has read from.
struct Known {
    /// Weak, because a lane must not keep the memory of an export that was removed.
    memory: Weak<SharedMemory>,
    /// The client's number for it, once it was handed over.
    number: Option<u32>,
    /// Bytes of each region that were read.
    read: Vec<u32>,
}

impl Known {
    /// Counts a read. Returns true if the client has most likely mapped where it is, or gains by mapping it.
    fn note_read(&mut self, offset: u64, length: u64) -> bool {
        let region = (offset / REGION_BYTES) as usize;
        if region >= self.read.len() {
            self.read.resize(region + 1, 0);
        }
        let read = &mut self.read[region];
        let is_known = u64::from(*read) >= REGION_BYTES;
        *read = read.saturating_add(u32::try_from(length).unwrap_or(u32::MAX));
        is_known || length >= UNMAPPED_BYTES_MIN
    }
}

/// The loans of one lane. Dropping it ends them.
pub(crate) struct Loans {
    link: Arc<Link>,
    statistics: Arc<CoreStatistics>,
    memories: Vec<Known>,
    /// How many memories were handed over: the next one's number.
    handed_over: u32,
    /// Loans by slot, with the sequence number of the reply.
    lent: Vec<Option<(u32, Loan)>>,
    bytes: u64,
}

impl Loans {
    pub(crate) fn new(link: Arc<Link>, statistics: Arc<CoreStatistics>) -> Self {
        let lent = (0..SLOTS_MAX).map(|_| None).collect();
        Self { link, statistics, memories: Vec::new(), handed_over: 0, lent, bytes: 0 }
    }

    /// Notes that the lane has moved to the core with these statistics.
    pub(crate) fn arrive(&mut self, statistics: Arc<CoreStatistics>) {
        let before = std::mem::replace(&mut self.statistics, statistics);
        // First here: what is on loan is not to be missed by who adds up all cores, nor their sum to be negative.
        self.statistics.bytes_on_loan.fetch_add(self.bytes, Ordering::Relaxed);
        before.bytes_on_loan.fetch_sub(self.bytes, Ordering::Relaxed);
    }

    /// Lends the data of a reply if possible, and then adds its location to the results. False: it has to be
    /// sent.
    pub(crate) fn lend(
        &mut self,
        header: &mut Header,
        results: &mut Vec<u8>,
        data: &Aggregate,
    ) -> bool {
        if data.len() < LENT_BYTES_MIN as u64 || !self.note_read(data) {
            return false;
        }
        let Some(Lendable { memory, guards, mut extents }) = Lendable::of(data) else {
            return false;
        };
        let mut loan = None;
        if let Some(memory) = memory {
            let Some(lending) = memory.lending() else { return false };
            let within = self.bytes + lending.bytes_of(&guards) <= LENT_BYTES_MAX;
            loan = within.then(|| Loan::new(memory, guards)).flatten();
            if loan.is_none() {
                Counters::add(&self.statistics.counters.loans_exhausted, 1);
                return false;
            }
            let Some(number) = self.number(memory, lending) else { return false };
            extents.memory = number;
        }
        if let Some(loan) = loan {
            self.bytes += loan.bytes();
            self.statistics.bytes_on_loan.fetch_add(loan.bytes(), Ordering::Relaxed);
            self.lent[usize::from(header.slot)] = Some((header.sequence, loan));
        }
        self.tell(header, reply_flag::LENT, results, 0, &extents);
        true
    }

    /// Lets the client read in place what writes may change at any time: a memory disk. Nothing is reserved
    /// for it. The results begin at `head` of the message. False: the data has to be sent.
    pub(crate) fn show(
        &mut self,
        header: &mut Header,
        message: &mut Vec<u8>,
        head: usize,
        memory: &Arc<SharedMemory>,
        mut extents: Extents,
    ) -> bool {
        if extents.extents.len() > LENT_EXTENTS_MAX {
            return false;
        }
        // For holes alone the client needs no memory.
        if extents.extents.iter().any(|extent| extent.offset.is_some()) {
            let number = memory.lending().and_then(|lending| self.number(memory, lending));
            let Some(number) = number else { return false };
            extents.memory = number;
        }
        self.tell(header, reply_flag::LENT | reply_flag::LIVE, message, head, &extents);
        true
    }

    /// Adds the location of the data to a reply. The results begin at `head` of the message.
    fn tell(
        &self,
        header: &mut Header,
        flags: u8,
        message: &mut Vec<u8>,
        head: usize,
        extents: &Extents,
    ) {
        header.flags |= flags;
        header.offset = (message.len() - head) as u64;
        extents.encode(message);
        header.body_bytes = (message.len() - head) as u32;
        Counters::add(&self.statistics.counters.bytes_lent, extents.bytes());
        Counters::add(&self.statistics.counters.replies_lent, 1);
    }

    /// Counts a read. Returns true if lending what it read is worth it.
    fn note_read(&mut self, data: &Aggregate) -> bool {
        for slice in data.slices() {
            match &slice.segment {
                Segment::Shared(memory, Some(_)) => {
                    return self.known(memory).note_read(slice.offset, data.len());
                }
                segment if segment.is_hole() => {}
                _ => return false,
            }
        }
        // Holes, for which the client needs no memory.
        true
    }

    fn place(&self, memory: &Arc<SharedMemory>) -> Option<usize> {
        // The address cannot be that of another memory, as the weak reference keeps it from being used again.
        self.memories.iter().position(|known| known.memory.as_ptr() == Arc::as_ptr(memory))
    }

    fn known(&mut self, memory: &Arc<SharedMemory>) -> &mut Known {
        let at = self.place(memory).unwrap_or_else(|| {
            let new = Known { memory: Arc::downgrade(memory), number: None, read: Vec::new() };
            self.memories.push(new);
            self.memories.len() - 1
        });
        &mut self.memories[at]
    }

    /// Returns the client's number for a memory; hands the memory over first if it is new.
    fn number(&mut self, memory: &Arc<SharedMemory>, lending: &Lending) -> Option<u32> {
        if let Some(number) = self.known(memory).number {
            return Some(number);
        }
        let Link::Shm(link) = &*self.link else { return None };
        if let Err(error) = link.hand_over(lending.readable(), memory.len()) {
            log::debug!("cannot share memory with a client: {error}");
            return None;
        }
        let number = self.handed_over;
        self.handed_over += 1;
        Some(*self.known(memory).number.insert(number))
    }

    /// Forgets a memory, which is handed over anew if something is lent from it again. Returns the number
    /// that the client can forget, too.
    pub(crate) fn forget(&mut self, memory: &Arc<SharedMemory>) -> Option<u32> {
        let at = self.place(memory)?;
        self.memories.swap_remove(at).number
    }

    /// Ends the loan of an earlier reply of a slot, because the client says that it has read the data: by a
    /// release, or by reusing the slot.
    pub(crate) fn take_back(&mut self, header: &Header) {
        let Some(lent) = self.lent.get_mut(usize::from(header.slot)) else { return };
        let returned = lent
            .take_if(|(sequence, _)| header.kind != Kind::Release || *sequence == header.sequence);
        if let Some((_, loan)) = returned {
            self.bytes -= loan.bytes();
            self.statistics.bytes_on_loan.fetch_sub(loan.bytes(), Ordering::Relaxed);
        }
    }
}

impl Drop for Loans {
    fn drop(&mut self) {
        if let Link::Shm(link) = &*self.link {
            link.end_loans();
        }
        self.statistics.bytes_on_loan.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The location of data that can be lent.
struct Lendable<'a> {
    /// `None` if all of it is holes.
    memory: Option<&'a Arc<SharedMemory>>,
    /// Guards that keep the data unchanged, one for each block.
    guards: Vec<Guard>,
    extents: Extents,
}

impl<'a> Lendable<'a> {
    /// Returns `None` if the data is not all in one shared memory, or is in too many parts.
    fn of(data: &'a Aggregate) -> Option<Self> {
        let mut this = Self { memory: None, guards: Vec::new(), extents: Extents::default() };
        for slice in data.slices() {
            let length = u32::try_from(slice.length).ok()?;
            match &slice.segment {
                Segment::Shared(memory, Some(guard)) => {
                    if !Arc::ptr_eq(this.memory.get_or_insert(memory), memory) {
                        return None;
                    }
                    // Slices of one block are adjacent.
                    if !this.guards.last().is_some_and(|last| Arc::ptr_eq(last, guard)) {
                        this.guards.push(guard.clone());
                    }
                    this.extents.push(Some(slice.offset), length);
                }
                segment if segment.is_hole() => this.extents.push(None, length),
                _ => return None,
            }
        }
        (this.extents.extents.len() <= LENT_EXTENTS_MAX).then_some(this)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_may_read_all_borrows() {
        let own = rustix::process::geteuid().as_raw();
        assert!(may_borrow(own, false, true) && may_borrow(0, false, true));
        assert!(!may_borrow(own + 1, false, false));
        assert!(may_borrow(0, true, false));
        assert!(!may_borrow(0, true, true), "root is somebody else here");
        assert!(!may_borrow(12345, true, false));
    }
}
