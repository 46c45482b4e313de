//! The write of a compound, with the data from its request, or fragment by fragment from a transfer.

use super::append::{Appended, Failure, append, write_again};
use super::{Compound, Context, Step, Value, waiting_store};
use crate::files::Opened;
use std::sync::Arc;
use towline_store::FileStore;
use towline_wire::request::{open_flag, write_flag};
use towline_wire::{Errno, Reply};

/// Flags of open files of which each write waits for a device.
pub(super) const WAITS: u32 = open_flag::DIRECT | open_flag::DATA_SYNC | open_flag::FULL_SYNC;

/// A write whose data arrives in fragments.
pub(super) struct Writing {
    opened: Opened,
    offset: u64,
    append: bool,
    /// Part of it may have been written before the server was killed.
    again: bool,
    sync: bool,
    /// Fails if only a part of it can be written.
    whole: bool,
    length: u64,
    done: u64,
    started_at: Option<u64>,
    stopped: Option<Failure>,
}

impl Writing {
    /// Reserves the range of an append by appending its first fragment, and zeros for the fragments to
    /// come. So no other append can come in between or be overwritten. Returns true if the first
    /// fragment needs no further write.
    fn take_place(&mut self, first: &[u8], draft: Option<super::once::Draft>) -> bool {
        let mut all;
        let mut data = first;
        if self.length > first.len() as u64 {
            all = Vec::with_capacity(self.length as usize);
            all.extend_from_slice(first);
            all.resize(self.length as usize, 0);
            data = &all;
        }
        match append(&self.opened, data, draft) {
            Ok(Appended::Now(count, at)) => {
                (self.offset, self.append) = (at, false);
                self.started_at = Some(at);
                // Less when space ran out: data without a place is not written.
                self.length = count as u64;
                true
            }
            Ok(Appended::Before(at)) => {
                (self.offset, self.append, self.again) = (at, false, true);
                self.started_at = Some(at);
                false
            }
            Err(failure) => {
                self.stopped = Some(failure);
                self.length = 0;
                true
            }
        }
    }

    /// Writes a fragment to its place.
    fn write(&mut self, bytes: &[u8]) {
        let at = self.offset + self.done;
        let wanted = bytes.len().min((self.length - self.done) as usize);
        let bytes = &bytes[..wanted];
        let written = if self.again {
            write_again(&self.opened, at, bytes).map(|()| (wanted, at))
        } else {
            self.opened.file.write(at, bytes, false).map_err(Failure::from)
        };
        match written {
            Ok((count, at)) => {
                self.started_at.get_or_insert(at);
                if count < wanted {
                    self.stopped = Some(Errno::ENOSPC.into());
                    self.length = self.done + count as u64;
                }
            }
            Err(failure) => {
                self.stopped = Some(failure);
                self.length = self.done;
            }
        }
    }
}

impl Compound {
    /// Starts a write: of the data that came with the request, or of the data that was offered.
    pub(super) fn begin_write(
        &mut self,
        context: &Context<'_>,
        handle: u64,
        offset: u64,
        length: u32,
        flags: u32,
    ) -> Result<Option<Step>, Errno> {
        let opened = self.writable_at(context, handle)?;
        let is_append = flags & write_flag::APPEND != 0;
        let sync = flags & write_flag::DATA_SYNC != 0;
        let whole = flags & write_flag::WHOLE != 0;
        if self.offered > 0 {
            self.write = Some(Box::new(Writing {
                opened,
                offset,
                append: is_append,
                again: false,
                sync,
                whole,
                length: self.offered,
                done: 0,
                started_at: None,
                stopped: None,
            }));
            return Ok(Some(Step::NeedsData));
        }
        let waits = sync || opened.flags & WAITS != 0;
        let store = waiting_store(&opened).filter(|_| waits);
        let data = std::mem::take(&mut self.payload);
        debug_assert_eq!(data.len(), length as usize, "checked when the request came");
        let draft = if is_append { self.draft() } else { None };
        Ok(self.blocking(store, move || {
            let written = if is_append {
                append(&opened, &data, draft).and_then(|appended| match appended {
                    Appended::Now(count, at) => Ok((count, at)),
                    Appended::Before(at) => {
                        write_again(&opened, at, &data).map(|()| (data.len(), at))
                    }
                })
            } else {
                opened.file.write(offset, &data, false).map_err(Failure::from)
            };
            let (count, at) = match written {
                Ok(written) => written,
                Err(Failure::Errno(errno)) => return Err(errno),
                Err(Failure::Undecided) => return Ok(Value::Undecided),
            };
            if whole && count < data.len() {
                return Err(Errno::ENOSPC);
            }
            if sync {
                opened.file.sync(false)?;
            }
            Ok(Value::Wrote(count, at))
        }))
    }

