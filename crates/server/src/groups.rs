//! Groups of the users for whom requests run, from the user database (`getgrouplist(3)`): files, or a directory service
//! that may take its time, or be down. So threads that may block look there, and requests of a user wait until its
//! groups are known.

use crate::caller::NOBODY;
use crate::complaints;
use crate::core::Core;
use crate::mailbox::Mail;
use crate::offload::Job;
use crate::waiting::Arrived;
use nix::unistd::{Gid, Uid, User, getgrouplist};
use std::ffi::CString;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use towline_wire::Header;

/// The groups of a user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    pub(crate) primary: u32,
    /// Mostly with the primary one.
    pub(crate) all: Arc<[u32]>,
}

impl Groups {
    /// Those of whom the database does not have.
    pub(crate) fn none() -> Self {
        Self { primary: NOBODY, all: Arc::new([]) }
    }
}

/// Looks up the groups of a user; may take long.
fn look_up(uid: u32) -> io::Result<Groups> {
    let Some(user) = User::from_uid(Uid::from_raw(uid))? else { return Ok(Groups::none()) };
    let name = CString::new(user.name)?;
    let all = getgrouplist(&name, user.gid)?;
    Ok(Groups { primary: user.gid.as_raw(), all: all.into_iter().map(Gid::as_raw).collect() })
}

impl Core {
    /// Returns true, and keeps the request, if the groups of its user are not known yet. They are looked up then.
    pub(crate) fn waits_for_groups(&mut self, arrived: &Arrived<'_>) -> bool {
        if !self.shared.identity {
            return false;
        }
        let Header { word_a, word_b, .. } = *arrived.header;
        let peer = self.lanes.get(arrived.lane).and_then(|lane| lane.as_ref()?.peer.as_ref());
        let Some(named) = self.callers.named(word_a, word_b, peer) else { return false };
        let uid = named.uid;
        if arrived.may_wait && self.callers.is_due(uid, arrived.at) {
            let work = Box::new(move || Some(Mail::Groups(uid, look_up(uid))));
            let reply_to = self.mailbox.clone();
            self.shared.pools.users.run(Job { work, reply_to, low: false });
        }
        if self.callers.is_known(uid) {
            return false;
        }
        if arrived.may_wait && self.callers.is_asked(uid) {
            self.waiting.keep_for(uid, arrived);
            return true;
        }
        // It was given up, or its process has ended, or those of too many others are being looked up.
        self.callers.stand_in(named);
        false
    }

    /// Begins the requests of a user whose groups were looked up.
    pub(crate) fn learn_groups(&mut self, uid: u32, found: io::Result<Groups>) {
        if let Err(error) = &found {
            complaints::warn(format_args!(
                "cannot look up the groups of user {uid}: {error}; the user acts with those that were known \
                 before, or none, for now"
            ));
        }
        self.callers.learn(uid, found, Instant::now());
        self.begin_kept_for(uid);
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
            let found = look_up(uid).unwrap();
            assert_eq!([found.primary][..], primary);
            let (mut groups, mut all) = (found.all.to_vec(), tells("-G", uid));
            groups.sort_unstable();
            all.sort_unstable();
            assert_eq!(groups, all);
        }
    }

    #[test]
    fn who_is_not_in_the_database_has_no_groups() {
        assert_eq!(look_up(3_000_000_000).unwrap(), Groups::none());
    }
}
