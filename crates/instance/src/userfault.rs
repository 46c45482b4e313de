//! `userfaultfd(2)`: memory whose missing pages another process fills when they are touched.
#![allow(unsafe_code)]

use rustix::ioctl::{self, Opcode, Updater, opcode};
use rustix::mm::UserfaultfdFlags;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use towline_mem::page_bytes;

/// The letter of its `ioctl` calls, and its version.
const GROUP: u8 = 0xAA;
/// Missing pages of shared memory; pages whose touch raises `SIGBUS` (Linux 6.6).
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

/// `struct uffdio_register`, and that of poisoning.
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
    // SAFETY: private to this file, where each call gets the structure that it takes. Memory is changed
    // only in ranges that its owner registered, and there only pages that are missing.
    Ok(unsafe { ioctl::ioctl(fd, Updater::<CALL, T>::new(value)) }?)
}

/// A new one for the memory of this process, which serves also what the kernel itself touches when the
/// program hands memory to system calls. It does not block.
///
/// # Errors
/// What the kernel says where this process may not have one, or it is older than Linux 6.6.
pub fn create() -> io::Result<OwnedFd> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // SAFETY: it does nothing before memory is registered with it.
    let fd = match unsafe { rustix::mm::userfaultfd(flags) } {
        Ok(fd) => fd,
        Err(_) => from_device(flags.bits())?,
    };
    call::<API, _>(&fd, &mut Api { version: u64::from(GROUP), features: FEATURES, calls: 0 })?;
    Ok(fd)
}

/// The way for those whom the administrator lets open the device.
fn from_device(flags: u32) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let device =
        rustix::fs::open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: the call takes flags, and gives a new descriptor, which is ours.
    unsafe {
        let made = ioctl::ioctl(&device, New(flags as usize))?;
        Ok(OwnedFd::from_raw_fd(made))
    }
}

/// Makes a descriptor out of the device.
struct New(usize);

// SAFETY: it takes flags in place of an address, and gives a descriptor.
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

/// From now on touching a missing page of these, in the process that made it, is told and waits. Whole
/// pages.
///
/// # Errors
/// What the kernel says.
pub fn register(fd: impl AsFd, start: usize, length: usize) -> io::Result<()> {
    let span = Span { start: start as u64, length: length as u64 };
    call::<REGISTER, _>(fd, &mut Ranged { span, mode: MODE_MISSING, result: 0 })
}

/// Lets those who wait for these pages look again.
///
/// # Errors
/// What the kernel says.
pub fn wake(fd: impl AsFd, start: u64, length: u64) -> io::Result<()> {
    call::<WAKE, _>(fd, &mut Span { start, length })
}

/// Fills missing pages with `data`, whole ones, as far as they are missing and registered, and lets
/// those go on who wait for them. Gives the bytes filled.
///
/// # Errors
/// What the kernel says when not even the first page could be filled: `EEXIST` where it is there
/// already, `ENOENT` where nothing is registered, `ESRCH` when the process has gone.
pub fn copy(fd: impl AsFd, to: u64, data: &[u8]) -> io::Result<usize> {
    let (from, length) = (data.as_ptr().expose_provenance() as u64, data.len() as u64);
    let mut copy = Copy { to, from, length, mode: 0, copied: 0 };
    match call::<COPY, _>(fd, &mut copy) {
        Ok(()) => Ok(data.len()),
        // A part of it.
        Err(_) if copy.copied > 0 => Ok(copy.copied as usize),
        Err(error) => Err(error),
    }
}

/// Makes touching these missing pages raise `SIGBUS`, also for those who wait for them.
///
/// # Errors
/// What the kernel says.
pub fn poison(fd: impl AsFd, start: u64, length: u64) -> io::Result<()> {
    call::<POISON, _>(fd, &mut Ranged { span: Span { start, length }, mode: 0, result: 0 })
}

/// Whether this process may have one: memory of remote files is then read when it is touched.
///
/// # Errors
/// Why not.
pub fn try_out() -> io::Result<()> {
    create().map(drop)
}

/// Bytes of a message of the kernel.
const MESSAGE_BYTES: usize = 32;
/// Most faults told at once.
pub const FAULTS_MAX: usize = 16;

/// The addresses of the pages for which somebody waits and that were not told yet, at most
/// [`FAULTS_MAX`].
///
/// # Errors
/// What the kernel says; `WouldBlock` when nobody waits.
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
