//! Which sessions are of one client. A client without a family that has lost its session comes back with another one,
//! and is known by its first. It names the lost one by its secret, as numbers of sessions are known to all.

use super::Owner;
use std::collections::{HashMap, VecDeque};

/// Most sessions that are known after their end.
const ENDED_MAX: usize = 16 * 1024;

/// The first session of each client.
#[derive(Default)]
pub(super) struct Clients {
    /// By its sessions that have not ended.
    by_session: HashMap<u64, u64>,
    /// By the secrets of these, and of sessions that have ended.
    by_secret: HashMap<u64, u64>,
    /// The secrets of sessions that have ended, oldest first.
    ended: VecDeque<u64>,
}

impl Clients {
    /// Notes that a session begins, with the secret of the one that its client has lost.
    pub(super) fn begin(&mut self, session: u64, secret: u64, lost: Option<u64>) {
        let known = lost.and_then(|lost| self.by_secret.get(&lost).copied());
        let first = known.unwrap_or(session);
        if let Some(lost) = lost.filter(|_| known.is_none()) {
            self.remember(lost, first);
        }
        self.by_session.insert(session, first);
        self.by_secret.insert(secret, first);
    }

    /// Notes that a session ends.
    pub(super) fn end(&mut self, session: u64, secret: u64) {
        let first = self.by_session.remove(&session).unwrap_or(session);
        self.remember(secret, first);
    }

    fn remember(&mut self, secret: u64, first: u64) {
        self.by_secret.insert(secret, first);
        self.ended.push_back(secret);
        if self.ended.len() > ENDED_MAX
            && let Some(oldest) = self.ended.pop_front()
        {
            self.by_secret.remove(&oldest);
        }
    }

    /// Returns this owner as it was called in the first session of its client.
    pub(super) fn at_first(&self, owner: Owner) -> Owner {
        Owner { session: *self.by_session.get(&owner.session).unwrap_or(&owner.session), ..owner }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_one_in_all_its_sessions() {
        let mut clients = Clients::default();
        let first = |clients: &Clients, session| {
            clients.at_first(Owner { session, id: 1, process: true }).session
        };
        // Of before a restart of the server, and lost again before the client could name it.
        clients.begin(7, 70, Some(10));
        clients.begin(8, 80, Some(10));
        clients.end(7, 70);
        clients.begin(9, 90, Some(80));
        clients.begin(11, 110, None);
        assert_eq!([7, 8, 9, 11].map(|session| first(&clients, session)), [7, 7, 7, 11]);
        for session in 100..100 + ENDED_MAX as u64 {
            clients.begin(session, session << 32, None);
            clients.end(session, session << 32);
        }
        clients.begin(12, 120, Some(90));
        clients.begin(13, 130, Some(70));
        assert_eq!([12, 13].map(|session| first(&clients, session)), [7, 13], "13: long ago");
        let (known, ended) = (clients.by_secret.len(), clients.ended.len());
        assert_eq!((known, ended, clients.by_session.len()), (ENDED_MAX + 5, ENDED_MAX, 5));
    }
}
