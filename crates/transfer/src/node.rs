//! A node: names a program's buffers, and gives it access to those of other nodes.

use crate::Error;
use crate::counters::WayCounts;
use crate::global::{Access, Global, Home, Part, PartKind};
use crate::limits::{ADDRESSES_MAX, PARTS_MAX};
use crate::links::bell;
use crate::owner::is_mappable;
use crate::progress::Shared;
use crate::state::{BUFFER_BYTES, Entry, Peer, PeerId, State};
use std::collections::{HashMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_mem::{Aggregate, Pool, Segment};
use towline_net::address::{Address, Listener};
use towline_net::{Counters, Doorbell, local_pair};

/// The nodes that a descriptor may make this one connect to. Descriptors, and the addresses in them,
/// come from other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Reach {
    /// None: only owners that are already linked.
    Linked,
    /// Nodes on this machine.
    #[default]
    SameHost,
    /// Any nodes.
    Anywhere,
}

/// The resources and features that a node may use.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of buffers in the pool, 256 KiB each: all the memory that other nodes' data can occupy. At
    /// least 1.
    pub pool_buffers: usize,
    /// Most links at the same time.
    pub peers_max: usize,
    /// The nodes that may be connected to because a descriptor names them.
    pub reach: Reach,
    /// Move links over Unix sockets to rings in shared memory, if the other side wants that too.
    pub rings: bool,
    /// Allow processes of the same user to read this process's memory, and read theirs, if the system
    /// permits it.
    pub direct: bool,
    /// Listen beyond this machine, although peers are not authenticated.
    pub insecure: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            pool_buffers: 64,
            peers_max: 256,
            reach: Reach::default(),
            rings: true,
            direct: true,
            insecure: false,
        }
    }
}

/// A link to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerHandle(pub(crate) PeerId);

/// How the contexts on buffers have ended so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acknowledged {
    /// Contexts that were closed.
    pub closed: u64,
    /// Contexts that were lost with their link.
    pub lost: u64,
}

/// A node. Clones are the same node; all calls may be made from any thread.
#[derive(Clone)]
pub struct Node(pub(crate) Arc<Shared>);

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({:016x})", self.number())
    }
}

impl Node {
    /// Creates a node without links.
    ///
    /// # Errors
    /// The system returns no random numbers or no eventfd.
    pub fn new(options: Options) -> Result<Self, Error> {
        const SCRATCH_BYTES: usize = 256 * 1024;
        let options = Options { pool_buffers: options.pool_buffers.max(1), ..options };
        let proof = Box::new(random()?);
        let home = Home { node: random()?, host: machine_number(), addresses: Vec::new() };
        let state = State {
            options,
            home: Arc::new(home),
            pool: Pool::new(BUFFER_BYTES as usize, options.pool_buffers),
            listeners: Vec::new(),
            peers: HashMap::new(),
            next_number: 0,
            entries: Vec::new(),
            free_entries: Vec::new(),
            leases: HashMap::new(),
            landings: HashMap::new(),
            pushed: HashMap::new(),
            operations: HashMap::new(),
            finished: VecDeque::new(),
            groups: HashMap::new(),
            hungry: VecDeque::new(),
            feeding: false,
            inbox: VecDeque::new(),
            counts: WayCounts::default(),
            counters: Arc::new(Counters::default()),
            scratch: vec![0; SCRATCH_BYTES],
            led: false,
            looked_for_stalls: Instant::now(),
            accept_from: Instant::now(),
            proof: (std::ptr::from_ref::<u64>(&proof).addr() as u64, *proof),
        };
        Ok(Self(Arc::new(Shared::new(state, Doorbell::new(bell()?), proof))))
    }

