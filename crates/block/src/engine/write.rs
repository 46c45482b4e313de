//! Writes: provides room for their payload and writes it.

use super::{EIO, Engine, Fragment, Kind, OwnerKey, RequestKey};
use crate::Disk;
use crate::memory::Short;
use crate::request::{Driver, Output, Work, Write};
use crate::slab::Key;
use crate::ways::write_work;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use towline_mem::{PoolBuffer, SharedMemory};
use towline_store::{Direction, Now};

impl<T: Copy> Engine<T> {
    /// Adds a write, whose payload follows through [`Engine::room`] and [`Engine::filled`].
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
            start: range.start,
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

    /// Returns a buffer for the next bytes of a write, and how many bytes go into it. Buffers must be filled
    /// in the order in which they were returned.
    ///
    /// # Errors
    /// No buffer is available, or all bytes already have one.
    pub fn room(&mut self, key: RequestKey) -> Result<(PoolBuffer, usize), Short> {
        let fragment = self.fragment_bytes();
        let request = self.requests.get_mut(key.0).ok_or(Short::Nothing)?;
        let Kind::Write(write) = &mut request.kind else { return Err(Short::Nothing) };
        let rest = (write.end - write.placed).min(fragment);
        if rest == 0 {
            return Err(Short::Nothing);
        }
        let rest = write
            .disk
            .store
            .layout()
            .map_or(rest, |layout| rest.min(layout.chunk_end(write.placed) - write.placed));
        let place = write.disk.store.locate(write.placed, rest, Direction::Write);
        let length = place.map_or(rest, |place| place.length);
        let buffer = self.memory.take(&write.disk, length)?;
        write.placed += length;
        Ok((buffer, length as usize))
    }

    /// Reserves room for the next bytes of a write in the disk's own memory, and returns their number.
    /// `None`: the disk is not in memory, or all bytes have room.
    pub fn room_in_place(&mut self, key: RequestKey) -> Option<usize> {
        let fragment = self.fragment_bytes();
        let Kind::Write(write) = &mut self.requests.get_mut(key.0)?.kind else { return None };
        let length = (write.end - write.placed).min(fragment);
        write.disk.store.landing(write.placed, length).filter(|_| length > 0)?;
        write.placed += length;
        Some(length as usize)
    }

    /// Returns the memory into which the next bytes of a write, at most `most`, may be received. `None`: they
    /// need a buffer from [`Engine::room`].
    pub fn landing(
        &mut self,
        key: RequestKey,
        most: usize,
    ) -> Option<(&SharedMemory, Range<usize>)> {
        let Kind::Write(write) = &mut self.requests.get_mut(key.0)?.kind else { return None };
        let length = (write.end - write.next).min(most as u64);
        let (memory, at) = write.disk.store.landing(write.next, length)?;
        Some((memory, at..at + length as usize))
    }

    /// Notes that `count` bytes were received into the memory from [`Engine::landing`].
    pub fn landed(&mut self, key: RequestKey, count: usize) {
        let Some(request) = self.requests.get_mut(key.0) else { return };
        let Kind::Write(write) = &mut request.kind else { return };
        let count = count as u64;
        write.disk.store.landed(write.next, count);
        self.moved.written_in_place += count;
        write.next += count;
        write.placed = write.placed.max(write.next);
        self.end_write(key.0);
    }

    /// Counts bytes that a write bypassing the engine put into the disk's memory.
    pub fn note_landed(&mut self, count: u64) {
        self.moved.written_in_place += count;
    }

    /// Notes that the payload up to byte `done` was thrown away because the disk has shrunk; the write fails.
    pub fn lost(&mut self, key: RequestKey, done: u64) {
        let Some(request) = self.requests.get_mut(key.0) else { return };
        let Kind::Write(write) = &mut request.kind else { return };
        write.next = write.next.max(write.start + done);
        write.error.get_or_insert_with(|| io::Error::from_raw_os_error(EIO));
        self.end_write(key.0);
    }

    /// Makes the write receive all bytes from `done` on again, even those that already had room.
    pub fn rewind(&mut self, key: RequestKey, done: u64) {
        if let Some(request) = self.requests.get_mut(key.0)
            && let Kind::Write(write) = &mut request.kind
        {
            write.next = write.start + done;
            write.placed = write.next;
        }
    }

    /// Writes the bytes in a buffer from [`Engine::room`].
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
        let phase = match write.disk.begin_write(write.next) {
            Ok(phase) => phase,
            // The disk has shrunk meanwhile.
            Err(error) => {
                write.error.get_or_insert(error);
                return self.end_write(key.0);
            }
        };
        let data = &buffer.bytes()[..length];
        if let Now::Done(mut result) = write.disk.store.write_now(offset, data, write.durable) {
            write.disk.end_write(phase);
            if write.durable {
                result = write.disk.note_durable_write(offset + length as u64, result);
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
        let fragment = Fragment { request: key.0, offset, length, done: 0, lends: false, phase };
        let token = self.fragments.insert(fragment);
        driver.begin(token.to_bits(), &write.disk, work);
    }

    /// Reports the end of a write if it is complete.
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

    /// Gives up a write whose remaining payload will never come. Returns true if parts of it are under way;
    /// its end is then still reported.
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
