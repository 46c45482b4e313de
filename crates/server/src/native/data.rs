//! The data of writes: granted when there is a buffer for it, and received into that buffer.

use super::{Granted, Kind, Writing};
use crate::complaints;
use crate::core::{Core, Ticket};
use crate::grants::{GRANTS_SCARCE, grant_message};
use std::time::Instant;
use towline_block::{Engine, Short};
use towline_net::Target;
use towline_wire::header::data_flag;
use towline_wire::{Errno, Header, ProtocolError};

impl Writing {
    /// Grants the next fragment, which has its place from now on.
    fn grant(&mut self, engine: &mut Engine<Ticket>) -> Result<&Granted, Short> {
        // Data that is checked before it is written needs a buffer.
        let in_place = match self.checking {
            Some(_) => None,
            None => engine.room_in_place(self.key),
        };
        let (buffer, length) = match in_place {
            Some(length) => (None, length),
            None => engine.room(self.key).map(|(buffer, length)| (Some(buffer), length))?,
        };
        let offset = self.granted;
        self.granted += length as u64;
        if offset == 0 {
            self.first = length;
        }
        self.grants.push_back(Granted {
            offset,
            length,
            buffer,
            placed: 0,
            lost: false,
            ahead: false,
        });
        self.grants.back().ok_or(Short::Nothing)
    }
}

impl Core {
    /// Gives buffers to writes that wait for data, in turn.
    pub(crate) fn grant_disks(&mut self) {
        for _ in 0..GRANTS_SCARCE * self.disk_grants.len() {
            let Some((low, (session, slot))) = self.disk_grants.pop() else { return };
            let Some(served) = self.sessions.get_mut(session) else { continue };
            let index = served.lane.map(|lane| lane as usize);
            let Some(Some(under)) = served.disks.requests.get_mut(usize::from(slot)) else {
                continue;
            };
            let sequence = under.sequence;
            let Kind::Write(write) = &mut under.kind else { continue };
            if let Some(inline) = write.inline.take() {
                let (key, filled) = (write.key, write.filled as usize);
                let (mut buffer, length) = match self.engine.room(key) {
                    Ok(room) => room,
                    Err(short) => {
                        write.inline = Some(inline);
                        if self.waits_for_memory(short, low, (session, slot)) {
                            return;
                        }
                        continue;
                    }
                };
                buffer.bytes_mut()[..length].copy_from_slice(&inline[filled..filled + length]);
                write.filled += length as u64;
                if write.filled < write.length {
                    write.inline = Some(inline);
                    self.disk_grants.push(low, (session, slot));
                }
                let (engine, mut driver) = self.engine_and_driver();
                engine.filled(key, buffer, length, &mut driver);
                continue;
            }
            if write.failed.is_some()
                || write.grants.len() >= GRANTS_SCARCE
                || write.granted >= write.length
            {
                continue;
            }
            let Some(Some(lane)) = index.and_then(|index| self.lanes.get_mut(index)) else {
                continue;
            };
            let message = match write.grant(&mut self.engine) {
                Ok(granted) => grant_message(slot, sequence, granted.offset, granted.length),
                Err(short) => {
                    if self.waits_for_memory(short, low, (session, slot)) {
                        return;
                    }
                    continue;
                }
            };
            lane.send_header(&message);
            lane.note_grant(Instant::now());
            self.ticking = true;
            self.dirty.extend(index);
            self.disk_grants.push(low, (session, slot));
        }
    }

