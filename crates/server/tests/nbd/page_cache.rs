//! What the page cache holds of a file, without asking the server.

use std::fs::File;
use std::os::fd::AsRawFd;

/// Returns how many pages of a file are in the cache, and how many of these wait to be written, from
/// `cachestat(2)`; `None` before Linux 6.5.
fn pages(file: &File) -> Option<(u64, u64)> {
    let (range, mut state) = ([0u64; 2], [0u64; 5]);
    // SAFETY: both arrays have the layout of the kernel's structures and live through the call.
    #[allow(unsafe_code)]
    let result =
        unsafe { libc::syscall(451, file.as_raw_fd(), &raw const range, &raw mut state, 0) };
    (result == 0).then(|| (state[0], state[1] + state[2]))
}

/// Returns the number of pages that wait to be written.
pub(crate) fn dirty_pages(file: &File) -> u64 {
    pages(file).map_or(0, |(_, dirty)| dirty)
}

/// Returns true if the kernel reports the cached pages of this file, which must have some. It does not before
/// Linux 6.5, nor on overlayfs, which has no pages of its own; then this prints a message.
pub(crate) fn is_told(file: &File) -> bool {
    let told = pages(file).is_some_and(|(cached, _)| cached > 0);
    if !told {
        eprintln!(
            "SKIPPED: the kernel does not tell what it caches of files here (cachestat, file system)"
        );
    }
    told
}
