//! What a server offers and what both ends agreed on.

use crate::constants::{command_flag, transmission_flag as flag};

/// The form of all replies of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(clippy::exhaustive_enums)] // the protocol has these three
pub enum Form {
    /// 16 bytes, then data.
    Simple,
    /// Chunks in any order.
    Structured,
    /// Chunks in any order, 64-bit lengths both ways.
    Extended,
}

/// An export as a server offers it.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Its name as the catalogue knows it.
    pub name: String,
    /// A text for humans.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// Smallest unit of requests: a power of two, at most 64 KiB.
    pub block_minimum: u32,
    /// Unit that is served best: a power of two, at least `block_minimum`.
    pub block_preferred: u32,
    /// Refuse changes.
    pub read_only: bool,
    /// Seeks cost time.
    pub rotational: bool,
    /// Zeroes can be written faster than data, or the request fails fast.
    pub zeroes_fast: bool,
    /// Names of the metadata contexts; a context's number is its place in this list.
    pub contexts: Vec<String>,
}

impl Offer {
    /// The transmission flags, for replies of this form.
    #[must_use]
    pub fn flags(&self, form: Form) -> u16 {
        let mut flags =
            flag::HAS_FLAGS | flag::SEND_FLUSH | flag::CAN_MULTI_CONN | flag::SEND_CACHE;
        if self.read_only {
            flags |= flag::READ_ONLY;
        } else {
            flags |= flag::SEND_FUA | flag::SEND_TRIM | flag::SEND_WRITE_ZEROES;
            if self.zeroes_fast {
                flags |= flag::SEND_FAST_ZERO;
            }
        }
        if self.rotational {
            flags |= flag::ROTATIONAL;
        }
        if form >= Form::Structured {
            flags |= flag::SEND_DF;
        }
        if form == Form::Extended {
            flags |= flag::BLOCK_STAT_PAYLOAD;
        }
        flags
    }

    /// The flags that a command of this export may carry, besides those of its type.
    pub(crate) fn command_flags(&self) -> u16 {
        // Announced for disks that can be written.
        if self.read_only { 0 } else { command_flag::FUA }
    }
}

/// Finds exports.
pub trait Catalogue {
    /// The export of this name; the empty name is the default export.
    fn find(&self, name: &[u8]) -> Option<Offer>;
    /// Names and descriptions of all exports.
    fn list(&self) -> Vec<(String, String)>;
    /// True when the server is about to end: options are refused.
    fn shutting_down(&self) -> bool {
        false
    }
}

/// A metadata context in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// Place in [`Offer::contexts`].
    pub number: usize,
}

impl Context {
    /// How the context is named on the wire.
    #[must_use]
    pub fn id(self) -> u32 {
        // Not zero, so that a client which forgot to set an id is found out.
        self.number as u32 + 1
    }
}

/// What the second phase works with.
#[derive(Clone, Debug)]
pub struct Agreement {
    /// The export.
    pub export: Offer,
    /// Form of all replies.
    pub form: Form,
    /// Metadata contexts that BLOCK_STATUS reports, in order.
    pub contexts: Vec<Context>,
}
