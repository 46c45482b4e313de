//! The whole state of a node, behind one lock. The code that works on it is in `owner.rs` (other nodes
//! use our buffers), `receiver.rs` (we use theirs), `arrivals.rs` (what arrives over links) and
//! `progress.rs` (waiting).

use crate::counters::{Way, WayCounts};
use crate::global::{Access, Home};
use crate::limits::{MESSAGE_WINDOW_BYTES, STALL_SECONDS};
use crate::message::{Control, Range, control_bytes};
use crate::node::Options;
use crate::operation::Operation;
use crate::{Error, greeting};
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_mem::{Aggregate, Pool, PoolBuffer, Segment, Slice};
use towline_net::address::Listener;
use towline_net::{Counters, Flushed, Input, Link, LinkKind, Pipe, SENDFILE_BYTES_MIN, SendQueue};
use towline_wire::Errno;
use towline_wire::limits::FRAGMENT_BYTES_MAX;

/// Number of a link within its node; zero stands for the node itself.
pub(crate) type PeerId = u64;
pub(crate) const OWN: PeerId = 0;

/// Size of a buffer of the pool, and of a fragment.
pub(crate) const BUFFER_BYTES: u64 = FRAGMENT_BYTES_MAX as u64;

/// Globalized buffers.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) generation: u64,
    pub(crate) slices: Vec<Slice>,
    pub(crate) length: u64,
    pub(crate) access: Access,
    /// Number of contexts open on it.
    pub(crate) leases: u64,
    pub(crate) acknowledged: u64,
    /// Number of leases that ended because their link was lost.
    pub(crate) lost: u64,
    /// It is being reclaimed: no new contexts.
    pub(crate) closing: bool,
}

/// A context that another node, or this one, has open on this node's buffers.
#[derive(Debug, Default)]
pub(crate) struct Lease {
    pub(crate) handles: Vec<u32>,
    /// Data that is still to be sent.
    pub(crate) rest: Aggregate,
    /// Ordinary memory that the peer reads directly.
    pub(crate) direct: Aggregate,
    pub(crate) sent: u64,
    pub(crate) granted: u64,
}

/// A write-back that is pulled into this node's buffers.
#[derive(Debug)]
pub(crate) struct Landing {
    pub(crate) ranges: Vec<Range>,
    pub(crate) length: u64,
    /// Bytes that are in place.
    pub(crate) applied: u64,
    /// Buffer for the next bytes; if there is one, it is granted to the sender.
    pub(crate) buffer: Option<PoolBuffer>,
    pub(crate) granted_at: Instant,
}

/// Data that a peer pushed.
#[derive(Debug, Default)]
pub(crate) struct Pushed {
    pub(crate) buffers: Vec<Arc<PoolBuffer>>,
    pub(crate) length: u64,
    /// The ranges of the peer's buffers that it belongs to, known once a message named them.
    pub(crate) ranges: Vec<Range>,
    /// Number of messages and contexts that refer to it.
    pub(crate) holders: u32,
    /// A context was opened on it and closed.
    pub(crate) acknowledged: bool,
}

/// How to read a peer's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Direct {
    pub(crate) process: i32,
    pub(crate) proof_address: u64,
    pub(crate) proof_value: u64,
}

/// A link to another node.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) link: Arc<Link>,
    /// `Some` until the other side has greeted.
    pub(crate) greeting: Option<greeting::Incoming>,
    pub(crate) inbound: bool,
    pub(crate) since: Instant,
    pub(crate) node: u64,
    pub(crate) input: Input,
    pub(crate) out: SendQueue,
    pub(crate) blocked: bool,
    /// The socket for descriptors.
    pub(crate) channel: Option<OwnedFd>,
    pub(crate) same_user: bool,
    pub(crate) direct: Option<Direct>,
    /// Bytes of messages that the peer still accepts.
    pub(crate) window_out: usize,
    /// Bytes of messages from the peer that the program has not received.
    pub(crate) window_in: usize,
    /// Number of the peer's buffers that this node may push into.
    pub(crate) push_out: u32,
    /// This node's buffers that the peer may push into.
    pub(crate) push_in: Vec<PoolBuffer>,
    /// Number of buffers that the peer should have for pushing.
    pub(crate) push_target: usize,
    /// Number of granted buffers that hold pushed data.
    pub(crate) push_used: usize,
    pub(crate) leases: usize,
    pub(crate) landings: usize,
}

