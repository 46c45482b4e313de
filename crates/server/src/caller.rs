//! Decides on whose behalf a request runs.

use crate::groups::Groups;
use crate::offload::own_caller;
use crate::owner::Owners;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_net::address::ends_on_this_host;
use towline_net::{Link, LinkKind, peer_credentials, peer_groups};
use towline_store::Caller;

/// User and group of squashed requests, and of users of whom nothing is known.
pub(crate) const NOBODY: u32 = 65534;
/// Maximum number of users that are remembered: a client that may name any user must not use up memory.
const KNOWN_MAX: usize = 4096;
/// Maximum number of primary groups that are remembered for one.
const CALLERS_MAX: usize = 16;
/// How long groups are used before they are looked up again.
const KNOWN_FOR: Duration = Duration::from_secs(600);
/// How long nobody tries again when groups could not be looked up.
const FAILED_FOR: Duration = Duration::from_secs(10);

/// A user, and the primary group that was named with it; `None`: that of the user database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Named {
    pub(crate) uid: u32,
    pub(crate) gid: Option<u32>,
}

/// Who is at the other end of a connection within this machine, and can be only itself.
#[derive(Clone, Debug)]
pub(crate) enum Peer {
    /// A process, with the groups that it had when it connected.
    Process(Arc<Caller>),
    /// Over TCP the kernel knows only the user.
    User(u32),
}

/// The groups of a user.
struct Known {
    groups: Groups,
    /// When they are to be looked up again.
    until: Instant,
    /// Callers with these groups, each with another primary one.
    callers: Vec<Arc<Caller>>,
}

impl Known {
    fn caller(&mut self, named: Named, squash_root: bool) -> &Arc<Caller> {
        let is_squashed = |gid: u32| squash_root && gid == 0;
        let gid = named.gid.unwrap_or(self.groups.primary);
        let gid = if is_squashed(gid) { NOBODY } else { gid };
        let at = self.callers.iter().position(|caller| caller.gid == gid);
        let at = at.unwrap_or_else(|| {
            if self.callers.len() >= CALLERS_MAX {
                self.callers.clear();
            }
            let others = self.groups.all.iter().copied();
            let groups = others.filter(|other| *other != gid && !is_squashed(*other)).collect();
            self.callers.push(Arc::new(Caller { uid: named.uid, gid, groups, enforce: true }));
            self.callers.len() - 1
        });
        &self.callers[at]
    }
}

/// Finds the user as whom a request runs.
pub(crate) struct Callers {
    identity: bool,
    squash_root: bool,
    /// Owners of clients' sockets, if clients are not believed.
    owners: Option<Owners>,
    own: Arc<Caller>,
    /// For a request that is begun though nothing is known of its user's groups.
    stand_in: Arc<Caller>,
    known: HashMap<u32, Known, RandomState>,
    /// Whose groups are being looked up, and whether they may have changed since that began.
    asked: HashMap<u32, bool, RandomState>,
}

impl Callers {
    pub(crate) fn new(identity: bool, squash_root: bool) -> Self {
        let (own, stand_in) = (Arc::new(own_caller()), Arc::new(nobody()));
        let (known, asked) = (HashMap::default(), HashMap::default());
        let owners = identity.then(Owners::new);
        Self { identity, squash_root, owners, own, stand_in, known, asked }
    }

    /// Returns who is at the other end of a local connection, as the kernel knows it: for a Unix socket its credentials,
    /// for TCP on this machine the owner of the client's socket. `None`: root, a peer on another machine, who may name
    /// anybody, or nobody asks.
    pub(crate) fn peer_of(&self, link: &Link) -> Option<Peer> {
        let owners = self.owners.as_ref()?;
        let fd = link.fd()?;
        if link.kind() == LinkKind::Tcp {
            let owner = match ends_on_this_host(link) {
                Ok(None) => return None,
                Ok(Some((near, far))) => owners.owner(far, near),
                Err(_) => None,
            };
            // A peer whose owner cannot be found is trusted with nothing.
            return match owner {
                Some(0) => None,
                Some(uid) => Some(Peer::User(uid)),
                None => Some(Peer::Process(Arc::new(nobody()))),
            };
        }
        let Ok(peer) = peer_credentials(fd) else {
            return Some(Peer::Process(Arc::new(nobody())));
        };
        if peer.uid == 0 {
            return None;
        }
        let is_taken = |gid: &u32| !(self.squash_root && *gid == 0);
        let gid = Some(peer.gid).filter(is_taken).unwrap_or(NOBODY);
        // Without its groups a process can do less.
        let groups = peer_groups(fd).unwrap_or_default().into_iter().filter(is_taken).collect();
        Some(Peer::Process(Arc::new(Caller { uid: peer.uid, gid, groups, enforce: true })))
    }

