//! A local program that is named by a descriptor: what hosts it finds it only by a name that it has when
//! the descriptors that are to be closed are closed.

use crate::descriptors::Own;
use crate::guard::checked;
use crate::own;

/// Such a name. A file that has none (`memfd_create(2)`, removed ones) keeps a descriptor.
pub(crate) struct Lasting {
    /// It ends with a zero byte.
    pub(crate) path: Vec<u8>,
    kept: Option<i32>,
}

impl Lasting {
    /// Of a program by its path, which ends with a zero byte.
    pub(crate) fn new(program: &[u8]) -> Self {
        let is_open = program.starts_with(b"/proc/") || program.starts_with(b"/dev/fd/");
        is_open
            .then(|| Self::of_open(program))
            .flatten()
            .unwrap_or_else(|| Self { path: program.to_vec(), kept: None })
    }

    fn of_open(program: &[u8]) -> Option<Self> {
        let call = |number, arguments| {
            // SAFETY: paths end with zero bytes, places are as long as said, descriptors are ours.
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
            // Closed when it is not executed after all.
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
