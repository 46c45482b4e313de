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
        /// The operation failed; those after it were not tried.
        0 Failed {
            /// Linux error number.
            errno: u16,
        }
        /// Success without a result; also of `DiskClose` and `DiskCache`.
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
            /// Error that ended the read after `length` bytes, or zero.
            errno: u16,
        }
        /// `Write`.
        5 Wrote {
            /// Bytes written.
            length: u32,
            /// Where in the file they begin (differs from the request's offset when appending).
            offset: u64,
        }
        /// `ReadDir`: the payload holds the entries.
        6 Listed {
            /// One if there are no more entries.
            end: u8,
            /// Bytes of entries.
            length: u32,
        }
        /// `ReadLink`, `GetXattr`, `ListXattr`, `PathOf`, `DiskList`, `DiskStatus`.
        7 Bytes {
            /// The value.
            value: &'a [u8],
        }
        /// `Seek`: an offset. `CopyRange`: a number of bytes. `Watch`: the number of an event.
        8 Number {
            /// The number.
            value: u64,
        }
        /// `StatFs`.
        9 FileSystem {
            /// Space and number of files.
            statfs: StatFs,
        }
        /// `TestLock`: the conflicting lock, or kind [`crate::request::lock::UNLOCK`] if there is none.
        10 Conflict {
            /// Shared, exclusive, or unlock for none.
            kind: u8,
            /// First byte.
            start: u64,
            /// Length in bytes; zero: to the end.
            length: u64,
            /// Owner, if it is a process of the same session or family; else zero.
            owner: u64,
        }
        /// `Inquire`: the payload is the answer.
        11 Answer {
            /// Bytes of payload.
            length: u32,
        }
        /// `DiskOpen`, `DiskInfo`, `DiskResize`.
        12 Disk {
            /// Size of the disk in bytes.
            size: u64,
            /// Power of two of which offsets and lengths have to be multiples.
            block_minimum: u32,
            /// Preferred unit of requests, a power of two.
            block_preferred: u32,
            /// Bits of [`crate::disk::disk_kind`].
            flags: u32,
            /// Identifies the contents, also across restarts: another number means other contents.
            identity: u64,
            /// Differs after unflushed changes may have been lost.
            epoch: u64,
        }
        /// `DiskWrite`, `DiskZero`, `DiskTrim`, `DiskFlush`.
        13 Stored {
            /// As in `Disk`. Changes made under another number and not flushed may be lost.
            epoch: u64,
        }
        /// `Events`: the payload holds the events.
        14 Events {
            /// Number of the event after the last one in the payload; not zero.
            next: u64,
            /// One if other events since `seen` were dropped, or if the server does not know the number
            /// `seen` and so does not know the watches either.
            lost: u8,
            /// Bytes of events, at most [`crate::limits::EVENTS_BYTES_MAX`].
            length: u32,
        }
        /// `Lock`.
        15 Locked {
            /// Zero if no other session or family has locked or unlocked anything of the file since the last
            /// lock of this one. Whoever changes the file only under locks has not changed it then.
            others: u8,
        }
    }
}

/// Iterates over the results of a reply's body. Errors are an unknown tag, a truncated field, more
/// results than a compound may have operations, or a result after a failure.
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

/// Decodes all results of a reply's body.
///
/// # Errors
/// As [`Results`].
pub fn parse_results(body: &[u8]) -> Result<SmallVec<[Reply<'_>; 4]>, ProtocolError> {
    Results::of(body).collect()
}
