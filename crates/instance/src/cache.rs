//! The cache of file contents (`towline run --cache`): a directory of the user in which programs keep what they have
//! read, also for later runs.
//!
//! Each *version* of a remote file has a file there, named after the server, the identity of the file and its number
//! of changes ([`Version`]). What a program reads is kept in blocks of [`BLOCK_BYTES`], in any order. The file begins
//! with a table of checksums, one for each block; then come the blocks, at the places that they have in the remote
//! file, from the first multiple of [`BLOCK_BYTES`] behind the table on. A block without a checksum is not there.
//!
//! Processes read and write these files without asking each other. A block counts only if its checksum fits, so
//! nobody gets half of one, not even after a crash of the machine, a full disk or an error of it: such a block is
//! read from its server again.

use rustix::fs::{Mode, OFlags};
use rustix::io::{pread, pwrite};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use towline_wire::Attr;
use towline_wire::attr::{TYPE_FILE, attr_flag};

/// Length of a block in bytes.
pub const BLOCK_BYTES: usize = 4096;
/// Length of a checksum in the table.
const SUM_BYTES: usize = 4;
/// How long the version of an open file counts after it has arrived, if the run changes nothing meanwhile.
pub const VALID: Duration = Duration::from_millis(100);
/// Longest file that is kept, in bytes; beyond that offsets would overflow.
const SIZE_MAX: u64 = 1 << 60;
/// Number of blocks that are looked at together.
const BLOCKS: usize = 64;
/// The time of use of a cached file, which is its time of change, is recorded again after so long.
const USED: Duration = Duration::from_secs(60);
/// When there is too much, what was used longest ago is removed until this part of the limit is left.
const KEPT: (u64, u64) = (7, 8);

/// One version of a remote file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// A hash of the server's address and the export's name.
    server: u64,
    identity: u64,
    change: u64,
    size: u64,
}

impl Version {
    /// Returns the version of a file with these attributes, or `None` if its contents may not be kept: it is no
    /// regular file, or may just be changing.
    #[must_use]
    pub fn of(server: &[u8], attr: &Attr) -> Option<Self> {
        Self::at(hash(server), attr)
    }

    fn at(server: u64, attr: &Attr) -> Option<Self> {
        let is_quiet = attr.flags & attr_flag::QUIET != 0;
        let is_fit = attr.file_type() == TYPE_FILE && is_quiet && attr.size <= SIZE_MAX;
        let (identity, change, size) = (attr.identity(), attr.change, attr.size);
        is_fit.then_some(Self { server, identity, change, size })
    }

    /// Returns true if a file of the same server that has these attributes now is still of this version.
    #[must_use]
    pub fn is_still(&self, attr: &Attr) -> bool {
        Self::at(self.server, attr) == Some(*self)
    }

    fn name(&self) -> String {
        let Self { server, identity, change, size } = self;
        format!("{server:016x}-{identity:016x}-{change:016x}-{size:x}")
    }

    fn blocks(&self) -> u64 {
        self.size.div_ceil(BLOCK_BYTES as u64)
    }

    /// Returns where the blocks begin.
    fn data_at(&self) -> u64 {
        (self.blocks() * SUM_BYTES as u64).next_multiple_of(BLOCK_BYTES as u64)
    }

    /// Returns where the last block ends.
    fn end(&self) -> u64 {
        self.data_at() + self.size
    }
}

/// FNV-1a.
fn hash(text: &[u8]) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    text.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

/// The file with what is kept of one version.
#[derive(Debug)]
pub struct Cached {
    file: OwnedFd,
    version: Version,
}

