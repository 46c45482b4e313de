//! The page size of this machine.
#![allow(unsafe_code)]

/// Returns the page size: 4096 bytes, on some ARM machines 16 or 64 KiB.
#[must_use]
pub fn page_bytes() -> usize {
    // SAFETY: a plain function that reads the auxiliary vector, which the kernel gave to the process.
    unsafe { libc::getauxval(libc::AT_PAGESZ) as usize }
}
