//! One side of a copy: a disk of a Towline server or NBD server, or a local file or device.

use super::noted::Stamp;
use super::pieces::PIECE_BYTES;
use crate::remote::{Remotes, no_disk};
use crate::report::{Failure, Outcome};
use crate::serve::parse_bytes;
use rustix::fs::FlockOperation;
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};
use towline_attach::nbd::{CallError, Caller, Source};
use towline_client::{Disk, Errno, ExtentKind, Url, ZeroHow, extent_flag};
use towline_store::BlockStore;
use towline_store::block::{CacheMode, FileDisk};

/// Time that an NBD server may be away while it is read from.
const PATIENCE: Duration = Duration::from_secs(60);
/// Connections to an NBD server that allows several: their buffers hold more, and more threads of the server
/// work.
const CONNECTIONS: usize = 4;
/// Longest range in which extents of a remote disk are asked for, in bytes, so that no single answer
/// takes the server long.
const EXTENTS_BYTES_MAX: u64 = 64 << 30;

/// Kind of a run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Holds data.
    Data,
    /// Reads as zeroes, and has space.
    Zero,
    /// Reads as zeroes, without space.
    Hole,
}

impl Content {
    fn of(hole: bool, zero: bool) -> Self {
        match (hole, zero) {
            (true, true) => Self::Hole,
            (false, true) => Self::Zero,
            // A hole that does not read as zeroes may hold anything.
            (_, false) => Self::Data,
        }
    }

    /// Returns the name of the kind.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Zero => "zero",
            Self::Hole => "hole",
        }
    }
}

