//! Open files of either side: positioned reads and writes, holes, and the stamp of a part.

use super::{closing, local};
use crate::report::{Failure, Outcome};
use rustix::fs::{SeekFrom, XattrFlags};
use std::os::unix::fs::FileExt;
use towline_client::{Attr, Errno, File, SetAttr};
use towline_wire::attr::attr_flag;
use towline_wire::request::{sync_kind, whence};

/// An open file.
pub(crate) enum Handle {
    /// On this machine.
    Local(std::fs::File),
    /// On a server.
    Remote(File),
}

impl Handle {
    /// Asks for the attributes.
    pub(crate) fn attr(&self) -> Outcome<Attr> {
        match self {
            Self::Local(file) => Ok(local::status_of_file(file)?.attr),
            Self::Remote(file) => Ok(file.stat()?),
        }
    }

    /// Returns attributes of the time when it was opened, or newer ones.
    pub(crate) fn opened(&self) -> Outcome<Attr> {
        match self {
            Self::Local(_) => self.attr(),
            Self::Remote(file) => Ok(*file.attr()),
        }
    }

    /// Reads until the buffer is full or the file ends.
    pub(crate) fn read_at(&self, target: &mut [u8], offset: u64) -> Outcome<usize> {
        let mut filled = 0;
        while filled < target.len() {
            let (rest, at) = (&mut target[filled..], offset + filled as u64);
            let read = match self {
                Self::Local(file) => match file.read_at(rest, at) {
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                    result => result?,
                },
                Self::Remote(file) => file.read_at(rest, at)?,
            };
            if read == 0 {
                break;
            }
            filled += read;
        }
        Ok(filled)
    }

    /// Reads the next bytes: of a local file in order, of a remote file at `offset`.
    pub(crate) fn read_next(&mut self, target: &mut [u8], offset: u64) -> Outcome<usize> {
        match self {
            Self::Local(file) => Ok(std::io::Read::read(file, target)?),
            Self::Remote(file) => Ok(file.read_at(target, offset)?),
        }
    }

    /// Writes the next bytes: to a local file in order, to a remote file at `offset`.
    pub(crate) fn write_next(&mut self, data: &[u8], offset: u64) -> Outcome<()> {
        match self {
            Self::Local(file) => Ok(std::io::Write::write_all(file, data)?),
            Self::Remote(_) => self.write_at(data, offset),
        }
    }

    /// Writes all bytes at `offset`.
    pub(crate) fn write_at(&self, data: &[u8], offset: u64) -> Outcome<()> {
        match self {
            Self::Local(file) => Ok(file.write_all_at(data, offset)?),
            Self::Remote(file) => Ok(file.write_all_at(data, offset)?),
        }
    }

    /// Returns the first data at or after `offset`, or `None` if the rest is a hole. A store without
    /// knowledge of holes has data everywhere.
    pub(crate) fn data(&self, offset: u64) -> Outcome<Option<u64>> {
        found(
            match self {
                Self::Local(file) => {
                    rustix::fs::seek(file, SeekFrom::Data(offset)).map_err(Failure::from)
                }
                Self::Remote(file) => file.seek(offset, whence::DATA).map_err(Failure::from),
            },
            Some(offset),
        )
    }

    /// Returns the first hole at or after `offset`; the end of the file counts as one. `None` if the store
    /// does not know.
    pub(crate) fn hole(&self, offset: u64) -> Outcome<Option<u64>> {
        found(
            match self {
                Self::Local(file) => {
                    rustix::fs::seek(file, SeekFrom::Hole(offset)).map_err(Failure::from)
                }
                Self::Remote(file) => file.seek(offset, whence::HOLE).map_err(Failure::from),
            },
            None,
        )
    }

    /// Truncates or extends the file to this length.
    pub(crate) fn set_size(&self, size: u64) -> Outcome<()> {
        match self {
            Self::Local(file) => Ok(file.set_len(size)?),
            Self::Remote(file) => {
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                Ok(file.set_attr(b"", true, &set).map(drop)?)
            }
        }
    }

    /// Reads an extended attribute. `None` if there is none or the store does not support them.
    pub(crate) fn xattr(&self, name: &str) -> Option<Vec<u8>> {
        match self {
            Self::Local(file) => {
                let mut value = vec![0; 256];
                let length = rustix::fs::fgetxattr(file, name, &mut value).ok()?;
                value.truncate(length);
                Some(value)
            }
            Self::Remote(file) => file.xattr(b"", true, name.as_bytes()).ok(),
        }
    }

    /// Sets an extended attribute.
    pub(crate) fn set_xattr(&self, name: &str, value: &[u8]) -> Outcome<()> {
        match self {
            Self::Local(file) => Ok(rustix::fs::fsetxattr(file, name, value, XattrFlags::empty())?),
            Self::Remote(file) => Ok(file.set_xattr(b"", true, name.as_bytes(), value, 0)?),
        }
    }

    /// Removes an extended attribute.
    pub(crate) fn remove_xattr(&self, name: &str) -> Outcome<()> {
        match self {
            Self::Local(file) => Ok(rustix::fs::fremovexattr(file, name)?),
            Self::Remote(file) => Ok(file.remove_xattr(b"", true, name.as_bytes())?),
        }
    }

    /// Writes the file's bytes to stable storage, so that they survive a crash of the machine.
    pub(super) fn sync_data(&self) -> Outcome<()> {
        match self {
            Self::Local(file) => Ok(file.sync_data()?),
            Self::Remote(file) => Ok(file.sync(sync_kind::DATA)?),
        }
    }

    /// Reports the errors that closing would report, and leaves the file open.
    pub(super) fn settle(&self) -> Outcome<()> {
        match self {
            // The kernel asks the file system each time that one of the descriptors is closed.
            Self::Local(file) => Ok(closing::close(file.try_clone()?)?),
            Self::Remote(file) if file.attr().flags & attr_flag::SETTLES == 0 => Ok(()),
            Self::Remote(file) => Ok(file.sync(sync_kind::SETTLE)?),
        }
    }

    /// Closes the file and reports errors that show only then.
    pub(crate) fn close(self) -> Outcome<()> {
        match self {
            Self::Local(file) => Ok(closing::close(file)?),
            Self::Remote(file) => Ok(file.close()?),
        }
    }
}

fn found(result: Outcome<u64>, otherwise: Option<u64>) -> Outcome<Option<u64>> {
    match result {
        Ok(offset) => Ok(Some(offset)),
        Err(failure) if failure.is(Errno::ENXIO) => Ok(None),
        Err(failure) if failure.is_refusal() || failure.is(Errno::EINVAL) => Ok(otherwise),
        Err(failure) => Err(failure),
    }
}
