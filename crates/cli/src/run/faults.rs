//! Answers the page faults of one process.

use super::memory::Memory;
use super::pager::Run;
use super::source::{Opened, Source};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_instance::pager::{MESSAGE_BYTES, Message};
use towline_instance::userfault;
use towline_instance::{Taken, memory};
use towline_mem::page_bytes;
use towline_net::{Wait, peer_credentials, receive_descriptors};

/// Bytes to read around a page that is touched out of order: this costs little more than the page alone.
const AROUND: u64 = 64 << 10;
/// Maximum read-ahead, in bytes, for a program that goes on page by page: at first, and from a far server.
const AHEAD_MAX: RangeInclusive<u64> = 1 << 20..=8 << 20;
/// A read of the maximum that takes longer raises it, if it was so much faster, per byte, than a shorter one: from
/// a far server, more bytes hardly take longer.
const LONG: Duration = Duration::from_millis(4);
const BETTER: f64 = 1.3;
/// How often to check on a process that has closed its connection but may still be alive.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// How long to wait for a process to end; it may have executed another program instead.
const ENDING: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// A range of the process's memory that maps a file.
pub(super) struct Range {
    at: u64,
    length: u64,
    offset: u64,
    source: Arc<Source>,
    /// A descriptor of the file's placeholder. It keeps the file open, as the kernel does with a mapped file.
    open: Arc<OwnedFd>,
    memory: Option<Arc<Memory>>,
    pattern: Pattern,
}

impl Range {
    fn end(&self) -> u64 {
        self.at + self.length
    }

    /// Returns the part of the range between two addresses, or `None` if they do not overlap.
    fn part(&self, from: u64, to: u64) -> Option<Self> {
        let (at, end) = (from.max(self.at), to.min(self.end()));
        (at < end).then(|| Self {
            at,
            length: end - at,
            offset: self.offset + (at - self.at),
            source: self.source.clone(),
            open: self.open.clone(),
            memory: self.memory.clone(),
            pattern: Pattern::default(),
        })
    }

    /// Returns the start and length of the memory to fill when this page is touched.
    fn window(&self, page: u64) -> (u64, u64) {
        let (before, length) = self.pattern.window(page, self.offset + (page - self.at));
        let before = before.min(page - self.at);
        (page - before, (before + length).min(self.end() - (page - before)))
    }
}

/// In which order a process touches a range.
struct Pattern {
    /// Where the last bytes read end, and their number.
    last: (u64, u64),
    /// How many bytes a second were read then.
    rate: f64,
    /// Maximum number to read next.
    ahead_max: u64,
}

impl Default for Pattern {
    fn default() -> Self {
        Self { last: (0, 0), rate: 0.0, ahead_max: *AHEAD_MAX.start() }
    }
}

impl Pattern {
    /// Returns how many bytes to read before this page, and from it on, if nothing limits them.
    fn window(&self, page: u64, offset: u64) -> (u64, u64) {
        if page == self.last.0 {
            return (0, (2 * self.last.1).min(self.ahead_max));
        }
        // Read pieces that are aligned in the file.
        let before = offset % AROUND;
        (before, AROUND - before)
    }

    /// Notes what was read, and how long it took.
    fn read(&mut self, start: u64, length: u64, time: Duration) {
        let (before, rate) = (self.last.1, length as f64 / time.as_secs_f64());
        let is_better = before < length && rate > BETTER * self.rate;
        if length == self.ahead_max && time > LONG && is_better {
            self.ahead_max = (2 * self.ahead_max).min(*AHEAD_MAX.end());
        }
        (self.last, self.rate) = ((start + length, length.max(AROUND)), rate);
    }
}

/// Why a process is no longer served.
enum End {
    /// The process has ended or executed another program.
    Gone,
    /// Its message makes no sense, or serving it failed.
    Failed(io::Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ESRCH) => Self::Gone,
            _ => Self::Failed(error),
        }
    }
}

impl From<Errno> for End {
    fn from(error: Errno) -> Self {
        io::Error::from(error).into()
    }
}

