//! Reads memory of another process, with one copy in the kernel (`process_vm_readv(2)`).
#![allow(unsafe_code)]

use std::io;

/// A range in the address space of another process. The address is only a number here and is never
/// dereferenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Most regions, and most targets, of one call: half the kernel's limit.
const VECTORS_MAX: usize = 512;

/// Fills `targets`, in order, from `regions` of process `pid`, in order. Returns the number of bytes,
/// which is smaller than requested if a region ends at memory that cannot be read.
///
/// # Errors
/// `EPERM`: the process belongs to another user or does not allow being read (`ptrace(2)`); `ESRCH`: it
/// has ended; `EFAULT`: the first region is not mapped memory; `EINVAL`: too many ranges.
pub fn read_process(pid: i32, regions: &[Region], targets: &mut [&mut [u8]]) -> io::Result<usize> {
    if regions.len() > VECTORS_MAX || targets.len() > VECTORS_MAX {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let remote: Vec<libc::iovec> = regions
        .iter()
        .map(|region| libc::iovec {
            iov_base: std::ptr::without_provenance_mut(region.address as usize),
            iov_len: region.length as usize,
        })
        .collect();
    let local: Vec<libc::iovec> = targets
        .iter_mut()
        .map(|target| libc::iovec { iov_base: target.as_mut_ptr().cast(), iov_len: target.len() })
        .collect();
    // SAFETY: the kernel writes only to the targets, which are exclusively ours during the call, and
    // checks every remote address.
    let count = unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr(),
            local.len() as _,
            remote.as_ptr(),
            remote.len() as _,
            0,
        )
    };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_memory_of_a_process_and_refuses_what_is_none() {
        let source = b"some bytes of this process".to_vec();
        let pid = std::process::id() as i32;
        let region = Region { address: source.as_ptr() as u64, length: source.len() as u64 };
        let (mut first, mut second) = ([0; 5], vec![0; source.len() - 5]);
        match read_process(pid, &[region], &mut [&mut first, &mut second]) {
            Ok(count) => {
                assert_eq!(count, source.len());
                assert_eq!([&first[..], &second].concat(), source);
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
                println!("SKIPPED: this machine forbids process_vm_readv");
                return;
            }
        }
        let nowhere = Region { address: 16, length: 8 };
        let error = read_process(pid, &[nowhere], &mut [&mut first]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
