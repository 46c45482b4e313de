//! Assembles replies and checks every rule on their form. Each violation is recorded under its rule, so
//! that a wrong reply fails only the rule that it breaks.

use super::chunk::{Chunk, Content};
use super::haggle::be32;
use super::session::{Mode, Request};
use crate::ensure;
use crate::rule::Problem;
use crate::wire::*;

/// A range of the export with one status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes.
    pub length: u64,
    /// Status bits; their meaning depends on the context.
    pub status: u64,
}

/// A violation of a rule by the form of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Identifier of the rule.
    pub rule: &'static str,
    /// What was seen, and in reply to which request.
    pub text: String,
}

/// A whole reply.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    /// The first error, or 0.
    pub error: u32,
    /// Data of a read, in order; empty for other commands and after errors.
    pub bytes: Vec<u8>,
    /// Extents of each context of a block status request.
    pub statuses: Vec<(u32, Vec<Extent>)>,
    /// Content chunks: type, offset and length.
    pub pieces: Vec<(u16, u64, u64)>,
    /// Number of messages in the reply.
    pub messages: usize,
    /// Whether the reply was a simple one.
    pub simple: bool,
    /// Violations of rules by its form.
    pub violations: Vec<Violation>,
}

impl Reply {
    /// Returns the name of the error, or "success".
    pub fn outcome(&self) -> String {
        error_name(self.error)
    }

    /// Returns the data of a successful read.
    ///
    /// # Errors
    /// Fails on an error reply.
    pub fn data(self) -> Result<Vec<u8>, Problem> {
        ensure!(self.error == 0, "read answered with {}", self.outcome());
        Ok(self.bytes)
    }

    /// Returns the extents of a context.
    ///
    /// # Errors
    /// Fails on an error reply, or if the context is missing.
    pub fn extents(&self, context: u32) -> Result<&[Extent], Problem> {
        ensure!(self.error == 0, "block status answered with {}", self.outcome());
        let found = self.statuses.iter().find(|(id, _)| *id == context);
        let missing = || Problem::Fail(format!("no status chunk for context {context}"));
        found.map(|(_, extents)| extents.as_slice()).ok_or_else(missing)
    }
}

/// A request in flight.
pub struct Pending {
    mode: Mode,
    request: Request,
    contexts: Vec<u32>,
    /// Parts of the read that content chunks and error chunks have covered: offset and length.
    covered: Vec<(u64, u64)>,
    reply: Reply,
}

impl Pending {
    /// Makes a pending request, with the metadata contexts selected on its connection. The payload of a
    /// block status request, if any, limits it to some of them.
    pub fn new(mode: Mode, request: Request, contexts: Vec<u32>) -> Self {
        let filter = request.payload.get(8..).filter(|_| request.command == CMD_BLOCK_STATUS);
        let contexts = match filter {
            Some(ids) => ids.chunks_exact(4).map(be32).collect(),
            None => contexts,
        };
        Self { mode, request, contexts, covered: Vec::new(), reply: Reply::default() }
    }

    /// Returns the number of bytes after the header of a successful simple reply.
    pub fn simple_payload(&self) -> u64 {
        if self.request.command == CMD_READ { self.request.length } else { 0 }
    }

    /// Adds a simple reply.
    pub fn simple(&mut self, error: u32, data: Vec<u8>) {
        if self.mode == Mode::Structured && self.request.command == CMD_READ {
            self.breach("chunk.read-structured", "simple reply to a read".to_owned());
        }
        if self.request.command == CMD_BLOCK_STATUS && error == 0 {
            self.breach("status.chunks", "successful simple reply to block status".to_owned());
        }
        self.reply.messages += 1;
        self.reply.simple = true;
        self.note_error(error);
        self.reply.bytes = data;
    }

    /// Adds a chunk.
    pub fn chunk(&mut self, chunk: Chunk) {
        self.reply.messages += 1;
        if chunk.flags & !REPLY_FLAG_DONE != 0 {
            self.breach("chunk.flags", format!("reply flags {:#x}", chunk.flags));
        }
        if chunk.offset.is_some_and(|offset| offset != self.request.offset) {
            self.breach("extended.offset", format!("reply header has offset {:?}", chunk.offset));
        }
        if chunk.kind == REPLY_NONE && chunk.flags & REPLY_FLAG_DONE == 0 {
            self.breach("chunk.none", "chunk of type NONE without DONE".to_owned());
        }
        match chunk.content() {
            Err((rule, text)) => self.breach(rule, text),
            Ok(Content::None) => {}
            Ok(Content::Data(offset, data)) => self.data(offset, &data),
            Ok(Content::Hole(offset, length)) => self.hole(offset, length),
            Ok(Content::Status { context, extents }) => self.status(&chunk, context, extents),
            Ok(Content::Error(error, offset)) => self.error(error, offset),
            Ok(Content::Unknown) => {
                self.breach("chunk.type", format!("chunk of unknown type {:#x}", chunk.kind));
            }
        }
    }

