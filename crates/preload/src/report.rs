//! Data for `towline run --report`: call counts in the shared state, and notes in files of the run's
//! directory. Without the option, a libc call costs one additional load, and only notices for the user are
//! written.

use crate::guard::{checked, inside, system_call};
use crate::start;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use towline_instance::notes::Note;
use towline_instance::{COUNTED_MAX, NOTICES, PLACEHOLDERS, RECORD};

static ON: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether the current call involved something remote.
    static TOUCHED: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if a report is wanted.
#[inline]
pub(crate) fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Runs a function of the table, and counts it if it involved something remote.
#[inline]
pub(crate) fn counted<T>(function: usize, work: impl FnOnce() -> T) -> T {
    if is_on() { count(function, work) } else { work() }
}

#[cold]
fn count<T>(function: usize, work: impl FnOnce() -> T) -> T {
    let (result, is_remote) = watched(work);
    if let (true, Some(state)) = (is_remote, start::state()) {
        add(state.functions().get(function));
    }
    result
}

/// Runs a call and returns whether it involved something remote.
fn watched<T>(work: impl FnOnce() -> T) -> (T, bool) {
    let outer = TOUCHED.try_with(|touched| touched.replace(false)).unwrap_or(false);
    let result = work();
    (result, TOUCHED.try_with(|touched| touched.replace(outer)).unwrap_or(false))
}

fn add(count: Option<&AtomicU64>) {
    if let Some(count) = count {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Notes that the current call involves something remote.
#[inline]
pub(crate) fn touch() {
    if is_on() {
        let _ = TOUCHED.try_with(|touched| touched.set(true));
    }
}

/// Runs `work`, which answers a trapped system call, and counts it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn counted_trap<T>(number: i64, work: impl FnOnce() -> T) -> T {
    if !is_on() {
        return work();
    }
    let (result, is_remote) = watched(work);
    if let Some(state) = start::state() {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        add(if is_remote { state.trapped().get(number) } else { Some(state.passed()) });
    }
    result
}

/// Starts reporting in this process; the first process of the run also records the names of the counted
/// functions.
pub(crate) fn begin(functions: &[&str]) {
    const _: () = assert!(crate::table::FUNCTIONS.len() <= COUNTED_MAX);
    ON.store(true, Ordering::Relaxed);
    if append(&[RECORD], libc::O_CREAT | libc::O_EXCL, b"").is_ok() {
        let names = functions.iter().map(|name| (*name).to_owned()).collect();
        record(&Note::Functions(names));
    }
    record(&Note::Began { program: program() });
}

/// Returns the program of this process.
pub(crate) fn program() -> Vec<u8> {
    #[cfg(target_arch = "x86_64")]
    if crate::guest::is_here() {
        return crate::guest::name();
    }
    crate::descriptors::link_of(b"/proc/self/exe\0").unwrap_or_default()
}

/// Writes a note for the report.
pub(crate) fn record(note: &Note) {
    if is_on() {
        let _ = append(&[RECORD], 0, &note.to_bytes());
    }
}

/// [`record`] for a note that is costly to make.
pub(crate) fn record_with(note: impl FnOnce() -> Note) {
    if is_on() {
        let _ = inside(|| {
            record(&note());
            Ok(())
        });
    }
}

/// Writes a note that the user is told at once.
pub(crate) fn notice(note: &Note) {
    record(note);
    let _ = append(&[PLACEHOLDERS, NOTICES], libc::O_CREAT, &note.to_bytes());
}

/// Wakes the keeper.
pub(crate) fn wake_keeper() -> Result<(), i32> {
    append(&[PLACEHOLDERS, NOTICES], libc::O_CREAT, b"")
}

/// Appends a line to a file in the run's directory with one `write`.
fn append(below: &[&str], flags: i32, line: &[u8]) -> Result<(), i32> {
    let mut path = start::directory().to_vec();
    for name in below {
        path.push(b'/');
        path.extend_from_slice(name.as_bytes());
    }
    path.push(0);
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CLOEXEC | flags;
    let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags as usize, 0o600, 0, 0];
    // SAFETY: the path ends with a zero byte, the line is as long as said, and the descriptor is closed
    // here.
    unsafe {
        let fd = checked(libc::SYS_openat, arguments)?;
        let arguments = [fd, line.as_ptr() as usize, line.len(), 0, 0, 0];
        let written = checked(libc::SYS_write, arguments);
        system_call(libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
        written.map(drop)
    }
}
