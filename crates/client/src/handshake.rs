//! Connects a lane, and joins or begins a session.

use crate::{Error, Options, Priority, Transport};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use towline_mem::SharedMemory;
use towline_net::address::{connect_abstract, connect_tcp, connect_unix};
use towline_net::{
    Counters, Doorbell, Link, SHM_BYTES, ShmLink, ShmSide, Wait, receive_descriptors,
};
use towline_wire::hello::{
    MAGIC, VERSION, authentication, encryption, local_socket_name, resumed, version_of, want,
};
use towline_wire::limits::HEADER_BYTES;
use towline_wire::{Errno, Header, Hello, Kind, ProtocolError, Welcome};

/// Most time for establishing a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// Most time for a server that has answered over TCP to answer on this machine. A server that has
/// no descriptors left does not answer; if its clients waited for it, none of them would ever give
/// back the descriptors they hold.
const NEARER: Duration = Duration::from_secs(1);

/// A lane after its handshake.
pub(crate) struct Greeted {
    pub(crate) link: Link,
    pub(crate) welcome: Welcome,
}

/// Why there is no lane.
pub(crate) enum Failure {
    /// The server may come back: worth another try.
    Io(io::Error),
    /// Another try would fail in the same way.
    Final(Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

fn protocol(what: &'static str) -> Failure {
    Failure::Final(ProtocolError { what, at: 0 }.into())
}

/// True if a session may move to shared memory.
pub(crate) fn may_move(transport: &Transport) -> bool {
    matches!(transport, Transport::Nearest(..) | Transport::Shm(_))
}

/// Connects, says hello for `session` (zero: a new one) and receives the answer. With `near`, uses
/// the nearest link that the transport allows.
pub(crate) fn greet(
    transport: &Transport,
    near: bool,
    client: u64,
    (session, secret): (u64, u64),
    options: &Options,
) -> Result<Greeted, Failure> {
    let (link, wants) = match transport {
        Transport::Tcp(host, port) | Transport::Nearest(host, port) => {
            (connect_tcp(host, *port, CONNECT)?, 0)
        }
        Transport::Shm(path) if near => (connect_unix(path, CONNECT)?, want::SHARED_MEMORY),
        Transport::Unix(path) | Transport::Shm(path) => (connect_unix(path, CONNECT)?, 0),
    };
    let greeted = greet_in_time(link, wants, client, (session, secret), options)?;
    let Welcome { local_socket, session, secret, .. } = greeted.welcome;
    let Transport::Nearest(host, port) = transport else { return Ok(greeted) };
    if !near || local_socket == 0 {
        return Ok(greeted);
    }
    // The server is on this machine, so the session moves there. That the socket's server knows the
    // session proves that it is the same server; in another network namespace there is no socket of
    // this name.
    let Ok(socket) = connect_abstract(&local_socket_name(local_socket), NEARER) else {
        return Ok(greeted);
    };
    let nearer = answer_within(&socket, Some(NEARER)).map_err(Failure::Io).and_then(|()| {
        let nearer = greet_on(socket, want::SHARED_MEMORY, client, session, secret, options)?;
        answer_within(&nearer.link, None)?;
        Ok(nearer)
    });
    match nearer {
        Ok(Greeted { link, welcome }) if welcome.resumed != resumed::NEW => {
            Ok(Greeted { link, welcome: greeted.welcome })
        }
        Ok(_) => Ok(greeted),
        Err(Failure::Io(error))
            if [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut].contains(&error.kind()) =>
        {
            Ok(greeted)
        }
        // The session moved to a connection that this process has no descriptors or memory for, and
        // the old connection was closed: the session has to come back over TCP.
        Err(_) => {
            drop(greeted.link);
            let back = connect_tcp(host, *port, CONNECT)?;
            let back = greet_in_time(back, 0, client, (session, secret), options)?;
            let joined = back.welcome.resumed == resumed::JOINED;
            Ok(Greeted { welcome: if joined { greeted.welcome } else { back.welcome }, ..back })
        }
    }
}

/// Bounds how long a receive on a socket waits; `None` removes the bound.
fn answer_within(link: &Link, time: Option<Duration>) -> io::Result<()> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    link.fd().map_or(Ok(()), |fd| Ok(set_socket_timeout(fd, Timeout::Recv, time)?))
}

/// [`greet_on`] that waits no longer than the options say: the kernel accepts connections even for
/// a server that is stopped, or whose threads all wait for a device.
fn greet_in_time(
    link: Link,
    wants: u32,
    client: u64,
    (session, secret): (u64, u64),
    options: &Options,
) -> Result<Greeted, Failure> {
    answer_within(&link, Some(options.greeting))?;
    let greeted = greet_on(link, wants, client, session, secret, options);
    let greeted = greeted.map_err(|failure| match failure {
        Failure::Io(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let silent = options.greeting;
            let what =
                format!("no answer within {silent:?}; it may be stopped, or no Towline server");
            io::Error::new(io::ErrorKind::TimedOut, what).into()
        }
        other => other,
    })?;
    answer_within(&greeted.link, None)?;
    Ok(greeted)
}

fn greet_on(
    link: Link,
    wants: u32,
    client: u64,
    session: u64,
    secret: u64,
    options: &Options,
) -> Result<Greeted, Failure> {
    let link = match link {
        Link::Socket(fd, kind) => Link::Socket((options.hide)(fd)?, kind),
        link => link,
    };
    let low_priority = if options.priority == Priority::Low { want::LOW_PRIORITY } else { 0 };
    let reports_ends = if options.reports_ends { want::REPORTS_ENDS } else { 0 };
    let hello = Hello {
        magic: MAGIC,
        version: VERSION,
        authentication: authentication::NONE,
        encryption: encryption::NONE,
        want: wants | low_priority | reports_ends,
        client,
        session,
        secret,
        family: options.family,
        process: options.process,
    };
    let mut body = Vec::new();
    hello.encode(&mut body);
    let mut header = Header::new(Kind::Hello, 0, 0);
    header.body_bytes = body.len() as u32;
    let sent = link.send(&[&header.to_bytes(), &body], &Counters::default())?;
    if sent != HEADER_BYTES + body.len() {
        return Err(io::Error::from(io::ErrorKind::WriteZero).into());
    }
    let (welcome, descriptors) = hear(&link)?;
    if welcome.errno != 0 {
        let errno = Errno(welcome.errno);
        let Welcome { authentication, encryption, .. } = welcome;
        return Err(Failure::Final(match errno {
            Errno::EPROTONOSUPPORT => Error::Methods { authentication, encryption },
            errno => Error::Errno(errno),
        }));
    }
    if (welcome.authentication, welcome.encryption) != (hello.authentication, hello.encryption) {
        return Err(protocol(
            "the server chose an authentication or encryption that was not asked for",
        ));
    }
    if welcome.granted & want::SHARED_MEMORY == 0 {
        return Ok(Greeted { link, welcome });
    }
    let Ok([memory, bell]) = <[_; 2]>::try_from(descriptors) else {
        return Err(protocol("the server did not offer shared memory"));
    };
    let (memory, bell) = ((options.hide)(memory)?, (options.hide)(bell)?);
    let memory = Arc::new(SharedMemory::open(memory, SHM_BYTES, true)?);
    let Link::Socket(socket, _) = link else { return Err(protocol("link without socket")) };
    let link = ShmLink::new(memory, ShmSide::Client, Doorbell::new(bell), socket)?;
    Ok(Greeted { link: Link::Shm(Box::new(link)), welcome })
}

fn hear(link: &Link) -> Result<(Welcome, Vec<OwnedFd>), Failure> {
    let fd = link.fd().ok_or_else(|| protocol("link without socket"))?;
    let (mut bytes, mut descriptors) = (Vec::new(), Vec::new());
    loop {
        if let Some(head) = bytes.first_chunk::<HEADER_BYTES>() {
            let header = Header::parse(head).map_err(|e| Failure::Final(e.into()))?;
            if header.kind != Kind::Welcome {
                return Err(protocol("the server did not answer the hello"));
            }
            let end = HEADER_BYTES + header.body_bytes as usize;
            if bytes.len() > end {
                return Err(protocol("bytes after the welcome"));
            }
            if bytes.len() == end {
                let body = &bytes[HEADER_BYTES..end];
                return match version_of(body) {
                    None => Err(protocol("peer speaks another protocol")),
                    Some(VERSION) => Welcome::parse(body)
                        .map(|welcome| (welcome, descriptors))
                        .map_err(|error| Failure::Final(error.into())),
                    Some(theirs) => Err(Failure::Final(Error::Version(theirs))),
                };
            }
        }
        let mut part = [0; 512];
        let wanted = match bytes.first_chunk::<HEADER_BYTES>() {
            None => HEADER_BYTES - bytes.len(),
            Some(head) => {
                let header = Header::parse(head).map_err(|e| Failure::Final(e.into()))?;
                (HEADER_BYTES + header.body_bytes as usize - bytes.len()).min(part.len())
            }
        };
        match receive_descriptors(fd, &mut part[..wanted], Wait::Any) {
            Ok((0, _)) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok((count, more)) => {
                bytes.extend_from_slice(&part[..count]);
                descriptors.extend(more);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}
