//! Reading the memory of a mapped file again, after others may have changed the file.

use super::{Shared, read, read_from};
use crate::descriptors::Open;
use crate::hooks::handle::Handle;
use crate::hooks::maps::page_bytes;
use crate::remote;
use towline_instance::memory::{self, Access};

/// Most bytes that are read again when the file is locked; longer mappings stay as they are.
const RENEWED_BYTES_MAX: usize = 64 << 20;

impl Shared {
    /// Updates the memory after `data` was written to the file without the turn, as the memory did not exist yet. Who has read
    /// it in since may have seen the data or not, and others may have written there, so the file is read again.
    pub(in crate::hooks) fn written(&self, open: Open, data: &[u8], at: i64) -> Result<(), i32> {
        let _turn = self.turn()?;
        let first = at as usize / page_bytes();
        let known = self.known(first, (at as usize + data.len()).div_ceil(page_bytes()) - first)?;
        match memory::renew(self, first, &known, |to, at| read(open, to, at)) {
            // It is open for writing only.
            Err(libc::EBADF) => self.update(at, data),
            renewed => renewed.map(drop),
        }
    }

    /// Reads all pages again that were read before, by `read`. Stores that are not written back yet stay.
    pub(in crate::hooks) fn read_anew(
        &self,
        read: impl Fn(&mut [u8], usize) -> Result<usize, i32>,
    ) -> Result<(), i32> {
        let _turn = self.turn()?;
        let known = self.known(0, self.pages()?)?;
        memory::renew(self, 0, &known, read).map(drop)
    }

    /// Reads all known pages again if programs lock the file, by `handle` or else by the program's own.
    pub(in crate::hooks) fn renew_locked(
        &self,
        handle: Option<&Handle>,
        lent: u64,
    ) -> Result<(), i32> {
        let _turn = self.turn()?;
        if !memory::is_set(self, memory::IS_LOCKED_AT)? {
            return Ok(());
        }
        let Some(known) = self.known_if_short()? else { return Ok(()) };
        let renewed = memory::renew(self, 0, &known, |to, at| match handle {
            Some(handle) => handle.with(|file| read_from(file, to, at)),
            None => remote::with_handle(self.mount, lent, |file| read_from(file, to, at)),
        });
        renewed.map(drop)
    }

    /// [`Shared::known`] of all pages, or `None` if more are known than are read again for a lock.
    fn known_if_short(&self) -> Result<Option<Vec<u8>>, i32> {
        let known = self.known(0, self.pages()?)?;
        Ok(is_short(&known).then_some(known))
    }

    /// Takes a lock on the file by `call`, which does not wait for others and tells whether they may have
    /// changed the file under locks of theirs. If so, or if `is_old`, reads the pages again: whoever has the
    /// lock sees what was stored under the locks before, also by another run or machine. Reads by `handle`, as
    /// the file may be open for writing only, or by `open`. Returns whether that has changed the memory.
    pub(in crate::hooks) fn locking(
        &self,
        open: Open,
        handle: Option<&Handle>,
        is_old: bool,
        call: impl FnOnce() -> Result<bool, i32>,
    ) -> Result<bool, i32> {
        // Other processes of the run lock the file only after this has read it.
        let _turn = self.turn()?;
        let was_old = memory::is_set(self, memory::IS_OLD_AT)?;
        self.put(memory::IS_LOCKED_AT, &[1])?;
        self.put(memory::IS_OLD_AT, &[1])?;
        let others = match call() {
            Ok(others) => others || is_old || was_old,
            Err(error) => {
                self.put(memory::IS_OLD_AT, &[was_old.into()])?;
                return Err(error);
            }
        };
        let mut has_changed = false;
        if others {
            if handle.is_none() && remote::check_readable(open).is_err() {
                return Ok(false); // whoever locks it by a readable descriptor reads it
            }
            if let Some(known) = self.known_if_short()? {
                has_changed = memory::renew(self, 0, &known, |to, at| match handle {
                    Some(handle) => handle.with(|file| read_from(file, to, at)),
                    None => read(open, to, at),
                })?;
            }
        }
        self.put(memory::IS_OLD_AT, &[0])?;
        Ok(has_changed)
    }
}

/// Returns true if no more than [`RENEWED_BYTES_MAX`] of these pages are known.
pub(super) fn is_short(known: &[u8]) -> bool {
    known.iter().filter(|known| **known != 0).count() * page_bytes() <= RENEWED_BYTES_MAX
}
