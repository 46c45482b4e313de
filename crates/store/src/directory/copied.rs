//! Reads that copy the bytes: short ones, and those that wait for the device.

use super::attributes::errno;
use super::open_file::{DirectoryFile, PAGE_BYTES};
use super::residency::Residency;
use super::system;
use crate::ReadOutcome;
use rustix::buffer::spare_capacity;
use rustix::io::Errno as Code;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use towline_mem::{Aggregate, Fresh, Segment, aligned_zeroes};
use towline_wire::Errno;

/// A read of an open file.
pub(super) struct Copied<'a> {
    pub(super) fd: &'a OwnedFd,
    /// The number of the device that holds the file, and what is known of that device.
    pub(super) device: u64,
    pub(super) residency: &'a Residency,
    /// The file, if `O_DIRECT` may be in effect.
    pub(super) direct: Option<&'a DirectoryFile>,
    pub(super) offset: u64,
    pub(super) length: usize,
}

impl Copied<'_> {
    /// Reads; without `wait`, only what is in memory.
    pub(super) fn read(&self, wait: bool) -> Result<ReadOutcome, Errno> {
        if wait || !self.residency.may_tell(self.device) {
            self.read_waiting().map(ReadOutcome::Ready)
        } else {
            self.read_resident()
        }
    }

    /// Reads, and waits for the device.
    fn read_waiting(&self) -> Result<Aggregate, Errno> {
        if let Some(file) = self.direct.filter(|file| file.is_direct())
            && let Some(read) = self.read_directly(file)?
        {
            return Ok(read);
        }
        let mut bytes = Fresh::with_capacity(self.length);
        while bytes.len() < self.length {
            let at = self.offset + bytes.len() as u64;
            match rustix::io::pread(self.fd, spare_capacity(&mut bytes), at) {
                Ok(0) => break,
                Ok(_) if ends_within_page(self.offset + bytes.len() as u64) => break,
                Ok(_) | Err(Code::INTR) => {}
                Err(error) => return Err(errno(error)),
            }
        }
        Ok(Aggregate::from_shared(bytes.share()))
    }

    /// Reads past the page cache; `None` if that needs another alignment of the file's bytes, and will not be tried
    /// again.
    fn read_directly(&self, file: &DirectoryFile) -> Result<Option<Aggregate>, Errno> {
        let (mut bytes, start) = aligned_zeroes(self.length);
        let mut done = 0;
        while done < self.length {
            let rest = &mut bytes[start + done..start + self.length];
            match rustix::io::pread(self.fd, rest, self.offset + done as u64) {
                Ok(0) => break,
                Ok(count) => {
                    done += count;
                    if ends_within_page(self.offset + done as u64) {
                        break;
                    }
                }
                Err(Code::INTR) => {}
                Err(Code::INVAL) if file.leave_direct() => return Ok(None),
                Err(error) => return Err(errno(error)),
            }
        }
        let mut read = Aggregate::new();
        read.append(Segment::Host(Arc::new(bytes)), start as u64, done as u64);
        Ok(Some(read))
    }

    /// Reads what is in memory.
    fn read_resident(&self) -> Result<ReadOutcome, Errno> {
        let mut bytes = Fresh::with_capacity(self.length);
        while bytes.len() < self.length {
            let at = self.offset + bytes.len() as u64;
            match system::read_resident(self.fd, &mut bytes, at) {
                Ok(0) => break,
                Ok(_) if ends_within_page(self.offset + bytes.len() as u64) => break,
                Ok(_) | Err(Code::INTR) => {}
                Err(Code::AGAIN) => return Ok(ReadOutcome::WouldBlock),
                Err(Code::OPNOTSUPP | Code::PERM) => {
                    self.residency.cannot_tell(self.device);
                    return self.read_waiting().map(ReadOutcome::Ready);
                }
                Err(error) => return Err(errno(error)),
            }
        }
        Ok(ReadOutcome::Ready(Aggregate::from_shared(bytes.share())))
    }
}

/// Returns true if a read that stops here has reached the end of the file: missing memory would
/// start at the beginning of a page.
fn ends_within_page(end: u64) -> bool {
    !end.is_multiple_of(PAGE_BYTES)
}
