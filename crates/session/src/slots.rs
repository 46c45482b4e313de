//! Slots: the request that each one carries, and the reply remembered in case the request is repeated.

use towline_wire::limits::{REPLAY_BYTES_MAX, SLOTS_MAX};
use towline_wire::{Header, ProtocolError};

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Free,
    /// Being executed.
    Running,
    /// Answered.
    Answered,
}

#[derive(Clone, Debug, Default)]
struct Slot {
    sequence: u32,
    state: State,
    /// The last reply if it has to be remembered, else empty. The buffer is reused.
    reply: Vec<u8>,
    /// The client has given up what its request waits for, or will wait for.
    cancelled: bool,
    /// A file that the last request left open, if only its reply said so and that is not remembered.
    left: Option<u64>,
}

impl Slot {
    /// A slot that has carried no request accepts any first sequence number, because a client that
    /// continues its session after a restart of the server does not start at one.
    fn is_new(&self) -> bool {
        self.sequence == 0 && matches!(self.state, State::Free)
    }

    fn begin(&mut self, sequence: u32) {
        (self.sequence, self.state, self.cancelled) = (sequence, State::Running, false);
        self.reply.clear();
    }
}

/// The slots of a session.
#[derive(Debug)]
pub struct Slots(Vec<Slot>);

/// What to do with a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It is new, or harmless to repeat: execute it.
    Execute,
    /// It was executed: send this reply again.
    Replay(Vec<u8>),
    /// It is being executed, and its reply will follow.
    Running,
}

impl Default for Slots {
    fn default() -> Self {
        Self(vec![Slot::default(); SLOTS_MAX])
    }
}

impl Slots {
    /// Takes a request into its slot if it is the next one and the last one was answered. If it returns
    /// false, call [`Slots::arrive`].
    pub fn begin_next(&mut self, header: &Header) -> bool {
        let slot = &mut self.0[usize::from(header.slot)];
        let is_next = header.sequence == slot.sequence.wrapping_add(1)
            && !matches!(slot.state, State::Running);
        if is_next {
            // A client that sends the next request has received the last reply.
            slot.left = None;
            slot.begin(header.sequence);
        }
        is_next
    }

    /// Takes a request into its slot.
    ///
    /// # Errors
    /// The slot is busy with another request, or the sequence number is neither the last one nor the next.
    pub fn arrive(&mut self, header: &Header) -> Result<Arrival, ProtocolError> {
        if self.begin_next(header) {
            return Ok(Arrival::Execute);
        }
        let slot = &mut self.0[usize::from(header.slot)];
        if header.sequence == slot.sequence {
            match slot.state {
                State::Running => return Ok(Arrival::Running),
                State::Answered if !slot.reply.is_empty() => {
                    return Ok(Arrival::Replay(slot.reply.clone()));
                }
                State::Answered | State::Free => {}
            }
        } else if header.sequence != slot.sequence.wrapping_add(1) && !slot.is_new() {
            return Err(ProtocolError { what: "sequence number out of order", at: 4 });
        } else if matches!(slot.state, State::Running) {
            return Err(ProtocolError { what: "slot is busy with another request", at: 2 });
        }
        slot.begin(header.sequence);
        Ok(Arrival::Execute)
    }

    /// Notes that a slot's request was answered, with the reply if repeating the request would give a
    /// different one.
    pub fn answer(&mut self, slot: u16, reply: Option<[&[u8]; 2]>) {
        let slot = &mut self.0[usize::from(slot)];
        slot.state = State::Answered;
        slot.reply.clear();
        if let Some([header, results]) = reply
            && header.len() + results.len() <= REPLAY_BYTES_MAX
        {
            slot.reply.extend_from_slice(header);
            slot.reply.extend_from_slice(results);
        }
    }

    /// Notes the file that an answered request has left open. If the request is repeated, the client
    /// does not know about that file.
    pub fn note_left(&mut self, slot: u16, handle: Option<u64>) {
        self.0[usize::from(slot)].left = handle;
    }

    /// Returns the file left open by a request whose reply was lost, when the request is executed again.
    pub fn take_left(&mut self, slot: u16) -> Option<u64> {
        self.0[usize::from(slot)].left.take()
    }

    /// Notes that the client has given up this request, if it is being executed. It may not have come to its wait
    /// yet.
    pub fn cancel(&mut self, slot: u16, sequence: u32) {
        if self.is_running(slot, sequence) {
            self.0[usize::from(slot)].cancelled = true;
        }
    }

    /// True if the client has given up the slot's request.
    #[must_use]
    pub fn is_cancelled(&self, slot: u16) -> bool {
        self.0[usize::from(slot)].cancelled
    }

    /// True while the slot's request with this sequence number is being executed.
    #[must_use]
    pub fn is_running(&self, slot: u16, sequence: u32) -> bool {
        let slot = &self.0[usize::from(slot)];
        slot.sequence == sequence && matches!(slot.state, State::Running)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline_wire::Kind;

    fn request(sequence: u32) -> Header {
        Header::new(Kind::Request, 3, sequence)
    }

    #[test]
    fn a_repeated_request_is_answered_from_memory_and_not_executed() {
        let mut slots = Slots::default();
        assert_eq!(slots.arrive(&request(1)), Ok(Arrival::Execute));
        assert_eq!(slots.arrive(&request(1)), Ok(Arrival::Running));
        slots.answer(3, Some([b"re", b"ply"]));
        assert_eq!(slots.arrive(&request(1)), Ok(Arrival::Replay(b"reply".to_vec())));
        assert_eq!(slots.arrive(&request(2)), Ok(Arrival::Execute));
        slots.answer(3, None);
        assert_eq!(slots.arrive(&request(2)), Ok(Arrival::Execute));
    }

    #[test]
    fn only_the_request_that_was_given_up_is() {
        let mut slots = Slots::default();
        assert!(slots.arrive(&request(1)).is_ok());
        slots.cancel(3, 2);
        assert!(!slots.is_cancelled(3), "the next request has not arrived");
        slots.cancel(3, 1);
        assert!(slots.is_cancelled(3));
        assert_eq!(slots.arrive(&request(1)), Ok(Arrival::Running));
        assert!(slots.is_cancelled(3), "it was sent again");
        slots.answer(3, None);
        assert!(slots.arrive(&request(2)).is_ok());
        assert!(!slots.is_cancelled(3));
    }

    #[test]
    fn sequence_numbers_out_of_order_are_refused() {
        let mut slots = Slots::default();
        assert!(slots.arrive(&request(1)).is_ok());
        assert!(slots.arrive(&request(2)).is_err(), "the slot is busy");
        slots.answer(3, Some([b"", b""]));
        assert!(slots.arrive(&request(3)).is_err());
        assert!(slots.arrive(&request(2)).is_ok());
    }
}
