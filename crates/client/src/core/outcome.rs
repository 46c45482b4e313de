//! The outcome of a request: its results and data, for the caller to read.

use crate::Error;
use crate::borrow::Borrowed;
use smallvec::SmallVec;
use towline_wire::codec::Field;
use towline_wire::reply::{self as encoded, parse_results};
use towline_wire::{Errno, ProtocolError, Reply};

/// Longest results that are kept in place; those of small requests fit.
const SHORT_RESULTS: usize = 256;
/// Capacity for longer results that a slot keeps for its next request.
const LONG_RESULTS_KEPT: usize = 4096;

/// Encoded results.
#[derive(Debug)]
pub(super) struct Results {
    short: [u8; SHORT_RESULTS],
    length: usize,
    /// All of the results, if they are longer.
    long: Vec<u8>,
}

impl Default for Results {
    fn default() -> Self {
        Self { short: [0; SHORT_RESULTS], length: 0, long: Vec::new() }
    }
}

impl Results {
    fn bytes(&self) -> &[u8] {
        self.short.get(..self.length).unwrap_or(&self.long)
    }

    pub(super) fn set(&mut self, bytes: &[u8]) {
        self.length = bytes.len();
        match self.short.get_mut(..bytes.len()) {
            Some(short) => short.copy_from_slice(bytes),
            None => {
                self.long.clear();
                self.long.extend_from_slice(bytes);
            }
        }
    }

    /// Clears results that were taken, and frees most of their memory.
    pub(super) fn let_go(&mut self) {
        self.long.clear();
        self.long.shrink_to(LONG_RESULTS_KEPT);
    }

    /// Moves the results. Copies short ones, and only the bytes in use.
    fn move_to(&mut self, place: &mut Self) {
        if self.length > SHORT_RESULTS {
            place.length = self.length;
            std::mem::swap(&mut place.long, &mut self.long);
        } else {
            place.set(self.bytes());
        }
    }
}

/// The outcome of a request.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(super) results: Results,
    /// Bytes of data received into the request's buffer.
    pub(crate) payload: usize,
    /// Bytes of data that arrived or were announced as zeroes, counted each time.
    pub(crate) landed: u64,
    /// Why not even the first byte of data could be read. Other operations of the compound took
    /// effect: a file may have been opened.
    pub(crate) failed: Option<Errno>,
    /// Checksums of the data.
    pub(crate) checksums: Vec<Checked>,
    /// The file that it opened and left open, which is closed if nobody takes the outcome.
    pub(super) opened: Option<u64>,
    /// Lent data, which the thread that takes the outcome still has to copy to the buffer.
    pub(super) borrowed: Option<Borrowed>,
}

/// A part of a request's data, with its expected checksums.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) at: u64,
    pub(crate) length: u32,
    pub(crate) sums: Vec<u8>,
}

/// Sees the outcome of a request in place, with the state locked, and must not use the core. Called
/// at most once.
pub(crate) type Look<'a> = &'a mut dyn FnMut(&mut Outcome);

impl Outcome {
    pub(crate) fn replies(&self) -> Result<SmallVec<[Reply<'_>; 4]>, Error> {
        Ok(parse_results(self.results.bytes())?)
    }

    fn check_data(&self) -> Result<(), Error> {
        self.failed.map_or(Ok(()), |errno| Err(errno.into()))
    }

    /// The outcome of a request of one operation that has nothing to return.
    pub(super) fn done() -> Self {
        let (mut this, mut results) = (Self::default(), Vec::new());
        Reply::Done {}.encode(&mut results);
        this.results.set(&results);
        this
    }

    /// Returns the last result of a compound, or its failure.
    pub(crate) fn last(&self) -> Result<Reply<'_>, Error> {
        self.check_data()?;
        let mut last = None;
        for reply in encoded::Results::of(self.results.bytes()) {
            last = Some(reply?);
        }
        match last {
            Some(Reply::Failed { errno }) => Err(Errno(errno).into()),
            Some(reply) => Ok(reply),
            None => Err(ProtocolError { what: "reply without results", at: 0 }.into()),
        }
    }

    /// The file that its first operation opened.
    pub(super) fn first_opened(&self) -> Option<u64> {
        match encoded::Results::of(self.results.bytes()).next() {
            Some(Ok(Reply::Opened { handle, .. })) => Some(handle),
            _ => None,
        }
    }

    /// The file that a compound opened before it failed.
    pub(super) fn left_open(&self) -> Option<u64> {
        let (mut opened, mut failed) = (None, false);
        for reply in encoded::Results::of(self.results.bytes()) {
            match reply {
                Ok(Reply::Opened { handle, .. }) => opened = Some(handle),
                Ok(Reply::Failed { .. }) => failed = true,
                _ => {}
            }
        }
        opened.filter(|_| failed)
    }

    /// Moves it to another place. It is large, so this moves only the parts in use.
    pub(super) fn move_to(&mut self, place: &mut Self) {
        self.results.move_to(&mut place.results);
        (place.payload, place.landed, place.failed) = (self.payload, self.landed, self.failed);
        (place.checksums, place.opened) = (std::mem::take(&mut self.checksums), self.opened);
        place.borrowed = self.borrowed.take();
    }

    /// Returns the result of a request of one operation, or its failure.
    pub(crate) fn single(&self) -> Result<Reply<'_>, Error> {
        self.check_data()?;
        let mut results = encoded::Results::of(self.results.bytes());
        match (results.next(), results.next()) {
            (Some(Ok(Reply::Failed { errno })), None) => Err(Errno(errno).into()),
            (Some(Ok(reply)), None) => Ok(reply),
            (Some(Err(error)), _) | (_, Some(Err(error))) => Err(error.into()),
            (None, _) => Err(ProtocolError { what: "reply without results", at: 0 }.into()),
            (_, Some(Ok(_))) => {
                Err(ProtocolError { what: "more results than operations", at: 0 }.into())
            }
        }
    }
}