/// A process with mappings that are filled on demand.
pub(super) struct Process<'a> {
    run: &'a Run,
    /// `None` once the other end has closed it.
    socket: Option<OwnedFd>,
    userfault: OwnedFd,
    /// Pidfd of the process, readable when it has ended.
    ended: Option<OwnedFd>,
    /// Closing it ends the process with `SIGBUS`, since nobody would fill its pages any more.
    _lifeline: OwnedFd,
    ranges: Vec<Range>,
    buffer: Vec<u8>,
}

impl<'a> Process<'a> {
    /// Serves the process at the other end of a connection until it ends.
    pub(super) fn serve(run: &'a Run, socket: OwnedFd) {
        let ended = Self::meet(run, socket).map(|mut process| {
            let end = loop {
                if let Err(end) = process.turn() {
                    break end;
                }
            };
            process.write_back();
            end
        });
        if let Ok(End::Failed(error)) | Err(End::Failed(error)) = ended {
            log::warn!("a process's mappings are no longer filled: {error}");
        }
    }

    fn meet(run: &'a Run, socket: OwnedFd) -> Result<Self, End> {
        let (Some(Message::Hello { token }), mut with) = receive(&socket, Wait::Any)? else {
            return Err(strange("it does not say hello").into());
        };
        let (Some(lifeline), Some(userfault), true) = (with.pop(), with.pop(), with.is_empty())
        else {
            return Err(strange("hello without its descriptors").into());
        };
        let ranges = match token {
            0 => {
                rustix::io::write(&socket, &0i32.to_ne_bytes()).map_err(io::Error::from)?;
                Vec::new()
            }
            token => run.announced(token).ok_or_else(|| strange("a child of nobody"))?,
        };
        let buffer = vec![0; *AHEAD_MAX.start() as usize];
        let process = peer_credentials(socket.as_fd())?.process;
        let ended = process.and_then(|process| pidfd_open(process, PidfdFlags::empty()).ok());
        let socket = Some(socket);
        Ok(Self { run, socket, userfault, ended, _lifeline: lifeline, ranges, buffer })
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) -> Result<(), End> {
        let mut wait = vec![PollFd::new(&self.userfault, PollFlags::IN)];
        wait.extend(self.socket.as_ref().map(|socket| PollFd::new(socket, PollFlags::IN)));
        let limit = self.socket.is_none().then_some(&LOOK);
        match poll(&mut wait, limit) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_touched = !wait[0].revents().is_empty();
        let is_told = wait.get(1).is_some_and(|socket| !socket.revents().is_empty());
        if is_told {
            self.listen()?;
        }
        if self.socket.is_none() {
            self.look()?;
        }
        if is_touched {
            match userfault::faults(&self.userfault) {
                Ok(pages) => self.touched(&pages)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Writes back, after the process has ended, what it could not write itself, for instance because it was
    /// killed.
    fn write_back(&self) {
        let is_shared = |range: &&Range| range.memory.is_some() && range.source.is_writable;
        let mut ranges = self.ranges.iter().filter(is_shared).peekable();
        if let (Some(_), Some(ended)) = (ranges.peek(), &self.ended) {
            // An ending process first frees its memory, then closes the locks on the memory of its mappings.
            let _ = poll(&mut [PollFd::new(ended, PollFlags::IN)], Some(&ENDING));
        }
        for range in ranges {
            let Some(memory) = &range.memory else { continue };
            if let Err(error) = memory.write_back(&*range.source, false) {
                log::warn!(
                    "cannot write back everything that a program stored to a mapped file: {error}"
                );
            }
        }
    }

    /// Fails if the process is gone. If only its connection is closed, it may simply have closed all its
    /// descriptors.
    fn look(&self) -> Result<(), End> {
        // Just below 2^47, the end of the address space of x86-64 programs, where no file is mapped.
        let nowhere = (1u64 << 47) - 3 * page_bytes() as u64;
        match userfault::copy(&self.userfault, nowhere, &self.buffer[..page_bytes()]) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(End::Gone),
            _ => Ok(()),
        }
    }

    /// Handles all messages that have arrived.
    fn listen(&mut self) -> Result<(), End> {
        while let Some(socket) = &self.socket {
            match receive(socket, Wait::No) {
                Ok((Some(message), with)) => self.told(message, with)?,
                Ok((None, _)) => self.socket = None,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(error.into());
                }
                Err(_) => self.socket = None,
            }
        }
        Ok(())
    }

    fn told(&mut self, message: Message, mut with: Vec<OwnedFd>) -> Result<(), End> {
        match message {
            Message::Begin { at, length, offset, entry, is_shared } => {
                let begun =
                    with.pop().ok_or_else(|| strange("a mapping of no file")).and_then(|open| {
                        let (source, memory) = self.open(entry, is_shared)?;
                        self.remove(at, length);
                        let (source, memory) = (Arc::new(source), memory.map(Arc::new));
                        self.ranges.push(Range {
                            at,
                            length,
                            offset,
                            source,
                            open: Arc::new(open),
                            memory,
                            pattern: Pattern::default(),
                        });
                        Ok(())
                    });
                let number =
                    begun.err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
                if let Some(socket) = &self.socket {
                    // Fails only if the process is gone, which is noticed next.
                    let _ = rustix::io::write(socket, &number.to_ne_bytes());
                }
            }
            Message::End { at, length } => {
                self.remove(at, length);
                // Threads that still wait there look again and see that the mapping is gone.
                userfault::wake(&self.userfault, at, length)?;
            }
            Message::Resized { from, old, to, new } => {
                let part = self.ranges.iter().find_map(|range| range.part(from, from + old));
                let Some(mut range) = part.filter(|part| part.length == old) else {
                    return Err(strange("a mapping that nobody knows has moved").into());
                };
                self.remove(from, old);
                self.remove(to, new);
                (range.at, range.length) = (to, new);
                self.ranges.push(range);
                userfault::wake(&self.userfault, from, old)?;
            }
            Message::Fork { token } => {
                let parts = self.ranges.iter().filter_map(|range| range.part(0, u64::MAX));
                self.run.announce(token, parts.collect());
            }
            Message::Hello { .. } => return Err(strange("hello twice").into()),
        }
        Ok(())
    }

    /// Returns the pager's own access to a file that a process has open.
    fn open(&self, entry: u32, is_shared: bool) -> io::Result<(Source, Option<Memory>)> {
        let gone = || io::Error::from_raw_os_error(libc::EBADF);
        let entry = self.run.state.entry(entry as usize).ok_or_else(gone)?;
        let opened = Opened::of(entry);
        if entry.taken() != Taken::Open {
            return Err(gone());
        }
        let (client, url) = self.run.servers.get(opened.mount as usize).ok_or_else(gone)?;
        let name = || self.run.mappings.join(memory::name(opened.mount, opened.inode));
        let memory = is_shared.then(|| Memory::open(name())).transpose()?;
        Ok((Source::kept(&opened, client, url, &self.run.state), memory))
    }

    /// Removes this memory from the ranges that map files.
    fn remove(&mut self, at: u64, length: u64) {
        let (from, to) = (at, at + length);
        let mut left = Vec::new();
        self.ranges.retain(|range| {
            if range.end() <= from || to <= range.at {
                return true;
            }
            left.extend(range.part(0, from));
            left.extend(range.part(to, u64::MAX));
            false
        });
        self.ranges.append(&mut left);
    }

    /// Fills pages that threads are waiting for.
    fn touched(&mut self, pages: &[u64]) -> Result<(), End> {
        let mut filled: Vec<std::ops::Range<u64>> = Vec::new();
        for page in pages {
            // Filled by the read-ahead of an earlier page, which also woke the waiting thread.
            if filled.iter().any(|done| done.contains(page)) {
                continue;
            }
            let Some(range) = self.ranges.iter_mut().find(|r| r.at <= *page && *page < r.end())
            else {
                // The page no longer belongs to a file: the thread retries and the kernel decides.
                userfault::wake(&self.userfault, *page, page_bytes() as u64)?;
                continue;
            };
            // What the keeper cannot write is told by others.
            let _ = self.run.behind(range.source.mount).wait(|| true);
            match fill(&self.userfault, range, *page, &mut self.buffer) {
                Ok(done) => filled.push(done),
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(End::Gone),
                Err(error) => {
                    if error.kind() != io::ErrorKind::UnexpectedEof {
                        log::warn!("a page of a mapped file cannot be read: {error}");
                    }
                    match userfault::poison(&self.userfault, *page, page_bytes() as u64) {
                        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                            return Err(End::Gone);
                        }
                        // The page is already filled, or no longer mapped: let the waiting thread look again.
                        _ => userfault::wake(&self.userfault, *page, page_bytes() as u64)?,
                    }
                }
            }
        }
        Ok(())
    }
}

