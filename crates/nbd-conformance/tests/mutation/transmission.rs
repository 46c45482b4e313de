//! Transmission phase of the faulty server.

mod replies;

use std::collections::HashSet;
use std::io;
use std::sync::atomic::Ordering;

use nbd_conformance::wire::*;

use super::server::{Client, GRAIN, MAXIMUM, MINIMUM, SIZE, Setup};

/// Reads are answered in pieces of this many bytes.
const PIECE: usize = 64 << 10;

struct Request {
    flags: u16,
    command: u16,
    cookie: u64,
    offset: u64,
    length: u64,
    payload: Vec<u8>,
}

/// Result of a command.
enum Outcome {
    Done,
    Data(Vec<u8>),
    Status(Vec<u32>, u64),
    Error(u32),
}
use Outcome::{Data, Done, Error, Status};

struct Transmission {
    client: Client,
    /// The export as this connection sees it, for the faults that hide other connections' writes.
    own: Option<Vec<u8>>,
    /// Delayed writes, for the fault that writes are lazy.
    lazy: Vec<(usize, Vec<u8>)>,
    /// A reply held back, for the fault that DISC loses it.
    held: Vec<u8>,
    count: u64,
    cookies: HashSet<u64>,
}

pub(super) fn run(client: Client) -> io::Result<()> {
    let own = (client.has("private-cache") || client.has("writes-private"))
        .then(|| client.server.disk().bytes.clone());
    let mut transmission = Transmission {
        client,
        own,
        lazy: Vec::new(),
        held: Vec::new(),
        count: 0,
        cookies: HashSet::new(),
    };
    while transmission.turn()? {}
    Ok(())
}

impl Transmission {
    fn has(&self, fault: &str) -> bool {
        self.client.has(fault)
    }

    fn chunks(&self) -> bool {
        self.client.structured || self.client.extended || self.has("structured-always")
    }

    fn closed(&self) -> io::Error {
        io::ErrorKind::ConnectionAborted.into()
    }

    /// Serves one request. Returns false at the end.
    fn turn(&mut self) -> io::Result<bool> {
        let Some(request) = self.recv()? else { return Ok(false) };
        self.count += 1;
        if request.command == CMD_DISC {
            if self.has("disc-replies") {
                self.reply(&request, Done)?;
            }
            return Ok(false);
        }
        if !std::mem::take(&mut self.held).is_empty() && !self.has("reply-lost-before-disc") {
            return Err(self.closed());
        }
        if self.has("cookie-once") && !self.cookies.insert(request.cookie) {
            return Err(self.closed());
        }
        if self.has("hundredth-unanswered") && self.count.is_multiple_of(100) {
            return Ok(true);
        }
        if request.command != CMD_WRITE {
            for (start, data) in std::mem::take(&mut self.lazy) {
                self.client.server.disk().bytes[start..start + data.len()].copy_from_slice(&data);
            }
        }
        let outcome = self.serve(&request)?;
        let gone = self.reply(&request, outcome);
        if gone.is_err() && self.has("client-gone-kills") {
            self.client.server.die();
        }
        gone.map(|()| true)
    }

    fn recv(&mut self) -> io::Result<Option<Request>> {
        let extended = self.client.extended;
        let Ok(first) = self.client.recv(1) else {
            if self.has("half-close-answered") {
                self.client.send(&[b"over"])?;
            }
            return Ok(None);
        };
        let rest = if extended { 31 } else { 27 };
        let header = if self.has("compact-accepted") && extended {
            let mut header = self.client.recv(27)?;
            header.splice(23..23, [0; 4]);
            header
        } else {
            self.client.recv_or(rest, "request-one-read").inspect_err(|_| {
                if self.client.server.has("gone-in-request-kills") {
                    self.client.server.die();
                }
            })?
        };
        let header = [first, header].concat();
        let magic = u32::from_be_bytes(header[..4].try_into().unwrap());
        let known = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        if magic != known && !self.has("request-magic-ignored") && !self.has("compact-accepted") {
            return Err(self.closed());
        }
        let number = |range: std::ops::Range<usize>| {
            header[range].iter().fold(0, |number: u64, byte| number << 8 | u64::from(*byte))
        };
        let (flags, command) = (number(4..6) as u16, number(6..8) as u16);
        let mut length = number(24..header.len());
        if self.has("length-truncated") {
            length &= 0xffff_ffff;
        }
        let (cookie, offset) = (number(8..16), number(16..24));
        let carries =
            if extended { flags & CMD_FLAG_PAYLOAD_LEN != 0 } else { command == CMD_WRITE };
        let mut request = Request { flags, command, cookie, offset, length, payload: Vec::new() };
        if carries {
            self.recv_payload(&mut request)?;
        }
        Ok(Some(request))
    }

