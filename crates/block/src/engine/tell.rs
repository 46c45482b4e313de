//! Reports what has landed: as it lands, or in order where a front asked for that.

use super::{Engine, Kind};
use crate::request::{How, Output, Piece, Read, Waiting};
use crate::slab::Key;
use std::io;

impl<T: Copy> Engine<T> {
    /// Takes a piece of a read that has landed, or its error.
    pub(super) fn land(&mut self, key: Key, offset: u64, landed: io::Result<Piece>) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Read(read) = &mut request.kind else { return };
        if self.owners.get(request.owner).is_none() {
            // The connection is gone.
            read.waiting.clear();
            return self.forget_if_idle(key);
        }
        if read.how != How::Ordered && !read.serial && read.waiting.is_empty() {
            return self.tell(key, offset, landed);
        }
        match read.waiting.iter_mut().find(|w| w.offset == offset && w.landed.is_none()) {
            Some(place) => place.landed = Some(landed),
            None => read.waiting.push_back(Waiting { offset, landed: Some(landed) }),
        }
        let owner = request.owner;
        self.tell_landed(key, owner);
    }

    /// Reports what has landed and may be reported.
    pub(super) fn tell_landed(&mut self, key: Key, owner: Key) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Read(read) = &mut request.kind else { return };
        if read.how == How::Ordered {
            while let Some(key) = self.next_speaker(owner) {
                self.speak(key);
            }
        } else if read.may_be_told() {
            while let Some(request) = self.requests.get_mut(key)
                && let Kind::Read(read) = &mut request.kind
                && let Some(Waiting { offset, landed: Some(landed) }) = read.waiting.pop_front()
            {
                self.tell(key, offset, landed);
            }
        }
    }

    /// Returns the owner's ordered read that may report something. That is the one that is reported in part;
    /// if there is none, the oldest, or one that needs no more memory to finish, since those that wait their
    /// turn hold memory too.
    fn next_speaker(&self, owner: Key) -> Option<Key> {
        let owner = self.owners.get(owner)?;
        let may = |key: &Key| {
            let Kind::Read(read) = &self.requests.get(*key)?.kind else { return None };
            let lands = read.waiting.front().is_some_and(|w| w.landed.is_some());
            let first = owner.ordered.front() == Some(key);
            let may = lands && (first || read.cursor.is_done()) && read.may_be_told();
            may.then_some(*key)
        };
        match owner.speaking {
            Some(key) => may(&key),
            None => owner.ordered.iter().find_map(may),
        }
    }

    /// Reports the landed pieces of an ordered read, in order.
    fn speak(&mut self, key: Key) {
        while let Some(request) = self.requests.get_mut(key)
            && let Kind::Read(read) = &mut request.kind
            && read.waiting.front().is_some_and(|w| w.landed.is_some())
        {
            let owner = request.owner;
            if let Some(Waiting { offset, landed: Some(landed) }) = read.waiting.pop_front() {
                self.tell(key, offset, landed);
            }
            let over = self.requests.get(key).is_none();
            if let Some(owner) = self.owners.get_mut(owner) {
                owner.speaking = Some(key).filter(|_| !over);
                if over {
                    owner.ordered.retain(|other| *other != key);
                }
            }
        }
    }

    fn tell(&mut self, key: Key, offset: u64, landed: io::Result<Piece>) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Read(read) = &mut request.kind else { return };
        let landed = match landed {
            // In an ordered read, data behind a failure is useless, and the failure is reported last.
            _ if read.failed && read.how == How::Ordered => None,
            Err(error) if read.how == How::Ordered => {
                read.failure = Some((offset, error));
                None
            }
            landed => Some((offset, landed)),
        };
        read.failed |= read.failure.is_some() || matches!(landed, Some((_, Err(_))));
        let begun = read.cursor.is_done() || read.failed;
        let over = begun && read.in_flight == 0 && read.waiting.is_empty();
        let landed = match read.failure.take_if(|_| over) {
            Some((offset, error)) => Some((offset, Err(error))),
            None => landed,
        };
        let Some((offset, landed)) = landed else { return };
        let first = !std::mem::replace(&mut read.told, true);
        let (tag, owner) = (request.tag, request.owner);
        let last = over.then(|| request.times());
        // Nothing is reported to a connection that is gone.
        if self.owners.get_mut(owner).is_some() {
            self.outputs.push_back(match landed {
                Ok(piece) => Output::Piece { tag, offset, piece, first, last },
                Err(error) => Output::Failed { tag, offset, error, first, last },
            });
        }
        if over {
            self.remove_request(key);
        }
    }
}

impl Read {
    /// Returns true if landed pieces need not be kept until the disk has finished the rest.
    fn may_be_told(&self) -> bool {
        !self.serial || (self.in_flight == 0 && (self.cursor.is_done() || self.failed))
    }
}
