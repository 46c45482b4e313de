//! The library's own descriptors: connections, anchors of files, memory of mappings.
//!
//! The program does not know of them, so they get numbers that it does not count on, stay open when it
//! closes "all" others, and move when it wants one of their numbers. They are not at the end of what the
//! limit allows: each `fork` copies the descriptor table up to the highest, which took 0.12 ms with a limit
//! of 20,000. Nor do they occupy a reserved range: a program with many files gets the numbers between them.
//! `descriptors.rs` tracks them together with the remote ones.

use crate::descriptors::Own;
use crate::guard::{checked, system_call};
use crate::runs::runs;
use crate::{demand, descriptors, hooks, remote};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Their lowest numbers, in order of preference. Programs count on numbers below the first: shells take 10,
/// 63 and 255, scripts write `exec 200>lock`. The others are for lower limits and for programs that use all
/// the numbers above.
const LEAST: [i32; 5] = [384, 192, 64, 16, 3];

/// Duplicates a descriptor under a number that the program does not know of, close-on-exec.
///
/// # Errors
/// `EMFILE`; `EBADF`.
pub(crate) fn duplicate(fd: i32, what: Own) -> Result<i32, i32> {
    LEAST.into_iter().find_map(|least| above(least, fd, what)).unwrap_or(Err(libc::EMFILE))
}

/// Like [`duplicate`], for optional descriptors: does not use the numbers that the program gets next.
pub(crate) fn duplicate_if_room(fd: i32, what: Own) -> Result<i32, i32> {
    let (_, far) = LEAST.split_last().ok_or(libc::EMFILE)?;
    far.iter().find_map(|least| above(*least, fd, what)).unwrap_or(Err(libc::EMFILE))
}

/// Returns `None` if all numbers from `least` on are taken, or the limit is lower.
fn above(least: i32, fd: i32, what: Own) -> Option<Result<i32, i32>> {
    let arguments = [fd as usize, libc::F_DUPFD_CLOEXEC as usize, least as usize, 0, 0, 0];
    // SAFETY: a plain system call.
    let own = match unsafe { checked(libc::SYS_fcntl, arguments) } {
        Ok(own) => own as i32,
        Err(libc::EINVAL | libc::EMFILE) => return None,
        Err(error) => return Some(Err(error)),
    };
    if descriptors::note_own(own, what) {
        return Some(Ok(own));
    }
    // SAFETY: just made.
    unsafe { system_call(libc::SYS_close, [own as usize, 0, 0, 0, 0, 0]) };
    None
}

/// Moves a descriptor to a number of ours. Its owner closes it as any other (`files::close` forgets it).
///
/// # Errors
/// As [`duplicate`].
pub(crate) fn hide(fd: OwnedFd, what: Own) -> Result<OwnedFd, i32> {
    let own = duplicate(fd.as_raw_fd(), what)?;
    // SAFETY: just made, and closed by its owner only.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}

/// Like [`hide`], for descriptors that nothing depends on: where the limit is low, the program gets all numbers.
///
/// # Errors
/// As [`duplicate`].
pub(crate) fn hide_if_ample(fd: OwnedFd, what: Own) -> Result<OwnedFd, i32> {
    let own = above(LEAST[0], fd.as_raw_fd(), what).unwrap_or(Err(libc::EMFILE))?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}

/// Closes one of our descriptors, which is no longer in use.
pub(crate) fn close(fd: i32) {
    // First, as another thread may get the number at once.
    descriptors::forget(fd);
    // SAFETY: the descriptor is ours.
    unsafe { system_call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) };
}

/// Keeps the placeholder of a remote file open while its last descriptor is replaced.
pub(crate) struct Held(i32);

/// Holds the placeholder of `fd` if that is its last descriptor, before the kernel or libc puts something
/// in its place. If the placeholder closed before [`descriptors::forget`], the keeper would take the file
/// for abandoned, and we might then forget a file that another process got in the same entry.
pub(crate) fn hold(fd: i32) -> Option<Held> {
    descriptors::last_of(fd)?;
    duplicate(fd, Own::Connection).ok().map(Held)
}

impl Drop for Held {
    fn drop(&mut self) {
        // Otherwise it gave way to the program.
        if descriptors::own_at(self.0).is_some() {
            close(self.0);
        }
    }
}

/// Closes all of them: the child of a fork does not share its parent's.
pub(crate) fn close_all() {
    close_runs(runs(descriptors::own(0, u32::MAX).map(|(fd, _)| fd)));
}

/// Closes the connections and anchors, which are no longer in use.
pub(crate) fn close_connections() {
    let connections = descriptors::own(0, u32::MAX).filter(|(_, what)| *what == Own::Connection);
    close_runs(runs(connections.map(|(fd, _)| fd)));
}

fn close_runs(all: impl Iterator<Item = Range<u32>>) {
    for run in all {
        for fd in run.clone() {
            descriptors::forget(fd as i32);
        }
        let last = run.end as usize - 1;
        // SAFETY: these descriptors are ours.
        unsafe { system_call(libc::SYS_close_range, [run.start as usize, last, 0, 0, 0, 0]) };
    }
}

/// Yields the ranges between our descriptors, from `first` to `last`, with inclusive ends.
pub(crate) fn around(first: u32, last: u32) -> impl Iterator<Item = (u32, u32)> {
    let mut next = Some(first);
    let mut own = runs(descriptors::own(first, last).map(|(fd, _)| fd));
    std::iter::from_fn(move || {
        loop {
            let from = next?;
            let Some(run) = own.next() else {
                next = None;
                return (from <= last).then_some((from, last));
            };
            next = Some(run.end);
            if from < run.start {
                return Some((from, run.start - 1));
            }
        }
    })
}

/// Returns true for a number that is ours or that we may take next.
pub(crate) fn may_have(fd: i32) -> bool {
    fd >= LEAST[0] || descriptors::own_at(fd).is_some()
}

/// Moves our descriptor away from a number that the program wants. No other thread may be inside.
/// [`remote::take_over_locks`] must follow once the program has it.
pub(crate) fn make_way(fd: i32) {
    let Some(what) = descriptors::own_at(fd) else { return };
    // If that fails, it is lost.
    let _ = match what {
        // They are made anew on demand.
        Own::Connection => {
            if remote::has_locks() {
                // A goodbye would release them.
                remote::leave_locks();
            } else {
                remote::goodbye();
            }
            remote::let_go();
            close_connections();
            Ok(())
        }
        Own::Memory => demand::move_from(fd).and_then(|()| hooks::maps::move_from(fd)),
    };
}
