//! Copies bytes into a remote file with several writes on their way: two, so that a server writes while the
//! next bytes are read, and more for a far one, so that it is never without work. All are answered before the
//! call returns: as after any other write, everybody sees then what it has copied.

use super::copies::{advance, advance_file, offset, place_of};
use super::maps;
use crate::ahead::FAR;
use crate::descriptors::{self, Open};
use crate::guard::checked;
use crate::{limits, remote};
use libc::{c_int, off64_t, size_t};
use std::collections::VecDeque;
use std::future::Future;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;
use towline_client::{Error, Operation};

/// Bytes of a write: as many as can be sent with the request for it.
const WRITE_BYTES: usize = 256 * 1024;
/// Number of writes on their way: at first, since their buffers then stay in the caches, and at most (4 MiB).
const WRITES: RangeInclusive<usize> = 2..=16;

/// Bytes requested at once of a remote file that is copied to another server.
const BLOCK_BYTES: usize = 4 * 1024 * 1024;

type Answer = Result<(usize, Vec<u8>), Error>;

/// A write on its way.
struct Write {
    at: u64,
    length: usize,
    sent: Instant,
    operation: Operation<(usize, Vec<u8>)>,
}

/// A copy into a file.
struct Upload {
    target: Open,
    /// In the order of the file.
    under_way: VecDeque<Write>,
    /// How many of them to have.
    depth: usize,
    spare: Vec<Vec<u8>>,
    /// Bytes at the beginning that are written.
    written: usize,
    /// A write was short or failed, the latter with this number.
    is_cut: bool,
    failed: Option<i32>,
}

impl Upload {
    /// Returns a buffer, or `None` if out of memory.
    fn buffer(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.try_reserve_exact(bytes.saturating_sub(buffer.len())).ok()?;
        buffer.resize(bytes, 0);
        Some(buffer)
    }

    fn send(&mut self, data: Vec<u8>, at: u64) {
        let (length, sent) = (data.len(), Instant::now());
        match remote::with(self.target, |file| file.start_write_at(data, at)) {
            Ok(operation) => self.under_way.push_back(Write { at, length, sent, operation }),
            Err(error) => self.stop(Some(error)),
        }
    }

    /// Takes the answer to the first write if it is there, or waits for it. Returns false if it is not there.
    fn take_first(&mut self, waits: bool) -> bool {
        let Some(mut first) = self.under_way.pop_front() else { return false };
        let look = Pin::new(&mut first.operation).poll(&mut Context::from_waker(Waker::noop()));
        match look {
            Poll::Ready(answer) => self.took(first.at, first.length, answer),
            Poll::Pending if waits => {
                let answer = first.operation.wait();
                if first.sent.elapsed() > FAR {
                    self.depth = (4 * self.depth).min(*WRITES.end());
                }
                self.took(first.at, first.length, answer);
            }
            Poll::Pending => {
                self.under_way.push_front(first);
                return false;
            }
        }
        true
    }

    fn took(&mut self, at: u64, length: usize, answer: Answer) {
        match answer {
            Ok((count, data)) => {
                let count = count.min(data.len());
                maps::wrote(self.target, at as i64, &data[..count]);
                self.written += if self.is_cut { 0 } else { count };
                if count < length {
                    self.stop(None);
                }
                self.spare.push(data);
            }
            Err(error) => self.stop(Some(remote::number(error))),
        }
    }

    /// Nothing counts that is written behind this.
    fn stop(&mut self, failed: Option<i32>) {
        if !self.is_cut {
            (self.is_cut, self.failed) = (true, failed);
        }
    }
}

