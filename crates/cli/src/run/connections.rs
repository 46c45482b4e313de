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
/// How often to try a server that stayed away for so long that its connection was given up.
const AWAY: Duration = Duration::from_millis(500);

/// The connections to the servers of a run.
pub(super) struct Connections(Vec<Connection>);

struct Connection {
    client: Client,
    /// The connection or, while a thread replaces a lost one, a pipe that is closed when this is done. `None`
    /// if there can be no thread.
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
                    connection.watched = replace(connection.client.clone());
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
        loop {
            match client.restore() {
                Ok(()) if client.fd().is_ok_and(|fd| !peer_closed(fd.as_fd())) => return,
                // Another thread replaces the connection.
                Ok(()) => towline_net::pause(AGAIN),
                // Whoever uses the server's files is told.
                Err(_) => towline_net::pause(AWAY),
            }
        }
    };
    let thread = std::thread::Builder::new().name("reconnect".to_owned());
    thread.spawn(work).ok()?;
    Some(watched)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::time::Instant;
    use towline_client::Options;
    use towline_net::address::Address;
    use towline_server::{Config, Export, ExportKind, Server};

    fn served(at: &Path) -> Server {
        let config = Config {
            exports: vec![Export::new("mem", ExportKind::Memory(1 << 20))],
            listen: vec![Address::Unix(at.into())],
            ..Config::default()
        };
        Server::start(&config).unwrap()
    }

    #[test]
    fn a_server_that_was_given_up_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let server = served(&socket);
        let url = Url::parse(&format!("towline+unix:///mem?socket={}", socket.display())).unwrap();
        let mut options = Options::default();
        options.reconnect = Duration::from_millis(20);
        let client = Client::connect(&url.transport, options).unwrap();
        let mut connections = Connections::of(&[(client.clone(), url)]);
        let end = Instant::now() + Duration::from_secs(60);
        let mut until = |what: &str, holds: &dyn Fn(bool) -> bool| {
            while !holds(connections.work()) {
                assert!(Instant::now() < end, "{what}");
                towline_net::pause(AGAIN);
            }
        };
        server.stop();
        until("the connection is given up", &|_| client.glance().is_err());
        let _server = served(&socket);
        until("the connection is replaced", &|is_replaced| is_replaced);
        client.glance().unwrap();
    }
}
