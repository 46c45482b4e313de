//! Connections to far servers that are made before processes need them. A process that gets one sends its first
//! request two round trips earlier (`preload/remote/sessions.rs`).
//!
//! The first connection is made while the keeper makes its own. There are more once a second process has asked.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use towline_client::{Client, Connection, Options, Transport};
use towline_instance::State;
use towline_instance::ready::{Stock, Want};
use towline_net::{Wait, peer_closed, peer_credentials, send_descriptors};

/// A far server always takes longer than this for a round trip. Otherwise asking for a connection takes as long.
const FAR: Duration = Duration::from_micros(200);
/// So does a tunnel that begins on this machine, where round trips may take long only because it is busy.
const TUNNEL: Duration = Duration::from_millis(5);
/// Number of connections that are ready or being made, once a second process has asked: at first, and at most.
const FEW: usize = 2;
const MOST: usize = 16;
/// What nobody has asked for after this time is closed, but for a few.
const UNUSED: Duration = Duration::from_secs(5);
/// How long the end of a run waits for connections that are being made.
const ENDING: Duration = Duration::from_secs(1);
/// Bytes of the stack of a thread that connects.
const STACK_BYTES: usize = 256 << 10;

/// The connections to a server.
pub(super) struct Ready {
    transport: Transport,
    options: Options,
    state: Arc<State>,
    /// The number of the server's first mount.
    mount: usize,
    /// [`FAR`] or [`TUNNEL`].
    far: Duration,
    held: Mutex<Held>,
    changed: Condvar,
}

struct Held {
    stage: Stage,
    connections: Vec<Connection>,
    /// How many are being made.
    under_way: usize,
    /// How many there are to be, ready or under way. Zero until a second process has asked.
    wanted: usize,
    /// When a process has asked last.
    asked: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The keeper connects.
    Meeting,
    /// The server is far, and the keeper is there to hand out connections.
    Far,
    /// There are to be no connections, or no more.
    Over,
}

