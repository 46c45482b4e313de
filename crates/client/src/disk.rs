//! Remote disks.

use crate::convert::{done, unexpected};
use crate::core::{Checked, Core, Outcome};
use crate::disks::{DiskState, Stored};
use crate::operation::Operation;
use crate::vectored::UnderWay;
use crate::{Client, Error};
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use towline_wire::disk::{
    DiskExtent, EXTENTS_MAX, checksums, disk_flag, disk_kind, extent_kind, first_difference,
    parse_extents,
};
use towline_wire::limits::TRANSFER_BYTES_MAX;
use towline_wire::{Errno, Reply, Request};

/// What a disk is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskInfo {
    /// Bytes.
    pub size: u64,
    /// Offsets and lengths are multiples of this power of two.
    pub block_minimum: u32,
    /// Unit that is served best, a power of two.
    pub block_preferred: u32,
    /// Changes are refused.
    pub read_only: bool,
    /// Seeks cost time.
    pub rotational: bool,
    /// Names its bytes: another number stands for other bytes, also after a restart of the server.
    pub identity: u64,
    /// Since when none of them may have been lost, as the server told first: another number for each start of
    /// its machine, and after a flush that failed.
    pub epoch: u64,
}

impl DiskInfo {
    pub(crate) fn of(reply: Reply<'_>) -> Result<Self, Error> {
        match reply {
            Reply::Disk { size, block_minimum, block_preferred, flags, identity, epoch } => {
                Ok(Self {
                    size,
                    block_minimum,
                    block_preferred,
                    read_only: flags & disk_kind::READ_ONLY != 0,
                    rotational: flags & disk_kind::ROTATIONAL != 0,
                    identity,
                    epoch,
                })
            }
            _ => Err(unexpected()),
        }
    }
}

/// How [`Disk::zero`] writes zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // the two that the protocol knows
pub struct ZeroHow {
    /// Space has to stay or become allocated.
    pub allocate: bool,
    /// Fail with `EOPNOTSUPP` rather than write zeroes one by one.
    pub fast: bool,
}

/// Which extents [`Disk::extents`] tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // the two that the protocol knows
pub enum ExtentKind {
    /// What is allocated; flags are bits of [`towline_wire::disk::extent_flag`].
    Allocation,
    /// What was written since the server began to serve the disk: flags 1, else 0.
    Written,
}

/// A remote disk. Dropping it closes it.
///
/// Offsets and lengths are bytes, in whole blocks of [`DiskInfo::block_minimum`], inside of the
/// disk. The calls that [`start`](Self::start_read_at) something return at once and are completed
/// later, alone or in a [`crate::Group`]; a change that overlaps another one under way waits for
/// that first.
///
/// A lost connection is replaced, and what was not answered is asked again. A change that was
/// answered is on stable storage after the next [`Disk::flush`]. When the machine of the server
/// fails before that, it may be lost; then every later call fails with [`Error::WritesLost`] (once
/// the server is back), so that nobody goes on with bytes that are older than they should be.
pub struct Disk {
    core: Arc<Core>,
    state: Arc<DiskState>,
    checksums: bool,
}

impl Client {
    /// Opens a disk; the empty name stands for the server's default one.
    ///
    /// # Errors
    /// `ENOENT` when there is no such disk, `EMFILE` when too many are open.
    pub fn disk(&self, name: &[u8]) -> Result<Disk, Error> {
        let number = self.core.number_disk();
        let request = Request::DiskOpen { disk: number, name };
        let outcome = self.core.call(&[request], &[], &mut [])?;
        let info = DiskInfo::of(outcome.single()?)?;
        let state = Arc::new(DiskState::new(number, name, info));
        self.core.remember_disk(&state);
        Ok(Disk { core: self.core.clone(), state, checksums: false })
    }

    /// Name and description of each disk of the server.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn disks(&self) -> Result<Vec<(String, String)>, Error> {
        let mut disks = Vec::new();
        loop {
            let skip = disks.len() as u32;
            let outcome = self.core.call(&[Request::DiskList { skip }], &[], &mut [])?;
            let Reply::Bytes { value } = outcome.single()? else { return Err(unexpected()) };
            let texts: Vec<_> =
                value.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
            let pairs = texts.chunks_exact(2);
            disks.extend(pairs.map(|pair| (pair[0].to_string(), pair[1].to_string())));
            if disks.len() as u32 == skip {
                return Ok(disks);
            }
        }
    }
}

