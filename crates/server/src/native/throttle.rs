//! Requests of clients that ask a disk for more than they may: they wait here.
//!
//! A request that waits was not begun. When its lane ends it is forgotten, and the client asks
//! again. A session has no more of them than slots, so their memory is bounded.

use super::Arrived;
use crate::core::Core;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use towline_block::{ClientKey, Meter};
use towline_net::{Link, LinkKind};
use towline_wire::{Header, Request};

/// Requests that wait, of all sessions of a core, in the order in which they came.
#[derive(Default)]
pub(crate) struct Throttled {
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    until: Instant,
    session: u64,
    header: Header,
    body: Vec<u8>,
    payload: Vec<u8>,
    at: Instant,
}

impl Throttled {
    /// When to look again.
    pub(crate) fn next_wake(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiting| waiting.until).min()
    }

    /// Forgets what waits of a session; yields the slots.
    pub(super) fn forget(&mut self, session: u64) -> Vec<u16> {
        let mut slots = Vec::new();
        self.waiting.retain(|waiting| {
            let goes = waiting.session == session;
            slots.extend(goes.then_some(waiting.header.slot));
            !goes
        });
        slots
    }
}

/// Bytes that a request moves.
fn bytes_of(request: &Request<'_>) -> u64 {
    match request {
        Request::DiskRead { length, .. } | Request::DiskWrite { length, .. } => (*length).into(),
        _ => 0,
    }
}

impl Core {
    /// True when a request has to wait, and then it does: the client has had what it may. Else it
    /// is charged.
    pub(super) fn throttle(&mut self, request: &Request<'_>, arrived: &Arrived<'_>) -> bool {
        let meter = self.meter(request, arrived.session);
        let Some(meter) = meter else { return false };
        let now = Instant::now();
        let Some(until) = meter.waits(now) else {
            meter.charge(now, bytes_of(request));
            return false;
        };
        self.throttled.waiting.push_back(Waiting {
            until,
            session: arrived.session,
            header: *arrived.header,
            body: arrived.body.to_vec(),
            payload: arrived.payload.to_vec(),
            at: arrived.at,
        });
        true
    }

    fn meter(&self, request: &Request<'_>, session: u64) -> Option<Arc<Meter>> {
        let disks = &self.sessions.get(&session)?.disks;
        disks.open.get(&request.disk()?)?.meter.clone()
    }

    /// Begins what has waited long enough.
    pub(crate) fn resume_throttled(&mut self) {
        let Some(wake) = self.throttled.next_wake() else { return };
        let now = Instant::now();
        if wake > now {
            return;
        }
        for waiting in std::mem::take(&mut self.throttled.waiting) {
            if waiting.until > now {
                self.throttled.waiting.push_back(waiting);
                continue;
            }
            let Waiting { session, header, body, payload, at, .. } = waiting;
            let lane = self.sessions.get(&session).and_then(|served| served.lane);
            let Some(lane) = lane.map(|lane| lane as usize) else { continue };
            let (header, body, payload) = (&header, &body[..], &payload[..]);
            // Looked at anew: it waits again when another one was faster.
            if let Err(error) =
                self.disk_request(&Arrived { session, lane, header, body, payload, at })
            {
                self.close_lane(lane, &io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }
}

/// Who is at the other end: for limits, which all connections of one client share.
pub(crate) fn client_of(link: &Link) -> Option<ClientKey> {
    use rustix::net::sockopt::socket_peercred;
    let fd = link.fd()?;
    match link.kind() {
        LinkKind::Tcp => {
            let address = SocketAddr::try_from(rustix::net::getpeername(fd).ok()??);
            Some(ClientKey::Machine(address.ok()?.ip().to_canonical()))
        }
        _ => Some(ClientKey::Process(socket_peercred(fd).ok()?.pid.as_raw_pid())),
    }
}
