//! The unit in which the kernel gives memory.
#![allow(unsafe_code)]

/// Bytes of a page of this machine: 4096, on some with ARM's processors 16 or 64 times 1024.
#[must_use]
pub fn page_bytes() -> usize {
    // SAFETY: a plain function, which looks at what the kernel told the process.
    unsafe { libc::getauxval(libc::AT_PAGESZ) as usize }
}
