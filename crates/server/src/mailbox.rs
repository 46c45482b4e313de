//! How other threads reach a core: a list of messages, and a doorbell that its event loop watches.

use crate::caller::Peer;
use crate::core::Moving;
use crate::elsewhere::Return;
use crate::ending::ProcessLocks;
use crate::groups::Groups;
use crate::nbd::NbdLane;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use towline_block::Status;
use towline_mem::PoolBuffer;
use towline_net::{Doorbell, Link};
use towline_session::BlockingResult;
use towline_session::locks::Waiter;
use towline_wire::Hello;

/// A message to a core.
pub(crate) enum Mail {
    /// Serve this new connection.
    Lane(Arc<Link>),
    /// Serve this new connection of an NBD client; the sender is dropped when the connection ends.
    NbdLane(Arc<Link>, Option<Sender<()>>),
    /// A transfer of a disk has finished.
    Transferred { token: u64, result: io::Result<usize>, buffer: PoolBuffer },
    /// A question to a disk is answered.
    Answered { token: u64, result: io::Result<Vec<Vec<Status>>> },
    /// This lane's hello names a session of this core; the peer, if it can be only itself.
    Join(Arc<Link>, Hello, Option<Peer>),
    /// Another core hands over this lane and its session.
    Moved(Box<Moving>),
    /// Another core hands over this connection of an NBD client.
    NbdMoved(Box<NbdLane>),
    /// Blocking work for this request has finished; `took` is in nanoseconds.
    Unblocked { session: u64, slot: u16, sequence: u32, result: BlockingResult, took: u64 },
    /// A request returns from a thread of a store that may hang.
    Returned(Return),
    /// This waiting request has its lock.
    Granted(Waiter),
    /// There may be events for this waiting request.
    Happened { session: u64, slot: u16, sequence: u32 },
    /// This request for a lock need no longer wait for clients from before a restart.
    AskAgain(Waiter),
    /// The process of this session has ended.
    Orphan { session: u64, locks: Arc<ProcessLocks> },
    /// The locks are released of the process whose end this request reports.
    LocksReleased { session: u64, slot: u16, sequence: u32 },
    /// The groups of a user were looked up.
    Groups(u32, io::Result<Groups>),
    /// Exports, and with them the limits of clients, may have changed.
    Reconfigured,
    /// Work for this core panicked, and no single request can be failed for it: its outcome is unknown.
    Broken,
    /// Notify clients, finish running requests, then end.
    Shutdown,
}

/// A core's mailbox. Clones share it.
#[derive(Clone)]
pub(crate) struct Mailbox {
    mail: Arc<Mutex<Vec<Mail>>>,
    pub(crate) bell: Doorbell,
}

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { mail: Arc::default(), bell: Doorbell::new(fd) })
    }

    pub(crate) fn send(&self, mail: Mail) {
        self.mail.lock().push(mail);
        self.bell.ring();
    }

    pub(crate) fn take(&self) -> Vec<Mail> {
        std::mem::take(&mut *self.mail.lock())
    }
}
