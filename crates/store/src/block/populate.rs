//! Reads a part of a file into the page cache and waits until it is there.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;

/// Waits until these bytes of a file have been in the page cache. Copies nothing: the pages are
/// sent to `/dev/null`.
///
/// # Errors
/// Errors of the device; `EIO` if the file ends before the range does.
pub(super) fn bring_in(file: &OwnedFd, offset: u64, length: u64) -> io::Result<()> {
    // Opened each time: the cost is small beside waiting for a device, and no descriptor stays open
    // for it.
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let nowhere = rustix::fs::open("/dev/null", flags, Mode::empty())?;
    let mut at = offset;
    while at < offset + length {
        let rest = usize::try_from(offset + length - at).unwrap_or(usize::MAX);
        match rustix::fs::sendfile(&nowhere, file, Some(&mut at), rest) {
            Ok(0) => return Err(Errno::IO.into()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn pages_are_there_afterwards() {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let fd = OwnedFd::from(file.as_file().try_clone().unwrap());
        bring_in(&fd, 4096, (1 << 20) - 4096).unwrap();
        let pages = crate::directory::system::cached_pages(fd.as_fd(), 0, 1 << 20);
        match pages {
            Ok(pages) => {
                assert!(pages * towline_mem::page_bytes() as u64 >= (1 << 20) - 4096);
            }
            Err(error) => eprintln!("SKIPPED: this kernel does not count cached pages: {error}"),
        }
        assert_eq!(
            bring_in(&fd, 0, 2 << 20).unwrap_err().raw_os_error(),
            Some(5),
            "it ends before"
        );
    }
}
