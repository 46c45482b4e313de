//! The memory behind shared mappings of remote files: for each mapped file, a file in the run's directory
//! that all processes of the run map (`instance::memory`). The library itself never touches mappings of it:
//! it would wait for a page that is missing, and may be the one that has to fill it.

mod renewal;

use super::handle::Handle;
use super::maps::{Which, page_bytes, plain, which};
use crate::descriptors::{Open, Own};
use crate::guard::checked;
use crate::{cache, common, limits, own, remote};
use libc::{c_int, c_void, off64_t, size_t};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;
use towline_client::File;
use towline_instance::memory::{self, AT_ONCE, Access, Turn, runs};

/// Returns true once a process of the run has made a shared mapping.
pub(crate) fn is_any() -> bool {
    made() != 0
}

/// Returns how many shared mappings the processes of the run have made, or begun to make: changes before a file is read in.
pub(crate) fn made() -> u32 {
    crate::start::state().map_or(0, |state| state.mapped().load(Ordering::SeqCst))
}

/// The memory that stands for a file in all processes of the run. It stays locked (`flock`) while a process
/// maps it; the first process that does reads the file anew.
pub(crate) struct Shared {
    /// Changes when the program wants the number.
    fd: AtomicI32,
    mount: usize,
    inode: u64,
    /// The inode of the memory itself: after a loss, there is another memory of the same name.
    number: u64,
    /// Held by the thread that has the turn.
    mine: Mutex<()>,
}

const PAGES_AT: usize = memory::PAGES_AT as usize;
const ORIGINALS_AT: usize = memory::ORIGINALS_AT as usize;
/// Length of the longest file that fits, in bytes.
const LENGTH_MAX: usize = memory::BYTES_MAX as usize - (1 << 20);

/// Longer than a tick of a server's clock, in milliseconds.
const TICK_MS: u64 = 1000;

impl Shared {
    /// Opens the memory of a file, and makes it if needed.
    pub(crate) fn of(open: Open) -> Result<Self, i32> {
        let (mount, inode) = which(open);
        let shared = loop {
            let shared = Self::named(mount, inode, libc::O_CREAT)?;
            if !shared.is_lost() {
                break shared;
            }
            // Whoever takes it away is doing so now, or was killed.
            shared.lose()?;
        };
        if let Some(state) = crate::start::state() {
            // Never zero again.
            let next = |made: u32| Some(made.checked_add(1).unwrap_or(1));
            let _ = state.mapped().fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        }
        Ok(shared)
    }

    /// Opens the memory of a file. Fails with `ENOENT` if no process of the run has mapped it.
    pub(crate) fn existing((mount, inode): Which) -> Result<Self, i32> {
        let shared = Self::named(mount, inode, 0)?;
        if shared.is_lost() { Err(libc::ENOENT) } else { Ok(shared) }
    }

    /// Opens the memory of mappings that a child has from its parent, which still maps it.
    pub(super) fn again(&self) -> Result<Self, i32> {
        let shared = Self::named(self.mount, self.inode, 0)?;
        if shared.number != self.number {
            return Err(libc::ESTALE);
        }
        shared.call(libc::SYS_flock, libc::LOCK_SH as usize, 0, 0)?;
        Ok(shared)
    }

