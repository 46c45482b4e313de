//! How other threads reach a core: a list of messages and a bell that its event loop hears.

use crate::elsewhere::Return;
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

/// Message to a core.
pub(crate) enum Mail {
    /// Serve this new connection.
    Lane(Arc<Link>),
    /// Serve this new connection of an NBD client; the sender is dropped when it is over.
    NbdLane(Arc<Link>, Option<Sender<()>>),
    /// A transfer of a disk is over.
    Transferred { token: u64, result: io::Result<usize>, buffer: PoolBuffer },
    /// What a disk was asked is answered.
    Answered { token: u64, result: io::Result<Vec<Vec<Status>>> },
    /// This lane's hello names a session of yours; user and group of a local peer.
    Join(Arc<Link>, Hello, Option<(u32, u32)>),
    /// Blocking work of this session's slot is done; nanoseconds it took.
    Unblocked { session: u64, slot: u16, sequence: u32, result: BlockingResult, took: u64 },
    /// A request comes back from a thread of a store that may hang.
    Returned(Return),
    /// This waiting request has its lock.
    Granted(Waiter),
    /// Something has happened that this waiting request may be told of.
    Happened { session: u64, slot: u16, sequence: u32 },
    /// This request for a lock need not wait for clients from before a restart any longer.
    AskAgain(Waiter),
    /// Clients may ask for more than before, or for less.
    LimitsChanged,
    /// Work for this core panicked where it stands for no request of its own: nothing more is known of it.
    Broken,
    /// Tell clients, finish what runs, end.
    Shutdown,
}

/// A core's mailbox. Cloning shares it.
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
