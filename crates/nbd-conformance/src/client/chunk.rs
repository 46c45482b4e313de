//! Parses chunks of structured and extended replies.

use super::haggle::{be32, be64, check_string};
use super::reply::Extent;
use crate::rule::Problem;
use crate::wire::*;

/// A chunk as received.
#[derive(Debug, Clone)]
pub struct Chunk {
    /// Reply flags.
    pub flags: u16,
    /// Type: one of `REPLY_*`.
    pub kind: u16,
    /// The request's offset, which headers of extended replies repeat.
    pub offset: Option<u64>,
    /// Payload.
    pub payload: Vec<u8>,
}

/// Parsed content of a chunk.
pub enum Content {
    /// Nothing: only ends the reply.
    None,
    /// Data at an offset.
    Data(u64, Vec<u8>),
    /// Zeroes: offset and length.
    Hole(u64, u64),
    /// Extents of a context.
    Status {
        /// Identifier of the context.
        context: u32,
        /// Extents, in order from the request's offset.
        extents: Vec<Extent>,
    },
    /// An error, possibly with its offset.
    Error(u32, Option<u64>),
    /// A type that the text does not define.
    Unknown,
}

/// A violation of a rule: the rule's identifier and what was seen.
pub type Breach = (&'static str, String);

impl Chunk {
    /// Parses the payload.
    ///
    /// # Errors
    /// The violation of the rule on the layout of this type.
    pub fn content(&self) -> Result<Content, Breach> {
        let length = self.payload.len();
        let breach = |rule, demand: &str| Err((rule, format!("chunk of {length} bytes, {demand}")));
        match self.kind {
            REPLY_NONE if length == 0 => Ok(Content::None),
            REPLY_NONE => breach("chunk.none", "type NONE"),
            REPLY_OFFSET_DATA if length >= 9 => {
                Ok(Content::Data(be64(&self.payload), self.payload[8..].to_vec()))
            }
            REPLY_OFFSET_DATA => breach("chunk.data", "type OFFSET_DATA must have at least 9"),
            REPLY_OFFSET_HOLE if length == 12 => {
                Ok(Content::Hole(be64(&self.payload), be32(&self.payload[8..]).into()))
            }
            REPLY_OFFSET_HOLE => breach("chunk.hole", "type OFFSET_HOLE must have 12"),
            REPLY_BLOCK_STATUS if length >= 12 && (length - 4).is_multiple_of(8) => {
                let extents = self.payload[4..].chunks_exact(8).map(|pair| Extent {
                    length: be32(pair).into(),
                    status: be32(&pair[4..]).into(),
                });
                Ok(Content::Status { context: be32(&self.payload), extents: extents.collect() })
            }
            REPLY_BLOCK_STATUS => breach("status.layout", "BLOCK_STATUS must have 4 + 8 n"),
            REPLY_BLOCK_STATUS_EXT => self.extended_status(),
            REPLY_ERROR => self.error(6).map(|error| Content::Error(error, None)),
            REPLY_ERROR_OFFSET => {
                let error = self.error(14)?;
                Ok(Content::Error(error, Some(be64(&self.payload[length - 8..]))))
            }
            kind if kind & REPLY_ERROR_BIT != 0 => {
                self.error(6).map(|error| Content::Error(error, None))
            }
            _ => Ok(Content::Unknown),
        }
    }

    fn extended_status(&self) -> Result<Content, Breach> {
        let length = self.payload.len();
        if length < 24 || !(length - 8).is_multiple_of(16) {
            let text = format!("chunk of {length} bytes, BLOCK_STATUS_EXT must have 8 + 16 n");
            return Err(("status.layout", text));
        }
        let (count, present) = (be32(&self.payload[4..]) as usize, (length - 8) / 16);
        if count != 0 && count != present {
            let text = format!("descriptor count {count}, but {present} descriptors");
            return Err(("status.layout", text));
        }
        let extents = self.payload[8..]
            .chunks_exact(16)
            .map(|pair| Extent { length: be64(pair), status: be64(&pair[8..]) });
        Ok(Content::Status { context: be32(&self.payload), extents: extents.collect() })
    }

    /// Parses an error chunk whose fixed fields take `fixed` bytes, and returns its error.
    fn error(&self, fixed: usize) -> Result<u32, Breach> {
        let length = self.payload.len();
        if length < fixed {
            return Err(("chunk.error", format!("error chunk of {length} bytes, not {fixed}")));
        }
        let error = be32(&self.payload);
        if error == 0 {
            return Err(("chunk.error", "error chunk with error 0".to_owned()));
        }
        let message = usize::from(u16::from_be_bytes([self.payload[4], self.payload[5]]));
        if message > length - fixed {
            let text = format!("message of {message} bytes in an error chunk of {length}");
            return Err(("chunk.error", text));
        }
        match check_string("error message", &self.payload[6..6 + message]) {
            Ok(_) => Ok(error),
            Err(Problem::Fail(text) | Problem::Skip(text)) => Err(("chunk.error", text)),
        }
    }
}
