//! The core of a client: request slots, sending, and receiving by one waiting thread for all.
//!
//! A thread that makes a request takes a slot and sends the request itself. The leader, the one
//! waiting thread that receives, completes it. When the leader's own request is answered, it hands
//! the lead to another waiting thread. Locks are held only for moments and never while waiting,
//! except while everything is reopened after a restart of the server.

mod anew;
mod completing;
mod data;
mod outcome;
mod outgoing;
mod reconnect;
mod sending;
mod state;
#[cfg(test)]
mod tests;
mod waiting;

use crate::borrow::Memories;
use crate::convert::unexpected;
use crate::disks::{Closing, OpenDisks};
use crate::handshake::{Failure, Greeted, greet, may_move};
use crate::lent::Buffer;
use crate::listings::Listings;
use crate::operation::{Convert, Operation};
use crate::reclaim::OpenFiles;
use crate::times::{Stamps, Times};
use crate::{Error, Lock, Options, Transport, Url};
use anew::GivenUp;
use outcome::Look;
pub(crate) use outcome::{Checked, Outcome};
use outgoing::{Messages, Out, Outgoing};
use parking_lot::{Condvar, Mutex};
use reconnect::Outage;
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;
use towline_net::{Counters, Input, Link, Spin};
use towline_wire::limits::SLOTS_MAX;
use towline_wire::{Errno, Request};

/// Most parts of messages that one system call sends.
const GATHER: usize = 64;
/// Most bytes received at once into the scratch buffer; bulk data goes straight to its target.
const SCRATCH_BYTES: usize = 96 * 1024;

type Finished = Result<(Outcome, Vec<u8>), Error>;

/// Identifies a request under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SlotRef {
    slot: u16,
    sequence: u32,
}

enum Status {
    Free,
    Waiting,
    /// Answered, or ended with an error.
    Done(Result<(), Error>),
    /// Done, while its lent data is being copied.
    Copying,
}

struct Slot {
    sequence: u32,
    /// Increases from request to request, so that resent requests keep their order.
    order: u64,
    status: Status,
    /// The outcome of its request; its memory is reused for the next one.
    outcome: Outcome,
    /// Header, body and short inline payload, kept to be resent if the lane is lost.
    message: Arc<Vec<u8>>,
    /// The whole source is sent behind the message, as inline payload.
    rides: bool,
    /// Most bytes of the source that follow the message without a grant when it is first sent.
    ahead: usize,
    /// Parts of the source that are queued or being sent. The source must stay until they have
    /// left.
    sending: usize,
    /// It may have been sent on a lane before this one, to a server that may have begun it.
    was_sent: bool,
    /// Data to send, behind the message or under grants.
    source: Buffer,
    target: Buffer,
    /// More data may arrive than fits inline, and goes straight to the target. Not set for listings
    /// and events: most are short, and one system call receives them with their header.
    bulk: bool,
    received: usize,
    landed: u64,
    /// End of the part of the source that the server has granted so far.
    granted: u64,
    checksums: Vec<Checked>,
    /// Offset of the first byte of the target that could not be read, and the error.
    failed: Option<(u64, Errno)>,
    /// Counts as a change, see `Options::changes`.
    alters: bool,
    /// The file and lock of a lock request. The client remembers the lock when the answer arrives:
    /// the caller may take the answer only after another lane was lost and all known locks were
    /// taken again.
    lock: Option<(u64, Lock)>,
    /// It renames something. As with locks, the client remembers that when the answer arrives.
    renames: bool,
    /// What it closes. The file, disk or locks stay known until the answer arrives: earlier requests
    /// may have to be resent to a restarted server.
    closes: Option<Closing>,
    /// It opens a file and leaves it open.
    opens: bool,
    /// Its last operation closes the file that it opens.
    closes_opened: bool,
    /// Data that its last reply lent on the current lane has not been given back.
    indebted: bool,
    /// Nobody wants the answer any more.
    abandoned: bool,
    /// The server was asked to give it up; a new lane repeats that after resending the request.
    cancelled: bool,
    /// Timing, if this request is measured.
    stamps: Option<Stamps>,
    /// Condition variables of threads that sleep until it is over.
    waiters: SmallVec<[Arc<Condvar>; 1]>,
    waker: Option<Waker>,
}

