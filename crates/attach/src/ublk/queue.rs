//! One queue of a device: fetches requests, passes them to its back end, and reports the results.
//!
//! There is one command for each tag. Either the kernel has it (it waits for a request), or we have it
//! (its request is at the back end). The system call that waits for the next event also hands all
//! commands of the last turn to the kernel.
#![allow(unsafe_code)]

use super::abi::{self, Descriptor, IoCommand, operation};
use crate::{Backend, Error, Finished, Operation, Request};
use io_uring::{IoUring, opcode, squeue, types};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use zerocopy::IntoBytes;

/// User data of polls for reading and for writing, plus the descriptor. Smaller numbers are tags.
const POLL_READ: u64 = 1 << 32;
const POLL_WRITE: u64 = 1 << 33;

/// `PR_SET_IO_FLUSHER` of the kernel's `linux/prctl.h`.
const SET_IO_FLUSHER: i32 = 57;

/// What a queue needs to know about its device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) number: u16,
    pub(super) depth: u16,
    pub(super) buffer_bytes: usize,
}

/// Descriptors of the requests of a queue, which the kernel writes.
struct Descriptors {
    start: *const Descriptor,
    bytes: usize,
    depth: u16,
}

impl Descriptors {
    fn map(device: BorrowedFd<'_>, shape: Shape) -> io::Result<Self> {
        let page = towline_mem::page_bytes();
        let bytes = (usize::from(shape.depth) * size_of::<Descriptor>()).next_multiple_of(page);
        let apart = (abi::DEPTH_MAX * size_of::<Descriptor>()).next_multiple_of(page);
        let offset = u64::from(shape.number) * apart as u64;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                device,
                offset,
            )
        }?;
        Ok(Self { start: start.cast::<Descriptor>().cast_const(), bytes, depth: shape.depth })
    }

    /// Returns the request of a tag whose command the kernel has completed and not got back yet.
    fn of(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "a tag beyond the queue");
        // SAFETY: the address is inside the mapping, which is page-aligned and lives as long as `self`. The
        // kernel writes a descriptor before it completes the command, and not while we have the command.
        unsafe { self.start.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: `map` created this mapping, and no reference into it is ever given out.
        let _ = unsafe { rustix::mm::munmap(self.start.cast_mut().cast(), self.bytes) };
    }
}

/// One queue, driven by the thread that created it.
pub(super) struct Queue<'a> {
    ring: IoUring,
    device: BorrowedFd<'a>,
    shape: Shape,
    descriptors: Descriptors,
    /// Buffers of the tags that the kernel has, which may write to them at any time.
    buffers: Vec<Vec<u8>>,
    /// Addresses of the buffers of all tags.
    addresses: Vec<u64>,
    /// Number of tags that the kernel or the back end has, until the device is stopped.
    alive: u16,
    armed: [Option<RawFd>; 2],
}

