//! Sessions that are begun for other processes of a family.
//!
//! Connecting takes two round trips. A process that knows that others will need connections makes them before, and
//! hands one to a process that asks: the socket, and what the server has said ([`Connection::to_parts`]).

use crate::core::{Core, begin, client_number};
use crate::handshake::Greeted;
use crate::{Client, Error, Options, Transport};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use towline_net::{Counters, Link, LinkKind};
use towline_wire::{Header, Kind, Welcome};

/// A session without a client, with its connection. Its process is named when it is handed over
/// ([`Client::hand_over`]).
pub struct Connection {
    transport: Transport,
    greeted: Greeted,
}

impl Connection {
    /// Connects by TCP or a Unix socket and begins a session. Of the options, those count that the server is told;
    /// no process may be among them.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn begin(transport: &Transport, options: &Options) -> Result<Self, Error> {
        let greeted = begin(transport, false, client_number(), options)?;
        Ok(Self { transport: transport.clone(), greeted })
    }

    /// Returns what another process needs to go on with the session; `None` without a socket.
    #[must_use]
    pub fn to_parts(&self) -> Option<(Vec<u8>, BorrowedFd<'_>)> {
        let mut bytes = Vec::new();
        self.greeted.welcome.encode(&mut bytes);
        Some((bytes, self.greeted.link.fd()?))
    }

    /// Makes a connection of the parts that another process has made one to this server into. `None` if they are
    /// not valid.
    #[must_use]
    pub fn from_parts(transport: &Transport, bytes: &[u8], socket: OwnedFd) -> Option<Self> {
        let welcome = Welcome::parse(bytes).ok()?;
        let kind = match transport {
            Transport::Tcp(..) | Transport::Nearest(..) => LinkKind::Tcp,
            Transport::Unix(_) | Transport::Shm(_) => LinkKind::Unix,
        };
        let greeted = Greeted { link: Link::Socket(socket, kind), welcome };
        Some(Self { transport: transport.clone(), greeted })
    }

    /// True if the server has closed the connection.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.greeted.link.peer_closed()
    }

    /// Ends the session.
    pub fn close(self) {
        // If this does not reach the server, it ends the session by itself some time later.
        let goodbye = Header::new(Kind::Goodbye, 0, 0).to_bytes();
        let _ = self.greeted.link.send(&[&goodbye], &Counters::default());
    }

    pub(crate) fn session(&self) -> (u64, u64) {
        (self.greeted.welcome.session, self.greeted.welcome.secret)
    }
}

impl Client {
    /// Goes on with a session that was begun for this process. From here on, everything is as if this client had
    /// connected with these options, which must be of the same family.
    ///
    /// # Errors
    /// Those of [`Options::hide`].
    pub fn over(connection: Connection, options: Options) -> io::Result<Self> {
        let Connection { transport, greeted: Greeted { link, welcome } } = connection;
        let link = match link {
            Link::Socket(fd, kind) => Link::Socket((options.hide)(fd)?, kind),
            link => link,
        };
        let greeted = Greeted { link, welcome };
        Ok(Self { core: Core::over(greeted, &transport, false, client_number(), options) })
    }

    /// Tells the server, before whatever this client asks for later, that a process of the family goes on with this
    /// session: when its end is reported ([`Client::end_process`]), its requests come first. Does not wait for the
    /// answer. Returns false if this cannot be sent now; the session must not be handed over then.
    #[must_use]
    pub fn hand_over(&self, connection: &Connection, process: u64) -> bool {
        self.core.hand_over_session(connection.session(), process)
    }
}
