//! Messages that wait to be sent: what is in them, and for how long that stays valid.

use super::Slot;
use super::sending::coarse_ms;
use crate::lent::shared;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::task::Waker;
use towline_net::Link;
use towline_wire::header::data_flag;
use towline_wire::limits::HEADER_BYTES;
use towline_wire::{Header, Kind};

/// After so many milliseconds without a message the lane is looked at before the next.
const QUIET_MS: u64 = 20;

/// Messages of one request, which leave together.
pub(super) struct Messages {
    /// That of the state when they were made. By the time they are sent another thread may have replaced the lane: then what
    /// they ask for was sent again, or is over and its buffers are gone, and they are dropped.
    pub(super) lane: u64,
    /// What it was lent before and nobody is using goes back.
    pub(super) before: Vec<Out>,
    pub(super) message: Out,
    /// The first fragment of its data.
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

/// A message that waits to be sent.
pub(super) struct Out {
    head: Head,
    /// A part of the source of this slot, which follows. It stays valid until `Core::part_sent`, which the slot's
    /// `sending` counts, as long as the lane is that for which it was made.
    pub(super) data: Option<(u16, *const [u8])>,
    /// Bytes that have left.
    pub(super) done: usize,
}

enum Head {
    /// Of a request, which keeps it.
    Kept(Arc<Vec<u8>>),
    /// Of anything else.
    Bare([u8; HEADER_BYTES]),
}

impl Out {
    /// True for the message of a slot of which nothing has left.
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

    /// What is still to be sent, in order.
    pub(super) fn rest(&self) -> [&[u8]; 2] {
        let head: &[u8] = match &self.head {
            Head::Kept(message) => message,
            Head::Bare(header) => header,
        };
        let data = self.data.map_or(&[][..], |(_, data)| shared(data));
        let first = self.done.min(head.len());
        [&head[first..], &data[self.done - first..]]
    }
}

impl Slot {
    /// The message of this slot, which has that number, to be sent.
    pub(super) fn out(&mut self, number: u16) -> Out {
        let data = self.rides.then(|| (number, self.source.bytes()));
        self.sending += usize::from(self.rides);
        self.granted = 0;
        Out { head: Head::Kept(self.message.clone()), data, done: 0 }
    }

    /// Asks the server to give this request up, if that waits for a lock, or for events.
    pub(super) fn cancellation(&self, number: u16) -> Out {
        Out::header(&Header::new(Kind::Cancel, number, self.sequence))
    }

    /// Changes the header of the message of this slot, for when it is sent again.
    pub(super) fn change_header(&mut self, change: impl FnOnce(&mut Header)) {
        let Some(Ok(mut header)) = self.message.first_chunk().map(Header::parse) else { return };
        change(&mut header);
        let mut message = (*self.message).clone();
        message[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
        self.message = Arc::new(message);
    }

    /// A part of the source of this slot, to be sent.
    pub(super) fn part(&mut self, from: u64, length: u32, number: u16, flags: u8) -> Out {
        let mut head = Header::new(Kind::Data, number, self.sequence);
        head.flags = flags;
        head.offset = from;
        head.payload_bytes = length;
        self.sending += 1;
        let range = from as usize..from as usize + length as usize;
        let source = &raw const shared(self.source.bytes())[range];
        Out { data: Some((number, source)), ..Out::header(&head) }
    }

    /// The first fragment of the source, if it follows the message without a grant.
    pub(super) fn out_ahead(&mut self, number: u16) -> Option<Out> {
        let length = std::mem::take(&mut self.ahead) as u32;
        (length > 0).then(|| self.part(0, length, number, data_flag::AHEAD))
    }
}

// SAFETY: the pointer is to a buffer that is `Send` and outlives the message, see `Out::data`.
#[allow(unsafe_code)]
unsafe impl Send for Out {}

/// What waits to be sent, and over which link: it would be lost on another one.
pub(super) struct Outgoing {
    pub(super) messages: VecDeque<Out>,
    pub(super) link: Arc<Link>,
    /// Counts lanes, as that of the state.
    pub(super) lane: u64,
    /// Wakers to be woken when this is unlocked.
    pub(super) woken: Vec<Waker>,
    /// When something was sent last, in milliseconds of the coarse clock.
    pub(super) sent_at: u64,
}

impl Outgoing {
    pub(super) fn over(link: Arc<Link>) -> Self {
        Self { messages: VecDeque::new(), link, lane: 0, woken: Vec::new(), sent_at: 0 }
    }

    /// Queues messages, unless they are of a lane that was replaced.
    pub(super) fn queue(&mut self, messages: Messages) {
        if messages.lane == self.lane {
            self.messages.extend(messages.before);
            self.messages.push_back(messages.message);
            self.messages.extend(messages.after);
        }
    }

    /// Before something is sent. What a dead server never saw can be asked of the next one; what was sent to it might have been
    /// done. One that ended while nothing was under way is noticed here, without a call for each request.
    pub(super) fn check_link(&mut self) -> io::Result<()> {
        let now = coarse_ms();
        if now.saturating_sub(self.sent_at) > QUIET_MS && self.link.peer_closed() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        self.sent_at = now;
        Ok(())
    }
}
