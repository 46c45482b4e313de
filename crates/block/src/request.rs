//! What goes into the engine, what comes out, and what it needs done.

use crate::Disk;
use crate::cursor::Cursor;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use towline_mem::{Aggregate, PoolBuffer};
use towline_store::{Direction, Place};

/// Moves bytes between a disk and the buffer that it owns; tells how many, and gives the buffer back.
pub type Call = Box<dyn FnOnce() -> (io::Result<usize>, PoolBuffer) + Send>;

/// Something that waits for a device. Whoever does it tells the engine by [`crate::Engine::finished`]
/// or [`crate::Engine::answered`], under the same token.
pub enum Work {
    /// Move `length` bytes between the start of a buffer and a place.
    Transfer {
        /// Where on the device.
        place: Place,
        /// Memory.
        buffer: PoolBuffer,
        /// To or from the device.
        direction: Direction,
        /// A write that is not done before it is on stable storage.
        durable: bool,
    },
    /// Call this on a thread that may wait; it returns the buffer and the bytes moved.
    Call(Call),
    /// Call this at that time, on any thread: it does not wait.
    At(Instant, Call),
    /// Call this on a thread that may wait.
    Ask(Box<dyn FnOnce() -> io::Result<Vec<Vec<Status>>> + Send>),
}

/// A run of bytes of one status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Bytes; not zero.
    pub length: u64,
    /// What the front that asked means by it.
    pub flags: u32,
}

/// Does what waits.
pub trait Driver {
    /// Begins it; it is about this disk.
    fn begin(&mut self, token: u64, disk: &Arc<Disk>, work: Work);
}

/// Bytes of a read.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums)] // fronts have to send each
pub enum Piece {
    /// These.
    Data(Aggregate),
    /// Pages of a file or of memory that others may change: they may turn out to be missing.
    Lent(Aggregate),
    /// So many zeroes.
    Hole(u64),
}

impl Piece {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Data(bytes) | Self::Lent(bytes) => bytes.len(),
            Self::Hole(length) => *length,
        }
    }

    /// True for no bytes, which never is.
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

/// What the engine tells a front, whose own word for the request is `T`.
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
        /// Nothing of this request came before.
        first: bool,
        /// Nothing follows.
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
        /// Nothing of this request came before.
        first: bool,
        /// Nothing follows.
        last: Option<Times>,
    },
    /// A write, or anything else without data, is over.
    Done {
        /// The request.
        tag: T,
        /// How it went.
        result: io::Result<()>,
        /// How long it took.
        times: Times,
    },
    /// Extents, one list for each asked for.
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
    /// What it is about.
    #[must_use]
    pub fn tag(&self) -> T {
        let (Self::Piece { tag, .. }
        | Self::Failed { tag, .. }
        | Self::Done { tag, .. }
        | Self::Extents { tag, .. }) = self;
        *tag
    }

    /// The same about something else.
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

/// How a read is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // fronts choose
pub enum How {
    /// Each piece when it lands, between those of others.
    Pieces,
    /// In ascending order, each byte, and no other read in order before it is told to its end; the
    /// front keeps back what else it has to say meanwhile.
    Ordered,
    /// In one piece; at most a fragment long.
    Whole,
    /// As `Pieces`, in memory of our own that nobody changes before it is sent.
    Copied,
}

/// A read to be done.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) disk: Arc<Disk>,
    /// What nothing was begun for.
    pub(crate) cursor: Cursor,
    pub(crate) how: How,
    /// Nothing is told before all has landed.
    pub(crate) serial: bool,
    /// Fragments that the disk works on.
    pub(crate) in_flight: usize,
    pub(crate) told: bool,
    pub(crate) failed: bool,
    /// In order: where and why, until nothing is under way any more.
    pub(crate) failure: Option<(u64, io::Error)>,
    /// In order, or serial: what was begun and is not handed over yet.
    pub(crate) waiting: std::collections::VecDeque<Waiting>,
}

/// A fragment whose turn has not come.
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
    /// Next byte to be received, and the next one that has no room yet.
    pub(crate) next: u64,
    pub(crate) placed: u64,
    pub(crate) end: u64,
    pub(crate) durable: bool,
    pub(crate) in_flight: usize,
    pub(crate) error: Option<io::Error>,
}
