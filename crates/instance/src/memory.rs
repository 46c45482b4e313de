//! The memory behind remote files that are mapped shared, as all processes of a run see it: one local file
//! per remote file, in the run's folder [`crate::MAPPINGS`].
//!
//! The file's first part holds one byte per page that tells whether the page was read. The originals follow
//! (the pages as the remote file holds them), which are kept once a process may store to pages; then the
//! pages. A page that differs from its original must be written back, by whichever process comes to it
//! first. A process holds the file's [`Turn`] while it reads pages in, changes them other than by stores,
//! or writes them back. Each process that maps the file holds a shared lock on it (`flock`); the first one
//! clears the file.
//!
//! If the remote file is lost in a restart of its server, the memory is taken away ([`lose`]), and its name is
//! removed: who maps the file again gets new memory.
#![allow(unsafe_code)]

mod renewal;

use renewal::Changing;
pub use renewal::{Renewal, renew, renew_interrupted};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{SystemTime, UNIX_EPOCH};
use towline_mem::page_bytes;
use towline_wire::parts::fit_together;

/// Maximum length of a file, 256 GiB: a multiple of all page sizes.
pub const BYTES_MAX: u64 = 256 << 30;
/// Maximum number of pages: that of the smallest page size.
pub const PAGES_MAX: u64 = (64 << 20) - 64;
/// Offset of the byte that tells whether originals are kept.
pub const KEEPS_AT: u64 = PAGES_MAX;
/// Offset of the byte that tells whether the file is locked by programs that map it. Others may then change
/// other bytes of the same page, so single bytes are compared with the originals.
pub const IS_LOCKED_AT: u64 = PAGES_MAX + 1;
/// Offset of the byte that tells whether a process has locked the file and not read it again since.
pub const IS_OLD_AT: u64 = PAGES_MAX + 2;
/// Offset of the byte that tells whether the memory was taken away.
pub const IS_LOST_AT: u64 = PAGES_MAX + 3;
/// Offset of the [`towline_wire::Attr::change`] that the remote file had before its known pages were last read, 8
/// bytes, and of when that was seen first, 8 bytes: in milliseconds by this machine's clock; zero once the pages
/// were read again some time after that.
pub const CHANGE_AT: u64 = PAGES_MAX + 8;
/// Offset of a [`Changing`]: three numbers of 8 bytes.
const CHANGING_AT: u64 = PAGES_MAX + 24;
/// Offset of the originals.
pub const ORIGINALS_AT: u64 = PAGES_MAX + 64;
/// Offset of the pages.
pub const PAGES_AT: u64 = ORIGINALS_AT + BYTES_MAX;

/// Returns the name of the memory file for an inode of a mount.
#[must_use]
pub fn name(mount: u32, inode: u64) -> String {
    format!("{mount}-{inode}")
}

/// Returns mount and inode of the file that has this [`name`].
#[must_use]
pub fn parse_name(name: &str) -> Option<(u32, u64)> {
    let (mount, inode) = name.split_once('-')?;
    Some((mount.parse().ok()?, inode.parse().ok()?))
}

/// Yields the runs of pages that differ, as byte ranges. Both slices are equally long; the last page may be
/// partial.
pub fn changed<'a>(now: &'a [u8], was: &'a [u8]) -> impl Iterator<Item = Range<usize>> + 'a {
    let length = now.len().min(was.len());
    let differs = move |page: usize| {
        let bytes = page * page_bytes()..length.min((page + 1) * page_bytes());
        now[bytes.clone()] != was[bytes]
    };
    let pages = length.div_ceil(page_bytes());
    let mut next = 0;
    std::iter::from_fn(move || {
        let first = (next..pages).find(|page| differs(*page))?;
        next = (first..pages).find(|page| !differs(*page)).unwrap_or(pages);
        Some(first * page_bytes()..length.min(next * page_bytes()))
    })
}

/// Parts on neighbouring pages are written as one if fewer bytes than these lie between them: numbers often end
/// in bytes that stay the same.
const JOINED_BYTES: usize = 64;

/// Returns what to write back: of each changed page the bytes from the first to the last one that differs, as
/// others may store to the rest of it, or with `single` only the bytes that differ.
fn to_write(now: &[u8], was: &[u8], single: bool) -> Vec<Range<usize>> {
    let differs = |at: usize| now[at] != was[at];
    if single {
        return changed(now, was).flat_map(|pages| bytes(pages, differs)).collect();
    }
    let mut parts: Vec<Range<usize>> = Vec::new();
    for pages in changed(now, was) {
        for at in pages.clone().step_by(page_bytes()) {
            let page = at..(at + page_bytes()).min(pages.end);
            let Some(first) = page.clone().find(|at| differs(*at)) else { continue };
            let end = page.rev().find(|at| differs(*at)).map_or(first, |last| last + 1);
            match parts.last_mut() {
                Some(part) if first - part.end < JOINED_BYTES => part.end = end,
                _ => parts.push(first..end),
            }
        }
    }
    parts
}

