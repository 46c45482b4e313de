//! Open files through which mappings are written back.

use crate::descriptors::Open;
use crate::remote;
use std::sync::atomic::Ordering;
use towline_client::File;
use towline_instance::memory;
use towline_wire::request::sync_kind;

/// Parts of up to this many bytes are written without waiting for each.
const SMALL_BYTES: usize = 4096;
/// Most writes that are started before the first one is waited for.
const STARTED_MAX: usize = 32;

/// An open file through which mappings are written back: the program may close its descriptor at once.
pub(super) struct Handle {
    mount: usize,
    /// Its handles, of which any serves as long as it is open: one of its own and the program's, the one first
    /// that is likelier to be.
    numbers: [u64; 2],
    /// Closes the first one at the end.
    is_own: bool,
}

impl Handle {
    /// Makes one more handle of an open file, which may have no name any more, and to which this user may have no right any
    /// more.
    pub(super) fn of(open: Open) -> Result<Self, i32> {
        let again = |file: &File| file.again(libc::O_RDWR as u32).map(File::into_handle);
        let number = remote::with(open, again)?;
        let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
        Ok(Self { mount, numbers: [number, open.handle], is_own: true })
    }

    /// Waits until what was written to the file is safe.
    pub(super) fn sync(&self) -> Result<(), i32> {
        self.with(|file| file.sync(sync_kind::DATA))
    }

    /// Returns what takes the place of this handle where it is not this process's own any more: the
    /// program's handle of the file, which the pager keeps open while it fills the mapping, else whoever
    /// has a descriptor of it. After that, this one.
    pub(super) fn lent(&self) -> Self {
        let [own, program] =
            if self.is_own { self.numbers } else { [self.numbers[1], self.numbers[0]] };
        Self { mount: self.mount, numbers: [program, own], is_own: false }
    }

    /// Returns true if this process knows that the file of its own handle was lost in a restart of the server.
    pub(super) fn is_lost(&self) -> bool {
        remote::is_lost(self.mount, self.numbers[usize::from(!self.is_own)])
    }

    pub(super) fn with<T>(
        &self,
        mut work: impl FnMut(&File) -> Result<T, towline_client::Error>,
    ) -> Result<T, i32> {
        let [first, second] = self.numbers;
        match remote::with_handle(self.mount, first, &mut work) {
            // Closed by others, or opened by a path that has changed, so that it was not found again.
            Err(error @ (libc::EBADF | libc::ESTALE)) => {
                match remote::with_handle(self.mount, second, work) {
                    Err(libc::EBADF) => Err(error),
                    done => done,
                }
            }
            done => done,
        }
    }
}

impl memory::Remote for Handle {
    type Error = i32;

    fn size(&self) -> Result<u64, i32> {
        self.with(File::stat).map(|attr| attr.size)
    }

    fn write(&self, parts: &[(u64, &[u8])]) -> Result<(), i32> {
        let whole = |(at, data): &(u64, &[u8])| self.with(|file| file.write_all_at(data, *at));
        let is_small = |(_, data): &(u64, &[u8])| data.len() <= SMALL_BYTES;
        let (small, long): (Vec<_>, Vec<_>) = parts.iter().copied().partition(is_small);
        long.iter().try_for_each(whole)?;
        if small.len() == 1 {
            return small.iter().try_for_each(whole);
        }
        for parts in small.chunks(STARTED_MAX) {
            self.with(|file| {
                let start = |(at, data): &(u64, &[u8])| file.start_write_at(data.to_vec(), *at);
                let started = parts.iter().map(start).collect::<Result<Vec<_>, _>>()?;
                for (operation, (at, data)) in started.into_iter().zip(parts) {
                    let (written, _) = operation.wait()?;
                    file.write_all_at(&data[written..], at + written as u64)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn write_together(&self, parts: &[(u64, &[u8])]) -> Result<(), i32> {
        self.with(|file| file.write_parts(parts))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.is_own
            && let Ok(client) = remote::client(self.mount)
        {
            client.close_handle(self.numbers[0]);
        }
    }
}