impl Cached {
    /// Opens the file, and makes it if it is missing. `hide` may move the descriptor elsewhere.
    ///
    /// # Errors
    /// Those of the system calls and of `hide`.
    pub fn open(
        directory: &[u8],
        version: Version,
        hide: impl FnOnce(OwnedFd) -> io::Result<OwnedFd>,
    ) -> io::Result<Self> {
        let path = [directory, b"/", version.name().as_bytes()].concat();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = hide(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?)?;
        let used = rustix::fs::fstat(&file)?.st_mtime;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse).tv_sec;
        if now.saturating_sub(used) > USED.as_secs() as i64 {
            rustix::fs::futimens(
                &file,
                &rustix::fs::Timestamps {
                    last_access: rustix::fs::Timespec {
                        tv_sec: 0,
                        tv_nsec: rustix::fs::UTIME_OMIT,
                    },
                    last_modification: rustix::fs::Timespec {
                        tv_sec: 0,
                        tv_nsec: rustix::fs::UTIME_NOW,
                    },
                },
            )?;
        }
        Ok(Self { file, version })
    }

    /// Returns the version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the length of the remote file in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.version.size
    }

    /// Copies the bytes from `offset` on that are there, and returns their number.
    #[must_use]
    pub fn read_at(&self, target: &mut [u8], offset: u64) -> usize {
        let rest = self.version.size.saturating_sub(offset).min(target.len() as u64) as usize;
        let target = &mut target[..rest];
        let mut done = 0;
        while done < target.len() {
            let (rest, at) = (&mut target[done..], offset + done as u64);
            let count = match self.whole(at, rest.len()) {
                0 => self.read_part(rest, at),
                whole => self.read_whole(&mut rest[..whole], at),
            };
            if count == 0 {
                break;
            }
            done += count;
        }
        done
    }

    /// Returns how many bytes of so many from `offset` on are whole blocks, of which the last one of the file may be
    /// shorter; zero if no block begins there.
    fn whole(&self, offset: u64, length: usize) -> usize {
        let rest = self.version.size.saturating_sub(offset).min(length as u64) as usize;
        let is_last = offset + rest as u64 == self.version.size;
        match offset.is_multiple_of(BLOCK_BYTES as u64) {
            true if is_last => rest,
            true => rest / BLOCK_BYTES * BLOCK_BYTES,
            false => 0,
        }
    }

    /// Copies whole blocks, at most [`BLOCKS`].
    fn read_whole(&self, target: &mut [u8], offset: u64) -> usize {
        let mut table = [[0; SUM_BYTES]; BLOCKS];
        let blocks = target.len().div_ceil(BLOCK_BYTES).min(BLOCKS);
        let place = offset / BLOCK_BYTES as u64 * SUM_BYTES as u64;
        let known = self.read(table[..blocks].as_flattened_mut(), place) / SUM_BYTES;
        let sums = table[..known].iter().map(|sum| u32::from_ne_bytes(*sum));
        let there = sums.clone().take_while(|sum| *sum != 0).count();
        let length = target.len().min(there * BLOCK_BYTES);
        let read = self.read(&mut target[..length], self.version.data_at() + offset);
        let fits = |(block, sum): &(&[u8], u32)| sum_of(block) == *sum;
        target[..read]
            .chunks(BLOCK_BYTES)
            .zip(sums)
            .take_while(fits)
            .map(|(block, _)| block.len())
            .sum()
    }

    /// Copies the part of one block that begins at `offset`.
    fn read_part(&self, target: &mut [u8], offset: u64) -> usize {
        let mut block = [0; BLOCK_BYTES];
        let within = (offset % BLOCK_BYTES as u64) as usize;
        let start = offset - within as u64;
        let length = self.whole(start, BLOCK_BYTES);
        let known = self.read_whole(&mut block[..length], start);
        let count = known.saturating_sub(within).min(target.len());
        target[..count].copy_from_slice(&block[within..within + count]);
        count
    }

    /// Reads from the cached file as much as there is.
    fn read(&self, target: &mut [u8], at: u64) -> usize {
        let mut done = 0;
        while done < target.len() {
            match pread(&self.file, &mut target[done..], at + done as u64) {
                Ok(count) if count > 0 => done += count,
                Err(rustix::io::Errno::INTR) => {}
                _ => break,
            }
        }
        done
    }

    /// Keeps the whole blocks of `data`, which is what the remote file has from `offset` on. Returns how many bytes
    /// these are: none if the cached file may become longer than this process may write files (`RLIMIT_FSIZE`), as
    /// `SIGXFSZ` would end a program that only reads.
    ///
    /// # Errors
    /// Those of the system calls: then part of the blocks is not kept.
    pub fn store(&self, data: &[u8], offset: u64) -> io::Result<u64> {
        if offset >= self.version.size {
            return Ok(0);
        }
        let start = offset.next_multiple_of(BLOCK_BYTES as u64);
        let skipped = usize::try_from(start - offset).unwrap_or(usize::MAX).min(data.len());
        let data = &data[skipped..];
        let data = &data[..self.whole(start, data.len())];
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        let is_allowed = limit.is_none_or(|limit| self.version.end() <= limit);
        if data.is_empty() || !is_allowed {
            return Ok(0);
        }
        write_all(&self.file, data, self.version.data_at() + start)?;
        let sums: Vec<u8> =
            data.chunks(BLOCK_BYTES).flat_map(|block| sum_of(block).to_ne_bytes()).collect();
        write_all(&self.file, &sums, start / BLOCK_BYTES as u64 * SUM_BYTES as u64)?;
        Ok(data.len() as u64)
    }
}

/// Returns the checksum of a block, which is never zero.
fn sum_of(block: &[u8]) -> u32 {
    crc32c::crc32c(block).max(1)
}

fn write_all(file: impl AsFd, mut data: &[u8], mut at: u64) -> io::Result<()> {
    while !data.is_empty() {
        match pwrite(&file, data, at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => (data, at) = (&data[count..], at + count as u64),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Removes what was used longest ago if the cached files occupy more than `limit` bytes. Returns the number of
/// bytes that they occupy now.
///
/// # Errors
/// If the directory cannot be listed; but it may have been removed. A file that cannot be removed stays.
pub fn trim(directory: &Path, limit: u64) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut all: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        // Nothing else is removed, whatever directory somebody has named.
        if !is_ours(entry.file_name().as_bytes()) {
            continue;
        }
        let Ok(about) = entry.metadata() else { continue };
        all.push((about.modified()?, about.blocks() * 512, entry.path()));
    }
    let mut total: u64 = all.iter().map(|(_, bytes, _)| bytes).sum();
    if total <= limit {
        return Ok(total);
    }
    all.sort_unstable();
    for (_, bytes, path) in all {
        if total <= limit / KEPT.1 * KEPT.0 {
            break;
        }
        if std::fs::remove_file(path).is_ok() {
            total -= bytes;
        }
    }
    Ok(total)
}

/// Returns true for a name as [`Version::name`] makes them.
fn is_ours(name: &[u8]) -> bool {
    let parts: Vec<&[u8]> = name.split(|byte| *byte == b'-').collect();
    let is_number = |part: &&[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_hexdigit);
    parts.len() == 4
        && parts.iter().all(is_number)
        && parts[..3].iter().all(|part| part.len() == 16)
}

#[cfg(test)]
mod tests;
