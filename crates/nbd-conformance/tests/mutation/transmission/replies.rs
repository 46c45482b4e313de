//! Replies of the faulty server: simple ones, chunks, extents.

use std::io;

use nbd_conformance::wire::*;

use super::Outcome::{self, Data, Done, Error, Status};
use super::{PIECE, Request, Transmission};
use crate::server::{CONTEXTS, GRAIN, SIZE};

impl Transmission {
    pub(super) fn reply(&mut self, request: &Request, outcome: Outcome) -> io::Result<()> {
        let mut bytes = Vec::new();
        let fails = request.command == CMD_READ && matches!(outcome, Error(_));
        if self.chunks() {
            self.chunked(&mut bytes, request, outcome);
        } else {
            let (error, data) = match outcome {
                Data(data) => (0, data),
                Error(error) => (error, Vec::new()),
                Done | Status(..) => (0, Vec::new()),
            };
            self.simple(&mut bytes, request, error);
            bytes.extend(data);
        }
        if self.has("reply-lost-before-disc") && self.count == 16 {
            self.held = bytes;
            return Ok(());
        }
        self.client.send(&[&bytes])?;
        if fails && self.has("read-error-closes") { Err(self.closed()) } else { Ok(()) }
    }

    fn simple(&self, out: &mut Vec<u8>, request: &Request, error: u32) {
        let cookie =
            if self.has("cookie-32") { request.cookie & 0xffff_ffff } else { request.cookie };
        out.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
        out.extend(error.to_be_bytes());
        out.extend(cookie.to_be_bytes());
        if error != 0 && request.command == CMD_READ && self.has("error-with-payload") {
            out.extend(vec![0; 512]);
        }
    }

    fn chunk(&self, out: &mut Vec<u8>, request: &Request, kind: u16, done: bool, parts: &[&[u8]]) {
        let payload = parts.concat();
        let mut flags = u16::from(done);
        if self.has("reply-flag-2") {
            flags |= 2;
        }
        if self.client.extended {
            out.extend(EXTENDED_REPLY_MAGIC.to_be_bytes());
        } else {
            out.extend(STRUCTURED_REPLY_MAGIC.to_be_bytes());
        }
        out.extend(flags.to_be_bytes());
        out.extend(kind.to_be_bytes());
        out.extend(request.cookie.to_be_bytes());
        if self.client.extended {
            let offset = if self.has("extended-offset-0") { 0 } else { request.offset };
            out.extend(offset.to_be_bytes());
            out.extend((payload.len() as u64).to_be_bytes());
        } else {
            out.extend((payload.len() as u32).to_be_bytes());
        }
        out.extend(payload);
    }

    fn chunked(&self, out: &mut Vec<u8>, request: &Request, outcome: Outcome) {
        match outcome {
            Done => {
                let payload: &[u8] = if self.has("none-with-payload") { b"x" } else { b"" };
                self.chunk(out, request, REPLY_NONE, true, &[payload]);
            }
            // With extended headers no client could tell where such a reply ends.
            Error(_)
                if request.command == CMD_READ
                    && !self.client.extended
                    && self.has("simple-error-to-read") =>
            {
                self.simple(out, request, EINVAL);
            }
            Error(_) if self.has("extended-simple-errors") => self.simple(out, request, EINVAL),
            Error(error) => self.error(out, request, error),
            Data(data) => self.data(out, request, &data),
            Status(ids, length) => self.statuses(out, request, &ids, length),
        }
    }

    fn error(&self, out: &mut Vec<u8>, request: &Request, error: u32) {
        let error = if self.has("error-0") { 0 } else { error };
        let text = b"refused";
        let length = (text.len() as u16).to_be_bytes();
        let parts: [&[u8]; 3] = [&error.to_be_bytes(), &length, text];
        if self.has("error-offset-outside") && request.command == CMD_READ {
            let offset = request.offset.wrapping_sub(1).to_be_bytes();
            let parts = [parts[0], parts[1], parts[2], &offset];
            return self.chunk(out, request, REPLY_ERROR_OFFSET, true, &parts);
        }
        self.chunk(out, request, REPLY_ERROR, true, &parts);
    }

