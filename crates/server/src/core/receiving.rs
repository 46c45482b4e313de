//! Receives from the lanes of a core.

use super::{Core, NBD_TOKENS, shm_link};
use crate::lane::Receiving;
use crate::serving::Serving;
use std::io;
use std::sync::atomic::Ordering;
use towline_net::{Incoming, ShmLink};
use towline_wire::ProtocolError;

/// Receives from one lane before others get their turn, unless its peer has hung up.
const RECEIVES_MAX: usize = 8;
/// Most bytes read at once from a peer that has hung up: more than a client can have under way. A hostile one
/// can go on writing to shared memory, or to a socket of which it has closed only the other direction.
const LAST_BYTES_MAX: u64 = 64 * 1024 * 1024;

impl Core {
    /// Reads from the connection with this token.
    pub(super) fn read(&mut self, token: u64, scratch: &mut [u8]) {
        if token >= NBD_TOKENS {
            return self.receive_nbd((token - NBD_TOKENS) as usize, scratch);
        }
        let index = token as usize;
        self.receive(index, scratch);
        // The socket beside shared memory only reports the end of the connection.
        if shm_link(&self.lanes, index).is_some_and(ShmLink::peer_closed) {
            // The peer may have sent requests after the last receive and before it hung up.
            self.receive_rest(index, scratch);
            self.close_lane(index, &io::ErrorKind::UnexpectedEof.into());
        }
    }

    /// Reads input of a lane that was left because too much was unsent, or because it was another lane's
    /// turn.
    pub(super) fn resume(&mut self, index: usize, scratch: &mut [u8]) {
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        lane.is_resumable = false;
        if lane.paused && !lane.is_full() {
            lane.paused = false;
            self.receive(index, scratch);
        }
    }

    /// Reads this lane again soon: no event will report its unread input, since that is not new.
    pub(super) fn resume_soon(&mut self, index: usize) {
        if let Some(Some(lane)) = self.lanes.get_mut(index)
            && !std::mem::replace(&mut lane.is_resumable, true)
        {
            self.resumable.push(index);
        }
    }

    pub(crate) fn receive(&mut self, index: usize, scratch: &mut [u8]) {
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        let Some(mut receiving) = lane.receiving.take() else { return };
        let mut failure = None;
        let received =
            |of: &Receiving| of.statistics.counters.bytes_received.load(Ordering::Relaxed);
        let before = received(&receiving);
        // After the peer has hung up, the receive that returns its last bytes does not yet report the end.
        let mut last_look = lane.hung;
        for receives in 0.. {
            let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
            if lane.is_full() {
                lane.paused = true;
                break;
            }
            if receives == RECEIVES_MAX && !lane.hung {
                lane.paused = true;
                self.resume_soon(index);
                break;
            }
            if lane.hung && received(&receiving) - before > LAST_BYTES_MAX {
                let error = ProtocolError { what: "data after the peer has hung up", at: 0 };
                failure = Some(io::Error::new(io::ErrorKind::InvalidData, error));
                break;
            }
            if lane.hello.is_some() {
                break;
            }
            let mut sink = Serving { core: self, index, news: false, since: None };
            let Receiving { link, input, statistics } = &mut *receiving;
            match input.receive(link, scratch, None, &mut sink, &statistics.counters) {
                Ok(Incoming::Progress) => {}
                Ok(Incoming::Drained) if last_look => last_look = false,
                Ok(Incoming::Drained) => break,
                Ok(Incoming::Closed) => {
                    failure = Some(io::ErrorKind::UnexpectedEof.into());
                    break;
                }
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        lane.receiving = Some(receiving);
        let hello = lane.hello.take();
        match (failure, hello) {
            (Some(error), _) => self.close_lane(index, &error),
            (None, Some(hello)) => {
                self.greet(index, &hello);
                // A peer that has hung up may have sent more with its hello.
                if self.lanes.get(index).is_some_and(|l| l.as_ref().is_some_and(|l| l.hung)) {
                    self.receive(index, scratch);
                }
            }
            // A lane that was sent an answer is already in the list.
            (None, None) if self.dirty.last() != Some(&index) => self.dirty.push(index),
            (None, None) => {}
        }
    }

    /// Receives everything that a peer sent before it hung up.
    pub(super) fn receive_rest(&mut self, index: usize, scratch: &mut [u8]) {
        if let Some(Some(lane)) = self.lanes.get_mut(index) {
            lane.hung = true;
            self.receive(index, scratch);
        }
    }
}
