//! Links to other nodes: listening, connecting and greeting.

use crate::Error;
use crate::global::Home;
use crate::greeting::{self, GREETING_BYTES, Greeting, want};
use crate::limits::STALL_SECONDS;
use crate::node::Reach;
use crate::progress::Shared;
use crate::state::{Direct, Peer, PeerId, State};
use rustix::event::EventfdFlags;
use rustix::net::sockopt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_mem::{Region, SharedMemory, read_process};
use towline_net::address::{Address, Listener, connect_abstract, connect_tcp, connect_unix};
use towline_net::{Doorbell, Link, LinkKind, SHM_BYTES, ShmLink, ShmSide, peer_credentials};
use towline_wire::{Errno, Kind};

/// Time limit for a connection and its greeting.
const CONNECT: Duration = Duration::from_secs(5);
/// How long no connection is accepted after the system had no descriptor or memory for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

impl Shared {
    /// Connects to an address. The link is ready when this returns.
    pub(crate) fn connect(&self, address: &Address) -> Result<PeerId, Error> {
        let link = match address {
            Address::Tcp(at) => connect_tcp(&at.ip().to_string(), at.port(), CONNECT)?,
            Address::Unix(path) => connect_unix(path, CONNECT)?,
            Address::Abstract(name) => connect_abstract(name, CONNECT)?,
            _ => return Err(Error::Invalid("address of an unknown kind")),
        };
        if let Some(socket) = link.fd() {
            rustix::io::ioctl_fionbio(socket, true)?;
        }
        let id = self.with(|state| state.call(link))?;
        let answered = self.wait_until(Some(CONNECT), |state| match state.peers.get(&id) {
            None => Some(Err(Error::PeerLost)),
            Some(peer) => peer.is_ready().then_some(Ok(id)),
        });
        match answered {
            Ok(result) => result,
            Err(error) => {
                self.with(|state| state.lose(id));
                Err(error)
            }
        }
    }

    /// Returns a link to the node of `home`: an existing one, or a new one to the nearest of its
    /// addresses that may be connected to.
    pub(crate) fn reach(&self, home: &Home) -> Result<PeerId, Error> {
        let (found, own_host, reach) =
            self.with(|state| (state.peer_of(home.node), state.home.host, state.options.reach));
        if let Some(peer) = found {
            return Ok(peer);
        }
        let mut addresses: Vec<&Address> = home
            .addresses
            .iter()
            .filter(|address| match (reach, address) {
                (Reach::Linked, _) => false,
                (Reach::SameHost, Address::Tcp(_)) => address.is_local(),
                // A path from another machine may be a socket here, but not of that node.
                (_, Address::Tcp(_)) => true,
                _ => home.host == own_host,
            })
            .collect();
        addresses.sort_by_key(|address| matches!(address, Address::Tcp(_)));
        let mut last = None;
        for address in addresses {
            match self.connect(address) {
                Ok(peer) => {
                    let node = self.with(|state| state.peers.get(&peer).map(|peer| peer.node));
                    if node == Some(home.node) {
                        return Ok(peer);
                    }
                    self.with(|state| state.lose(peer));
                    let other = io::Error::new(io::ErrorKind::NotFound, "another node is there");
                    last = Some((address.clone(), other));
                }
                Err(Error::Io(error)) => last = Some((address.clone(), error)),
                Err(other) => {
                    let error = io::Error::new(io::ErrorKind::ConnectionAborted, other);
                    last = Some((address.clone(), error));
                }
            }
        }
        Err(Error::Unreachable { node: home.node, last })
    }
}

impl State {
    /// Returns this node's greeting for a link of this kind.
    fn greeting(&self, link: &Link) -> Greeting {
        let is_unix = link.kind() == LinkKind::Unix;
        let rings = if self.options.rings { want::SHARED_MEMORY } else { 0 };
        Greeting {
            wants: if is_unix { want::DESCRIPTORS | rings } else { 0 },
            process: std::process::id(),
            node: self.home.node,
            host: self.home.host,
            proof_address: if is_unix && self.options.direct { self.proof.0 } else { 0 },
            proof_value: if is_unix && self.options.direct { self.proof.1 } else { 0 },
        }
    }

