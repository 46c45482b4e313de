//! The memory behind shared mappings of remote files: for each file that is mapped a file in the run's
//! directory, which all processes of the run map (`instance::memory`).

use super::maps::{PAGE, plain, unmap};
use crate::descriptors::{self, Open};
use crate::guard::checked;
use crate::remote;
use libc::{c_int, c_void, off64_t, size_t};
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use towline_instance::memory::{self, Turn};

/// True once a process of the run has made a shared mapping.
pub(crate) fn is_any() -> bool {
    crate::start::state().is_some_and(|state| state.mapped().load(Ordering::Acquire) != 0)
}

/// The memory that stands for a file in all processes of the run: a file whose first part tells,
/// with a byte for each page, what was read. It stays locked while somebody maps it; the first who
/// does reads anew.
pub(crate) struct Shared {
    fd: c_int,
    mount: usize,
    inode: u64,
}

const PAGES_AT: i64 = memory::PAGES_AT as i64;

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
        let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
        Self::named(mount, open.entry.inode.load(Ordering::Relaxed), create)
    }

    /// That of mappings which a child has from its parent, who has it mapped still.
    pub(super) fn again(mount: usize, inode: u64) -> Result<Self, i32> {
        let shared = Self::named(mount, inode, 0)?;
        shared.call(libc::SYS_flock, libc::LOCK_SH as usize, 0, 0)?;
        Ok(shared)
    }

    pub(super) fn is_of(&self, mount: usize, inode: u64) -> bool {
        self.mount == mount && self.inode == inode
    }

    fn named(mount: usize, inode: u64, create: c_int) -> Result<Self, i32> {
        let mut path = crate::start::directory().to_vec();
        let name = memory::name(mount as u32, inode);
        path.extend_from_slice(format!("/{}/{name}\0", towline_instance::MAPPINGS).as_bytes());
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
            own.map(|fd| Self { fd: fd as c_int, mount, inode })
        }
    }

    fn call(&self, number: i64, a: usize, b: usize, c: usize) -> Result<usize, i32> {
        // SAFETY: calls on a descriptor of ours, without addresses.
        unsafe { checked(number, [self.fd as usize, a, b, c, 0, 0]) }
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
        // SAFETY: ours, and open as long as this lives.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        Turn::take(fd).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
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
        self.prepare(offset, pages * PAGE, is_new)?;
        let mapped = self.place(at, length, libc::PROT_READ | libc::PROT_WRITE, flags, offset);
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

    /// Makes room for a mapping of so many bytes from this offset of the file on. The first one of a
    /// process (`is_new`) notes that it has one, and finds nothing read when it is the first of all.
    fn prepare(&self, offset: off64_t, length: usize, is_new: bool) -> Result<(), i32> {
        let end = (offset as usize).checked_add(length).ok_or(libc::EOVERFLOW)?;
        if end / PAGE > PAGES_AT as usize {
            return Err(libc::EFBIG);
        }
        if is_new
            && self.call(libc::SYS_flock, (libc::LOCK_EX | libc::LOCK_NB) as usize, 0, 0).is_ok()
        {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            self.call(libc::SYS_fallocate, mode as usize, 0, i64::MAX as usize)?;
        }
        self.call(libc::SYS_flock, libc::LOCK_SH as usize, 0, 0)?;
        let end = PAGES_AT as usize + end;
        if self.length()? < end {
            self.call(libc::SYS_ftruncate, end, 0, 0)?;
        }
        Ok(())
    }

    /// As [`Shared::map`], for what is read when it is touched: what remains is [`Shared::place`].
    pub(super) fn begin(&self, offset: off64_t, length: usize, is_new: bool) -> Result<(), i32> {
        let _turn = self.turn()?;
        self.prepare(offset, length, is_new)
    }

    /// Makes room for a mapping that becomes longer.
    pub(super) fn reach(&self, offset: off64_t, length: usize) -> Result<(), i32> {
        self.begin(offset, length, false)
    }

    /// The kernel's mapping of it.
    pub(super) fn place(
        &self,
        at: *mut c_void,
        length: size_t,
        protection: c_int,
        flags: c_int,
        offset: off64_t,
    ) -> *mut c_void {
        // SAFETY: as the program says.
        unsafe { plain(at, length, protection, flags, self.fd, PAGES_AT + offset) }
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