/// Reads a page and its neighbours. Returns the addresses filled, or `UnexpectedEof` if the page is beyond
/// the end of the file.
fn fill(
    userfault: &OwnedFd,
    range: &mut Range,
    page: u64,
    buffer: &mut [u8],
) -> io::Result<std::ops::Range<u64>> {
    let (start, length) = range.window(page);
    let offset = range.offset + (start - range.at);
    // Memory for more is not kept: there may be many processes.
    let mut long = vec![0; if length > buffer.len() as u64 { length as usize } else { 0 }];
    let buffer = if long.is_empty() { &mut buffer[..length as usize] } else { &mut long[..] };
    let memory = range.memory.clone();
    let _turn = memory.as_ref().map(|memory| memory.turn()).transpose()?;
    let (source, asked) = (range.source.clone(), Instant::now());
    let read =
        read_around(buffer, (page - start) as usize, |to, at| source.read_at(to, offset + at))?;
    range.pattern.read(start, length, asked.elapsed());
    let end = read.end.next_multiple_of(page_bytes());
    buffer[read.end..end].fill(0);
    if start + end as u64 <= page {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let (mut done, mut piece) = (read.start, end);
    while done < end {
        let at = start + done as u64;
        let next = end.min(done + piece);
        let error = match userfault::copy(userfault, at, &buffer[done..next]) {
            Ok(count) => {
                if let Some(memory) = &memory {
                    memory.read_in(offset + done as u64, &buffer[done..done + count])?;
                }
                done += count;
                continue;
            }
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EEXIST) => {
                userfault::wake(userfault, at, page_bytes() as u64)?;
                done += page_bytes();
            }
            // The process is changing its memory layout just now.
            Some(libc::EAGAIN) => std::thread::yield_now(),
            // Parts of the range have different protections or were unmapped: continue page by page.
            Some(libc::ENOENT) if next - done > page_bytes() => piece = page_bytes(),
            Some(libc::ENOENT) => {
                userfault::wake(userfault, at, page_bytes() as u64)?;
                done += page_bytes();
            }
            // The touched page has been filled.
            _ if at > page => break,
            _ => return Err(error),
        }
    }
    Ok(start + read.start as u64..start + done as u64)
}

/// Reads the memory around a touched page, which is `touched` bytes into `to`. If some of it cannot be read,
/// reads the page alone: the program has not touched the others. Returns which bytes were read, up to the end
/// of the file.
fn read_around(
    to: &mut [u8],
    touched: usize,
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> io::Result<std::ops::Range<usize>> {
    if let Ok(count) = memory::read_up_to_end(to, &mut read) {
        return Ok(0..count);
    }
    let page = &mut to[touched..touched + page_bytes()];
    let count = memory::read_up_to_end(page, |to, at| read(to, touched as u64 + at))?;
    Ok(touched..touched + count)
}

/// Receives a message and its descriptors. The message is `None` if the other end is closed.
fn receive(socket: &OwnedFd, wait: Wait) -> io::Result<(Option<Message>, Vec<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_BYTES];
    let (length, with) = receive_descriptors(socket, &mut bytes, wait)?;
    if length == 0 {
        return Ok((None, with));
    }
    let message = Message::parse(&bytes[..length]).ok_or_else(|| strange("no message"))?;
    Ok((Some(message), with))
}

fn strange(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a process of the run: {what}"))
}

#[cfg(test)]
mod tests;
