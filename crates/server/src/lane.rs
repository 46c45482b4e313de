//! A core's record of one connection of a session.

use crate::caller::Peer;
use crate::core::Place;
use crate::loans::Loans;
use crate::stats::CoreStatistics;
use std::sync::Arc;
use std::time::Instant;
use towline_block::OwnerKey;
use towline_mem::SharedMemory;
use towline_net::{Input, Link, SendQueue};
use towline_wire::header::notice;
use towline_wire::{Header, Hello, Kind};

/// Above this many unsent bytes, further requests of a lane wait.
const UNSENT_BYTES_MAX: u64 = 2 * 1024 * 1024;

/// Everything needed to receive from a lane. It is taken out of the lane meanwhile, so that messages can
/// change the core and the lane.
pub(crate) struct Receiving {
    pub(crate) link: Arc<Link>,
    pub(crate) input: Input,
    pub(crate) statistics: Arc<CoreStatistics>,
}

/// A connection.
pub(crate) struct Lane {
    pub(crate) link: Arc<Link>,
    /// `None` while messages of the lane are handled.
    pub(crate) receiving: Option<Box<Receiving>>,
    pub(crate) out: SendQueue,
    /// The session of the lane, once greeted.
    pub(crate) session: Option<u64>,
    /// Hello to answer before anything else is read.
    pub(crate) hello: Option<Hello>,
    /// Number of grants whose data is still to come.
    pub(crate) granted: usize,
    pub(crate) place: Place,
    /// Data followed the last request at once, so it may follow the next one too.
    pub(crate) ahead: bool,
    /// Bytes of answers that threads which may block are still preparing.
    pub(crate) expected: u64,
    /// What the client has borrowed, if it may borrow.
    pub(crate) loans: Option<Loans>,
    /// Owner of the lane's reads from disks, since the first one.
    pub(crate) reads: Option<OwnerKey>,
    /// Since when the client has not taken a byte of the answers that wait for it; `None` if none do.
    pub(crate) untaken: Option<Instant>,
    /// The peer, if it can be only itself.
    pub(crate) peer: Option<Peer>,
    /// The processor on which the client last said that it runs.
    pub(crate) told: Option<u32>,
    /// When the lane connected, got the first of its unused grants, or last sent granted data.
    pub(crate) since: Instant,
    /// Bytes of granted data have arrived since the lane was last checked for a stall.
    pub(crate) progressed: bool,
    /// Input was left unread because too much was unsent.
    pub(crate) paused: bool,
    /// The peer sends nothing more, and no event will say so again: the lane is read to its end.
    pub(crate) hung: bool,
    /// The peer takes nothing more either: answers are dropped, and the lane ends once it is read to its end.
    pub(crate) is_gone: bool,
}

impl Lane {
    pub(crate) fn new(
        link: Arc<Link>,
        statistics: Arc<CoreStatistics>,
        peer: Option<Peer>,
    ) -> Self {
        let now = Instant::now();
        let receiving = Receiving { link: link.clone(), input: Input::default(), statistics };
        Self {
            link,
            receiving: Some(Box::new(receiving)),
            out: SendQueue::default(),
            session: None,
            hello: None,
            granted: 0,
            place: Place::default(),
            ahead: false,
            expected: 0,
            loans: None,
            reads: None,
            untaken: None,
            peer,
            told: None,
            since: now,
            progressed: false,
            paused: false,
            hung: false,
            is_gone: false,
        }
    }

    /// Returns the lane's turn, and whether it is in the middle of a message or transfer.
    pub(crate) fn place(&mut self) -> (&mut Place, bool) {
        let is_partial = self.receiving.as_ref().is_some_and(|r| r.input.is_partial());
        (&mut self.place, is_partial || self.granted > 0)
    }