impl Ready {
    /// To be called when the keeper is about to connect to a server: if that takes long, connects once more
    /// meanwhile. `None` where connecting is always fast.
    pub(super) fn start(
        transport: &Transport,
        family: u64,
        state: &Arc<State>,
        mount: usize,
    ) -> Option<Arc<Self>> {
        let (Transport::Tcp(host, _) | Transport::Nearest(host, _)) = transport else {
            return None;
        };
        let is_here = host == "localhost"
            || host.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback());
        let mut options = Options::default();
        options.family = family;
        let held = Held {
            stage: Stage::Meeting,
            connections: Vec::new(),
            under_way: 0,
            wanted: 0,
            asked: Instant::now(),
        };
        let ready = Arc::new(Self {
            transport: transport.clone(),
            options,
            state: Arc::clone(state),
            mount,
            far: if is_here { TUNNEL } else { FAR },
            held: Mutex::new(held),
            changed: Condvar::new(),
        });
        if !is_here {
            ready.start_one(&mut ready.held());
        }
        Some(ready)
    }

    /// Starts to make a connection. Returns false if there can be no thread.
    fn start_one(self: &Arc<Self>, held: &mut Held) -> bool {
        let ready = Arc::clone(self);
        let thread = std::thread::Builder::new().name("ready".to_owned()).stack_size(STACK_BYTES);
        let is_started = thread.spawn(move || ready.make()).is_ok();
        held.under_way += usize::from(is_started);
        is_started
    }

    /// To be called when the keeper has connected, and after its first request; they took this time.
    pub(super) fn note(&self, took: Duration) {
        let mut held = self.held();
        held.judge(took, self.far);
        self.tell(&held);
    }

    /// Returns true for a mount of this server, by the number of the server's first mount.
    pub(super) fn is_of(&self, mount: u32) -> bool {
        self.mount == mount as usize
    }

    /// Answers a process over its socket. The keeper's `client` tells the server which process has got the session:
    /// before the end of that process, which it also reports.
    pub(super) fn answer(self: &Arc<Self>, client: &Client, want: Want, socket: &OwnedFd) {
        // On its own machine, a server knows a client by the user that has connected.
        let own = rustix::process::geteuid().as_raw();
        if peer_credentials(socket.as_fd()).is_ok_and(|peer| peer.uid == own)
            && let Some(connection) = self.take(!peer_closed(socket.as_fd()))
        {
            let _ = client.glance(); // makes room for this request; whoever uses the server's files is told
            let is_sent = client.hand_over(&connection, want.process)
                && connection.to_parts().is_some_and(|(bytes, fd)| {
                    send_descriptors(socket, &bytes, &[fd], Wait::No).is_ok()
                });
            // Otherwise the connection is the process's only from here on, and ends with it.
            if !is_sent {
                connection.close();
            }
        }
    }

    /// Takes a connection out for a process if it `waits` for one, and has others made where that pays.
    fn take(self: &Arc<Self>, waits: bool) -> Option<Connection> {
        let mut held = self.held();
        held.asked = Instant::now();
        let mut found = None;
        while waits && found.is_none() && !held.connections.is_empty() {
            found = held.connections.pop().filter(|connection| !connection.is_lost());
        }
        if found.is_none() {
            held.wanted = (held.wanted + 1).clamp(FEW, MOST);
        }
        while held.stage == Stage::Far && held.connections.len() + held.under_way < held.wanted {
            if !self.start_one(&mut held) {
                break;
            }
        }
        self.tell(&held);
        found
    }

    /// Makes a connection that is under way; the first one if the keeper takes long to make its own.
    fn make(&self) {
        let is_meeting = |held: &mut Held| held.stage == Stage::Meeting;
        let waited = self.changed.wait_timeout_while(self.held(), self.far, is_meeting);
        let is_over = waited.unwrap_or_else(PoisonError::into_inner).0.stage == Stage::Over;
        let began = Instant::now();
        // Whoever needs one finds out by itself why it cannot be had.
        let made =
            if is_over { None } else { Connection::begin(&self.transport, &self.options).ok() };
        let took = began.elapsed();
        let mut held = self.held();
        if let Some(connection) = made {
            held.connections.push(connection);
            held.judge(took, self.far);
        }
        held.under_way -= 1;
        self.tell(&held);
    }

    /// Closes what nobody has asked for.
    pub(super) fn tidy(&self) {
        let mut held = self.held();
        if held.asked.elapsed() >= UNUSED {
            held.wanted = held.wanted.min(FEW);
            held.connections.retain(|connection| !connection.is_lost());
            let kept = held.wanted.min(held.connections.len());
            held.connections.drain(kept..).for_each(Connection::close);
            self.tell(&held);
        }
    }

    /// Returns true if there may be something to close later.
    pub(super) fn has_surplus(&self) -> bool {
        let held = self.held();
        held.connections.len() + held.under_way > held.wanted.min(FEW)
    }

    /// Ends all sessions that no process has got: the run's files stay open as long as one is left.
    pub(super) fn stop(&self) {
        let mut held = self.held();
        held.end();
        self.tell(&held);
        let is_under_way = |held: &mut Held| held.under_way > 0;
        drop(self.changed.wait_timeout_while(held, ENDING, is_under_way));
    }

    /// Tells the processes what there is.
    fn tell(&self, held: &Held) {
        let stock = match held.stage {
            Stage::Far => Stock::Some(held.connections.len() as u32),
            Stage::Meeting | Stage::Over => Stock::Never,
        };
        self.state.set_stock(self.mount, stock);
        self.changed.notify_all();
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// Notes how long it took to connect, or to answer a request. A server that is near may be slow for once, but one
    /// that is far is never fast.
    fn judge(&mut self, took: Duration, far: Duration) {
        match self.stage {
            _ if took <= far => self.end(),
            Stage::Meeting => self.stage = Stage::Far,
            Stage::Far => {}
            Stage::Over => self.end(),
        }
    }

    fn end(&mut self) {
        self.stage = Stage::Over;
        self.connections.drain(..).for_each(Connection::close);
    }
}
