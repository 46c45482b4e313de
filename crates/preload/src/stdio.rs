//! libc's streams on remote descriptors.
//!
//! Inside libc, a stream reads, writes, seeks, closes and gets attributes through a function table that all
//! file streams share. Once a process has a remote descriptor, these five entries are replaced by functions
//! that check the descriptor first. So buffering, `ungetc`, wide characters and `fileno` remain libc's. The
//! table is verified before it is changed: all its entries must lie in libc; otherwise streams on remote
//! descriptors fail with `EBADF`.

use crate::descriptors;
use crate::guard::{self, checked, inside};
use crate::hooks::{files, io, status};
use libc::{FILE, c_int, c_void, off64_t, ssize_t, stat64};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use towline_mem::page_bytes;

/// Offset of the table's address in `FILE`: the same in every glibc with 64-bit pointers.
const TABLE_AT: usize = 216;
/// Indices of the five in the table.
const READ: usize = 14;
const WRITE: usize = 15;
const SEEK: usize = 16;
const CLOSE: usize = 17;
const STAT: usize = 18;
const ENTRIES: usize = 21;
/// Offset of the descriptor in `FILE`.
const FILENO_AT: usize = 112;
/// Offset of the pointer to the wide part in `FILE`, and of the pointer to the wide part's own table.
const WIDE_AT: usize = 160;
const WIDE_TABLE_AT: usize = 224;

static DONE: AtomicBool = AtomicBool::new(false);
static LOCK: Mutex<()> = Mutex::new(());
/// libc's own functions.
static LIBC: [AtomicUsize; ENTRIES] = [const { AtomicUsize::new(0) }; ENTRIES];

unsafe extern "C" {
    static stdout: *mut FILE;
}

/// Replaces the functions, once.
pub(crate) fn take_over() {
    if DONE.load(Ordering::Acquire) {
        return;
    }
    let _ = inside(|| {
        let _lock = LOCK.lock().map_err(|_| libc::EIO)?;
        if !DONE.load(Ordering::Acquire) {
            // SAFETY: `exchange` verifies the tables before it writes to them.
            unsafe { exchange() };
            DONE.store(true, Ordering::Release);
        }
        Ok(())
    });
}

/// Returns libc's own functions if they were replaced.
pub(crate) fn exchanged() -> Option<[usize; ENTRIES]> {
    DONE.load(Ordering::Acquire)
        .then(|| std::array::from_fn(|place| LIBC[place].load(Ordering::Acquire)))
}

/// Notes that a process that used this memory replaced them; nothing else of that process stays.
pub(crate) fn stays_exchanged(functions: Option<[usize; ENTRIES]>) {
    if let Some(functions) = functions {
        for (place, function) in LIBC.iter().zip(functions) {
            place.store(function, Ordering::Release);
        }
        DONE.store(true, Ordering::Release);
    }
}

/// Replaces the functions in the table that file streams use. Finds it by a file stream opened for the
/// purpose.
unsafe fn exchange() {
    // SAFETY: libc's own functions and structures; every address is checked before it is used.
    unsafe {
        let stream = crate::table::real::fopen(c"/dev/null".as_ptr(), c"r".as_ptr());
        if stream.is_null() {
            return;
        }
        let narrow = stream.cast::<u8>().add(TABLE_AT).cast::<*mut usize>().read();
        // A wide-character stream has another table with the same functions.
        libc_fwide(stream, 1);
        let wide_part = stream.cast::<u8>().add(WIDE_AT).cast::<*mut u8>().read();
        let wide = if wide_part.is_null() {
            std::ptr::null_mut()
        } else {
            wide_part.add(WIDE_TABLE_AT).cast::<*mut usize>().read()
        };
        libc::fclose(stream);
        let functions = [
            (READ, read as *const () as usize),
            (WRITE, write as *const () as usize),
            (SEEK, seek as *const () as usize),
            (CLOSE, close as *const () as usize),
            (STAT, stat as *const () as usize),
        ];
        if !is_table(narrow) {
            return;
        }
        for (place, _) in functions {
            LIBC[place].store(narrow.add(place).read(), Ordering::Release);
        }
        for table in [narrow, wide] {
            if is_table(table)
                && functions.iter().all(|(place, _)| {
                    table.add(*place).read() == LIBC[*place].load(Ordering::Relaxed)
                })
            {
                replace(table, &functions);
            }
        }
    }
}

unsafe extern "C" {
    #[link_name = "fwide"]
    pub(crate) fn libc_fwide(stream: *mut FILE, mode: c_int) -> c_int;
}

/// Returns true if an address looks like a table of libc's stream functions.
unsafe fn is_table(at: *mut usize) -> bool {
    if at.is_null() || !(at as usize).is_multiple_of(8) {
        return false;
    }
    let Some(libc) = home(stdout_address()) else { return false };
    if home(at as usize) != Some(libc) {
        return false;
    }
    // The first two words are zero, the others functions of the same library.
    // SAFETY: the address lies in libc, whose tables are this long.
    unsafe {
        at.read() == 0
            && at.add(1).read() == 0
            && (2..ENTRIES - 2).all(|place| home(at.add(place).read()) == Some(libc))
    }
}