    /// Returns whose groups have to be known for a request that names `uid` and `gid`, on a lane with peer `peer`.
    pub(crate) fn named(&self, uid: u32, gid: u32, peer: Option<&Peer>) -> Option<Named> {
        if !self.identity {
            return None;
        }
        let named = match peer {
            Some(Peer::Process(_)) => return None,
            Some(Peer::User(uid)) => Named { uid: *uid, gid: None },
            None => Named { uid, gid: Some(gid) },
        };
        // As NFS does: whoever may name any group would else have the rights of root's.
        Some(match named {
            Named { uid: 0, .. } if self.squash_root => Named { uid: NOBODY, gid: Some(NOBODY) },
            Named { uid, gid: Some(0) } if self.squash_root => Named { uid, gid: Some(NOBODY) },
            named => named,
        })
    }

    /// Returns true if something is known of a user's groups.
    pub(crate) fn is_known(&self, uid: u32) -> bool {
        self.known.contains_key(&uid)
    }

    /// Returns true if a user's groups are being looked up.
    pub(crate) fn is_asked(&self, uid: u32) -> bool {
        self.asked.contains_key(&uid)
    }

    /// Returns true if somebody has to look up a user's groups, which the caller promises to do.
    pub(crate) fn is_due(&mut self, uid: u32, now: Instant) -> bool {
        let is_due = self.known.get(&uid).is_none_or(|known| now >= known.until)
            && !self.is_asked(uid)
            && self.asked.len() < KNOWN_MAX;
        if is_due {
            self.asked.insert(uid, false);
        }
        is_due
    }

    /// Remembers a user's groups. If they could not be looked up, it keeps those that it had.
    pub(crate) fn learn(&mut self, uid: u32, found: io::Result<Groups>, now: Instant) {
        let is_doubted = self.asked.remove(&uid) == Some(true);
        let lasts = match &found {
            Ok(_) if is_doubted => Duration::ZERO,
            Ok(_) => KNOWN_FOR,
            Err(_) => FAILED_FOR,
        };
        let until = now + lasts;
        if let Some(known) = self.known.get_mut(&uid)
            && found.as_ref().map_or(true, |groups| known.groups == *groups)
        {
            known.until = until;
            return;
        }
        self.known.remove(&uid);
        let oldest = self.known.iter().min_by_key(|(_, known)| known.until).map(|(uid, _)| *uid);
        if self.known.len() >= KNOWN_MAX
            && let Some(oldest) = oldest
        {
            self.known.remove(&oldest);
        }
        let groups = found.unwrap_or_else(|_| Groups::none());
        self.known.insert(uid, Known { groups, until, callers: Vec::new() });
    }

    /// Lets the groups of all users be looked up again, when each asks for something.
    pub(crate) fn doubt(&mut self) {
        let now = Instant::now();
        self.known.values_mut().for_each(|known| known.until = now);
        self.asked.values_mut().for_each(|is_doubted| *is_doubted = true);
    }

    /// Lets the next request of a user be begun without its groups, which are not known.
    pub(crate) fn stand_in(&mut self, named: Named) {
        let gid = named.gid.unwrap_or(NOBODY);
        self.stand_in = Arc::new(Caller { uid: named.uid, gid, ..nobody() });
    }

    /// Returns the caller for a request that names `uid` and `gid`, on a lane with peer `peer`; always the
    /// same object for the same user, as long as it is remembered. `Core::waits_for_groups` comes before.
    pub(crate) fn find<'a>(
        &'a mut self,
        uid: u32,
        gid: u32,
        peer: Option<&'a Peer>,
    ) -> &'a Arc<Caller> {
        match (self.named(uid, gid, peer), peer) {
            (Some(named), _) => match self.known.get_mut(&named.uid) {
                Some(known) => known.caller(named, self.squash_root),
                None => &self.stand_in,
            },
            (None, Some(Peer::Process(process))) if self.identity => process,
            (None, _) => &self.own,
        }
    }
}

fn nobody() -> Caller {
    Caller { uid: NOBODY, gid: NOBODY, groups: Arc::new([]), enforce: true }
}

