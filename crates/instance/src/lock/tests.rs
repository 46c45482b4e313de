use super::{Holder, Lock, Locked, PASSED_ON, has_ended};
use crate::{Config, Entry, State};
use std::os::unix::ffi::OsStrExt;
use std::process::{Child, Command};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

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
    entry.put_offset(10);
    work(&state, entry);
}

fn begin<'a>(entry: &'a Entry, holder: Holder, bytes: usize) -> Locked<'a> {
    let locked = entry.lock(holder);
    assert!(entry.begin(&locked, entry.offset(), bytes));
    locked
}

fn this() -> Holder {
    Holder::new(std::process::id(), false)
}

/// Others go on behind what it was writing, and it changes nothing when it goes on.
#[test]
fn a_stopped_holder_loses_the_lock_but_not_its_place() {
    let mut child = sleeper();
    stop(&child);
    let stopped = Holder::new(child.id(), false);
    with_entry(|_, entry| {
        let late = begin(entry, stopped, 5);
        let ours = begin(entry, this(), 100);
        assert_eq!(entry.offset(), 15);
        // It goes on, and could write all, or not.
        assert!(!entry.begin(&late, 10, 5) && !entry.set_offset(&late, 15, 16));
        entry.end(&late, 10, 5, 15);
        entry.end(&late, 10, 5, 11);
        drop(late);
        assert_eq!(entry.offset(), 15);
        assert!(ours.is_held() && entry.try_lock(stopped).is_none());
        // Its own place is still known.
        std::mem::forget(ours);
        entry.leave_to_new_program(this());
        assert_eq!(entry.offset(), 115);
        assert!(!entry.is_locked());
        // It was stopped at the end of a write, before others went back and write the same bytes.
        let late = begin(entry, stopped, 5);
        let ours = entry.lock(this());
        assert!(entry.set_offset(&ours, 120, 115) && entry.begin(&ours, 115, 5));
        entry.end(&late, 115, 5, 117);
        std::mem::forget(ours);
        entry.leave_to_new_program(this());
        assert_eq!(entry.offset(), 120, "still announced");
        // It was stopped while it read.
        entry.put_offset(115);
        let late = entry.lock(stopped);
        let ours = entry.lock(this());
        assert!(entry.set_offset(&ours, 115, 120) && !entry.set_offset(&late, 115, 116));
        assert_eq!(entry.offset(), 120);
    });
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn what_a_killed_holder_wrote_is_not_overwritten() {
    let mut child = sleeper();
    let killed = Holder::new(child.id(), false);
    child.kill().unwrap();
    child.wait().unwrap();
    with_entry(|_, entry| {
        std::mem::forget(begin(entry, killed, 5));
        drop(entry.lock(this()));
        assert_eq!(entry.offset(), 15);
        // It has begun nothing.
        std::mem::forget(entry.lock(killed));
        drop(entry.lock(this()));
        assert_eq!(entry.offset(), 15);
        // After it had moved the offset itself.
        let done = begin(entry, killed, 5);
        entry.end(&done, 15, 5, 20);
        assert!(!entry.begin(&done, 15, 5), "it was moved in one step");
        std::mem::forget(done);
        drop(entry.lock(this()));
        assert_eq!(entry.offset(), 20);
    });
}

#[test]
fn who_has_waited_for_long_goes_before_who_comes_again() {
    let lock = Lock::default();
    let (end, ending) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let held = lock.lock(this());
        let waited = &lock;
        let waiter = scope.spawn(move || {
            let locked = waited.lock(this());
            // Keeps the lock until the other one has tried.
            let _ = ending.recv();
            drop(locked);
        });
        while lock.awaited.load(Ordering::Relaxed) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(held);
        let again = lock.take_over(0, this().word()).is_ok();
        drop(end);
        waiter.join().unwrap();
        assert!(!again, "who had the lock before has it again");
    });
}

/// Those who had waited for long were killed, or gave up.
#[test]
fn a_lock_that_nobody_waits_for_any_more_is_free() {
    let lock = Lock::default();
    for take in [
        |lock: &Lock| lock.try_lock(this()).is_some(),
        |lock: &Lock| {
            drop(lock.lock(this()));
            true
        },
    ] {
        let held = lock.lock(this());
        lock.awaited.store(1, Ordering::Relaxed);
        drop(held);
        assert_eq!(lock.word.load(Ordering::Relaxed), PASSED_ON);
        assert!(!lock.is_locked() && take(&lock));
        assert_eq!(lock.word.load(Ordering::Relaxed), 0);
    }
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
        assert_eq!(entry.offset(), 15);
        // In another namespace, there may be others with this number.
        let elsewhere = Holder::new(std::process::id(), true);
        let _held = entry.lock(elsewhere);
        state.leave_to_new_program(elsewhere);
        assert!(entry.is_locked());
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
