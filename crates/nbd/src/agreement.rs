//! What a server offers, and what client and server agree on.

use crate::constants::{command_flag, transmission_flag as flag};

/// The form of all replies on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(clippy::exhaustive_enums)] // the protocol has these three
pub enum Form {
    /// A 16-byte header, then the data.
    Simple,
    /// Chunks in any order.
    Structured,
    /// Chunks in any order; lengths are 64 bits wide in both directions.
    Extended,
}

/// An export as a server offers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The export's name in the catalogue.
    pub name: String,
    /// Text for humans.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// Smallest unit of a request: a power of two, at most 64 KiB.
    pub block_minimum: u32,
    /// Unit that performs best: a power of two, at least `block_minimum`.
    pub block_preferred: u32,
    /// The export refuses changes.
    pub read_only: bool,
    /// Seeks cost time.
    pub rotational: bool,
    /// Zeroes are written faster than data, or the request fails quickly.
    pub zeroes_fast: bool,
    /// Reads of up to [`WHOLE_BYTES`](crate::constants::WHOLE_BYTES) can be answered in one piece.
    pub whole_reads: bool,
    /// Names of the metadata contexts; a context's number is its index in this list.
    pub contexts: Vec<String>,
}

impl Offer {
    /// Returns the transmission flags for replies of this form.
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
        if form >= Form::Structured && self.whole_reads {
            flags |= flag::SEND_DF;
        }
        if form == Form::Extended {
            flags |= flag::BLOCK_STAT_PAYLOAD;
        }
        flags
    }

    /// Returns the flags that any command of this export may carry, besides those of its type.
    pub(crate) fn command_flags(&self) -> u16 {
        // FUA is announced only for disks that can be written.
        if self.read_only { 0 } else { command_flag::FUA }
    }
}

/// Finds exports.
pub trait Catalogue {
    /// Returns the export with this name; the empty name means the default export.
    fn find(&self, name: &[u8]) -> Option<Offer>;
    /// Returns the names and descriptions of all exports.
    fn list(&self) -> Vec<(String, String)>;
    /// Returns true if the server is about to exit and therefore refuses options.
    fn shutting_down(&self) -> bool {
        false
    }
}

/// A metadata context in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// Index in [`Offer::contexts`].
    pub number: usize,
}

impl Context {
    /// Returns the context's id on the wire.
    #[must_use]
    pub fn id(self) -> u32 {
        // Starts at one, so that a client that forgets to set an id is noticed.
        self.number as u32 + 1
    }
}

/// The result of the handshake, on which the transmission phase is based.
#[derive(Clone, Debug)]
pub struct Agreement {
    /// The export.
    pub export: Offer,
    /// Form of all replies.
    pub form: Form,
    /// Metadata contexts that BLOCK_STATUS reports, in this order.
    pub contexts: Vec<Context>,
}