/// Yields the runs of bytes for which `holds`.
fn bytes(
    within: Range<usize>,
    holds: impl Fn(usize) -> bool,
) -> impl Iterator<Item = Range<usize>> {
    let mut next = within.start;
    std::iter::from_fn(move || {
        let first = (next..within.end).find(|at| holds(*at))?;
        next = (first..within.end).find(|at| !holds(*at)).unwrap_or(within.end);
        Some(first..next)
    })
}

/// Read and write access to the memory file.
pub trait Access {
    /// The error type.
    type Error;

    /// Reads bytes from offset `at` on; bytes beyond the end are zero.
    ///
    /// # Errors
    /// Those of the file.
    fn get(&self, at: u64, to: &mut [u8]) -> Result<(), Self::Error>;

    /// Writes `bytes` at offset `at`.
    ///
    /// # Errors
    /// Those of the file.
    fn put(&self, at: u64, bytes: &[u8]) -> Result<(), Self::Error>;

    /// Sets the length of the file.
    ///
    /// # Errors
    /// Those of the file.
    fn set_length(&self, length: u64) -> Result<(), Self::Error>;
}

/// Returns true if the byte at this offset, such as [`KEEPS_AT`], says so.
///
/// # Errors
/// Those of the file.
pub fn is_set<E>(memory: &impl Access<Error = E>, at: u64) -> Result<bool, E> {
    let mut byte = [0];
    memory.get(at, &mut byte)?;
    Ok(byte[0] != 0)
}

/// The remote file behind the memory.
pub trait Remote {
    /// The error type.
    type Error;

    /// Returns its length in bytes.
    ///
    /// # Errors
    /// Those of the server.
    fn size(&self) -> Result<u64, Self::Error>;

    /// Writes all of these parts, each at its offset, in any order. Parts may be empty.
    ///
    /// # Errors
    /// Those of the server. Some parts may have been written.
    fn write(&self, parts: &[(u64, &[u8])]) -> Result<(), Self::Error>;

    /// Writes parts that [`fit_together`] in this order with one request, as far as they lie within the file.
    ///
    /// # Errors
    /// As of [`Remote::write`].
    fn write_together(&self, parts: &[(u64, &[u8])]) -> Result<(), Self::Error>;
}

/// Maximum number of pages that are read or compared at once.
pub const AT_ONCE: usize = 256;

/// Bytes of what [`write_back`] takes for a header.
const HEADER_BYTES: u64 = 256;

/// Yields the runs of pages whose byte satisfies `kind`, at most [`AT_ONCE`] pages each.
pub fn runs(known: &[u8], kind: impl Fn(u8) -> bool + Copy) -> impl Iterator<Item = Range<usize>> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let start = next + known[next..].iter().position(|known| kind(*known))?;
        let length = known[start..].iter().take(AT_ONCE).take_while(|known| kind(**known)).count();
        next = start + length;
        Some(start..next)
    })
}

/// Smallest page size that a server may have, in bytes.
const PAGE_BYTES_MIN: usize = 4096;