    /// Greets the node at the other end of a new link.
    fn call(&mut self, link: Link) -> Result<PeerId, Error> {
        self.check_room()?;
        greeting::send(&link, &self.greeting(&link).to_bytes(Kind::Hello), &[])?;
        Ok(self.add(Peer::new(link, false)))
    }

    fn check_room(&self) -> Result<(), Error> {
        if self.peers.len() >= self.options.peers_max {
            return Err(Error::Invalid("as many links as the node may have"));
        }
        Ok(())
    }

    pub(crate) fn add(&mut self, peer: Peer) -> PeerId {
        notice_silence(&peer.link);
        let id = self.number();
        self.peers.insert(id, peer);
        id
    }

    /// Accepts the connections that wait at a listener.
    pub(crate) fn accept(&mut self, listener: &Listener) {
        const ROUNDS: usize = 16;
        for _ in 0..ROUNDS {
            match listener.accept() {
                Ok(link) if self.check_room().is_ok() => {
                    self.add(Peer::new(link, true));
                }
                // A connection beyond the limit is closed at once.
                Ok(_) => {}
                Err(error) => {
                    // Such a connection stays in the queue, and would wake the node again at once.
                    const SCARCE: [Errno; 4] =
                        [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
                    if SCARCE.contains(&Errno::of(&error)) {
                        self.accept_from = Instant::now() + ACCEPT_PAUSE;
                    }
                    return;
                }
            }
        }
    }

    /// Receives the greeting of a peer that has not greeted yet.
    pub(crate) fn greeted(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let kind = if peer.inbound { Kind::Hello } else { Kind::Welcome };
        let (link, mut incoming) = (peer.link.clone(), peer.greeting.take().unwrap_or_default());
        let Some(socket) = link.fd() else { return };
        match incoming.receive(socket, kind) {
            Ok(None) => {
                if let Some(peer) = self.peers.get_mut(&id) {
                    peer.greeting = Some(incoming);
                }
            }
            Ok(Some(greeting)) => {
                drop(link);
                let descriptors = std::mem::take(&mut incoming.descriptors);
                if self.begin(id, greeting, descriptors).is_err() {
                    self.lose(id);
                }
            }
            Err(_) => self.lose(id),
        }
    }

    /// After both sides have greeted: agrees on what the link is from now on.
    fn begin(&mut self, id: PeerId, hello: Greeting, given: Vec<OwnedFd>) -> io::Result<()> {
        // Take the peer out of the table meanwhile, so that nothing else refers to its link.
        let Some(mut peer) = self.peers.remove(&id) else { return Ok(()) };
        if hello.node == self.home.node {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a link to itself"));
        }
        peer.node = hello.node;
        if peer.link.kind() == LinkKind::Unix {
            self.know(&mut peer, &hello)?;
        }
        let own = self.greeting(&peer.link);
        let agreed = own.wants & hello.wants;
        let link = Arc::try_unwrap(peer.link)
            .map_err(|_| io::Error::other("link is polled by another thread"))?;
        let (link, channel) = if peer.inbound {
            offer(link, Greeting { wants: agreed, ..own })?
        } else {
            take(link, agreed, given)?
        };
        if let Some(channel) = &channel {
            rustix::io::ioctl_fionbio(channel, true)?;
        }
        (peer.link, peer.channel) = (Arc::new(link), channel);
        self.peers.insert(id, peer);
        Ok(())
    }

    /// Finds out which user is at the other end of a Unix socket, and whether its memory can be read.
    fn know(&self, peer: &mut Peer, hello: &Greeting) -> io::Result<()> {
        let Some(socket) = peer.link.fd() else { return Ok(()) };
        let who = peer_credentials(socket)?;
        peer.same_user = who.uid == rustix::process::geteuid().as_raw();
        let Some(process) = who.process else { return Ok(()) };
        if !peer.same_user || hello.proof_address == 0 || !self.options.direct {
            return Ok(());
        }
        let direct = Direct {
            process: process.as_raw_pid(),
            proof_address: hello.proof_address,
            proof_value: hello.proof_value,
        };
        let mut proof = [0; 8];
        let region = Region { address: direct.proof_address, length: 8 };
        let read = read_process(direct.process, &[region], &mut [&mut proof]);
        if matches!(read, Ok(8)) && u64::from_le_bytes(proof) == direct.proof_value {
            peer.direct = Some(direct);
        }
        Ok(())
    }
}

/// Makes the system check whether a silent TCP peer is alive, so that its leases do not stay for ever.
/// The link works without it too.
fn notice_silence(link: &Link) {
    let (LinkKind::Tcp, Some(socket)) = (link.kind(), link.fd()) else { return };
    let limit = Duration::from_secs(STALL_SECONDS);
    let _ = sockopt::set_tcp_keepidle(socket, limit);
    let _ = sockopt::set_tcp_user_timeout(socket, limit.as_millis() as u32);
    let _ = sockopt::set_socket_keepalive(socket, true);
}

/// The accepting side: sends the answer, with what was agreed on.
fn offer(link: Link, answer: Greeting) -> io::Result<(Link, Option<OwnedFd>)> {
    let bytes = answer.to_bytes(Kind::Welcome);
    debug_assert_eq!(bytes.len(), GREETING_BYTES);
    if answer.wants & want::DESCRIPTORS == 0 {
        greeting::send(&link, &bytes, &[])?;
        return Ok((link, None));
    }
    let (near, far) = UnixStream::pair()?;
    if answer.wants & want::SHARED_MEMORY == 0 {
        greeting::send(&link, &bytes, &[far.as_fd()])?;
        return Ok((link, Some(near.into())));
    }
    let memory = SharedMemory::create("towline-transfer", SHM_BYTES)?;
    greeting::send(&link, &bytes, &[far.as_fd(), memory.fd()])?;
    Ok((rings(link, memory, ShmSide::Server)?, Some(near.into())))
}

/// The calling side: takes what it was given.
fn take(link: Link, agreed: u32, given: Vec<OwnedFd>) -> io::Result<(Link, Option<OwnedFd>)> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, "answer without what it promises");
    let shared = agreed & want::SHARED_MEMORY != 0;
    if agreed & want::DESCRIPTORS == 0 {
        return if given.is_empty() && !shared { Ok((link, None)) } else { Err(wrong()) };
    }
    if !shared {
        let [channel] = <[OwnedFd; 1]>::try_from(given).map_err(|_| wrong())?;
        return Ok((link, Some(channel)));
    }
    let [channel, memory] = <[OwnedFd; 2]>::try_from(given).map_err(|_| wrong())?;
    let memory = SharedMemory::open(memory, SHM_BYTES, true)?;
    Ok((rings(link, memory, ShmSide::Client)?, Some(channel)))
}

fn rings(link: Link, memory: SharedMemory, side: ShmSide) -> io::Result<Link> {
    let Link::Socket(socket, _) = link else { return Err(io::ErrorKind::Unsupported.into()) };
    // Both sides ring over the socket, on which nothing is sent any more. An eventfd would be shared with
    // the peer, which could make this node wait for ever when it rings, or resets its own.
    let bell = Doorbell::between(socket.try_clone()?);
    let ring = ShmLink::new(Arc::new(memory), side, bell.clone(), socket)?.with_client_bell(bell);
    Ok(Link::Shm(Box::new(ring)))
}

pub(crate) fn bell() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}