    /// Checks and returns the complete reply.
    pub fn finish(mut self) -> Reply {
        if !self.reply.simple && self.reply.error == 0 {
            match self.request.command {
                CMD_READ => self.check_coverage(),
                CMD_BLOCK_STATUS => self.check_contexts(),
                _ => {}
            }
        }
        if self.reply.error != 0 {
            self.reply.bytes.clear();
        }
        self.reply
    }

    fn breach(&mut self, rule: &'static str, text: String) {
        let text = format!("{} ({}): {text}", self.request, self.mode);
        self.reply.violations.push(Violation { rule, text });
    }

    fn note_error(&mut self, error: u32) {
        if error != 0 && error_name(error).starts_with("error") {
            self.breach("error.values", error_name(error));
        }
        if self.reply.error == 0 {
            self.reply.error = error;
        }
    }

    fn data(&mut self, offset: u64, data: &[u8]) {
        self.content(REPLY_OFFSET_DATA, offset, data.len() as u64);
        self.fill(offset, data);
    }

    fn hole(&mut self, offset: u64, length: u64) {
        if length == 0 {
            self.breach("chunk.hole", "hole of size 0".to_owned());
            return;
        }
        self.content(REPLY_OFFSET_HOLE, offset, length);
    }

    fn content(&mut self, kind: u16, offset: u64, length: u64) {
        if self.request.command != CMD_READ {
            self.breach("chunk.type", "content chunk in a reply to another command".to_owned());
            return;
        }
        let end = self.request.offset.saturating_add(self.request.length);
        let inside = offset >= self.request.offset
            && offset.checked_add(length).is_some_and(|chunk_end| chunk_end <= end);
        if !inside {
            self.breach("chunk.bounds", format!("chunk at {offset} of {length} is outside"));
            return;
        }
        if self
            .covered
            .iter()
            .any(|&(start, size)| offset < start + size && start < offset + length)
        {
            self.breach("chunk.overlap", format!("chunk at {offset} of {length} overlaps"));
        }
        self.covered.push((offset, length));
        self.reply.pieces.push((kind, offset, length));
        // Sized here and not when sending, because an invalid request may have any length.
        let length = usize::try_from(self.request.length).unwrap_or(0);
        if self.reply.bytes.len() < length {
            self.reply.bytes.resize(length, 0);
        }
    }

    fn fill(&mut self, offset: u64, data: &[u8]) {
        let start = offset.wrapping_sub(self.request.offset);
        let target = usize::try_from(start)
            .ok()
            .and_then(|start| self.reply.bytes.get_mut(start..)?.get_mut(..data.len()));
        if let Some(target) = target {
            target.copy_from_slice(data);
        }
    }

    fn error(&mut self, error: u32, offset: Option<u64>) {
        self.note_error(error);
        let Some(offset) = offset else { return };
        let relative = offset.checked_sub(self.request.offset);
        if relative.is_none_or(|relative| relative >= self.request.length.max(1)) {
            self.breach("chunk.error-offset", format!("error at {offset}, outside"));
        }
        self.covered.push((offset, 1));
    }

    fn check_coverage(&mut self) {
        let covered: u64 = self.reply.pieces.iter().map(|(_, _, length)| length).sum();
        if covered != self.request.length {
            let text = format!("successful, but chunks hold {covered} bytes");
            self.breach("chunk.coverage", text);
        }
    }

    fn status(&mut self, chunk: &Chunk, context: u32, extents: Vec<Extent>) {
        if self.request.command != CMD_BLOCK_STATUS {
            self.breach("chunk.type", "status chunk in a reply to another command".to_owned());
            return;
        }
        if chunk.kind == REPLY_BLOCK_STATUS_EXT && self.mode != Mode::Extended {
            self.breach("chunk.type", "BLOCK_STATUS_EXT without extended headers".to_owned());
        }
        if !self.contexts.contains(&context) {
            self.breach("status.chunks", format!("status of context {context}, not selected"));
        }
        if self.reply.statuses.iter().any(|(id, _)| *id == context) {
            self.breach("status.chunks", format!("second status chunk for context {context}"));
        }
        self.check_extents(&extents);
        self.reply.statuses.push((context, extents));
    }

    fn check_extents(&mut self, extents: &[Extent]) {
        if extents.iter().any(|extent| extent.length == 0) {
            self.breach("status.layout", "extent of length 0".to_owned());
        }
        let length = self.status_length();
        let before_last: u64 = extents[..extents.len() - 1]
            .iter()
            .fold(0, |sum, extent| sum.saturating_add(extent.length));
        if extents.len() > 1 && before_last >= length {
            self.breach("status.surplus", format!("extents before the last cover {before_last}"));
        }
    }

    /// Returns the length of a block status request: that of the header, or the first field of a payload
    /// that filters contexts.
    fn status_length(&self) -> u64 {
        match self.request.payload.first_chunk::<8>() {
            Some(length) => u64::from_be_bytes(*length),
            None => self.request.length,
        }
    }

    fn check_contexts(&mut self) {
        for context in self.contexts.clone() {
            if !self.reply.statuses.iter().any(|(id, _)| *id == context) {
                self.breach("status.chunks", format!("no status chunk for context {context}"));
            }
        }
    }
}