    /// Moves the lane to another link; returns the old one.
    pub(crate) fn move_to(&mut self, link: Arc<Link>) -> Arc<Link> {
        if let Some(receiving) = &mut self.receiving {
            receiving.link = link.clone();
        }
        std::mem::replace(&mut self.link, link)
    }

    /// Returns true if further requests have to wait until there is room for their answers.
    pub(crate) fn is_full(&self) -> bool {
        self.out.bytes() + self.expected > UNSENT_BYTES_MAX
    }

    /// Returns true if a lane over shared memory can be read: something has arrived, or was taken out of the
    /// ring before the lane was paused.
    pub(crate) fn has_input(&self) -> bool {
        match &*self.link {
            Link::Shm(link) => !self.is_full() && (self.paused || link.readable()),
            _ => false,
        }
    }

    /// Returns true if something can be done over shared memory: there is input, or room for unsent answers.
    pub(crate) fn has_news(&self) -> bool {
        let has_room = |link: &Link| matches!(link, Link::Shm(link) if link.writable());
        self.has_input() || !self.out.is_empty() && has_room(&self.link)
    }

    /// Returns true if nothing of the lane is under way, so that it can move to another core.
    pub(crate) fn is_at_rest(&self) -> bool {
        let has_read_all = self.receiving.as_ref().is_some_and(|r| !r.input.is_partial());
        let is_busy = self.granted > 0 || self.expected > 0 || self.paused || self.hung;
        has_read_all && !is_busy && self.out.is_empty() && self.hello.is_none()
    }

    /// Notes that the lane has moved to the core with these statistics.
    pub(crate) fn arrive(&mut self, statistics: Arc<CoreStatistics>) {
        if let Some(receiving) = &mut self.receiving {
            receiving.statistics = statistics.clone();
        }
        if let Some(loans) = &mut self.loans {
            loans.arrive(statistics);
        }
        self.place = Place::default();
    }

    /// Notes that the lane was granted data.
    pub(crate) fn note_grant(&mut self, now: Instant) {
        if self.granted == 0 {
            self.since = now;
        }
        self.granted += 1;
    }

    /// Drops the answers that nobody takes any more.
    pub(crate) fn drop_untaken(&mut self) {
        if self.is_gone && !self.out.is_empty() {
            self.out = SendQueue::default();
        }
    }

    /// Queues a message that consists of a header only.
    pub(crate) fn send_header(&mut self, header: &Header) {
        self.out.push_short([&header.to_bytes(), b""]);
    }

    /// Tells the client that nothing is lent from a memory any more, if it has that.
    pub(crate) fn forget(&mut self, memory: &Arc<SharedMemory>) {
        if let Some(number) = self.loans.as_mut().and_then(|loans| loans.forget(memory)) {
            let mut header = Header::new(Kind::Notice, 0, 0);
            header.flags = notice::FORGOTTEN;
            header.offset = number.into();
            self.send_header(&header);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline_mem::SharedMemory;
    use towline_net::{Doorbell, SHM_BYTES, ShmLink, ShmSide};

    /// Nothing else would ever read what such a lane has already taken out of its ring.
    #[test]
    fn a_paused_lane_has_input_though_its_ring_is_empty() {
        let memory = Arc::new(SharedMemory::create("test", SHM_BYTES).unwrap());
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let bell = Doorbell::between(far.into());
        let link = ShmLink::new(memory, ShmSide::Server, bell, near.into()).unwrap();
        let mut lane =
            Lane::new(Arc::new(Link::Shm(Box::new(link))), Arc::new(CoreStatistics::new()), None);
        assert!(!lane.has_input() && !lane.has_news());
        lane.paused = true;
        assert!(lane.has_input() && lane.has_news());
        lane.expected = UNSENT_BYTES_MAX + 1;
        assert!(!lane.has_input() && !lane.has_news());
        lane.send_header(&Header::new(towline_wire::Kind::Reply, 0, 0));
        assert!(!lane.has_input() && lane.has_news());
    }
}
