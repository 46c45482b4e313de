//! Messages between nodes: control information, possibly with data pushed along.

use crate::choose::{Choice, Situation, Strategy, choose, least_capable};
use crate::limits::{MESSAGE_BYTES_MAX, MESSAGE_COST_BYTES, PUSHED_PARTS_MAX};
use crate::message::{Control, Range};
use crate::owner::PUSH_BIT;
use crate::state::{PeerId, State};
use crate::{Error, Global, Node, PeerHandle};
use std::time::Duration;

impl Node {
    /// Sends a message, such as a packed descriptor, to another node. Waits while 128 KiB of earlier
    /// messages to the peer have not been received.
    ///
    /// # Errors
    /// `Invalid`: longer than 64 KiB; `PeerLost`.
    pub fn send(&self, peer: PeerHandle, bytes: &[u8]) -> Result<(), Error> {
        self.send_message(peer, bytes, None).map(|_| ())
    }

    /// Sends a message about `data`, which belongs to this node, and pushes the data along with it if
    /// that is the choice. Returns true if it was pushed; otherwise the receiver fetches it when it
    /// opens a context.
    ///
    /// # Errors
    /// Those of [`Node::send`]; `Invalid`: data of another node; `Refused(ESTALE)`: the buffers were
    /// reclaimed; `Strategy`: a push was requested, but the peer has not granted enough memory, or the
    /// data has more than 256 parts.
    pub fn send_data(
        &self,
        peer: PeerHandle,
        bytes: &[u8],
        data: &Global,
        choice: Choice,
    ) -> Result<bool, Error> {
        self.send_message(peer, bytes, Some((data, choice)))
    }

    fn send_message(
        &self,
        peer: PeerHandle,
        bytes: &[u8],
        data: Option<(&Global, Choice)>,
    ) -> Result<bool, Error> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(Error::Invalid("message longer than 64 KiB"));
        }
        let cost = bytes.len().max(MESSAGE_COST_BYTES);
        self.0.wait_until(None, |state| {
            let window = match state.ready_peer(peer.0) {
                Err(error) => return Some(Err(error)),
                Ok(peer) => peer.window_out,
            };
            if window < cost {
                return None;
            }
            let pushed = match data.map(|(data, choice)| state.push_if(peer.0, data, choice)) {
                Some(Err(error)) => return Some(Err(error)),
                Some(Ok(pushed)) => pushed,
                None => None,
            };
            if let Some(peer) = state.peers.get_mut(&peer.0) {
                peer.window_out -= cost;
            }
            let was_pushed = pushed.is_some();
            state.post(peer.0, &Control::Message { pushed, bytes });
            Some(Ok(was_pushed))
        })?
    }

    /// Receives the next message of any peer. Messages of lost links are kept, up to 128 KiB for each link
    /// that the node may have; beyond that the oldest are dropped.
    ///
    /// # Errors
    /// `TimedOut`.
    pub fn receive(&self, limit: Option<Duration>) -> Result<Message, Error> {
        self.0.wait_until(limit, |state| {
            let arrived = state.inbox.pop_front()?;
            if let Some(peer) = state.peers.get_mut(&arrived.peer) {
                peer.window_in -= arrived.cost;
            }
            let bytes = arrived.cost as u32; // at most a message
            state.post(arrived.peer, &Control::Window { bytes });
            Some(Message {
                peer: PeerHandle(arrived.peer),
                bytes: arrived.bytes,
                pushed: arrived.pushed,
                node: self.clone(),
            })
        })
    }
}

impl State {
    /// Pushes data to a peer if that is the choice. Returns the push's number and ranges, for the message.
    fn push_if(
        &mut self,
        peer: PeerId,
        data: &Global,
        choice: Choice,
    ) -> Result<Option<(u64, Vec<Range>)>, Error> {
        if data.parts().any(|part| part.home.node != self.home.node) {
            return Err(Error::Invalid("data of another node cannot be pushed"));
        }
        let link = self.ready_peer(peer)?;
        let granted = self.granted_by(peer);
        let automatic = choose(&Situation {
            length: data.len(),
            kind: least_capable(data.parts().map(|part| part.kind)),
            passes_descriptors: link.channel.is_some(),
            reads_memory: link.same_user,
            granted,
            writes: false,
        });
        let strategy = match choice {
            Choice::Automatic => automatic,
            Choice::Forced(strategy) => strategy,
        };
        if strategy != Strategy::Push || data.is_empty() {
            return Ok(None);
        }
        let ranges: Vec<Range> = data.parts().map(Range::of).collect();
        let fits = granted >= data.len() && ranges.len() <= PUSHED_PARTS_MAX;
        match (fits, choice) {
            (true, _) => {}
            (false, Choice::Automatic) => return Ok(None),
            (false, _) => {
                return Err(Error::Strategy("peer has not granted that much memory to push into"));
            }
        }
        let found = self.resolve(&ranges, false).map_err(Error::Refused)?;
        let number = PUSH_BIT | self.number();
        self.begin_lease(peer, number, &ranges).map_err(Error::Refused)?;
        self.push(peer, number, found);
        Ok(Some((number, ranges)))
    }
}

/// A message from another node. Data that was pushed with it stays as long as the message is kept;
/// dropping the message tells the owner.
#[derive(Debug)]
pub struct Message {
    /// The peer that sent it.
    pub peer: PeerHandle,
    /// The content.
    pub bytes: Vec<u8>,
    pushed: Option<u64>,
    node: Node,
}

impl Message {
    /// True when its data was pushed with it.
    #[must_use]
    pub fn is_pushed(&self) -> bool {
        self.pushed.is_some()
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if let Some(number) = self.pushed {
            self.node.0.with(|state| state.release_pushed(self.peer.0, number, false));
        }
    }
}
