//! `userfaultfd(2)`: memory whose missing pages another process fills when they are touched.
#![allow(unsafe_code)]

use rustix::ioctl::{self, Opcode, Updater, opcode};
use rustix::mm::UserfaultfdFlags;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use towline_mem::page_bytes;

/// The type byte of its `ioctl` calls, also its API version.
const GROUP: u8 = 0xAA;
/// `UFFD_FEATURE_MISSING_SHMEM` and `UFFD_FEATURE_POISON` (Linux 6.6).
const FEATURES: u64 = 1 << 5 | 1 << 14;
const MODE_MISSING: u64 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
struct Span {
    start: u64,
    length: u64,
}

#[repr(C)]
struct Api {
    version: u64,
    features: u64,
    calls: u64,
}

/// `struct uffdio_register`, also `struct uffdio_poison`.
#[repr(C)]
struct Ranged {
    span: Span,
    mode: u64,
    result: u64,
}

#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    length: u64,
    mode: u64,
    copied: i64,
}

const API: Opcode = opcode::read_write::<Api>(GROUP, 0x3F);
const REGISTER: Opcode = opcode::read_write::<Ranged>(GROUP, 0x00);
const WAKE: Opcode = opcode::read::<Span>(GROUP, 0x02);
const COPY: Opcode = opcode::read_write::<Copy>(GROUP, 0x03);
const POISON: Opcode = opcode::read_write::<Ranged>(GROUP, 0x08);
const NEW: Opcode = opcode::none(GROUP, 0x00);

fn call<const CALL: Opcode, T>(fd: impl AsFd, value: &mut T) -> io::Result<()> {
    // SAFETY: private to this file, whose callers pass the structure that each ioctl takes. It changes
    // memory only in ranges that their owner registered, and there only missing pages.
    Ok(unsafe { ioctl::ioctl(fd, Updater::<CALL, T>::new(value)) }?)
}

/// Creates a non-blocking userfaultfd for the memory of this process. It also serves faults that the kernel
/// takes on memory passed to system calls.
///
/// # Errors
/// Those of the kernel, if this process may not have one or the kernel is older than Linux 6.6.
pub fn create() -> io::Result<OwnedFd> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // SAFETY: a userfaultfd has no effect until memory is registered with it.
    let fd = match unsafe { rustix::mm::userfaultfd(flags) } {
        Ok(fd) => fd,
        Err(_) => from_device(flags.bits())?,
    };
    call::<API, _>(&fd, &mut Api { version: u64::from(GROUP), features: FEATURES, calls: 0 })?;
    Ok(fd)
}

/// Creates one by `/dev/userfaultfd`, which an administrator may open to other users.
fn from_device(flags: u32) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let device =
        rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: the call takes flags and returns a new descriptor, which we own.
    unsafe {
        let made = ioctl::ioctl(&device, New(flags as usize))?;
        Ok(OwnedFd::from_raw_fd(made))
    }
}

/// The ioctl `USERFAULTFD_IOC_NEW`, with its flags.
struct New(usize);

// SAFETY: the argument is flags instead of an address, and the result is a descriptor.
unsafe impl ioctl::Ioctl for New {
    type Output = i32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        NEW
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut(self.0)
    }

    unsafe fn output_from_ptr(
        output: ioctl::IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> rustix::io::Result<i32> {
        Ok(output)
    }
}

/// Registers pages of the process that created the userfaultfd: touching a missing one then reports a fault
/// and waits. The range covers whole pages.
///
/// # Errors
/// Those of the kernel.
pub fn register(fd: impl AsFd, start: usize, length: usize) -> io::Result<()> {
    let span = Span { start: start as u64, length: length as u64 };
    call::<REGISTER, _>(fd, &mut Ranged { span, mode: MODE_MISSING, result: 0 })
}

/// Wakes the threads that wait for these pages, to look at them again.
///
/// # Errors
/// Those of the kernel.
pub fn wake(fd: impl AsFd, start: u64, length: u64) -> io::Result<()> {
    call::<WAKE, _>(fd, &mut Span { start, length })
}