fn stdout_address() -> usize {
    // SAFETY: libc's own stream.
    unsafe { stdout as usize }
}

/// Returns the load address of the library that contains an address.
fn home(at: usize) -> Option<usize> {
    // SAFETY: all zero is a valid structure, and the call only looks the address up.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        (libc::dladdr(at as *const c_void, &raw mut info) != 0).then_some(info.dli_fbase as usize)
    }
}

unsafe fn replace(table: *mut usize, functions: &[(usize, usize)]) {
    let page = page_bytes();
    let from = table as usize & !(page - 1);
    let to = (table as usize + ENTRIES * 8).next_multiple_of(page);
    let protect = |protection: c_int| {
        let arguments = [from, to - from, protection as usize, 0, 0, 0];
        // SAFETY: pages of libc's constant data, which it made read-only after relocation.
        unsafe { checked(libc::SYS_mprotect, arguments) }
    };
    if protect(libc::PROT_READ | libc::PROT_WRITE).is_err() {
        return;
    }
    for (place, function) in functions {
        // SAFETY: within the table, which is writable now. Single words: other threads see the old or the
        // new one.
        unsafe { AtomicUsize::from_ptr(table.add(*place)) }.store(*function, Ordering::Release);
    }
    let _ = protect(libc::PROT_READ);
}

/// Returns the descriptor of a stream.
unsafe fn descriptor(stream: *mut FILE) -> c_int {
    // SAFETY: a stream of libc.
    unsafe { stream.cast::<u8>().add(FILENO_AT).cast::<c_int>().read() }
}

fn original(place: usize) -> usize {
    LIBC[place].load(Ordering::Acquire)
}

unsafe extern "C" fn read(stream: *mut FILE, to: *mut c_void, count: ssize_t) -> ssize_t {
    // SAFETY: as libc says; the original has the same signature.
    unsafe {
        let fd = descriptor(stream);
        if descriptors::find(fd).is_some() {
            guard::may_be_cancelled();
            return io::read(fd, to, count as usize);
        }
        let own: unsafe extern "C" fn(*mut FILE, *mut c_void, ssize_t) -> ssize_t =
            std::mem::transmute(original(READ));
        own(stream, to, count)
    }
}

unsafe extern "C" fn write(stream: *mut FILE, data: *const c_void, count: ssize_t) -> ssize_t {
    // SAFETY: as libc says; the original has the same signature.
    unsafe {
        let fd = descriptor(stream);
        if descriptors::find(fd).is_none() {
            let own: unsafe extern "C" fn(*mut FILE, *const c_void, ssize_t) -> ssize_t =
                std::mem::transmute(original(WRITE));
            return own(stream, data, count);
        }
        // Like libc's: writes everything, or marks the stream as failed.
        let mut done = 0;
        while done < count {
            guard::may_be_cancelled();
            let put =
                io::write(fd, data.cast::<u8>().add(done as usize).cast(), (count - done) as usize);
            if put < 0 {
                const IN_ERROR: c_int = 0x20;
                let flags = stream.cast::<c_int>();
                flags.write(flags.read() | IN_ERROR);
                break;
            }
            done += put;
        }
        // libc tracks the file's offset if it knows it.
        const OFFSET_AT: usize = 144;
        let offset = stream.cast::<u8>().add(OFFSET_AT).cast::<off64_t>();
        if offset.read() >= 0 {
            offset.write(offset.read() + done as off64_t);
        }
        done
    }
}

unsafe extern "C" fn seek(stream: *mut FILE, offset: off64_t, whence: c_int) -> off64_t {
    // SAFETY: as libc says; the original has the same signature.
    unsafe {
        let fd = descriptor(stream);
        if descriptors::find(fd).is_some() {
            return io::lseek(fd, offset, whence);
        }
        let own: unsafe extern "C" fn(*mut FILE, off64_t, c_int) -> off64_t =
            std::mem::transmute(original(SEEK));
        own(stream, offset, whence)
    }
}

unsafe extern "C" fn close(stream: *mut FILE) -> c_int {
    // SAFETY: as libc says; the original has the same signature.
    unsafe {
        let fd = descriptor(stream);
        if descriptors::find(fd).is_some() {
            return files::close(fd);
        }
        let own: unsafe extern "C" fn(*mut FILE) -> c_int = std::mem::transmute(original(CLOSE));
        own(stream)
    }
}

unsafe extern "C" fn stat(stream: *mut FILE, to: *mut c_void) -> c_int {
    // SAFETY: as libc says; the original has the same signature.
    unsafe {
        let fd = descriptor(stream);
        if descriptors::find(fd).is_some() {
            return status::stat_stream(fd, to.cast::<stat64>());
        }
        let own: unsafe extern "C" fn(*mut FILE, *mut c_void) -> c_int =
            std::mem::transmute(original(STAT));
        own(stream, to)
    }
}
