//! The engine's input and output, and the work that it needs done.

use crate::Disk;
use crate::cursor::Cursor;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use towline_mem::{Aggregate, PoolBuffer};
use towline_store::{Direction, Place};

/// Moves bytes between a disk and the buffer that it owns; returns their number and the buffer.
pub type Call = Box<dyn FnOnce() -> (io::Result<usize>, PoolBuffer) + Send>;

/// Work that waits for a device. Its result is passed to [`crate::Engine::finished`] or, for `Ask`,
/// [`crate::Engine::answered`], with the same token.
pub enum Work {
    /// Move `place.length` bytes between the device and the start of a buffer.
    Transfer {
        /// Position on the device.
        place: Place,
        /// The buffer.
        buffer: PoolBuffer,
        /// To or from the device.
        direction: Direction,
        /// The write must be on stable storage before it is done.
        durable: bool,
    },
    /// Make this call on a thread that may block; it returns the number of bytes moved, and the buffer.
    Call(Call),
    /// Make this call at the given time, on any thread: it does not block.
    At(Instant, Call),
    /// Make this call on a thread that may block.
    Ask(Box<dyn FnOnce() -> io::Result<Vec<Vec<Status>>> + Send>),
}

/// A run of bytes with the same status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Length in bytes; not zero.
    pub length: u64,
    /// Flags, whose meaning is up to the front that asked.
    pub flags: u32,
}

/// Does the work that waits for devices.
pub trait Driver {
    /// Starts work for this disk.
    fn begin(&mut self, token: u64, disk: &Arc<Disk>, work: Work);
}

/// Bytes of a read.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // fronts have to send each
pub enum Piece {
    /// Bytes that no longer change.
    Data(Aggregate),
    /// Pages of a file or of memory that others may change; sending them may fail.
    Lent(Aggregate),
    /// A run of zeroes of this length.
    Hole(u64),
}

impl Piece {
    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Data(bytes) | Self::Lent(bytes) => bytes.len(),
            Self::Hole(length) => *length,
        }
    }

    /// Returns true if there are no bytes, which never happens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// When a request arrived, and how long it waited for devices.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Arrival.
    pub arrived: Instant,
    /// Nanoseconds from its first call to a device to the end of its last.
    pub disk: u64,
}

/// What the engine reports to a front; `T` is the front's tag for the request.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // fronts have to handle each
pub enum Output<T> {
    /// Part of a read.
    Piece {
        /// The request.
        tag: T,
        /// First byte on the disk.
        offset: u64,
        /// The bytes.
        piece: Piece,
        /// This is the first output of the request.
        first: bool,
        /// Set if this is the last output of the request.
        last: Option<Times>,
    },
    /// Part of a read failed.
    Failed {
        /// The request.
        tag: T,
        /// First byte that could not be read.
        offset: u64,
        /// Why.
        error: io::Error,
        /// This is the first output of the request.
        first: bool,
        /// Set if this is the last output of the request.
        last: Option<Times>,
    },
    /// A write, or another request without data, is over.
    Done {
        /// The request.
        tag: T,
        /// The outcome.
        result: io::Result<()>,
        /// How long it took.
        times: Times,
    },
    /// Extents: one list for each metadata context asked for.
    Extents {
        /// The request.
        tag: T,
        /// The lists.
        result: io::Result<Vec<Vec<Status>>>,
        /// How long it took.
        times: Times,
    },
}

impl<T: Copy> Output<T> {
    /// Returns the tag of the request.
    #[must_use]
    pub fn tag(&self) -> T {
        let (Self::Piece { tag, .. }
        | Self::Failed { tag, .. }
        | Self::Done { tag, .. }
        | Self::Extents { tag, .. }) = self;
        *tag
    }

    /// Returns the same output with another tag.
    #[must_use]
    pub fn with_tag<U>(self, tag: U) -> Output<U> {
        match self {
            Self::Piece { offset, piece, first, last, .. } => {
                Output::Piece { tag, offset, piece, first, last }
            }
            Self::Failed { offset, error, first, last, .. } => {
                Output::Failed { tag, offset, error, first, last }
            }
            Self::Done { result, times, .. } => Output::Done { tag, result, times },
            Self::Extents { result, times, .. } => Output::Extents { tag, result, times },
        }
    }
}

/// How a read is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // fronts choose
pub enum How {
    /// Each piece when it lands, interleaved with those of other reads.
    Pieces,
    /// All bytes in ascending order, and not interleaved with another ordered read; the front holds back
    /// other replies meanwhile.
    Ordered,
    /// In one piece; at most one fragment long.
    Whole,
    /// Like `Pieces`, but in buffers that nobody changes before they are sent.
    Copied,
}

/// A read under way.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) disk: Arc<Disk>,
    /// The part that is not started.
    pub(crate) cursor: Cursor,
    pub(crate) how: How,
    /// Nothing is reported before everything has landed.
    pub(crate) serial: bool,
    /// Fragments that the disk is working on.
    pub(crate) in_flight: usize,
    pub(crate) told: bool,
    pub(crate) failed: bool,
    /// Ordered reads: offset and error of a failure, until nothing is under way any more.
    pub(crate) failure: Option<(u64, io::Error)>,
    /// Ordered and serial reads: fragments started but not yet handed over.
    pub(crate) waiting: std::collections::VecDeque<Waiting>,
}

/// A fragment that is not yet handed over.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) offset: u64,
    pub(crate) landed: Option<io::Result<Piece>>,
}

/// A write under way.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) disk: Arc<Disk>,
    pub(crate) start: u64,
    /// Next byte of payload to come.
    pub(crate) next: u64,
    /// Next byte that has no room yet.
    pub(crate) placed: u64,
    pub(crate) end: u64,
    pub(crate) durable: bool,
    pub(crate) in_flight: usize,
    pub(crate) error: Option<io::Error>,
}