/// What the leader waits for.
#[derive(Clone, Copy)]
enum Wait<'a> {
    /// Nothing: it only does what is possible at once, but replaces a lost lane.
    No,
    /// Nothing, and leaves a lost lane to others.
    Never,
    /// Until one of these requests is over or, with `None`, until there is room for another
    /// request.
    For(Option<&'a [SlotRef]>),
    /// The answer to the request that this thread has just sent as the leader: nobody can have
    /// received it yet, and nothing is queued.
    ForNew,
}

pub(crate) struct State {
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Number of requests so far.
    requested: u64,
    /// Results not taken yet, whose slots were needed for other requests.
    parked: HashMap<SlotRef, Finished>,
    /// `None` while a thread leads: the leader has it.
    receiving: Option<Box<Receiving>>,
    link: Arc<Link>,
    /// Counts lanes, see [`Messages::lane`]. Changes together with the number in [`Outgoing`], with
    /// both locked.
    lane: u64,
    /// Wakers of requests that are over. They are called with nothing locked, since they may run
    /// any code.
    woken: Vec<Waker>,
    /// Set once messages have been queued to leave with others: from then on, threads that wait for
    /// an answer send what is queued.
    queues: bool,
    /// The server said that it has shut down, so the lane ends.
    shut_down: bool,
    /// Lanes use the nearest link that the transport allows, shared memory if possible.
    near: bool,
    /// The processor that the server was told last, on the lane with this number.
    told: Option<(u64, usize)>,
    session: u64,
    secret: u64,
    boot_epoch: u32,
    /// Set while there is no session, see [`anew`].
    pub(crate) given_up: Option<GivenUp>,
    pub(crate) files: OpenFiles,
    pub(crate) disks: OpenDisks,
    pub(crate) closing: Vec<Closing>,
    /// Unanswered changes of disks: slot, disk, range.
    changes: Vec<(u16, u32, Range<u64>)>,
    /// Number of unanswered requests with [`Slot::bulk`] set.
    bulk: usize,
    /// Threads that sleep until one of their requests is answered.
    sleepers: usize,
    times: Times,
    /// The server's memory that data is lent from on the current lane; `None` if nothing can be
    /// borrowed.
    memories: Option<Memories>,
    /// Number of free slots that are indebted.
    debts: usize,
    /// Permissions to send data ahead of a grant, one for each long write: most bytes, and the
    /// deadline in milliseconds of the coarse clock.
    leaves: VecDeque<(usize, u64)>,
}

/// What only the leader uses.
struct Receiving {
    input: Input,
    scratch: Vec<u8>,
    spin: Spin,
    link: Arc<Link>,
    /// Bulk data was expected when the lead was taken.
    bulk: bool,
    /// A lane was lost, and nothing has arrived since over the one that replaced it.
    outage: Option<Outage>,
    /// New sessions in which not everything could be reopened, to be ended.
    begun: Vec<(u64, u64)>,
}

pub(crate) struct Core {
    transport: Transport,
    options: Options,
    client: u64,
    /// The user who has made the lane, see [`Options::connects_as`].
    connected_as: AtomicU32,
    /// User and group sent with requests.
    identity: [AtomicU32; 2],
    pub(crate) state: Mutex<State>,
    /// Locked while sending, so that messages stay whole. Locked before the state, never after it.
    out: Mutex<Outgoing>,
    slot_free: Condvar,
    counters: Counters,
    pub(crate) listings: Listings,
    /// Number of the first event not passed on yet; zero until a number is known.
    pub(crate) seen: AtomicU64,
}

impl Core {
    pub(crate) fn connect(transport: &Transport, options: Options) -> Result<Arc<Self>, Error> {
        let client = client_number();
        let near = options.nearer_after == 0 || !may_move(transport);
        let greeted = begin(transport, near, client, &options)?;
        Ok(Self::over(greeted, transport, near, client, options))
    }

