//! The core of a client: slots, sending, and whoever waits reads for all.
//!
//! A request takes a slot, is sent by its own thread, and is completed by the leader: the one
//! waiting thread that receives. When the leader's own request is answered it hands over to
//! another waiting thread. Locks are held for moments only, never while waiting.

use crate::borrow::{Borrowed, Memories, Refusal};
use crate::handshake::{Failure, Greeted, greet};
use crate::lent::{Buffer, exclusive, shared};
use crate::operation::{Convert, Operation};
use crate::reclaim::{FirstUse, OpenFiles};
use crate::times::{Stamps, Times};
use crate::{Error, Lock, Options, Transport, Url};
use parking_lot::{Condvar, Mutex, MutexGuard};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};
use towline_net::{Counters, Incoming, Input, Link, Sink};
use towline_wire::codec::Field;
use towline_wire::header::{reply_flag, request_flag};
use towline_wire::hello::resumed;
use towline_wire::limits::{HEADER_BYTES, INLINE_BYTES_MAX, SLOTS_MAX, TRANSFER_BYTES_MAX};
use towline_wire::reply::parse_results;
use towline_wire::request::{encode_compound, parse_compound};
use towline_wire::{Errno, Header, Kind, ProtocolError, Reply, Request};

/// Parts of messages that one system call sends.
const GATHER: usize = 64;
/// Bytes read at once; bulk goes straight to its place.
const SCRATCH_BYTES: usize = 96 * 1024;

/// A reply.
#[derive(Debug)]
pub(crate) struct Outcome {
    results: Vec<u8>,
    /// Bytes of data received into the request's buffer.
    pub(crate) payload: usize,
    /// Data that is still to be copied there, by whoever takes the outcome.
    borrowed: Option<Borrowed>,
}

pub(crate) type Finished = Result<(Outcome, Vec<u8>), Error>;

impl Outcome {
    pub(crate) fn replies(&self) -> Result<Vec<Reply<'_>>, Error> {
        Ok(parse_results(&self.results)?)
    }

    /// The last result of a compound, or its failure.
    pub(crate) fn last(&self) -> Result<Reply<'_>, Error> {
        match self.replies()?.pop() {
            Some(Reply::Failed { errno }) => Err(Errno(errno).into()),
            Some(reply) => Ok(reply),
            None => Err(ProtocolError { what: "reply without results", at: 0 }.into()),
        }
    }

    /// The result of a request of one operation, or its failure.
    pub(crate) fn single(&self) -> Result<Reply<'_>, Error> {
        self.last()
    }
}

/// Names a request under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotRef {
    slot: u16,
    sequence: u32,
}

enum Status {
    Free,
    Waiting,
    Done(Result<Outcome, Error>),
    /// Done, and its lent data is being copied.
    Copying,
}

struct Slot {
    sequence: u32,
    status: Status,
    /// Header, body and inline payload, to be sent again when the lane is lost.
    message: Arc<Vec<u8>>,
    /// Granted parts of the source that wait to be sent: it must stay until they are.
    sending: usize,
    /// Sent under grants.
    source: Buffer,
    target: Buffer,
    received: usize,
    /// First byte of the target that stands for one that could not be read, and why.
    failed: Option<(u64, Errno)>,
    repeatable: bool,
    /// What its last reply lent, on the present lane, was not given back.
    indebted: bool,
    /// Nobody wants the answer any more.
    abandoned: bool,
    /// Where its time goes, if this is one of those that are measured.
    stamps: Option<Stamps>,
    waiter: Option<Arc<Condvar>>,
    waker: Option<Waker>,
}

impl Slot {
    /// True when more is read than rides inline.
    fn is_bulk(&self) -> bool {
        self.target.len() > INLINE_BYTES_MAX
    }
}

/// What a leader wants to happen.
#[derive(Clone, Copy)]
enum Wait<'a> {
    /// Only what is possible at once.
    No,
    /// One of these requests to be over, or (none) a slot to be free.
    For(Option<&'a [SlotRef]>),
}

struct State {
    slots: Vec<Slot>,
    free: Vec<u16>,
    leader: bool,
    link: Arc<Link>,
    session: u64,
    secret: u64,
    boot_epoch: u32,
    /// Why nothing works any more.
    dead: Option<Error>,
    files: OpenFiles,
    closing: Vec<u64>,
    /// Unanswered requests with room for more than rides inline.
    bulk: usize,
    /// Threads asleep until a request of theirs is answered.
    sleepers: usize,
    times: Times,
    /// What the server lends parts of on the present lane; `None` where nothing can be borrowed.
    memories: Option<Memories>,
    /// Free slots that are indebted.
    debts: usize,
}