/// Reads the contents of a mapping that begins at a page of the file, and returns the number of bytes up to
/// the end of the file. `read` gets a part of the memory and its offset in the memory.
///
/// A short read has met the end of the file or unreadable data. In the second case only the next read
/// fails, and zeros must not stand for the data. A read that stops within a page of the server has met the
/// end.
///
/// # Errors
/// Those of `read`.
pub fn read_up_to_end<E>(
    to: &mut [u8],
    mut read: impl FnMut(&mut [u8], u64) -> Result<usize, E>,
) -> Result<usize, E> {
    let mut done = 0;
    while done < to.len() && done.is_multiple_of(PAGE_BYTES_MIN) {
        match read(&mut to[done..], done as u64)? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}

/// Writes back those of these pages that were stored to, up to the end of the remote file. The caller holds
/// the file's [`Turn`], so that an older page does not overtake a newer one, and originals are kept.
///
/// # Errors
/// Those of both files; pages that were not written remain to be written.
pub fn write_back<E>(
    memory: &impl Access<Error = E>,
    file: &impl Remote<Error = E>,
    pages: Range<usize>,
) -> Result<(), E> {
    let mut known = vec![0; pages.len()];
    memory.get(pages.start as u64, &mut known)?;
    let room = AT_ONCE.min(known.len()) * page_bytes();
    let (mut now, mut was) = (vec![0; room], vec![0; room]);
    let single = is_set(memory, IS_LOCKED_AT)?;
    let mut size = None;
    let mut found: Vec<_> = runs(&known, |known| known != 0).collect();
    // Where readers do without a lock, what they look at first comes last: a header, to which writers store
    // last (the index of SQLite's write-ahead log).
    if single {
        found.reverse();
    }
    for run in found {
        let (length, at) =
            (run.len() * page_bytes(), ((pages.start + run.start) * page_bytes()) as u64);
        let (now, was) = (&mut now[..length], &mut was[..length]);
        memory.get(PAGES_AT + at, now)?;
        memory.get(ORIGINALS_AT + at, was)?;
        if now == was {
            continue;
        }
        let part = |changed: Range<usize>| (at + changed.start as u64, &now[changed]);
        let mut parts: Vec<_> = to_write(now, was, single).into_iter().map(part).collect();
        let headers = if single {
            parts.partition_point(|(at, _)| *at < parts[0].0 + HEADER_BYTES)
        } else {
            0
        };
        parts.rotate_left(headers);
        if fit_together(parts.iter().map(|(_, data)| data.len())) {
            file.write_together(&parts)?;
            parts.iter().try_for_each(|(at, data)| memory.put(ORIGINALS_AT + at, data))?;
            continue;
        }
        let size = match size {
            Some(size) => size,
            None => *size.insert(file.size()?),
        };
        let within = |(at, data): &(u64, &[u8])| size.saturating_sub(*at).min(data.len() as u64);
        for part in &mut parts {
            part.1 = &part.1[..within(part) as usize];
        }
        let (others, headers) = parts.split_at(parts.len() - headers);
        for parts in [others, headers] {
            file.write(parts)?;
            parts.iter().try_for_each(|(at, data)| memory.put(ORIGINALS_AT + at, data))?;
        }
    }
    Ok(())
}

/// Changes bytes `within` the remote file by `call`, and then the memory by `update`. The caller holds the file's [`Turn`].
/// What a process leaves behind that is killed in between, or cannot update the memory, [`renew_interrupted`] mends.
///
/// # Errors
/// Those of `call`, after which the file is as it was.
pub fn changing<T, E>(
    memory: &impl Access<Error = E>,
    within: Range<u64>,
    call: impl FnOnce() -> Result<T, E>,
    update: impl FnOnce(&T) -> Result<(), E>,
) -> Result<T, E> {
    let before = Changing::of(memory).unwrap_or_default();
    let _ = before.and(within).put(memory); // without it, the change must be made all the same
    let done = call();
    let updated = done.as_ref().map_or(Ok(()), update);
    if updated.is_ok() {
        let _ = before.put(memory);
    }
    done
}

/// Returns true if some of these `pages` were stored to and not written back. The caller holds the file's [`Turn`].
///
/// # Errors
/// Those of the file.
pub fn is_unwritten<E>(memory: &impl Access<Error = E>, pages: usize) -> Result<bool, E> {
    if !is_set(memory, KEEPS_AT)? {
        return Ok(false);
    }
    let mut known = vec![0; pages];
    memory.get(0, &mut known)?;
    let (mut now, mut was) = (vec![0; AT_ONCE * page_bytes()], vec![0; AT_ONCE * page_bytes()]);
    for run in runs(&known, |known| known != 0) {
        let (length, at) = (run.len() * page_bytes(), (run.start * page_bytes()) as u64);
        memory.get(PAGES_AT + at, &mut now[..length])?;
        memory.get(ORIGINALS_AT + at, &mut was[..length])?;
        if now[..length] != was[..length] {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Takes the memory away, as its remote file is lost: all processes get `SIGBUS` when they touch mappings of it.
/// Returns whether some of these `pages` were stored to and not written back, or `None` if the memory was taken
/// away before. The caller holds the file's [`Turn`], removes the file's name, and from then on nobody reads
/// pages in or writes them back.
///
/// # Errors
/// Those of the file.
pub fn lose<E>(memory: &impl Access<Error = E>, pages: usize) -> Result<Option<bool>, E> {
    let was_lost = is_set(memory, IS_LOST_AT)?;
    let is_unwritten = !was_lost && is_unwritten(memory, pages)?;
    // First, as this process may be killed in between: without its pages the memory must not be used.
    memory.put(IS_LOST_AT, &[1])?;
    memory.set_length(ORIGINALS_AT)?;
    Ok((!was_lost).then_some(is_unwritten))
}

/// Returns this machine's time, in milliseconds.
#[must_use]
pub fn milliseconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_millis() as u64)
}

/// Right to read pages in or write them back. It belongs to an opening of the file; the kernel releases it
/// when the process dies.
pub struct Turn<'a>(BorrowedFd<'a>);

impl<'a> Turn<'a> {
    /// Waits until no other process has the turn.
    ///
    /// # Errors
    /// Those of `fcntl(2)`.
    pub fn take(fd: BorrowedFd<'a>) -> io::Result<Self> {
        loop {
            match set(fd, libc::F_WRLCK) {
                // Try again: the signal's handler runs after this.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done.map(|()| Self(fd)),
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Cannot fail for the descriptor that the lock was taken with.
        let _ = set(self.0, libc::F_UNLCK);
    }
}

fn set(fd: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: all zero is a valid `struct flock`.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_len) = (kind as _, 1);
    let (fd, lock) = (fd.as_raw_fd() as usize, &raw const lock);
    // SAFETY: the structure outlives the call. The raw call is needed: a library that hooks `fcntl` calls
    // this.
    match unsafe { libc::syscall(libc::SYS_fcntl, fd, libc::F_OFD_SETLKW as usize, lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
