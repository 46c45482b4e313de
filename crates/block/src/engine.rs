//! The engine.

use crate::Disk;
use crate::cursor::Cursor;
use crate::path::Moved;
use crate::request::{Driver, How, Output, Piece, Read, Status, Times, Waiting, Work, Write};
use crate::slab::{Key, Slab};
use crate::ways::{ReadWork, aggregate, at_once, lent, read_work, write_work};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use towline_mem::{Pool, PoolBuffer};
use towline_store::{Direction, Now};

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
    limits: Limits,
    owners: Slab<Owner>,
    requests: Slab<Request<T>>,
    fragments: Slab<Fragment>,
    line: VecDeque<Key>,
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
            limits,
            owners: Slab::default(),
            requests: Slab::default(),
            fragments: Slab::default(),
            line: VecDeque::new(),
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
        if let Some(owner) = self.owners.remove(owner.0) {
            for key in owner.reads.into_iter().chain(owner.ordered) {
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

    /// Longest read in one piece.
    #[must_use]
    pub fn whole_bytes_max(&self) -> u64 {
        self.limits.fragments.buffer_bytes() as u64
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

    /// True when [`Engine::pump`] would begin something.
    #[must_use]
    pub fn has_work(&self) -> bool {
        // Memory that was short may have come back since, with what was sent.
        !self.line.is_empty() && (!self.starved || !self.limits.fragments.is_exhausted())
    }

    fn add(&mut self, owner: OwnerKey, tag: T, kind: Kind, arrived: Instant) -> Option<Key> {
        self.owners.get_mut(owner.0)?.requests += 1;
        Some(self.requests.insert(Request { tag, owner: owner.0, kind, arrived, disk_since: None }))
    }

    fn get_in_line(&mut self, key: Key) {
        if let Some(owner) = self.owners.get_mut(key)
            && !owner.in_line
            && !owner.reads.is_empty()
            && !owner.is_full(&self.limits)
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

    /// Begins what may be begun: connections take turns, a fragment at a time.
    pub fn pump(&mut self, driver: &mut dyn Driver) {
        self.starved = false;
        while let Some(owner_key) = self.line.pop_front() {
            let Some(owner) = self.owners.get_mut(owner_key) else { continue };
            let full = owner.is_full(&self.limits);
            let Some(key) = owner.reads.front().copied().filter(|_| !full) else {
                owner.in_line = false;
                continue;
            };
            match self.step(key, driver) {
                Step::Goes => {}
                Step::AllBegun => {
                    if let Some(owner) = self.owners.get_mut(owner_key) {
                        owner.reads.pop_front();
                    }
                }
                Step::NoMemory => {
                    self.line.push_front(owner_key);
                    self.starved = true;
                    self.give_up_serial();
                    return;
                }
            }
            self.line.push_back(owner_key);
        }
    }

    /// Begins the next fragment of a read.
    fn step(&mut self, key: Key, driver: &mut dyn Driver) -> Step {
        let Some(request) = self.requests.get_mut(key) else { return Step::AllBegun };
        let Kind::Read(read) = &mut request.kind else { return Step::AllBegun };
        let Some((offset, mut rest)) = read.cursor.peek().filter(|_| !read.failed) else {
            return Step::AllBegun;
        };
        let owner = self.owners.get(request.owner);
        let account = owner.filter(|_| !read.serial).map(|owner| owner.held.clone());
        if read.how == How::Whole {
            rest = read.cursor.rest();
            let Some(mut buffer) = self.limits.take(rest) else { return Step::NoMemory };
            if let Some(account) = &account {
                buffer = buffer.charged_to(account);
            }
            let disk = read.disk.clone();
            let call = move || {
                let result = disk.store.read(offset, &mut buffer.bytes_mut()[..rest as usize]);
                (result.map(|()| rest as usize), buffer)
            };
            read.cursor.finish();
            self.moved.staged += rest;
            self.begin(key, offset, rest, Work::Call(Box::new(call)), false, driver);
            return Step::AllBegun;
        }
        if let Some(piece) = at_once(&read.disk, offset, rest, read.how) {
            match &piece {
                Piece::Hole(length) => self.moved.holes += length,
                other => self.moved.lent += other.len(),
            }
            read.cursor.advance(piece.len());
            let all = read.cursor.is_done();
            self.land(key, offset, Ok(piece));
            return if all { Step::AllBegun } else { Step::Goes };
        }
        let most = read.cursor.fragment(self.limits.fragments.buffer_bytes() as u64);
        let (disk, how) = (&read.disk, read.how);
        let work = read_work(&self.limits, disk, offset, most, how, account.as_ref());
        let Some((work, length)) = work else { return Step::NoMemory };
        read.cursor.advance(length);
        let all = read.cursor.is_done();
        match work {
            ReadWork::Done(landed) => {
                self.moved.staged += length;
                self.land(key, offset, landed);
            }
            ReadWork::Begin(work, lends) => {
                match &work {
                    Work::Transfer { place, .. } if place.direct => self.moved.direct += length,
                    _ if lends => self.moved.lent += length,
                    _ => self.moved.staged += length,
                }
                self.begin(key, offset, length, work, lends, driver);
            }
        }
        if all { Step::AllBegun } else { Step::Goes }
    }

    /// All memory is in use. Reads that keep some until they have all of their bytes give that up,
    /// or each would wait for the others.
    fn give_up_serial(&mut self) {
        let begun = |key: &Key| Some((*key, *self.owners.get(*key)?.reads.front()?));
        for (owner, read) in self.line.iter().filter_map(begun).collect::<Vec<_>>() {
            if let Some(request) = self.requests.get_mut(read)
                && let Kind::Read(found) = &mut request.kind
                && std::mem::replace(&mut found.serial, false)
            {
                self.tell_landed(read, owner);
            }
        }
    }

    /// Begins a fragment.
    fn begin(
        &mut self,
        key: Key,
        offset: u64,
        length: u64,
        work: Work,
        lends: bool,
        driver: &mut dyn Driver,
    ) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Read(read) = &mut request.kind else { return };
        read.in_flight += 1;
        if read.how == How::Ordered {
            read.waiting.push_back(Waiting { offset, landed: None });
        }
        request.disk_since.get_or_insert_with(Instant::now);
        if let Some(owner) = self.owners.get_mut(request.owner) {
            owner.in_flight += length;
        }
        let fragment = Fragment { request: key, offset, length, done: 0, lends };
        let token = self.fragments.insert(fragment);
        driver.begin(token.to_bits(), work);
    }

    /// A piece of a read is there, or is known not to be had.
    fn land(&mut self, key: Key, offset: u64, landed: io::Result<Piece>) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Read(read) = &mut request.kind else { return };
        if self.owners.get(request.owner).is_none() {
            // Nobody listens to a connection that is gone.
            read.waiting.clear();
            return self.forget_if_idle(key);
        }
        if read.how != How::Ordered && !read.serial && read.waiting.is_empty() {
            return self.tell(key, offset, landed);
        }
        match read.waiting.iter_mut().find(|w| w.offset == offset && w.landed.is_none()) {
            Some(place) => place.landed = Some(landed),
            None => read.waiting.push_back(Waiting { offset, landed: Some(landed) }),
        }
        let owner = request.owner;
        self.tell_landed(key, owner);
    }

    /// Tells what has landed and may be told.
    fn tell_landed(&mut self, key: Key, owner: Key) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Read(read) = &mut request.kind else { return };
        if read.how == How::Ordered {
            while let Some(key) = self.next_speaker(owner) {
                self.speak(key);
            }
        } else if read.may_be_told() {
            while let Some(request) = self.requests.get_mut(key)
                && let Kind::Read(read) = &mut request.kind
                && let Some(Waiting { offset, landed: Some(landed) }) = read.waiting.pop_front()
            {
                self.tell(key, offset, landed);
            }
        }
    }

    /// The ordered read of this owner that has something to tell and may: the one that began to be
    /// told; else the oldest, or one that needs no more memory to get to its end, since those that
    /// wait for their turn hold some.
    fn next_speaker(&self, owner: Key) -> Option<Key> {
        let owner = self.owners.get(owner)?;
        let may = |key: &Key| {
            let Kind::Read(read) = &self.requests.get(*key)?.kind else { return None };
            let lands = read.waiting.front().is_some_and(|w| w.landed.is_some());
            let first = owner.ordered.front() == Some(key);
            let may = lands && (first || read.cursor.is_done()) && read.may_be_told();
            may.then_some(*key)
        };
        match owner.speaking {
            Some(key) => may(&key),
            None => owner.ordered.iter().find_map(may),
        }
    }

    /// Tells what has landed of an ordered read, in order.
    fn speak(&mut self, key: Key) {
        while let Some(request) = self.requests.get_mut(key)
            && let Kind::Read(read) = &mut request.kind
            && read.waiting.front().is_some_and(|w| w.landed.is_some())
        {
            let owner = request.owner;
            if let Some(Waiting { offset, landed: Some(landed) }) = read.waiting.pop_front() {
                self.tell(key, offset, landed);
            }
            let over = self.requests.get(key).is_none();
            if let Some(owner) = self.owners.get_mut(owner) {
                owner.speaking = Some(key).filter(|_| !over);
                if over {
                    owner.ordered.retain(|other| *other != key);
                }
            }
        }
    }

    fn tell(&mut self, key: Key, offset: u64, landed: io::Result<Piece>) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Read(read) = &mut request.kind else { return };
        let landed = match landed {
            // In order, what comes behind a failure has no use, and the failure is told last.
            _ if read.failed && read.how == How::Ordered => None,
            Err(error) if read.how == How::Ordered => {
                read.failure = Some((offset, error));
                None
            }
            landed => Some((offset, landed)),
        };
        read.failed |= read.failure.is_some() || matches!(landed, Some((_, Err(_))));
        let begun = read.cursor.is_done() || read.failed;
        let over = begun && read.in_flight == 0 && read.waiting.is_empty();
        let landed = match read.failure.take_if(|_| over) {
            Some((offset, error)) => Some((offset, Err(error))),
            None => landed,
        };
        let Some((offset, landed)) = landed else { return };
        let first = !std::mem::replace(&mut read.told, true);
        let (tag, owner) = (request.tag, request.owner);
        let last = over.then(|| request.times());
        // Nobody listens to a connection that is gone.
        if self.owners.get_mut(owner).is_some() {
            self.outputs.push_back(match landed {
                Ok(piece) => Output::Piece { tag, offset, piece, first, last },
                Err(error) => Output::Failed { tag, offset, error, first, last },
            });
        }
        if over {
            self.remove_request(key);
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

    /// A write whose payload follows by [`Engine::room`] and [`Engine::filled`].
    pub fn write(
        &mut self,
        owner: OwnerKey,
        tag: T,
        disk: &Arc<Disk>,
        range: std::ops::Range<u64>,
        durable: bool,
        arrived: Instant,
    ) -> Option<RequestKey> {
        let write = Write {
            disk: disk.clone(),
            next: range.start,
            placed: range.start,
            end: range.end,
            durable,
            in_flight: 0,
            error: None,
        };
        disk.changes.note(range.start, range.end - range.start);
        self.add(owner, tag, Kind::Write(write), arrived).map(RequestKey)
    }

    /// A buffer for the next bytes of a write and how many of them go into it; `None` when all
    /// memory is in use, or all bytes have a buffer. Buffers are filled in the order of their bytes.
    pub fn room(&mut self, key: RequestKey) -> Option<(PoolBuffer, usize)> {
        let request = self.requests.get_mut(key.0)?;
        let Kind::Write(write) = &mut request.kind else { return None };
        let rest = (write.end - write.placed).min(self.limits.fragments.buffer_bytes() as u64);
        if rest == 0 {
            return None;
        }
        let rest = write
            .disk
            .store
            .layout()
            .map_or(rest, |layout| rest.min(layout.chunk_end(write.placed) - write.placed));
        let place = write.disk.store.locate(write.placed, rest, Direction::Write);
        let length = place.map_or(rest, |place| place.length);
        let buffer = self.limits.take(length)?;
        write.placed += length;
        Some((buffer, length as usize))
    }

    /// The buffers of a write that are not filled yet never will be: their bytes come anew.
    pub fn forget_room(&mut self, key: RequestKey) {
        if let Some(request) = self.requests.get_mut(key.0)
            && let Kind::Write(write) = &mut request.kind
        {
            write.placed = write.next;
        }
    }

    /// A buffer of [`Engine::room`] holds its bytes: they are written.
    pub fn filled(
        &mut self,
        key: RequestKey,
        buffer: PoolBuffer,
        length: usize,
        driver: &mut dyn Driver,
    ) {
        let Some(request) = self.requests.get_mut(key.0) else { return };
        let Kind::Write(write) = &mut request.kind else { return };
        let offset = write.next;
        write.next += length as u64;
        let data = &buffer.bytes()[..length];
        if let Now::Done(mut result) = write.disk.store.write_now(offset, data, write.durable) {
            if write.durable {
                result = write.disk.note_durable_write(result);
            }
            write.error = write.error.take().or(result.err());
            self.moved.written_staged += length as u64;
            return self.end_write(key.0);
        }
        let work = write_work(&write.disk, offset, buffer, length, write.durable);
        match &work {
            Work::Transfer { place, .. } if place.direct => {
                self.moved.written_direct += length as u64;
            }
            _ => self.moved.written_staged += length as u64,
        }
        write.in_flight += 1;
        request.disk_since.get_or_insert_with(Instant::now);
        let length = length as u64;
        let fragment = Fragment { request: key.0, offset, length, done: 0, lends: false };
        let token = self.fragments.insert(fragment);
        driver.begin(token.to_bits(), work);
    }

    /// Tells that a write is over, if it is.
    fn end_write(&mut self, key: Key) {
        let Some(request) = self.requests.get_mut(key) else { return };
        let Kind::Write(write) = &mut request.kind else { return };
        if write.in_flight > 0 || write.next < write.end {
            return;
        }
        let result = write.error.take().map_or(Ok(()), Err);
        let (tag, times, owner) = (request.tag, request.times(), request.owner);
        if self.owners.get_mut(owner).is_some() {
            self.outputs.push_back(Output::Done { tag, result, times });
        }
        self.remove_request(key);
    }

    /// The rest of a write will never come. True: parts of it are under way, and it will be told
    /// that it is over.
    pub fn abandon(&mut self, key: RequestKey) -> bool {
        let Some(request) = self.requests.get_mut(key.0) else { return false };
        let Kind::Write(write) = &mut request.kind else { return false };
        if write.in_flight > 0 {
            write.next = write.end;
            return true;
        }
        self.remove_request(key.0);
        false
    }

    /// Something without payload that waits for a device; what it returns is told as
    /// [`Output::Extents`] if it `asks` for them, else as [`Output::Done`].
    pub fn ask(
        &mut self,
        owner: OwnerKey,
        tag: T,
        call: Box<dyn FnOnce() -> io::Result<Vec<Vec<Status>>> + Send>,
        arrived: Instant,
        driver: &mut dyn Driver,
    ) {
        let Some(key) = self.add(owner, tag, Kind::Other, arrived) else { return };
        if let Some(request) = self.requests.get_mut(key) {
            request.disk_since = Some(Instant::now());
        }
        driver.begin(key.to_bits(), Work::Ask(call));
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
        buffer: PoolBuffer,
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
                if let Some(found) = self.owners.get_mut(owner) {
                    found.in_flight -= fragment.length;
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
        let call: Box<dyn FnOnce() -> _ + Send> = match &request.kind {
            Kind::Read(read) => {
                let disk = read.disk.clone();
                Box::new(move || {
                    let result = disk.store.read(offset, &mut buffer.bytes_mut()[range]);
                    (result.map(|()| missing), buffer)
                })
            }
            Kind::Write(write) => {
                let (disk, durable) = (write.disk.clone(), write.durable);
                Box::new(move || {
                    let result = disk.store.write(offset, &buffer.bytes()[range], durable);
                    (result.map(|()| missing), buffer)
                })
            }
            Kind::Other => return,
        };
        let token = self.fragments.insert(fragment);
        driver.begin(token.to_bits(), Work::Call(call));
    }
}

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;

enum Step {
    Goes,
    AllBegun,
    NoMemory,
}

impl Read {
    /// What landed need not be kept until the disk is done with the rest.
    fn may_be_told(&self) -> bool {
        !self.serial || (self.in_flight == 0 && (self.cursor.is_done() || self.failed))
    }
}

impl<T> Request<T> {
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