/// Copies `count` bytes to offset `at` of a file. `read` fills a buffer from the given place of them, and
/// returns fewer bytes only at the end of the source. Returns the number of bytes copied, fewer if the source
/// ends or something fails behind them; then more may have been written further on.
///
/// # Errors
/// Those of reading and writing, if nothing was copied.
fn upload(
    target: Open,
    at: u64,
    count: usize,
    mut read: impl FnMut(&mut [u8], usize) -> Result<usize, i32>,
) -> Result<usize, i32> {
    let mut upload = Upload {
        target,
        under_way: VecDeque::new(),
        depth: *WRITES.start(),
        spare: Vec::new(),
        written: 0,
        is_cut: false,
        failed: None,
    };
    let (mut sent, mut ends) = (0, Ok(false));
    loop {
        let is_over = upload.is_cut || sent == count || ends != Ok(false);
        let waits = is_over || upload.under_way.len() >= upload.depth;
        if upload.take_first(waits) {
            continue;
        }
        if is_over {
            break;
        }
        let wanted = WRITE_BYTES.min(count - sent);
        let Some(mut data) = upload.buffer(wanted) else {
            ends = Err(libc::ENOMEM);
            continue;
        };
        let got = read(&mut data, sent);
        ends = got.map(|got| got < wanted);
        let got = got.unwrap_or(0);
        if got > 0 {
            data.truncate(got);
            upload.send(data, at + sent as u64);
            sent += got;
        }
    }
    match upload.failed.map_or(ends, Err) {
        Err(error) if upload.written == 0 => Err(error),
        _ => Ok(upload.written),
    }
}

/// Reads a file that is copied into a remote one.
struct Source {
    descriptor: c_int,
    /// The file, if it is remote.
    remote: Option<Open>,
    /// Bytes of a remote file from this offset on, got by one request for many of them: what is read ahead would
    /// be forgotten at each write.
    block: Vec<u8>,
    from: u64,
}

impl Source {
    /// Fills a buffer from an offset on, as far as the file goes. Offsets only grow.
    fn read(&mut self, room: &mut [u8], at: u64, left: usize) -> Result<usize, i32> {
        let Some(open) = self.remote else { return self.read_local(room, at) };
        let mut done = 0;
        while done < room.len() {
            let at = at + done as u64;
            let known = self.block.get((at - self.from) as usize..).unwrap_or_default();
            if known.is_empty() {
                self.block.resize(BLOCK_BYTES.min(left - done), 0);
                let got = remote::read_at(open, &mut self.block, at as i64)?;
                self.block.truncate(got);
                self.from = at;
                if got == 0 {
                    break;
                }
                continue;
            }
            let count = known.len().min(room.len() - done);
            room[done..done + count].copy_from_slice(&known[..count]);
            done += count;
        }
        Ok(done)
    }

    fn read_local(&self, room: &mut [u8], at: u64) -> Result<usize, i32> {
        let mut done = 0;
        while done < room.len() {
            let rest = &mut room[done..];
            let (to, length) = (rest.as_mut_ptr() as usize, rest.len());
            let arguments = [self.descriptor as usize, to, length, at as usize + done, 0, 0];
            // SAFETY: the buffer outlives the call.
            match unsafe { checked(libc::SYS_pread64, arguments) } {
                Ok(0) => break,
                // Some file systems read less than there is.
                Ok(count) => done += count,
                // The next read reports it.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }
}

/// Copies a regular file, or a device with blocks, into a remote file; stops at the first short piece.
pub(super) unsafe fn copy_to_remote(
    from: c_int,
    from_at: *mut off64_t,
    target: Open,
    to_at: *mut off64_t,
    count: size_t,
) -> Result<isize, i32> {
    let source = descriptors::find(from);
    // SAFETY: the program passes null or offsets.
    let (read_at, write_at) = unsafe { (place_of(from_at), place_of(to_at)) };
    let write_at = offset(target, write_at)?;
    let read_at = match (source, read_at) {
        (Some(source), at) => offset(source, at)?,
        (None, Some(at)) => u64::try_from(at).map_err(|_| libc::EINVAL)?,
        (None, None) => {
            let arguments = [from as usize, 0, libc::SEEK_CUR as usize, 0, 0, 0];
            // SAFETY: the call takes no addresses.
            unsafe { checked(libc::SYS_lseek, arguments)? as u64 }
        }
    };
    let count = match limits::file_bytes() {
        None => count,
        Some(limit) => limits::room(limit, write_at, count)?,
    };
    let mut bytes = Source { descriptor: from, remote: source, block: Vec::new(), from: read_at };
    let copied = upload(target, write_at, count, |room, at| {
        bytes.read(room, read_at + at as u64, count - at)
    })?;
    // SAFETY: the program passes null or offsets.
    unsafe {
        match source {
            Some(source) => advance_file(source, from_at, copied),
            None if from_at.is_null() => {
                let arguments = [from as usize, copied, libc::SEEK_CUR as usize, 0, 0, 0];
                checked(libc::SYS_lseek, arguments)?;
            }
            None => advance(from_at, copied),
        }
        advance_file(target, to_at, copied);
    }
    Ok(copied as isize)
}
