//! Results of operations; a reply's body holds one for each operation executed, in order.
//!
//! A compound stops at the first error, so only the last result can be [`Reply::Failed`].

use crate::attr::{Attr, StatFs};
use crate::codec::{Field, ProtocolError, Reader, messages};
use crate::list::{List, Listed};
use smallvec::SmallVec;

messages! {
    /// Result of one operation.
    pub enum Reply<'a> {
        /// The operation failed, nothing after it was tried.
        0 Failed {
            /// Linux error number.
            errno: u16,
        }
        /// Success with nothing to tell, also of `DiskClose` and `DiskCache`.
        1 Done {}
        /// `Attach`, `Open`, `Reclaim`.
        2 Opened {
            /// Handle of the open file.
            handle: u64,
            /// Its attributes.
            attr: Attr,
        }
        /// `Stat`, `SetAttr`, `MakeDir`, `MakeNode`, `Symlink`, `Link`.
        3 Attributes {
            /// Attributes after the operation.
            attr: Attr,
        }
        /// `Read`, `DiskRead`.
        4 Read {
            /// Bytes read, all of them in data messages and the payload.
            length: u32,
            /// Error met after `length` bytes, or zero.
            errno: u16,
        }
        /// `Write`.
        5 Wrote {
            /// Bytes written.
            length: u32,
            /// Where they begin (differs from the request's offset when appending).
            offset: u64,
        }
        /// `ReadDir`: entries are the payload.
        6 Listed {
            /// One when there are no more.
            end: u8,
            /// Bytes of entries.
            length: u32,
        }
        /// `ReadLink`, `GetXattr`, `ListXattr`, `PathOf`, `DiskList`, `DiskStatus`.
        7 Bytes {
            /// The value.
            value: &'a [u8],
        }
        /// `Seek`, `CopyRange`: an offset or a count. `Watch`: the number of an event.
        8 Number {
            /// The number.
            value: u64,
        }
        /// `StatFs`.
        9 FileSystem {
            /// What the file system says.
            statfs: StatFs,
        }
        /// `TestLock`: the lock in the way, or kind [`crate::request::lock::UNLOCK`] when free.
        10 Conflict {
            /// Shared, exclusive, or unlock for none.
            kind: u8,
            /// First byte.
            start: u64,
            /// Bytes, zero: to the end.
            length: u64,
            /// Owner, when it is a process of the same session; else zero.
            owner: u64,
        }
        /// `Inquire`: the answer is the payload.
        11 Answer {
            /// Bytes of payload.
            length: u32,
        }
        /// `DiskOpen`, `DiskInfo`, `DiskResize`.
        12 Disk {
            /// Bytes.
            size: u64,
            /// Offsets and lengths are multiples of this power of two.
            block_minimum: u32,
            /// Unit that is served best, a power of two.
            block_preferred: u32,
            /// Bits of [`crate::disk::disk_kind`].
            flags: u32,
            /// Names the bytes: another number stands for other bytes, also after a restart.
            identity: u64,
            /// Changes when changes may have been lost that were not flushed.
            epoch: u64,
        }
        /// `DiskWrite`, `DiskZero`, `DiskTrim`, `DiskFlush`.
        13 Stored {
            /// As in `Disk`. What was not flushed under another number may be lost.
            epoch: u64,
        }
        /// `Events`: they are the payload.
        14 Events {
            /// Number of the event behind the last one told; not zero.
            next: u64,
            /// One: others that are not told have happened since `seen`, or the server does not know that number, and of the watches, any
            /// more.
            lost: u8,
            /// Bytes of events, at most [`crate::limits::EVENTS_BYTES_MAX`].
            length: u32,
        }
    }
}

/// The results of a reply's body. Errors are an unknown tag, a cut field, more results than a
/// compound has operations, or a result after a failure.
pub type Results<'a> = List<'a, Reply<'a>>;

impl<'a> Listed<'a> for Reply<'a> {
    const TOO_MANY: &'static str = "too many results in one reply";

    fn read(reader: &mut Reader<'a>) -> Result<Self, ProtocolError> {
        Self::decode(reader)
    }

    fn last(&self) -> Option<&'static str> {
        matches!(self, Self::Failed { .. }).then_some("result after a failure")
    }
}

/// Reads all results of a reply's body.
///
/// # Errors
/// As [`Results`].
pub fn parse_results(body: &[u8]) -> Result<SmallVec<[Reply<'_>; 4]>, ProtocolError> {
    Results::of(body).collect()
}
