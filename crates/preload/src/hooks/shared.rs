//! The memory behind shared mappings of remote files: for each file that is mapped a file in the run's
//! directory, which all processes of the run map.

use super::maps::{PAGE, plain, unmap};
use crate::descriptors::{self, Open};
use crate::guard::checked;
use crate::remote;
use libc::{c_int, c_void, off64_t, size_t};
use std::sync::atomic::Ordering;

/// True once a process of the run has made a shared mapping.
pub(crate) fn is_any() -> bool {
    crate::start::state().is_some_and(|state| state.mapped().load(Ordering::Acquire) != 0)
}

/// The memory that stands for a file in all processes of the run: a file whose first part tells,
/// with a byte for each page, what was read. It stays locked while somebody maps it; the first who
/// does reads anew.
pub(crate) struct Shared(c_int);

/// Where the pages begin: files of up to 256 GiB.
const PAGES_AT: i64 = 64 << 20;

impl Shared {
    /// Made where it is not there yet.
    pub(crate) fn of(open: Open) -> Result<Self, i32> {
        let shared = Self::opened(open, libc::O_CREAT)?;
        if let Some(state) = crate::start::state() {
            state.mapped().store(1, Ordering::Release);
        }
        Ok(shared)
    }

    /// `ENOENT` where nobody of the run has mapped the file.
    pub(crate) fn existing(open: Open) -> Result<Self, i32> {
        Self::opened(open, 0)
    }

    fn opened(open: Open, create: c_int) -> Result<Self, i32> {
        let (mount, inode) = (&open.entry.mount, &open.entry.inode);
        let mut path = crate::start::directory().to_vec();
        let name = format!(
            "/{}/{}-{}\0",
            towline_instance::MAPPINGS,
            mount.load(Ordering::Relaxed),
            inode.load(Ordering::Relaxed)
        );
        path.extend_from_slice(name.as_bytes());
        let flags = libc::O_RDWR | create | libc::O_CLOEXEC;
        let arguments =
            [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags as usize, 0o600, 0, 0];
        let first = descriptors::own_first() as usize;
        // SAFETY: the path ends with a zero byte; the first descriptor is closed again.
        unsafe {
            let fd = checked(libc::SYS_openat, arguments)?;
            let moved = [fd, libc::F_DUPFD_CLOEXEC as usize, first, 0, 0, 0];
            let own = checked(libc::SYS_fcntl, moved);
            checked(libc::SYS_close, [fd, 0, 0, 0, 0, 0])?;
            own.map(|fd| Self(fd as c_int))
        }
    }

    fn call(&self, number: i64, a: usize, b: usize, c: usize) -> Result<usize, i32> {
        // SAFETY: calls on a descriptor of ours, without addresses.
        unsafe { checked(number, [self.0 as usize, a, b, c, 0, 0]) }
    }

    /// Bytes of the memory, from this offset of the file on; what is beyond its end is zero.
    pub(crate) fn read(&self, offset: off64_t, to: &mut [u8]) -> Result<(), i32> {
        let mut done = 0;
        while done < to.len() {
            let (rest, at) = (&mut to[done..], PAGES_AT + offset + done as i64);
            let count =
                self.call(libc::SYS_pread64, rest.as_mut_ptr() as usize, rest.len(), at as usize)?;
            if count == 0 {
                rest.fill(0);
                break;
            }
            done += count;
        }
        Ok(())
    }