    /// Returns the number of this node.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.0.with(|state| state.home.node)
    }

    /// Listens at an address, which becomes part of the descriptors of buffers globalized from now on.
    /// Returns the address with the port that the system chose, or the absolute path.
    ///
    /// # Errors
    /// `Invalid`: a fifth address, or one beyond this machine without [`Options::insecure`]; what
    /// `bind(2)` says.
    pub fn listen(&self, address: &Address) -> Result<Address, Error> {
        let (count, insecure) =
            self.0.with(|state| (state.listeners.len(), state.options.insecure));
        if count == ADDRESSES_MAX {
            return Err(Error::Invalid("a node has at most 4 addresses"));
        }
        if !address.is_local() && !insecure {
            return Err(Error::Invalid(
                "address beyond this machine: peers are not authenticated (Options::insecure)",
            ));
        }
        let listener = Listener::bind(address)?;
        let bound = match address {
            Address::Tcp(_) => listener.address()?,
            // Others may be in another directory, and descriptors with a relative path are refused.
            Address::Unix(path) => Address::Unix(std::path::absolute(path)?),
            other => other.clone(),
        };
        self.0.with(|state| {
            state.listeners.push(Arc::new(listener));
            let mut home = (*state.home).clone();
            home.addresses.push(bound.clone());
            state.home = Arc::new(home);
        });
        Ok(bound)
    }

    /// Returns the addresses at which this node listens.
    #[must_use]
    pub fn addresses(&self) -> Vec<Address> {
        self.0.with(|state| state.home.addresses.clone())
    }

    /// Connects to another node, and makes progress for all operations meanwhile.
    ///
    /// # Errors
    /// What `connect(2)` says; `TimedOut`: no answer for 5 seconds; `PeerLost`: the answer is not from a
    /// node.
    pub fn connect(&self, address: &Address) -> Result<PeerHandle, Error> {
        self.0.connect(address).map(PeerHandle)
    }

    /// Links two nodes of this process.
    ///
    /// # Errors
    /// There are no descriptors left for the socket that passes them.
    pub fn join(one: &Self, other: &Self) -> Result<(PeerHandle, PeerHandle), Error> {
        let (near, far) = local_pair();
        let (channel, other_channel) = UnixStream::pair()?;
        let add = |node: &Self, link, channel: UnixStream, number| -> Result<_, Error> {
            channel.set_nonblocking(true)?;
            let mut peer = Peer::new(link, false);
            (peer.greeting, peer.node, peer.channel) = (None, number, Some(channel.into()));
            peer.same_user = true;
            Ok(PeerHandle(node.0.with(|state| state.add(peer))))
        };
        let (a, b) = (one.number(), other.number());
        Ok((add(one, near, channel, b)?, add(other, far, other_channel, a)?))
    }

    /// Closes a link: the peer's leases end, and operations over the link fail.
    pub fn disconnect(&self, peer: PeerHandle) {
        self.0.with(|state| state.lose(peer.0));
    }

    /// Returns the links that are ready, with the numbers of the nodes at the other end.
    #[must_use]
    pub fn peers(&self) -> Vec<(PeerHandle, u64)> {
        self.0.with(|state| {
            let ready = state.peers.iter().filter(|(_, peer)| peer.is_ready());
            ready.map(|(id, peer)| (PeerHandle(*id), peer.node)).collect()
        })
    }

    /// Gives buffers a global name. They belong to the node until [`Node::reclaim`].
    ///
    /// # Errors
    /// `Invalid`: no bytes, or more than 1024 slices.
    pub fn globalize(&self, aggregate: Aggregate, access: Access) -> Result<Global, Error> {
        if aggregate.is_empty() || aggregate.slices().len() > PARTS_MAX {
            return Err(Error::Invalid("aggregate is empty or has more than 1024 slices"));
        }
        let generation = random()?;
        self.0.with(|state| {
            let slices: Vec<_> = aggregate.slices().cloned().collect();
            let handle = state.free_entries.pop().unwrap_or_else(|| {
                state.entries.push(None);
                (state.entries.len() - 1) as u32
            });
            let (mut global, mut offset) = (Global::new(), 0);
            for slice in &slices {
                let kind = match &slice.segment {
                    Segment::Registered(_) => PartKind::Registered,
                    Segment::Shared(..) if is_mappable(slice, access) => PartKind::Mappable,
                    Segment::Shared(..) => PartKind::Shared,
                    Segment::File(_) => PartKind::File,
                    _ => PartKind::Host,
                };
                let (home, length) = (state.home.clone(), slice.length);
                global.append(Part { home, handle, generation, kind, access, offset, length })?;
                offset += length;
            }
            state.entries[handle as usize] = Some(Entry {
                generation,
                slices,
                length: aggregate.len(),
                access,
                leases: 0,
                acknowledged: 0,
                lost: 0,
                closing: false,
            });
            Ok(global)
        })
    }

    /// Takes buffers back. No new context can be opened on them. When the open ones are closed or lost,
    /// the buffers are returned, with what was written back to them.
    ///
    /// # Errors
    /// `Refused(ESTALE)`: the name is not of buffers of this node; `TimedOut`: contexts are still open
    /// and can be closed; call again.
    pub fn reclaim(&self, global: &Global, limit: Option<Duration>) -> Result<Aggregate, Error> {
        let mut handles: Vec<(u32, u64)> = Vec::new();
        for part in global.parts() {
            if !handles.contains(&(part.handle, part.generation)) {
                handles.push((part.handle, part.generation));
            }
        }
        self.0.wait_until(limit, |state| {
            let home = state.home.node;
            if global.parts().any(|part| part.home.node != home) {
                return Some(Err(Error::Refused(towline_wire::Errno::ESTALE)));
            }
            let unknown =
                |(handle, generation): &(u32, u64)| state.entry(*handle, *generation).err();
            if let Some(errno) = handles.iter().find_map(unknown) {
                return Some(Err(Error::Refused(errno)));
            }
            let mut busy = false;
            for (handle, _) in &handles {
                if let Some(Some(entry)) = state.entries.get_mut(*handle as usize) {
                    entry.closing = true;
                    busy |= entry.leases > 0;
                }
            }
            if busy {
                return None;
            }
            let mut buffers = Aggregate::new();
            for (handle, _) in &handles {
                if let Some(entry) = state.entries[*handle as usize].take() {
                    for slice in entry.slices {
                        buffers.append(slice.segment, slice.offset, slice.length);
                    }
                    state.free_entries.push(*handle);
                }
            }
            Some(Ok(buffers))
        })?
    }

    /// Waits until `count` contexts on the buffers of the first part of `global` have ended, and returns
    /// how they ended.
    ///
    /// # Errors
    /// `Refused(ESTALE)`: not buffers of this node; `TimedOut`.
    pub fn acknowledged(
        &self,
        global: &Global,
        count: u64,
        limit: Option<Duration>,
    ) -> Result<Acknowledged, Error> {
        let Some(part) = global.parts().next() else { return Ok(Acknowledged::default()) };
        self.0.wait_until(limit, |state| match state.entry(part.handle, part.generation) {
            Err(errno) => Some(Err(Error::Refused(errno))),
            Ok(entry) if entry.acknowledged + entry.lost >= count => {
                Some(Ok(Acknowledged { closed: entry.acknowledged, lost: entry.lost }))
            }
            Ok(_) => None,
        })?
    }

    /// Grants a peer memory to push into: `buffers` buffers of the pool, reserved for it until the link
    /// ends. A node that only routes descriptors grants none.
    ///
    /// # Errors
    /// `PeerLost`; `TooLarge`: more than can be reserved. At least one buffer of the pool stays for
    /// everything else.
    pub fn grant_push(&self, peer: PeerHandle, buffers: usize) -> Result<(), Error> {
        self.0.with(|state| {
            let (reserved, most) = (state.reserved(), state.options.pool_buffers - 1);
            let peer = state.peers.get_mut(&peer.0).ok_or(Error::PeerLost)?;
            let most = most - (reserved - peer.push_target);
            if buffers > most {
                let needed = (buffers as u64).saturating_mul(BUFFER_BYTES);
                return Err(Error::TooLarge { needed, pool: most as u64 * BUFFER_BYTES });
            }
            peer.push_target = peer.push_target.max(buffers);
            Ok(())
        })
    }

    /// Returns the counters of every way in which data was moved.
    #[must_use]
    pub fn counts(&self) -> WayCounts {
        self.0.with(|state| state.counts)
    }

    /// Returns the counters of the network layer: system calls, messages, bytes.
    #[must_use]
    pub fn net_counters(&self) -> Arc<Counters> {
        self.0.with(|state| state.counters.clone())
    }

    /// Returns the number of pool buffers in use, and the most that were in use at once.
    #[must_use]
    pub fn pool_in_use(&self) -> (usize, usize) {
        self.0.with(|state| state.pool.in_use())
    }

    /// Makes progress for at most `limit`; for owners that have nothing to wait for.
    ///
    /// # Errors
    /// Only those of the system.
    pub fn serve(&self, limit: Duration) -> Result<(), Error> {
        match self.0.wait_until::<()>(Some(limit), |_| None) {
            Ok(()) | Err(Error::TimedOut) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn random() -> Result<u64, Error> {
    let mut bytes = [0; 8];
    let mut done = 0;
    while done < bytes.len() {
        done += rustix::rand::getrandom(&mut bytes[done..], rustix::rand::GetRandomFlags::empty())?;
    }
    // Zero means "none" in several places.
    Ok(u64::from_le_bytes(bytes).max(1))
}

/// Returns a number that all nodes on the running machine share, derived from its boot identity.
fn machine_number() -> u64 {
    let identity = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = identity.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    // Without it nodes treat each other as being on different machines, and ignore Unix sockets in
    // descriptors.
    u64::from_str_radix(&digits, 16).unwrap_or_else(|_| u64::from(std::process::id()))
}