    fn data(&self, out: &mut Vec<u8>, request: &Request, data: &[u8]) {
        let whole = request.flags & CMD_FLAG_DF != 0;
        let split =
            whole && (self.has("df-ignored") || self.has("df-large-split") && data.len() > PIECE);
        let piece = match () {
            () if split => 4096,
            () if whole => data.len().max(1),
            () => PIECE,
        };
        for (number, part) in data.chunks(piece).enumerate() {
            let offset = request.offset + (number * piece) as u64;
            let shift = if self.has("chunk-outside") { SIZE } else { 0 };
            let offset = (offset + shift).to_be_bytes();
            let hole = !whole && part.iter().all(|byte| *byte == 0) && part.len() > 512;
            if hole {
                let length = if self.has("hole-0") { 0 } else { part.len() as u32 };
                self.chunk(
                    out,
                    request,
                    REPLY_OFFSET_HOLE,
                    false,
                    &[&offset, &length.to_be_bytes()],
                );
            } else {
                self.chunk(out, request, REPLY_OFFSET_DATA, false, &[&offset, part]);
            }
            if self.has("chunk-twice") {
                self.chunk(out, request, REPLY_OFFSET_DATA, false, &[&offset, part]);
            }
            if self.has("chunk-missing") && number > 0 {
                break;
            }
        }
        if self.has("empty-data-chunk") {
            let offset = request.offset.to_be_bytes();
            self.chunk(out, request, REPLY_OFFSET_DATA, false, &[&offset]);
        }
        if self.has("chunk-type-7") {
            self.chunk(out, request, 7, false, &[]);
        }
        self.chunk(out, request, REPLY_NONE, true, &[]);
    }

    fn statuses(&self, out: &mut Vec<u8>, request: &Request, ids: &[u32], length: u64) {
        let several = ids.len() > 1;
        let ids = if self.has("filter-all") { &self.client.contexts } else { ids };
        for id in ids {
            let shown = if several && self.has("contexts-swapped") { 3 - *id } else { *id };
            let extents = self.extents(request, *id, length);
            let mut payload = shown.to_be_bytes().to_vec();
            let kind = if self.client.extended {
                payload.extend((extents.len() as u32).to_be_bytes());
                payload.extend(extents.iter().flat_map(|(length, status)| {
                    [length.to_be_bytes(), u64::from(*status).to_be_bytes()].concat()
                }));
                REPLY_BLOCK_STATUS_EXT
            } else {
                payload.extend(extents.iter().flat_map(|(length, status)| {
                    [(*length as u32).to_be_bytes(), status.to_be_bytes()].concat()
                }));
                REPLY_BLOCK_STATUS
            };
            self.chunk(out, request, kind, false, &[&payload]);
            if self.has("context-missing") {
                break;
            }
        }
        self.chunk(out, request, REPLY_NONE, true, &[]);
    }

    /// Returns the extents of a context: length and status.
    fn extents(&self, request: &Request, id: u32, length: u64) -> Vec<(u64, u32)> {
        let disk = self.client.server.disk();
        let end = request.offset + length;
        let mut extents: Vec<(u64, u32)> = Vec::new();
        let mut offset = request.offset;
        while offset < end {
            let grain = offset as usize / GRAIN;
            let next = ((grain + 1) * GRAIN) as u64;
            let bytes = &disk.bytes[grain * GRAIN..(grain + 1) * GRAIN];
            let mut status = match CONTEXTS[id as usize - 1] {
                "base:allocation" if disk.holes[grain] => 3,
                "base:allocation" if self.has("all-zero") => 2,
                "base:allocation" if bytes.iter().all(|byte| *byte == 0) => 2,
                "base:allocation" => 0,
                _ => (grain >> 8) as u32 & 1,
            };
            if self.has("status-bit-5") {
                status |= 1 << 5;
            }
            match extents.last_mut() {
                Some(last) if last.1 == status && !self.has("extents-not-merged") => {
                    last.0 += next.min(end) - offset;
                }
                _ => extents.push((next.min(end) - offset, status)),
            }
            offset = next;
        }
        if request.flags & CMD_FLAG_REQ_ONE != 0 && !self.has("req-one-ignored") {
            extents.truncate(1);
        }
        match () {
            () if self.has("extent-0") => extents.insert(0, (0, 0)),
            // The end stays where it was, so that the next question is still aligned.
            () if self.has("extent-unaligned") && extents.len() > 1 => {
                extents[0].0 -= 1;
                extents[1].0 += 1;
            }
            () if self.has("extent-surplus") => extents.push((512, 0)),
            () if self.has("extent-beyond-size") => extents.last_mut().unwrap().0 += SIZE,
            () => {}
        }
        extents
    }
}