/// Returns the user at the other end of a local connection that is not over TCP.
pub(crate) fn user_of(link: &Link) -> Option<u32> {
    link.fd().map(|fd| peer_credentials(fd).map_or(NOBODY, |peer| peer.uid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    fn groups(primary: u32, all: &[u32]) -> io::Result<Groups> {
        Ok(Groups { primary, all: all.into() })
    }

    #[test]
    fn users_that_are_named_once_are_forgotten() {
        let (mut callers, now) = (Callers::new(true, true), Instant::now());
        for uid in 1..10_000 {
            assert!(callers.is_due(uid, now) && !callers.is_due(uid, now));
            callers.learn(uid, groups(7, &[]), now + Duration::from_secs(uid.into()));
            for gid in 1..40 {
                assert_eq!(callers.find(uid, gid, None).uid, uid);
                assert!(callers.known[&uid].callers.len() <= CALLERS_MAX);
            }
            assert!(callers.known.len() <= KNOWN_MAX && callers.asked.is_empty());
        }
        assert!(callers.is_known(9_000) && !callers.is_known(1), "the last ones stay");
        let asked = (10_000..20_000).filter(|uid| callers.is_due(*uid, now)).count();
        assert_eq!(asked, KNOWN_MAX, "no more are looked up at once");
    }

    #[test]
    fn groups_are_looked_up_again_and_kept_if_that_fails() {
        let (mut callers, now) = (Callers::new(true, true), Instant::now());
        let mut learn = |found, at: Instant| {
            assert!(callers.is_due(1000, at));
            callers.learn(1000, found, at);
            assert!(!callers.is_due(1000, at));
            callers.find(1000, 7, None).clone()
        };
        let failed = || Err(io::Error::from(io::ErrorKind::TimedOut));
        assert!(learn(failed(), now).groups.is_empty());
        let first = learn(groups(7, &[7, 8, 9]), now + FAILED_FOR);
        assert_eq!((first.gid, &first.groups[..]), (7, &[8, 9][..]));
        let again = now + FAILED_FOR + KNOWN_FOR;
        let same = learn(groups(7, &[7, 8, 9]), again);
        assert!(Arc::ptr_eq(&first, &same), "the same object");
        assert!(Arc::ptr_eq(&first, &learn(failed(), again + KNOWN_FOR)));
        let changed = learn(groups(7, &[7, 9]), again + KNOWN_FOR + FAILED_FOR);
        assert_eq!(changed.groups[..], [9]);
        callers.doubt();
        let now = Instant::now();
        assert!(callers.is_due(1000, now));
        assert_eq!(callers.find(1000, 7, None).groups[..], [9], "while they are looked up");
        callers.doubt();
        callers.learn(1000, groups(7, &[8]), now);
        assert!(callers.is_due(1000, now), "what was found may be old");
    }

    #[test]
    fn who_may_not_wait_has_no_groups() {
        let mut callers = Callers::new(true, true);
        callers.stand_in(callers.named(1000, 7, None).unwrap());
        let caller = callers.find(1000, 7, None);
        assert_eq!((caller.uid, caller.gid, &caller.groups[..]), (1000, 7, &[][..]));
        assert!(caller.enforce);
        callers.stand_in(callers.named(0, 0, None).unwrap());
        assert_eq!(**callers.find(0, 0, None), nobody());
    }

    #[test]
    fn neither_root_nor_its_group_is_taken_from_clients() {
        let found = |squash_root, uid, gid, peer: Option<Peer>| {
            let mut callers = Callers::new(true, squash_root);
            let peer = peer.as_ref();
            if let Some(named) = callers.named(uid, gid, peer) {
                assert_eq!(callers.find(uid, gid, peer).uid, NOBODY, "nothing is known of it");
                callers.learn(named.uid, groups(0, &[0, 9]), Instant::now());
            }
            let caller = callers.find(uid, gid, peer);
            assert_eq!(caller.groups.contains(&0), !squash_root && caller.gid != 0);
            (caller.uid, caller.gid)
        };
        assert_eq!(found(true, 0, 7, None), (NOBODY, NOBODY));
        assert_eq!(found(true, 1000, 0, None), (1000, NOBODY));
        assert_eq!(found(true, 1000, 7, None), (1000, 7));
        let user = || Some(Peer::User(1001));
        assert_eq!(found(true, 1000, 7, user()), (1001, NOBODY), "the peer counts");
        let process = Caller { uid: 1001, gid: 7, ..nobody() };
        let process = Some(Peer::Process(Arc::new(process)));
        assert_eq!(found(true, 0, 0, process), (1001, 7), "the peer counts");
        assert_eq!(found(false, 1000, 0, None), (1000, 0));
        assert_eq!(found(false, 1000, 7, user()), (1001, 0));
        assert_eq!(found(false, 0, 0, None), (0, 0));
    }

    #[test]
    fn who_has_closed_its_socket_is_nobody() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else {
                eprintln!("SKIPPED: {host} cannot be had");
                continue;
            };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let accepted = OwnedFd::from(listener.accept().unwrap().0);
            let link = Link::Socket(accepted, LinkKind::Tcp);
            let own = Some(rustix::process::geteuid().as_raw()).filter(|uid| *uid != 0);
            let callers = Callers::new(true, true);
            match callers.peer_of(&link) {
                Some(Peer::User(uid)) => assert_eq!(Some(uid), own),
                other => assert!(other.is_none() && own.is_none(), "{other:?}"),
            }
            drop(client);
            // The kernel takes a moment to close the socket.
            let is_nobody = || match callers.peer_of(&link) {
                Some(Peer::Process(process)) => *process == nobody(),
                _ => false,
            };
            for _ in 0..1000 {
                if is_nobody() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(is_nobody());
        }
    }
}
