//! Starts what is asked first about each file named on a command line ahead, so that the round trips overlap.

use crate::remote::{Place, Remotes};
use std::collections::VecDeque;
use towline_client::{Begun, Error, Operation};

/// Bytes that are read together with opening a file.
pub(crate) const FIRST_BYTES: usize = 256 * 1024;
/// Files that are asked for ahead.
const AHEAD: usize = 32;

/// What is asked about files that are named by URLs.
pub(crate) struct Ahead<'a, T, F> {
    remotes: &'a Remotes,
    /// The next ones.
    urls: VecDeque<&'a str>,
    start: F,
    /// An operation, or none, for each of the first of them.
    started: VecDeque<Option<Operation<T>>>,
}

impl<'a, T, F: Fn(&Place) -> Result<Operation<T>, Error>> Ahead<'a, T, F> {
    /// Will `start` operations for these files in turn. Nothing is asked about what is no URL.
    pub(crate) fn new(remotes: &'a Remotes, urls: impl Iterator<Item = &'a str>, start: F) -> Self {
        Self { remotes, urls: urls.collect(), start, started: VecDeque::new() }
    }

    /// Returns the result for the next file, and starts the operations for those behind it. `None` if there is none:
    /// then the caller asks, which tells why, or succeeds by now. A server that nobody has connected to may keep this
    /// waiting, so files of exports that are not open are left to the caller, too.
    pub(crate) fn next(&mut self) -> Option<T> {
        self.started.resize_with(self.urls.len().min(AHEAD), || None);
        for (url, started) in self.urls.iter().zip(&mut self.started) {
            if started.is_none()
                && let Some(place) = self.remotes.place_if_open(url)
            {
                *started = (self.start)(&place).ok();
            }
        }
        self.urls.pop_front();
        self.started.pop_front()??.wait().ok()
    }
}

/// Opens a file and reads its first bytes.
pub(crate) fn start_open(place: &Place) -> Result<Operation<Begun>, Error> {
    place.base.start_open_reading(place.path(), 0, FIRST_BYTES)
}
