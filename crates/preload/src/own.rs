//! Descriptors of this process that are the library's own: connections, anchors of files, memory of
//! mappings. The program cannot know of them, so they get numbers that it does not count on, they stay
//! open when it closes "all" others, and give way when it wants one of their numbers.
//!
//! They are not at the end of what the limit allows: each `fork` copies the table of descriptors up to the
//! highest, which took 0.12 ms where the limit was 20,000. Nor are they a range: a program with many files
//! gets the numbers between them. Which they are is noted with the remote ones (`descriptors.rs`).

use crate::descriptors::Own;
use crate::guard::{checked, system_call};
use crate::runs::runs;
use crate::{demand, descriptors, hooks, remote};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// They are no less than the first of these where there is room. Programs count on the numbers below: shells take
/// 10, 63 and 255, scripts write `exec 200>lock`. The others are for lower limits, and for programs that have all
/// the numbers above.
const LEAST: [i32; 5] = [384, 192, 64, 16, 3];

/// A duplicate of a descriptor, not inherited, that the program does not know of.
///
/// # Errors
/// `EMFILE`; `EBADF`.
pub(crate) fn duplicate(fd: i32, what: Own) -> Result<i32, i32> {
    LEAST.into_iter().find_map(|least| above(least, fd, what)).unwrap_or(Err(libc::EMFILE))
}

/// The same for what one can do without: numbers that the program gets next are left to it.
pub(crate) fn duplicate_if_room(fd: i32, what: Own) -> Result<i32, i32> {
    let (_, far) = LEAST.split_last().ok_or(libc::EMFILE)?;
    far.iter().find_map(|least| above(*least, fd, what)).unwrap_or(Err(libc::EMFILE))
}

/// `None` where all numbers from the least one on are taken, or the limit is lower.
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
    // SAFETY: it was just made.
    unsafe { system_call(libc::SYS_close, [own as usize, 0, 0, 0, 0, 0]) };
    None
}

/// Gives a descriptor such a number. Whoever owns it closes it as any other (`files::close` forgets it).
///
/// # Errors
/// As [`duplicate`].
pub(crate) fn hide(fd: OwnedFd, what: Own) -> Result<OwnedFd, i32> {
    let own = duplicate(fd.as_raw_fd(), what)?;
    // SAFETY: it was just made, and is closed by its owner only.
    Ok(unsafe { OwnedFd::from_raw_fd(own) })
}

/// Closes one, which nobody uses any more.
pub(crate) fn close(fd: i32) {
    // Before, as the number may be another's at once.
    descriptors::forget(fd);
    // SAFETY: the descriptor is ours.
    unsafe { system_call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) };
}

/// Keeps a remote file's placeholder open where the descriptor is its last.
pub(crate) struct Held(i32);

/// For what the kernel or libc is about to put in the place of a descriptor: were the placeholder closed
/// before [`descriptors::forget`], the run's keeper would take the file for abandoned, and what is then
/// forgotten might be a file that another process got in its place.
pub(crate) fn hold(fd: i32) -> Option<Held> {
    descriptors::last_of(fd)?;
    duplicate(fd, Own::Connection).ok().map(Held)
}

impl Drop for Held {
    fn drop(&mut self) {
        // Else it gave way to the program.
        if descriptors::own_at(self.0).is_some() {
            close(self.0);
        }
    }
}

/// Closes all: in the child of a fork, where they are the parent's.
pub(crate) fn close_all() {
    close_runs(runs(descriptors::own(0, u32::MAX).map(|(fd, _)| fd)));
}

/// Closes the connections and anchors, of which nothing is used any more.
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

/// What is between them, from `first` to `last`, each with its last.
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

/// True for a number that is ours, or that we take next.
pub(crate) fn may_have(fd: i32) -> bool {
    fd >= LEAST[0] || descriptors::own_at(fd).is_some()
}

/// The program wants a number that may be ours: what has it goes elsewhere. No other thread may be inside.
pub(crate) fn make_way(fd: i32) {
    let Some(what) = descriptors::own_at(fd) else { return };
    // What cannot is lost.
    let _ = match what {
        // They begin anew when they are needed.
        Own::Connection => {
            remote::goodbye();
            remote::let_go();
            close_connections();
            Ok(())
        }
        Own::Memory => demand::move_from(fd).and_then(|()| hooks::maps::move_from(fd)),
    };
}