    fn recv_payload(&mut self, request: &mut Request) -> io::Result<()> {
        if request.length > PORTABLE_PAYLOAD_MAX {
            if self.has("huge-payload-kills") {
                self.client.server.die();
            }
            return Err(self.closed());
        }
        if request.length > 512 << 10 && self.has("large-write-closes") {
            return Err(self.closed());
        }
        let beyond = request.offset >= SIZE;
        if beyond && request.command == CMD_WRITE && self.has("payload-kept-on-error")
            || request.command != CMD_WRITE && self.has("payload-not-consumed")
        {
            return Ok(());
        }
        let payload = self.client.recv_or(request.length as usize, "payload-one-read");
        if payload.is_err() && self.has("gone-in-payload-kills") {
            self.client.server.die();
        }
        request.payload = payload?;
        Ok(())
    }

    fn serve(&mut self, request: &Request) -> io::Result<Outcome> {
        let Request { flags, command, offset, length, .. } = *request;
        if let Some(error) = self.bad_flags(flags & !CMD_FLAG_PAYLOAD_LEN, command) {
            return Ok(Error(error));
        }
        let payload = flags & CMD_FLAG_PAYLOAD_LEN != 0;
        if self.client.extended {
            let wanted = command == CMD_WRITE
                || command == CMD_BLOCK_STATUS && payload && !self.has("filter-ignored");
            if payload != wanted && !(command == CMD_WRITE && self.has("write-flag-optional")) {
                return Ok(Error(EINVAL));
            }
        }
        if command == CMD_FLUSH {
            return self.flush(offset);
        }
        let filtered = command == CMD_BLOCK_STATUS && payload;
        let (ids, length) = if filtered {
            match self.filter(&request.payload) {
                Some((ids, length)) => (ids, length),
                None => return Ok(Error(EINVAL)),
            }
        } else {
            (self.client.contexts.clone(), length)
        };
        match command {
            CMD_READ | CMD_WRITE | CMD_TRIM | CMD_CACHE | CMD_WRITE_ZEROES | CMD_BLOCK_STATUS => {}
            _ if self.has("unknown-command-closes") => return Err(self.closed()),
            _ if self.has("unknown-command-eio") => return Ok(Error(EIO)),
            _ if self.has("error-38") => return Ok(Error(38)),
            _ => return Ok(Error(EINVAL)),
        }
        let writes = matches!(command, CMD_WRITE | CMD_TRIM | CMD_WRITE_ZEROES);
        if writes && self.client.server.setup == Setup::ReadOnly {
            if self.has("read-only-written") && command == CMD_WRITE {
                self.write(offset, &request.payload);
            }
            return Ok(Error(if self.has("read-only-eio") { EIO } else { EPERM }));
        }
        if let Some(outcome) = self.bad_range(command, offset, length)? {
            return Ok(outcome);
        }
        match command {
            CMD_READ => self.read(offset, length),
            CMD_WRITE => Ok(self.write_request(request)),
            CMD_TRIM => Ok(self.trim(offset, length)),
            CMD_WRITE_ZEROES => self.zeroes(flags, offset, length),
            CMD_CACHE => {
                if self.has("cache-zeroes") {
                    self.zero(offset, length, false);
                }
                Ok(Done)
            }
            _ if ids.is_empty() && !self.has("status-unselected-ok") => Ok(Error(EINVAL)),
            _ => Ok(Status(ids, length)),
        }
    }

