//! Says why a process ends that touched a mapped file where the file has no bytes any more.
//!
//! Nothing keeps another process from shortening a file that is mapped, and a disk may fail. The kernel then
//! ends the process by `SIGBUS`, which names no file. The handler here writes the text that belongs to the
//! address, and lets the signal do what it did before.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

/// A mapping with a text. It is never freed: a handler may be reading it at any moment.
struct Mapping {
    /// Address; 0 once it is not mapped any more.
    start: AtomicUsize,
    length: usize,
    text: Box<str>,
    next: OnceLock<&'static Self>,
}

static FIRST: OnceLock<&'static Mapping> = OnceLock::new();
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static INSTALLED: Once = Once::new();

/// As long as it lives, touching what is missing in a mapping is explained.
#[derive(Debug)]
pub(super) struct Explained(&'static AtomicUsize);

impl Explained {
    /// Writes `text` to standard error when the kernel refuses a touch of these bytes.
    pub(super) fn new(start: usize, length: usize, text: &str) -> Self {
        INSTALLED.call_once(install);
        let start = AtomicUsize::new(start);
        let mapping = Mapping { start, length, text: text.into(), next: OnceLock::new() };
        let mapping: &'static Mapping = Box::leak(Box::new(mapping));
        let mut place = &FIRST;
        while place.set(mapping).is_err() {
            // Taken by another one, and never empty again.
            if let Some(other) = place.get() {
                place = &other.next;
            }
        }
        Self(&mapping.start)
    }
}

impl Drop for Explained {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// The text of the mapping with this address.
fn text(address: usize) -> Option<&'static str> {
    let mut place = &FIRST;
    while let Some(mapping) = place.get() {
        let start = mapping.start.load(Ordering::Relaxed);
        if start != 0 && (start..start + mapping.length).contains(&address) {
            return Some(&mapping.text);
        }
        place = &mapping.next;
    }
    None
}

fn install() {
    // SAFETY: a structure of numbers and an optional function, for which zero is a value.
    let (mut before, mut ours): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
    // SAFETY: asks only; `before` is there to be filled.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) } != 0 {
        return;
    }
    BEFORE.get_or_init(|| before);
    ours.sa_sigaction = handler as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler takes what SA_SIGINFO promises, and calls only what a handler may call:
    // it loads atomics, and makes system calls.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) };
}

extern "C" fn handler(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel gives a whole structure, which stays until this returns.
    let info = unsafe { &*info };
    let sent = info.si_code <= 0;
    if !sent {
        // SAFETY: the address is there when the kernel raised the signal itself.
        let address = unsafe { info.si_addr() }.addr();
        if let Some(text) = text(address) {
            let _ = rustix::io::write(rustix::stdio::stderr(), text.as_bytes());
        }
    }
    if let Some(before) = BEFORE.get() {
        // SAFETY: what the system said itself. The touch is repeated when this returns.
        unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
    }
    if sent {
        // SAFETY: nothing repeats a signal that another process sent; it comes when this returns.
        unsafe { libc::raise(signal) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mapping_has_its_text_while_it_is_there() {
        let [low, high] = [1 << 46, 1 << 45];
        let first = Explained::new(low, 4096, "the first");
        let second = Explained::new(high, 8192, "the second");
        assert_eq!(text(low - 1), None);
        assert_eq!(text(low), Some("the first"));
        assert_eq!(text(low + 4096), None);
        assert_eq!(text(high + 8191), Some("the second"));
        drop(first);
        assert_eq!(text(low), None);
        assert_eq!(text(high), Some("the second"));
        drop(second);
        let _again = Explained::new(low, 4096, "the third");
        assert_eq!(text(low), Some("the third"));
    }
}