/// What an argument that names a disk means.
pub(super) enum Named<'a> {
    /// A disk of a Towline server, by URL.
    Towline(&'a str),
    /// A disk of an NBD server, by URL.
    Nbd(&'a str),
    /// A local file or device. Its name may be any bytes.
    File(&'a Path),
}

impl<'a> Named<'a> {
    /// Tells URLs from paths.
    pub(super) fn of(name: &'a OsStr) -> Self {
        match name.to_str() {
            Some(text) if Url::looks_like(text) => Self::Towline(text),
            Some(text) if Source::looks_like(text) => Self::Nbd(text),
            _ => Self::File(Path::new(name)),
        }
    }
}

/// A disk with blocking calls, for any thread.
pub(super) struct End {
    name: OsString,
    /// It is written to, not only read.
    is_target: bool,
    kind: Kind,
}

enum Kind {
    Remote(Disk),
    /// Connections to the same server, which take turns by piece.
    Nbd(Vec<Caller>),
    /// The lock lets one thread write at a time: the kernel does so anyway, while the others would spin.
    Local(Arc<FileDisk>, Mutex<()>),
}

impl End {
    /// Opens an existing disk, for reading, or also for writing unless it is a file in use as a disk. With
    /// `checksums`, data of our own protocol carries checksums.
    pub(super) fn open(
        remotes: &Remotes,
        name: &OsStr,
        writes: bool,
        checksums: bool,
    ) -> Outcome<Self> {
        let kind = match Named::of(name) {
            Named::Towline(text) => Kind::Remote(remote(remotes, text)?.with_checksums(checksums)),
            Named::Nbd(text) => {
                let source = Source::parse(text).map_err(Failure::new)?;
                let patience = if writes { None } else { Some(PATIENCE) };
                let first = Caller::connect(&source, patience);
                let mut callers = vec![first.map_err(|error| failed(&source, &error))?];
                while callers.len() < CONNECTIONS {
                    match callers[0].beside(&source, patience) {
                        Ok(another) => callers.push(another),
                        Err(error) => {
                            log::info!("{} connections are enough: {error}", callers.len());
                            break;
                        }
                    }
                }
                Kind::Nbd(callers)
            }
            Named::File(path) => {
                if writes && path.is_file() {
                    let file = File::options().write(true).open(path).map_err(Failure::from);
                    let unused = file.and_then(|file| unused(&file));
                    unused.map_err(|failure| failure.about(path.display()))?;
                }
                Kind::Local(local(path, writes)?, Mutex::default())
            }
        };
        let end = Self { name: name.to_owned(), is_target: writes, kind };
        if writes && end.is_read_only() {
            return Err(Failure::from(Errno::EROFS).about(name.display()));
        }
        Ok(end)
    }

    /// Creates a local file, or opens one to replace what it holds: empties it without a length, otherwise makes
    /// it at least so long and lets it keep its bytes, which may be those that the source's server serves. Also
    /// returns the offset from which on it is all holes. Refuses a file that is in use as a disk, under any name.
    /// Calls `before` when nothing can refuse it any more, before the file is changed.
    pub(super) fn create(
        name: &OsStr,
        length: Option<u64>,
        before: impl FnOnce() -> Outcome<()>,
    ) -> Outcome<(Self, u64)> {
        let make = || -> Outcome<u64> {
            let file = File::options().write(true).create(true).truncate(false).open(name)?;
            unused(&file)?;
            before()?;
            let kept = length.map_or(Ok(0), |_| file.metadata().map(|found| found.len()))?;
            file.set_len(kept.max(length.unwrap_or(0)))?;
            Ok(kept)
        };
        let kept = make().map_err(|failure| failure.about(name.display()))?;
        let kind = Kind::Local(local(Path::new(name), true)?, Mutex::default());
        Ok((Self { name: name.to_owned(), is_target: true, kind }, kept))
    }

    /// Returns the name that the user gave, for messages.
    pub(super) fn name(&self) -> impl Display {
        self.name.display()
    }

    /// Returns the size in bytes.
    pub(super) fn size(&self) -> u64 {
        match &self.kind {
            Kind::Remote(disk) => disk.size(),
            Kind::Nbd(callers) => callers[0].geometry().size,
            Kind::Local(file, _) => file.geometry().size,
        }
    }

    /// Returns the smallest unit of requests in bytes.
    pub(super) fn block(&self) -> u64 {
        match &self.kind {
            Kind::Remote(disk) => disk.info().block_minimum.into(),
            Kind::Nbd(callers) => callers[0].geometry().block_minimum.into(),
            Kind::Local(..) => 1,
        }
    }

    fn is_read_only(&self) -> bool {
        match &self.kind {
            Kind::Remote(disk) => disk.info().read_only,
            Kind::Nbd(callers) => callers[0].geometry().read_only,
            Kind::Local(..) => false,
        }
    }

    /// Returns true for local files and devices.
    pub(super) fn is_local(&self) -> bool {
        matches!(self.kind, Kind::Local(..))
    }

    fn at<T>(&self, what: &str, offset: u64, result: Outcome<T>) -> Outcome<T> {
        result.map_err(|failure| failure.about(format_args!("{}: {what} at {offset}", self.name())))
    }

    /// Explains why a call to an NBD server failed.
    fn nbd(&self, error: CallError) -> Failure {
        match (error, self.is_target) {
            (CallError::Server(errno), _) => {
                Failure::from(io::Error::from_raw_os_error(errno)).with("so its server says")
            }
            // Nothing tells whether the server still has the unflushed writes.
            (CallError::Lost, true) => Failure::new(
                "lost the connection to the server of the target; check whether it is running",
            ),
            (CallError::Lost, false) => Failure::new(format!(
                "the server of the source went away and was not back for good within {} s",
                PATIENCE.as_secs()
            )),
        }
    }

    /// Fills `target`, which may be empty after a failure.
    pub(super) fn read(&self, target: &mut Vec<u8>, offset: u64) -> Outcome<()> {
        let result = match &self.kind {
            Kind::Remote(disk) => disk.read_at(target, offset).map_err(Failure::from),
            Kind::Nbd(callers) => at(callers, offset)
                .read(std::mem::take(target), offset)
                .map(|read| *target = read)
                .map_err(|e| self.nbd(e)),
            Kind::Local(file, _) => file.read(offset, target).map_err(Failure::from),
        };
        self.at("reading", offset, result)
    }

    /// Writes data at an offset.
    pub(super) fn write(&self, data: &[u8], offset: u64) -> Outcome<()> {
        let result = match &self.kind {
            Kind::Remote(disk) => disk.write_at(data, offset).map_err(Failure::from),
            Kind::Nbd(callers) => {
                at(callers, offset).write(data.to_vec(), offset).map(drop).map_err(|e| self.nbd(e))
            }
            Kind::Local(file, writing) => {
                let _one_at_a_time = writing.lock();
                file.write(offset, data, false).map_err(Failure::from)
            }
        };
        self.at("writing", offset, result)
    }

    /// Writes a whole buffer without copying it; the buffer may be empty after a failure.
    pub(super) fn write_all(&self, data: &mut Vec<u8>, offset: u64) -> Outcome<()> {
        let Kind::Nbd(callers) = &self.kind else { return self.write(data, offset) };
        let written =
            at(callers, offset).write(std::mem::take(data), offset).map(|back| *data = back);
        self.at("writing", offset, written.map_err(|e| self.nbd(e)))
    }

    /// Zeroes a range, and gives its space back if possible.
    pub(super) fn zero(&self, offset: u64, length: u64) -> Outcome<()> {
        let result = match &self.kind {
            Kind::Remote(disk) => {
                disk.zero(offset, length, ZeroHow::default()).map_err(Failure::from)
            }
            Kind::Nbd(callers) => at(callers, offset).zero(offset, length).map_err(|e| self.nbd(e)),
            Kind::Local(file, _) => {
                let how = towline_store::ZeroHow::default();
                file.zero(offset, length, how).map_err(Failure::from)
            }
        };
        self.at("zeroing", offset, result)
    }

    /// Makes all earlier writes durable.
    pub(super) fn flush(&self) -> Outcome<()> {
        let result = match &self.kind {
            Kind::Remote(disk) => disk.flush().map_err(Failure::from),
            // With several connections, a flush on one covers all of them.
            Kind::Nbd(callers) => callers[0].flush().map_err(|e| self.nbd(e)),
            Kind::Local(file, _) => file.flush().map_err(Failure::from),
        };
        result.map_err(|failure| failure.about(format_args!("{}: flushing", self.name())))
    }

    /// Returns true for local files, which become as long as what is copied to them.
    pub(super) fn is_file(&self) -> bool {
        matches!(&self.kind, Kind::Local(file, _) if file.resizes())
    }

    /// Extends a local file.
    pub(super) fn grow(&self, size: u64) -> Outcome<()> {
        match &self.kind {
            Kind::Local(file, _) if size > file.geometry().size => {
                let result = file.resize(size).map_err(Failure::from);
                self.at("growing", size, result)
            }
            _ => Ok(()),
        }
    }

    /// Sets the final length of a local file, and makes it durable.
    pub(super) fn set_length(&self, length: u64) -> Outcome<()> {
        let result = match &self.kind {
            Kind::Local(file, _) if file.resizes() && length > 0 => file.resize(length),
            Kind::Local(file, _) if file.resizes() => {
                File::options().write(true).open(&self.name).and_then(|file| file.set_len(0))
            }
            _ => return Ok(()),
        };
        self.at("ending", length, result.map_err(Failure::from))?;
        self.flush()
    }

    /// Calls `tell` with each extent in order, joined with neighbours of the same kind. Returns false if the
    /// extents are unknown.
    pub(super) fn extents(&self, mut tell: impl FnMut(Range<u64>, Content)) -> Outcome<bool> {
        let mut last: Option<(Range<u64>, Content)> = None;
        let mut add = |length: u64, content: Content| match &mut last {
            Some((range, same)) if *same == content => range.end += length,
            last => {
                let start = last.as_ref().map_or(0, |(range, _)| range.end);
                let before = last.replace((start..start + length, content));
                if let Some((range, content)) = before {
                    tell(range, content);
                }
            }
        };
        let size = self.size();
        match &self.kind {
            Kind::Remote(disk) => {
                let mut at = 0;
                while at < size {
                    let length = EXTENTS_BYTES_MAX.min(size - at);
                    let found = disk.extents(at, length, ExtentKind::Allocation);
                    for extent in self.at("extents", at, found.map_err(Failure::from))? {
                        let has = |flag| extent.flags & flag != 0;
                        let content = Content::of(has(extent_flag::HOLE), has(extent_flag::ZERO));
                        add(extent.length, content);
                        at += extent.length;
                    }
                }
            }
            Kind::Local(file, _) => {
                let found = file.extents(0, size, &mut |extent| {
                    add(extent.length, Content::of(extent.hole, extent.zero));
                    true
                });
                self.at("extents", 0, found.map_err(Failure::from))?;
            }
            Kind::Nbd(callers) => {
                let Some(extents) = callers[0].extents() else { return Ok(false) };
                for extent in extents {
                    add(extent.length, Content::of(extent.hole, extent.zero));
                }
            }
        }
        if let Some((range, content)) = last {
            tell(range, content);
        }
        Ok(true)
    }

    /// Identifies the disk and, if possible, the version of its contents.
    pub(super) fn stamp(&self) -> Outcome<Stamp> {
        let size = self.size();
        let unsure = |is: String| Stamp { is, size, sure: false };
        Ok(match &self.kind {
            // Other clients may write to it, which nothing here shows.
            Kind::Remote(disk) => unsure(remote_place(disk.info().identity)),
            Kind::Nbd(_) => unsure("nbd".to_owned()),
            Kind::Local(..) => {
                let found = std::fs::metadata(&self.name)
                    .map_err(|error| Failure::from(error).about(self.name()))?;
                if found.file_type().is_block_device() {
                    return Ok(unsure(format!("device {}", found.rdev())));
                }
                let (device, inode) = (found.dev(), found.ino());
                // The time of creation distinguishes it from a removed file with the same inode number.
                let made = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
                let made = made.unwrap_or_default().as_nanos();
                // The time of modification can be set back by programs, the time of the last change cannot.
                let (seconds, nanoseconds) = (found.ctime(), found.ctime_nsec());
                let is = format!("file {device} {inode} {made}, {seconds}.{nanoseconds:09}");
                Stamp { is, size, sure: true }
            }
        })
    }

    /// Identifies the disk as a place to write to. The same identity is the same place, with the same contents
    /// unless another program wrote to it. That is not sure of a device, whose number may be that of another one
    /// the next time, and disks of NBD servers cannot be identified.
    pub(super) fn place(&self) -> Outcome<Stamp> {
        let stamp = self.stamp()?;
        Ok(match &self.kind {
            Kind::Remote(_) => Stamp { sure: true, ..stamp },
            Kind::Nbd(_) => stamp,
            Kind::Local(..) => {
                let is = stamp.is.split(',').next().unwrap_or_default().to_owned();
                Stamp { is, ..stamp }
            }
        })
    }

    /// Returns what [`Self::place`] says of the same disk where a server on this machine serves it.
    pub(super) fn place_of_server(&self) -> Option<String> {
        match &self.kind {
            Kind::Local(file, _) => {
                file.continuity().map(|continuity| remote_place(continuity.identity))
            }
            Kind::Remote(_) | Kind::Nbd(_) => None,
        }
    }

    /// Returns true if both are known to be the same disk, even if one is the local file or device behind
    /// the other, a disk of a server.
    pub(super) fn is_same(&self, other: &Self) -> Outcome<bool> {
        Ok(match (&self.kind, &other.kind) {
            (Kind::Remote(disk), Kind::Local(file, _))
            | (Kind::Local(file, _), Kind::Remote(disk)) => {
                let info = disk.info();
                file.continuity().is_some_and(|file| {
                    // Two machines may have disks of the same identity, but never the same boot.
                    (file.identity, file.epoch) == (info.identity, info.epoch)
                })
            }
            // Two machines may have disks of the same identity, but never the same boot.
            (Kind::Remote(one), Kind::Remote(other)) => {
                let (one, other) = (one.info(), other.info());
                (one.identity, one.epoch) == (other.identity, other.epoch)
            }
            // Only the name can identify a disk of an NBD server.
            (Kind::Nbd(_), Kind::Nbd(_)) => self.name == other.name,
            _ => self.place()?.is == other.place()?.is,
        })
    }

    /// Opens a local disk once more to read from the device instead of the page cache, if that is possible.
    pub(super) fn past_cache(&self) -> Option<Self> {
        match &self.kind {
            Kind::Local(..) => {
                let file = FileDisk::open(Path::new(&self.name), CacheMode::ReadDirect, true);
                let mut probe = [0; 1];
                let file = file.ok().filter(|file| file.read(0, &mut probe).is_ok())?;
                let kind = Kind::Local(file, Mutex::default());
                Some(Self { name: self.name.clone(), is_target: false, kind })
            }
            _ => None,
        }
    }
}

/// Returns the connection for the piece at an offset; there is at least one.
fn at(callers: &[Caller], offset: u64) -> &Caller {
    &callers[(offset / PIECE_BYTES) as usize % callers.len()]
}

/// Opens a disk of a Towline server.
pub(super) fn remote(remotes: &Remotes, text: &str) -> Outcome<Disk> {
    let opened = remotes.server(text).and_then(|(url, client)| {
        named(&url)?;
        client.disk(&url.export).map_err(|error| no_disk(error, &url, &client))
    });
    opened.map_err(|failure| failure.about(text))
}

/// Refuses a URL that names no disk. Servers open a disk for the empty name as well, but a forgotten name
/// must not overwrite it.
pub(super) fn named(url: &Url) -> Outcome<()> {
    if url.export.is_empty() {
        return Err(Failure::new(
            "no disk is named: towline://HOST/DISK; `towline disk info` lists the disks",
        ));
    }
    match url.path.is_empty() {
        true => Ok(()),
        false => Err(Failure::new("a disk has no path in it: towline://HOST/DISK")),
    }
}

/// Explains an error of an NBD server.
pub(super) fn failed(source: &Source, error: &towline_attach::Error) -> Failure {
    Failure::new(error.to_string()).about(source)
}

/// Locks a file that is about to be written. Fails if it is in use as a disk, under any name.
fn unused(file: &File) -> Outcome<()> {
    // QEMU locks parts of its images. On NFS our own lock would be one of these, so none is kept.
    match rustix::fs::fcntl_lock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => {
            return Err(Failure::from(Errno::EBUSY).with("another program has locked it"));
        }
        _ => drop(rustix::fs::fcntl_lock(file, FlockOperation::NonBlockingUnlock)),
    }
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(Failure::from(Errno::EBUSY).with("it is served, or copied to, as a disk"))
        }
        // Not every file system has locks.
        _ => Ok(()),
    }
}

