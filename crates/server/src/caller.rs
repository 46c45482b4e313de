//! On whose behalf a request runs.

use crate::offload::own_caller;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use towline_net::{Link, LinkKind};
use towline_store::Caller;

/// User and group that squashed requests run as.
const NOBODY: u32 = 65534;

/// Decides who a request runs as.
pub(crate) struct Callers {
    identity: bool,
    squash_root: bool,
    own: Caller,
    known: HashMap<(u32, u32), Caller, RandomState>,
}

impl Callers {
    pub(crate) fn new(identity: bool, squash_root: bool) -> Self {
        Self { identity, squash_root, own: own_caller(), known: HashMap::default() }
    }

    /// The caller for a request that names `uid` and `gid`, on a lane whose peer is `peer`.
    pub(crate) fn find(&mut self, uid: u32, gid: u32, peer: Option<(u32, u32)>) -> Caller {
        if !self.identity {
            return self.own.clone();
        }
        // A local peer that is not root can only be itself.
        let (mut uid, mut gid) = match peer {
            Some((peer_uid, peer_gid)) if peer_uid != 0 => (peer_uid, peer_gid),
            _ => (uid, gid),
        };
        if uid == 0 && self.squash_root {
            (uid, gid) = (NOBODY, NOBODY);
        }
        let new = || Caller { uid, gid, groups: groups_of(uid, gid), enforce: true };
        self.known.entry((uid, gid)).or_insert_with(new).clone()
    }
}

/// Who is at the other end of a local connection, as the kernel knows it: for a Unix socket by its
/// credentials, for TCP over loopback by the owner of the client's socket. `None` for a peer on
/// another machine.
pub(crate) fn peer_of(link: &Link) -> Option<(u32, u32)> {
    let fd = link.fd()?;
    if link.kind() != LinkKind::Tcp {
        let credentials = rustix::net::sockopt::socket_peercred(fd).ok()?;
        return Some((credentials.uid.as_raw(), credentials.gid.as_raw()));
    }
    let near = SocketAddr::try_from(rustix::net::getsockname(fd).ok()?).ok()?;
    let far = SocketAddr::try_from(rustix::net::getpeername(fd).ok()??).ok()?;
    if !far.ip().is_loopback() {
        return None;
    }
    // A loopback peer whose owner cannot be found is trusted with nothing.
    let table = if far.is_ipv4() { "/proc/net/tcp" } else { "/proc/net/tcp6" };
    let sockets = std::fs::read_to_string(table).unwrap_or_default();
    let owner = owner_of(&sockets, far.port(), near.port());
    Some(owner.map_or((NOBODY, NOBODY), |uid| (uid, group_of(uid))))
}

/// The owner of the socket with these ports in a table of `proc_net_tcp(5)`. Loopback addresses
/// are not compared: both ends are on this machine, so the pair of ports is enough.
fn owner_of(sockets: &str, local: u16, remote: u16) -> Option<u32> {
    let port = |address: &str| u16::from_str_radix(address.rsplit(':').next()?, 16).ok();
    sockets.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let same = port(fields.get(1)?)? == local && port(fields.get(2)?)? == remote;
        if same { fields.get(7)?.parse().ok() } else { None }
    })
}

/// Primary group of a user, from the user database of this machine.
fn group_of(uid: u32) -> u32 {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let group = users.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        (fields.get(2)?.parse() == Ok(uid)).then(|| fields.get(3)?.parse().ok()).flatten()
    });
    group.unwrap_or(NOBODY)
}

/// Further groups of a user, from the group database of this machine.
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
    use super::owner_of;

    #[test]
    fn the_owner_of_a_socket_is_found_by_its_ports() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             0: 0100007F:1D10 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 1\n\
             1: 0100007F:C350 0100007F:1D10 01 00000000:00000000 00:00000000 00000000  1000        0 2\n";
        assert_eq!(owner_of(table, 0xc350, 0x1d10), Some(1000));
        assert_eq!(owner_of(table, 0xc351, 0x1d10), None);
    }
}
