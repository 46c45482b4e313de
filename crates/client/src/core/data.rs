//! Reads and writes of files, of any length and in any number of buffers.
#![allow(unsafe_code)]

use super::Core;
use crate::Error;
use crate::convert::wrote;
use crate::lent::Buffer;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use towline_wire::limits::TRANSFER_BYTES_MAX;
use towline_wire::{Errno, Request};

/// Returns the length of several buffers; `EINVAL` if that is more than a system call could return.
fn total(mut lengths: impl Iterator<Item = usize>) -> Result<usize, Error> {
    let total = lengths.try_fold(0usize, |sum, length| sum.checked_add(length));
    total.filter(|total| isize::try_from(*total).is_ok()).ok_or(Errno::EINVAL.into())
}

impl Core {
    pub(crate) fn read(
        self: &Arc<Self>,
        handle: u64,
        target: &mut [u8],
        offset: u64,
    ) -> Result<usize, Error> {
        self.read_into(handle, target.len(), offset, |done, length| {
            // SAFETY: `read_into` returns once the request is over, and uses the range for no other meanwhile.
            unsafe { Buffer::target(&mut target[done..done + length]) }
        })
    }

    /// Reads into several buffers, one after the other.
    pub(crate) fn read_vectored(
        self: &Arc<Self>,
        handle: u64,
        targets: &mut [IoSliceMut<'_>],
        offset: u64,
    ) -> Result<usize, Error> {
        if let [target] = targets {
            return self.read(handle, target, offset);
        }
        let bytes = total(targets.iter().map(|target| target.len()))?;
        self.read_into(handle, bytes, offset, |done, length| {
            // SAFETY: as in `read`.
            unsafe { Buffer::targets(targets, done, length) }
        })
    }

    /// Reads so many bytes into what `lend` returns for each range of them.
    fn read_into(
        self: &Arc<Self>,
        handle: u64,
        bytes: usize,
        offset: u64,
        mut lend: impl FnMut(usize, usize) -> Buffer,
    ) -> Result<usize, Error> {
        let mut done = 0;
        loop {
            let length = (bytes - done).min(TRANSFER_BYTES_MAX);
            let request =
                Request::Read { handle, offset: offset + done as u64, length: length as u32 };
            let target = lend(done, length);
            let read = self.ask_lent(&[request], Buffer::none(), target, |outcome| {
                outcome.single()?;
                Ok(outcome.payload)
            });
            match read {
                Ok(count) => {
                    done += count;
                    if count < length || done == bytes {
                        return Ok(done);
                    }
                }
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn write(
        self: &Arc<Self>,
        handle: u64,
        data: &[u8],
        offset: u64,
        flags: u32,
    ) -> Result<usize, Error> {
        self.write_from(handle, data.len(), offset, flags, |done, length| {
            // SAFETY: `write_from` returns once the request is over.
            unsafe { Buffer::source(&data[done..done + length]) }
        })
    }

    /// Writes several buffers, one after the other.
    pub(crate) fn write_vectored(
        self: &Arc<Self>,
        handle: u64,
        sources: &[IoSlice<'_>],
        offset: u64,
        flags: u32,
    ) -> Result<usize, Error> {
        if let [source] = sources {
            return self.write(handle, source, offset, flags);
        }
        let bytes = total(sources.iter().map(|source| source.len()))?;
        self.write_from(handle, bytes, offset, flags, |done, length| {
            // SAFETY: as in `write`.
            unsafe { Buffer::sources(sources, done, length) }
        })
    }

    /// Writes so many bytes from what `lend` returns for each range of them.
    fn write_from(
        self: &Arc<Self>,
        handle: u64,
        bytes: usize,
        offset: u64,
        flags: u32,
        lend: impl Fn(usize, usize) -> Buffer,
    ) -> Result<usize, Error> {
        let mut done = 0;
        loop {
            let length = (bytes - done).min(TRANSFER_BYTES_MAX);
            let request = Request::Write {
                handle,
                offset: offset + done as u64,
                length: length as u32,
                flags,
            };
            let source = lend(done, length);
            let answer = self.ask_lent(&[request], source, Buffer::none(), |outcome| {
                wrote(outcome.single()?, length)
            });
            let written = match answer {
                Ok((written, _)) => written,
                // If this counted as a short write, the caller would repeat what may have been done.
                Err(error @ (Error::Unknown | Error::Protocol(_))) => return Err(error),
                Err(error) if done == 0 => return Err(error),
                Err(_) => return Ok(done),
            };
            done += written;
            if written < length || done == bytes {
                return Ok(done);
            }
        }
    }
}