impl Peer {
    pub(crate) fn new(link: Link, inbound: bool) -> Self {
        Self {
            link: Arc::new(link),
            greeting: Some(greeting::Incoming::default()),
            inbound,
            since: Instant::now(),
            node: 0,
            input: Input::default(),
            out: SendQueue::default(),
            blocked: false,
            channel: None,
            same_user: false,
            direct: None,
            window_out: MESSAGE_WINDOW_BYTES,
            window_in: 0,
            push_out: 0,
            push_in: Vec::new(),
            push_target: 0,
            push_used: 0,
            leases: 0,
            landings: 0,
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.greeting.is_none()
    }
}

/// Waits for buffers of the pool. Served in order, each with everything it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hungry {
    Operation(u64),
    Landing(PeerId, u64),
}

/// A message that the program has not received.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) peer: PeerId,
    pub(crate) bytes: Vec<u8>,
    pub(crate) pushed: Option<u64>,
    pub(crate) cost: usize,
}

pub(crate) struct State {
    pub(crate) options: Options,
    pub(crate) home: Arc<Home>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) listeners: Vec<Arc<Listener>>,
    pub(crate) peers: HashMap<PeerId, Peer>,
    pub(crate) next_number: u64,
    pub(crate) entries: Vec<Option<Entry>>,
    pub(crate) free_entries: Vec<u32>,
    pub(crate) leases: HashMap<(PeerId, u64), Lease>,
    pub(crate) landings: HashMap<(PeerId, u64), Landing>,
    pub(crate) pushed: HashMap<(PeerId, u64), Pushed>,
    pub(crate) operations: HashMap<u64, Operation>,
    /// Finished operations without a group, oldest first.
    pub(crate) finished: VecDeque<u64>,
    /// Finished operations of each group that has some, oldest first.
    pub(crate) groups: HashMap<u64, VecDeque<u64>>,
    pub(crate) hungry: VecDeque<Hungry>,
    pub(crate) feeding: bool,
    pub(crate) inbox: VecDeque<Arrived>,
    pub(crate) counts: WayCounts,
    pub(crate) counters: Arc<Counters>,
    pub(crate) scratch: Vec<u8>,
    /// A thread is polling for all.
    pub(crate) led: bool,
    pub(crate) looked_for_stalls: Instant,
    /// Before this moment no connections are accepted.
    pub(crate) accept_from: Instant,
    /// Address and value of the proof that other processes can read this node's memory.
    pub(crate) proof: (u64, u64),
}

impl State {
    /// Returns a new number, unique within the node.
    pub(crate) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Queues a control message with a payload.
    pub(crate) fn post_with(&mut self, peer: PeerId, control: &Control<'_>, payload: Aggregate) {
        let Some(peer) = self.peers.get_mut(&peer) else { return };
        let mut message = Aggregate::from_vec(control_bytes(control, payload.len()));
        message.concatenate(payload);
        peer.out.push_foreign(message, None);
    }

    /// Queues a control message.
    pub(crate) fn post(&mut self, peer: PeerId, control: &Control<'_>) {
        self.post_with(peer, control, Aggregate::new());
    }