impl Disk {
    /// Its name on the server.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        &self.state.name
    }

    /// What it is like, as far as is known here.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        *self.state.info.lock()
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.info().size
    }

    /// Smallest unit of requests, and the one that is served best.
    #[must_use]
    pub fn block_sizes(&self) -> (u32, u32) {
        let info = self.info();
        (info.block_minimum, info.block_preferred)
    }

    /// Asks the server what it is like now; the size may have changed.
    ///
    /// # Errors
    /// [`Error::Connection`], [`Error::WritesLost`].
    pub fn refresh(&self) -> Result<DiskInfo, Error> {
        let request = Request::DiskInfo { disk: self.state.number };
        self.learn(&request)
    }

    /// Makes it so many bytes long, for all its users; zero: as long as the file or device behind
    /// it has become.
    ///
    /// # Errors
    /// `EOPNOTSUPP` when what is behind it cannot be resized, `EROFS`, `EINVAL`.
    pub fn resize(&self, size: u64) -> Result<DiskInfo, Error> {
        let request = Request::DiskResize { disk: self.state.number, size };
        self.learn(&request)
    }

    fn learn(&self, request: &Request<'_>) -> Result<DiskInfo, Error> {
        self.state.check()?;
        let outcome = self.core.call(&[*request], &[], &mut [])?;
        let info = DiskInfo::of(outcome.single()?)?;
        *self.state.info.lock() = info;
        Ok(info)
    }

    /// From now on data carries a crc32c for each 4 KiB, which the receiver checks against its
    /// memory. Data that differs is `EBADMSG`.
    #[must_use]
    pub fn with_checksums(mut self, checksums: bool) -> Self {
        self.checksums = checksums;
        self
    }

    /// Fills `target`.
    ///
    /// # Errors
    /// What the device says; `EINVAL` for a range that is not in whole blocks inside of the disk.
    pub fn read_at(&self, target: &mut [u8], offset: u64) -> Result<(), Error> {
        if target.len() > TRANSFER_BYTES_MAX {
            return self.read_vectored_at(&mut [IoSliceMut::new(target)], offset);
        }
        self.state.check()?;
        let request = self.read_request(offset, target.len());
        let outcome = self.core.call(&[request], &[], target)?;
        read_all(&outcome, target)
    }

    /// Fills several buffers with the bytes from `offset` on, one behind the other. Each is a
    /// request of its own (or several, beyond 8 MiB), read straight into it; they are under way
    /// together.
    ///
    /// # Errors
    /// As [`Disk::read_at`], of the first one that failed; the others may be filled.
    pub fn read_vectored_at(
        &self,
        targets: &mut [IoSliceMut<'_>],
        offset: u64,
    ) -> Result<(), Error> {
        self.state.check()?;
        let (mut under_way, mut at) = (UnderWay::new(&self.core), offset);
        for part in targets.iter_mut().flat_map(|target| target.chunks_mut(TRANSFER_BYTES_MAX)) {
            let request = self.read_request(at, part.len());
            at += part.len() as u64;
            let mut part = Some(part);
            while !under_way.read(&request, &mut part)? {
                under_way.wait().map_or(Ok(()), |(outcome, part)| read_all(&outcome?, part))?;
            }
        }
        while let Some((outcome, part)) = under_way.wait() {
            read_all(&outcome?, part)?;
        }
        Ok(())
    }

    /// Fills a buffer of at most 8 MiB, later; yields it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_read_at(&self, buffer: Vec<u8>, offset: u64) -> Result<Operation<Vec<u8>>, Error> {
        self.state.check()?;
        let request = self.read_request(offset, buffer.len());
        self.core.start(&[request], Vec::new(), buffer, |outcome, buffer| {
            read_all(outcome, &buffer)?;
            Ok(buffer)
        })
    }

    fn read_request(&self, offset: u64, length: usize) -> Request<'static> {
        let flags = if self.checksums { disk_flag::CHECKSUMS } else { 0 };
        Request::DiskRead { disk: self.state.number, flags, offset, length: length as u32 }
    }

    /// Writes.
    ///
    /// # Errors
    /// What the device says; `EROFS`; `EINVAL` or `ENOSPC` for a range that is not in whole blocks
    /// inside of the disk.
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<(), Error> {
        self.write(data, offset, false)
    }

    /// Writes to stable storage (FUA).
    ///
    /// # Errors
    /// As [`Disk::write_at`].
    pub fn write_durable_at(&self, data: &[u8], offset: u64) -> Result<(), Error> {
        self.write(data, offset, true)
    }

    /// Writes several buffers, one behind the other. Each is a request of its own (or several,
    /// beyond 8 MiB), sent straight from it; they are under way together.
    ///
    /// # Errors
    /// As [`Disk::write_at`], of the first one that failed; the others may be written.
    pub fn write_vectored_at(
        &self,
        sources: &[IoSlice<'_>],
        offset: u64,
        durable: bool,
    ) -> Result<(), Error> {
        self.state.check()?;
        let (mut under_way, mut at) = (UnderWay::new(&self.core), offset);
        // Every answer counts, also behind a failure: what was stored may be lost later.
        let mut result = Ok(());
        let mut take = |under_way: &mut UnderWay<'_>| {
            let Some((outcome, _)) = under_way.wait() else { return false };
            let how = if durable { Stored::Durable } else { Stored::Cached };
            let stored = outcome.and_then(|outcome| self.state.stored(&outcome, how));
            if result.is_ok() {
                result = stored;
            }
            true
        };
        let mut started = Ok(true);
        for part in sources.iter().flat_map(|source| source.chunks(TRANSFER_BYTES_MAX)) {
            let sums = self.sums(part);
            let request = self.write_request(at, part.len(), durable, &sums);
            at += part.len() as u64;
            loop {
                started = under_way.write(&request, part);
                if !matches!(started, Ok(false)) || !take(&mut under_way) {
                    break;
                }
            }
            if started.is_err() {
                break;
            }
        }
        while take(&mut under_way) {}
        result.and(started.map(drop))
    }

    fn write(&self, data: &[u8], offset: u64, durable: bool) -> Result<(), Error> {
        if data.len() > TRANSFER_BYTES_MAX {
            return self.write_vectored_at(&[IoSlice::new(data)], offset, durable);
        }
        self.state.check()?;
        let sums = self.sums(data);
        let request = self.write_request(offset, data.len(), durable, &sums);
        let outcome = self.core.call(&[request], data, &mut [])?;
        self.state.stored(&outcome, if durable { Stored::Durable } else { Stored::Cached })
    }

    /// Writes at most 8 MiB, later; yields the buffer.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_write_at(
        &self,
        data: Vec<u8>,
        offset: u64,
        durable: bool,
    ) -> Result<Operation<Vec<u8>>, Error> {
        self.state.check()?;
        let sums = self.sums(&data);
        let request = self.write_request(offset, data.len(), durable, &sums);
        let state = self.state.clone();
        self.core.start(&[request], data, Vec::new(), move |outcome, data| {
            state.stored(outcome, if durable { Stored::Durable } else { Stored::Cached })?;
            Ok(data)
        })
    }

    fn sums(&self, data: &[u8]) -> Vec<u8> {
        if self.checksums { checksums(data) } else { Vec::new() }
    }

    fn write_request<'a>(
        &self,
        offset: u64,
        length: usize,
        durable: bool,
        checksums: &'a [u8],
    ) -> Request<'a> {
        let mut flags = if durable { disk_flag::DURABLE } else { 0 };
        if self.checksums {
            flags |= disk_flag::CHECKSUMS;
        }
        let disk = self.state.number;
        Request::DiskWrite { disk, flags, offset, length: length as u32, checksums }
    }

    /// What was written before, by anybody who was told so, is on stable storage afterwards.
    ///
    /// # Errors
    /// What the device says; then nothing is known about any of it. [`Error::WritesLost`].
    pub fn flush(&self) -> Result<(), Error> {
        self.start_flush()?.wait().map(|_| ())
    }

    /// [`Disk::flush`], later; yields an empty buffer, so that it can be in one group with reads
    /// and writes.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_flush(&self) -> Result<Operation<Vec<u8>>, Error> {
        self.state.check()?;
        let covers = self.state.written();
        let request = Request::DiskFlush { disk: self.state.number };
        self.start_change(request, Stored::Flushed(covers))
    }

    /// A range reads as zeroes afterwards; of any length.
    ///
    /// # Errors
    /// As [`Disk::write_at`]; `EOPNOTSUPP` when it was to be fast and cannot be.
    pub fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> Result<(), Error> {
        self.start_zero(offset, length, how, false)?.wait().map(|_| ())
    }

    /// [`Disk::zero`], later.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_zero(
        &self,
        offset: u64,
        length: u64,
        how: ZeroHow,
        durable: bool,
    ) -> Result<Operation<Vec<u8>>, Error> {
        self.state.check()?;
        let mut flags = if durable { disk_flag::DURABLE } else { 0 };
        if how.allocate {
            flags |= disk_flag::ALLOCATE;
        }
        if how.fast {
            flags |= disk_flag::FAST;
        }
        let request = Request::DiskZero { disk: self.state.number, flags, offset, length };
        self.start_change(request, if durable { Stored::Durable } else { Stored::Cached })
    }

    /// The contents of a range are no longer needed; of any length.
    ///
    /// # Errors
    /// As [`Disk::write_at`].
    pub fn trim(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.start_trim(offset, length)?.wait().map(|_| ())
    }

    /// [`Disk::trim`], later.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_trim(&self, offset: u64, length: u64) -> Result<Operation<Vec<u8>>, Error> {
        self.state.check()?;
        let request = Request::DiskTrim { disk: self.state.number, flags: 0, offset, length };
        self.start_change(request, Stored::Cached)
    }

    fn start_change(&self, request: Request<'_>, how: Stored) -> Result<Operation<Vec<u8>>, Error> {
        let state = self.state.clone();
        self.core.start(&[request], Vec::new(), Vec::new(), move |outcome, _| {
            state.stored(outcome, how)?;
            Ok(Vec::new())
        })
    }

    /// Brings a range into the server's memory, if it has a cache.
    ///
    /// # Errors
    /// What the device says.
    pub fn cache(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.state.check()?;
        let request = Request::DiskCache { disk: self.state.number, offset, length };
        done(self.core.call(&[request], &[], &mut [])?.single()?)
    }

    /// Extents of the first bytes of a range: at least one, at most 4096, neighbours differ. Ask
    /// again behind them for the rest.
    ///
    /// # Errors
    /// `EINVAL` for no bytes or a range that is not in whole blocks inside of the disk.
    pub fn extents(
        &self,
        offset: u64,
        length: u64,
        kind: ExtentKind,
    ) -> Result<Vec<DiskExtent>, Error> {
        self.state.check()?;
        let kind = match kind {
            ExtentKind::Allocation => extent_kind::ALLOCATION,
            ExtentKind::Written => extent_kind::WRITTEN,
        };
        let (disk, most) = (self.state.number, EXTENTS_MAX);
        let request = Request::DiskStatus { disk, kind, offset, length, most };
        let outcome = self.core.call(&[request], &[], &mut [])?;
        let Reply::Bytes { value } = outcome.single()? else { return Err(unexpected()) };
        let extents = parse_extents(value)?;
        // A list that is empty would keep its user from ever getting to the end.
        if extents.is_empty() { Err(unexpected()) } else { Ok(extents) }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.core.close_disk(self.state.number);
    }
}

/// Checks that a read brought all of its bytes, as they were sent.
fn read_all(outcome: &Outcome, target: &[u8]) -> Result<(), Error> {
    match outcome.single()? {
        Reply::Read { length, errno: 0 }
            if length as usize == target.len() && outcome.landed == target.len() as u64 => {}
        Reply::Read { errno, .. } if errno != 0 => return Err(Errno(errno).into()),
        _ => return Err(unexpected()),
    }
    for Checked { at, length, sums } in &outcome.checksums {
        // Inside of the target, else it would not count as landed.
        let part = target.get(*at as usize..*at as usize + *length as usize);
        if part.is_none_or(|part| first_difference(part, sums).is_some()) {
            return Err(Errno::EBADMSG.into());
        }
    }
    Ok(())
}
