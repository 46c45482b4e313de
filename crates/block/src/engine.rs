//! The engine of a core's disks: takes requests from every front, has their fragments read or written, and
//! says what to send.

mod begin;
mod tell;
mod write;

use crate::Disk;
use crate::cursor::Cursor;
use crate::memory::Memory;
use crate::path::Moved;
use crate::request::{Driver, How, Output, Piece, Read, Status, Times, Work, Write};
use crate::slab::{Key, Slab};
use crate::ways::{aggregate, lent};
use crate::writers::Phase;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use towline_mem::{Pool, PoolBuffer};

/// Memory limits of one core.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Buffers for fragments; the size of a buffer is the length of the longest fragment.
    pub fragments: Arc<Pool>,
    /// Buffers for smaller requests.
    pub small: Arc<Pool>,
    /// Limit for the bytes of one owner under way from the disk to the network.
    pub owner_bytes_max: u64,
}

/// Identifies a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OwnerKey(Key);

/// Identifies a request under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestKey(Key);

#[derive(Debug, Default)]
struct Owner {
    /// Reads that still have fragments to start.
    reads: VecDeque<Key>,
    /// The owner is in the line of those with fragments to start.
    in_line: bool,
    /// The first of its reads, which others must not overtake, is parked.
    waits: bool,
    /// Bytes of the buffers that its reads hold, from before the disk fills them until they are sent. Whole
    /// buffers count, however little is in them. Buffers of serial reads do not count, since the reads could
    /// otherwise not finish.
    held: Arc<AtomicU64>,
    /// Bytes under way from the disk.
    in_flight: u64,
    /// Bytes handed over that the front still holds, including those by reference.
    unsent: u64,
    /// Number of requests under way.
    requests: usize,
    /// Those requests that are ordered reads, oldest first.
    ordered: VecDeque<Key>,
    /// The ordered read that is reported in part and must be finished before another one begins.
    speaking: Option<Key>,
}

impl Owner {
    /// Returns true if nothing more may be started. One fragment is always allowed, whatever the limit.
    fn is_full(&self, limits: &Limits) -> bool {
        let held = self.held.load(Ordering::Relaxed).max(self.in_flight + self.unsent);
        held > 0 && held + limits.fragments.buffer_bytes() as u64 > limits.owner_bytes_max
    }
}

#[derive(Debug)]
enum Kind {
    Read(Read),
    Write(Write),
    Other,
}

#[derive(Debug)]
struct Request<T> {
    tag: T,
    owner: Key,
    kind: Kind,
    arrived: Instant,
    disk_since: Option<Instant>,
}

/// A fragment that the disk is working on.
#[derive(Debug)]
struct Fragment {
    request: Key,
    offset: u64,
    length: u64,
    /// Bytes that are already moved.
    done: u64,
    /// The work only brings pages into memory, which are then handed over by reference.
    lends: bool,
    /// Of a write: what it is counted in.
    phase: Option<Phase>,
}

/// The fragment engine of a core. `T` is a front's name (tag) for a request.
#[derive(Debug)]
pub struct Engine<T> {
    memory: Memory,
    owners: Slab<Owner>,
    requests: Slab<Request<T>>,
    fragments: Slab<Fragment>,
    line: VecDeque<Key>,
    /// Owners and reads that wait because their disk, which may hang, holds all the memory it is allowed.
    parked: Vec<(Key, Key)>,
    /// `pump` last stopped for lack of memory.
    starved: bool,
    outputs: VecDeque<Output<T>>,
    moved: Moved,
}