    /// Returns true if both are the same memory.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.number == other.number
    }

    fn path(mount: usize, inode: u64) -> Vec<u8> {
        let mut path = crate::start::directory().to_vec();
        let name = memory::name(mount as u32, inode);
        path.extend_from_slice(format!("/{}/{name}\0", towline_instance::MAPPINGS).as_bytes());
        path
    }

    fn named(mount: usize, inode: u64, create: c_int) -> Result<Self, i32> {
        let path = Self::path(mount, inode);
        let first = open_file(&path, create)?;
        if create != 0 {
            // If another user has made it, this fails, and that user has done it already.
            let _ = common::open_to_all(&path);
        }
        let fd = own::duplicate(first, Own::Memory);
        close(first);
        let fd = fd?;
        let mut shared = Self { fd: fd.into(), mount, inode, number: 0, mine: Mutex::new(()) };
        shared.number = shared.status()?.st_ino;
        Ok(shared)
    }

    fn fd(&self) -> c_int {
        self.fd.load(Ordering::Relaxed)
    }

    /// Changes the descriptor if the program wants its number.
    pub(super) fn move_from(&self, fd: c_int) -> Result<(), i32> {
        if self.fd() == fd {
            let _mine = self.mine.lock().map_err(|_| libc::EIO)?;
            self.fd.store(own::duplicate(fd, Own::Memory)?, Ordering::Relaxed);
            own::close(fd);
        }
        Ok(())
    }

    fn call(&self, number: i64, a: usize, b: usize, c: usize) -> Result<usize, i32> {
        // SAFETY: the descriptor is the library's. Addresses in the arguments are of memory that outlives
        // the call and has the length passed to it.
        unsafe { checked(number, [self.fd() as usize, a, b, c, 0, 0]) }
    }

    /// Waits until no other thread or process reads the memory in or writes it back.
    ///
    /// # Errors
    /// `ESTALE` if the memory was taken away.
    fn turn(&self) -> Result<(Turn<'_>, MutexGuard<'_, ()>), i32> {
        let turn = self.turn_in_any_case()?;
        if self.is_lost() { Err(libc::ESTALE) } else { Ok(turn) }
    }

    /// The turn belongs to the open file description, which threads share: it ends before the lock does.
    fn turn_in_any_case(&self) -> Result<(Turn<'_>, MutexGuard<'_, ()>), i32> {
        let mine = self.mine.lock().map_err(|_| libc::EIO)?;
        // SAFETY: the descriptor is the library's, and open as long as `self` lives.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd()) };
        let turn = Turn::take(fd).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        Ok((turn, mine))
    }

    /// Returns true if the memory was taken away.
    pub(super) fn is_lost(&self) -> bool {
        // If its own file cannot be read, nobody has taken it away.
        memory::is_set(self, memory::IS_LOST_AT) == Ok(true)
    }

    /// Takes the memory away and removes its name, see [`memory::lose`].
    pub(super) fn lose(&self) -> Result<Option<bool>, i32> {
        let _turn = self.turn_in_any_case()?;
        let is_unwritten = memory::lose(self, self.pages()?)?;
        if self.status()?.st_nlink > 0 {
            let path = Self::path(self.mount, self.inode);
            let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0, 0, 0, 0];
            // SAFETY: the path ends with a zero byte.
            unsafe { checked(libc::SYS_unlinkat, arguments)? };
        }
        Ok(is_unwritten)
    }

    /// Reads in the pages of a new mapping that no process has read yet. [`Shared::place`] must follow.
    pub(super) fn read_in(
        &self,
        open: Open,
        (offset, length): (off64_t, usize),
        is_new: bool,
    ) -> Result<(), i32> {
        let _turn = self.turn()?;
        self.prepare(open, (offset, length), is_new)?;
        let prepared = Instant::now();
        let keeps = memory::is_set(self, memory::KEEPS_AT)?;
        let first = offset as usize / page_bytes();
        let known = self.known(first, length.div_ceil(page_bytes()))?;
        let mut bytes = vec![0; AT_ONCE.min(known.len()) * page_bytes()];
        let mut is_at_end = false;
        for run in runs(&known, |known| known == 0) {
            // Whole pages: bytes beyond the end of the file read as zeros.
            let (bytes, at) =
                (&mut bytes[..run.len() * page_bytes()], (first + run.start) * page_bytes());
            if is_at_end {
                // Programs often map far more than the file has. The rest takes neither memory nor
                // requests.
                for part in [PAGES_AT, ORIGINALS_AT] {
                    self.punch(part + at, bytes.len())?;
                }
            } else {
                let read = memory::read_up_to_end(bytes, |part, done| {
                    cache::read_to_share(open, part, at as u64 + done, prepared)
                })?;
                is_at_end = read < bytes.len();
                bytes[read..].fill(0);
                self.put((PAGES_AT + at) as u64, bytes)?;
                if keeps {
                    self.put((ORIGINALS_AT + at) as u64, bytes)?;
                }
            }
            self.put((first + run.start) as u64, &vec![1; run.len()])?;
        }
        Ok(())
    }

    /// Makes room for a mapping of `length` bytes from `offset` of the file on, and reads its known pages again if
    /// others have changed the file. The first mapping of a process (`is_new`) takes the lock that says so, and
    /// clears the memory if no other process maps it.
    fn prepare(
        &self,
        open: Open,
        (offset, length): (off64_t, usize),
        is_new: bool,
    ) -> Result<(), i32> {
        self.make_room(offset, length, is_new)?;
        memory::renew_interrupted(self, || self.pages(), |to, at| read(open, to, at))?;
        let first = offset as usize / page_bytes();
        let known = self.known(first, length.div_ceil(page_bytes()))?;
        let is_any = known.iter().any(|known| *known != 0);
        let is_whole = first == 0 && known.len() >= self.pages()?;
        if !is_any && !is_whole {
            return Ok(());
        }
        // What came with opening the file will do for pages that are read after it.
        let attr = if is_any { remote::with(open, File::stat)? } else { remote::stat(open)? };
        let mut seen = [[0; 8]; 2];
        self.get(memory::CHANGE_AT, seen.as_flattened_mut())?;
        let [change, first_seen] = seen.map(u64::from_ne_bytes);
        let now = memory::milliseconds();
        let is_same = change == attr.change;
        if is_same && first_seen == 0 {
            return Ok(());
        }
        if is_any && renewal::is_short(&known) {
            memory::renew(self, first, &known, |to, at| read(open, to, at))?;
        }
        if is_whole {
            // A second change in the same tick of the server's clock has the same number.
            let is_settled = is_same && now.saturating_sub(first_seen) > TICK_MS;
            let first_seen = match is_settled {
                true => 0,
                false if is_same => first_seen,
                false => now,
            };
            self.put(
                memory::CHANGE_AT,
                [attr.change, first_seen].map(u64::to_ne_bytes).as_flattened(),
            )?;
        }
        Ok(())
    }

    /// Makes room for a mapping that grows.
    pub(super) fn reach(&self, offset: off64_t, length: usize) -> Result<(), i32> {
        let _turn = self.turn()?;
        self.make_room(offset, length, false)
    }

    fn make_room(&self, offset: off64_t, length: usize, is_new: bool) -> Result<(), i32> {
        let end = (offset as usize).checked_add(length).ok_or(libc::EOVERFLOW)?;
        // Going beyond the limit would raise `SIGXFSZ`, in a program that may only read.
        let is_allowed = limits::file_bytes().is_none_or(|limit| (PAGES_AT + end) as u64 <= limit);
        if end > LENGTH_MAX || !is_allowed {
            return Err(libc::EFBIG);
        }
        // What a killed process has left is written back by whoever comes to it first.
        if is_new
            && self.call(libc::SYS_flock, (libc::LOCK_EX | libc::LOCK_NB) as usize, 0, 0).is_ok()
            && !memory::is_unwritten(self, self.pages()?)?
        {
            // Only as far as the memory can reach: file systems refuse lengths that they could not hold.
            self.punch(0, PAGES_AT + LENGTH_MAX)?;
        }
        self.call(libc::SYS_flock, libc::LOCK_SH as usize, 0, 0)?;
        let end = PAGES_AT + end;
        if self.length()? < end {
            self.set_length(end as u64)?;
        }
        Ok(())
    }

    /// [`Shared::read_in`] for pages that are read when they are touched. [`Shared::place`] must follow.
    pub(super) fn begin(
        &self,
        open: Open,
        part: (off64_t, usize),
        is_new: bool,
    ) -> Result<(), i32> {
        let _turn = self.turn()?;
        self.prepare(open, part, is_new)
    }

    /// Maps the memory by an opening of its file that has no locks: a child keeps what its parent had mapped, so the turn of a
    /// parent that was killed would never end.
    pub(super) fn place(
        &self,
        at: *mut c_void,
        length: size_t,
        protection: c_int,
        flags: c_int,
        offset: off64_t,
    ) -> *mut c_void {
        let unlocked = self.opened_again().ok();
        let fd = unlocked.unwrap_or_else(|| self.fd());
        // SAFETY: the program passes valid arguments.
        let placed = unsafe { plain(at, length, protection, flags, fd, PAGES_AT as i64 + offset) };
        unlocked.into_iter().for_each(close);
        placed
    }

    /// Opens the file of the memory once more.
    fn opened_again(&self) -> Result<c_int, i32> {
        let fd = open_file(&Self::path(self.mount, self.inode), 0)?;
        match status(fd) {
            Ok(status) if status.st_ino == self.number => Ok(fd),
            _ => {
                close(fd);
                Err(libc::ESTALE)
            }
        }
    }

    /// Returns a byte for each of `pages` pages from `first` on, which tells whether the page was read.
    fn known(&self, first: usize, pages: usize) -> Result<Vec<u8>, i32> {
        let mut known = vec![0u8; pages.min((memory::PAGES_MAX as usize).saturating_sub(first))];
        self.get(first as u64, &mut known)?;
        Ok(known)
    }

    /// Keeps the originals of pages from here on, as a process may store to them.
    pub(super) fn keep_originals(&self) -> Result<(), i32> {
        let _turn = self.turn()?;
        if memory::is_set(self, memory::KEEPS_AT)? {
            return Ok(());
        }
        let known = self.known(0, self.pages()?)?;
        let mut bytes = vec![0; AT_ONCE.min(known.len()) * page_bytes()];
        for run in runs(&known, |known| known != 0) {
            let (bytes, at) = (&mut bytes[..run.len() * page_bytes()], run.start * page_bytes());
            self.get((PAGES_AT + at) as u64, bytes)?;
            self.put((ORIGINALS_AT + at) as u64, bytes)?;
        }
        self.put(memory::KEEPS_AT, &[1])
    }

    /// Writes back what was stored to `length` bytes from `offset` on, up to the end of the file.
    pub(super) fn write_back(
        &self,
        file: &Handle,
        (offset, length): (i64, usize),
    ) -> Result<(), i32> {
        let _turn = self.turn()?;
        // It would write what lies between what was stored as it was before.
        let read = |to: &mut [u8], at| file.with(|file| read_from(file, to, at));
        memory::renew_interrupted(self, || self.pages(), read)?;
        let first = offset as usize / page_bytes();
        memory::write_back(self, file, first..first + length.div_ceil(page_bytes()))
    }

    /// Writes to the file by `call`, which returns how many bytes of `data` it has written and where, and updates
    /// the memory. It writes at `at`, if that is known. Nobody writes back meanwhile what the memory had there before.
    ///
    /// # Errors
    /// Those of `call`. If the memory fails, mappings keep what they had.
    pub(crate) fn writing(
        &self,
        data: &[u8],
        at: Option<u64>,
        call: impl FnOnce() -> Result<(usize, i64), i32>,
    ) -> Result<(usize, i64), i32> {
        let within = at.map_or(0..u64::MAX, |at| at..at.saturating_add(data.len() as u64));
        self.changing(within, call, |&(count, at)| self.update(at, &data[..count.min(data.len())]))
    }

    /// Makes bytes of the file zero by `call`, and those of the memory.
    ///
    /// # Errors
    /// Those of `call`. If the memory fails, mappings keep what they had.
    pub(crate) fn zeroing(
        &self,
        range: std::ops::Range<u64>,
        call: impl FnOnce() -> Result<(), i32>,
    ) -> Result<(), i32> {
        self.changing(range.clone(), call, |()| {
            let zeroes = vec![0; AT_ONCE * page_bytes()];
            let end = range.end.min((self.pages()? * page_bytes()) as u64);
            (range.start..end).step_by(zeroes.len()).try_for_each(|at| {
                self.update(at as i64, &zeroes[..zeroes.len().min((end - at) as usize)])
            })
        })
    }

    /// [`memory::changing`], also of a memory that was taken away, which is left alone.
    fn changing<T>(
        &self,
        within: std::ops::Range<u64>,
        call: impl FnOnce() -> Result<T, i32>,
        update: impl FnOnce(&T) -> Result<(), i32>,
    ) -> Result<T, i32> {
        match self.turn() {
            Ok(_turn) => memory::changing(self, within, call, update),
            Err(_) => call(),
        }
    }

    /// Updates the memory after `data` was written to the file. Whoever does so has the turn.
    fn update(&self, offset: i64, data: &[u8]) -> Result<(), i32> {
        let keeps = memory::is_set(self, memory::KEEPS_AT)?;
        let (start, end) = (offset as usize, offset as usize + data.len());
        let first = start / page_bytes();
        let known = self.known(first, end.div_ceil(page_bytes()) - first)?;
        for run in runs(&known, |known| known != 0) {
            let from = start.max((first + run.start) * page_bytes());
            let to = end.min((first + run.end) * page_bytes());
            let part = &data[from - start..to - start];
            self.put((PAGES_AT + from) as u64, part)?;
            if keeps {
                self.put((ORIGINALS_AT + from) as u64, part)?;
            }
        }
        Ok(())
    }

    /// Changes the length of the file by `call`; `now` tells the length before. What was cut off, or is new, is zero in the
    /// memory from the offset on that is returned. Whoever maps the file after the call stores to what is there then, so
    /// nobody reads it in before this is done.
    ///
    /// # Errors
    /// Those of `now` and `call`. If the memory fails, mappings keep what they had.
    pub(super) fn resizing<T>(
        &self,
        length: u64,
        now: impl FnOnce() -> Result<u64, i32>,
        call: impl FnOnce() -> Result<T, i32>,
    ) -> Result<(T, u64), i32> {
        let call = || {
            let before = now()?;
            Ok((call()?, before.min(length)))
        };
        self.changing(0..u64::MAX, call, |(_, from)| self.zero_from(*from))
    }

    /// Makes all bytes from here on zero.
    pub(super) fn clear(&self, from: u64) -> Result<(), i32> {
        let _turn = self.turn()?;
        self.zero_from(from)
    }

    fn zero_from(&self, from: u64) -> Result<(), i32> {
        let from = usize::try_from(from).unwrap_or(LENGTH_MAX).min(LENGTH_MAX);
        for part in [PAGES_AT, ORIGINALS_AT] {
            let rest = LENGTH_MAX - from;
            if rest > 0 {
                self.punch(part + from, rest)?;
            }
        }
        Ok(())
    }

    /// Punches a hole into the memory: this part reads as zeros, and takes no memory.
    fn punch(&self, at: usize, length: usize) -> Result<(), i32> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        self.call(libc::SYS_fallocate, mode as usize, at, length).map(drop)
    }

    /// Returns the number of pages that the memory has room for.
    fn pages(&self) -> Result<usize, i32> {
        Ok(self.length()?.saturating_sub(PAGES_AT) / page_bytes())
    }

    /// Returns the length of the file that holds the memory, in bytes.
    fn length(&self) -> Result<usize, i32> {
        Ok(self.status()?.st_size as usize)
    }

    fn status(&self) -> Result<libc::stat, i32> {
        status(self.fd())
    }
}

