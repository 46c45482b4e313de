//! Lists directories, with attributes.

use super::attributes::{errno, stat_listed};
use super::open_file::DirectoryFile;
use crate::Listing;
use rustix::fs::{FileType, RawDir, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use towline_wire::attr::{TYPE_DIRECTORY, attr_flag};
use towline_wire::{Attr, Errno};

/// Buffer for the entries of one system call: enough for several hundred names.
const BATCH_BYTES: usize = 32 * 1024;
/// Position of the `S_IF*` bits in a mode; shifted down they are `DT_*`.
const TYPE_SHIFT: u32 = 12;

/// Finds out whether files in a directory have extended attributes.
struct Xattrs(std::os::fd::RawFd);

impl Xattrs {
    fn of(directory: BorrowedFd<'_>) -> Self {
        Self(directory.as_raw_fd())
    }

    /// Returns `attr_flag::NO_XATTRS` if the file has none, else zero.
    fn flags(&self, name: &std::ffi::CStr) -> u32 {
        // There is no call relative to a directory.
        let mut path = format!("/proc/self/fd/{}/", self.0).into_bytes();
        path.extend_from_slice(name.to_bytes());
        // Not an empty buffer: for that `llistxattr` of rustix returns zero in any case.
        let mut names = [0; 64];
        match rustix::fs::llistxattr(path, &mut names) {
            Ok(0) | Err(rustix::io::Errno::OPNOTSUPP) => attr_flag::NO_XATTRS,
            _ => 0,
        }
    }
}

/// Returns `DT_*` of an entry; zero if the file system does not report it, as some FUSE ones do
/// not, so that clients ask for the attributes.
fn type_of(kind: FileType) -> u32 {
    if kind == FileType::Unknown { 0 } else { kind.as_raw_mode() >> TYPE_SHIFT }
}

impl DirectoryFile {
    /// Lists from `cookie` on. Returns true if it reached the end.
    pub(super) fn list(
        &self,
        cookie: u64,
        attributes: bool,
        listing: &mut dyn Listing,
    ) -> Result<bool, Errno> {
        if self.path_only {
            return Err(Errno::EBADF);
        }
        if self.kind != TYPE_DIRECTORY {
            return Err(Errno::ENOTDIR);
        }
        // Only a caller that may search the directory sees attributes of the entries.
        let _acting = match &self.caller {
            Some(caller) => self.tree.server.act_as(caller)?,
            None => None,
        };
        let xattrs = listing.wants_xattrs().then(|| Xattrs::of(self.fd.as_fd()));
        let _position = self.position.lock();
        rustix::fs::seek(&self.fd, SeekFrom::Start(cookie)).map_err(errno)?;
        let mut batch: Vec<u8> = Vec::with_capacity(BATCH_BYTES);
        let mut entries = RawDir::new(&self.fd, batch.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(rustix::io::Errno::INTR) => continue,
                // A removed directory is empty.
                Err(rustix::io::Errno::NOENT) => return Ok(true),
                Err(error) => return Err(errno(error)),
            };
            let name = entry.file_name();
            let mut inode = entry.ino();
            let mut file_type = type_of(entry.file_type());
            let mut attr: Option<Attr> = None;
            if name.to_bytes() == b".." {
                // The parent of the root is outside the export; show the root itself.
                if self.identity == self.tree.root_identity {
                    inode = self.identity.1;
                }
            } else if attributes && let Some(stat) = stat_listed(&self.fd, name) {
                file_type = u32::from(stat.stx_mode) >> TYPE_SHIFT;
                inode = stat.stx_ino;
                let flags = xattrs.as_ref().map_or(0, |xattrs| xattrs.flags(name));
                let mut known = self.tree.attr_of(&stat);
                known.flags |= flags;
                attr = Some(known);
            }
            // `DT_*` has four bits.
            let file_type = (file_type & 15) as u8;
            let cookie = entry.next_entry_cookie();
            if !listing.entry(cookie, inode, file_type, name.to_bytes(), attr) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_told_is_of_no_type() {
        for (kind, wanted) in [
            (FileType::Unknown, libc::DT_UNKNOWN),
            (FileType::Directory, libc::DT_DIR),
            (FileType::Symlink, libc::DT_LNK),
        ] {
            assert_eq!(type_of(kind), wanted.into());
        }
    }
}