    /// Waits until no other process reads it in or writes it back.
    pub(crate) fn turn(&self) -> Result<Turn<'_>, i32> {
        set_turn(self.0, libc::F_WRLCK)?;
        Ok(Turn(self))
    }

    pub(crate) fn map(
        &self,
        at: *mut c_void,
        length: size_t,
        flags: c_int,
        (open, offset): (Open, off64_t),
        is_new: bool,
    ) -> Result<*mut c_void, i32> {
        let _turn = self.turn()?;
        let pages = length.div_ceil(PAGE);
        let first = offset as usize / PAGE;
        if first + pages > PAGES_AT as usize {
            return Err(libc::EFBIG);
        }
        if is_new
            && self.call(libc::SYS_flock, (libc::LOCK_EX | libc::LOCK_NB) as usize, 0, 0).is_ok()
        {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            self.call(libc::SYS_fallocate, mode as usize, 0, PAGES_AT as usize)?;
        }
        self.call(libc::SYS_flock, libc::LOCK_SH as usize, 0, 0)?;
        let end = PAGES_AT + offset + (pages * PAGE) as i64;
        if (self.length()? as i64) < end {
            self.call(libc::SYS_ftruncate, end as usize, 0, 0)?;
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: as the program says.
        let mapped = unsafe { plain(at, length, protection, flags, self.0, PAGES_AT + offset) };
        if mapped == libc::MAP_FAILED {
            return Err(crate::guard::errno());
        }
        let bytes = mapped.cast::<u8>();
        let mut known = vec![0u8; pages];
        let (list, at) = (known.as_mut_ptr() as usize, first);
        if let Err(error) = self.call(libc::SYS_pread64, list, pages, at) {
            unmap(mapped, length);
            return Err(error);
        }
        // Runs of pages that nobody has read yet.
        let mut page = 0;
        while page < pages {
            let run = known[page..].iter().take_while(|known| **known == 0).count();
            if run == 0 {
                page += 1;
                continue;
            }
            let from = page * PAGE;
            // Whole pages: what is behind the end of the file reads as zeros.
            let count = run * PAGE;
            // SAFETY: within the mapping, which ends with a page.
            let target = unsafe { std::slice::from_raw_parts_mut(bytes.add(from), count) };
            match remote::with(open, |file| file.read_at(target, (offset + from as i64) as u64)) {
                Ok(read) => target[read..].fill(0),
                Err(error) => {
                    unmap(mapped, length);
                    return Err(error);
                }
            }
            known[page..page + run].fill(1);
            page += run;
        }
        self.call(libc::SYS_pwrite64, known.as_ptr() as usize, pages, first)?;
        Ok(mapped)
    }

    /// Which of so many pages from this one on were read: a byte for each.
    fn known(&self, first: usize, pages: usize) -> Result<Vec<u8>, i32> {
        let mut known = vec![0u8; pages.min((PAGES_AT as usize).saturating_sub(first))];
        let read = self.call(libc::SYS_pread64, known.as_mut_ptr() as usize, known.len(), first)?;
        known.truncate(read);
        Ok(known)
    }

    /// Bytes of the file are these now.
    pub(crate) fn write(&self, offset: i64, data: &[u8]) -> Result<(), i32> {
        let _turn = self.turn()?;
        let first = offset as usize / PAGE;
        let pages = (offset as usize + data.len()).div_ceil(PAGE) - first;
        for (page, known) in self.known(first, pages)?.into_iter().enumerate() {
            let start = ((first + page) * PAGE).max(offset as usize);
            let end = ((first + page + 1) * PAGE).min(offset as usize + data.len());
            if known != 0 && start < end {
                let part = &data[start - offset as usize..end - offset as usize];
                let at = PAGES_AT as usize + start;
                self.call(libc::SYS_pwrite64, part.as_ptr() as usize, part.len(), at)?;
            }
        }
        Ok(())
    }

    /// All bytes from here on are zero now.
    pub(crate) fn clear(&self, from: i64) -> Result<(), i32> {
        let _turn = self.turn()?;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let from = PAGES_AT as usize + from as usize;
        let rest = (i64::MAX as usize).saturating_sub(from);
        self.call(libc::SYS_fallocate, mode as usize, from, rest).map(drop)
    }

    /// Reads all pages anew that were read before.
    pub(crate) fn read_anew(&self, open: Open) -> Result<(), i32> {
        const AT_ONCE: usize = 64;
        let _turn = self.turn()?;
        let end = self.length()?.saturating_sub(PAGES_AT as usize).div_ceil(PAGE);
        let mut bytes = vec![0u8; AT_ONCE * PAGE];
        for first in (0..end).step_by(AT_ONCE) {
            let known = self.known(first, AT_ONCE.min(end - first))?;
            if known.iter().all(|known| *known == 0) {
                continue;
            }
            let at = (first * PAGE) as u64;
            let read = remote::with(open, |file| file.read_at(&mut bytes, at))?;
            bytes[read..].fill(0);
            for (page, _) in known.iter().enumerate().filter(|(_, known)| **known != 0) {
                let part = &bytes[page * PAGE..][..PAGE];
                let to = PAGES_AT as usize + (first + page) * PAGE;
                self.call(libc::SYS_pwrite64, part.as_ptr() as usize, PAGE, to)?;
            }
        }
        Ok(())
    }

    /// Bytes of the file that it is.
    fn length(&self) -> Result<usize, i32> {
        // SAFETY: all zero is a valid `stat`, and the call fills it.
        let mut status: libc::stat = unsafe { std::mem::zeroed() };
        self.call(libc::SYS_fstat, &raw mut status as usize, 0, 0)?;
        Ok(status.st_size as usize)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.call(libc::SYS_close, 0, 0, 0);
    }
}

/// Held while a shared mapping is read in or written back.
pub(crate) struct Turn<'a>(&'a Shared);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let _ = set_turn(self.0.0, libc::F_UNLCK);
    }
}

fn set_turn(fd: c_int, kind: c_int) -> Result<(), i32> {
    // SAFETY: all zero is a valid `struct flock`.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_len) = (kind as _, 1);
    let arguments = [fd as usize, libc::F_OFD_SETLKW as usize, &raw const lock as usize, 0, 0, 0];
    loop {
        // SAFETY: the structure outlives the call.
        match unsafe { checked(libc::SYS_fcntl, arguments) } {
            // A signal that waits until we are done.
            Err(libc::EINTR) => {}
            done => return done.map(drop),
        }
    }
}
