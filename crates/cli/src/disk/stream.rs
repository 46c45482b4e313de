//! Standard input as a source and standard output as a target, sequential both.

use super::pieces::PIECE_BYTES;
use crate::report::{Failure, Outcome, printed};
use std::io::{self, Read, StdinLock, Write};
use std::sync::{Condvar, Mutex, PoisonError};

/// Fills a buffer from standard input. Less than a whole piece means the end.
pub(super) fn take(input: &mut StdinLock<'_>, buffer: &mut Vec<u8>) -> Outcome<()> {
    buffer.clear();
    input
        .take(PIECE_BYTES)
        .read_to_end(buffer)
        .map_err(|error| Failure::from(error).about("standard input"))?;
    Ok(())
}

/// Standard output, to which threads write their pieces in order.
#[derive(Debug, Default)]
pub(super) struct Output {
    state: Mutex<State>,
    turns: Condvar,
}

#[derive(Debug, Default)]
struct State {
    written: u64,
    ended: bool,
}

impl Output {
    /// Writes the bytes at `offset` once all before them are written. Returns false if that never happens.
    pub(super) fn write(&self, data: &[u8], offset: u64) -> Outcome<bool> {
        self.in_turn(offset, data.len() as u64, |out| out.write_all(data))
    }

    /// Writes zeroes, otherwise like [`Output::write`].
    pub(super) fn zero(&self, offset: u64, length: u64) -> Outcome<bool> {
        self.in_turn(offset, length, |out| {
            let mut zeroes = io::repeat(0).take(length);
            io::copy(&mut zeroes, out).map(drop)
        })
    }

    fn in_turn(
        &self,
        offset: u64,
        length: u64,
        write: impl FnOnce(&mut io::StdoutLock<'_>) -> io::Result<()>,
    ) -> Outcome<bool> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.written != offset && !state.ended {
            state = self.turns.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended {
            return Ok(false);
        }
        let mut out = io::stdout().lock();
        let done = printed(write(&mut out).and_then(|()| out.flush()));
        state.written += length;
        state.ended = done.is_err();
        self.turns.notify_all();
        done.map(|()| true)
    }

    /// Ends all waiting, because a piece will never come.
    pub(super) fn end(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        self.turns.notify_all();
    }
}
