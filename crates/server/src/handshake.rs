//! Messages with which a lane is greeted and joined to its session.

use crate::complaints;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use towline_mem::SharedMemory;
use towline_net::{Doorbell, Link, SHM_BYTES, ShmLink, ShmSide, Wait, send_descriptors};
use towline_wire::hello::{MAGIC, VERSION, authentication, encryption, version_of};
use towline_wire::limits::{HEADER_BYTES, INLINE_BYTES_MAX, SLOTS_MAX, TRANSFER_BYTES_MAX};
use towline_wire::{Errno, Header, Hello, Kind, ProtocolError, Welcome};

/// Parses a hello. Of one of another version, which is [refused](objection), only the version is read.
pub(crate) fn parse(header: &Header, body: &[u8]) -> Result<Hello, ProtocolError> {
    match version_of(body).filter(|_| header.payload_bytes == 0) {
        Some(VERSION) => Hello::parse(body),
        Some(version) => Ok(Hello { version, ..Hello::default() }),
        None => Err(ProtocolError { what: "peer speaks another protocol", at: HEADER_BYTES }),
    }
}

/// Returns why a client is refused, if it is.
pub(crate) fn objection(hello: &Hello) -> Option<Errno> {
    if hello.version != VERSION {
        complaints::warn(format_args!(
            "refused a client that speaks version {} of the protocol: this server speaks version {VERSION}",
            hello.version
        ));
        return Some(Errno::EPROTO);
    }
    let asked = (hello.authentication, hello.encryption);
    if asked != (authentication::NONE, encryption::NONE) {
        complaints::warn(format_args!(
            "refused a client that asks for authentication {} and encryption {}: this server knows \
             neither (0)",
            asked.0, asked.1
        ));
        return Some(Errno::EPROTONOSUPPORT);
    }
    None
}

/// Returns a welcome with the server's limits; the caller fills in the session.
pub(crate) fn welcome(boot_epoch: u32) -> Welcome {
    Welcome {
        magic: MAGIC,
        version: VERSION,
        authentication: authentication::NONE,
        encryption: encryption::NONE,
        boot_epoch,
        slots: SLOTS_MAX as u16,
        transfer_bytes_max: TRANSFER_BYTES_MAX as u32,
        inline_bytes_max: INLINE_BYTES_MAX as u32,
        ..Welcome::default()
    }
}

/// Returns a welcome that refuses the client.
pub(crate) fn refusal(boot_epoch: u32, errno: Errno) -> Welcome {
    Welcome { errno: errno.0, ..welcome(boot_epoch) }
}

/// Returns the message that carries a welcome.
pub(crate) fn message(welcome: &Welcome) -> Vec<u8> {
    let mut body = Vec::new();
    welcome.encode(&mut body);
    let mut header = Header::new(Kind::Welcome, 0, 0);
    header.body_bytes = body.len() as u32;
    let mut bytes = header.to_bytes().to_vec();
    bytes.extend_from_slice(&body);
    bytes
}

/// What a link over shared memory consists of.
pub(crate) struct Rings {
    socket: OwnedFd,
    bell: Doorbell,
    memory: Arc<SharedMemory>,
}

impl Rings {
    /// Creates shared memory and a doorbell for the client at the other end of a Unix socket.
    pub(crate) fn of(link: &Link) -> io::Result<Self> {
        let socket = link.fd().ok_or(io::ErrorKind::Unsupported)?.try_clone_to_owned()?;
        // The bell is for this client only. The client can consume rings and can make others block when they
        // read or write the bell. The server does neither: it gets each ring as an event.
        let bell = Doorbell::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let memory = Arc::new(SharedMemory::create("towline-session", SHM_BYTES)?);
        Ok(Self { socket, bell, memory })
    }

    /// Sends them with the welcome over the Unix socket, and returns a link over that memory.
    pub(crate) fn send(self, welcome: &Welcome) -> io::Result<Link> {
        let Self { socket, bell, memory } = self;
        let bytes = message(welcome);
        let descriptors = [memory.fd(), bell.fd().as_fd()];
        let sent = send_descriptors(&socket, &bytes, &descriptors, Wait::No)?;
        if sent != bytes.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(Link::Shm(Box::new(ShmLink::new(memory, ShmSide::Server, bell, socket)?)))
    }
}
