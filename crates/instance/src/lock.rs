//! Locks between the processes of a run, by process number. A lock whose holder was killed is taken over.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// A lock in shared memory: the number of the process that holds it, or zero.
#[derive(Default)]
#[repr(transparent)]
pub(crate) struct Lock(AtomicU32);

impl Lock {
    /// Takes the lock unless a live process has it.
    pub(crate) fn try_lock(&self, me: u32) -> Option<Locked<'_>> {
        let Err(holder) = self.take_over(0, me) else { return Some(Locked(self)) };
        (has_ended(holder) && self.take_over(holder, me).is_ok()).then(|| Locked(self))
    }

    fn take_over(&self, from: u32, me: u32) -> Result<u32, u32> {
        self.0.compare_exchange(from, me, Ordering::Acquire, Ordering::Relaxed)
    }

    /// Returns true while a process holds the lock.
    pub(crate) fn is_locked(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }

    /// Takes the lock for process `me`, also from a holder that has died.
    pub(crate) fn lock(&self, me: u32) -> Locked<'_> {
        loop {
            if let Some(locked) = self.lock_soon(me) {
                return locked;
            }
        }
    }

    /// [`Self::lock`] that gives up after some ten milliseconds: the holder may have been stopped.
    pub(crate) fn lock_soon(&self, me: u32) -> Option<Locked<'_>> {
        for tries in 1..=512_u32 {
            let Err(holder) = self.take_over(0, me) else { return Some(Locked(self)) };
            if tries.is_multiple_of(64) && has_ended(holder) && self.take_over(holder, me).is_ok() {
                return Some(Locked(self));
            }
            if tries > 32 {
                let pause = libc::timespec { tv_sec: 0, tv_nsec: 20_000 };
                // SAFETY: the structure outlives the call; nothing is written back.
                unsafe { libc::syscall(libc::SYS_nanosleep, &raw const pause, 0usize) };
            }
            std::hint::spin_loop();
        }
        None
    }
}

/// Guard of a lock.
pub struct Locked<'a>(&'a Lock);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}

/// Returns true if the process is gone or a zombie: its parent may wait for us before it reaps it. `EPERM`
/// means that the process exists and belongs to another user.
pub(crate) fn has_ended(process: u32) -> bool {
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
