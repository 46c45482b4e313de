//! An open file description, shared by all processes that have descriptors of it.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Longest path that an entry remembers.
const PATH_BYTES: usize = 4096;

/// Values of [`Entry::taken`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Taken {
    /// The entry is unused.
    Free = 0,
    /// The entry is an open file.
    Open = 1,
    /// Closed on the server; descriptors of it may still be open.
    Closed = 2,
    /// Its last descriptor is closed. The process that had it closes the file on the server with its next
    /// request, unless the keeper is faster.
    Leaving = 3,
}

/// Number of low bits of [`Entry::taken`]'s word that hold the use; the rest hold the tag of a leaving
/// entry.
const USE_BITS: u32 = 2;

/// An open file description.
#[repr(C, align(64))]
pub struct Entry {
    taken: AtomicU32,
    /// `O_*` flags as opened, with later changes.
    pub flags: AtomicU32,
    /// Number of the mount.
    pub mount: AtomicU32,
    /// Nonzero once another process may hold descriptors of it.
    pub shared: AtomicU32,
    /// Nonzero while requested changes are unanswered. If the requesting process is killed, the server must
    /// still find the file open.
    pub unanswered: AtomicU32,
    /// Nonzero while its process may keep a descriptor of it that the program does not know of.
    pub anchored: AtomicU32,
    /// Handle in the protocol.
    pub handle: AtomicU64,
    /// `Attr::identity` of the file.
    pub inode: AtomicU64,
    /// File offset; use it only under the lock.
    pub offset: AtomicI64,
    /// `st_mode` at open.
    pub mode: AtomicU32,
    lock: AtomicU32,
    length: AtomicU32,
    path: [AtomicU8; PATH_BYTES],
}

impl Entry {
    /// Returns the current use of the entry.
    #[must_use]
    pub fn taken(&self) -> Taken {
        use_of(self.taken.load(Ordering::Acquire))
    }

    /// Changes the use from `from` to `to`; returns false if it was not `from`.
    #[must_use]
    pub fn change(&self, from: Taken, to: Taken) -> bool {
        self.swap(from as u32, to as u32)
    }

    /// Leaves an open file to [`Entry::close_left`] with the same `tag` (of which 30 bits count), or to the
    /// keeper.
    pub fn leave(&self, tag: u32) {
        let _ = self.swap(Taken::Open as u32, leaving(tag));
    }

    /// Returns the tag under which the entry was left; `None` if it is not left.
    #[must_use]
    pub fn leaving(&self) -> Option<u32> {
        let now = self.taken.load(Ordering::Acquire);
        (use_of(now) == Taken::Leaving).then_some(now >> USE_BITS)
    }

    /// Marks the entry closed if it was left under this tag; if true, the caller must close the file on the
    /// server.
    #[must_use]
    pub fn close_left(&self, tag: u32) -> bool {
        self.swap(leaving(tag), Taken::Closed as u32)
    }

    /// Marks the entry closed for the keeper once its last descriptor is closed; if true, the keeper must
    /// close the file on the server.
    #[must_use]
    pub fn close_abandoned(&self) -> bool {
        let now = self.taken.load(Ordering::Acquire);
        matches!(use_of(now), Taken::Open | Taken::Leaving) && self.swap(now, Taken::Closed as u32)
    }

    /// Marks the entry unused.
    pub(crate) fn free(&self) {
        self.taken.store(Taken::Free as u32, Ordering::Release);
    }

