//! Sends pages of a file through a pipe of our own.
//!
//! `sendfile(2)` has a pipe inside, of 16 pages: it finds 16, sends them, and so on, and competes with the
//! receiver for the socket all the time. Through a larger pipe many pages are found at once and then sent at
//! once, which needs up to a quarter less processor time.

use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::{Errno, Result};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

/// A user without privileges gets 16384 pages for all pipes, and no more than 1 MiB for one.
const PIPE_BYTES: usize = 512 * 1024;

/// Less is sent by `sendfile(2)`, in one call instead of two. From here on the pipe is measurably better.
const BYTES_MIN: usize = 256 * 1024;

/// Pages of all pipes of a user without privileges (`pipe-user-pages-soft` of proc(5)), by default. A user who
/// has reached that gets only tiny pipes, for all programs.
const USER_BYTES: usize = 16384 * 4096;

/// A pipe for the sends of one thread, opened when it is first needed. Empty between sends.
#[derive(Debug)]
pub struct Pipe {
    ends: Option<Ends>,
    is_allowed: bool,
    /// The socket did not take all at the last send, and will be asked again at once.
    was_full: bool,
}

#[derive(Debug)]
struct Ends {
    output: OwnedFd,
    input: OwnedFd,
}

impl Ends {
    fn open() -> Result<Self> {
        let (output, input) = pipe_with(PipeFlags::CLOEXEC)?;
        fcntl_setpipe_size(&input, PIPE_BYTES)?;
        Ok(Self { output, input })
    }
}

impl Pipe {
    /// A pipe for one of `count` threads. Of more threads than may have a quarter of what the user gets, none has
    /// a pipe, and `sendfile(2)` does it all.
    #[must_use]
    pub fn one_of(count: usize) -> Self {
        Self { ends: None, is_allowed: count <= USER_BYTES / 4 / PIPE_BYTES, was_full: false }
    }

    /// No pipe: `sendfile(2)` does it all.
    #[must_use]
    pub fn none() -> Self {
        Self::one_of(usize::MAX)
    }

    /// Takes the pipe if this send is to use it.
    fn take(&mut self, length: usize, calls: &mut u64) -> Option<Ends> {
        // A socket that is full need not be told with many pages.
        let was_full = std::mem::take(&mut self.was_full);
        if !self.is_allowed || was_full || length < BYTES_MIN {
            return None;
        }
        self.ends.take().or_else(|| {
            *calls += 2;
            let opened = Ends::open();
            // There may be descriptors again the next time.
            let is_passing = matches!(opened, Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM));
            self.is_allowed = opened.is_ok() || is_passing;
            opened.ok()
        })
    }

    /// Sends up to `length` bytes of a file, from `offset` on, over a socket that does not block. Zero: the file
    /// ends at or before `offset`. Adds the system calls made to `calls`.
    ///
    /// # Errors
    /// Those of `sendfile(2)`.
    pub(crate) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
        mut offset: u64,
        length: usize,
        calls: &mut u64,
    ) -> Result<usize> {
        *calls += 1;
        let Some(ends) = self.take(length, calls) else {
            return rustix::fs::sendfile(socket, file, Some(&mut offset), length);
        };
        let (at, most) = (Some(&mut offset), length.min(PIPE_BYTES));
        // After an error the pipe is closed, with whatever is in it.
        let found = splice(file, at, &ends.input, None, most, SpliceFlags::empty())?;
        let mut sent = 0;
        while sent < found {
            *calls += 1;
            let flags = SpliceFlags::NONBLOCK;
            let result = splice(&ends.output, None, socket, None, found - sent, flags);
            if let Ok(count @ 1..) = result {
                sent += count;
                continue;
            }
            // What is left of the pages goes with the pipe, and is found again when the socket has room.
            *calls += 2;
            self.was_full = sent > 0;
            return match result {
                _ if sent > 0 => Ok(sent),
                Ok(_) => Err(Errno::IO),
                Err(error) => Err(error),
            };
        }
        self.ends = Some(ends);
        Ok(sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use std::io::{Read, Seek, SeekFrom, Write};
    use std::os::unix::net::UnixStream;

    fn pair() -> (UnixStream, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        (near, far)
    }

    fn file(bytes: &[u8]) -> std::fs::File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.seek(SeekFrom::Start(7)).unwrap();
        file
    }

    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at * 31 + at / 4096) as u8).collect()
    }

    /// However little the socket takes at once, all bytes arrive in order; the offset of the file stays.
    #[test]
    fn what_does_not_fit_is_sent_later() {
        let bytes = pattern(3 << 20);
        let mut file = file(&bytes);
        let (near, far) = pair();
        let (start, end) = (1234, bytes.len() - 77);
        let receiver = std::thread::spawn(move || {
            let mut got = Vec::new();
            let mut room = vec![0; 50_000];
            loop {
                match (&far).read(&mut room).unwrap() {
                    0 => return got,
                    count => got.extend_from_slice(&room[..count]),
                }
            }
        });
        let (mut pipe, mut at, mut calls, mut full) = (Pipe::one_of(1), start, 0, 0);
        while at < end {
            match pipe.send(near.as_fd(), file.as_fd(), at as u64, end - at, &mut calls) {
                Ok(count) => at += count,
                Err(Errno::AGAIN) => {
                    full += 1;
                    std::thread::yield_now();
                }
                Err(error) => panic!("{error}"),
            }
        }
        drop(near);
        assert!(receiver.join().unwrap() == bytes[start..end]);
        assert!(full > 0 && calls > 0, "the socket was never full");
        assert_eq!(file.stream_position().unwrap(), 7);
    }

    #[test]
    fn a_file_that_ends_early_gives_what_it_has() {
        let (near, far) = pair();
        let file = file(&pattern(100_000));
        let (mut pipe, mut calls) = (Pipe::one_of(1), 0);
        let mut send = |at| pipe.send(near.as_fd(), file.as_fd(), at, 1 << 20, &mut calls).unwrap();
        assert_eq!((send(40_000), send(100_000), send(1 << 30)), (60_000, 0, 0));
        drop(near);
        let mut got = Vec::new();
        (&far).read_to_end(&mut got).unwrap();
        assert!(got == pattern(100_000)[40_000..]);
    }

    /// What an interrupted send left in the pipe must not be sent to the next client.
    #[test]
    fn a_pipe_is_empty_after_a_send_that_failed() {
        let file = file(&pattern(1 << 20));
        let (gone, far) = pair();
        drop(far);
        let (near, far) = pair();
        let (mut pipe, mut calls) = (Pipe::one_of(1), 0);
        let failed = pipe.send(gone.as_fd(), file.as_fd(), 0, 1 << 20, &mut calls);
        assert_eq!(failed, Err(Errno::PIPE));
        let count = pipe.send(near.as_fd(), file.as_fd(), 300_000, 1 << 19, &mut calls).unwrap();
        drop(near);
        let mut got = Vec::new();
        (&far).read_to_end(&mut got).unwrap();
        assert!(count > 0 && got == pattern(1 << 20)[300_000..300_000 + count]);
    }

    #[test]
    fn without_a_pipe_sendfile_does_it() {
        let file = file(&pattern(1 << 20));
        let (near, far) = pair();
        let (mut pipe, mut calls) = (Pipe::none(), 0);
        let count = pipe.send(near.as_fd(), file.as_fd(), 5, 1 << 20, &mut calls).unwrap();
        drop(near);
        let mut got = Vec::new();
        (&far).read_to_end(&mut got).unwrap();
        assert!(count > 0 && got == pattern(1 << 20)[5..5 + count]);
        assert_eq!(calls, 1);
    }
}
