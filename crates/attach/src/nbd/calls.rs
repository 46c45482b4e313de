//! Blocking calls from any thread, over one connection to an NBD server.

use super::lane::Lane;
use super::source::{Connection, Extent, Source};
use crate::{Backend, Error, Finished, Geometry, Operation, Request};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum number of requests under way; further calls wait.
const TAGS: u16 = 64;
/// Longest read or write of a single request, bytes.
const TRANSFER_BYTES_MAX: u64 = 1 << 20;
/// Longest range that one request zeroes, bytes, so that its length fits into 32 bits.
const ZERO_BYTES_MAX: u64 = 1 << 30;

struct Call {
    operation: Operation,
    offset: u64,
    length: u32,
    buffer: Vec<u8>,
    answer: Sender<Result<Vec<u8>, CallError>>,
}

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // callers handle each
pub enum CallError {
    /// The error of the server, as a Linux error number.
    Server(i32),
    /// The connection was lost and not replaced in time.
    Lost,
}

/// A disk of an NBD server, whose connection has a thread of its own, see [`Lane`].
#[derive(Debug)]
pub struct Caller {
    geometry: Geometry,
    extents: Option<Vec<Extent>>,
    calls: Option<Sender<Call>>,
    bell: Arc<OwnedFd>,
    /// Number of free tags.
    room: Arc<(Mutex<u16>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Caller {
    /// Connects. With `patience`, a lost connection is replaced and unanswered requests are repeated;
    /// calls fail once the server has been away that long. Without it they fail at once: NBD cannot
    /// tell whether a restarted server still has unflushed writes. So patience is for callers that
    /// only read. These also learn the extents.
    ///
    /// # Errors
    /// If the server cannot be reached or has no such disk.
    pub fn connect(source: &Source, patience: Option<Duration>) -> Result<Self, Error> {
        // Size changes are ignored: a call beyond the end fails.
        let connection = source.connect_for_chunks()?;
        let (connection, extents) = match patience {
            Some(_) => connection.extents(source)?,
            None => (connection, None),
        };
        Self::over(source, connection, extents, patience)
    }

    /// Connects once more to the same server, with another thread, if the server says that several
    /// connections see the same disk. The new caller knows no extents.
    ///
    /// # Errors
    /// If the server does not say so, or accepts no more connections.
    pub fn beside(&self, source: &Source, patience: Option<Duration>) -> Result<Self, Error> {
        if !self.geometry.connections {
            return Err(Error::Refused(format!("{source}: one connection only")));
        }
        let connection = source.connect_beside()?;
        if connection.geometry.size != self.geometry.size {
            return Err(Error::Refused(format!("{source}: another disk now")));
        }
        Self::over(source, connection, None, patience)
    }

    fn over(
        source: &Source,
        connection: Connection,
        extents: Option<Vec<Extent>>,
        patience: Option<Duration>,
    ) -> Result<Self, Error> {
        let reconnects = patience.is_some();
        if !reconnects {
            // For the kernel's limit a server is silent also while it acknowledges, but takes no data because
            // its disk is slow, and nobody would repeat the writes. Unix sockets have no limit.
            let _ = rustix::net::sockopt::set_tcp_user_timeout(&connection.socket, 0);
        }
        let tell = mpsc::channel().0;
        let patience = Some(patience.unwrap_or_default());
        // Others may come beside this one.
        let shared = connection.geometry.connections;
        let lane = Lane::adopting(source, connection, shared, patience, tell)?;
        let geometry = lane.geometry();
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::system(source)(error.into()))?;
        let (bell, room) = (Arc::new(bell), Arc::new((Mutex::new(TAGS), Condvar::new())));
        let (calls, queue) = mpsc::channel();
        let rings = bell.clone();
        let thread = std::thread::Builder::new()
            .name("nbd".to_owned())
            .spawn(move || serve(lane, reconnects, &queue, &rings))
            .map_err(Error::system(source))?;
        Ok(Self { geometry, extents, calls: Some(calls), bell, room, thread: Some(thread) })
    }

    /// Returns the extents at the time of connecting, in order; `None` if the server does not tell, or without patience.
    #[must_use]
    pub fn extents(&self) -> Option<&[Extent]> {
        self.extents.as_deref()
    }

    /// Returns size, block sizes and abilities of the disk.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Fills a buffer and returns it.
    ///
    /// # Errors
    /// The error of the server, or [`CallError::Lost`].
    pub fn read(&self, mut buffer: Vec<u8>, offset: u64) -> Result<Vec<u8>, CallError> {
        let most = self.transfer_bytes();
        if buffer.len() <= most {
            return self.call(Operation::Read, offset, buffer.len() as u32, buffer);
        }
        let mut at = offset;
        for part in buffer.chunks_mut(most) {
            let read = self.read(vec![0; part.len()], at)?;
            part.copy_from_slice(&read);
            at += part.len() as u64;
        }
        Ok(buffer)
    }

    /// Writes a buffer and returns it.
    ///
    /// # Errors
    /// As [`Caller::read`].
    pub fn write(&self, buffer: Vec<u8>, offset: u64) -> Result<Vec<u8>, CallError> {
        let most = self.transfer_bytes();
        if buffer.len() <= most {
            let operation = Operation::Write { durable: false };
            return self.call(operation, offset, buffer.len() as u32, buffer);
        }
        let mut at = offset;
        for part in buffer.chunks(most) {
            self.write(part.to_vec(), at)?;
            at += part.len() as u64;
        }
        Ok(buffer)
    }

    /// Zeroes a range. Sends zeroes if the server has no command for it.
    ///
    /// # Errors
    /// As [`Caller::read`].
    pub fn zero(&self, offset: u64, length: u64) -> Result<(), CallError> {
        let most = if self.geometry.zero { ZERO_BYTES_MAX } else { self.transfer_bytes() as u64 };
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let length = most.min(end - at) as u32;
            if self.geometry.zero {
                let operation = Operation::Zero { allocate: false, durable: false };
                self.call(operation, at, length, Vec::new())?;
            } else {
                let operation = Operation::Write { durable: false };
                self.call(operation, at, length, vec![0; length as usize])?;
            }
            at += u64::from(length);
        }
        Ok(())
    }

