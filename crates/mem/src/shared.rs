//! Memory shared with other processes, or kept for the next run of this program: a memfd or a file, and
//! its mapping.
//!
//! Another process may write to the memory at any time. So no Rust reference to its bytes is ever
//! created: they are copied in and out, or passed to the kernel by address.
#![allow(unsafe_code)]

mod fault;

use crate::Lending;
use crate::copy::copy;
use crate::huge::{HUGE_BYTES, Room};
use fault::Explained;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::retry_on_intr;
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Size of a cache line in bytes.
const LINE: usize = 64;

/// Longest name of a memfd in bytes.
const NAME_BYTES_MAX: usize = 249;

/// A mapped memfd that can neither shrink nor grow, or a mapped file.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    address: *mut u8,
    length: usize,
    writable: bool,
    lending: Option<Lending>,
    explained: Option<Explained>,
}

// SAFETY: the mapping belongs to the process, not to a thread. All access is by copying through raw
// pointers or by atomics, so the worst that two threads can see is mixed bytes, as with two processes.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates memory of `length` bytes, all zero. Pages are allocated when first written. The name is for
    /// people who look at processes, who see no more of it than 249 bytes.
    ///
    /// # Errors
    /// What `memfd_create(2)`, `ftruncate(2)` or `mmap(2)` say.
    pub fn create(name: &str, length: usize) -> io::Result<Self> {
        let fd = memfd(name, length)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(fd, length, true)
    }

    /// Like [`SharedMemory::create`], but parts of the memory can be lent: other processes read them in
    /// place. The code that hands out ranges gives them guards, which determine how long they stay
    /// unchanged. A guard keeps `block_bytes` bytes; at most `lent_max` bytes may be lent at once.
    ///
    /// # Errors
    /// As [`SharedMemory::create`]; what `open(2)` of `/proc/self/fd` says.
    pub fn create_lendable(
        name: &str,
        length: usize,
        block_bytes: u64,
        lent_max: u64,
    ) -> io::Result<Self> {
        let mut memory = Self::create(name, length)?;
        memory.lending = Some(Lending::new(&memory.fd, block_bytes, lent_max)?);
        Ok(memory)
    }

    /// Maps memory that another process created. It must be sealed against shrinking, and must not be of
    /// reserved huge pages, of which none may be left; otherwise its creator could make this process fault.
    ///
    /// # Errors
    /// `EINVAL` when it is not sealed, is of reserved huge pages, or is shorter than `length`; `EPERM` when
    /// it is sealed against writers and `writable`; what `mmap(2)` says.
    pub fn open(fd: OwnedFd, length: usize, writable: bool) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        let sealed = seals.contains(SealFlags::SHRINK);
        let reserved = rustix::fs::fstatfs(&fd)?.f_type as u32 == libc::HUGETLBFS_MAGIC as u32;
        let long_enough = rustix::fs::fstat(&fd)?.st_size as u64 >= length as u64;
        if !sealed || reserved || !long_enough || length == 0 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // `mmap` would say the same, but leave it open whether the addresses for it are still reserved.
        if writable && seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        Self::map(fd, length, writable)
    }

    /// Maps the first `length` bytes of a file for reading and writing. Bytes stored there are in the
    /// file even if this process is killed right afterwards. The file must belong to this program alone:
    /// touching the memory ends the process (`SIGBUS`) if the file was shortened, or if its blocks were
    /// not [allocated](Self::allocate) and the disk is full.
    ///
    /// # Errors
    /// `EINVAL` when the file is shorter; what `mmap(2)` says.
    pub fn of_file(fd: OwnedFd, length: usize) -> io::Result<Self> {
        if length == 0 || (rustix::fs::fstat(&fd)?.st_size as u64) < length as u64 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Self::map(fd, length, true)
    }

    /// Makes the process write `text` to standard error before `SIGBUS` ends it.
    #[must_use]
    pub fn explained(mut self, text: &str) -> Self {
        self.explained = Some(Explained::new(self.address.addr(), self.length, text));
        self
    }

    /// Allocates disk blocks for a range of the file, so that storing there cannot fail.
    ///
    /// # Errors
    /// `ENOSPC`, and other errors of `fallocate(2)`.
    pub fn allocate(&self, offset: usize, length: usize) -> io::Result<()> {
        let flags = FallocateFlags::KEEP_SIZE;
        let (offset, length) = (offset as u64, length as u64);
        Ok(retry_on_intr(|| rustix::fs::fallocate(&self.fd, flags, offset, length))?)
    }

    fn map(fd: OwnedFd, length: usize, writable: bool) -> io::Result<Self> {
        let protection =
            if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let room = Room::of(length);
        let (at, flags) = match &room {
            Some(room) => (room.inside(), flags | MapFlags::FIXED),
            None => (std::ptr::null_mut(), flags),
        };
        // SAFETY: a new mapping at addresses reserved for it, or at an address of the kernel's choice,
        // touches no existing memory.
        let mapped = unsafe { rustix::mm::mmap(at, length, protection, flags, &fd, 0) };
        if let Some(room) = room {
            match mapped {
                Ok(_) => room.leave(length),
                // How the file was opened is checked before anything else.
                Err(rustix::io::Errno::ACCESS) => drop(room),
                // The kernel may have released the addresses, and another mapping may have taken them.
                Err(_) => std::mem::forget(room),
            }
        }
        let address = mapped?;
        Ok(Self { fd, address: address.cast(), length, writable, lending: None, explained: None })
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: no memory of this type is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the memfd or file.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns how parts of the memory are lent, if it is lendable.
    #[must_use]
    pub fn lending(&self) -> Option<&Lending> {
        self.lending.as_ref()
    }

    /// Returns the address of the `length` bytes at `offset`, for system calls.
    ///
    /// # Panics
    /// When the range is not inside the memory.
    #[must_use]
    pub fn address(&self, offset: usize, length: usize) -> *mut u8 {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.length);
        assert!(
            inside,
            "range {offset}+{length} outside of shared memory of {} bytes",
            self.length
        );
        self.address.wrapping_add(offset)
    }

    /// Copies bytes into the memory.
    ///
    /// # Panics
    /// When the range is not inside the memory, or the memory is mapped read-only.
    pub fn copy_in(&self, offset: usize, source: &[u8]) {
        assert!(self.writable, "shared memory is mapped read-only");
        let target = self.address(offset, source.len());
        // SAFETY: `address` checked the range, the mapping lives as long as `self`, and a Rust slice
        // never overlaps it because none is ever created from it.
        unsafe { copy(source.as_ptr(), target, source.len()) };
    }

    /// Copies bytes out of the memory. Another process may be writing them, so old and new bytes may be
    /// mixed.
    ///
    /// # Panics
    /// When the range is not inside the memory.
    pub fn copy_out(&self, offset: usize, target: &mut [u8]) {
        let source = self.address(offset, target.len());
        // SAFETY: as in `copy_in`.
        unsafe { copy(source, target.as_mut_ptr(), target.len()) };
    }

    /// Reads bytes of a file into the memory, with one system call. Returns how many were read; zero: the file
    /// ends at or before `from`.
    ///
    /// # Errors
    /// What `pread(2)` says.
    ///
    /// # Panics
    /// When the range is not inside the memory, or the memory is mapped read-only.
    pub fn read_file(
        &self,
        offset: usize,
        length: usize,
        file: BorrowedFd<'_>,
        from: u64,
    ) -> io::Result<usize> {
        assert!(self.writable, "shared memory is mapped read-only");
        let target = self.address(offset, length);
        let from = i64::try_from(from).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        // SAFETY: the kernel writes only to the range, which was checked; as in `copy_in`, no Rust reference
        // to it exists.
        let read = unsafe { libc::pread64(file.as_raw_fd(), target.cast(), length, from) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// Appends a range to `out`, copied like [`SharedMemory::copy_out`] does, without zeroing the new
    /// bytes first.
    ///
    /// # Panics
    /// When the range is not inside the memory.
    pub fn append_to(&self, offset: usize, length: usize, out: &mut Vec<u8>) {
        let source = self.address(offset, length);
        out.reserve(length);
        let target = out.spare_capacity_mut().as_mut_ptr().cast();
        // SAFETY: as in `copy_in`; the vector has capacity for `length` more bytes, and the copy
        // initializes them before `set_len`.
        unsafe {
            copy(source, target, length);
            out.set_len(out.len() + length);
        }
    }

    /// Prefetches a range that will be written soon, from the caches of other processors. This is only a
    /// hint and does nothing on other architectures than x86-64.
    ///
    /// # Panics
    /// When the range is not inside the memory.
    pub fn expect_writes(&self, offset: usize, length: usize) {
        for line in self.lines(offset, length) {
            // Not the compiler's intrinsic: for the baseline x86-64 target it becomes a prefetch for reading.
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a prefetch is a hint that never faults and changes nothing, whatever the address.
            unsafe {
                std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = line;
        }
    }

    /// Prefetches a range that will be read soon; otherwise like [`SharedMemory::expect_writes`].
    ///
    /// # Panics
    /// When the range is not inside the memory.
    pub fn expect_reads(&self, offset: usize, length: usize) {
        lines(self.address(offset, length), length).for_each(fetch);
    }

    /// Returns the cache lines of a range, after checking it.
    fn lines(&self, offset: usize, length: usize) -> impl Iterator<Item = *mut u8> {
        lines(self.address(offset, length), length)
    }

    /// Copies a range of the memory to another place in it that does not overlap.
    ///
    /// # Panics
    /// When a range is not inside the memory, the ranges overlap, or the memory is mapped read-only.
    pub fn copy_within(&self, from: usize, to: usize, length: usize) {
        assert!(self.writable, "shared memory is mapped read-only");
        assert!(from + length <= to || to + length <= from, "ranges overlap");
        let source = self.address(from, length);
        let target = self.address(to, length);
        // SAFETY: both ranges are inside the mapping and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(source, target, length) };
    }

    /// Copies a range of other shared memory to `offset`. Both may be written meanwhile, so old and new
    /// bytes may be mixed.
    ///
    /// # Panics
    /// When a range is not inside its memory, both are the same memory, or this one is mapped read-only.
    pub fn copy_from(&self, offset: usize, source: &Self, range: Range<usize>) {
        assert!(self.writable, "shared memory is mapped read-only");
        assert!(!std::ptr::eq(self, source), "copy within one memory");
        let from = source.address(range.start, range.len());
        let to = self.address(offset, range.len());
        // SAFETY: `address` checked the ranges, and two mappings never overlap.
        unsafe { copy(from, to, range.len()) };
    }

    /// Returns a word for flags and futexes.
    ///
    /// # Panics
    /// When the word is not inside the memory or not aligned.
    #[must_use]
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "word is not aligned");
        // SAFETY: the word is inside and aligned, as checked; atomics may be shared with other processes.
        unsafe { AtomicU32::from_ptr(self.address(offset, 4).cast()) }
    }

    /// Returns a word for positions.
    ///
    /// # Panics
    /// When the word is not inside the memory or not aligned.
    #[must_use]
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "word is not aligned");
        // SAFETY: the word is inside and aligned, as checked; atomics may be shared with other processes.
        unsafe { AtomicU64::from_ptr(self.address(offset, 8).cast()) }
    }

    /// Like [`SharedMemory::create`], but processes that receive the memfd later can only read: it is
    /// sealed against new writers, so that only this mapping can change it.
    ///
    /// # Errors
    /// As [`SharedMemory::create`].
    pub fn create_for_readers(name: &str, length: usize) -> io::Result<Self> {
        let fd = memfd(name, length)?;
        let memory = Self::map(fd, length, true)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memory.fd, seals)?;
        Ok(memory)
    }

    /// True when the memfd is sealed against shrinking and new writers, so that it can be handed out for
    /// reading.
    ///
    /// # Errors
    /// The descriptor does not support seals.
    pub fn refuses_writers(&self) -> io::Result<bool> {
        let seals = rustix::fs::fcntl_get_seals(&self.fd)?;
        Ok(seals.contains(SealFlags::FUTURE_WRITE) && seals.contains(SealFlags::SHRINK))
    }

    /// True when the memory is mapped for writing in this process.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Asks the kernel to collapse the [`HUGE_BYTES`] bytes at `offset`, a multiple of that, into one
    /// huge page, so that translating an address there takes fewer memory accesses. The contents stay
    /// and may be read and written meanwhile. Takes about a millisecond. Holes in the range are
    /// allocated.
    ///
    /// # Errors
    /// `EINVAL`: the kernel does not support this (before Linux 6.1, or with other page sizes), or not
    /// at the moment; `ENOMEM`, `EAGAIN` and others: not at the moment.
    ///
    /// # Panics
    /// When the range is not inside the memory.
    pub fn make_huge(&self, offset: usize) -> io::Result<()> {
        let address = self.address(offset, HUGE_BYTES);
        // SAFETY: the range is inside the mapping; only the physical place of its bytes changes.
        match unsafe { libc::madvise(address.cast(), HUGE_BYTES, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Frees the pages of a range, which reads as zeros afterwards. Pages that the network still refers
    /// to keep their old bytes.
    ///
    /// # Errors
    /// What `fallocate(2)` says.
    pub fn punch(&self, offset: usize, length: usize) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = (offset as u64, length as u64);
        Ok(retry_on_intr(|| rustix::fs::fallocate(&self.fd, flags, offset, length))?)
    }
}

/// Creates a memfd of `length` bytes that can be sealed.
fn memfd(name: &str, length: usize) -> io::Result<OwnedFd> {
    let name = &name.as_bytes()[..name.len().min(NAME_BYTES_MAX)];
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, length as u64)?;
    Ok(fd)
}