    fn bad_flags(&self, flags: u16, command: u16) -> Option<u32> {
        let announced = self.client.server.flags(self.chunks(), self.client.extended);
        let mut allowed = match command {
            CMD_READ if announced & FLAG_SEND_DF != 0 || self.has("df-unannounced-ok") => {
                CMD_FLAG_DF
            }
            CMD_WRITE_ZEROES if announced & FLAG_SEND_FAST_ZERO != 0 => {
                CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO
            }
            CMD_WRITE_ZEROES => CMD_FLAG_NO_HOLE,
            CMD_BLOCK_STATUS => CMD_FLAG_REQ_ONE,
            _ => 0,
        };
        if announced & FLAG_SEND_FUA != 0 || self.has("fua-unannounced-ok") {
            allowed |= CMD_FLAG_FUA;
        }
        let refused = self.has("fua-read-refused") && command == CMD_READ
            || self.has("fua-zeroes-refused") && command == CMD_WRITE_ZEROES;
        if refused {
            allowed &= !CMD_FLAG_FUA;
        }
        if self.has("no-hole-refused") {
            allowed &= !CMD_FLAG_NO_HOLE;
        }
        let ignored = [
            ("flags-ignored", true),
            ("write-flag-ignored", command == CMD_WRITE),
            ("flush-flag-ignored", command == CMD_FLUSH),
            ("cache-flag-ignored", command == CMD_CACHE),
            ("status-flag-ignored", command == CMD_BLOCK_STATUS),
            ("zeroes-flag-ignored", command == CMD_WRITE_ZEROES),
            ("trim-flag-ignored", command == CMD_TRIM),
        ];
        if ignored.iter().any(|(fault, here)| *here && self.has(fault)) {
            return None;
        }
        (flags & !allowed != 0).then_some(EINVAL)
    }

    fn flush(&self, offset: u64) -> io::Result<Outcome> {
        if self.client.server.setup == Setup::Plain {
            let close = self.has("flush-unannounced-closes");
            return if close { Err(self.closed()) } else { Ok(Error(EINVAL)) };
        }
        Ok(match () {
            () if self.has("flush-enotsup") => Error(ENOTSUP),
            () if self.has("flush-range-eio") && offset != 0 => Error(EIO),
            () => Done,
        })
    }

    fn filter(&self, payload: &[u8]) -> Option<(Vec<u32>, u64)> {
        let (length, ids) = payload.split_first_chunk::<8>()?;
        if ids.len() % 4 != 0 {
            return None;
        }
        let ids: Vec<_> =
            ids.chunks_exact(4).map(|id| u32::from_be_bytes(id.try_into().unwrap())).collect();
        let length = u64::from_be_bytes(*length);
        match ids.iter().all(|id| self.client.contexts.contains(id)) {
            true => Some((ids, length)),
            false if self.has("filter-unknown-ok") => Some((self.client.contexts.clone(), length)),
            false => None,
        }
    }

    /// Returns the outcome of an invalid range; `None` if the range is valid.
    fn bad_range(&self, command: u16, offset: u64, length: u64) -> io::Result<Option<Outcome>> {
        let has = |fault| self.has(fault);
        if command == CMD_CACHE && self.client.server.setup == Setup::Plain {
            let close = has("cache-unannounced-closes");
            return if close { Err(self.closed()) } else { Ok(Some(Error(EINVAL))) };
        }
        if length == 0 && has("zero-length-closes") {
            return Err(self.closed());
        }
        if length > u64::from(u32::MAX) && has("long-status-closes") && command == CMD_BLOCK_STATUS
        {
            return Err(self.closed());
        }
        let full = self.client.server.setup != Setup::Plain;
        let block = self.client.server.setup.block();
        let aligned = offset.is_multiple_of(block) && length.is_multiple_of(block);
        if full && !aligned && !has("misaligned-ok") {
            return Ok(Some(Error(EINVAL)));
        }
        if offset.checked_add(length).is_none_or(|end| end > SIZE) {
            return Ok(Some(match command {
                CMD_READ if has("read-beyond-eio") => Error(EIO),
                CMD_READ if has("read-beyond-ok") => Data(vec![0; length as usize]),
                CMD_WRITE if has("write-beyond-eio") => Error(EIO),
                CMD_WRITE_ZEROES if has("zeroes-beyond-eio") => Error(EIO),
                CMD_TRIM if has("trim-beyond-enospc") => Error(ENOSPC),
                CMD_CACHE if has("cache-beyond-ok") => Done,
                CMD_BLOCK_STATUS if has("status-beyond-eio") => Error(EIO),
                CMD_WRITE | CMD_WRITE_ZEROES => Error(ENOSPC),
                _ => Error(EINVAL),
            }));
        }
        let carries = matches!(command, CMD_READ | CMD_WRITE);
        if full && carries && length > MAXIMUM && !has("too-large-ok") {
            return Ok(Some(Error(EINVAL)));
        }
        Ok(None)
    }

