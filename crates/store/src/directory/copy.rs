//! Copies between open files inside the server.

use super::attributes::{errno, stat_file};
use super::open_file::{DirectoryFile, PAGE_BYTES};
use rustix::buffer::spare_capacity;
use rustix::io::Errno as Code;
use towline_wire::Errno;
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE};

/// Maximum per call, so that it does not occupy a thread for long.
const COPY_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Maximum per call if the kernel cannot copy and this code has to.
const LOOP_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Buffer size of that loop.
const BUFFER_BYTES: usize = 128 * 1024;

/// Like `copy_file_range(2)`, but also between file systems.
pub(super) fn copy_between(
    from: &DirectoryFile,
    offset: u64,
    to: &DirectoryFile,
    to_offset: u64,
    length: u64,
) -> Result<u64, Errno> {
    // In the order of Linux.
    if from.path_only || to.path_only {
        return Err(Errno::EBADF);
    }
    if from.kind == TYPE_DIRECTORY || to.kind == TYPE_DIRECTORY {
        return Err(Errno::EISDIR);
    }
    if from.kind != TYPE_FILE || to.kind != TYPE_FILE {
        return Err(Errno::EINVAL);
    }
    if !from.readable || !to.writable {
        return Err(Errno::EBADF);
    }
    if i64::try_from(offset).is_err() || i64::try_from(to_offset).is_err() {
        return Err(Errno::EINVAL);
    }
    // Bytes beyond the end are not copied, so they may overlap.
    let length = length.min(stat_file(&from.fd)?.stx_size.saturating_sub(offset));
    let ends = [offset.checked_add(length), to_offset.checked_add(length)];
    let [Some(end), Some(to_end)] = ends else { return Err(Errno::EOVERFLOW) };
    if from.identity == to.identity && offset < to_end && to_offset < end {
        return Err(Errno::EINVAL);
    }
    let _acting = to.act_as_user()?;
    let (mut source, mut target) = (offset, to_offset);
    let count = length.min(COPY_BYTES_MAX) as usize;
    // The kernel would copy only as far as everything is aligned.
    if !(offset | to_offset | count as u64).is_multiple_of(PAGE_BYTES) {
        from.leave_direct();
        to.leave_direct();
    }
    let result = rustix::io::retry_on_intr(|| {
        rustix::fs::copy_file_range(&from.fd, Some(&mut source), &to.fd, Some(&mut target), count)
    });
    match result {
        Ok(copied) => Ok(copied as u64),
        Err(Code::XDEV | Code::INVAL | Code::OPNOTSUPP | Code::NOSYS) => {
            copy_through_memory(from, offset, to, to_offset, length.min(LOOP_BYTES_MAX))
        }
        Err(error) => Err(errno(error)),
    }
}

fn copy_through_memory(
    from: &DirectoryFile,
    offset: u64,
    to: &DirectoryFile,
    to_offset: u64,
    length: u64,
) -> Result<u64, Errno> {
    let mut copied = 0;
    while copied < length {
        let wanted = (length - copied).min(BUFFER_BYTES as u64) as usize;
        let mut bytes = Vec::with_capacity(wanted);
        let result = rustix::io::retry_on_intr(|| {
            bytes.clear();
            rustix::io::pread(&from.fd, spare_capacity(&mut bytes), offset + copied)
        });
        let written = match result {
            Ok(0) => break,
            Ok(_) => to.write_at(to_offset + copied, &bytes).map(|(count, _)| count),
            Err(error) => Err(errno(error)),
        };
        match written {
            Ok(count) => {
                copied += count as u64;
                if count < bytes.len() {
                    break;
                }
            }
            // Report what has been copied; the next call meets the error again.
            Err(_) if copied > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(copied)
}
