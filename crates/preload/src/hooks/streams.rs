//! Hooks that open stdio streams; what the streams do afterwards goes through `stdio.rs`.

use super::files;
use crate::descriptors;
use crate::guard::{finish, system_call};
use crate::stdio::libc_fwide;
use crate::table::real;
use crate::{own, place};
use libc::{FILE, c_char, c_int, c_void};
use std::ffi::CStr;

/// Returns the flags of `open` for a mode of `fopen`.
unsafe fn flags_of(mode: *const c_char) -> Option<c_int> {
    if mode.is_null() {
        return None;
    }
    // SAFETY: the mode is not null, so the program passes a C string.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    let mode = mode.split(|b| *b == b',').next().unwrap_or_default();
    let both = mode.contains(&b'+');
    let access = |only| if both { libc::O_RDWR } else { only };
    let mut flags = match mode.first()? {
        b'r' => access(libc::O_RDONLY),
        b'w' => access(libc::O_WRONLY) | libc::O_CREAT | libc::O_TRUNC,
        b'a' => access(libc::O_WRONLY) | libc::O_CREAT | libc::O_APPEND,
        _ => return None,
    };
    if mode.contains(&b'e') {
        flags |= libc::O_CLOEXEC;
    }
    if mode.contains(&b'x') {
        flags |= libc::O_EXCL;
    }
    Some(flags)
}

/// Returns true if the path is remote, or the name of a remote descriptor.
unsafe fn is_ours(path: *const c_char) -> bool {
    // SAFETY: the program passes valid arguments.
    unsafe { place::find(libc::AT_FDCWD, path).is_some() || names_ours(path) }
}

/// [`is_ours`], also through links from local folders.
unsafe fn leads_to_ours(path: *const c_char) -> bool {
    // SAFETY: the program passes valid arguments.
    unsafe { super::leads_to_us(libc::AT_FDCWD, path, true) || names_ours(path) }
}

/// Returns true for the name of a remote descriptor.
unsafe fn names_ours(path: *const c_char) -> bool {
    // SAFETY: the program passes valid arguments.
    crate::start::state().is_some() && unsafe { files::named_descriptor(path) }.is_some()
}

pub(crate) unsafe fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: the program passes valid arguments.
    unsafe {
        if !is_ours(path) {
            let errno = crate::guard::errno();
            let stream = real::fopen(path, mode);
            // A symbolic link may lead into an export.
            if !stream.is_null() || crate::guard::errno() != libc::ENOENT {
                return stream;
            }
            let Some(flags) = flags_of(mode) else { return stream };
            if super::led_in(libc::AT_FDCWD, path, true).is_none() {
                return stream;
            }
            crate::guard::set_errno(errno);
            return open_stream(path, mode, flags);
        }
        let Some(flags) = flags_of(mode) else { return finish(Err(libc::EINVAL)) };
        open_stream(path, mode, flags)
    }
}

unsafe fn open_stream(path: *const c_char, mode: *const c_char, flags: c_int) -> *mut FILE {
    const CODE_SET: &[u8] = b",ccs=";
    // SAFETY: the program passes valid arguments.
    unsafe {
        // Only libc's `fopen` looks at the code set.
        let letters = CStr::from_ptr(mode).to_bytes();
        let local = letters
            .windows(CODE_SET.len())
            .any(|part| part == CODE_SET)
            .then(|| on_null(mode, |null, mode| real::fopen(null, mode)));
        if local.is_some_and(|stream| stream.is_null()) {
            return std::ptr::null_mut();
        }
        let fd = files::openat(libc::AT_FDCWD, path, flags, 0o666);
        if fd < 0 {
            let error = crate::guard::errno();
            local.map(|stream| libc::fclose(stream));
            return finish(Err(error));
        }
        if let Some(stream) = local {
            put_on(stream, fd, flags);
            return stream;
        }
        let stream = stream_on(fd, mode, flags, false);
        if stream.is_null() {
            files::close(fd);
        }
        stream
    }
}

