//! The core of a client: slots, sending, and whoever waits reads for all.
//!
//! A request takes a slot, is sent by its own thread, and is completed by the leader: the one
//! waiting thread that receives. When the leader's own request is answered it hands over to
//! another waiting thread. Locks are held for moments only, never while waiting.

mod completing;
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
use outcome::Look;
pub(crate) use outcome::{Checked, Outcome};
use outgoing::{Messages, Out, Outgoing};
use parking_lot::{Condvar, Mutex};
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
use towline_wire::limits::{SLOTS_MAX, TRANSFER_BYTES_MAX};
use towline_wire::{Errno, Reply, Request};

/// Parts of messages that one system call sends.
const GATHER: usize = 64;
/// Bytes read at once; bulk goes straight to its place.
const SCRATCH_BYTES: usize = 96 * 1024;

type Finished = Result<(Outcome, Vec<u8>), Error>;

/// Names a request under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SlotRef {
    slot: u16,
    sequence: u32,
}

enum Status {
    Free,
    Waiting,
    /// Its outcome is there, or there will be none.
    Done(Result<(), Error>),
    /// Done, and its lent data is being copied.
    Copying,
}

struct Slot {
    sequence: u32,
    /// Later requests have larger ones: sent again, they keep their order.
    order: u64,
    status: Status,
    /// The memory of its outcomes, one after the other.
    outcome: Outcome,
    /// Header, body and short inline payload, to be sent again when the lane is lost.
    message: Arc<Vec<u8>>,
    /// The source follows the message.
    rides: bool,
    /// So much of the source follows the message, at most, when it is sent for the first time.
    ahead: usize,
    /// Parts of the source that wait to be sent: it must stay until they are.
    sending: usize,
    /// Sent behind the message or under grants.
    source: Buffer,
    target: Buffer,
    /// More may be read than rides inline, and goes straight to its place. Listings are short for
    /// the most part, and are received by one system call, with their header.
    bulk: bool,
    received: usize,
    landed: u64,
    /// Bytes of the source that the server has asked for, from the first one on.
    granted: u64,
    checksums: Vec<Checked>,
    /// First byte of the target that stands for one that could not be read, and why.
    failed: Option<(u64, Errno)>,
    /// It counts as a change: see `Options::changes`.
    alters: bool,
    /// What it locks or unlocks of which file. Noted in the moment in which it is answered: who asked may
    /// come to it only when another lane was lost, and all locked again that was known.
    lock: Option<(u64, Lock)>,
    /// What it closes. That is known until it is answered: what was begun before may have to be asked again of another server.
    closes: Option<Closing>,
    /// What its last reply lent, on the present lane, was not given back.
    indebted: bool,
    /// Nobody wants the answer any more.
    abandoned: bool,
    /// The server was asked to give it up, and is asked again when it is sent again.
    cancelled: bool,
    /// Where its time goes, if this is one of those that are measured.
    stamps: Option<Stamps>,
    /// Threads asleep until it is over.
    waiters: SmallVec<[Arc<Condvar>; 1]>,
    waker: Option<Waker>,
}

/// What a leader wants to happen.
#[derive(Clone, Copy)]
enum Wait<'a> {
    /// Only what is possible at once.
    No,
    /// One of these requests to be over, or (none) a slot to be free.
    For(Option<&'a [SlotRef]>),
    /// An answer to what was just sent, by whoever has led since before: so it cannot be there yet, and nothing waits to be sent.
    ForNew,
}

pub(crate) struct State {
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Requests so far.
    requested: u64,
    /// Results that were not taken yet, and whose slots were needed.
    parked: HashMap<SlotRef, Finished>,
    /// `None` while somebody leads, who has it.
    receiving: Option<Box<Receiving>>,
    link: Arc<Link>,
    /// Counts lanes: see [`Messages::lane`]. Changed with that of [`Outgoing`], while both are locked.
    lane: u64,
    /// Wakers of requests that are over. They are woken where nothing is locked: they run what they like.
    woken: Vec<Waker>,
    /// Messages have been queued, to leave with others: who waits for an answer looks for them.
    queues: bool,
    /// Its lanes go as near as they may.
    near: bool,
    session: u64,
    secret: u64,
    boot_epoch: u32,
    /// Why nothing works any more.
    pub(crate) dead: Option<Error>,
    pub(crate) files: OpenFiles,
    pub(crate) disks: OpenDisks,
    pub(crate) closing: Vec<Closing>,
    /// Changes of disks that were not answered: slot, disk, range.
    changes: Vec<(u16, u32, Range<u64>)>,
    /// Unanswered requests with room for more than rides inline.
    bulk: usize,
    /// Threads asleep until a request of theirs is answered.
    sleepers: usize,
    times: Times,
    /// What the server lends parts of on the present lane; `None` where nothing can be borrowed.
    memories: Option<Memories>,
    /// Free slots that are indebted.
    debts: usize,
    /// How many bytes each of the next long writes may send at once, and until when, by the coarse clock.
    leaves: VecDeque<(usize, u64)>,
}