    /// Makes earlier writes durable, if the server has a command for it.
    ///
    /// # Errors
    /// As [`Caller::read`].
    pub fn flush(&self) -> Result<(), CallError> {
        match self.geometry.flush {
            true => self.call(Operation::Flush, 0, 0, Vec::new()).map(drop),
            false => Ok(()),
        }
    }

    fn transfer_bytes(&self) -> usize {
        TRANSFER_BYTES_MAX.min(self.geometry.transfer_maximum.into()) as usize
    }

    fn call(
        &self,
        operation: Operation,
        offset: u64,
        length: u32,
        buffer: Vec<u8>,
    ) -> Result<Vec<u8>, CallError> {
        let (free, freed) = &*self.room;
        let mut count = free.lock().unwrap_or_else(PoisonError::into_inner);
        while *count == 0 {
            count = freed.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
        *count -= 1;
        drop(count);
        let (answer, answered) = mpsc::channel();
        let call = Call { operation, offset, length, buffer, answer };
        let sent = self.calls.as_ref().is_some_and(|calls| calls.send(call).is_ok());
        ring(&self.bell);
        // No answer means that the connection is lost and the thread has ended.
        let finished = if sent { answered.recv().ok() } else { None };
        *free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        freed.notify_one();
        finished.unwrap_or(Err(CallError::Lost))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.calls = None;
        ring(&self.bell);
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

fn ring(bell: &OwnedFd) {
    // It fails only if the bell rings already.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

/// Serves calls until the callers are gone, or the connection is lost and not to be replaced.
fn serve(mut lane: Lane, reconnects: bool, queue: &Receiver<Call>, bell: &OwnedFd) {
    let mut waiting: HashMap<u16, Sender<Result<Vec<u8>, CallError>>> = HashMap::new();
    loop {
        // Silence the bell before looking, so that a later call rings again.
        let _ = rustix::io::read(bell, &mut [0; 8]);
        loop {
            match queue.try_recv() {
                Ok(Call { operation, offset, length, buffer, answer }) => {
                    // There are never more calls than tags.
                    let Some(tag) = (0..TAGS).find(|tag| !waiting.contains_key(tag)) else { break };
                    waiting.insert(tag, answer);
                    lane.begin(Request { tag, operation, offset, length, buffer });
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        lane.turn();
        while let Some(Finished { tag, result, buffer }) = lane.finished() {
            if let Some(answer) = waiting.remove(&tag) {
                let failed = |errno| match lane.is_connected() {
                    true => CallError::Server(errno),
                    false => CallError::Lost,
                };
                // The caller waits for the answer.
                let _ = answer.send(result.map(|()| buffer).map_err(failed));
            }
        }
        if !reconnects && !lane.is_connected() {
            return;
        }
        lane.wait(bell);
    }
}
