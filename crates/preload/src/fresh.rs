//! Files that this process has just created: changes of their owner, mode and times are sent at once, but
//! their answers are awaited only when the file is closed, so that unpacking an archive costs one round
//! trip for all three.
//!
//! This happens only if success is certain, since the file belongs to the requester. The server makes the
//! changes in the order of the requests and before any later request of this process, even if the process
//! is killed (the keeper then leaves the file open for a while). `close` or `fsync` reports failures, such
//! as those of the server's disk. All answers are awaited before a fork, an exec or the end of the process.

use crate::descriptors::Open;
use crate::known::{lock, lock_surely};
use crate::remote;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use towline_client::{Operation, SetAttr};
use towline_instance::Entry;
use towline_wire::{Attr, Timestamp};

/// Maximum numbers of files tracked as fresh, and of unanswered changes per file.
const FILES_MAX: usize = 16;
const CHANGES_MAX: usize = 8;

static FRESH: Mutex<Vec<Fresh>> = Mutex::new(Vec::new());
/// Number of fresh files, so that most calls, which find none, take no lock.
static COUNT: AtomicU32 = AtomicU32::new(0);

struct Fresh {
    handle: u64,
    entry: &'static Entry,
    uid: u32,
    gid: u32,
    unanswered: Vec<Operation<Attr>>,
    /// The first failure that was not reported yet.
    failed: Option<i32>,
}

impl Fresh {
    /// Waits for the unanswered changes; returns the first failure that was not reported yet.
    fn settled(self) -> Option<i32> {
        let mut failed = self.failed;
        for operation in self.unanswered {
            if let Err(error) = operation.wait() {
                failed.get_or_insert(remote::number(error));
            }
        }
        self.entry.unanswered.store(0, Ordering::Release);
        failed
    }
}

/// Locks the list.
fn list() -> Option<MutexGuard<'static, Vec<Fresh>>> {
    lock_surely(&FRESH)
}

fn count(fresh: &[Fresh]) {
    COUNT.store(fresh.len() as u32, Ordering::Relaxed);
}

/// Notes that this process created a file exclusively.
pub(crate) fn created(open: Open, attr: &Attr) {
    if let Some(mut fresh) = list()
        && fresh.len() < FILES_MAX
    {
        let handle = open.handle;
        let Open { entry, .. } = open;
        let (uid, gid) = (attr.uid, attr.gid);
        fresh.push(Fresh { handle, entry, uid, gid, unanswered: Vec::new(), failed: None });
        count(&fresh);
    }
}

/// Returns false if no file is fresh.
fn is_any() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

/// Finds a file. A rename may move an open file to another mount, but not to another entry.
fn find(fresh: &[Fresh], open: Open) -> Option<usize> {
    let handle = open.handle;
    fresh.iter().position(|one| one.handle == handle && std::ptr::eq(one.entry, open.entry))
}

/// Returns false for a time that the server refuses.
fn is_time(time: Timestamp) -> bool {
    const SPECIAL: [u32; 2] = [Timestamp::NOW.nanoseconds, Timestamp::OMIT.nanoseconds];
    time.nanoseconds < 1_000_000_000 || SPECIAL.contains(&time.nanoseconds)
}

fn is_certain(fresh: &[Fresh], open: Open, set: &SetAttr) -> bool {
    let same = |asked: Option<u32>, is: u32| asked.is_none_or(|asked| asked == is);
    find(fresh, open).is_some_and(|place| {
        let one = &fresh[place];
        set.size.is_none()
            && same(set.uid, one.uid)
            && same(set.gid, one.gid)
            && set.times.is_none_or(|(accessed, modified)| is_time(accessed) && is_time(modified))
            && one.failed.is_none()
            && one.unanswered.len() < CHANGES_MAX
    })
}

/// Sends a change whose success is certain. Returns false if the caller must request it and await the
/// answer.
pub(crate) fn send(open: Open, set: &SetAttr) -> bool {
    if !is_any() || !list().is_some_and(|fresh| is_certain(&fresh, open, set)) {
        return false;
    }
    open.entry.unanswered.store(1, Ordering::Release);
    let Ok(operation) = remote::with(open, |file| file.start_set_attr(set)) else { return false };
    match list() {
        Some(mut fresh) => match find(&fresh, open) {
            Some(place) => fresh[place].unanswered.push(operation),
            // Another thread is closing it.
            None => drop(operation),
        },
        None => drop(operation),
    }
    true
}

/// Takes a file from the list and waits for its answers; `again` keeps it in the list.
fn take(open: Open, again: bool) -> Result<(), i32> {
    if !is_any() {
        return Ok(());
    }
    let taken = list().and_then(|mut fresh| {
        let place = find(&fresh, open)?;
        let Fresh { handle, entry, uid, gid, .. } = fresh[place];
        let rest = Fresh { handle, entry, uid, gid, unanswered: Vec::new(), failed: None };
        let taken = if again {
            std::mem::replace(&mut fresh[place], rest)
        } else {
            fresh.swap_remove(place)
        };
        count(&fresh);
        Some(taken)
    });
    taken.and_then(Fresh::settled).map_or(Ok(()), Err)
}

/// Waits for the answers of a file's changes.
///
/// # Errors
/// The error of the first change that failed, once.
pub(crate) fn settle(open: Open) -> Result<(), i32> {
    take(open, true)
}

/// [`settle`] for a file that is about to be closed.
///
/// # Errors
/// As `settle`.
pub(crate) fn closing(open: Open) -> Result<(), i32> {
    take(open, false)
}

/// Waits for all answers: others are about to use the same files, or this process ends. Later changes of
/// these files are awaited; failures are kept for `close`.
pub(crate) fn settle_all() {
    if !is_any() {
        return;
    }
    let all = list().map(|mut fresh| std::mem::take(&mut *fresh)).unwrap_or_default();
    for one in all {
        let Fresh { handle, entry, uid, gid, .. } = one;
        let failed = one.settled();
        if failed.is_some()
            && let Some(mut fresh) = list()
        {
            fresh.push(Fresh { handle, entry, uid, gid, unanswered: Vec::new(), failed });
        }
    }
    if let Some(fresh) = list() {
        count(&fresh);
    }
}

/// Forgets all in the child of a fork, as the connections are its parent's.
pub(crate) fn disown() {
    if let Some(mut fresh) = lock(&FRESH) {
        // Dropping an operation would use its connection. All were answered before the fork, unless the
        // fork bypassed libc.
        std::mem::forget(std::mem::take(&mut *fresh));
        count(&fresh);
    }
}
