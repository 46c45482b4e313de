//! Copies bytes into a remote file with several writes on their way: two, so that a server writes while the next
//! bytes are read, and more for a far one, so that it is never without work. All are answered before the call returns: like any
//! other write, everybody sees then what it has copied.

use super::maps;
use crate::ahead::FAR;
use crate::descriptors::Open;
use crate::remote;
use std::collections::VecDeque;
use std::future::Future;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;
use towline_client::{Error, Operation};

/// Bytes of a write: as many as can be sent with the request for it.
const WRITE_BYTES: usize = 256 * 1024;
/// Number of writes on their way: at first, since their buffers then stay in the caches, and at most, 4 MiB in all.
const WRITES: RangeInclusive<usize> = 2..=16;

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
/// returns fewer bytes only at the end of the source. Returns the number of bytes copied, fewer if the source ends or something
/// fails behind them; then more may have been written further on.
///
/// # Errors
/// Those of reading and writing, if nothing was copied.
pub(super) fn upload(
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
