//! Messages to be sent, and for how long their data stays valid.

use super::Slot;
use super::sending::coarse_ms;
use crate::lent::{Pieces, shared};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::task::Waker;
use towline_net::Link;
use towline_wire::header::data_flag;
use towline_wire::limits::HEADER_BYTES;
use towline_wire::{Header, Kind};

/// Milliseconds without sending after which the next message is preceded by a check of the link.
const QUIET_MS: u64 = 20;

/// Messages of one request, sent together.
pub(super) struct Messages {
    /// The number of the lane they were made for. If another thread replaces the lane before they
    /// are sent, they are dropped: the request was resent, or it is over and its buffers are gone.
    pub(super) lane: u64,
    /// Releases of loans to slots that are now free.
    pub(super) before: Vec<Out>,
    pub(super) message: Out,
    /// The first fragment of its data, sent without a grant.
    pub(super) after: Option<Out>,
}

impl Messages {
    pub(super) fn of(message: Out, lane: u64) -> Self {
        Self { lane, before: Vec::new(), message, after: None }
    }

    pub(super) fn is_one(&self) -> bool {
        self.before.is_empty() && self.after.is_none()
    }
}

/// A message to be sent.
pub(super) struct Out {
    head: Head,
    /// A part of the source of this slot, which follows the head. The slot's `sending` counts it,
    /// so it stays valid until `Core::part_sent`, as long as the message's lane is the current one.
    pub(super) data: Option<(u16, Pieces)>,
    /// Bytes already sent.
    pub(super) done: usize,
}

enum Head {
    /// The message of a request, shared with its slot.
    Kept(Arc<Vec<u8>>),
    /// Any other message: only a header.
    Bare([u8; HEADER_BYTES]),
}

impl Out {
    /// True if this is the message of the slot's request and no byte of it has been sent.
    pub(super) fn is_unsent(&self, slot: &Slot) -> bool {
        self.done == 0
            && matches!(&self.head, Head::Kept(message) if Arc::ptr_eq(message, &slot.message))
    }

    pub(super) fn header(header: &Header) -> Self {
        Self { head: Head::Bare(header.to_bytes()), data: None, done: 0 }
    }

    pub(super) fn is_sent(&self) -> bool {
        self.rest().iter().all(|part| part.is_empty())
    }

    /// What remains to be sent, in order.
    pub(super) fn rest(&self) -> SmallVec<[&[u8]; 2]> {
        let head: &[u8] = match &self.head {
            Head::Kept(message) => message,
            Head::Bare(header) => header,
        };
        let data = self.data.iter().flat_map(|(_, pieces)| pieces);
        let mut done = self.done;
        std::iter::once(head)
            .chain(data.map(|piece| shared(*piece)))
            .map(|part| {
                let (_, rest) = part.split_at(done.min(part.len()));
                done -= part.len() - rest.len();
                rest
            })
            .collect()
    }
}

impl Slot {
    /// Returns the message of this slot, which has this number, for sending.
    pub(super) fn out(&mut self, number: u16) -> Out {
        let data = self.rides.then(|| (number, self.source.pieces(0, self.source.len())));
        self.sending += usize::from(self.rides);
        self.granted = 0;
        Out { head: Head::Kept(self.message.clone()), data, done: 0 }
    }

    /// Returns a message that asks the server to give up this request, if it waits for a lock or
    /// for events.
    pub(super) fn cancellation(&self, number: u16) -> Out {
        Out::header(&Header::new(Kind::Cancel, number, self.sequence))
    }

    /// Changes the header of this slot's message, for when it is resent.
    pub(super) fn change_header(&mut self, change: impl FnOnce(&mut Header)) {
        let Some(Ok(mut header)) = self.message.first_chunk().map(Header::parse) else { return };
        change(&mut header);
        let mut message = (*self.message).clone();
        message[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
        self.message = Arc::new(message);
    }

    /// Returns a part of this slot's source, for sending.
    pub(super) fn part(&mut self, from: u64, length: u32, number: u16, flags: u8) -> Out {
        let mut head = Header::new(Kind::Data, number, self.sequence);
        head.flags = flags;
        head.offset = from;
        head.payload_bytes = length;
        self.sending += 1;
        let pieces = self.source.pieces(from as usize, length as usize);
        Out { data: Some((number, pieces)), ..Out::header(&head) }
    }

    /// Returns the first fragment of the source, if it follows the message without a grant.
    pub(super) fn out_ahead(&mut self, number: u16) -> Option<Out> {
        let length = std::mem::take(&mut self.ahead) as u32;
        (length > 0).then(|| self.part(0, length, number, data_flag::AHEAD))
    }
}

// SAFETY: the pointers refer to a buffer that is `Send` and outlives the message, see `Out::data`.
#[allow(unsafe_code)]
unsafe impl Send for Out {}

/// The send queue, with the link that its messages are meant for.
pub(super) struct Outgoing {
    pub(super) messages: VecDeque<Out>,
    pub(super) link: Arc<Link>,
    /// Counts lanes, like [`super::State::lane`].
    pub(super) lane: u64,
    /// Wakers to call once this is unlocked.
    pub(super) woken: Vec<Waker>,
    /// When something was last sent, in milliseconds of the coarse clock.
    pub(super) sent_at: u64,
}

impl Outgoing {
    pub(super) fn over(link: Arc<Link>) -> Self {
        Self { messages: VecDeque::new(), link, lane: 0, woken: Vec::new(), sent_at: 0 }
    }

    /// Queues messages, unless their lane was replaced.
    pub(super) fn queue(&mut self, messages: Messages) {
        if messages.lane == self.lane {
            self.messages.extend(messages.before);
            self.messages.push_back(messages.message);
            self.messages.extend(messages.after);
        }
    }

    /// Called before sending; after a quiet time, checks whether the server is still there. A
    /// request that a dead server never received can be sent to the next one, but a request sent to
    /// it may have taken effect. This notices a server that ended while nothing was under way,
    /// without a system call for each request.
    pub(super) fn check_link(&mut self) -> io::Result<()> {
        let now = coarse_ms();
        if now.saturating_sub(self.sent_at) > QUIET_MS && self.link.peer_closed() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        self.sent_at = now;
        Ok(())
    }
}
