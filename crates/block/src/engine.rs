//! The engine of a core's disks: takes requests of every front, works on their fragments, and says what to send.

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
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use towline_mem::{Pool, PoolBuffer};

/// What one core may hold.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Buffers for fragments; their size is the longest fragment.
    pub fragments: Arc<Pool>,
    /// Buffers for requests that are smaller.
    pub small: Arc<Pool>,
    /// Bytes of one owner that may be under way from the disk to the network.
    pub owner_bytes_max: u64,
}

/// A connection, as the engine knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OwnerKey(Key);

/// A request under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestKey(Key);

#[derive(Debug, Default)]
struct Owner {
    /// Reads of which something has still to be begun.
    reads: VecDeque<Key>,
    /// In the line of those that want something begun.
    in_line: bool,
    /// The first of its reads, which others must not overtake, is parked.
    waits: bool,
    /// Bytes of the buffers that its reads hold, from before the disk fills them until they are
    /// sent: whole buffers, however little is in them. Those of serial reads are not counted, which
    /// could not come to an end.
    held: Arc<AtomicU64>,
    /// Bytes under way from the disk, and bytes handed over that the front still holds, those by
    /// reference among them.
    in_flight: u64,
    unsent: u64,
    /// Requests under way.
    requests: usize,
    /// Those of them that are reads in order, the oldest first.
    ordered: VecDeque<Key>,
    /// The one of these that was told in part and has to be told to its end before another.
    speaking: Option<Key>,
}

impl Owner {
    /// True when nothing more may be begun now; whatever the limit, one fragment may always be.
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

/// A fragment that the disk works on.
#[derive(Debug)]
struct Fragment {
    request: Key,
    offset: u64,
    length: u64,
    /// Bytes of it that were moved already.
    done: u64,
    /// Its pages are brought into memory, to be handed over by reference.
    lends: bool,
}

/// The fragment engine of a core. `T` is what a front calls a request.
#[derive(Debug)]
pub struct Engine<T> {
    memory: Memory,
    owners: Slab<Owner>,
    requests: Slab<Request<T>>,
    fragments: Slab<Fragment>,
    line: VecDeque<Key>,
    /// Owners and reads of disks that may hang and have all the memory that they may.
    parked: Vec<(Key, Key)>,
    /// The first in line found no memory when it was last looked at.
    starved: bool,
    outputs: VecDeque<Output<T>>,
    moved: Moved,
}

impl<T: Copy> Engine<T> {
    /// An engine with these limits.
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

    /// A new connection.
    pub fn add_owner(&mut self) -> OwnerKey {
        OwnerKey(self.owners.insert(Owner::default()))
    }

    /// A connection is gone: nothing more is begun for it and nothing told; what the disk works on
    /// ends by itself.
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

    /// Requests of a connection that are not over.
    #[must_use]
    pub fn requests_of(&self, owner: OwnerKey) -> usize {
        self.owners.get(owner.0).map_or(0, |owner| owner.requests)
    }

    /// Tells how many bytes that were handed over a front still holds.
    pub fn set_unsent(&mut self, owner: OwnerKey, bytes: u64) {
        if let Some(found) = self.owners.get_mut(owner.0) {
            found.unsent = bytes;
            self.get_in_line(owner.0);
        }
    }

    /// Bytes moved since the engine was made.
    #[must_use]
    pub fn moved(&self) -> Moved {
        self.moved
    }

    /// Counts bytes that a front had from [`towline_store::BlockStore::read_now`] by itself.
    pub fn count_staged(&mut self, bytes: u64) {
        self.moved.staged += bytes;
    }

    /// Counts bytes that a front wrote by [`towline_store::BlockStore::write_now`] by itself.
    pub fn count_written(&mut self, bytes: u64) {
        self.moved.written_staged += bytes;
    }

    /// Longest fragment: the longest read in one piece, and the most bytes of a write that go into one buffer.
    #[must_use]
    pub fn fragment_bytes(&self) -> u64 {
        self.memory.limits.fragments.buffer_bytes() as u64
    }

    /// The next thing to be told.
    pub fn next_output(&mut self) -> Option<Output<T>> {
        self.outputs.pop_front()
    }

    /// True when reads wait for memory.
    #[must_use]
    pub fn is_starved(&self) -> bool {
        self.starved
    }

    /// True when there is something to do without waiting for anything: an answer to take, or [`Engine::pump`] would
    /// begin something.
    #[must_use]
    pub fn has_work(&self) -> bool {
        // Memory that was short may have come back since, with what was sent.
        !self.outputs.is_empty()
            || !self.line.is_empty() && (!self.starved || !self.is_out_of_memory())
            || self.parked.iter().any(|(_, read)| self.may_go_on(*read))
    }

    /// True when there is no buffer for a fragment.
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

    /// A read; begun by [`Engine::pump`].
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

    /// After its owner is gone: a request that nothing works on can go, too.
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

    /// Something without payload that waits for the device of a disk; what it returns is told as
    /// [`Output::Extents`] if it `asks` for them, else as [`Output::Done`].
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

    /// What [`Work::Ask`] began is over.
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

    /// A transfer is over, with so many bytes moved.
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
            // The file ends before the disk does: somebody made it shorter.
            Ok(0) => Err(io::Error::from_raw_os_error(EIO)),
            Ok(_) => return self.again(Fragment { done: total, ..fragment }, buffer, driver),
            Err(error) if matches!(error.raw_os_error(), Some(EINTR | EAGAIN)) => {
                return self.again(fragment, buffer, driver);
            }
            Err(error) => Err(error),
        };
        match &mut request.kind {
            Kind::Read(read) => {
                let pages = (fragment.lends && outcome.is_ok())
                    .then(|| lent(&read.disk, fragment.offset, fragment.length));
                if let Some(None) = pages {
                    // They are gone again: this once it is copied.
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
                        // Until the front says how much of it is still unsent.
                        found.unsent += fragment.length;
                    }
                    self.get_in_line(owner);
                }
                let landed = outcome.map(|()| match pages.flatten() {
                    Some(pages) => Piece::Lent(pages),
                    None => Piece::Data(aggregate(buffer, fragment.length)),
                });
                self.land(fragment.request, fragment.offset, landed);
                // What failed holds nothing any more.
                self.get_in_line(owner);
            }
            Kind::Write(write) => {
                write.in_flight -= 1;
                let outcome = match write.durable {
                    true => write.disk.note_durable_write(outcome),
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

    /// Goes on with a fragment of which only a part was moved: the slow way, which is rare.
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

impl<T> Request<T> {
    /// A read whose data is told from its first byte on.
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
