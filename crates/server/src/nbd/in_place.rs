//! Sends from the buffers that disks are read into, without copying (`SEND_ZC`).
//!
//! A lane does so if its disk says so, or by default if its peer is on another machine: within a machine the
//! kernel copies, so it would only cost. If the kernel copies for another reason (for example, a device that
//! cannot gather), it says so after the first sends, and the lane gives up. So it does when the network refers to all
//! the memory that the server may lock.

use super::lane::{NbdLane, Phase};
use crate::complaints;
use crate::core::Core;
use std::collections::HashMap;
use std::sync::Arc;
use towline_block::{DataPath, Disk, OwnerKey};
use towline_net::address::is_same_host;
use towline_net::{Counters, Link, LinkKind};
use towline_reactor::Sent;

/// Sends of a core's lanes whose buffers the kernel still uses.
#[derive(Default)]
pub(crate) struct InPlace {
    next: u64,
    sends: HashMap<u64, Send>,
    /// Kept to reuse the allocation.
    told: Vec<Sent>,
}

struct Send {
    lane: usize,
    owner: OwnerKey,
    /// Bytes that the socket took.
    bytes: u64,
}

/// Returns true if a connection to this disk starts with sends in place.
pub(super) fn begins(disk: &Disk, link: &Link, ring_can: bool) -> bool {
    ring_can
        && link.kind() == LinkKind::Tcp
        && match disk.delivery.path {
            DataPath::ZeroCopy => true,
            DataPath::Auto => !is_same_host(link),
            DataPath::Staged | DataPath::Sendfile => false,
        }
}

impl Core {
    /// Hands the front of a lane's queue to the ring, if it is to be sent in place.
    pub(super) fn send_in_place(&mut self, index: usize) {
        let Some(Some(lane)) = self.nbd.lanes.get_mut(index) else { return };
        let link: Arc<Link> = lane.link.clone();
        let Some(socket) = link.fd() else { return };
        let Some(bytes) = lane.out.take_in_place() else { return };
        let in_place = &mut self.nbd.in_place;
        let token = in_place.next;
        in_place.next += 1;
        let owner = lane.owner;
        if let Err(error) = self.reactor.send(token, socket, link.clone(), bytes) {
            complaints::warn(format_args!("giving up sending in place: {error}"));
            lane.out.returned(0, &self.statistics.counters);
            lane.out.allow_in_place(false);
            return self.mark(index);
        }
        in_place.sends.insert(token, Send { lane: index, owner, bytes: 0 });
    }

    /// Handles the results of sends in place.
    pub(crate) fn finish_sends(&mut self) {
        if !self.reactor.has_sent() {
            return;
        }
        let mut told = std::mem::take(&mut self.nbd.in_place.told);
        self.reactor.take_sent(&mut told);
        for sent in told.drain(..) {
            let (Sent::Taken { token, .. } | Sent::Released { token, .. }) = &sent;
            let token = *token;
            let over = matches!(sent, Sent::Released { .. } | Sent::Taken { released: true, .. });
            let sends = &mut self.nbd.in_place.sends;
            let Some(send) = sends.get_mut(&token) else { continue };
            let (index, owner, bytes) = (send.lane, send.owner, send.bytes);
            if over {
                sends.remove(&token);
            } else if let Sent::Taken { result: Ok(count), .. } = &sent {
                send.bytes = *count as u64;
            }
            let Some(Some(lane)) = self.nbd.lanes.get_mut(index) else { continue };
            // The lane may have ended, and another one may have its index.
            if lane.owner != owner {
                continue;
            }
            let counters = &self.statistics.counters;
            match sent {
                Sent::Taken { result: Ok(count), released, .. } => {
                    lane.unreleased += if released { 0 } else { count as u64 };
                    Counters::add(&counters.bytes_sent_in_place, count as u64);
                    lane.took(count as u64, counters);
                }
                Sent::Taken { result: Err(error), .. } => {
                    lane.out.returned(0, counters);
                    match error.kind() {
                        std::io::ErrorKind::Interrupted => {}
                        // What the network refers to counts as locked memory (`RLIMIT_MEMLOCK`), also that of slow
                        // clients, unless the server is privileged.
                        std::io::ErrorKind::OutOfMemory => lane.give_up_in_place(counters),
                        std::io::ErrorKind::WouldBlock => {
                            self.wait_for_room(index);
                            continue;
                        }
                        // TCP in this kernel does not support it.
                        std::io::ErrorKind::Unsupported => lane.out.allow_in_place(false),
                        _ => {
                            self.close_nbd(index, &error);
                            continue;
                        }
                    }
                }
                Sent::Released { copied, .. } => {
                    lane.unreleased -= bytes;
                    if copied {
                        lane.copied_nevertheless(counters);
                    }
                }
            }
            self.mark(index);
        }
        self.nbd.in_place.told = told;
    }
}

impl NbdLane {
    fn took(&mut self, count: u64, counters: &Counters) {
        self.out.returned(count, counters);
        self.moved = std::time::Instant::now();
    }

    fn copied_nevertheless(&mut self, counters: &Counters) {
        Counters::add(&counters.sends_in_place_copied, 1);
        if let Phase::Serving(_, disk) = &self.phase
            && disk.delivery.path == DataPath::Auto
        {
            self.give_up_in_place(counters);
        }
    }

    fn give_up_in_place(&mut self, counters: &Counters) {
        Counters::add(&counters.sends_in_place_given_up, 1);
        self.out.allow_in_place(false);
    }
}