/// Opens a stream in this mode on something local with `open`, which gets path and mode.
unsafe fn on_null(
    mode: *const c_char,
    open: impl FnOnce(*const c_char, *const c_char) -> *mut FILE,
) -> *mut FILE {
    // SAFETY: the program passes a C string.
    let letters = unsafe { CStr::from_ptr(mode) }.to_bytes_with_nul().iter();
    let plain: Vec<u8> = letters.copied().filter(|letter| *letter != b'x').collect();
    open(c"/dev/null".as_ptr(), plain.as_ptr().cast())
}

/// Puts the remote file `fd`, opened with `flags`, in the place of what a stream was opened on.
unsafe fn put_on(stream: *mut FILE, fd: c_int, flags: c_int) {
    // SAFETY: the stream is open, and nothing else knows the descriptor `fd`.
    unsafe {
        // libc has decided whether the new descriptor closes on `exec`.
        let new = libc::fileno(stream);
        let call = [new as usize, libc::F_GETFD as usize, 0, 0, 0, 0];
        let closes = system_call(libc::SYS_fcntl, call) == libc::FD_CLOEXEC as isize;
        files::dup3(fd, new, if closes { libc::O_CLOEXEC } else { 0 });
        if flags & (libc::O_APPEND | libc::O_ACCMODE) == libc::O_APPEND | libc::O_WRONLY {
            super::io::lseek(fd, 0, libc::SEEK_END);
        }
        files::close(fd);
    }
}

/// Calls libc's `fdopen`. For a stream that appends, libc checks whether the descriptor has `O_APPEND`; if
/// not, it sets the flag and seeks to the end of the file. So it finds the flag as `appends` says. The
/// placeholder does not keep the flag, as the next file may get the placeholder (`pool.rs`).
unsafe fn stream_on(fd: c_int, mode: *const c_char, flags: c_int, appends: bool) -> *mut FILE {
    let set = |appends: bool| {
        let flags = if appends { libc::O_APPEND as usize } else { 0 };
        // SAFETY: the call takes no addresses.
        unsafe {
            system_call(libc::SYS_fcntl, [fd as usize, libc::F_SETFL as usize, flags, 0, 0, 0])
        };
    };
    let is_for_end = flags & libc::O_APPEND != 0;
    if is_for_end {
        set(appends);
    }
    // SAFETY: the program passes valid arguments.
    let stream = unsafe { real::fdopen(fd, mode) };
    if is_for_end && descriptors::find(fd).is_some() {
        set(false);
    }
    stream
}

pub(crate) unsafe fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    // SAFETY: the program passes valid arguments.
    unsafe {
        // libc asks the kernel for the access mode, and the placeholder allows neither reading nor writing.
        if let (Some(open), Some(flags)) = (descriptors::find(fd), flags_of(mode)) {
            let has = open.entry.flags.load(std::sync::atomic::Ordering::Relaxed) as c_int;
            let (has, wants) = (has & libc::O_ACCMODE, flags & libc::O_ACCMODE);
            if has != libc::O_RDWR && has != wants {
                return finish(Err(libc::EINVAL));
            }
            let flag = (flags & libc::O_APPEND) as u32;
            let before = open.entry.flags.fetch_or(flag, std::sync::atomic::Ordering::Relaxed);
            return stream_on(fd, mode, flags, before & flag != 0);
        }
        real::fdopen(fd, mode)
    }
}