    /// Goes on with a session that has just begun.
    pub(crate) fn over(
        Greeted { link, welcome }: Greeted,
        transport: &Transport,
        near: bool,
        client: u64,
        options: Options,
    ) -> Arc<Self> {
        let slots = usize::from(welcome.slots).clamp(2, SLOTS_MAX);
        let memories = Memories::of(&link, options.hide);
        let link = Arc::new(link);
        let receiving = Receiving {
            input: Input::default(),
            scratch: vec![0; SCRATCH_BYTES],
            spin: Spin::new(Duration::from_micros(options.spin_us.into())),
            link: link.clone(),
            bulk: false,
            outage: None,
            begun: Vec::new(),
        };
        let out = Outgoing::over(link.clone());
        let state = State {
            slots: (0..slots - 1).map(|_| Slot::fresh()).collect(),
            free: (0..slots as u16 - 1).rev().collect(),
            requested: 0,
            parked: HashMap::new(),
            receiving: Some(Box::new(receiving)),
            memories,
            debts: 0,
            shut_down: false,
            leaves: VecDeque::new(),
            link,
            lane: 0,
            woken: Vec::new(),
            queues: false,
            near,
            told: None,
            session: welcome.session,
            secret: welcome.secret,
            boot_epoch: welcome.boot_epoch,
            given_up: None,
            files: OpenFiles::default(),
            disks: OpenDisks::default(),
            closing: Vec::new(),
            changes: Vec::new(),
            bulk: 0,
            sleepers: 0,
            times: Times::default(),
        };
        let connected_as = AtomicU32::new((options.connects_as)());
        Arc::new(Self {
            transport: transport.clone(),
            options,
            client,
            connected_as,
            identity: [
                AtomicU32::new(rustix::process::geteuid().as_raw()),
                AtomicU32::new(rustix::process::getegid().as_raw()),
            ],
            state: Mutex::new(state),
            out: Mutex::new(out),
            slot_free: Condvar::new(),
            counters: Counters::default(),
            listings: Listings::default(),
            seen: AtomicU64::new(0),
        })
    }

    pub(crate) fn remember(
        &self,
        handle: u64,
        base: Option<(u64, &[u8])>,
        export: &[u8],
        flags: u32,
        inode: u64,
    ) {
        self.state.lock().files.remember(handle, base, export, flags, inode, self.identity());
    }

    pub(crate) fn remember_path(
        &self,
        handle: u64,
        export: &[u8],
        path: &[u8],
        flags: u32,
        inode: u64,
    ) {
        let identity = self.identity();
        self.state.lock().files.remember_path(handle, export, path, flags, inode, identity);
    }

    pub(crate) fn boot_epoch(&self) -> u32 {
        self.state.lock().boot_epoch
    }

    /// Reopens the known files; those that cannot be reopened are stale from then on.
    pub(crate) fn reclaim(self: &Arc<Self>) -> Result<(), Error> {
        let (mut files, epoch) = {
            let state = self.state.lock();
            (state.files.clone(), state.boot_epoch)
        };
        let mut lost = None;
        // The client has acted as nobody else yet.
        let reclaimed = files.reclaim(self.options.place_of, &[], |_, requests| {
            match self.call(requests, &[], &mut []) {
                Err(error @ Error::Connection { .. }) => {
                    lost = Some(error);
                    Err(io::ErrorKind::NotConnected.into())
                }
                // If the server has restarted again, the thread that reconnected has reopened
                // everything.
                _ if self.boot_epoch() != epoch => Err(io::ErrorKind::ConnectionReset.into()),
                asked => Ok(asked.is_ok_and(|outcome| outcome.single().is_ok())),
            }
        });
        if reclaimed.is_ok() {
            // Other threads have opened, locked and closed files meanwhile.
            self.state.lock().files.lose(&files.stale);
        }
        lost.map_or(Ok(()), Err)
    }

    pub(crate) fn forget(&self, handle: u64) {
        self.state.lock().files.forget(handle);
    }

    /// Sends a request and waits for its reply. Data moves from `source` and into `target`.
    #[allow(unsafe_code)]
    pub(crate) fn call(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: &[u8],
        target: &mut [u8],
    ) -> Result<Outcome, Error> {
        let mut place = Outcome::default();
        // SAFETY: this waits until the request is over, and uses neither buffer meanwhile.
        let (source, target) = unsafe { (Buffer::source(source), Buffer::target(target)) };
        self.exchange(requests, source, target, &mut |outcome| outcome.move_to(&mut place))?;
        Ok(place)
    }

    /// [`Core::call`] for frequent requests: `read` sees the outcome in place, with the state
    /// locked, and must not use the core.
    #[allow(unsafe_code)]
    pub(crate) fn ask<T>(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: &[u8],
        target: &mut [u8],
        read: impl FnOnce(&Outcome) -> Result<T, Error>,
    ) -> Result<T, Error> {
        // SAFETY: this waits until the request is over, and uses neither buffer meanwhile.
        let (source, target) = unsafe { (Buffer::source(source), Buffer::target(target)) };
        self.ask_lent(requests, source, target, read)
    }

