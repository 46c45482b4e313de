//! POSIX asynchronous I/O on remote files: done at once, when it is asked for.
//!
//! libc's `aio_error`, `aio_return` and `aio_suspend` look at fields of the control block, so that
//! an operation that is over when its call returns needs nothing more.

use super::io;
use crate::descriptors;
use crate::guard::{errno, finish, set_errno};
use crate::table::real;
use libc::{c_int, c_void, sigevent};
use std::sync::atomic::{AtomicI32, Ordering};

/// The control block, as glibc lays it out.
#[repr(C)]
pub(crate) struct Block {
    fd: c_int,
    operation: c_int,
    priority: c_int,
    buffer: *mut c_void,
    count: usize,
    event: sigevent,
    next: *mut Self,
    absolute_priority: c_int,
    policy: c_int,
    error: AtomicI32,
    result: isize,
    offset: i64,
    reserved: [u8; 32],
}

const _: () = assert!(size_of::<Block>() == size_of::<libc::aiocb>());

fn is_remote(block: &Block) -> bool {
    descriptors::find(block.fd).is_some()
}

/// What is to be done with a block.
#[derive(Clone, Copy)]
enum Work {
    Read,
    Write,
    Sync(c_int),
}

/// Does it, and notes how it ended where libc looks.
unsafe fn complete(block: &mut Block, work: Work) {
    let before = errno();
    let (fd, buffer, count, offset) = (block.fd, block.buffer, block.count, block.offset);
    // SAFETY: buffer and length are the program's.
    let result = unsafe {
        match work {
            Work::Read => io::pread(fd, buffer, count, offset),
            Work::Write => io::pwrite(fd, buffer, count, offset),
            Work::Sync(libc::O_DSYNC) => io::fdatasync(fd) as isize,
            Work::Sync(_) => io::fsync(fd) as isize,
        }
    };
    block.result = result;
    block.error.store(if result < 0 { errno() } else { 0 }, Ordering::Release);
    set_errno(before);
}

/// The part of a `sigevent` that `SIGEV_THREAD` uses, as glibc lays it out.
#[repr(C)]
struct ThreadEvent {
    value: libc::sigval,
    signal: c_int,
    notify: c_int,
    function: Option<extern "C" fn(libc::sigval)>,
    attributes: *const libc::pthread_attr_t,
}

extern "C" fn call(argument: *mut c_void) -> *mut c_void {
    // SAFETY: made by `notify` for this thread alone.
    let (function, value) =
        *unsafe { Box::from_raw(argument.cast::<(extern "C" fn(libc::sigval), libc::sigval)>()) };
    function(value);
    std::ptr::null_mut()
}

/// Tells the program in the way it wished for.
unsafe fn notify(event: *const sigevent) {
    // SAFETY: an event of the program; the thread gets what it needs by value.
    unsafe {
        let Some(event) = event.cast::<ThreadEvent>().as_ref() else { return };
        match event.notify {
            libc::SIGEV_SIGNAL => {
                // As libc's: sent by this process, with the value that was asked for.
                libc::sigqueue(libc::getpid(), event.signal, event.value);
            }
            libc::SIGEV_THREAD => {
                let Some(function) = event.function else { return };
                let argument = Box::into_raw(Box::new((function, event.value)));
                let mut thread = 0;
                let made =
                    libc::pthread_create(&raw mut thread, event.attributes, call, argument.cast());
                if made == 0 {
                    libc::pthread_detach(thread);
                } else {
                    drop(Box::from_raw(argument));
                }
            }
            _ => {}
        }
    }
}

unsafe fn start(block: *mut Block, work: Work, local: impl FnOnce(*mut Block) -> c_int) -> c_int {
    // SAFETY: null or a control block, as the program says.
    match unsafe { block.as_mut() } {
        Some(remote) if is_remote(remote) => {
            // SAFETY: as the program says.
            unsafe {
                complete(remote, work);
                notify(&raw const remote.event);
            }
            0
        }
        _ => local(block),
    }
}

pub(crate) unsafe fn aio_read(block: *mut Block) -> c_int {
    // SAFETY: as the program says.
    unsafe { start(block, Work::Read, |block| real::aio_read(block)) }
}

pub(crate) unsafe fn aio_write(block: *mut Block) -> c_int {
    // SAFETY: as the program says.
    unsafe { start(block, Work::Write, |block| real::aio_write(block)) }
}

pub(crate) unsafe fn aio_fsync(how: c_int, block: *mut Block) -> c_int {
    if how != libc::O_SYNC && how != libc::O_DSYNC {
        return finish(Err(libc::EINVAL));
    }
    // SAFETY: as the program says.
    unsafe { start(block, Work::Sync(how), |block| real::aio_fsync(how, block)) }
}

pub(crate) unsafe fn aio_cancel(fd: c_int, block: *mut Block) -> c_int {
    const ALL_DONE: c_int = 2;
    if descriptors::find(fd).is_some() {
        return ALL_DONE;
    }
    // SAFETY: as the program says.
    unsafe { real::aio_cancel(fd, block) }
}

pub(crate) unsafe fn lio_listio(
    mode: c_int,
    list: *const *mut Block,
    count: c_int,
    event: *mut sigevent,
) -> c_int {
    const READ: c_int = 0;
    const WRITE: c_int = 1;
    let length = usize::try_from(count).unwrap_or(0);
    if list.is_null() || length == 0 {
        // SAFETY: as the program says.
        return unsafe { real::lio_listio(mode, list, count, event) };
    }
    // SAFETY: as many as said, each null or a control block, as the program says.
    unsafe {
        let mut local: Vec<*mut Block> = std::slice::from_raw_parts(list, length).to_vec();
        let mut failed = false;
        for place in &mut local {
            let Some(block) = place.as_mut().filter(|block| is_remote(block)) else { continue };
            let work = match block.operation {
                READ => Work::Read,
                WRITE => Work::Write,
                _ => continue,
            };
            complete(block, work);
            notify(&raw const block.event);
            failed |= block.error.load(Ordering::Acquire) != 0;
            // libc skips what is null.
            *place = std::ptr::null_mut();
        }
        if local.iter().all(|block| block.is_null()) {
            if mode != libc::LIO_WAIT {
                notify(event);
            } else if failed {
                return finish(Err(libc::EIO));
            }
            return 0;
        }
        let result = real::lio_listio(mode, local.as_ptr(), count, event);
        if result == 0 && failed && mode == libc::LIO_WAIT {
            finish(Err(libc::EIO))
        } else {
            result
        }
    }
}
