//! Remote disks: reads, writes and the other requests of a block device.

use crate::convert::{check_text, done, unexpected};
use crate::core::{Checked, Core, Outcome};
use crate::disks::{DiskState, Durability, Stored};
use crate::operation::Operation;
use crate::vectored::UnderWay;
use crate::{Client, Error};
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use towline_wire::disk::{
    DiskExtent, EXTENTS_MAX, checksums, disk_flag, disk_kind, extent_kind, first_difference,
    parse_extents,
};
use towline_wire::limits::{PATH_BYTES_MAX, TRANSFER_BYTES_MAX};
use towline_wire::{Errno, ProtocolError, Reply, Request};

/// Properties of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskInfo {
    /// Size in bytes.
    pub size: u64,
    /// Offsets and lengths must be multiples of this power of two.
    pub block_minimum: u32,
    /// Preferred unit of requests, a power of two.
    pub block_preferred: u32,
    /// The disk refuses changes.
    pub read_only: bool,
    /// It refuses them only since a flush failed, until an operator acts.
    pub failed: bool,
    /// Seeks take time, as on a spinning disk.
    pub rotational: bool,
    /// Identifies the contents: another number means other bytes, also after a restart of the
    /// server.
    pub identity: u64,
    /// Changes when unflushed writes may have been lost: it differs for each boot of the server's
    /// machine, and after a failed flush.
    pub epoch: u64,
}

