//! A link inside a process, for tests, made of two byte queues.

use crate::{Link, Target};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes that one direction holds before sending returns `WouldBlock`, like a socket buffer.
const BUFFER_BYTES: usize = 256 * 1024;

/// The bytes that are on their way in one direction, and whether an end was dropped.
#[derive(Debug, Default)]
struct Direction {
    state: Mutex<(VecDeque<u8>, bool)>,
    changed: Condvar,
}

impl Direction {
    fn lock(&self) -> MutexGuard<'_, (VecDeque<u8>, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One end of an in-process link.
#[derive(Debug)]
pub struct LocalLink {
    outgoing: Arc<Direction>,
    incoming: Arc<Direction>,
}

/// Returns two connected links inside this process.
#[must_use]
pub fn local_pair() -> (Link, Link) {
    let (a, b) = (Arc::<Direction>::default(), Arc::<Direction>::default());
    let near = LocalLink { outgoing: a.clone(), incoming: b.clone() };
    (Link::Local(near), Link::Local(LocalLink { outgoing: b, incoming: a }))
}

impl LocalLink {
    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.outgoing.lock();
        if state.1 {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let count = bytes.len().min(BUFFER_BYTES - state.0.len());
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        state.0.extend(&bytes[..count]);
        self.outgoing.changed.notify_all();
        Ok(count)
    }

    pub(crate) fn receive(&self, target: &mut Target<'_>, wait: bool) -> io::Result<usize> {
        let mut state = self.incoming.lock();
        while state.0.is_empty() {
            if state.1 {
                return Ok(0);
            }
            if !wait {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            state = self.incoming.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let count = target.len().min(state.0.len());
        let bytes: Vec<u8> = state.0.drain(..count).collect();
        target.put(&bytes);
        self.incoming.changed.notify_all();
        Ok(count)
    }

    /// Waits until the peer has made room or closed.
    pub(crate) fn wait_writable(&self) {
        let mut state = self.outgoing.lock();
        while state.0.len() == BUFFER_BYTES && !state.1 {
            state = self.outgoing.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for LocalLink {
    fn drop(&mut self) {
        for direction in [&self.outgoing, &self.incoming] {
            direction.lock().1 = true;
            direction.changed.notify_all();
        }
    }
}
