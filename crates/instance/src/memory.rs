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

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use towline_mem::page_bytes;
use towline_wire::parts::fit_together;

/// Maximum length of a file, 256 GiB: a multiple of all page sizes.
pub const BYTES_MAX: u64 = 256 << 30;
/// Maximum number of pages: that of the smallest page size.
pub const PAGES_MAX: u64 = (64 << 20) - 32;
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
/// Offset of the originals.
pub const ORIGINALS_AT: u64 = PAGES_MAX + 32;
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

/// What to do after the remote file was read again, byte by byte.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Renewal {
    /// Changed in the file: belongs into the pages and the originals, also if it differs from both. A process
    /// that was killed may have written back what it had stored, or read the file, without noting that in the
    /// originals; what others stored under later locks counts.
    pub new: Vec<Range<usize>>,
    /// Stored to, and the same in the file: belongs into the originals.
    pub same: Vec<Range<usize>>,
}

impl Renewal {
    /// Compares what the file holds (`new`) with the memory (`now`) and its originals (`was`), all equally long.
    ///
    /// What was stored and is not in the file yet stays. Of bytes that were changed in both, those in the file
    /// count if it is locked by the programs that store to it (`single`): nobody else can have changed it since.
    /// Otherwise those in the memory count. Bytes that have not changed are left out: a process may store to them
    /// at this moment.
    #[must_use]
    pub fn of(new: &[u8], now: &[u8], was: &[u8], single: bool) -> Self {
        let mut renewal = Self::default();
        let is_new =
            |at: usize| new[at] != was[at] && new[at] != now[at] && (single || now[at] == was[at]);
        for pages in changed(new, now) {
            renewal.new.extend(bytes(pages, is_new));
        }
        for pages in changed(now, was) {
            renewal.same.extend(bytes(pages, |at| now[at] != was[at] && new[at] == now[at]));
        }
        renewal
    }
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
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn runs_of_changed_pages_are_found() {
        let was = vec![0; 5 * page_bytes() + 10];
        let mut now = was.clone();
        assert_eq!(changed(&now, &was).next(), None);
        for at in [page_bytes(), 3 * page_bytes() - 1, 5 * page_bytes() + 9] {
            now[at] = 1;
        }
        let runs: Vec<_> = changed(&now, &was).collect();
        assert_eq!(runs, [page_bytes()..3 * page_bytes(), 5 * page_bytes()..5 * page_bytes() + 10]);
        assert_eq!(
            changed(&now[page_bytes()..2 * page_bytes()], &was[..page_bytes()]).next(),
            Some(0..page_bytes())
        );
        assert_eq!(changed(&[], &[]).next(), None);
    }

    impl Access for std::fs::File {
        type Error = io::Error;

        fn get(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
            self.read_exact_at(to, at)
        }

        fn put(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
            self.write_all_at(bytes, at)
        }

        fn set_length(&self, length: u64) -> io::Result<()> {
            self.set_len(length)
        }
    }

    /// A file of the given length that records writes.
    struct Written(u64, std::cell::RefCell<Vec<(u64, usize)>>);

    impl Remote for Written {
        type Error = io::Error;

        fn size(&self) -> io::Result<u64> {
            Ok(self.0)
        }

        fn write(&self, parts: &[(u64, &[u8])]) -> io::Result<()> {
            self.1.borrow_mut().extend(parts.iter().map(|(at, data)| (*at, data.len())));
            Ok(())
        }

        fn write_together(&self, parts: &[(u64, &[u8])]) -> io::Result<()> {
            let inside = |at: u64, length: usize| self.0.saturating_sub(at).min(length as u64);
            let within = parts.iter().map(|(at, data)| (*at, inside(*at, data.len()) as usize));
            self.1.borrow_mut().extend(within.filter(|(_, length)| *length > 0));
            Ok(())
        }
    }