/// Fills those of the pages that are missing and registered with `data`, which holds whole pages, and wakes
/// the threads that wait for them. Stops at the first other page; returns the number of bytes filled.
///
/// # Errors
/// Those of the kernel if not even the first page could be filled: `EEXIST` if it is present, `ENOENT` if
/// it is not registered, `ESRCH` if the process has ended.
pub fn copy(fd: impl AsFd, to: u64, data: &[u8]) -> io::Result<usize> {
    let (from, length) = (data.as_ptr().expose_provenance() as u64, data.len() as u64);
    let mut copy = Copy { to, from, length, mode: 0, copied: 0 };
    match call::<COPY, _>(fd, &mut copy) {
        Ok(()) => Ok(data.len()),
        // Filled in part.
        Err(_) if copy.copied > 0 => Ok(copy.copied as usize),
        Err(error) => Err(error),
    }
}

/// Makes any touch of these missing pages raise `SIGBUS`, including those that wait already.
///
/// # Errors
/// Those of the kernel.
pub fn poison(fd: impl AsFd, start: u64, length: u64) -> io::Result<()> {
    call::<POISON, _>(fd, &mut Ranged { span: Span { start, length }, mode: 0, result: 0 })
}

/// Tests whether this process may have a userfaultfd: memory of remote files is then read when it is
/// touched.
///
/// # Errors
/// The reason why not.
pub fn try_out() -> io::Result<()> {
    create().map(drop)
}

/// Size of the kernel's `struct uffd_msg` in bytes.
const MESSAGE_BYTES: usize = 32;
/// Maximum number of faults that [`faults`] returns at once.
pub const FAULTS_MAX: usize = 16;

/// Returns the addresses of pages with faults not reported before, at most [`FAULTS_MAX`].
///
/// # Errors
/// Those of the kernel; `WouldBlock` if there are no faults.
pub fn faults(fd: impl AsFd) -> io::Result<Vec<u64>> {
    const FAULT: u8 = 0x12;
    let mut buffer = [0u8; MESSAGE_BYTES * FAULTS_MAX];
    let length = rustix::io::read(fd, &mut buffer)?;
    let messages = buffer[..length].chunks_exact(MESSAGE_BYTES);
    let address = |message: &[u8]| {
        let bytes = message[16..24].try_into().ok()?;
        (message[0] == FAULT).then(|| u64::from_ne_bytes(bytes) & !(page_bytes() as u64 - 1))
    };
    Ok(messages.filter_map(address).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_filled_when_it_is_touched() {
        let fd = match create() {
            Ok(fd) => fd,
            Err(error) => {
                println!("SKIPPED: no userfaultfd here: {error}");
                return;
            }
        };
        let length = 4 * page_bytes();
        let all = rustix::mm::ProtFlags::READ;
        let flags = rustix::mm::MapFlags::PRIVATE;
        // SAFETY: a new mapping.
        let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, all, flags) };
        let at = at.unwrap().expose_provenance();
        register(&fd, at, length).unwrap();
        assert_eq!(faults(&fd).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let toucher = std::thread::spawn(move || {
            // SAFETY: within the mapping, which is never unmapped.
            unsafe {
                std::ptr::with_exposed_provenance::<u8>(at + page_bytes() + 5).read_volatile()
            }
        });
        let mut wait = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut wait, Some(&limit)).unwrap(), 1, "no fault was told");
        let page = (at + page_bytes()) as u64;
        assert_eq!(faults(&fd).unwrap(), [page]);
        let data = vec![7; 2 * page_bytes()];
        assert_eq!(copy(&fd, page, &data).unwrap(), data.len());
        assert_eq!(toucher.join().unwrap(), 7);
        let again = copy(&fd, at as u64, &data).unwrap();
        assert_eq!(again, page_bytes(), "only as far as pages are missing");
        let there = copy(&fd, page, &data).unwrap_err();
        assert_eq!(there.raw_os_error(), Some(libc::EEXIST));
        poison(&fd, (at + 3 * page_bytes()) as u64, page_bytes() as u64).unwrap();
        wake(&fd, at as u64, length as u64).unwrap();
        let beyond = copy(&fd, (at + length) as u64, &data).unwrap_err();
        assert_eq!(beyond.raw_os_error(), Some(libc::ENOENT));
    }
}
