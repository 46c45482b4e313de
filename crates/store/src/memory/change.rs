//! Changes attributes.

use super::access::{WRITE, check, check_attr, in_group, keeps_set_id, may_all, owns};
use super::inode::{Inode, SET_GID, without_set_id};
use super::open::MODE_BITS;
use super::store::Tree;
use crate::{Caller, SetAttr, Source};
use towline_wire::{Attr, Errno, Timestamp, event};

/// In a request to change the owner: leaves this ID as it is.
const SAME_ID: u32 = u32::MAX;
const NANOSECONDS_MAX: u32 = 999_999_999;

impl Tree {
    /// Does `chmod`, `chown`, `truncate` and `utimensat` in one. All checks come before any change.
    pub(super) fn set_attr(
        &self,
        caller: &Caller,
        at: Source<'_>,
        follow: bool,
        set: &SetAttr,
    ) -> Result<Attr, Errno> {
        let (inode, by) = self.find_by(caller, at, follow)?;
        if set.size.is_some() {
            let file = self.base(&at)?;
            if at.1.is_empty() && !file.is_path() {
                // Like ftruncate(2), which was permitted when the file was opened.
                if !file.is_writable() {
                    return Err(Errno::EINVAL);
                }
            } else {
                inode.data()?;
                check(caller, &inode, WRITE)?;
            }
        }
        check_set(caller, &inode.attr(), set)?;
        if let Some(size) = set.size {
            drop(inode.truncate(size, keeps_set_id(caller))?);
            self.watches.happened(&inode, by, event::MODIFY);
        }
        if set.uid.is_some() || set.gid.is_some() || set.mode.is_some() || set.times.is_some() {
            apply(caller, &inode, set)?;
            told(set).for_each(|mask| self.watches.happened(&inode, by, mask));
        }
        Ok(inode.attr())
    }
}

/// Checks everything but the size.
fn check_set(caller: &Caller, attr: &Attr, set: &SetAttr) -> Result<(), Errno> {
    if set.mode.is_some() {
        if attr.is_symlink() {
            return Err(Errno::EOPNOTSUPP);
        }
        if !owns(caller, attr) {
            return Err(Errno::EPERM);
        }
    }
    // Clears the set-id bits, even if both IDs stay: a change of the mode.
    let changes_owner = set.uid.is_some() || set.gid.is_some();
    if changes_owner && without_set_id(attr.mode) != attr.mode && !owns(caller, attr) {
        return Err(Errno::EPERM);
    }
    let uid = set.uid.filter(|uid| *uid != SAME_ID);
    if uid.is_some_and(|uid| !may_all(caller) && (caller.uid != attr.uid || uid != attr.uid)) {
        return Err(Errno::EPERM);
    }
    let gid = set.gid.filter(|gid| *gid != SAME_ID);
    let may_give = |gid| caller.uid == attr.uid && (gid == attr.gid || in_group(caller, gid));
    if gid.is_some_and(|gid| !may_all(caller) && !may_give(gid)) {
        return Err(Errno::EPERM);
    }
    set.times.map_or(Ok(()), |times| check_times(caller, attr, times))
}

fn check_times(
    caller: &Caller,
    attr: &Attr,
    (accessed, modified): (Timestamp, Timestamp),
) -> Result<(), Errno> {
    for time in [accessed, modified] {
        let special = is(time, Timestamp::NOW) || is(time, Timestamp::OMIT);
        if time.nanoseconds > NANOSECONDS_MAX && !special {
            return Err(Errno::EINVAL);
        }
    }
    let both = |special| is(accessed, special) && is(modified, special);
    if both(Timestamp::OMIT) || owns(caller, attr) {
        return Ok(());
    }
    // A caller that may write may set the times to now, but to no other time.
    if both(Timestamp::NOW) { check_attr(caller, attr, WRITE) } else { Err(Errno::EPERM) }
}

/// Compares as utimensat(2) does, which looks only at the nanoseconds of the special times.
fn is(time: Timestamp, special: Timestamp) -> bool {
    time.nanoseconds == special.nanoseconds
}

/// Changes everything but the size.
fn apply(caller: &Caller, inode: &Inode, set: &SetAttr) -> Result<(), Errno> {
    let omitted =
        |(accessed, modified)| is(accessed, Timestamp::OMIT) && is(modified, Timestamp::OMIT);
    if set.uid.is_none()
        && set.gid.is_none()
        && set.mode.is_none()
        && set.times.is_some_and(omitted)
    {
        return Ok(());
    }
    inode.try_change(|attr, now| {
        // Once more, in one step with the change: the file may have a new owner.
        check_set(caller, attr, set)?;
        if set.uid.is_some() || set.gid.is_some() {
            attr.uid = set.uid.filter(|uid| *uid != SAME_ID).unwrap_or(attr.uid);
            attr.gid = set.gid.filter(|gid| *gid != SAME_ID).unwrap_or(attr.gid);
            attr.mode = without_set_id(attr.mode);
        }
        if let Some(mode) = set.mode {
            let strange = !may_all(caller) && !in_group(caller, attr.gid);
            let kept = if strange { MODE_BITS & !SET_GID } else { MODE_BITS };
            attr.mode = attr.mode & !MODE_BITS | mode & kept;
        }
        if let Some((accessed, modified)) = set.times {
            set_time(&mut attr.accessed, accessed, now);
            set_time(&mut attr.modified, modified, now);
        }
        Ok(())
    })
}

/// Returns the events of a change, without that of the size: the same as if owner, mode and times
/// were changed one after the other.
fn told(set: &SetAttr) -> impl Iterator<Item = u32> {
    let given = |id: Option<u32>| id.is_some_and(|id| id != SAME_ID);
    let owner = given(set.uid) || given(set.gid);
    let times = set.times.and_then(|(accessed, modified)| {
        match (is(accessed, Timestamp::OMIT), is(modified, Timestamp::OMIT)) {
            (true, true) => None,
            (false, true) => Some(event::ACCESS),
            (true, false) => Some(event::MODIFY),
            (false, false) => Some(event::ATTRIB),
        }
    });
    let told = [owner.then_some(event::ATTRIB), set.mode.map(|_| event::ATTRIB), times];
    told.into_iter().flatten()
}

fn set_time(target: &mut Timestamp, time: Timestamp, now: Timestamp) {
    if is(time, Timestamp::NOW) {
        *target = now;
    } else if !is(time, Timestamp::OMIT) {
        *target = Timestamp::new(time.seconds, time.nanoseconds);
    }
}
