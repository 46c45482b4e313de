//! Which prefixes of a run lead to the same server.

use towline_client::Url;

/// The mounts of a server, by number. The first one names its queue of writes behind.
pub(super) type Mounts = Vec<(usize, Url)>;

/// Returns the mounts of each server. The parameter has what belongs to each mount, with its URL.
pub(super) fn by_server<T>(mounts: &[(T, Url)]) -> Vec<Mounts> {
    let mut servers: Vec<Mounts> = Vec::new();
    for (number, (_, url)) in mounts.iter().enumerate() {
        let is_same = |known: &&mut Mounts| known[0].1.transport == url.transport;
        match servers.iter_mut().find(is_same) {
            Some(known) => known.push((number, url.clone())),
            None => servers.push(vec![(number, url.clone())]),
        }
    }
    servers
}