    /// Queues a data message. If its bytes cannot be read, the peer gets [`Control::Failed`] after it.
    pub(crate) fn post_data(
        &mut self,
        peer: PeerId,
        flags: u8,
        operation: u64,
        offset: u64,
        payload: Aggregate,
    ) {
        let Some(peer) = self.peers.get_mut(&peer) else { return };
        let header = crate::message::data_header(flags, operation, offset, payload.len());
        let mut message = Aggregate::from_vec(header.to_bytes().to_vec());
        message.concatenate(payload);
        let telling =
            move |errno: Errno| control_bytes(&Control::Failed { operation, errno: errno.0 }, 0);
        peer.out.push_foreign(message, Some(Box::new(telling)));
    }

    /// Sends what is queued for a peer, as far as its link takes it.
    pub(crate) fn flush(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if !peer.is_ready() {
            return;
        }
        match peer.out.flush(&peer.link, &mut Pipe::none(), &self.counters) {
            Ok(flushed) => peer.blocked = flushed == Flushed::Blocked,
            Err(_) => self.lose(id),
        }
    }

    /// Sends what is queued for all peers.
    pub(crate) fn flush_all(&mut self) {
        let waiting: Vec<PeerId> = self
            .peers
            .iter()
            .filter(|(_, peer)| !peer.out.is_empty() && !peer.blocked)
            .map(|(id, _)| *id)
            .collect();
        for id in waiting {
            self.flush(id);
        }
    }

    /// Forgets a peer: its leases end, operations that need it fail, and its memory is returned.
    pub(crate) fn lose(&mut self, id: PeerId) {
        if self.peers.remove(&id).is_none() {
            return;
        }
        let lost: Vec<u64> =
            self.leases.keys().filter(|key| key.0 == id).map(|key| key.1).collect();
        for operation in lost {
            self.end_lease(id, operation, None);
        }
        self.landings.retain(|key, _| key.0 != id);
        self.hungry.retain(|hungry| !matches!(hungry, Hungry::Landing(peer, _) if *peer == id));
        self.pushed.retain(|key, pushed| key.0 != id || pushed.holders > 0);
        self.fail_runs_of(id);
        self.forget_messages();
    }

    /// Drops the oldest messages of lost links beyond what all links together may have waiting. Otherwise a
    /// peer that connects again and again could fill the memory of a node that does not receive.
    fn forget_messages(&mut self) {
        let most = self.options.peers_max.saturating_mul(MESSAGE_WINDOW_BYTES);
        let peers = &self.peers;
        let is_left = |message: &Arrived| !peers.contains_key(&message.peer);
        let waiting: usize =
            self.inbox.iter().filter(|message| is_left(message)).map(|message| message.cost).sum();
        let mut excess = waiting.saturating_sub(most);
        let mut forgotten = Vec::new();
        self.inbox.retain(|message| {
            let stays = excess == 0 || !is_left(message);
            if !stays {
                excess = excess.saturating_sub(message.cost);
                forgotten.extend(message.pushed.map(|number| (message.peer, number)));
            }
            stays
        });
        for (peer, number) in forgotten {
            self.release_pushed(peer, number, false);
        }
    }

    /// Closes links whose peer holds things up: it has not greeted, or does not use memory granted to it.
    pub(crate) fn cut_stalled(&mut self) {
        const PAUSE: Duration = Duration::from_secs(1);
        if self.looked_for_stalls.elapsed() < PAUSE {
            return;
        }
        self.looked_for_stalls = Instant::now();
        let limit = Duration::from_secs(STALL_SECONDS);
        let mut stalled: Vec<PeerId> = self
            .peers
            .iter()
            .filter(|(_, peer)| !peer.is_ready() && peer.since.elapsed() > limit)
            .map(|(id, _)| *id)
            .collect();
        stalled.extend(
            self.landings
                .iter()
                .filter(|(_, l)| l.buffer.is_some() && l.granted_at.elapsed() > limit)
                .map(|(key, _)| key.0),
        );
        for id in stalled {
            self.lose(id);
        }
    }

    /// Gives buffers of the pool to those that wait for them, in order, and to peers that may push.
    pub(crate) fn feed(&mut self) {
        // An operation that fails while it is started returns its buffers, which calls this again.
        if std::mem::replace(&mut self.feeding, true) {
            return;
        }
        self.feed_hungry();
        self.feeding = false;
    }

