//! Replaces the keeper's connections when they are lost, even if nobody asks for anything. With the keeper's
//! session, the run keeps its open files and locks on the server while its programs sleep, also over a restart
//! of the server.

use super::servers::{Mounts, by_server};
use rustix::event::{PollFd, PollFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use towline_client::{Client, Url};
use towline_net::peer_closed;

/// How often to check whether another thread has replaced a lost connection.
const AGAIN: Duration = Duration::from_millis(20);

/// The connections to the servers of a run.
pub(super) struct Connections(Vec<Connection>);

struct Connection {
    client: Client,
    /// The connection or, while a thread replaces a lost one, a pipe that is closed when this is done. `None`
    /// once the connection was given up.
    watched: Option<OwnedFd>,
}

impl Connections {
    /// Watches the connections of these clients, of which some may be the same.
    pub(super) fn of(servers: &[(Client, Url)]) -> Self {
        let client = |mounts: Mounts| servers[mounts[0].0].0.clone();
        let clients = by_server(servers).into_iter().map(client);
        let connection = |client: Client| Connection { watched: client.fd().ok(), client };
        Self(clients.map(connection).collect())
    }

    /// Returns descriptors that hang up when there is something to do.
    pub(super) fn events(&self) -> impl Iterator<Item = PollFd<'_>> {
        let watched = self.0.iter().filter_map(|connection| connection.watched.as_ref());
        watched.map(|fd| PollFd::new(fd, PollFlags::RDHUP))
    }

    /// Starts to replace the connections that are lost. Does not wait. Returns true if some have been replaced.
    pub(super) fn work(&mut self) -> bool {
        let mut is_replaced = false;
        for connection in &mut self.0 {
            if connection.watched.take_if(|fd| peer_closed(fd.as_fd())).is_some() {
                connection.watched = connection.client.fd().ok();
                // The client may have moved to another connection, or a thread may be done.
                if connection.watched.as_ref().is_none_or(|fd| peer_closed(fd.as_fd())) {
                    connection.watched = match connection.client.glance() {
                        Ok(()) => replace(connection.client.clone()),
                        Err(_) => None,
                    };
                } else {
                    is_replaced = true;
                }
            }
        }
        is_replaced
    }
}

/// Replaces a lost connection on a thread of its own; the returned descriptor hangs up when that is done.
/// Returns `None` if no thread can be started.
fn replace(client: Client) -> Option<OwnedFd> {
    let (watched, end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok()?;
    let work = move || {
        let _end: OwnedFd = end;
        while client.restore().is_ok() {
            if client.fd().is_ok_and(|fd| !peer_closed(fd.as_fd())) {
                return;
            }
            // Another thread replaces the connection.
            towline_net::pause(AGAIN);
        }
    };
    let thread = std::thread::Builder::new().name("reconnect".to_owned());
    thread.spawn(work).ok()?;
    Some(watched)
}