    /// Reads four pages of a file of `size` bytes, whose bytes from `broken` on cannot be read.
    fn read(size: usize, broken: usize) -> Result<usize, u8> {
        read_up_to_end(&mut [0; 4 * PAGE_BYTES_MIN], |to, at| {
            let left = size.min(broken).saturating_sub(at as usize);
            match to.len().min(left) {
                0 if broken < size => Err(5),
                count => Ok(count),
            }
        })
    }

    #[test]
    fn what_cannot_be_read_is_not_the_end() {
        for size in
            [0, 1, PAGE_BYTES_MIN, 2 * PAGE_BYTES_MIN - 1, 3 * PAGE_BYTES_MIN, 4 * PAGE_BYTES_MIN]
        {
            assert_eq!(read(size, usize::MAX), Ok(size));
        }
        assert_eq!(read(9 * PAGE_BYTES_MIN, usize::MAX), Ok(4 * PAGE_BYTES_MIN));
        for broken in 0..4 {
            assert_eq!(
                read(4 * PAGE_BYTES_MIN, broken * PAGE_BYTES_MIN),
                Err(5),
                "from page {broken} on"
            );
        }
    }

    #[test]
    fn what_was_stored_is_written_once_and_only_within_the_file() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let memory = std::fs::File::from(rustix::fs::memfd_create("memory", flags).unwrap());
        let pages = 600;
        memory.set_len(PAGES_AT + pages * page_bytes() as u64).unwrap();
        // All pages are read but page 400; stored to are two neighbours, page 400 and the last page.
        memory.put(0, &vec![1; pages as usize]).unwrap();
        memory.put(400, &[0]).unwrap();
        for page in [7u64, 8, 400, 599] {
            memory.put(PAGES_AT + page * page_bytes() as u64 + 100, b"stored").unwrap();
        }
        let size = pages * page_bytes() as u64 - 1000;
        let file = Written(size, Default::default());
        write_back(&memory, &file, 0..pages as usize).unwrap();
        let page = page_bytes() as u64;
        let wanted = [7, 8, 599].map(|number| (number * page + 100, 6));
        assert_eq!(file.1.take(), wanted);
        write_back(&memory, &file, 0..pages as usize).unwrap();
        assert_eq!(file.1.take(), [], "nothing has changed since");
        memory.put(PAGES_AT + 8 * page, b"again").unwrap();
        // Data beyond the end is not written.
        memory.put(PAGES_AT + size + 10, b"behind").unwrap();
        write_back(&memory, &file, 0..8).unwrap();
        assert_eq!(file.1.take(), []);
        write_back(&memory, &file, 8..pages as usize).unwrap();
        assert_eq!(file.1.take(), [(8 * page, 5)]);
        // What is stored across a border of pages is one part; bytes between the first and the last one of a
        // page belong to it.
        memory.put(PAGES_AT + 20 * page - 70, &[1]).unwrap();
        memory.put(PAGES_AT + 20 * page - 50, &[1; 40]).unwrap();
        memory.put(PAGES_AT + 20 * page + 53, &[1; 10]).unwrap();
        memory.put(PAGES_AT + 22 * page - 1, &[1]).unwrap();
        memory.put(PAGES_AT + 22 * page + 64, &[1]).unwrap();
        write_back(&memory, &file, 0..pages as usize).unwrap();
        let wanted = [(20 * page - 70, 133), (22 * page - 1, 1), (22 * page + 64, 1)];
        assert_eq!(file.1.take(), wanted);
    }

    /// What does not fit into one request: the header comes last, too, and nothing behind the end is written.
    #[test]
    fn of_much_that_was_stored_only_what_lies_within_the_file_is_written() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let page = page_bytes() as u64;
        for locked in [0, 1] {
            let memory = std::fs::File::from(rustix::fs::memfd_create("memory", flags).unwrap());
            memory.set_len(PAGES_AT + 20 * page).unwrap();
            memory.put(0, &[1; 20]).unwrap();
            memory.put(IS_LOCKED_AT, &[locked]).unwrap();
            memory.put(PAGES_AT + 5, b"head").unwrap();
            memory.put(PAGES_AT + page, &vec![7; 19 * page as usize]).unwrap();
            let file = Written(10 * page + 3, Default::default());
            write_back(&memory, &file, 0..20).unwrap();
            let (head, rest) = ((5, 4), (page, 9 * page as usize + 3));
            let wanted = if locked == 0 { [head, rest] } else { [rest, head] };
            assert_eq!(file.1.take(), wanted);
            write_back(&memory, &file, 0..10).unwrap();
            assert_eq!(file.1.take(), [], "nothing has changed since");
        }
    }

    /// Others may change the bytes between, and readers look at the first ones without a lock.
    #[test]
    fn of_a_locked_file_single_bytes_are_written_the_first_ones_last() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let memory = std::fs::File::from(rustix::fs::memfd_create("memory", flags).unwrap());
        let (pages, page) = (600, page_bytes() as u64);
        memory.set_len(PAGES_AT + pages * page).unwrap();
        memory.put(0, &vec![1; pages as usize]).unwrap();
        memory.put(IS_LOCKED_AT, &[1]).unwrap();
        for (at, data) in [(10, "a"), (12, "b"), (1000, "cd"), (300 * page + 5, "e")] {
            memory.put(PAGES_AT + at, data.as_bytes()).unwrap();
        }
        let file = Written(pages * page, Default::default());
        write_back(&memory, &file, 0..pages as usize).unwrap();
        assert_eq!(file.1.take(), [(300 * page + 5, 1), (1000, 2), (10, 1), (12, 1)]);
        write_back(&memory, &file, 0..pages as usize).unwrap();
        assert_eq!(file.1.take(), [], "nothing has changed since");
    }

    #[test]
    fn memory_that_is_taken_away_is_gone_and_tells_what_was_not_written() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let (pages, page) = (600, page_bytes() as u64);
        for (stored, wanted) in [(None, false), (Some(0), true), (Some(599 * page), true)] {
            let memory = std::fs::File::from(rustix::fs::memfd_create("memory", flags).unwrap());
            memory.set_len(PAGES_AT + pages * page).unwrap();
            memory.put(0, &vec![1; pages as usize]).unwrap();
            memory.put(KEEPS_AT, &[1]).unwrap();
            if let Some(at) = stored {
                memory.put(PAGES_AT + at, b"stored").unwrap();
            }
            assert_eq!(lose(&memory, pages as usize).unwrap(), Some(wanted), "{stored:?}");
            assert!(is_set(&memory, IS_LOST_AT).unwrap());
            assert!(memory.metadata().unwrap().len() <= ORIGINALS_AT);
            assert_eq!(lose(&memory, 0).unwrap(), None, "told once");
        }
    }

    #[test]
    fn names_are_understood() {
        assert_eq!(parse_name(&name(3, u64::MAX)), Some((3, u64::MAX)));
        for wrong in ["", "3", "3-", "-3", "a-3", "3-4-5"] {
            assert_eq!(parse_name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_was_stored_outlasts_that_the_file_is_read_again() {
        let was = vec![0; 2 * page_bytes()];
        let (mut new, mut now) = (was.clone(), was.clone());
        // Changed in the file, stored to, both in different ways, both in the same way.
        (new[1], now[2], new[3], now[3]) = (1, 1, 1, 2);
        (new[page_bytes() + 4], now[page_bytes() + 4]) = (1, 1);
        let one = |at| at..at + 1;
        let same = vec![one(page_bytes() + 4)];
        let locked = Renewal::of(&new, &now, &was, true);
        assert_eq!(locked, Renewal { new: vec![one(1), one(3)], same: same.clone() });
        let unlocked = Renewal::of(&new, &now, &was, false);
        assert_eq!(unlocked, Renewal { new: vec![one(1)], same });
        for single in [true, false] {
            assert_eq!(Renewal::of(&was, &was, &was, single), Renewal::default());
        }
    }
}