impl<T: Copy> Engine<T> {
    /// Creates an engine with these limits.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            memory: Memory::new(limits),
            owners: Slab::default(),
            requests: Slab::default(),
            fragments: Slab::default(),
            line: VecDeque::new(),
            parked: Vec::new(),
            starved: false,
            outputs: VecDeque::new(),
            moved: Moved::default(),
        }
    }

    /// Adds a connection.
    pub fn add_owner(&mut self) -> OwnerKey {
        OwnerKey(self.owners.insert(Owner::default()))
    }

    /// Removes a connection. Nothing more is started or reported for it; what the disk is working on ends by
    /// itself.
    pub fn remove_owner(&mut self, owner: OwnerKey) {
        let OwnerKey(key) = owner;
        if let Some(owner) = self.owners.remove(key) {
            let parked =
                self.parked.extract_if(.., |(other, _)| *other == key).map(|(_, read)| read);
            let parked: Vec<Key> = parked.collect();
            for key in owner.reads.into_iter().chain(owner.ordered).chain(parked) {
                self.forget_if_idle(key);
            }
        }
    }

    /// Returns the number of a connection's requests under way.
    #[must_use]
    pub fn requests_of(&self, owner: OwnerKey) -> usize {
        self.owners.get(owner.0).map_or(0, |owner| owner.requests)
    }

    /// Sets how many of the bytes handed over the front still holds.
    pub fn set_unsent(&mut self, owner: OwnerKey, bytes: u64) {
        if let Some(found) = self.owners.get_mut(owner.0) {
            found.unsent = bytes;
            self.get_in_line(owner.0);
        }
    }

    /// Returns the bytes moved since the engine was created.
    #[must_use]
    pub fn moved(&self) -> Moved {
        self.moved
    }

    /// Counts bytes that a front read itself with [`towline_store::BlockStore::read_now`].
    pub fn count_staged(&mut self, bytes: u64) {
        self.moved.staged += bytes;
    }

    /// Counts bytes that a front wrote itself with [`Disk::write_now`].
    pub fn count_written(&mut self, bytes: u64) {
        self.moved.written_staged += bytes;
    }

    /// Returns the length of the longest fragment: the most that is read in one piece, and the most that one
    /// buffer of a write holds.
    #[must_use]
    pub fn fragment_bytes(&self) -> u64 {
        self.memory.limits.fragments.buffer_bytes() as u64
    }

    /// Returns true if there is an output to take.
    #[must_use]
    pub fn has_output(&self) -> bool {
        !self.outputs.is_empty()
    }

    /// Returns the next output for a front.
    pub fn next_output(&mut self) -> Option<Output<T>> {
        self.outputs.pop_front()
    }

    /// Returns true if reads wait for memory.
    #[must_use]
    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// Returns true if there is something to do at once: an output to take, or a fragment that
    /// [`Engine::pump`] would start.
    #[must_use]
    pub fn has_work(&self) -> bool {
        // Sending may have freed memory since it ran short.
        !self.outputs.is_empty()
            || !self.line.is_empty() && (!self.starved || !self.is_out_of_memory())
            || self.parked.iter().any(|(_, read)| self.may_go_on(*read))
    }

    /// Returns true if no disk is working on a fragment.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        self.fragments.is_empty()
    }

    /// Returns true if no buffer for a fragment is free.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.memory.limits.fragments.is_exhausted()
    }

    fn add(&mut self, owner: OwnerKey, tag: T, kind: Kind, arrived: Instant) -> Option<Key> {
        self.owners.get_mut(owner.0)?.requests += 1;
        Some(self.requests.insert(Request { tag, owner: owner.0, kind, arrived, disk_since: None }))
    }

    fn get_in_line(&mut self, key: Key) {
        if let Some(owner) = self.owners.get_mut(key)
            && !owner.in_line
            && !owner.waits
            && !owner.reads.is_empty()
            && !owner.is_full(&self.memory.limits)
        {
            owner.in_line = true;
            self.line.push_back(key);
        }
    }

    /// Adds a read, which [`Engine::pump`] starts.
    pub fn read(
        &mut self,
        owner: OwnerKey,
        tag: T,
        disk: &Arc<Disk>,
        range: std::ops::Range<u64>,
        how: How,
        arrived: Instant,
    ) {
        let read = Read {
            disk: disk.clone(),
            cursor: Cursor::new(range, disk.store.layout(), how != How::Pieces),
            how,
            serial: disk.delivery.serial,
            in_flight: 0,
            told: false,
            failed: false,
            failure: None,
            waiting: VecDeque::new(),
        };
        if let Some(key) = self.add(owner, tag, Kind::Read(read), arrived)
            && let Some(found) = self.owners.get_mut(owner.0)
        {
            found.reads.push_back(key);
            if how == How::Ordered {
                found.ordered.push_back(key);
            }
            self.get_in_line(owner.0);
        }
    }

    fn remove_request(&mut self, key: Key) {
        if let Some(request) = self.requests.remove(key)
            && let Some(owner) = self.owners.get_mut(request.owner)
        {
            owner.requests -= 1;
        }
    }

    /// Removes a request whose owner is gone if nothing is working on it.
    fn forget_if_idle(&mut self, key: Key) {
        let idle = self.requests.get_mut(key).is_some_and(|request| match &mut request.kind {
            Kind::Read(read) => {
                read.cursor.finish();
                read.in_flight == 0
            }
            Kind::Write(write) => write.in_flight == 0,
            Kind::Other => false,
        });
        if idle {
            self.requests.remove(key);
        }
    }

    /// Starts a call without payload that waits for a disk's device. If it returns lists, they are reported
    /// as [`Output::Extents`], else as [`Output::Done`].
    pub fn ask(
        &mut self,
        owner: OwnerKey,
        tag: T,
        disk: &Arc<Disk>,
        call: Box<dyn FnOnce() -> io::Result<Vec<Vec<Status>>> + Send>,
        arrived: Instant,
        driver: &mut dyn Driver,
    ) {
        let Some(key) = self.add(owner, tag, Kind::Other, arrived) else { return };
        if let Some(request) = self.requests.get_mut(key) {
            request.disk_since = Some(Instant::now());
        }
        driver.begin(key.to_bits(), disk, Work::Ask(call));
    }

    /// Takes the result of a [`Work::Ask`].
    pub fn answered(&mut self, token: u64, result: io::Result<Vec<Vec<Status>>>) {
        let key = Key::from_bits(token);
        let Some(request) = self.requests.get_mut(key) else { return };
        let (tag, times, owner) = (request.tag, request.times(), request.owner);
        if self.owners.get_mut(owner).is_some() {
            self.outputs.push_back(match result {
                Ok(lists) if lists.is_empty() => Output::Done { tag, result: Ok(()), times },
                result => Output::Extents { tag, result, times },
            });
        }
        self.remove_request(key);
    }

    /// Takes the result of any other work: the number of bytes moved, or an error.
    pub fn finished(
        &mut self,
        token: u64,
        result: io::Result<usize>,
        mut buffer: PoolBuffer,
        driver: &mut dyn Driver,
    ) {
        let Some(fragment) = self.fragments.remove(Key::from_bits(token)) else { return };
        let Some(request) = self.requests.get_mut(fragment.request) else { return };
        let total = fragment.done + result.as_ref().map_or(0, |count| *count as u64);
        let missing = fragment.length.saturating_sub(total);
        let outcome = match result {
            Ok(_) if missing == 0 => Ok(()),
            // The file ends before the disk does: somebody shortened it.
            Ok(0) => Err(io::Error::from_raw_os_error(EIO)),
            Ok(_) => return self.again(Fragment { done: total, ..fragment }, buffer, driver),
            // The kernel cancels what waits if it can create no thread for it.
            Err(error) if matches!(error.raw_os_error(), Some(EINTR | EAGAIN | ECANCELED)) => {
                return self.again(fragment, buffer, driver);
            }
            Err(error) => Err(error),
        };
        match &mut request.kind {
            Kind::Read(read) => {
                let pages = (fragment.lends && outcome.is_ok())
                    .then(|| lent(&read.disk, fragment.offset, fragment.length));
                if let Some(None) = pages {
                    // The pages are gone again, so this fragment is copied.
                    let again = Fragment { done: 0, lends: false, ..fragment };
                    self.moved.lent -= again.length;
                    self.moved.staged += again.length;
                    return self.again(again, buffer, driver);
                }
                read.in_flight -= 1;
                let (owner, kept) = (request.owner, read.serial);
                let may_hang = read.disk.store.may_hang();
                if let Some(found) = self.owners.get_mut(owner) {
                    if !may_hang {
                        found.in_flight -= fragment.length;
                    } else if !kept {
                        buffer = buffer.charged_to(&found.held);
                    }
                    if !kept {
                        // Counts as unsent until the front reports the true number.
                        found.unsent += fragment.length;
                    }
                    self.get_in_line(owner);
                }
                let landed = outcome.map(|()| match pages.flatten() {
                    Some(pages) => Piece::Lent(pages),
                    None => Piece::Data(aggregate(buffer, fragment.length)),
                });
                self.land(fragment.request, fragment.offset, landed);
                // A failed piece no longer holds a buffer.
                self.get_in_line(owner);
            }
            Kind::Write(write) => {
                write.in_flight -= 1;
                write.disk.end_write(fragment.phase);
                let outcome = match write.durable {
                    true => {
                        let end = fragment.offset + fragment.length;
                        write.disk.note_durable_write(end, outcome)
                    }
                    false => outcome,
                };
                if let Err(error) = outcome {
                    write.error.get_or_insert(error);
                }
                self.end_write(fragment.request);
            }
            Kind::Other => {}
        }
    }

    /// Moves the rest of a fragment of which only a part was moved, with a blocking call. This is rare.
    fn again(&mut self, fragment: Fragment, mut buffer: PoolBuffer, driver: &mut dyn Driver) {
        let Some(request) = self.requests.get_mut(fragment.request) else { return };
        let (offset, length) = (fragment.offset + fragment.done, fragment.length);
        let range = fragment.done as usize..length as usize;
        let missing = range.len();
        let (disk, call): (_, Box<dyn FnOnce() -> _ + Send>) = match &request.kind {
            Kind::Read(read) => {
                let disk = read.disk.clone();
                let call = move || {
                    let result = disk.store.read(offset, &mut buffer.bytes_mut()[range]);
                    (result.map(|()| missing), buffer)
                };
                (read.disk.clone(), Box::new(call))
            }
            Kind::Write(write) => {
                let (disk, durable) = (write.disk.clone(), write.durable);
                let call = move || {
                    let result = disk.store.write(offset, &buffer.bytes()[range], durable);
                    (result.map(|()| missing), buffer)
                };
                (write.disk.clone(), Box::new(call))
            }
            Kind::Other => return,
        };
        let token = self.fragments.insert(fragment);
        driver.begin(token.to_bits(), &disk, Work::Call(call));
    }
}

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const ECANCELED: i32 = 125;

impl<T> Request<T> {
    /// Returns true for a read that is reported in order.
    fn is_ordered(&self) -> bool {
        matches!(&self.kind, Kind::Read(read) if read.how == How::Ordered)
    }

    fn times(&self) -> Times {
        let disk = self.disk_since.map_or(0, |since| since.elapsed().as_nanos() as u64);
        Times { arrived: self.arrived, disk }
    }
}

impl Limits {
    pub(crate) fn take(&self, length: u64) -> Option<PoolBuffer> {
        if length <= self.small.buffer_bytes() as u64
            && let Some(buffer) = self.small.take()
        {
            return Some(buffer);
        }
        self.fragments.take()
    }
}
