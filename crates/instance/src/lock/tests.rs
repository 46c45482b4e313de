use super::{Holder, Locked, has_ended};
use crate::{Config, Entry, State};
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Command};
use std::sync::atomic::Ordering;

fn sleeper() -> Child {
    Command::new("sleep").arg("100").spawn().unwrap()
}

fn stop(child: &Child) {
    // SAFETY: plain system calls; the structure outlives the second one.
    unsafe {
        assert_eq!(libc::kill(child.id() as i32, libc::SIGSTOP), 0);
        let mut told: libc::siginfo_t = std::mem::zeroed();
        assert_eq!(libc::waitid(libc::P_PID, child.id(), &raw mut told, libc::WSTOPPED), 0);
    }
}

/// Calls `work` with an open file whose offset is 10.
fn with_entry(work: impl FnOnce(&State, &Entry)) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().as_os_str().as_bytes();
    let state = State::prepare(directory, &Config::default()).unwrap().map().unwrap();
    let entry = state.entry(state.take().unwrap()).unwrap();
    entry.offset.store(10, Ordering::Relaxed);
    work(&state, entry);
}

fn begin<'a>(entry: &'a Entry, holder: Holder, bytes: i64) -> Locked<'a> {
    let locked = entry.lock(holder);
    assert!(entry.begin(&locked, entry.offset.load(Ordering::Relaxed), bytes));
    locked
}

fn this() -> Holder {
    Holder::new(std::process::id(), false)
}

/// Others go on where it would, and it changes nothing when it goes on.
#[test]
fn a_stopped_holder_loses_the_lock_but_not_its_place() {
    let mut child = sleeper();
    stop(&child);
    let stopped = Holder::new(child.id(), false);
    with_entry(|_, entry| {
        for (bytes, at) in [(5, 15), (-3, 18)] {
            let from = entry.offset.load(Ordering::Relaxed);
            let late = begin(entry, stopped, bytes);
            let ours = begin(entry, this(), 100);
            assert_eq!(entry.offset.load(Ordering::Relaxed), at);
            // It goes on, and meets the end of the file, or not.
            entry.end(&late, from, from + 1);
            entry.end(&late, from, from + bytes.abs());
            drop(late);
            assert_eq!(entry.offset.load(Ordering::Relaxed), at);
            assert!(ours.is_held() && entry.try_lock(stopped).is_none());
            entry.end(&ours, at, at);
            drop(ours);
            assert!(!entry.is_locked());
        }
        // It was stopped before it began.
        let late = entry.lock(stopped);
        let ours = entry.lock(this());
        assert!(!entry.begin(&late, 18, 5), "it has to look at the offset again");
        drop(ours);
    });
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn what_a_killed_holder_wrote_is_not_overwritten_and_what_it_read_is_read_again() {
    let mut child = sleeper();
    let killed = Holder::new(child.id(), false);
    child.kill().unwrap();
    child.wait().unwrap();
    with_entry(|_, entry| {
        for (bytes, at) in [(5, 15), (-3, 15)] {
            std::mem::forget(begin(entry, killed, bytes));
            drop(entry.lock(this()));
            assert_eq!(entry.offset.load(Ordering::Relaxed), at);
        }
        // After it had moved the offset itself.
        let done = begin(entry, killed, 5);
        entry.end(&done, 15, 20);
        assert!(entry.begin(&done, 15, 5));
        std::mem::forget(done);
        drop(entry.lock(this()));
        assert_eq!(entry.offset.load(Ordering::Relaxed), 20);
    });
}

/// The number may be that of a living process here.
#[test]
fn holders_in_other_namespaces_are_not_judged_by_their_numbers() {
    let mut child = sleeper();
    child.kill().unwrap();
    child.wait().unwrap();
    with_entry(|_, entry| {
        for (holder, other) in [(true, false), (false, true), (true, true)] {
            let held = entry.lock(Holder::new(child.id(), holder));
            assert!(entry.try_lock(Holder::new(std::process::id(), other)).is_none());
            drop(held);
        }
    });
}

#[test]
fn a_new_program_does_not_keep_the_locks_of_the_previous_one() {
    with_entry(|state, entry| {
        std::mem::forget(begin(entry, this(), 5));
        state.leave_to_new_program(Holder::new(std::process::id(), true));
        state.leave_to_new_program(Holder::new(1, false));
        assert!(entry.is_locked());
        state.leave_to_new_program(this());
        assert!(!entry.is_locked());
        assert_eq!(entry.offset.load(Ordering::Relaxed), 15);
    });
}

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