    /// Returns the offset and length of the write's data that is still to come, in order; `None` when
    /// nothing is missing.
    #[must_use]
    pub fn missing(&self) -> Option<(u64, u64)> {
        self.write.as_ref().filter(|w| w.done < w.length).map(|w| (w.done, w.length - w.done))
    }

    /// Returns the store to which it writes fragments, if that belongs on threads that may block: each fragment
    /// may wait without limit, or waits for a device.
    #[must_use]
    pub fn writes_elsewhere(&self) -> Option<&Arc<dyn FileStore>> {
        let writing = self.write.as_ref()?;
        let waits = writing.sync || writing.opened.flags & WAITS != 0;
        let store = &writing.opened.store;
        (store.may_hang() || waits && store.may_block()).then_some(store)
    }

    /// Writes the next fragment. Returns true if it was the last one; then run again.
    pub fn write_fragment(&mut self, bytes: &[u8]) -> bool {
        let is_append = self.write.as_ref().is_some_and(|writing| writing.append);
        let draft = if is_append { self.draft() } else { None };
        let Some(writing) = &mut self.write else { return true };
        if writing.stopped.is_none() && !(writing.append && writing.take_place(bytes, draft)) {
            writing.write(bytes);
        }
        writing.done += bytes.len() as u64;
        if writing.done < writing.length {
            return false;
        }
        let Some(writing) = self.write.take() else { return true };
        let synced = if writing.sync { writing.opened.file.sync(false) } else { Ok(()) };
        match (writing.length, writing.stopped, synced) {
            (_, Some(Failure::Undecided), _) => {
                self.undecided = true;
                self.fail(Errno::EIO);
            }
            (0, Some(Failure::Errno(errno)), _) | (_, _, Err(errno)) => self.fail(errno),
            (_, Some(Failure::Errno(errno)), _) if writing.whole => self.fail(errno),
            (length, ..) => {
                let offset = writing.started_at.unwrap_or(writing.offset);
                self.result(&Reply::Wrote { length: length as u32, offset });
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::World;
    use super::*;
    use towline_store::memory::MemoryStore;
    use towline_wire::Request;
    use towline_wire::request::CURRENT;

    #[test]
    fn what_has_no_room_for_all_of_its_data_can_end_the_compound() {
        const ROOM: u64 = 64 << 10;
        const WRITE_ONLY: u32 = 1;
        for (flags, failed) in [(0, None), (write_flag::WHOLE, Some(Errno::ENOSPC))] {
            let mut world = World::new(MemoryStore::new("m", ROOM).unwrap(), false);
            let open = WRITE_ONLY | open_flag::CREATE;
            let mut write = |data: &[u8]| {
                let length = data.len() as u32;
                let requests = [
                    Request::Open { base: world.root, flags: open, mode: 0o600, path: b"a" },
                    Request::Write { handle: CURRENT, offset: 0, length, flags },
                    Request::Close { handle: CURRENT },
                ];
                world.ask_with(&requests, data).failed()
            };
            assert_eq!(write(&[7; 5]), None);
            assert_eq!(write(&[7; 2 * ROOM as usize]), failed);
        }
    }
}
