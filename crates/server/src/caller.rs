//! On whose behalf a request runs.

use crate::offload::own_caller;
use std::collections::HashMap;
use std::os::fd::AsFd;
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
    known: HashMap<(u32, u32), Caller>,
}

impl Callers {
    pub(crate) fn new(identity: bool, squash_root: bool) -> Self {
        Self { identity, squash_root, own: own_caller(), known: HashMap::new() }
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

/// Who is at the other end of a local connection, as far as the kernel knows.
pub(crate) fn peer_of(link: &Link) -> Option<(u32, u32)> {
    match link.kind() {
        LinkKind::Unix | LinkKind::Shm => {
            let credentials = rustix::net::sockopt::socket_peercred(link.fd()?.as_fd()).ok()?;
            Some((credentials.uid.as_raw(), credentials.gid.as_raw()))
        }
        _ => None,
    }
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
