//! POSIX asynchronous I/O on remote files: done synchronously, when it is requested.
//!
//! libc's `aio_error`, `aio_return` and `aio_suspend` look at fields of the control block. So they need no
//! hooks if an operation is over when its call returns.

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

/// The operation of a block.
#[derive(Clone, Copy)]
enum Work {
    Read,
    Write,
    Sync(c_int),
}

/// Carries out the operation, and stores the result where libc looks for it.
unsafe fn complete(block: &mut Block, work: Work) {
    let before = errno();
    let (fd, buffer, count, offset) = (block.fd, block.buffer, block.count, block.offset);
    // SAFETY: the program passes a valid buffer and its length.
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
    // SAFETY: `notify` made it for this thread alone.
    let (function, value) =
        *unsafe { Box::from_raw(argument.cast::<(extern "C" fn(libc::sigval), libc::sigval)>()) };
    function(value);
    std::ptr::null_mut()
}

/// Notifies the program in the way that it requested.
unsafe fn notify(event: *const sigevent) {
    // SAFETY: the program passes null or an event; the thread gets what it needs by value.
    unsafe {
        let Some(event) = event.cast::<ThreadEvent>().as_ref() else { return };
        match event.notify {
            libc::SIGEV_SIGNAL => {
                // As in libc: sent by this process, with the requested value.
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
    // SAFETY: the program passes null or a control block.
    match unsafe { block.as_mut() } {
        Some(remote) if is_remote(remote) => {
            // SAFETY: the program passes valid arguments.
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
    // SAFETY: the program passes valid arguments.
    unsafe { start(block, Work::Read, |block| real::aio_read(block)) }
}

pub(crate) unsafe fn aio_write(block: *mut Block) -> c_int {
    // SAFETY: the program passes valid arguments.
    unsafe { start(block, Work::Write, |block| real::aio_write(block)) }
}

pub(crate) unsafe fn aio_fsync(how: c_int, block: *mut Block) -> c_int {
    if how != libc::O_SYNC && how != libc::O_DSYNC {
        return finish(Err(libc::EINVAL));
    }
    // SAFETY: the program passes valid arguments.
    unsafe { start(block, Work::Sync(how), |block| real::aio_fsync(how, block)) }
}

pub(crate) unsafe fn aio_cancel(fd: c_int, block: *mut Block) -> c_int {
    const ALL_DONE: c_int = 2;
    if descriptors::find(fd).is_some() {
        return ALL_DONE;
    }
    // SAFETY: the program passes valid arguments.
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
    let is_mode = matches!(mode, libc::LIO_WAIT | libc::LIO_NOWAIT);
    if list.is_null() || length == 0 || !is_mode {
        // SAFETY: the program passes valid arguments.
        return unsafe { real::lio_listio(mode, list, count, event) };
    }
    // SAFETY: the program passes `count` pointers, each of them null or to a control block.
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
            // libc skips null pointers.
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
