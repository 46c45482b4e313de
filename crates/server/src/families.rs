//! Families of sessions: the processes of one `towline run`, which share their open files.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use towline_session::Session;
use towline_session::files::{Files, SharedFiles, later_epoch};
use towline_wire::Errno;

/// Set in the number that owns a family's locks, which is the family's own, to tell it from sessions, whose
/// numbers are small.
const FAMILY_BIT: u64 = 1 << 63;

/// The open files of each family that has a session.
pub(crate) struct Families {
    state: Mutex<State>,
}

struct State {
    families: HashMap<u64, Family>,
    /// The epoch of the next table of open files, beyond the handles of all that have ended: their sessions may
    /// come back and know these handles.
    epoch: u32,
}

/// The open files and the sessions of a family.
struct Family {
    files: SharedFiles,
    members: Vec<Member>,
}

struct Member {
    session: u64,
    secret: u64,
    /// Zero: none, or it is named later.
    process: u64,
    reports_ends: bool,
}

impl Families {
    /// `epoch`: of the server.
    pub(crate) fn new(epoch: u32) -> Self {
        Self { state: Mutex::new(State { families: HashMap::new(), epoch }) }
    }

    /// Returns the epoch for a new table of open files.
    pub(crate) fn epoch(&self) -> u32 {
        self.state.lock().epoch
    }

    /// Notes that this table of open files has ended, although requests that use it may still be under way: the handles
    /// in later ones differ from all that it has given out.
    pub(crate) fn end(&self, files: &Files) {
        let epoch = &mut self.state.lock().epoch;
        *epoch = later_epoch(files.next_epoch(), *epoch);
    }

    /// Adds a session to a family and returns the family's files.
    pub(crate) fn join(&self, number: u64, session: &Session) -> SharedFiles {
        let State { families, epoch } = &mut *self.state.lock();
        let new = || {
            let mut files = Files::new(session.id, *epoch);
            files.owner = number | FAMILY_BIT;
            Family { files: Arc::new(Mutex::new(files)), members: Vec::new() }
        };
        let family = families.entry(number).or_insert_with(new);
        let Session { id, secret, process, reports_ends, .. } = *session;
        family.members.push(Member { session: id, secret, process, reports_ends });
        family.files.clone()
    }

    /// Notes which process has got a session, known by number and secret, of the family that has these files.
    pub(crate) fn hand_over(
        &self,
        files: &SharedFiles,
        session: (u64, u64),
        process: u64,
    ) -> Result<(), Errno> {
        if process == 0 {
            return Err(Errno::EINVAL);
        }
        let families = &mut self.state.lock().families;
        let family = families.values_mut().find(|family| Arc::ptr_eq(&family.files, files));
        let is_it = |member: &&mut Member| (member.session, member.secret) == session;
        let members = family.into_iter().flat_map(|family| &mut family.members);
        let member = { members }.find(is_it).ok_or(Errno::ENOENT)?;
        // Sent again after a lost connection, it changes nothing.
        if ![0, process].contains(&member.process) {
            return Err(Errno::EBUSY);
        }
        member.process = process;
        Ok(())
    }

    /// Returns the sessions of a process in the family that has these files.
    pub(crate) fn sessions_of(&self, process: u64, files: &SharedFiles) -> Vec<u64> {
        let state = self.state.lock();
        let family = state.families.values().find(|family| Arc::ptr_eq(&family.files, files));
        let members = family.iter().flat_map(|family| &family.members);
        let is_its = |member: &&Member| member.process == process && process != 0;
        members.filter(is_its).map(|member| member.session).collect()
    }

    /// Removes a session. Returns its open files if no other session shares them any more, and whether one
    /// that is left reports the ends of the family's processes.
    pub(crate) fn leave(&self, session: &Session) -> (Option<SharedFiles>, bool) {
        let files = session.files.clone();
        let State { families, epoch } = &mut *self.state.lock();
        let mut are_reported = false;
        let mut is_left = |family: &mut Family| {
            if !Arc::ptr_eq(&family.files, &files) {
                return false;
            }
            family.members.retain(|member| member.session != session.id);
            are_reported = family.members.iter().any(|member| member.reports_ends);
            family.members.is_empty()
        };
        let has_ended =
            !session.family || families.extract_if(|_, family| is_left(family)).count() > 0;
        if has_ended {
            *epoch = later_epoch(files.lock().next_epoch(), *epoch);
        }
        (has_ended.then_some(files), are_reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_go_with_the_last_member() {
        let families = Families::new(1);
        let joined = |family, id, reports_ends| {
            let mut session = Session::new(id, 0, 1);
            (session.family, session.reports_ends) = (true, reports_ends);
            session.files = families.join(family, &session);
            session
        };
        let (first, second) = (joined(7, 1, false), joined(7, 2, true));
        assert!(Arc::ptr_eq(&first.files, &second.files));
        let other = joined(8, 3, true);
        assert!(!Arc::ptr_eq(&first.files, &other.files));
        let leave = |session: &Session| {
            let (files, are_reported) = families.leave(session);
            (files.map(|files| files.lock().owner), are_reported)
        };
        assert_eq!(leave(&first), (None, true));
        assert_eq!(leave(&second), (Some(7 | FAMILY_BIT), false));
        assert_eq!(leave(&Session::new(5, 0, 1)), (Some(5), false));
        let again = joined(7, 4, false);
        assert_eq!(again.files.lock().owner, second.files.lock().owner);
        assert!(!Arc::ptr_eq(&again.files, &second.files));
        // Its members can tell, and so can the files of a client without a family.
        assert!(again.files.lock().epoch() > second.files.lock().epoch());
        let epoch = families.epoch();
        assert_eq!(leave(&Session::new(6, 0, epoch)), (Some(6), false));
        assert_eq!(families.epoch(), epoch + 1);
    }

    #[test]
    fn a_session_without_a_process_is_handed_to_one() {
        let families = Families::new(1);
        let joined = |family, id, process| {
            let mut session = Session::new(id, id + 100, 1);
            (session.family, session.process) = (true, process);
            session.files = families.join(family, &session);
            session
        };
        let (keeper, ready, other) = (joined(7, 1, 0), joined(7, 2, 0), joined(7, 3, 9));
        let stranger = joined(8, 4, 0);
        let hand_over = |by: &Session, session: &Session, process| {
            families.hand_over(&by.files, (session.id, session.secret), process)
        };
        assert_eq!(hand_over(&keeper, &ready, 0), Err(Errno::EINVAL));
        assert_eq!(hand_over(&stranger, &ready, 5), Err(Errno::ENOENT), "another family's");
        assert_eq!(hand_over(&Session::new(5, 0, 1), &ready, 5), Err(Errno::ENOENT), "no family");
        let guessed = families.hand_over(&keeper.files, (ready.id, ready.secret + 1), 5);
        assert_eq!(guessed, Err(Errno::ENOENT));
        assert!(families.sessions_of(5, &keeper.files).is_empty());
        assert_eq!(hand_over(&keeper, &ready, 5), Ok(()));
        assert_eq!(hand_over(&keeper, &ready, 5), Ok(()), "asked again");
        assert_eq!(hand_over(&keeper, &ready, 6), Err(Errno::EBUSY));
        assert_eq!(hand_over(&keeper, &other, 5), Err(Errno::EBUSY));
        assert_eq!(families.sessions_of(5, &keeper.files), [2]);
        families.leave(&ready);
        assert_eq!(hand_over(&keeper, &ready, 5), Err(Errno::ENOENT));
    }
}
