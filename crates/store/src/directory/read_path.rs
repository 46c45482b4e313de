//! Reads of files by their path, of which nothing else is wanted: a short one costs four system calls, without
//! finding out more of the file than its type.

use super::copied::Copied;
use super::identity::Acting;
use super::open_file::{DirectoryFile, REFERENCE_BYTES_MIN};
use super::open_flags::Opening;
use super::resolve::Tree;
use super::system::is_file_or_directory;
use super::{DirectoryStore, attributes::stat_file};
use crate::{Caller, Closing, OpenHow, PathRead, ReadOutcome, Source};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use towline_wire::Errno;

impl DirectoryStore {
    /// See [`crate::FileStore::read_path`].
    pub(super) fn read_start_of(
        &self,
        caller: &Caller,
        at: Source<'_>,
        flags: u32,
        length: usize,
    ) -> Result<PathRead, Errno> {
        let opening = Opening::of(OpenHow { flags, mode: 0 })?;
        let acting = self.tree.server.act_as(caller)?;
        if opening.only_reads()
            && (1..REFERENCE_BYTES_MIN).contains(&length)
            && let Some(fd) = self.open_to_read(acting.as_ref(), at, &opening)?
        {
            drop(acting);
            return self.read_start(fd, caller, &opening, length);
        }
        let (file, _) = self.open_as((caller, acting), at, opening)?;
        PathRead::of(file, length)
    }

    /// Opens a regular file or directory if it is in a known directory.
    fn open_to_read(
        &self,
        acting: Option<&Acting<'_>>,
        (base, path): Source<'_>,
        opening: &Opening,
    ) -> Result<Option<OwnedFd>, Errno> {
        let base = self.file(base)?;
        if self.tree.foreign.get().is_some() {
            return Ok(None);
        }
        match self.tree.open_known(acting, base, path, opening.flags, opening.mode) {
            Some(Ok(fd)) => Ok(is_file_or_directory(&fd).then_some(fd)),
            // A lease takes time to break.
            None | Some(Err(Errno::EAGAIN)) => Ok(None),
            Some(Err(error)) => Err(error),
        }
    }

    /// Reads from the start of a file that [`Self::open_to_read`] opened.
    fn read_start(
        &self,
        fd: OwnedFd,
        caller: &Caller,
        opening: &Opening,
        length: usize,
    ) -> Result<PathRead, Errno> {
        // Known directories are on the device of the root.
        let Tree { root_identity: (device, _), residency, .. } = &*self.tree;
        let (device, offset) = (*device, 0);
        let copied = Copied { fd: &fd, device, residency, direct: None, offset, length };
        Ok(match copied.read(false)? {
            ReadOutcome::Ready(data) => PathRead::Ready(data, Some(Closing::Descriptor(fd))),
            ReadOutcome::WouldBlock => {
                let stat = stat_file(&fd)?;
                let fd = Arc::new(fd);
                let file = DirectoryFile::new(&self.tree, fd, opening, &stat, Some(caller));
                PathRead::WouldBlock(Arc::new(file))
            }
        })
    }
}