fn local(path: &Path, writes: bool) -> Outcome<Arc<FileDisk>> {
    FileDisk::open(path, CacheMode::Cached, !writes).map_err(|error| {
        let kind = std::fs::metadata(path).map(|found| found.file_type());
        let odd = kind.is_ok_and(|kind| !kind.is_file() && !kind.is_block_device());
        let failure = Failure::from(error).about(path.display());
        match failure.is(Errno::EBUSY) {
            true => failure.with("it is mounted or in use by another program"),
            false if odd => {
                failure.with("neither a file nor a block device (`disk copy` has - for standard input and output)")
            }
            false if path.to_str().is_some_and(|text| text.contains("://")) => failure.with(
                "to name a disk of a server: towline://HOST/DISK, nbd://HOST/DISK, \
                 nbd+unix:///DISK?socket=PATH",
            ),
            false => failure,
        }
    })
}

/// Parses a size, which may be zero, or with a sign a difference.
pub(super) fn size(text: &str) -> Result<(Option<char>, u64), String> {
    let sign = text.chars().next().filter(|sign| ['+', '-'].contains(sign));
    let number = if sign.is_some() { &text[1..] } else { text };
    Ok((sign, if number == "0" { 0 } else { parse_bytes(number)? }))
}

fn remote_place(identity: u64) -> String {
    format!("disk {identity:016x}")
}

