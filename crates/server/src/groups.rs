//! Groups of the users for whom requests run, from the user database (`getgrouplist(3)`): files, or a directory service
//! that may take its time, or be down. So threads that may block look there, and requests of a user wait until its
//! groups are known.

use crate::caller::{NOBODY, Named};
use crate::complaints;
use crate::core::Core;
use crate::mailbox::Mail;
use crate::offload::Job;
use crate::waiting::Arrived;
use nix::errno::Errno;
use nix::unistd::{Gid, Uid, User, getgrouplist};
use std::ffi::CString;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// The groups of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    pub(crate) primary: u32,
    pub(crate) others: Arc<[u32]>,
}

impl Groups {
    /// Those of whom the database does not have.
    pub(crate) fn none(named: Named) -> Self {
        Self { primary: named.gid.unwrap_or(NOBODY), others: Arc::new([]) }
    }
}

/// Looks up the groups of a user; may take long.
fn look_up(named: Named) -> io::Result<Groups> {
    // What `getpwuid(3)` may say of a user that does not exist.
    let is_missing =
        |error| matches!(error, Errno::ENOENT | Errno::ESRCH | Errno::EBADF | Errno::EPERM);
    let user = match User::from_uid(Uid::from_raw(named.uid)) {
        Ok(user) => user,
        Err(error) if is_missing(error) => None,
        Err(error) => return Err(error.into()),
    };
    let Some(user) = user else { return Ok(Groups::none(named)) };
    let primary = named.gid.unwrap_or(user.gid.as_raw());
    let name = CString::new(user.name)?;
    let all = getgrouplist(&name, Gid::from_raw(primary))?;
    let others = all.into_iter().map(Gid::as_raw).filter(|group| *group != primary).collect();
    Ok(Groups { primary, others })
}

impl Core {
    /// Returns true, and keeps the request, if the groups of its user are not known yet. They are looked up then.
    pub(crate) fn waits_for_groups(&mut self, arrived: &Arrived<'_>) -> bool {
        if !self.shared.identity {
            return false;
        }
        let peer = self.lanes.get(arrived.lane).and_then(|lane| lane.as_ref()?.peer.as_ref());
        let Some(named) = self.callers.named(arrived.header.word_a, arrived.header.word_b, peer)
        else {
            return false;
        };
        let is_known = self.callers.is_known(named);
        if arrived.may_wait && self.callers.is_due(named, arrived.at) {
            let (work, reply_to) =
                (move || Some(Mail::Groups(named, look_up(named))), self.mailbox.clone());
            self.shared.pools.users.run(Job { work: Box::new(work), reply_to, low: false });
        }
        if is_known {
            return false;
        }
        if !arrived.may_wait {
            // Of a process that has ended, or given up: nothing may come before the rest of its end.
            self.callers.learn(named, look_up(named), Instant::now());
            return false;
        }
        self.waiting.keep_for(named, arrived);
        true
    }

    /// Begins the requests of a user whose groups were looked up.
    pub(crate) fn learn_groups(&mut self, named: Named, found: io::Result<Groups>) {
        if let Err(error) = &found {
            complaints::warn(format_args!(
                "cannot look up the groups of user {}: {error}; what only these may do is refused for now",
                named.uid
            ));
        }
        self.callers.learn(named, found, Instant::now());
        for kept in self.waiting.take_kept_for(named) {
            self.begin_kept(kept, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn groups_are_those_that_id_tells() {
        let tells = |what: &str, uid: u32| {
            let told = Command::new("id").args([what, &uid.to_string()]).output().unwrap();
            let groups = String::from_utf8(told.stdout).unwrap();
            groups.split_whitespace().map(|group| group.parse().unwrap()).collect::<Vec<u32>>()
        };
        for uid in [0, 1, 2, NOBODY] {
            let primary = tells("-g", uid);
            if primary.is_empty() {
                println!("SKIPPED: user {uid} does not exist here");
                continue;
            }
            let found = look_up(Named { uid, gid: None }).unwrap();
            assert_eq!([found.primary][..], primary);
            let (mut others, mut all) = (found.others.to_vec(), tells("-G", uid));
            all.retain(|group| *group != found.primary);
            others.sort_unstable();
            all.sort_unstable();
            assert_eq!(others, all);
            let named = look_up(Named { uid, gid: Some(12345) }).unwrap();
            assert_eq!(named.primary, 12345, "the group that was named");
        }
    }

    #[test]
    fn who_is_not_in_the_database_has_no_groups() {
        let stranger = Named { uid: 3_000_000_000, gid: None };
        assert_eq!(look_up(stranger).unwrap(), Groups { primary: NOBODY, others: Arc::new([]) });
        let stranger = Named { gid: Some(7), ..stranger };
        assert_eq!(look_up(stranger).unwrap().primary, 7);
    }
}