    /// Prepares for `bytes` bytes that follow a write. If there is room and they are its first fragment, they
    /// are received into their place.
    pub(crate) fn expect_ahead(&mut self, session: u64, index: usize, header: &Header, bytes: u32) {
        let Some(Some(lane)) = self.lanes.get_mut(index) else { return };
        let Some(served) = self.sessions.get_mut(session) else { return };
        let Some(under) = served.disks.find(header.slot, header.sequence) else { return };
        let Kind::Write(write) = &mut under.kind else { return };
        if write.inline.is_some() || write.grant(&mut self.engine).is_err() {
            return;
        }
        if let Some(granted) = write.grants.front_mut() {
            granted.ahead = granted.length == bytes as usize;
            if !granted.ahead {
                // What follows has no place; the client sends this fragment again.
                lane.send_header(&grant_message(
                    header.slot,
                    header.sequence,
                    granted.offset,
                    granted.length,
                ));
                self.dirty.push(index);
            }
        }
        lane.note_grant(Instant::now());
        self.ticking = true;
    }

    /// Returns how many bytes the client may send ahead with its next write: what the first fragment of this
    /// write could have been.
    pub(super) fn leave_after(&self, write: &Writing) -> Option<usize> {
        let whole = self.engine.fragment_bytes() as usize;
        match write.first as u64 {
            0 => None,
            first if first == write.length => Some(whole),
            first => Some(first as usize),
        }
        .filter(|_| write.failed.is_none())
    }

    /// Queues a write for grants.
    pub(crate) fn queue_disk_write(&mut self, session: u64, slot: u16) {
        let is_low = self.sessions.get(session).is_some_and(|served| served.is_low);
        self.disk_grants.push(is_low, (session, slot));
    }

    /// Puts back a write that waits for memory. Returns true if all others wait as well.
    fn waits_for_memory(&mut self, short: Short, low: bool, write: (u64, u16)) -> bool {
        match short {
            Short::Disk => self.disk_grants.push(low, write),
            Short::Memory | Short::Nothing => self.disk_grants.put_back(low, write),
        }
        short != Short::Disk
    }

