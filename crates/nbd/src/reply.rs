//! Replies in the three forms.
//!
//! Each function appends to a buffer, so that the replies to many requests can be sent together. The data
//! itself is not touched: a header says how many bytes of it must follow.

use crate::constants::{EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};
use crate::{Error, Form, Request};

/// An extent of a metadata context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes; not zero.
    pub length: u64,
    /// Status flags of the context.
    pub flags: u32,
}

/// The request that is being answered, and the form of the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replying {
    /// The form agreed on.
    pub form: Form,
    /// The request's cookie.
    pub cookie: u64,
    /// The request's offset, which extended replies repeat.
    pub offset: u64,
}

impl Replying {
    /// Prepares the reply to `request`.
    #[must_use]
    pub fn to(request: &Request, form: Form) -> Self {
        Self { form, cookie: request.cookie, offset: request.offset }
    }

    fn simple(&self, out: &mut Vec<u8>, error: u32) {
        out.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        out.extend_from_slice(&error.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
    }

    fn chunk(&self, out: &mut Vec<u8>, kind: u16, done: bool, length: u64) {
        let flags = if done { chunk::FLAG_DONE } else { 0 };
        let extended = self.form == Form::Extended;
        let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        out.extend_from_slice(&magic.to_be_bytes());
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        if extended {
            out.extend_from_slice(&self.offset.to_be_bytes());
            out.extend_from_slice(&length.to_be_bytes());
        } else {
            out.extend_from_slice(&(length as u32).to_be_bytes());
        }
    }

    /// Appends success without data; ends the reply.
    pub fn done(&self, out: &mut Vec<u8>) {
        match self.form {
            Form::Simple => self.simple(out, 0),
            _ => self.chunk(out, chunk::NONE, true, 0),
        }
    }

    /// Appends an error; ends the reply.
    pub fn error(&self, out: &mut Vec<u8>, error: Error, text: &str) {
        self.failure(out, error, text, None, true);
    }

    /// Appends an error at an offset; the end of the reply must follow. Does nothing for simple replies,
    /// which cannot express it.
    pub fn error_at(&self, out: &mut Vec<u8>, error: Error, offset: u64) {
        if self.form != Form::Simple {
            self.failure(out, error, error.text(), Some(offset), false);
        }
    }

    fn failure(&self, out: &mut Vec<u8>, error: Error, text: &str, at: Option<u64>, done: bool) {
        if self.form == Form::Simple {
            return self.simple(out, error as u32);
        }
        let kind = if at.is_some() { chunk::ERROR_OFFSET } else { chunk::ERROR };
        let length = 6 + text.len() as u64 + if at.is_some() { 8 } else { 0 };
        self.chunk(out, kind, done, length);
        out.extend_from_slice(&(error as u32).to_be_bytes());
        out.extend_from_slice(&(text.len() as u16).to_be_bytes());
        out.extend_from_slice(text.as_bytes());
        if let Some(at) = at {
            out.extend_from_slice(&at.to_be_bytes());
        }
    }

    /// Appends the header of `length` bytes of data at `offset`, which must follow. Simple replies have a
    /// single header of this kind for all their data.
    pub fn data(&self, out: &mut Vec<u8>, offset: u64, length: u32, done: bool) {
        if self.form == Form::Simple {
            return self.simple(out, 0);
        }
        self.chunk(out, chunk::OFFSET_DATA, done, 8 + u64::from(length));
        out.extend_from_slice(&offset.to_be_bytes());
    }

    /// Appends a chunk that stands for zeroes. Not for simple replies.
    pub fn hole(&self, out: &mut Vec<u8>, offset: u64, length: u32, done: bool) {
        debug_assert!(self.form != Form::Simple, "simple replies send zeroes as data");
        self.chunk(out, chunk::OFFSET_HOLE, done, 12);
        out.extend_from_slice(&offset.to_be_bytes());
        out.extend_from_slice(&length.to_be_bytes());
    }

    /// Appends the extents of one metadata context.
    pub fn extents(&self, out: &mut Vec<u8>, context: u32, extents: &[Extent], done: bool) {
        let count = extents.len() as u64;
        if self.form == Form::Extended {
            self.chunk(out, chunk::BLOCK_STATUS_EXT, done, 8 + 16 * count);
            out.extend_from_slice(&context.to_be_bytes());
            out.extend_from_slice(&(count as u32).to_be_bytes());
            for extent in extents {
                out.extend_from_slice(&extent.length.to_be_bytes());
                out.extend_from_slice(&u64::from(extent.flags).to_be_bytes());
            }
        } else {
            self.chunk(out, chunk::BLOCK_STATUS, done, 4 + 8 * count);
            out.extend_from_slice(&context.to_be_bytes());
            for extent in extents {
                let length = u32::try_from(extent.length).unwrap_or(u32::MAX);
                out.extend_from_slice(&length.to_be_bytes());
                out.extend_from_slice(&extent.flags.to_be_bytes());
            }
        }
    }
}
