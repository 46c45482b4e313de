//! Writes: room for their payload, and what becomes of it.

use super::{Engine, Fragment, Kind, OwnerKey, RequestKey};
use crate::Disk;
use crate::request::{Driver, Output, Work, Write};
use crate::slab::Key;
use crate::ways::write_work;
use std::sync::Arc;
use std::time::Instant;
use towline_mem::PoolBuffer;
use towline_store::{Direction, Now};

impl<T: Copy> Engine<T> {
    /// A write whose payload follows by [`Engine::room`] and [`Engine::filled`].
    pub fn write(
        &mut self,
        owner: OwnerKey,
        tag: T,
        disk: &Arc<Disk>,
        range: std::ops::Range<u64>,
        durable: bool,
        arrived: Instant,
    ) -> Option<RequestKey> {
        let write = Write {
            disk: disk.clone(),
            next: range.start,
            placed: range.start,
            end: range.end,
            durable,
            in_flight: 0,
            error: None,
        };
        disk.changes.note(range.start, range.end - range.start);
        self.add(owner, tag, Kind::Write(write), arrived).map(RequestKey)
    }

    /// A buffer for the next bytes of a write and how many of them go into it; `None` when all
    /// memory is in use, or all bytes have a buffer. Buffers are filled in the order of their bytes.
    pub fn room(&mut self, key: RequestKey) -> Option<(PoolBuffer, usize)> {
        let request = self.requests.get_mut(key.0)?;
        let Kind::Write(write) = &mut request.kind else { return None };
        let rest = (write.end - write.placed).min(self.limits.fragments.buffer_bytes() as u64);
        if rest == 0 {
            return None;
        }
        let rest = write
            .disk
            .store
            .layout()
            .map_or(rest, |layout| rest.min(layout.chunk_end(write.placed) - write.placed));
        let place = write.disk.store.locate(write.placed, rest, Direction::Write);
        let length = place.map_or(rest, |place| place.length);
        let buffer = self.limits.take(length)?;
        write.placed += length;
        Some((buffer, length as usize))
    }

    /// The buffers of a write that are not filled yet never will be: their bytes come anew.
    pub fn forget_room(&mut self, key: RequestKey) {
        if let Some(request) = self.requests.get_mut(key.0)
            && let Kind::Write(write) = &mut request.kind
        {
            write.placed = write.next;
        }
    }

    /// A buffer of [`Engine::room`] holds its bytes: they are written.
    pub fn filled(
        &mut self,
        key: RequestKey,
        buffer: PoolBuffer,
        length: usize,
        driver: &mut dyn Driver,
    ) {
        let Some(request) = self.requests.get_mut(key.0) else { return };
        let Kind::Write(write) = &mut request.kind else { return };
        let offset = write.next;
        write.next += length as u64;
        let data = &buffer.bytes()[..length];
        if let Now::Done(mut result) = write.disk.store.write_now(offset, data, write.durable) {
            if write.durable {
                result = write.disk.note_durable_write(result);
            }
            write.error = write.error.take().or(result.err());
            self.moved.written_staged += length as u64;
            return self.end_write(key.0);
        }
        let work = write_work(&write.disk, offset, buffer, length, write.durable);
        match &work {
            Work::Transfer { place, .. } if place.direct => {
                self.moved.written_direct += length as u64;
            }
            _ => self.moved.written_staged += length as u64,
        }
        write.in_flight += 1;
        request.disk_since.get_or_insert_with(Instant::now);
        let length = length as u64;
        let fragment = Fragment { request: key.0, offset, length, done: 0, lends: false };
        let token = self.fragments.insert(fragment);
        driver.begin(token.to_bits(), work);
    }

    /// Tells that a write is over, if it is.
    pub(super) fn end_write(&mut self, key: Key) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Write(write) = &mut request.kind else { return };
        if write.in_flight > 0 || write.next < write.end {
            return;
        }
        let result = write.error.take().map_or(Ok(()), Err);
        let (tag, times, owner) = (request.tag, request.times(), request.owner);
        if self.owners.get_mut(owner).is_some() {
            self.outputs.push_back(Output::Done { tag, result, times });
        }
        self.remove_request(key);
    }

    /// The rest of a write will never come. True: parts of it are under way, and it will be told
    /// that it is over.
    pub fn abandon(&mut self, key: RequestKey) -> bool {
        let Some(request) = self.requests.get_mut(key.0) else { return false };
        let Kind::Write(write) = &mut request.kind else { return false };
        if write.in_flight > 0 {
            write.next = write.end;
            return true;
        }
        self.remove_request(key.0);
        false
    }
}