impl DiskInfo {
    pub(crate) fn of(reply: Reply<'_>) -> Result<Self, Error> {
        match reply {
            Reply::Disk { size, block_minimum, block_preferred, flags, identity, epoch } => {
                let blocks = [block_minimum, block_preferred];
                if !blocks.iter().all(|block| block.is_power_of_two()) || size > i64::MAX as u64 {
                    let what = "disk of impossible size or blocks";
                    return Err(ProtocolError { what, at: 0 }.into());
                }
                Ok(Self {
                    size,
                    block_minimum,
                    block_preferred,
                    read_only: flags & (disk_kind::READ_ONLY | disk_kind::FAILED) != 0,
                    failed: flags & disk_kind::FAILED != 0,
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
    /// Keep space allocated, or allocate it.
    pub allocate: bool,
    /// Fail with `EOPNOTSUPP` rather than write zeroes one by one.
    pub fast: bool,
}

/// Which extents [`Disk::extents`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // the two that the protocol knows
pub enum ExtentKind {
    /// Allocated space; the flags are bits of [`towline_wire::disk::extent_flag`].
    Allocation,
    /// Ranges written since the server began to serve the disk: flags are 1 if written, else 0.
    Written,
}

/// A remote disk. Dropping it closes it.
///
/// Offsets and lengths are bytes, in whole blocks of [`DiskInfo::block_minimum`], inside the disk.
/// Calls like [`start_read_at`](Self::start_read_at) return at once and complete later, alone or in
/// a [`crate::Group`]. A change that overlaps another one under way waits for that one first.
///
/// The client replaces a lost connection and resends unanswered requests. An answered change is on
/// stable storage after the next [`Disk::flush`]. If the server's machine fails before that, the
/// change may be lost; every later call then fails with [`Error::WritesLost`] (once the server is
/// back), so that nobody goes on with stale bytes. Who uses a disk in several sessions opens it with
/// [`Client::disk_sharing`]: on its own, a session knows only its own changes and flushes.
pub struct Disk {
    core: Arc<Core>,
    state: Arc<DiskState>,
    checksums: bool,
}

impl Client {
    /// Opens a disk; the empty name stands for the server's default one.
    ///
    /// # Errors
    /// `ENOENT` if there is no such disk, `EMFILE` if too many are open.
    pub fn disk(&self, name: &[u8]) -> Result<Disk, Error> {
        self.disk_sharing(name, &Durability::default())
    }

    /// Opens a disk that one user uses in several sessions, all with this `durability`. A flush in one of them covers
    /// the changes that were answered before it in all, and once one finds that changes were lost, all fail.
    ///
    /// # Errors
    /// As [`Client::disk`]; [`Error::WritesLost`] if changes were lost; `ESTALE` if it is another disk than the one
    /// that the other sessions have.
    pub fn disk_sharing(&self, name: &[u8], durability: &Durability) -> Result<Disk, Error> {
        let name = check_text(name, PATH_BYTES_MAX, Errno::ENOENT)?;
        let number = self.core.number_disk();
        let request = Request::DiskOpen { disk: number, name };
        let outcome = self.core.call(&[request], &[], &mut [])?;
        let info = DiskInfo::of(outcome.single()?)?;
        let state = Arc::new(DiskState::new(number, name, info, durability.clone()));
        self.core.remember_disk(&state);
        let disk = Disk { core: self.core.clone(), state, checksums: false };
        disk.state.opened()?;
        Ok(disk)
    }

    /// Returns the name and description of each disk of the server.
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

    /// Its properties as last reported by the server.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        *self.state.info.lock()
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.info().size
    }

    /// The smallest and the preferred unit of requests, in bytes.
    #[must_use]
    pub fn block_sizes(&self) -> (u32, u32) {
        let info = self.info();
        (info.block_minimum, info.block_preferred)
    }

    /// Asks the server for the disk's current properties; the size may have changed.
    ///
    /// # Errors
    /// [`Error::Connection`], [`Error::WritesLost`].
    pub fn refresh(&self) -> Result<DiskInfo, Error> {
        let request = Request::DiskInfo { disk: self.state.number };
        self.learn(&request)
    }

    /// Changes the size to `size` bytes, for all users of the disk; zero: to the current size of
    /// the file or device behind it.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the file or device cannot be resized, `EROFS`, `EINVAL`.
    pub fn resize(&self, size: u64) -> Result<DiskInfo, Error> {
        let request = Request::DiskResize { disk: self.state.number, size };
        self.learn(&request)
    }

    fn learn(&self, request: &Request<'_>) -> Result<DiskInfo, Error> {
        self.state.check()?;
        let outcome = self.core.call(&[*request], &[], &mut [])?;
        let info = DiskInfo::of(outcome.single()?)?;
        self.state.learned(info)?;
        Ok(info)
    }

    /// From now on, data carries a crc32c for each 4 KiB, which the receiver checks against its
    /// memory. A mismatch fails with `EBADMSG`.
    #[must_use]
    pub fn with_checksums(mut self, checksums: bool) -> Self {
        self.checksums = checksums;
        self
    }

    /// Fills `target` with the bytes at `offset`.
    ///
    /// # Errors
    /// Those of the device; `EINVAL` for a range that is not in whole blocks inside the disk; `EIO` for one that is not any
    /// more.
    pub fn read_at(&self, target: &mut [u8], offset: u64) -> Result<(), Error> {
        if target.len() > TRANSFER_BYTES_MAX {
            return self.read_vectored_at(&mut [IoSliceMut::new(target)], offset);
        }
        self.state.check()?;
        let request = self.read_request(offset, target.len());
        let outcome = self.core.call(&[request], &[], target)?;
        read_all(&outcome, target)
    }

    /// Fills several buffers with consecutive bytes from `offset` on. Each buffer is a request of
    /// its own (or several, beyond 8 MiB), read straight into it; the requests are under way
    /// together.
    ///
    /// # Errors
    /// As [`Disk::read_at`], of the first request that failed; the others may have filled their
    /// buffers.
    pub fn read_vectored_at(
        &self,
        targets: &mut [IoSliceMut<'_>],
        offset: u64,
    ) -> Result<(), Error> {
        self.state.check()?;
        check_end(offset, targets.iter().map(|target| target.len()))?;
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

    /// Fills a buffer of at most 8 MiB, completed later; yields the buffer.
    ///
    /// # Errors
    /// If it cannot be started.
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

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// Those of the device; `EROFS`; `EINVAL` or `ENOSPC` for a range that is not in whole blocks
    /// inside the disk; `EIO` for one that is not any more.
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<(), Error> {
        self.write(data, offset, false)
    }

    /// [`Disk::write_at`] that returns once the data is on stable storage (FUA).
    ///
    /// # Errors
    /// As [`Disk::write_at`].
    pub fn write_durable_at(&self, data: &[u8], offset: u64) -> Result<(), Error> {
        self.write(data, offset, true)
    }

    /// Writes several buffers one after the other, from `offset` on. Each buffer is a request of
    /// its own (or several, beyond 8 MiB), sent straight from it; the requests are under way
    /// together.
    ///
    /// # Errors
    /// As [`Disk::write_at`], of the first request that failed; the others may have been written.
    pub fn write_vectored_at(
        &self,
        sources: &[IoSlice<'_>],
        offset: u64,
        durable: bool,
    ) -> Result<(), Error> {
        self.state.check()?;
        check_end(offset, sources.iter().map(|source| source.len()))?;
        let (mut under_way, mut at) = (UnderWay::new(&self.core), offset);
        // Note every answer, also after a failure: a change that was stored may be lost later.
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

    /// Writes at most 8 MiB, completed later; yields the buffer.
    ///
    /// # Errors
    /// If it cannot be started.
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

    /// Puts all changes answered so far, to any client, on stable storage.
    ///
    /// # Errors
    /// Those of the device, after which the state of these changes is unknown;
    /// [`Error::WritesLost`].
    pub fn flush(&self) -> Result<(), Error> {
        self.start_flush()?.wait().map(|_| ())
    }

    /// [`Disk::flush`], completed later; yields an empty buffer, so that it can be in one group
    /// with reads and writes.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_flush(&self) -> Result<Operation<Vec<u8>>, Error> {
        self.state.check()?;
        let covers = self.state.written();
        let request = Request::DiskFlush { disk: self.state.number };
        self.start_change(request, Stored::Flushed(covers))
    }

    /// Makes a range of any length read as zeroes.
    ///
    /// # Errors
    /// As [`Disk::write_at`]; `EOPNOTSUPP` if [`ZeroHow::fast`] is set and there is no fast way.
    pub fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> Result<(), Error> {
        self.start_zero(offset, length, how, false)?.wait().map(|_| ())
    }

    /// [`Disk::zero`], completed later.
    ///
    /// # Errors
    /// If it cannot be started.
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

    /// Discards the contents of a range of any length.
    ///
    /// # Errors
    /// As [`Disk::write_at`].
    pub fn trim(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.start_trim(offset, length)?.wait().map(|_| ())
    }

    /// [`Disk::trim`], completed later.
    ///
    /// # Errors
    /// If it cannot be started.
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
    /// Those of the device.
    pub fn cache(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.state.check()?;
        let request = Request::DiskCache { disk: self.state.number, offset, length };
        done(self.core.call(&[request], &[], &mut [])?.single()?)
    }

    /// Returns the extents at the start of a range: at least one and at most 4096, neighbours with
    /// different flags. Ask again from their end for the rest.
    ///
    /// # Errors
    /// `EINVAL` for an empty range or one that is not in whole blocks inside the disk; `EIO` for one that is not any more.
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
        // With an empty list the caller would never reach the end of its range.
        if extents.is_empty() { Err(unexpected()) } else { Ok(extents) }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.core.close_disk(self.state.number);
    }
}

/// Fails for buffers that reach beyond the largest offset: the next one would be for the start of the
/// disk.
fn check_end(offset: u64, mut lengths: impl Iterator<Item = usize>) -> Result<(), Error> {
    let end = lengths.try_fold(offset, |end, length| end.checked_add(length as u64));
    end.map_or(Err(Errno::EINVAL.into()), |_| Ok(()))
}

/// Checks that a read returned all of its bytes, with matching checksums.
fn read_all(outcome: &Outcome, target: &[u8]) -> Result<(), Error> {
    match outcome.single()? {
        Reply::Read { length, errno: 0 }
            if length as usize == target.len() && outcome.landed == target.len() as u64 => {}
        Reply::Read { errno, .. } if errno != 0 => return Err(Errno(errno).into()),
        _ => return Err(unexpected()),
    }
    for Checked { at, length, sums } in &outcome.checksums {
        // It is inside the target, or it would not have counted as landed.
        let part = target.get(*at as usize..*at as usize + *length as usize);
        if part.is_none_or(|part| first_difference(part, sums).is_some()) {
            return Err(Errno::EBADMSG.into());
        }
    }
    Ok(())
}
