//! Puts a load on a disk over a Towline session.

use super::nbd_client::{Load, Offsets, Outcome};
use crate::remote::{Session, no_disk};
use crate::report::Failure;
use std::time::Instant;
use towline_client::{Disk, Error, Group, Operation, Options, Url};

/// A session with one disk.
pub(super) struct DiskClient {
    disk: Disk,
    _session: Session,
}

impl DiskClient {
    /// Connects. Up to `coalesce` requests may wait to be sent together.
    pub(super) fn connect(url: &Url, coalesce: u32) -> Result<Self, Failure> {
        let mut options = Options::default();
        options.coalesce = coalesce;
        let client = Session::with(url, options)?;
        let disk = client.disk(&url.export).map_err(|error| no_disk(error, url, &client))?;
        Ok(Self { disk, _session: client })
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.disk.info().size
    }

    /// Runs the load: covers the span, again and again if the load says so, until the time limit.
    pub(super) fn run(&mut self, load: Load) -> Result<Outcome, Error> {
        let start = Instant::now();
        let mut offsets = Offsets::new(load);
        let mut outcome = Outcome { began: Some(start), ..Outcome::default() };
        let mut group = Group::new();
        let mut since = Vec::with_capacity(load.outstanding);
        for cookie in 0..load.outstanding {
            let buffer: Vec<u8> = (0..load.size).map(|at| (at % 251) as u8).collect();
            let Some(offset) = offsets.next() else { break };
            since.push(Instant::now());
            group.add(self.begin(load, buffer, offset)?, cookie as u64);
        }
        while let Some((cookie, done)) = group.wait_any() {
            let (buffer, now) = (done?, Instant::now());
            let since = &mut since[cookie as usize];
            outcome.whole_us.push(now.duration_since(*since).as_secs_f64() * 1e6);
            outcome.answered.note(now);
            outcome.bytes += load.size as u64;
            if now.duration_since(start) >= load.limit {
                continue;
            }
            let Some(offset) = offsets.next() else { continue };
            *since = now;
            group.add(self.begin(load, buffer, offset)?, cookie);
        }
        if load.writes {
            self.disk.flush()?;
        }
        outcome.seconds = start.elapsed().as_secs_f64();
        Ok(outcome)
    }

    fn begin(&self, load: Load, buffer: Vec<u8>, offset: u64) -> Result<Operation<Vec<u8>>, Error> {
        match load.writes {
            true => self.disk.start_write_at(buffer, offset, false),
            false => self.disk.start_read_at(buffer, offset),
        }
    }
}