impl<'a> Queue<'a> {
    pub(super) fn new(device: BorrowedFd<'a>, shape: Shape) -> Result<Self, Error> {
        let failed = |error| Error::system(format_args!("queue {}", shape.number))(error);
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(u32::from(shape.depth).next_power_of_two() * 2)
            .build(u32::from(shape.depth).next_power_of_two())
            .map_err(failed)?;
        let descriptors = Descriptors::map(device, shape).map_err(failed)?;
        // SAFETY: changes a property of this thread only: when the thread needs memory, the kernel writes
        // no pages out for it, because these might belong to this very device. Fails without privileges.
        unsafe { libc::prctl(SET_IO_FLUSHER, 1, 0, 0, 0) };
        // Zeroed memory takes no pages until the first long request touches it.
        let buffers: Vec<Vec<u8>> = (0..shape.depth).map(|_| vec![0; shape.buffer_bytes]).collect();
        let addresses = buffers.iter().map(|buffer| buffer.as_ptr() as u64).collect();
        Ok(Self {
            ring,
            device,
            shape,
            descriptors,
            buffers,
            addresses,
            alive: 0,
            armed: [None; 2],
        })
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: a command names a buffer in `buffers`, which stays until the command comes
            // back, see `Drop`. A poll names only a descriptor.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            match self.ring.submit() {
                Ok(_) => (),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
        }
    }

    fn give(&mut self, number: u32, tag: u16, result: i32) -> io::Result<()> {
        let command = IoCommand {
            queue: self.shape.number,
            tag,
            result,
            address: self.addresses[usize::from(tag)],
        };
        let mut payload = [0; 16];
        payload.copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd16::new(types::Fd(self.device.as_raw_fd()), number)
            .cmd(payload)
            .build()
            .user_data(u64::from(tag));
        self.push(&entry)
    }

    /// Gives all commands to the kernel. The device can start once all its queues have done so.
    pub(super) fn fetch(&mut self) -> io::Result<()> {
        for tag in 0..self.shape.depth {
            self.give(abi::FETCH, tag, 0)?;
            self.alive += 1;
        }
        self.ring.submit().map(drop)
    }

    /// Serves the queue until the device is stopped.
    pub(super) fn serve(&mut self, backend: &mut dyn Backend, size: &AtomicU64) -> io::Result<()> {
        let mut completions = Vec::new();
        while self.alive > 0 {
            self.arm(backend.interest())?;
            self.wait(backend.deadline())?;
            completions.extend(self.ring.completion().map(|c| (c.user_data(), c.result())));
            for (data, result) in completions.drain(..) {
                if data >= POLL_READ {
                    let which = usize::from(data >= POLL_WRITE);
                    if self.armed[which] == Some(data as u32 as RawFd) {
                        self.armed[which] = None;
                    }
                } else if result == 0 {
                    self.request(data as u16, backend, size.load(Ordering::Relaxed))?;
                } else {
                    // The device is being stopped, and this tag gets no more requests.
                    self.alive -= 1;
                    if result != -libc::ENODEV {
                        let error = io::Error::from_raw_os_error(-result);
                        log::error!("queue {}: command {data} failed: {error}", self.shape.number);
                    }
                }
            }
            backend.turn();
            while let Some(finished) = backend.finished() {
                self.finish(finished)?;
            }
        }
        Ok(())
    }

    /// Polls the back end's descriptor, unless a poll is armed already.
    fn arm(&mut self, interest: Option<(RawFd, bool)>) -> io::Result<()> {
        let Some((fd, writing)) = interest else { return Ok(()) };
        for (which, wanted, events, data) in [
            (0, true, libc::POLLIN | libc::POLLRDHUP, POLL_READ),
            (1, writing, libc::POLLOUT, POLL_WRITE),
        ] {
            if wanted && self.armed[which] != Some(fd) {
                let entry = opcode::PollAdd::new(types::Fd(fd), events as u32)
                    .build()
                    .user_data(data | u64::from(fd as u32));
                self.push(&entry)?;
                self.armed[which] = Some(fd);
            }
        }
        Ok(())
    }

    fn wait(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let waited = match deadline {
            None => self.ring.submit_and_wait(1),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                let left = types::Timespec::from(left);
                self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&left))
            }
        };
        match waited {
            Err(error)
                if ![Some(libc::ETIME), Some(libc::EINTR)].contains(&error.raw_os_error()) =>
            {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Begins the request of a command that the kernel has completed.
    fn request(&mut self, tag: u16, backend: &mut dyn Backend, size: u64) -> io::Result<()> {
        let descriptor = self.descriptors.of(tag);
        let flags = descriptor.operation;
        let durable = flags & operation::FUA != 0;
        let operation = match flags & operation::MASK {
            operation::READ => Operation::Read,
            operation::WRITE => Operation::Write { durable },
            operation::FLUSH => Operation::Flush,
            operation::DISCARD => Operation::Trim,
            operation::WRITE_ZEROES => {
                Operation::Zero { allocate: flags & operation::NO_UNMAP != 0, durable }
            }
            other => {
                log::error!("queue {}: unknown operation {other}", self.shape.number);
                return self.give(abi::COMMIT_AND_FETCH, tag, -libc::EOPNOTSUPP);
            }
        };
        let offset = descriptor.first_sector.saturating_mul(512);
        let length = u64::from(descriptor.sectors) * 512;
        let moves = matches!(operation, Operation::Read | Operation::Write { .. });
        let fits = offset.checked_add(length).is_some_and(|end| end <= size)
            && length <= u64::from(u32::MAX)
            && (!moves || length <= self.shape.buffer_bytes as u64);
        if !fits && operation != Operation::Flush {
            return self.give(abi::COMMIT_AND_FETCH, tag, -libc::EIO);
        }
        let mut buffer = std::mem::take(&mut self.buffers[usize::from(tag)]);
        if moves {
            buffer.truncate(length as usize);
        }
        // A flush has no range, whatever the descriptor says.
        let (offset, length) =
            if operation == Operation::Flush { (0, 0) } else { (offset, length as u32) };
        backend.begin(Request { tag, operation, offset, length, buffer });
        Ok(())
    }

    /// Returns the buffer of a tag at its full length.
    fn whole(&mut self, tag: u16, mut buffer: Vec<u8>) -> Vec<u8> {
        let bytes = self.shape.buffer_bytes;
        let address = &mut self.addresses[usize::from(tag)];
        if buffer.as_ptr() as u64 == *address && buffer.capacity() == bytes {
            // SAFETY: this is the buffer that was created with this many initialized bytes. It has only been
            // truncated since, and back ends do not change its capacity.
            unsafe { buffer.set_len(bytes) };
            return buffer;
        }
        let mut whole = vec![0; bytes];
        let length = buffer.len().min(bytes);
        whole[..length].copy_from_slice(&buffer[..length]);
        *address = whole.as_ptr() as u64;
        whole
    }

    /// Reports the result of a request to the kernel, and fetches the next one.
    fn finish(&mut self, finished: Finished) -> io::Result<()> {
        let Finished { tag, result, buffer } = finished;
        self.buffers[usize::from(tag)] = self.whole(tag, buffer);
        let result = match result {
            Ok(()) => {
                // The kernel ignores this number for flushes and trims.
                (u64::from(self.descriptors.of(tag).sectors) * 512).min(i32::MAX as u64) as i32
            }
            Err(error) => -error,
        };
        self.give(abi::COMMIT_AND_FETCH, tag, result)
    }
}

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        if self.alive > 0 {
            // The kernel may still write to the buffers.
            std::mem::forget(std::mem::take(&mut self.buffers));
        }
    }
}