impl State {
    /// Gives back what was lent to slots that nobody is using; those that are used again say so by
    /// that.
    fn releases(&mut self) -> Vec<Out> {
        if self.debts == 0 {
            return Vec::new();
        }
        self.debts = 0;
        let mut releases = Vec::new();
        for number in &self.free {
            let slot = &mut self.slots[usize::from(*number)];
            if std::mem::take(&mut slot.indebted) {
                let header = Header::new(Kind::Release, *number, slot.sequence);
                let bytes = Arc::new(header.to_bytes().to_vec());
                releases.push(Out::Message { bytes, done: 0 });
            }
        }
        releases
    }
}

impl State {
    fn is_over(&self, slots: Option<&[SlotRef]>) -> bool {
        let over = |slot: &SlotRef| {
            let found = &self.slots[usize::from(slot.slot)];
            found.sequence != slot.sequence
                || (found.sending == 0 && !matches!(found.status, Status::Waiting))
        };
        slots.map_or(!self.free.is_empty(), |slots| slots.iter().any(over))
    }
}

/// A message, or a part of a request's data, that waits to be sent.
enum Out {
    Message {
        bytes: Arc<Vec<u8>>,
        done: usize,
    },
    /// `source` stays valid until `Core::sent_data`, which the slot's `sending` counts.
    Data {
        slot: u16,
        head: [u8; HEADER_BYTES],
        source: *const [u8],
        done: usize,
    },
}

impl Out {
    /// What is still to be sent, in order.
    fn rest(&self) -> [&[u8]; 2] {
        let (parts, done): ([&[u8]; 2], usize) = match self {
            Self::Message { bytes, done } => ([bytes, &[]], *done),
            Self::Data { source, head, done, .. } => ([head, shared(*source)], *done),
        };
        let first = done.min(parts[0].len());
        [&parts[0][first..], &parts[1][done - first..]]
    }
}

// SAFETY: the pointer is to a buffer that is `Send` and outlives the message, see `Out::Data`.
#[allow(unsafe_code)]
unsafe impl Send for Out {}

struct Receiving {
    input: Input,
    scratch: Vec<u8>,
}

pub(crate) struct Core {
    transport: Transport,
    options: Options,
    client: u64,
    identity: (u32, u32),
    state: Mutex<State>,
    /// Held while sending, so that messages stay whole.
    out: Mutex<VecDeque<Out>>,
    receiving: Mutex<Receiving>,
    slot_free: Condvar,
    counters: Counters,
}

fn fresh_slot() -> Slot {
    Slot {
        sequence: 0,
        status: Status::Free,
        message: Arc::default(),
        sending: 0,
        source: Buffer::none(),
        target: Buffer::none(),
        received: 0,
        failed: None,
        repeatable: true,
        indebted: false,
        abandoned: false,
        stamps: None,
        waiter: None,
        waker: None,
    }
}