#[cfg(test)]
mod tests {
    use super::{End, File};
    use crate::remote::Remotes;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_file_with_its_old_time_or_its_old_inode_is_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let end = || End::open(&Remotes::default(), path.as_ref(), false, false).unwrap();
        std::fs::write(&path, b"one").unwrap();
        let (stamp, place) = (end().stamp().unwrap(), end().place().unwrap());
        let file = File::options().write(true).open(&path).unwrap();
        let time = file.metadata().unwrap().modified().unwrap();
        // Longer than a tick of any kernel's clock.
        std::thread::sleep(std::time::Duration::from_millis(20));
        file.write_all_at(b"two", 0).unwrap();
        file.set_modified(time).unwrap();
        assert_ne!(end().stamp().unwrap(), stamp);
        assert_eq!(end().place().unwrap(), place);
        // Most file systems reuse the inode number for the next file.
        drop(file);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, b"new").unwrap();
        assert_ne!(end().place().unwrap(), place);
    }

    #[test]
    fn what_a_device_holds_is_not_believed() {
        let found = std::fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
        let mut ends = found.filter_map(|device| {
            let path = format!("/dev/{}", device.file_name().to_str()?);
            End::open(&Remotes::default(), path.as_ref(), false, false).ok()
        });
        let Some(device) = ends.next() else {
            return eprintln!("SKIPPED: no block device can be opened here");
        };
        assert!(!device.place().unwrap().sure);
        assert!(device.is_same(&device).unwrap());
    }
}
