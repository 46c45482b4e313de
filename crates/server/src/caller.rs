//! Decides on whose behalf a request runs.

use crate::offload::own_caller;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use towline_net::address::ends_on_this_host;
use towline_net::{Link, LinkKind, peer_credentials};
use towline_store::Caller;

/// User and group of squashed requests.
const NOBODY: u32 = 65534;
/// Maximum number of callers that are remembered. Looking up their groups takes long, but a client that may
/// name any user must not use up memory.
const KNOWN_MAX: usize = 4096;

/// Finds the user as whom a request runs.
pub(crate) struct Callers {
    identity: bool,
    squash_root: bool,
    own: Arc<Caller>,
    known: HashMap<(u32, u32), Arc<Caller>, RandomState>,
}

impl Callers {
    pub(crate) fn new(identity: bool, squash_root: bool) -> Self {
        Self { identity, squash_root, own: Arc::new(own_caller()), known: HashMap::default() }
    }

    /// Returns the caller for a request that names `uid` and `gid`, on a lane with peer `peer`; always the
    /// same object for the same user, as long as it is remembered.
    pub(crate) fn find(&mut self, uid: u32, gid: u32, peer: Option<(u32, u32)>) -> &Arc<Caller> {
        if !self.identity {
            return &self.own;
        }
        // A local peer that is not root can only be itself.
        let (mut uid, mut gid) = match peer {
            Some((peer_uid, peer_gid)) if peer_uid != 0 => (peer_uid, peer_gid),
            _ => (uid, gid),
        };
        if self.squash_root {
            // As NFS does: whoever may name any group would else have the rights of root's.
            (uid, gid) = match (uid, gid) {
                (0, _) => (NOBODY, NOBODY),
                (_, 0) => (uid, NOBODY),
                named => named,
            };
        }
        if self.known.len() >= KNOWN_MAX && !self.known.contains_key(&(uid, gid)) {
            self.known.clear();
        }
        let new = || Arc::new(Caller { uid, gid, groups: groups_of(uid, gid), enforce: true });
        self.known.entry((uid, gid)).or_insert_with(new)
    }
}

/// Returns user and group at the other end of a local connection, as the kernel knows them: for a Unix socket
/// its credentials, for TCP on this machine the owner of the client's socket. `None`: the peer is on another
/// machine.
pub(crate) fn peer_of(link: &Link) -> Option<(u32, u32)> {
    let fd = link.fd()?;
    if link.kind() != LinkKind::Tcp {
        let found = peer_credentials(fd);
        return Some(found.map_or((NOBODY, NOBODY), |peer| (peer.uid, peer.gid)));
    }
    let (near, far) = ends_on_this_host(link)?;
    // A peer whose owner cannot be found is trusted with nothing. An IPv4 connection is in the other table if
    // the client uses one socket for both address families.
    let owner = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .find_map(|table| owner_of(&std::fs::read_to_string(table).unwrap_or_default(), far, near));
    Some(owner.map_or((NOBODY, NOBODY), |uid| (uid, group_of(uid))))
}

/// Returns the owner of the socket with these ends from a table of `proc_net_tcp(5)`. Both addresses count,
/// since another socket may have the same ports. A closed socket has no owner: the kernel then reports root,
/// and inode 0.
fn owner_of(sockets: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    sockets.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_same = address(fields.get(1)?)? == local && address(fields.get(2)?)? == remote;
        let is_open = fields.get(9)?.parse::<u64>().is_ok_and(|inode| inode != 0);
        if is_same && is_open { fields.get(7)?.parse().ok() } else { None }
    })
}

/// Parses one end of a socket in these tables: words in memory order, then the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.rsplit_once(':')?;
    let word = |at: usize| Some(u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    let ip = if ip.len() == 8 {
        IpAddr::from(word(0)?)
    } else {
        let words = [word(0)?, word(8)?, word(16)?, word(24)?];
        IpAddr::from(<[u8; 16]>::try_from(words.concat()).ok()?)
    };
    Some(SocketAddr::new(ip.to_canonical(), u16::from_str_radix(port, 16).ok()?))
}