    fn swap(&self, from: u32, to: u32) -> bool {
        self.taken.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Stores the path from the root of the export, cut at 4096 bytes.
    pub fn set_path(&self, path: &[u8]) {
        let path = &path[..path.len().min(PATH_BYTES)];
        for (to, from) in self.path.iter().zip(path) {
            to.store(*from, Ordering::Relaxed);
        }
        self.length.store(path.len() as u32, Ordering::Release);
    }

    /// Returns the path from the prefix.
    #[must_use]
    pub fn path(&self) -> Vec<u8> {
        let length = (self.length.load(Ordering::Acquire) as usize).min(PATH_BYTES);
        self.path[..length].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    /// Returns true if the entry's path is `path` or lies below it.
    #[must_use]
    pub fn is_below(&self, path: &[u8]) -> bool {
        let length = self.length.load(Ordering::Acquire) as usize;
        let at = |place: usize| self.path[place].load(Ordering::Relaxed);
        (length == path.len()
            || (length > path.len() && length <= PATH_BYTES && at(path.len()) == b'/'))
            && path.iter().enumerate().all(|(place, byte)| at(place) == *byte)
    }

    /// Returns true if the entry's path is `path`.
    #[must_use]
    pub fn is(&self, path: &[u8]) -> bool {
        self.length.load(Ordering::Acquire) as usize == path.len() && self.is_below(path)
    }

    /// Takes the lock unless a live process has it.
    #[must_use]
    pub fn try_lock(&self, me: u32) -> Option<EntryLock<'_>> {
        let Err(holder) = self.take_over(0, me) else { return Some(EntryLock(self)) };
        (has_ended(holder) && self.take_over(holder, me).is_ok()).then(|| EntryLock(self))
    }

    fn take_over(&self, from: u32, me: u32) -> Result<u32, u32> {
        self.lock.compare_exchange(from, me, Ordering::Acquire, Ordering::Relaxed)
    }

    /// Returns true while a process holds the lock of the offset.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.lock.load(Ordering::Acquire) != 0
    }

    /// Takes the lock of the offset for process `me`, also from a holder that has died.
    pub fn lock(&self, me: u32) -> EntryLock<'_> {
        let mut tries = 0u32;
        loop {
            let Err(holder) = self.take_over(0, me) else { return EntryLock(self) };
            tries += 1;
            if tries.is_multiple_of(64) && has_ended(holder) && self.take_over(holder, me).is_ok() {
                return EntryLock(self);
            }
            if tries > 32 {
                let pause = libc::timespec { tv_sec: 0, tv_nsec: 20_000 };
                // SAFETY: the structure outlives the call; nothing is written back.
                unsafe { libc::syscall(libc::SYS_nanosleep, &raw const pause, 0usize) };
            }
            std::hint::spin_loop();
        }
    }
}

/// Guard of the lock of an offset.
pub struct EntryLock<'a>(&'a Entry);

impl Drop for EntryLock<'_> {
    fn drop(&mut self) {
        self.0.lock.store(0, Ordering::Release);
    }
}

/// Returns true if the process is gone or a zombie: its parent may wait for us before it reaps it. `EPERM`
/// means that the process exists and belongs to another user.
fn has_ended(process: u32) -> bool {
    // SAFETY: signal 0 is not delivered; it only tests for existence.
    let told = unsafe { libc::syscall(libc::SYS_kill, process as usize, 0usize) };
    if told != 0 {
        return io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    }
    // SAFETY: plain system calls; the structures outlive them, and only this function knows the descriptor.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, process as usize, 0usize);
        if fd < 0 {
            return false;
        }
        let mut asked = libc::pollfd { fd: fd as i32, events: libc::POLLIN, revents: 0 };
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let (all, limit) = (&raw mut asked, &raw const now);
        let ended = libc::syscall(libc::SYS_ppoll, all, 1usize, limit, 0usize, 8usize);
        libc::syscall(libc::SYS_close, fd as usize);
        ended == 1
    }
}

fn use_of(word: u32) -> Taken {
    match word & ((1 << USE_BITS) - 1) {
        1 => Taken::Open,
        2 => Taken::Closed,
        3 => Taken::Leaving,
        _ => Taken::Free,
    }
}

fn leaving(tag: u32) -> u32 {
    Taken::Leaving as u32 | tag << USE_BITS
}

#[cfg(test)]
mod tests {
    use super::has_ended;

    #[test]
    fn who_must_not_be_signalled_has_not_ended() {
        let child = std::process::Command::new("true").spawn();
        let number = child.and_then(|mut child| child.wait().map(|_| child.id()));
        assert!(has_ended(number.unwrap()));
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        assert!(!has_ended(child.id()));
        child.kill().unwrap();
        // SAFETY: all zero is a valid value, and it outlives the call, which leaves the child a zombie.
        let waited = unsafe {
            let mut told: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PID, child.id(), &raw mut told, libc::WEXITED | libc::WNOWAIT)
        };
        assert!(waited == 0 && has_ended(child.id()), "nobody has waited for it yet");
        child.wait().unwrap();
        let is_there = || {
            let nobody = 65534usize;
            // SAFETY: the raw call changes this thread's user only. It fails unless run as root, which does
            // no harm.
            unsafe { libc::syscall(libc::SYS_setresuid, nobody, nobody, nobody) };
            !has_ended(1)
        };
        assert!(std::thread::spawn(is_there).join().unwrap());
    }
}