    /// [`Core::ask`] with buffers that may be lent: returns once the request is over, even if it fails.
    fn ask_lent<T>(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: Buffer,
        target: Buffer,
        read: impl FnOnce(&Outcome) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (mut read, mut said) = (Some(read), None);
        self.exchange(requests, source, target, &mut |outcome| {
            said = read.take().map(|read| read(outcome));
        })?;
        said.unwrap_or_else(|| Err(unexpected()))
    }

    /// Sends a request that is completed later.
    pub(crate) fn start<T>(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: Vec<u8>,
        target: Vec<u8>,
        convert: impl FnOnce(&Outcome, Vec<u8>) -> Result<T, Error> + Send + 'static,
    ) -> Result<Operation<T>, Error> {
        let (source, target) = (Buffer::Owned(source), Buffer::Owned(target));
        let coalesce = self.options.coalesce as usize;
        let slot = self.submit_if_room(requests, source, target, coalesce, true)?;
        let slot = slot.ok_or(Errno::EAGAIN)?;
        let convert: Convert<T> = Box::new(convert);
        Ok(Operation::new(self.clone(), slot, convert))
    }

    /// Counts a change that is about to be made or was made, see `Options::changes`.
    pub(super) fn count_change(&self) {
        if let Some(changes) = self.options.changes {
            changes.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Whether listings with attributes say which files have no extended attributes.
    pub(crate) fn tells_xattrs(&self) -> bool {
        (self.options.tell_xattrs)()
    }

    /// Fails if the session was given up.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.state.lock().given_up.as_ref().map_or(Ok(()), |given_up| Err(given_up.error.clone()))
    }

    /// The number of the current lane, which changes when a lost one is replaced.
    pub(crate) fn lane(&self) -> u64 {
        self.state.lock().lane
    }

    /// The link of the current lane.
    pub(crate) fn link(&self) -> Arc<Link> {
        self.state.lock().link.clone()
    }

    fn identity(&self) -> (u32, u32) {
        let [user, group] = &self.identity;
        (user.load(Ordering::Relaxed), group.load(Ordering::Relaxed))
    }

    pub(crate) fn connected_as(&self) -> u32 {
        self.connected_as.load(Ordering::Relaxed)
    }

    pub(crate) fn act_as(&self, user: u32, group: u32) {
        self.identity[0].store(user, Ordering::Relaxed);
        self.identity[1].store(group, Ordering::Relaxed);
    }

    /// See [`crate::Options::hide`].
    pub(crate) fn hide(&self, fd: OwnedFd) -> io::Result<OwnedFd> {
        (self.options.hide)(fd)
    }

    /// Where the time of its requests has gone so far.
    pub(crate) fn times(&self) -> Times {
        self.state.lock().times
    }
}

/// Connects and begins a session; `near` as for [`greet`].
pub(crate) fn begin(
    transport: &Transport,
    near: bool,
    client: u64,
    options: &Options,
) -> Result<Greeted, Error> {
    greet(transport, near, client, (0, 0), options).map_err(|failure| match failure {
        Failure::Final(error) => error,
        Failure::Io(error) => connection_error(transport, "cannot connect", &error),
    })
}

/// Returns a random number for a client.
pub(crate) fn client_number() -> u64 {
    let mut random = [0; 8];
    let _ = rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty());
    u64::from_le_bytes(random)
}

/// The server, as in a URL.
fn server_of(transport: &Transport) -> String {
    Url { transport: transport.clone(), export: Vec::new(), path: Vec::new() }.to_string()
}

fn connection_error(transport: &Transport, what: &str, error: &io::Error) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::ConnectionRefused => "; no server listens there",
        io::ErrorKind::NotFound => "; there is no such socket",
        io::ErrorKind::UnexpectedEof => "; it may not be a Towline server",
        _ => "",
    };
    Error::Connection {
        server: server_of(transport),
        what: format!("{what}: {error}{hint}"),
        errno: match Errno::of(error) {
            // A missing socket must not look like a missing file.
            Errno::ENOENT | Errno::ENOTDIR => Errno::ECONNREFUSED,
            // Our own limits of time come without a number.
            _ if error.kind() == io::ErrorKind::TimedOut => Errno::ETIMEDOUT,
            errno => errno,
        },
    }
}