/// Opens the file of a memory by its path, which ends with a zero byte.
fn open_file(path: &[u8], create: c_int) -> Result<c_int, i32> {
    let flags = (libc::O_RDWR | create | libc::O_CLOEXEC) as usize;
    let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0o600, 0, 0];
    // SAFETY: the path ends with a zero byte.
    unsafe { checked(libc::SYS_openat, arguments) }.map(|fd| fd as c_int)
}

/// Closes a descriptor that is known to nobody else.
fn close(fd: c_int) {
    // SAFETY: it is ours.
    let _ = unsafe { checked(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) };
}

fn status(fd: c_int) -> Result<libc::stat, i32> {
    // SAFETY: all zero is a valid `stat`.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    let to = &raw mut status as usize;
    // SAFETY: the call fills the structure, which outlives it.
    unsafe { checked(libc::SYS_fstat, [fd as usize, to, 0, 0, 0, 0])? };
    Ok(status)
}

/// [`read_from`] an open file of the program.
pub(crate) fn read(open: Open, to: &mut [u8], at: usize) -> Result<usize, i32> {
    remote::with(open, |file| read_from(file, to, at))
}

/// Reads from `at` on until `to` is full or the file ends.
pub(crate) fn read_from(
    file: &File,
    to: &mut [u8],
    at: usize,
) -> Result<usize, towline_client::Error> {
    memory::read_up_to_end(to, |part, done| file.read_at(part, at as u64 + done))
}

impl Access for Shared {
    type Error = i32;

    fn get(&self, at: u64, to: &mut [u8]) -> Result<(), i32> {
        let mut done = 0;
        while done < to.len() {
            let (rest, from) = (&mut to[done..], at as usize + done);
            let count =
                self.call(libc::SYS_pread64, rest.as_mut_ptr() as usize, rest.len(), from)?;
            if count == 0 {
                rest.fill(0);
                break;
            }
            done += count;
        }
        Ok(())
    }

    fn put(&self, at: u64, bytes: &[u8]) -> Result<(), i32> {
        let mut done = 0;
        while done < bytes.len() {
            let (rest, to) = (&bytes[done..], at as usize + done);
            done += self.call(libc::SYS_pwrite64, rest.as_ptr() as usize, rest.len(), to)?;
        }
        Ok(())
    }

    fn set_length(&self, length: u64) -> Result<(), i32> {
        self.call(libc::SYS_ftruncate, length as usize, 0, 0).map(drop)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        own::close(self.fd());
    }
}