/// What only the leader uses.
struct Receiving {
    input: Input,
    scratch: Vec<u8>,
    spin: Spin,
    link: Arc<Link>,
    /// Bulk was expected when the lead was taken.
    bulk: bool,
}

pub(crate) struct Core {
    transport: Transport,
    options: Options,
    client: u64,
    /// User and group that requests name.
    identity: [AtomicU32; 2],
    pub(crate) state: Mutex<State>,
    /// Held while sending, so that messages stay whole. Locked before the state, never after it.
    out: Mutex<Outgoing>,
    slot_free: Condvar,
    counters: Counters,
    pub(crate) listings: Listings,
    /// Number of the first event that was not passed on; zero before there was any number.
    pub(crate) seen: AtomicU64,
}

impl Core {
    pub(crate) fn connect(transport: &Transport, options: Options) -> Result<Arc<Self>, Error> {
        let mut random = [0; 8];
        let _ = rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty());
        let client = u64::from_le_bytes(random);
        let near = options.nearer_after == 0 || !may_move(transport);
        let greeted = greet(transport, near, client, (0, 0), &options);
        let Greeted { link, welcome } = greeted.map_err(|failure| match failure {
            Failure::Final(error) => error,
            Failure::Io(error) => connection_error(transport, "cannot connect", &error),
        })?;
        let slots = usize::from(welcome.slots).clamp(2, SLOTS_MAX);
        let memories = Memories::of(&link, options.hide);
        let link = Arc::new(link);
        let receiving = Receiving {
            input: Input::default(),
            scratch: vec![0; SCRATCH_BYTES],
            spin: Spin::new(Duration::from_micros(options.spin_us.into())),
            link: link.clone(),
            bulk: false,
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
            leaves: VecDeque::new(),
            link,
            lane: 0,
            woken: Vec::new(),
            queues: false,
            near,
            session: welcome.session,
            secret: welcome.secret,
            boot_epoch: welcome.boot_epoch,
            dead: None,
            files: OpenFiles::default(),
            disks: OpenDisks::default(),
            closing: Vec::new(),
            changes: Vec::new(),
            bulk: 0,
            sleepers: 0,
            times: Times::default(),
        };
        Ok(Arc::new(Self {
            transport: transport.clone(),
            options,
            client,
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
        }))
    }

    pub(crate) fn remember(
        &self,
        handle: u64,
        base: Option<(u64, &[u8])>,
        export: &[u8],
        flags: u32,
        inode: u64,
    ) {
        self.state.lock().files.remember(handle, base, export, flags, inode);
    }

    pub(crate) fn remember_path(
        &self,
        handle: u64,
        export: &[u8],
        path: &[u8],
        flags: u32,
        inode: u64,
    ) {
        self.state.lock().files.remember_path(handle, export, path, flags, inode);
    }

    pub(crate) fn boot_epoch(&self) -> u32 {
        self.state.lock().boot_epoch
    }

    /// Opens again what it knows of; what cannot be had is stale from then on.
    pub(crate) fn reclaim(self: &Arc<Self>) -> Result<(), Error> {
        let (mut files, epoch) = {
            let state = self.state.lock();
            (state.files.clone(), state.boot_epoch)
        };
        let mut lost = None;
        let reclaimed = files.reclaim(|requests| {
            match self.call(requests, &[], &mut []) {
                Err(error @ Error::Connection { .. }) => {
                    lost = Some(error);
                    Err(io::ErrorKind::NotConnected.into())
                }
                // Of another start of the server whoever connected again has had all already.
                _ if self.boot_epoch() != epoch => Err(io::ErrorKind::ConnectionReset.into()),
                asked => Ok(asked.is_ok_and(|outcome| outcome.single().is_ok())),
            }
        });
        if reclaimed.is_ok() {
            self.state.lock().files = files;
        }
        lost.map_or(Ok(()), Err)
    }

    pub(crate) fn forget(&self, handle: u64) {
        self.state.lock().files.forget(handle);
    }

    /// Sends a request and waits for its reply; data move from `source` and into `target`.
    pub(crate) fn call(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: &[u8],
        target: &mut [u8],
    ) -> Result<Outcome, Error> {
        let mut place = Outcome::default();
        self.call_looking(requests, source, target, &mut |outcome| outcome.move_to(&mut place))?;
        Ok(place)
    }

    /// [`Core::call`] of one that is made often: what its outcome says, which stays where it is. `read` uses nothing of the core.
    pub(crate) fn ask<T>(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: &[u8],
        target: &mut [u8],
        read: impl FnOnce(&Outcome) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (mut read, mut said) = (Some(read), None);
        self.call_looking(requests, source, target, &mut |outcome| {
            said = read.take().map(|read| read(outcome));
        })?;
        said.unwrap_or_else(|| Err(unexpected()))
    }

    #[allow(unsafe_code)]
    fn call_looking(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: &[u8],
        target: &mut [u8],
        look: Look<'_>,
    ) -> Result<(), Error> {
        // SAFETY: this function waits below until the request is over, also when it fails, and
        // uses neither buffer meanwhile.
        let (source, target) = unsafe { (Buffer::source(source), Buffer::target(target)) };
        self.exchange(requests, source, target, look)
    }

    /// Sends a request to be completed later.
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

    pub(crate) fn read(
        self: &Arc<Self>,
        handle: u64,
        target: &mut [u8],
        offset: u64,
    ) -> Result<usize, Error> {
        let mut done = 0;
        loop {
            let length = (target.len() - done).min(TRANSFER_BYTES_MAX);
            let request =
                Request::Read { handle, offset: offset + done as u64, length: length as u32 };
            let place = &mut target[done..done + length];
            let read = self.ask(&[request], &[], place, |outcome| {
                outcome.single()?;
                Ok(outcome.payload)
            });
            match read {
                Ok(count) => {
                    done += count;
                    if count < length || done == target.len() {
                        return Ok(done);
                    }
                }
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) fn write(
        self: &Arc<Self>,
        handle: u64,
        data: &[u8],
        offset: u64,
        flags: u32,
    ) -> Result<usize, Error> {
        let mut done = 0;
        loop {
            let length = (data.len() - done).min(TRANSFER_BYTES_MAX);
            let request = Request::Write {
                handle,
                offset: offset + done as u64,
                length: length as u32,
                flags,
            };
            let wrote =
                self.ask(&[request], &data[done..done + length], &mut [], |outcome| match outcome
                    .single()?
                {
                    Reply::Wrote { length: wrote, .. } if wrote as usize <= length => {
                        Ok(Some(wrote as usize))
                    }
                    _ => Ok(None),
                });
            let written = match wrote {
                Ok(Some(written)) => written,
                Ok(None) => return Err(unexpected()),
                Err(error) if done == 0 => return Err(error),
                Err(_) => return Ok(done),
            };
            done += written;
            if written < length || done == data.len() {
                return Ok(done);
            }
        }
    }

    /// Counts a change that is about to be made, or was made: see `Options::changes`.
    pub(super) fn count_change(&self) {
        if let Some(changes) = self.options.changes {
            changes.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Whether listings with attributes say which files have no extended ones.
    pub(crate) fn tells_xattrs(&self) -> bool {
        (self.options.tell_xattrs)()
    }

    /// The descriptor that becomes readable when there is something to receive.
    pub(crate) fn link(&self) -> Arc<Link> {
        self.state.lock().link.clone()
    }

    fn identity(&self) -> (u32, u32) {
        let [user, group] = &self.identity;
        (user.load(Ordering::Relaxed), group.load(Ordering::Relaxed))
    }

    pub(crate) fn act_as(&self, user: u32, group: u32) {
        self.identity[0].store(user, Ordering::Relaxed);
        self.identity[1].store(group, Ordering::Relaxed);
    }

    /// See [`crate::Options::hide`].
    pub(crate) fn hide(&self, fd: OwnedFd) -> io::Result<OwnedFd> {
        (self.options.hide)(fd)
    }

    /// Where the time of its requests went so far.
    pub(crate) fn times(&self) -> Times {
        self.state.lock().times
    }
}

/// A server, as in a URL.
fn server_of(transport: &Transport) -> String {
    Url { transport: transport.clone(), export: Vec::new(), path: Vec::new() }.to_string()
}

fn connection_error(transport: &Transport, what: &str, error: &io::Error) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::ConnectionRefused => "; no server listens there",
        io::ErrorKind::NotFound => "; there is no such socket",
        io::ErrorKind::UnexpectedEof => "; what listens there may be no Towline server",
        _ => "",
    };
    Error::Connection {
        server: server_of(transport),
        what: format!("{what}: {error}{hint}"),
        // What is not there is the socket, not the file that somebody asked for.
        errno: match Errno::of(error) {
            Errno::ENOENT | Errno::ENOTDIR => Errno::ECONNREFUSED,
            errno => errno,
        },
    }
}
