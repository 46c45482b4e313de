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
        self.receive(token as usize, scratch);
    }

    /// Reads the last of a lane over shared memory if its peer has hung up, which is all that the socket beside
    /// the memory reports.
    pub(super) fn check_end(&mut self, index: usize, scratch: &mut [u8]) {
        if shm_link(&self.lanes, index).is_some_and(ShmLink::peer_closed) {
            self.receive_rest(index, scratch);
        }
    }

    pub(crate) fn receive(&mut self, index: usize, scratch: &mut [u8]) {
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        if lane.hello.is_some() {
            // It waits to be greeted. Who has hung up needs no session.
            if lane.hung {
                self.close_lane(index, &io::ErrorKind::UnexpectedEof.into());
            }
            return;
        }
        let Some(mut receiving) = lane.receiving.take() else { return };
        let mut failure = None;
        let received =
            |of: &Receiving| of.statistics.counters.bytes_received.load(Ordering::Relaxed);
        let before = received(&receiving);
        // After the peer has hung up, the receive that returns its last bytes does not yet report the end.
        let mut last_look = lane.hung;
        for receives in 0.. {
            let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
            lane.drop_untaken();
            lane.paused = lane.is_full();
            if lane.paused {
                break;
            }
            if receives == RECEIVES_MAX && !lane.hung {
                self.queue_last(index as u64);
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
            let mut sink =
                Serving { core: self, index, news: false, since: None, is_followed: false };
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
        lane.place.spend(received(&receiving) - before);
        lane.receiving = Some(receiving);
        let hello = lane.hello.take();
        if lane.is_gone && !lane.paused && hello.is_none() {
            failure.get_or_insert_with(|| io::ErrorKind::UnexpectedEof.into());
        }
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

    /// Receives everything that a peer sent before it was gone, and then ends the lane. If threads are still
    /// preparing more for the peer than a lane may have, the rest is received when they are done.
    pub(super) fn receive_rest(&mut self, index: usize, scratch: &mut [u8]) {
        if let Some(Some(lane)) = self.lanes.get_mut(index) {
            (lane.hung, lane.is_gone) = (true, true);
            self.receive(index, scratch);
        }
    }
}