    fn read(&self, offset: u64, length: u64) -> io::Result<Outcome> {
        let range = offset as usize..(offset + length) as usize;
        let last = offset + length == SIZE;
        if self.has("second-mib-eio") && range.end > 1 << 20 || self.has("last-block-eio") && last {
            return Ok(Error(EIO));
        }
        if self.has("large-read-closes") && length >= MAXIMUM {
            return Err(self.closed());
        }
        let mut data = match &self.own {
            Some(own) => own[range].to_vec(),
            None => self.client.server.disk().bytes[range].to_vec(),
        };
        let wrong = self.has("long-read-wrong") && length > 100 << 10
            || self.has("chunked-read-wrong") && self.chunks();
        if wrong {
            data[7] ^= 1;
        }
        Ok(Data(data))
    }

    fn write_request(&mut self, request: &Request) -> Outcome {
        let Request { flags, offset, ref payload, .. } = *request;
        let number = self.client.server.writes.fetch_add(1, Ordering::SeqCst);
        let end = offset + payload.len() as u64;
        let lost = self.has("fiftieth-write-lost") && number % 50 == 49
            || self.has("last-write-lost") && end == SIZE
            || self.has("fua-write-lost") && flags & CMD_FLAG_FUA != 0;
        if lost {
            return Done;
        }
        if self.has("writes-lazy") {
            self.lazy.push((offset as usize, payload.clone()));
            return Done;
        }
        self.write(offset, payload);
        if self.has("write-spills") && end < SIZE {
            self.write(end, &[0xee]);
        }
        Done
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let range = offset as usize..offset as usize + data.len();
        if let Some(own) = &mut self.own {
            own[range.clone()].copy_from_slice(data);
            if self.client.has("writes-private") {
                return;
            }
        }
        let sticks = self.has("trim-sticks");
        let mut disk = self.client.server.disk();
        if sticks && range.clone().step_by(GRAIN).any(|at| disk.trimmed.contains(&(at / GRAIN))) {
            return;
        }
        disk.bytes[range.clone()].copy_from_slice(data);
        if !data.is_empty() {
            disk.holes[range.start / GRAIN..=(range.end - 1) / GRAIN].fill(false);
        }
    }

    /// Zeroes a range; with `hole`, grains entirely within it become holes.
    fn zero(&mut self, offset: u64, length: u64, hole: bool) {
        self.write(offset, &vec![0; length as usize]);
        if hole {
            let (start, end) = (offset as usize, (offset + length) as usize);
            let mut disk = self.client.server.disk();
            for grain in start.div_ceil(GRAIN)..end / GRAIN {
                disk.holes[grain] = true;
            }
        }
    }

    fn trim(&mut self, offset: u64, length: u64) -> Outcome {
        let outwards = if self.has("trim-rounds-out") { MINIMUM } else { 0 };
        self.zero(offset, (length + outwards).min(SIZE - offset), true);
        if self.has("trim-sticks") {
            let grains = offset as usize / GRAIN..(offset + length) as usize / GRAIN;
            self.client.server.disk().trimmed.extend(grains);
        }
        Done
    }

    fn zeroes(&mut self, flags: u16, offset: u64, length: u64) -> io::Result<Outcome> {
        if self.has("zeroes-large-closes") && length > MAXIMUM {
            return Err(self.closed());
        }
        let fast = flags & CMD_FLAG_FAST_ZERO != 0;
        let no_hole = flags & CMD_FLAG_NO_HOLE != 0;
        if fast && self.has("fast-zero-eio") {
            return Ok(Error(EIO));
        }
        // Here only holes are fast.
        if fast && no_hole {
            if self.has("fast-zero-changes") {
                self.zero(offset, length, false);
            }
            return Ok(Error(ENOTSUP));
        }
        let short = if self.has("zeroes-short") { MINIMUM } else { 0 };
        self.zero(offset, length - short.min(length), !no_hole || self.has("no-hole-hole"));
        Ok(Done)
    }
}