/// Returns a user's primary group from this machine's user database.
fn group_of(uid: u32) -> u32 {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let group = users.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        (fields.get(2)?.parse() == Ok(uid)).then(|| fields.get(3)?.parse().ok()).flatten()
    });
    group.unwrap_or(NOBODY)
}

/// Returns a user's supplementary groups from this machine's group database.
fn groups_of(uid: u32, gid: u32) -> Arc<[u32]> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let users = read("/etc/passwd");
    let named = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    });
    let Some(name) = named else { return Arc::new([]) };
    let member = |line: &str| -> Option<u32> {
        let fields: Vec<&str> = line.split(':').collect();
        let group = fields.get(2)?.parse().ok()?;
        (group != gid && fields.get(3)?.split(',').any(|m| m == name)).then_some(group)
    };
    read("/etc/group").lines().filter_map(member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    #[test]
    fn users_that_are_named_once_are_forgotten() {
        let mut callers = Callers::new(true, true);
        for uid in 1..10_000 {
            assert_eq!(callers.find(uid, 7, None).uid, uid);
            assert!(callers.known.len() <= 4096);
        }
    }

    #[test]
    fn neither_root_nor_its_group_is_taken_from_clients() {
        let found = |squash_root, uid, gid, peer| {
            let mut callers = Callers::new(true, squash_root);
            let caller = callers.find(uid, gid, peer);
            (caller.uid, caller.gid)
        };
        assert_eq!(found(true, 0, 7, None), (NOBODY, NOBODY));
        assert_eq!(found(true, 1000, 0, None), (1000, NOBODY));
        assert_eq!(found(true, 1000, 0, Some((0, 0))), (1000, NOBODY));
        assert_eq!(found(true, 1000, 7, None), (1000, 7));
        assert_eq!(found(true, 1000, 7, Some((1001, 0))), (1001, NOBODY), "the peer counts");
        assert_eq!(found(false, 1000, 0, None), (1000, 0));
        assert_eq!(found(false, 0, 0, None), (0, 0));
    }

    #[test]
    #[cfg(target_endian = "little")] // as the table below
    fn the_owner_of_a_socket_is_found_by_both_its_ends() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:1D10 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 1\n\
             1: 0500007F:C350 0100007F:1D10 01 00000000:00000000 00:00000000 00000000  1001        0 3\n\
             2: 0100007F:C350 0100007F:1D10 01 00000000:00000000 00:00000000 00000000  1000        0 2\n\
             3: 0100007F:C351 0100007F:1D10 05 00000000:00000000 00:00000000 00000000     0        0 0\n";
        let server = "127.0.0.1:7440".parse().unwrap();
        let owner = |client: &str| owner_of(table, client.parse().unwrap(), server);
        assert_eq!(owner("127.0.0.1:50000"), Some(1000));
        assert_eq!(owner("127.0.0.5:50000"), Some(1001), "the same ports, another address");
        assert_eq!(owner("127.0.0.1:50001"), None, "closed: root is not its owner");
        assert_eq!(owner("127.0.0.1:50002"), None);
        let six = "00000000000000000000000001000000:1D10";
        assert_eq!(address(six), Some("[::1]:7440".parse().unwrap()));
        let mapped = "0000000000000000FFFF00000100007F:1D10";
        assert_eq!(address(mapped), Some(server));
        assert_eq!(address("0100007F"), None);
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
            let own = rustix::process::geteuid().as_raw();
            assert_eq!(peer_of(&link).map(|(uid, _)| uid), Some(own));
            drop(client);
            // The kernel takes a moment to close the socket.
            for _ in 0..1000 {
                if peer_of(&link) == Some((NOBODY, NOBODY)) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(peer_of(&link), Some((NOBODY, NOBODY)));
        }
    }
}