impl Core {
    pub(crate) fn connect(transport: &Transport, options: Options) -> Result<Arc<Self>, Error> {
        let mut random = [0; 8];
        let _ = rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty());
        let client = u64::from_le_bytes(random);
        let Greeted { link, welcome } =
            greet(transport, client, 0, 0, &options).map_err(|failure| match failure {
                Failure::Final(error) => error,
                Failure::Io(error) => connection_error(transport, "cannot connect", &error),
            })?;
        let slots = usize::from(welcome.slots).clamp(2, SLOTS_MAX);
        let state = State {
            slots: (0..slots - 1).map(|_| fresh_slot()).collect(),
            free: (0..slots as u16 - 1).rev().collect(),
            leader: false,
            memories: Memories::of(&link, options.descriptor_min),
            debts: 0,
            link: Arc::new(link),
            session: welcome.session,
            secret: welcome.secret,
            boot_epoch: welcome.boot_epoch,
            dead: None,
            files: OpenFiles::default(),
            closing: Vec::new(),
            bulk: 0,
            sleepers: 0,
            times: Times::default(),
        };
        Ok(Arc::new(Self {
            transport: transport.clone(),
            options,
            client,
            identity: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
            state: Mutex::new(state),
            out: Mutex::default(),
            receiving: Mutex::new(Receiving {
                input: Input::default(),
                scratch: vec![0; SCRATCH_BYTES],
            }),
            slot_free: Condvar::new(),
            counters: Counters::default(),
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

    pub(crate) fn remember_lock(&self, handle: u64, lock: &Lock) {
        self.state.lock().files.remember_lock(handle, lock);
    }

    pub(crate) fn forget(&self, handle: u64) {
        self.state.lock().files.forget(handle);
    }

    /// Sends a request and waits for its reply; data move from `source` and into `target`.
    #[allow(unsafe_code)]
    pub(crate) fn call(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: &[u8],
        target: &mut [u8],
    ) -> Result<Outcome, Error> {
        // SAFETY: this function waits below until the request is over, also when it fails, and
        // uses neither buffer meanwhile.
        let (source, target) = unsafe { (Buffer::source(source), Buffer::target(target)) };
        let slot = self.submit(requests, source, target, 0)?;
        self.wait(&slot).map(|(outcome, _)| outcome)
    }

    /// Sends a request to be completed later.
    pub(crate) fn start<T>(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: Vec<u8>,
        target: Vec<u8>,
        convert: impl FnOnce(Outcome, Vec<u8>) -> Result<T, Error> + Send + 'static,
    ) -> Result<Operation<T>, Error> {
        let (source, target) = (Buffer::Owned(source), Buffer::Owned(target));
        let slot = self.submit(requests, source, target, self.options.coalesce as usize)?;
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
            let outcome = match self.call(&[request], &[], &mut target[done..done + length]) {
                Ok(outcome) => outcome,
                Err(_) if done > 0 => return Ok(done),
                Err(error) => return Err(error),
            };
            if let Err(error) = outcome.single() {
                return if done > 0 { Ok(done) } else { Err(error) };
            }
            done += outcome.payload;
            if outcome.payload < length || done == target.len() {
                return Ok(done);
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
            let outcome = self.call(&[request], &data[done..done + length], &mut []);
            let written = match outcome.as_ref().map(Outcome::single) {
                Ok(Ok(Reply::Wrote { length, .. })) => length as usize,
                Ok(Ok(_)) => {
                    return Err(ProtocolError {
                        what: "result of another kind than asked for",
                        at: 0,
                    }
                    .into());
                }
                Ok(Err(error)) if done == 0 => return Err(error),
                Err(error) if done == 0 => return Err(error.clone()),
                _ => return Ok(done),
            };
            done += written;
            if written < length || done == data.len() {
                return Ok(done);
            }
        }
    }

    pub(crate) fn close_later(self: &Arc<Self>, handle: u64) {
        let mut state = self.state.lock();
        state.files.forget(handle);
        if state.dead.is_some() {
            return;
        }
        state.closing.push(handle);
        drop(state);
        self.close_pending();
    }

    /// Sends the closes that wait, as far as there are slots; nobody waits for their answers.
    fn close_pending(self: &Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            if state.free.is_empty() || state.dead.is_some() {
                return;
            }
            let Some(handle) = state.closing.pop() else { return };
            let slot =
                self.fill(&mut state, &[Request::Close { handle }], Buffer::none(), Buffer::none());
            let Some(slot) = slot else { return };
            let found = &mut state.slots[usize::from(slot.slot)];
            found.abandoned = true;
            let bytes = found.message.clone();
            drop(state);
            self.send(Out::Message { bytes, done: 0 });
        }
    }

    pub(crate) fn close(&self) {
        let bytes = Arc::new(Header::new(Kind::Goodbye, 0, 0).to_bytes().to_vec());
        self.out.lock().push_back(Out::Message { bytes, done: 0 });
        // The server ends the session by itself some time later if this does not reach it.
        let _ = self.flush();
    }

    /// Takes a free slot for a request; `None` when there is none.
    fn fill(
        &self,
        state: &mut State,
        requests: &[Request<'_>],
        source: Buffer,
        target: Buffer,
    ) -> Option<SlotRef> {
        let number = state.free.pop()?;
        let slot = &mut state.slots[usize::from(number)];
        // This request gives back what the last reply lent.
        state.debts -= usize::from(std::mem::take(&mut slot.indebted));
        slot.sequence = slot.sequence.wrapping_add(1);
        slot.stamps = Stamps::of(slot.sequence);
        let inline = source.len() <= INLINE_BYTES_MAX;
        let body = encode_compound(requests);
        let mut header = Header::new(Kind::Request, number, slot.sequence);
        header.body_bytes = body.len() as u32;
        (header.word_a, header.word_b) = self.identity;
        if state.memories.is_some() {
            header.flags = request_flag::BORROWS;
        }
        if inline {
            header.payload_bytes = source.len() as u32;
        } else {
            header.offset = source.len() as u64;
        }
        let mut message =
            Vec::with_capacity(HEADER_BYTES + body.len() + header.payload_bytes as usize);
        message.extend_from_slice(&header.to_bytes());
        message.extend_from_slice(&body);
        if inline {
            message.extend_from_slice(shared(source.bytes()));
        }
        slot.message = Arc::new(message);
        slot.sending = 0;
        slot.source = source;
        slot.target = target;
        state.bulk += usize::from(slot.is_bulk());
        slot.received = 0;
        slot.failed = None;
        slot.repeatable = requests.iter().all(Request::repeatable);
        slot.abandoned = false;
        slot.status = Status::Waiting;
        slot.waiter = None;
        slot.waker = None;
        Some(SlotRef { slot: number, sequence: slot.sequence })
    }

    /// Takes a slot and sends a request, unless fewer than `coalesce` messages wait to be sent: then
    /// it waits with them until somebody waits for an answer.
    fn submit(
        self: &Arc<Self>,
        requests: &[Request<'_>],
        source: Buffer,
        target: Buffer,
        coalesce: usize,
    ) -> Result<SlotRef, Error> {
        if source.len() > TRANSFER_BYTES_MAX || target.len() > TRANSFER_BYTES_MAX {
            return Err(Errno::EINVAL.into());
        }
        let mut state = self.state.lock();
        while state.free.is_empty() && state.dead.is_none() {
            state = self.advance(state, None);
        }
        if let Some(error) = &state.dead {
            return Err(error.clone());
        }
        if state.files.is_stale(requests) {
            return Err(Errno::ESTALE.into());
        }
        let slot = self.fill(&mut state, requests, source, target).ok_or(Errno::EAGAIN)?;
        let found = &state.slots[usize::from(slot.slot)];
        let (bytes, measured) = (found.message.clone(), found.stamps.is_some());
        let releases = state.releases();
        drop(state);
        if coalesce > 0 || !releases.is_empty() {
            let mut out = self.out.lock();
            out.extend(releases);
            if out.len() + 1 < coalesce {
                out.push_back(Out::Message { bytes, done: 0 });
                return Ok(slot);
            }
        }
        self.send(Out::Message { bytes, done: 0 });
        if measured
            && let Some(stamps) = &mut self.state.lock().slots[usize::from(slot.slot)].stamps
        {
            stamps.sent();
        }
        Ok(slot)
    }

    /// Queues a message and sends what the link takes. What it does not take now, and a broken
    /// link, are the business of whoever leads.
    fn send(&self, out: Out) {
        self.out.lock().push_back(out);
        if matches!(self.flush(), Ok(false)) {
            // Somebody may be leading who sleeps until something comes: wait here for room, while
            // the leader reads, so that both directions go on.
            while self.state.lock().leader {
                let limit = Some(Duration::from_millis(10));
                let waited = self.link().wait_writable(limit);
                if waited.is_err() || !matches!(self.flush(), Ok(false)) {
                    return;
                }
            }
        }
    }

    /// Sends from the queue without waiting; false when something is left.
    fn flush(&self) -> io::Result<bool> {
        let mut out = self.out.lock();
        // Looked up under the lock of the queue: what waits there belongs to the present link, and
        // would be lost on one that was replaced meanwhile.
        let link = self.link();
        while !out.is_empty() {
            let sent = {
                let parts: SmallVec<[&[u8]; 8]> =
                    out.iter().take(GATHER / 2).flat_map(Out::rest).collect();
                link.send(&parts, &self.counters)
            };
            match sent {
                Ok(count) => self.sent(&mut out, count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// So many bytes of the queue have left.
    fn sent(&self, out: &mut VecDeque<Out>, mut count: usize) {
        while let Some(front) = out.front_mut() {
            let rest: usize = front.rest().iter().map(|part| part.len()).sum();
            let (Out::Message { done, .. } | Out::Data { done, .. }) = &mut *front;
            if count < rest {
                *done += count;
                return;
            }
            count -= rest;
            if let Some(Out::Data { slot, .. }) = out.pop_front() {
                self.sent_data(slot);
            }
        }
    }

    /// A granted part is sent; a request that was answered meanwhile is over now.
    fn sent_data(&self, slot: u16) {
        let mut state = self.state.lock();
        let found = &mut state.slots[usize::from(slot)];
        found.sending = found.sending.saturating_sub(1);
        if found.sending == 0 {
            self.tell(&mut state, slot);
        }
    }

    /// Tells who waits that a request is over, or gives its slot back when nobody does.
    fn tell(&self, state: &mut State, slot: u16) {
        let found = &mut state.slots[usize::from(slot)];
        if found.sending > 0 || !matches!(found.status, Status::Done(_)) {
            return;
        }
        if found.abandoned {
            return self.release(state, slot);
        }
        if let Some(waiter) = found.waiter.take() {
            waiter.notify_one();
        }
        if let Some(waker) = found.waker.take() {
            waker.wake();
        }
    }

    /// Waits for one request.
    pub(crate) fn wait(self: &Arc<Self>, slot: &SlotRef) -> Finished {
        let mut state = self.state.lock();
        loop {
            if let Some(finished) = self.take(&mut state, slot) {
                drop(state);
                self.close_pending();
                return finished;
            }
            state = self.advance(state, Some(std::slice::from_ref(slot)));
        }
    }

    /// Waits for any of several; returns which one, by its place among them.
    pub(crate) fn wait_any<'a>(
        self: &Arc<Self>,
        slots: impl Iterator<Item = &'a SlotRef>,
    ) -> (usize, Finished) {
        let slots: Vec<SlotRef> = slots.cloned().collect();
        let mut state = self.state.lock();
        loop {
            for (index, slot) in slots.iter().enumerate() {
                if let Some(finished) = self.take(&mut state, slot) {
                    return (index, finished);
                }
            }
            state = self.advance(state, Some(&slots));
        }
    }

    /// Looks whether a request is over, making what progress is possible without waiting; if not,
    /// the waker is told when it is.
    pub(crate) fn poll(self: &Arc<Self>, slot: &SlotRef, waker: &Waker) -> Option<Finished> {
        let mut state = self.state.lock();
        if !state.leader {
            state = self.lead(state, Wait::No);
        }
        let finished = self.take(&mut state, slot);
        if finished.is_none() {
            state.slots[usize::from(slot.slot)].waker = Some(waker.clone());
        }
        finished
    }

    /// Receives what is there without waiting, for those who wait for [`Core::fd`] elsewhere.
    pub(crate) fn progress(self: &Arc<Self>) {
        let state = self.state.lock();
        if !state.leader {
            drop(self.lead(state, Wait::No));
        }
    }

    /// The descriptor that becomes readable when there is something to receive.
    pub(crate) fn link(&self) -> Arc<Link> {
        self.state.lock().link.clone()
    }

    /// Where the time of its requests went so far.
    pub(crate) fn times(&self) -> Times {
        self.state.lock().times
    }

    pub(crate) fn abandon(&self, slot: &SlotRef) {
        let mut state = self.state.lock();
        let found = &mut state.slots[usize::from(slot.slot)];
        if found.sequence != slot.sequence {
            return;
        }
        found.abandoned = true;
        self.tell(&mut state, slot.slot);
    }

    fn release(&self, state: &mut State, slot: u16) {
        let found = &mut state.slots[usize::from(slot)];
        found.status = Status::Free;
        found.source = Buffer::none();
        found.target = Buffer::none();
        state.debts += usize::from(found.indebted);
        state.free.push(slot);
        self.slot_free.notify_one();
    }

    /// Takes the outcome of a request that is over. Lent data is copied to its place here, by the
    /// thread that wants it, and the state is unlocked meanwhile.
    fn take(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, State>,
        slot: &SlotRef,
    ) -> Option<Finished> {
        let number = usize::from(slot.slot);
        let found = &mut state.slots[number];
        if found.sequence != slot.sequence
            || found.sending > 0
            || !matches!(found.status, Status::Done(_))
        {
            return None;
        }
        let Status::Done(mut result) = std::mem::replace(&mut found.status, Status::Copying) else {
            return None;
        };
        if let Ok(outcome) = &mut result
            && let Some(borrowed) = outcome.borrowed.take()
        {
            let mut target = std::mem::replace(&mut found.target, Buffer::none());
            let place = target.part_mut(0, borrowed.len());
            let whole = MutexGuard::unlocked(state, || {
                place.is_some_and(|place| borrowed.copy_to(exclusive(place)))
            });
            state.slots[number].target = target;
            if !whole {
                match &state.dead {
                    Some(error) => result = Err(error.clone()),
                    None => {
                        self.ask_again(state, number, &borrowed);
                        return None;
                    }
                }
            }
        }
        let found = &mut state.slots[number];
        // An operation gets its buffer back: that of a read, else that of a write.
        let target = std::mem::replace(&mut found.target, Buffer::none()).into_owned();
        let source = std::mem::replace(&mut found.source, Buffer::none()).into_owned();
        let buffer = if target.is_empty() { source } else { target };
        if let Some(stamps) = found.stamps.take() {
            state.times.finish(&stamps);
        }
        self.release(state, slot.slot);
        Some(result.map(|outcome| (outcome, buffer)))
    }

    /// Waits again for a request whose lent data went with the lane.
    fn ask_again(
        self: &Arc<Self>,
        state: &mut MutexGuard<'_, State>,
        number: usize,
        borrowed: &Borrowed,
    ) {
        let slot = &mut state.slots[number];
        slot.status = Status::Waiting;
        slot.received = 0;
        slot.failed = None;
        let (bulk, bytes) = (usize::from(slot.is_bulk()), slot.message.clone());
        state.bulk += bulk;
        // Else it is sent again when whoever leads notices that the lane is lost.
        if !borrowed.is_of(&state.link) {
            MutexGuard::unlocked(state, || self.send(Out::Message { bytes, done: 0 }));
        }
    }

    /// Waits until something may have changed for these slots (or, with none, until a slot may be
    /// free): by leading, or by sleeping while somebody else leads.
    fn advance<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        slots: Option<&[SlotRef]>,
    ) -> MutexGuard<'a, State> {
        if !state.leader {
            return self.lead(state, Wait::For(slots));
        }
        match slots {
            None => self.slot_free.wait(&mut state),
            Some(slots) => {
                if self.options.coalesce > 0 && !self.out.lock().is_empty() {
                    // The leader sleeps until something comes.
                    drop(state);
                    let _ = self.flush(); // a broken link is the leader's business
                    state = self.state.lock();
                    if !state.leader || state.is_over(Some(slots)) {
                        return state;
                    }
                }
                let condvar = Arc::new(Condvar::new());
                for slot in slots {
                    state.slots[usize::from(slot.slot)].waiter = Some(condvar.clone());
                }
                state.sleepers += 1;
                condvar.wait(&mut state);
                state.sleepers -= 1;
                for slot in slots {
                    let found = &mut state.slots[usize::from(slot.slot)];
                    if found.sequence == slot.sequence {
                        found.waiter = None;
                    }
                }
            }
        }
        state
    }

    /// Receives once for all.
    fn lead<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
        wait: Wait<'_>,
    ) -> MutexGuard<'a, State> {
        state.leader = true;
        let link = state.link.clone();
        drop(state);
        let received = self.receive(&link, wait);
        if let Err(error) = received {
            self.reconnect(&error);
        }
        let mut state = self.state.lock();
        state.leader = false;
        // Whoever sleeps may have to lead now, unless the present leader goes on.
        let next = (state.sleepers > 0).then(|| {
            state.slots.iter().find_map(|slot| match slot.status {
                Status::Waiting => slot.waiter.clone(),
                _ => None,
            })
        });
        match next.flatten() {
            Some(waiter) => drop(waiter.notify_one()),
            None => drop(self.slot_free.notify_one()),
        }
        state
    }

    fn receive(self: &Arc<Self>, link: &Arc<Link>, wait: Wait<'_>) -> io::Result<()> {
        let mut receiving = self.receiving.lock();
        let Receiving { input, scratch } = &mut *receiving;
        let flushed = self.flush()?;
        let spin = Duration::from_micros(self.options.spin_us.into());
        let wait = match wait {
            Wait::No => None,
            Wait::For(_) if !flushed => {
                link.wait_either(Some(Duration::from_millis(100)))?;
                None
            }
            // A request that was answered early is over when the last of its data is sent, here or
            // by another thread: then nothing more may come.
            Wait::For(slots) => (!self.state.lock().is_over(slots)).then_some(spin),
        };
        let mut sink =
            Completing { core: self, link: link.clone(), answers: Vec::new(), finished: 0 };
        let incoming = input.receive(link, scratch, wait, &mut sink, &self.counters)?;
        let answers = std::mem::take(&mut sink.answers);
        if !answers.is_empty() {
            self.out.lock().extend(answers);
            self.flush()?;
        }
        match incoming {
            Incoming::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    fn complete(&self, state: &mut State, slot: usize, result: Result<Outcome, Error>) {
        if matches!(state.slots[slot].status, Status::Waiting) {
            state.bulk -= usize::from(state.slots[slot].is_bulk());
            state.slots[slot].status = Status::Done(result);
            self.tell(state, slot as u16);
        }
    }

    /// Replaces a lost lane and sends again what was not answered. Called by the leader.
    fn reconnect(self: &Arc<Self>, cause: &io::Error) {
        let deadline = Instant::now() + self.options.reconnect;
        let mut pause = Duration::from_millis(5);
        if cause.kind() == io::ErrorKind::InvalidData {
            return self.fail_all(&connection_error(
                &self.transport,
                "sent what is no legal message",
                cause,
            ));
        }
        loop {
            let (session, secret) = {
                let state = self.state.lock();
                (state.session, state.secret)
            };
            match greet(&self.transport, self.client, session, secret, &self.options) {
                Ok(greeted) => match self.resume(greeted) {
                    Ok(()) => return,
                    Err(error) if Instant::now() >= deadline => {
                        return self.fail_all(&connection_error(
                            &self.transport,
                            "connection lost again while reopening files",
                            &error,
                        ));
                    }
                    Err(_) => {}
                },
                Err(Failure::Final(error)) => return self.fail_all(&error),
                Err(Failure::Io(error)) if Instant::now() >= deadline => {
                    let what = format!(
                        "connection lost ({cause}), and not to be had again within {:?}",
                        self.options.reconnect
                    );
                    return self.fail_all(&connection_error(&self.transport, &what, &error));
                }
                Err(Failure::Io(_)) => {}
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(500));
        }
    }

    fn fail_all(&self, error: &Error) {
        self.out.lock().clear();
        let mut state = self.state.lock();
        state.dead = Some(error.clone());
        for slot in 0..state.slots.len() {
            state.slots[slot].sending = 0;
            self.complete(&mut state, slot, Err(error.clone()));
            self.tell(&mut state, slot as u16);
        }
        self.slot_free.notify_all();
    }

    /// Goes on over a new lane.
    fn resume(self: &Arc<Self>, greeted: Greeted) -> io::Result<()> {
        let Greeted { link, welcome } = greeted;
        let mut out = self.out.lock();
        self.receiving.lock().input = Input::default();
        let mut state = self.state.lock();
        let state = &mut *state;
        out.clear();
        if welcome.resumed != resumed::JOINED {
            // The last slot is kept for this.
            let mut lane = FirstUse {
                link: &link,
                identity: self.identity,
                slot: state.slots.len() as u16,
                sequence: 0,
            };
            state.files.reclaim(|requests| lane.exchange(requests))?;
            if welcome.resumed == resumed::REMEMBERED {
                lane.exchange(&[Request::Reclaimed {}])?;
            }
        }
        state.memories = Memories::of(&link, self.options.descriptor_min);
        state.debts = 0;
        state.link = Arc::new(link);
        state.session = welcome.session;
        state.secret = welcome.secret;
        state.boot_epoch = welcome.boot_epoch;
        for number in 0..state.slots.len() {
            let slot = &mut state.slots[number];
            slot.sending = 0;
            slot.indebted = false;
            if !matches!(slot.status, Status::Waiting) {
                self.tell(state, number as u16);
                continue;
            }
            if welcome.resumed == resumed::NEW && !slot.repeatable {
                self.complete(state, number, Err(Error::Unknown));
                continue;
            }
            if welcome.resumed != resumed::JOINED
                && let Some(result) = after_restart(&state.files, &slot.message)
            {
                self.complete(state, number, result);
                continue;
            }
            slot.received = 0;
            slot.failed = None;
            out.push_back(Out::Message { bytes: slot.message.clone(), done: 0 });
        }
        Ok(())
    }
}

/// What became, without sending it again, of a request that was under way when the server ended:
/// files that were being closed are closed, and those that could not be had again are lost.
fn after_restart(files: &OpenFiles, message: &[u8]) -> Option<Result<Outcome, Error>> {
    let header = message.first_chunk().and_then(|head| Header::parse(head).ok())?;
    let body = message.get(HEADER_BYTES..)?.get(..header.body_bytes as usize)?;
    let requests = parse_compound(body).ok()?;
    if let [Request::Close { .. }] = requests[..] {
        let mut results = Vec::new();
        Reply::Done {}.encode(&mut results);
        return Some(Ok(Outcome { results, payload: 0, borrowed: None }));
    }
    files.is_stale(&requests).then_some(Err(Errno::ESTALE.into()))
}

fn connection_error(transport: &Transport, what: &str, error: &io::Error) -> Error {
    let url = Url { transport: transport.clone(), export: Vec::new(), path: Vec::new() };
    Error::Connection {
        server: url.to_string(),
        what: format!("{what}: {error}"),
        errno: Errno::of(error),
    }
}

/// Completes requests with what the leader receives.
struct Completing<'a> {
    core: &'a Arc<Core>,
    link: Arc<Link>,
    /// Messages to be sent in answer: data that was granted, requests sent again.
    answers: Vec<Out>,
    finished: usize,
}

impl Completing<'_> {
    /// What a reply lends; `None` when it cannot be mapped here, and the request is sent again.
    fn borrow(
        &mut self,
        state: &mut State,
        header: &Header,
        body: &[u8],
    ) -> Result<Option<Borrowed>, ProtocolError> {
        let slot = &mut state.slots[usize::from(header.slot)];
        let Some(memories) = &mut state.memories else {
            return Err(ProtocolError { what: "lent what was not asked for", at: 1 });
        };
        slot.indebted = true;
        match memories.borrow(header, body, &self.link, slot.target.len()) {
            Ok(borrowed) => Ok(Some(borrowed)),
            Err(Refusal::Illegal(error)) => Err(error),
            Err(Refusal::Unmapped) => {
                // Too little address space, for one. From now on everything is sent.
                state.memories = None;
                let mut bytes = (*slot.message).clone();
                bytes[1] &= !request_flag::BORROWS;
                slot.message = Arc::new(bytes);
                slot.indebted = false;
                self.answers.push(Out::Message { bytes: slot.message.clone(), done: 0 });
                Ok(None)
            }
        }
    }
}

impl Sink for Completing<'_> {
    fn message(
        &mut self,
        header: &Header,
        body: &[u8],
        _payload: &[u8],
    ) -> Result<(), ProtocolError> {
        let mut state = self.core.state.lock();
        if header.kind == Kind::Notice {
            return Ok(()); // A server that shuts down closes the lane, and then we reconnect.
        }
        let number = usize::from(header.slot);
        let current = state.slots.get_mut(number).filter(|slot| slot.sequence == header.sequence);
        let Some(slot) = current else { return Ok(()) };
        match header.kind {
            Kind::Reply if header.flags & reply_flag::UNKNOWN != 0 => {
                self.core.complete(&mut state, number, Err(Error::Unknown));
                Ok(())
            }
            Kind::Reply => {
                let (failed, received) = (slot.failed, slot.received);
                let lent = header.flags & reply_flag::LENT != 0;
                let mut outcome = if lent && matches!(slot.status, Status::Waiting) {
                    let Some(borrowed) = self.borrow(&mut state, header, body)? else {
                        return Ok(());
                    };
                    let results = body[..header.offset as usize].to_vec();
                    Outcome { results, payload: borrowed.len(), borrowed: Some(borrowed) }
                } else {
                    Outcome { results: body.to_vec(), payload: received, borrowed: None }
                };
                let slot = &mut state.slots[number];
                if let Some((at, errno)) = failed {
                    if at == 0 {
                        self.core.complete(&mut state, number, Err(errno.into()));
                        return Ok(());
                    }
                    outcome.payload = outcome.payload.min(at as usize);
                }
                if let Some(stamps) = &mut slot.stamps {
                    stamps.answered(header.word_b);
                }
                self.core.complete(&mut state, number, Ok(outcome));
                self.finished += 1;
                Ok(())
            }
            Kind::Data => {
                if header.word_a != 0 {
                    let errno = Errno(u16::try_from(header.word_a).unwrap_or(Errno::EIO.0));
                    slot.failed.get_or_insert((header.offset, errno));
                }
                Ok(())
            }
            Kind::Grant => {
                let (from, length) = (header.offset, u64::from(header.word_a));
                if from.checked_add(length).is_none_or(|end| end > slot.source.len() as u64) {
                    return Err(ProtocolError { what: "grant beyond what was offered", at: 16 });
                }
                let mut head = Header::new(Kind::Data, header.slot, header.sequence);
                head.offset = from;
                head.payload_bytes = header.word_a;
                slot.sending += 1;
                let source =
                    &raw const shared(slot.source.bytes())[from as usize..(from + length) as usize];
                self.answers.push(Out::Data {
                    slot: header.slot,
                    head: head.to_bytes(),
                    source,
                    done: 0,
                });
                Ok(())
            }
            _ => Err(ProtocolError { what: "message of a kind that only clients send", at: 0 }),
        }
    }

    fn place(
        &mut self,
        header: &Header,
        _body: &[u8],
        done: usize,
        rest: usize,
    ) -> Option<&mut [u8]> {
        let mut state = self.core.state.lock();
        let slot = state
            .slots
            .get_mut(usize::from(header.slot))
            // Once it is answered the buffer may be gone at any moment, whatever the server sends.
            .filter(|s| s.sequence == header.sequence && matches!(s.status, Status::Waiting))?;
        let from = usize::try_from(header.offset).ok()?.checked_add(done)?;
        let part = slot.target.part_mut(from, rest)?;
        slot.received = slot.received.max(from + rest);
        Some(exclusive(part))
    }

    fn expects_bulk(&self) -> bool {
        self.core.state.lock().bulk > 0
    }
}
