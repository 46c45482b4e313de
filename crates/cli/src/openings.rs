//! Opens files named on a command line ahead, each with its first bytes, so that their round trips overlap.

use crate::remote::Remotes;
use std::collections::VecDeque;
use towline_client::{Begun, Operation};

/// Bytes that are read together with opening a file.
pub(crate) const FIRST_BYTES: usize = 256 * 1024;
/// Files that are opened ahead.
const AHEAD: usize = 32;

/// The openings of files that are named by URLs.
pub(crate) struct Openings<'a> {
    remotes: &'a Remotes,
    /// The next ones.
    urls: VecDeque<&'a str>,
    /// An operation, or none, for each of the first of them.
    started: VecDeque<Option<Operation<Begun>>>,
}

impl<'a> Openings<'a> {
    /// Will open these files in turn. What is no URL is not opened.
    pub(crate) fn new(remotes: &'a Remotes, urls: impl Iterator<Item = &'a str>) -> Self {
        Self { remotes, urls: urls.collect(), started: VecDeque::new() }
    }

    /// Returns the next file and its first bytes, and starts to open those behind it. `None` if it is not open: then
    /// the caller opens it, which tells why, or succeeds by now. A server that nobody has connected to may keep
    /// this waiting, so files of exports that are not open are left to the caller, too.
    pub(crate) fn next(&mut self) -> Option<Begun> {
        self.started.resize_with(self.urls.len().min(AHEAD), || None);
        for (url, started) in self.urls.iter().zip(&mut self.started) {
            if started.is_none()
                && let Some(place) = self.remotes.place_if_open(url)
            {
                *started = place.base.start_open_reading(place.path(), 0, FIRST_BYTES).ok();
            }
        }
        self.urls.pop_front();
        self.started.pop_front()??.wait().ok()
    }
}
