//! Names for a local program that is given by a descriptor. The program that hosts it can find it only by a
//! name that is still valid after descriptors are closed on exec.

use crate::descriptors::Own;
use crate::guard::checked;
use crate::own;

/// A name that stays valid. A file without a name (from `memfd_create(2)`, or removed) keeps a descriptor.
pub(crate) struct Lasting {
    /// Path of the program; ends with a zero byte.
    pub(crate) path: Vec<u8>,
    kept: Option<i32>,
}

impl Lasting {
    /// Makes the name for a program from its path, which ends with a zero byte.
    pub(crate) fn new(program: &[u8]) -> Self {
        let is_open = program.starts_with(b"/proc/") || program.starts_with(b"/dev/fd/");
        is_open
            .then(|| Self::of_open(program))
            .flatten()
            .unwrap_or_else(|| Self { path: program.to_vec(), kept: None })
    }

    fn of_open(program: &[u8]) -> Option<Self> {
        let call = |number, arguments| {
            // SAFETY: paths end with zero bytes, buffers are as long as said, descriptors are ours.
            unsafe { checked(number, arguments) }.ok()
        };
        let here = libc::AT_FDCWD as usize;
        let identity = |path: &[u8]| {
            // SAFETY: all zero is a valid `stat`.
            let mut found: libc::stat = unsafe { std::mem::zeroed() };
            let (at, to) = (path.as_ptr() as usize, &raw mut found as usize);
            call(libc::SYS_newfstatat, [here, at, to, 0, 0, 0])?;
            Some((found.st_dev, found.st_ino))
        };
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
        let fd = call(libc::SYS_openat, [here, program.as_ptr() as usize, flags, 0, 0, 0])?;
        let link = format!("/proc/self/fd/{fd}\0");
        let mut name = vec![0u8; libc::PATH_MAX as usize];
        let read = [here, link.as_ptr() as usize, name.as_mut_ptr() as usize, name.len() - 1, 0, 0];
        let named = call(libc::SYS_readlinkat, read).and_then(|length| {
            name.truncate(length + 1);
            (identity(&name)? == identity(link.as_bytes())?).then_some(name)
        });
        let lasting = named.map(|path| Self { path, kept: None }).or_else(|| {
            let kept = own::duplicate(fd as i32, Own::Memory).ok()?;
            // Dropping it closes the descriptor if the program is not executed after all.
            let path = format!("/proc/self/fd/{kept}\0").into_bytes();
            let lasting = Self { path, kept: Some(kept) };
            let inherited = [kept as usize, libc::F_SETFD as usize, 0, 0, 0, 0];
            call(libc::SYS_fcntl, inherited).map(|_| lasting)
        });
        call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
        lasting
    }
}

impl Drop for Lasting {
    fn drop(&mut self) {
        if let Some(fd) = self.kept {
            own::close(fd);
        }
    }
}