pub(crate) unsafe fn freopen(
    path: *const c_char,
    mode: *const c_char,
    stream: *mut FILE,
) -> *mut FILE {
    // SAFETY: the program passes valid arguments.
    unsafe {
        // Without a path, the same file is opened again in another mode.
        let again = descriptors::find(libc::fileno(stream)).filter(|_| path.is_null());
        let name = again.map(|_| format!("/proc/self/fd/{}\0", libc::fileno(stream)));
        let path = name.as_ref().map_or(path, |name| name.as_ptr().cast());
        let ours = !path.is_null() && leads_to_ours(path);
        if !ours {
            let before = libc::fileno(stream);
            let remote = descriptors::find(before).is_some();
            let _held = own::hold(before);
            let result = real::freopen(path, mode, stream);
            // libc has closed and duplicated descriptors internally, and closes this one even if it fails.
            if remote {
                descriptors::forget(before);
            }
            return result;
        }
        let Some(flags) = flags_of(mode) else { return finish(Err(libc::EINVAL)) };
        // The stream may be on the file that is about to be truncated.
        libc::fflush(stream);
        let fd = files::openat(libc::AT_FDCWD, path, flags, 0o666);
        if fd < 0 {
            libc::fclose(stream);
            return std::ptr::null_mut();
        }
        // The stream is opened on something local, whose place the file then takes.
        let old = libc::fileno(stream);
        let held = own::hold(old);
        let stream = on_null(mode, |null, mode| real::freopen(null, mode, stream));
        descriptors::forget(old);
        drop(held);
        if stream.is_null() {
            files::close(fd);
        } else {
            put_on(stream, fd, flags);
        }
        stream
    }
}

unsafe extern "C" {
    static stderr: *mut FILE;
}

/// libc prints to a duplicate of the descriptor, made internally, as long as nothing has used the stream.
pub(crate) unsafe fn perror(text: *const c_char) {
    let error = crate::guard::errno();
    // SAFETY: libc's own stream; the program passes null or a string, and libc returns one.
    unsafe {
        let fd = libc::fileno(stderr);
        if descriptors::find(fd).is_none() || libc_fwide(stderr, 0) != 0 {
            return real::perror(text);
        }
        let what = if text.is_null() { c"" } else { CStr::from_ptr(text) }.to_bytes();
        let colon: &[u8] = if what.is_empty() { b"" } else { b": " };
        let why = CStr::from_ptr(libc::strerror(error)).to_bytes();
        let parts = [what, colon, why, b"\n"].map(|part| libc::iovec {
            iov_base: part.as_ptr().cast_mut().cast(),
            iov_len: part.len(),
        });
        super::io::writev(fd, parts.as_ptr(), parts.len() as c_int);
    }
}

unsafe extern "C" {
    fn __vasprintf_chk(
        text: *mut *mut c_char,
        checks: c_int,
        format: *const c_char,
        arguments: *mut c_void,
    ) -> c_int;
}

/// Done here because libc's own writes internally (since glibc 2.37). `arguments` is a `va_list`, which both
/// calling conventions pass as an address.
pub(crate) unsafe extern "C" fn vdprintf(
    fd: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    // SAFETY: as below.
    unsafe { vdprintf_checked(fd, 0, format, arguments) }
}

/// `__vdprintf_chk`, which refuses unsafe formats unless `checks` is 0.
pub(crate) unsafe extern "C" fn vdprintf_checked(
    fd: c_int,
    checks: c_int,
    format: *const c_char,
    arguments: *mut c_void,
) -> c_int {
    let mut text = std::ptr::null_mut();
    // SAFETY: the program passes valid arguments.
    let length = unsafe {
        if descriptors::find(fd).is_none() {
            return real::__vdprintf_chk(fd, checks, format, arguments);
        }
        __vasprintf_chk(&raw mut text, checks, format, arguments)
    };
    if length < 0 {
        return length;
    }
    let mut done = 0;
    while done < length as usize {
        // SAFETY: the rest of the text.
        match unsafe { super::io::write(fd, text.add(done).cast(), length as usize - done) } {
            count @ 1.. => done += count as usize,
            _ => break,
        }
    }
    let error = crate::guard::errno();
    // SAFETY: libc has allocated it.
    unsafe { libc::free(text.cast()) };
    crate::guard::set_errno(error);
    if done < length as usize { -1 } else { length }
}

/// Done here because libc's own opens the file internally. The functions that read it take any stream.
pub(crate) unsafe fn setmntent(path: *const c_char, mode: *const c_char) -> *mut FILE {
    // SAFETY: the program passes valid arguments; the text ends with a zero byte.
    unsafe {
        if mode.is_null() || !leads_to_ours(path) {
            return real::setmntent(path, mode);
        }
        let text = [CStr::from_ptr(mode).to_bytes(), b"e\0"].concat();
        fopen(path, text.as_ptr().cast())
    }
}
