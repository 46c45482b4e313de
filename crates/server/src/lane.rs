//! One connection of a session, as a core keeps it.

use crate::core::Place;
use crate::loans::Loans;
use crate::stats::CoreStatistics;
use std::sync::Arc;
use std::time::Instant;
use towline_block::OwnerKey;
use towline_net::{Input, Link, SendQueue};
use towline_wire::{Header, Hello};

/// Unsent bytes above which a lane's further requests wait.
const UNSENT_BYTES_MAX: u64 = 2 * 1024 * 1024;

/// What it takes to receive from a lane. Taken out meanwhile, so that the messages that come can change the core and the lane.
pub(crate) struct Receiving {
    pub(crate) link: Arc<Link>,
    pub(crate) input: Input,
    pub(crate) statistics: Arc<CoreStatistics>,
}

/// A connection.
pub(crate) struct Lane {
    pub(crate) link: Arc<Link>,
    /// Not there while its messages are handled.
    pub(crate) receiving: Option<Box<Receiving>>,
    pub(crate) out: SendQueue,
    /// Session it belongs to, once greeted.
    pub(crate) session: Option<u64>,
    /// Hello to be answered before anything else is read.
    pub(crate) hello: Option<Hello>,
    /// Grants whose data is still to come.
    pub(crate) granted: usize,
    pub(crate) place: Place,
    /// Data came right behind its last request, so it may with the next.
    pub(crate) ahead: bool,
    /// Bytes that answers will take for which threads wait that may block.
    pub(crate) expected: u64,
    /// What it has on loan, if its client may borrow.
    pub(crate) loans: Option<Loans>,
    /// Owns its reads of disks, once there was one.
    pub(crate) reads: Option<OwnerKey>,
    /// When it last took a byte of its answers, or first asked a disk for some; only of lanes that read disks.
    pub(crate) moved: Instant,
    /// User and group of a local peer.
    pub(crate) peer: Option<(u32, u32)>,
    /// When it connected, or got the oldest grant that it has not used.
    pub(crate) since: Instant,
    /// Input that was not read because too much was unsent, or it was the others' turn.
    pub(crate) paused: bool,
    /// In the list of those that can be read again.
    pub(crate) is_resumable: bool,
    /// The peer sends nothing more, and no event will say so again: what is there is read to its
    /// end.
    pub(crate) hung: bool,
}

impl Lane {
    pub(crate) fn new(
        link: Arc<Link>,
        statistics: Arc<CoreStatistics>,
        peer: Option<(u32, u32)>,
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
            moved: now,
            peer,
            since: now,
            paused: false,
            is_resumable: false,
            hung: false,
        }
    }

    /// What is known of its turn, and whether it is within a message or a transfer.
    pub(crate) fn place(&mut self) -> (&mut Place, bool) {
        let is_partial = self.receiving.as_ref().is_some_and(|r| r.input.is_partial());
        (&mut self.place, is_partial || self.granted > 0)
    }

    /// Goes on over another link; yields the old one.
    pub(crate) fn move_to(&mut self, link: Arc<Link>) -> Arc<Link> {
        if let Some(receiving) = &mut self.receiving {
            receiving.link = link.clone();
        }
        std::mem::replace(&mut self.link, link)
    }

    /// True when further requests have to wait until their answers have room.
    pub(crate) fn is_full(&self) -> bool {
        self.out.bytes() + self.expected > UNSENT_BYTES_MAX
    }

    /// Data is to come.
    pub(crate) fn note_grant(&mut self, now: Instant) {
        if self.granted == 0 {
            self.since = now;
        }
        self.granted += 1;
    }

    /// Queues a message that is only a header.
    pub(crate) fn send_header(&mut self, header: &Header) {
        self.out.push_short([&header.to_bytes(), b""]);
    }
}