    fn feed_hungry(&mut self) {
        while let Some(hungry) = self.hungry.front().copied() {
            let fed = match hungry {
                Hungry::Operation(operation) => self.feed_operation(operation),
                Hungry::Landing(peer, operation) => self.feed_landing(peer, operation),
            };
            if !fed {
                return;
            }
            self.hungry.pop_front();
        }
        let ids: Vec<PeerId> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.push_in.len() + peer.push_used < peer.push_target)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            self.grant_push_buffers(id);
        }
    }

    /// Returns the number of buffers reserved for pushes.
    pub(crate) fn reserved(&self) -> usize {
        self.peers.values().map(|peer| peer.push_target).sum()
    }

    fn grant_push_buffers(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let mut buffers = 0;
        while peer.push_in.len() + peer.push_used < peer.push_target {
            let Some(buffer) = self.pool.take() else { break };
            peer.push_in.push(buffer);
            buffers += 1;
        }
        if buffers > 0 {
            self.post(id, &Control::PushGrant { buffers });
        }
    }

    /// Removes one holder of pushed data. With the last one its buffers are returned, and its owner is told.
    pub(crate) fn release_pushed(&mut self, peer: PeerId, number: u64, acknowledged: bool) {
        let Some(pushed) = self.pushed.get_mut(&(peer, number)) else { return };
        pushed.acknowledged |= acknowledged;
        pushed.holders -= 1;
        if pushed.holders > 0 {
            return;
        }
        if let Some(pushed) = self.pushed.remove(&(peer, number)) {
            if let Some(peer) = self.peers.get_mut(&peer) {
                peer.push_used -= pushed.buffers.len();
            }
            let acknowledged = pushed.acknowledged;
            drop(pushed);
            self.post(peer, &Control::Close { operation: number, acknowledged });
            self.feed();
        }
    }

    /// Returns the entry of a handle.
    pub(crate) fn entry(&self, handle: u32, generation: u64) -> Result<&Entry, Errno> {
        self.entries
            .get(handle as usize)
            .and_then(Option::as_ref)
            .filter(|entry| entry.generation == generation)
            .ok_or(Errno::ESTALE)
    }

    /// Returns the peer to use for a node, if there is a link to it.
    pub(crate) fn peer_of(&self, node: u64) -> Option<PeerId> {
        self.peers
            .iter()
            .filter(|(_, peer)| peer.is_ready() && peer.node == node)
            .map(|(id, _)| *id)
            .min()
    }

    pub(crate) fn ready_peer(&self, peer: PeerId) -> Result<&Peer, Error> {
        self.peers.get(&peer).filter(|peer| peer.is_ready()).ok_or(Error::PeerLost)
    }

    /// Counts outgoing data.
    pub(crate) fn count_out(&mut self, peer: PeerId, way: Way, data: &Aggregate) {
        let Some(peer) = self.peers.get(&peer) else { return };
        let copied = bytes_copied_sending(data, peer.link.kind());
        let counts = self.counts.at(way);
        counts.bytes_out += data.len();
        counts.bytes_copied += copied;
    }
}

/// Returns the bytes that the sender's thread copies when `data` is sent over a link: none for pages
/// that the socket takes by reference, and twice the length of files that have to be read first, which is so
/// only within a process.
fn bytes_copied_sending(data: &Aggregate, link: LinkKind) -> u64 {
    let is_socket = matches!(link, LinkKind::Tcp | LinkKind::Unix);
    data.slices()
        .map(|slice| match &slice.segment {
            Segment::File(_) if is_socket => 0,
            Segment::File(_) if link == LinkKind::Local => 2 * slice.length,
            Segment::Shared(..) if is_socket && slice.length >= SENDFILE_BYTES_MIN => 0,
            _ => slice.length,
        })
        .sum()
}
