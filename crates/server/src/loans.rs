//! What a client on this machine reads in place: blocks of a memory store, lent until it says that
//! it has read them, at the latest until its lane ends.
//!
//! A client that maps the memory of an export sees all of it, so only one that may read all of it
//! anyway borrows ([`may_borrow`]). A store changes no block that is lent: it writes a copy.

use crate::stats::CoreStatistics;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use towline_mem::{Aggregate, Guard, Lending, Loan, Segment, SharedMemory};
use towline_net::{Counters, Link};
use towline_wire::extents::Extents;
use towline_wire::header::reply_flag;
use towline_wire::limits::{LENT_BYTES_MAX, LENT_BYTES_MIN, LENT_EXTENTS_MAX, SLOTS_MAX};
use towline_wire::{Header, Kind};

/// The user that the kernel names where a user of another namespace has no number in ours.
const OVERFLOW_USER: u32 = 65534;

/// True when a local peer with this user number may see all bytes of a memory store.
pub(crate) fn may_borrow(peer: u32, identity: bool, squash_root: bool) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let same = peer == own && own != OVERFLOW_USER;
    match (identity, squash_root) {
        (false, _) => same || peer == 0,
        // Requests run as the peer, which then has its rights only.
        (true, false) => peer == 0,
        (true, true) => false,
    }
}

/// What one lane has on loan. Dropping it ends its loans.
pub(crate) struct Loans {
    link: Arc<Link>,
    statistics: Arc<CoreStatistics>,
    /// Memories handed over; the client knows them by their places here.
    memories: Vec<Arc<SharedMemory>>,
    /// By slot, with the sequence number of the reply.
    lent: Vec<Option<(u32, Loan)>>,
    bytes: u64,
}

impl Loans {
    pub(crate) fn new(link: Arc<Link>, statistics: Arc<CoreStatistics>) -> Self {
        let lent = (0..SLOTS_MAX).map(|_| None).collect();
        Self { link, statistics, memories: Vec::new(), lent, bytes: 0 }
    }

    /// Lends the data of a reply if it can, and then adds to the results where it stands. False:
    /// it has to be sent.
    pub(crate) fn lend(
        &mut self,
        header: &mut Header,
        results: &mut Vec<u8>,
        data: &Aggregate,
    ) -> bool {
        if data.len() < LENT_BYTES_MIN as u64 {
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

    /// Lets the client read in place what writes may change at any time: a disk in memory. Nothing
    /// is kept for it. The results begin at `head` of the message. False: it has to be sent.
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
        // For holes alone the client takes over no memory.
        if extents.extents.iter().any(|extent| extent.offset.is_some()) {
            let number = memory.lending().and_then(|lending| self.number(memory, lending));
            let Some(number) = number else { return false };
            extents.memory = number;
        }
        self.tell(header, reply_flag::LENT | reply_flag::LIVE, message, head, &extents);
        true
    }

    /// Adds to a reply where its data stands. Its results begin at `head` of the message.
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

    /// The number by which the client knows a memory; hands it over when it is new.
    fn number(&mut self, memory: &Arc<SharedMemory>, lending: &Lending) -> Option<u32> {
        if let Some(at) = self.memories.iter().position(|known| Arc::ptr_eq(known, memory)) {
            return Some(at as u32);
        }
        let Link::Shm(link) = &*self.link else { return None };
        if let Err(error) = link.hand_over(lending.readable(), memory.len()) {
            log::debug!("cannot hand memory over to a client: {error}");
            return None;
        }
        self.memories.push(memory.clone());
        Some(self.memories.len() as u32 - 1)
    }

    /// Takes back what an earlier reply of a slot lent, because the client says that it has read
    /// it: by a release, or by using the slot again.
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

/// Where data stands.
struct Lendable<'a> {
    /// None when all of it are holes.
    memory: Option<&'a Arc<SharedMemory>>,
    /// What keeps it as it is, one for each block.
    guards: Vec<Guard>,
    extents: Extents,
}

impl<'a> Lendable<'a> {
    /// `None` when not all of the data is in one shared memory, or it is in too many parts.
    fn of(data: &'a Aggregate) -> Option<Self> {
        let mut this = Self { memory: None, guards: Vec::new(), extents: Extents::default() };
        for slice in data.slices() {
            let length = u32::try_from(slice.length).ok()?;
            match &slice.segment {
                Segment::Shared(memory, Some(guard)) => {
                    if !Arc::ptr_eq(this.memory.get_or_insert(memory), memory) {
                        return None;
                    }
                    // Slices of one block follow each other.
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
