//! Decides which fragments of reads to start, and when.

use super::{Engine, Fragment, Kind, Request};
use crate::memory::Short;
use crate::request::{Driver, How, Piece, Waiting, Work};
use crate::slab::Key;
use crate::ways::{ReadWork, at_once, read_work};
use std::time::Instant;

enum Step {
    Goes,
    AllBegun,
    No(Short),
}

impl<T: Copy> Engine<T> {
    /// Starts all fragments that may be started; connections take turns, one fragment at a time.
    pub fn pump(&mut self, driver: &mut dyn Driver) {
        self.starved = false;
        self.unpark();
        while let Some(owner_key) = self.line.pop_front() {
            let Some(owner) = self.owners.get_mut(owner_key) else { continue };
            let full = owner.is_full(&self.memory.limits);
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
                Step::No(Short::Disk) => {
                    self.give_up_serial([(owner_key, key)]);
                    self.parked.push((owner_key, key));
                    let Some(owner) = self.owners.get_mut(owner_key) else { continue };
                    if self.requests.get(key).is_some_and(Request::is_ordered) {
                        // Ordered reads are also read in order: otherwise the data of later reads would wait
                        // for this one and could use up the owner's memory limit.
                        (owner.in_line, owner.waits) = (false, true);
                        continue;
                    }
                    owner.reads.pop_front();
                }
                Step::No(_) => {
                    self.line.push_front(owner_key);
                    self.starved = true;
                    let begun = |key: &Key| Some((*key, *self.owners.get(*key)?.reads.front()?));
                    let begun: Vec<_> = self.line.iter().filter_map(begun).collect();
                    self.give_up_serial(begun);
                    return;
                }
            }
            self.line.push_back(owner_key);
        }
    }

    /// Puts parked reads back in line if their disks have released memory.
    fn unpark(&mut self) {
        for (owner, read) in std::mem::take(&mut self.parked) {
            if !self.may_go_on(read) {
                self.parked.push((owner, read));
            } else if let Some(found) = self.owners.get_mut(owner) {
                if !std::mem::take(&mut found.waits) {
                    found.reads.push_back(read);
                }
                self.get_in_line(owner);
            }
        }
    }

    /// Returns true if this read's disk may have more memory.
    pub(super) fn may_go_on(&self, read: Key) -> bool {
        match self.requests.get(read).map(|request| &request.kind) {
            Some(Kind::Read(read)) => self.memory.has_room_for(&read.disk),
            _ => true,
        }
    }

    /// Starts the next fragment of a read.
    fn step(&mut self, key: Key, driver: &mut dyn Driver) -> Step {
        let Some(request) = self.requests.get_mut(key) else { return Step::AllBegun };
        let Kind::Read(read) = &mut request.kind else { return Step::AllBegun };
        let Some((offset, mut rest)) = read.cursor.peek().filter(|_| !read.failed) else {
            return Step::AllBegun;
        };
        let owner = self.owners.get(request.owner);
        // Memory at a disk that may hang is charged to the disk until the data lands.
        let counted = !read.serial && !read.disk.store.may_hang();
        let account = owner.filter(|_| counted).map(|owner| owner.held.clone());
        if read.how == How::Whole {
            rest = read.cursor.rest();
            let disk = read.disk.clone();
            let mut buffer = match self.memory.take(&disk, rest) {
                Ok(buffer) => buffer,
                Err(short) => return Step::No(short),
            };
            if let Some(account) = &account {
                buffer = buffer.charged_to(account);
            }
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
            if !read.serial
                && let Some(owner) = self.owners.get_mut(request.owner)
            {
                // Counts as unsent until the front reports the true number; without this, the pieces of a
                // client that takes nothing would pile up.
                owner.unsent += piece.len();
            }
            self.land(key, offset, Ok(piece));
            return if all { Step::AllBegun } else { Step::Goes };
        }
        let most = read.cursor.fragment(self.memory.limits.fragments.buffer_bytes() as u64);
        let (disk, how) = (&read.disk, read.how);
        let work = read_work(&mut self.memory, disk, offset, most, how, account.as_ref());
        let (work, length) = match work {
            Ok(work) => work,
            Err(short) => return Step::No(short),
        };
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

    /// Makes these reads give up serial delivery, because all memory available to them is in use. Each of
    /// them keeps its data until it is complete, so they would wait for each other forever.
    fn give_up_serial(&mut self, reads: impl IntoIterator<Item = (Key, Key)>) {
        for (owner, read) in reads {
            if let Some(request) = self.requests.get_mut(read)
                && let Kind::Read(found) = &mut request.kind
                && std::mem::replace(&mut found.serial, false)
            {
                self.tell_landed(read, owner);
            }
        }
    }

    /// Hands a fragment to the driver.
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
        let disk = &read.disk;
        if let Some(owner) = self.owners.get_mut(request.owner).filter(|_| !disk.store.may_hang()) {
            owner.in_flight += length;
        }
        let fragment = Fragment { request: key, offset, length, done: 0, lends, phase: None };
        let token = self.fragments.insert(fragment);
        driver.begin(token.to_bits(), disk, work);
    }
}
