//! Receiving from the lanes of a core.

use super::{Core, NBD_TOKENS, shm_link};
use crate::lane::Receiving;
use crate::serving::Serving;
use std::io;
use towline_net::{Incoming, ShmLink};

/// Receives of one lane before the others' turn, unless its peer has ended.
const RECEIVES_MAX: usize = 8;

impl Core {
    /// Reads from the connection with this token.
    pub(super) fn read(&mut self, token: u64, scratch: &mut [u8]) {
        if token >= NBD_TOKENS {
            return self.receive_nbd((token - NBD_TOKENS) as usize, scratch);
        }
        let index = token as usize;
        self.receive(index, scratch);
        // The socket beside shared memory carries nothing any more but its end.
        if shm_link(&self.lanes, index).is_some_and(ShmLink::peer_closed) {
            // What the peer asked for after we looked, and before it ended.
            self.receive_rest(index, scratch);
            self.close_lane(index, &io::ErrorKind::UnexpectedEof.into());
        }
    }

    /// Reads from a lane what was left because too much was unsent, or because it was the others' turn.
    pub(super) fn resume(&mut self, index: usize, scratch: &mut [u8]) {
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        lane.is_resumable = false;
        if lane.paused && !lane.is_full() {
            lane.paused = false;
            self.receive(index, scratch);
        }
    }

    /// No event will come for what is unread of a lane: it is no news.
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
        // Where the peer has ended, its last bytes are not the end yet.
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
                // What came with the hello of a peer that has ended since.
                if self.lanes.get(index).is_some_and(|l| l.as_ref().is_some_and(|l| l.hung)) {
                    self.receive(index, scratch);
                }
            }
            // Whoever was answered is in there already.
            (None, None) if self.dirty.last() != Some(&index) => self.dirty.push(index),
            (None, None) => {}
        }
    }

    /// Receives all that is there, from a peer that has ended.
    pub(super) fn receive_rest(&mut self, index: usize, scratch: &mut [u8]) {
        if let Some(Some(lane)) = self.lanes.get_mut(index) {
            lane.hung = true;
            self.receive(index, scratch);
        }
    }
}