/// Prefetches a value that will be read or written soon: all its cache lines at once, instead of one
/// after the other as the code reaches them. A hint, like [`SharedMemory::expect_reads`].
pub fn expect<T>(value: &T) {
    let start = std::ptr::from_ref(value).cast_mut().cast();
    lines(start, size_of::<T>()).for_each(fetch);
}

/// Returns the addresses of the cache lines that contain `length` bytes from `start`.
fn lines(start: *mut u8, length: usize) -> impl Iterator<Item = *mut u8> {
    // Start at the first line's beginning, so that the last line is not missed.
    let skipped = start.addr() % LINE;
    (0..length + skipped).step_by(LINE).map(move |at| start.wrapping_sub(skipped).wrapping_add(at))
}

fn fetch(line: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which never faults and changes nothing, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch(line.cast(), std::arch::x86_64::_MM_HINT_T0);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // Another mapping may get the same addresses.
        self.explained = None;
        // SAFETY: `map` created the mapping with this length, and nothing refers to it any more.
        let result = unsafe { rustix::mm::munmap(self.address.cast(), self.length) };
        debug_assert!(result.is_ok(), "unmapping our own mapping failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_may_be_long() {
        for length in [0, NAME_BYTES_MAX, NAME_BYTES_MAX + 1, 4096] {
            SharedMemory::create(&"\u{e9}".repeat(length / 2), 4096).unwrap();
            SharedMemory::create(&"n".repeat(length), 4096).unwrap();
        }
    }

    #[test]
    fn long_memory_begins_where_huge_pages_do_and_gives_all_addresses_back() {
        let mapped = |address: usize| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().any(|line| {
                let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
                let parse = |text| usize::from_str_radix(text, 16).unwrap();
                (parse(start)..parse(end)).contains(&address)
            })
        };
        for length in [HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 5, 64 * HUGE_BYTES] {
            let memory = SharedMemory::create("test", length).unwrap();
            let address = memory.address(0, length).addr();
            assert!(length < HUGE_BYTES || address.is_multiple_of(HUGE_BYTES), "{length}");
            memory.copy_in(length - 3, &[1, 2, 3]);
            let other =
                SharedMemory::open(memory.fd().try_clone_to_owned().unwrap(), length, false);
            let mut found = [0; 3];
            other.unwrap().copy_out(length - 3, &mut found);
            assert_eq!(found, [1, 2, 3], "{length}");
        }
        // No other mapping here is this large.
        let room = Room::of(1 << 40).unwrap();
        let (start, middle) = (room.inside().addr(), room.inside().addr() + (1 << 39));
        assert!(mapped(middle));
        room.leave(1 << 39);
        assert!(mapped(start) && !mapped(middle));
    }

    /// The kernel ends a process by `SIGBUS` that touches them when there are none.
    #[test]
    fn reserved_huge_pages_of_another_process_are_not_mapped() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let made = rustix::fs::memfd_create("test", flags)
            .and_then(|fd| rustix::fs::ftruncate(&fd, HUGE_BYTES as u64).map(|()| fd));
        let Ok(fd) = made else { return eprintln!("SKIPPED: no reserved huge pages here") };
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let refused = SharedMemory::open(fd, HUGE_BYTES, true).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
    }

    /// A peer could use up all addresses of this process.
    #[test]
    fn memory_that_cannot_be_mapped_takes_no_addresses() {
        const LENGTH: usize = 1 << 42;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&fd, LENGTH as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let reading = std::fs::File::open(path).unwrap();
        let refused = |fd: OwnedFd| SharedMemory::open(fd, LENGTH, true).unwrap_err();
        let pages = || {
            let sizes = std::fs::read_to_string("/proc/self/statm").unwrap();
            sizes.split(' ').next().unwrap().parse::<usize>().unwrap()
        };
        assert_eq!(refused(reading.into()).raw_os_error(), Some(libc::EACCES));
        assert!(pages() < LENGTH / crate::page_bytes(), "of a file opened for reading");
        rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE).unwrap();
        assert_eq!(refused(fd).raw_os_error(), Some(libc::EPERM));
        assert!(pages() < LENGTH / crate::page_bytes(), "of a sealed file");
    }

    #[test]
    fn huge_pages_hold_the_same_bytes() {
        let memory = SharedMemory::create("test", 3 * HUGE_BYTES).unwrap();
        let bytes: Vec<u8> = (0..HUGE_BYTES).map(|at| (at % 251) as u8).collect();
        memory.copy_in(HUGE_BYTES, &bytes);
        memory.copy_in(2 * HUGE_BYTES, &[9]);
        let made = memory.make_huge(HUGE_BYTES);
        if let Err(error) = &made {
            eprintln!("no huge pages here: {error}");
        }
        let mut found = vec![0; HUGE_BYTES + 1];
        memory.copy_out(HUGE_BYTES, &mut found);
        assert!(found[..HUGE_BYTES] == bytes && found[HUGE_BYTES] == 9);
        // Part of the huge page can still be freed.
        memory.punch(HUGE_BYTES + 8192, 4096).unwrap();
        memory.copy_out(HUGE_BYTES, &mut found);
        assert!(found[..8192] == bytes[..8192] && found[8192..12288] == [0; 4096]);
        assert!(found[12288..HUGE_BYTES] == bytes[12288..]);
    }

    #[test]
    fn copies_of_every_alignment_are_whole() {
        let memory = SharedMemory::create("test", 64 * 1024).unwrap();
        let bytes: Vec<u8> = (0..60_000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        let lengths = [9000, 8191, 513, 512, 0, 1, 16 * 1024 - 1, 16 * 1024, 20_000, 60_000];
        for (from, length) in
            [0, 1, 16, 70, 4095].into_iter().flat_map(|at| lengths.map(|l| (at, l)))
        {
            for at in [0, 1, 15, 16, 63, 64, 2000] {
                memory.copy_in(from, &bytes[..length]);
                let mut target = vec![0xee; at + length + 1];
                memory.copy_out(from, &mut target[at..at + length]);
                assert!(target[at..at + length] == bytes[..length], "{from} {length} {at}");
                assert!(target[..at].iter().all(|b| *b == 0xee) && target[at + length] == 0xee);
                target.truncate(at);
                memory.append_to(from, length, &mut target);
                assert!(target[at..] == bytes[..length], "appended: {from} {length} {at}");
                assert!(target[..at].iter().all(|b| *b == 0xee));
            }
        }
    }
}