    /// Returns where data of a write to a disk goes, of which `done` bytes have arrived; `None`: it has no
    /// place.
    pub(crate) fn disk_place(
        &mut self,
        session: u64,
        header: &Header,
        done: usize,
        rest: usize,
    ) -> Option<Target<'_>> {
        let served = self.sessions.get_mut(session)?;
        let Kind::Write(write) = &mut served.disks.find(header.slot, header.sequence)?.kind else {
            return None;
        };
        let key = write.key;
        let grant = write.grants.front_mut()?;
        let is_ahead = header.flags & data_flag::AHEAD != 0;
        let is_granted = grant.offset == header.offset && done + rest <= grant.length;
        // Data that began before it was granted lacks its beginning in the buffer, which held other clients'
        // data.
        if !is_granted || grant.placed != done || grant.lost || grant.ahead != is_ahead {
            return None;
        }
        if let Some(buffer) = &mut grant.buffer {
            return Some(Target::Own(&mut buffer.bytes_mut()[done..done + rest]));
        }
        let landing = self.engine.landing(key, rest);
        grant.lost = landing.is_none();
        landing.map(|(memory, range)| Target::Shared(memory, range))
    }

    /// Notes that `count` bytes were received into the place from [`Core::disk_place`].
    pub(crate) fn disk_placed(&mut self, session: u64, header: &Header, count: usize) {
        let Some(served) = self.sessions.get_mut(session) else { return };
        let Some(under) = served.disks.find(header.slot, header.sequence) else { return };
        let Kind::Write(write) = &mut under.kind else { return };
        let Some(grant) = write.grants.front_mut() else { return };
        grant.placed += count;
        if grant.buffer.is_none() {
            self.engine.landed(write.key, count);
        }
    }

    /// Handles a fragment of a write to a disk that has arrived completely. Returns false if this slot has no
    /// write to a disk.
    ///
    /// # Errors
    /// The data does not match its grant.
    pub(crate) fn disk_data(
        &mut self,
        session: u64,
        index: usize,
        header: &Header,
    ) -> Result<bool, ProtocolError> {
        let wrong = |what| Err(ProtocolError { what, at: 0 });
        let Some(served) = self.sessions.get_mut(session) else { return Ok(false) };
        let Some(under) = served.disks.find(header.slot, header.sequence) else {
            return Ok(false);
        };
        let Kind::Write(write) = &mut under.kind else { return Ok(false) };
        let is_ahead = header.flags & data_flag::AHEAD != 0;
        let Some(grant) = write.grants.pop_front() else {
            // Granted before the write failed.
            return if write.failed.is_some() { Ok(true) } else { wrong("data without a grant") };
        };
        if let Some(Some(lane)) = self.lanes.get_mut(index) {
            lane.granted = lane.granted.saturating_sub(1);
            lane.since = Instant::now();
        }
        let is_granted =
            grant.offset == header.offset && grant.length == header.payload_bytes as usize;
        let came_whole = grant.placed == grant.length || grant.lost;
        if !is_granted || !came_whole || grant.ahead != is_ahead {
            return wrong("data does not match its grant");
        }
        let Granted { length, buffer, lost, .. } = grant;
        if let Some(buffer) = &buffer
            && !write.checking.as_mut().is_none_or(|c| c.matches(&buffer.bytes()[..length]))
        {
            self.refuse_data(session, index, header);
            return Ok(true);
        }
        write.filled += length as u64;
        let (key, filled) = (write.key, write.filled);
        if write.granted < write.length {
            self.disk_grants.push(served.is_low, (session, header.slot));
        }
        let Some(buffer) = buffer else {
            if lost {
                self.engine.lost(key, filled);
            }
            return Ok(true);
        };
        let (engine, mut driver) = self.engine_and_driver();
        engine.filled(key, buffer, length, &mut driver);
        Ok(true)
    }

    /// Refuses data that differs from what was sent: no more of the write is written.
    fn refuse_data(&mut self, session: u64, index: usize, header: &Header) {
        let Some(served) = self.sessions.get_mut(session) else { return };
        let Some(under) = served.disks.find(header.slot, header.sequence) else { return };
        let Kind::Write(write) = &mut under.kind else { return };
        complaints::warn(format_args!(
            "disk \"{}\": refused a write whose data does not match its checksums",
            under.disk.name
        ));
        write.failed = Some(Errno::EBADMSG);
        // Their data will find no place.
        let unused = std::mem::take(&mut write.grants).len();
        let goes_on = self.engine.abandon(write.key);
        if let Some(Some(lane)) = self.lanes.get_mut(index) {
            lane.granted = lane.granted.saturating_sub(unused);
        }
        if !goes_on {
            self.finish_disk_request(session, header.slot, header.sequence, Ok(()), None);
        }
    }

    /// Notes that a session has lost its lane. Its reads and the requests held back are forgotten; granted
    /// data will be sent again.
    pub(crate) fn suspend_disks(&mut self, session: u64) {
        let waited = self.waiting.forget(session);
        let Some(served) = self.sessions.get_mut(session) else { return };
        for slot in waited {
            served.session.slots.answer(slot, None);
        }
        for (slot, place) in served.disks.requests.iter_mut().enumerate() {
            let Some(under) = place else { continue };
            match &mut under.kind {
                Kind::Read(_) => {
                    served.session.slots.answer(slot as u16, None);
                    *place = None;
                }
                // A write that has failed expects no more data.
                Kind::Write(Writing {
                    key,
                    grants,
                    granted,
                    filled,
                    inline: None,
                    failed: None,
                    ..
                }) => {
                    grants.clear();
                    *granted = *filled;
                    self.engine.rewind(*key, *filled);
                }
                _ => {}
            }
        }
    }

    /// Ends the requests of a session that is over.
    pub(crate) fn end_disks(&mut self, disks: super::SessionDisks) {
        for under in disks.requests.into_iter().flatten() {
            if let Kind::Write(write) = under.kind {
                self.engine.abandon(write.key);
            }
        }
        if let Some(owner) = disks.owner {
            self.engine.remove_owner(owner);
        }
    }
}
