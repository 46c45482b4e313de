//! The ways in which a fragment is moved: by reference, by an immediate copy, by the device into a buffer, or
//! by a call on a thread that may block.

use crate::Disk;
use crate::memory::{Memory, Short};
use crate::path::DataPath;
use crate::request::{How, Piece, Work};
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;
use towline_mem::{Aggregate, PoolBuffer, Segment};
use towline_store::{BlockStore, Direction, Now};

/// Longest run of pages that is handed over in one piece.
const LENT_BYTES_MAX: u64 = 1 << 20;
/// Shorter holes are read as data.
const HOLE_BYTES_MIN: u64 = 64 * 1024;

/// Returns the first bytes of a range if they need no device.
pub(crate) fn at_once(disk: &Disk, offset: u64, rest: u64, how: How) -> Option<Piece> {
    let hole = disk.store.hole_now(offset, rest);
    if hole == rest || hole >= HOLE_BYTES_MIN {
        return Some(Piece::Hole(hole));
    }
    if how == How::Copied {
        return None;
    }
    match disk.delivery.path {
        DataPath::Auto | DataPath::Sendfile => {
            disk.store.lend(offset, rest.min(LENT_BYTES_MAX)).map(Piece::Lent)
        }
        DataPath::Staged | DataPath::ZeroCopy => None,
    }
}

/// Returns exactly these bytes by reference if they are in memory.
pub(crate) fn lent(disk: &Disk, offset: u64, length: u64) -> Option<Aggregate> {
    disk.store.lend(offset, length).filter(|bytes| bytes.len() == length)
}

pub(crate) fn aggregate(buffer: PoolBuffer, length: u64) -> Aggregate {
    let mut bytes = Aggregate::new();
    bytes.append(Segment::Registered(Arc::new(buffer)), 0, length);
    bytes
}

pub(crate) enum ReadWork {
    /// The read is done without waiting.
    Done(io::Result<Piece>),
    /// The work waits. If the flag is set, it moves nothing and only brings pages into memory.
    Begin(Work, bool),
}

/// Reads the next fragment of a read, of at most `rest` bytes, or prepares the work for it. Returns its
/// length too. The buffer is charged to `account`.
///
/// # Errors
/// No buffer is available for it.
pub(crate) fn read_work(
    memory: &mut Memory,
    disk: &Arc<Disk>,
    offset: u64,
    rest: u64,
    how: How,
    account: Option<&Arc<AtomicU64>>,
) -> Result<(ReadWork, u64), Short> {
    let place = disk.store.locate(offset, rest, Direction::Read);
    let length = place.as_ref().map_or(rest, |place| place.length);
    // Pages need a buffer too: it bounds what is brought into memory for one client.
    let mut buffer = memory.take(disk, length)?;
    if let Some(account) = account {
        buffer = buffer.charged_to(account);
    }
    let goes_around = place.as_ref().is_some_and(|place| place.direct);
    if disk.delivery.path == DataPath::Sendfile && !goes_around && how != How::Copied {
        let disk = disk.clone();
        let call = move || (disk.store.populate(offset, length).map(|()| length as usize), buffer);
        return Ok((ReadWork::Begin(Work::Call(Box::new(call)), true), length));
    }
    let target = &mut buffer.bytes_mut()[..length as usize];
    if let Now::Done(result) = disk.store.read_now(offset, target) {
        let landed = result.map(|()| Piece::Data(aggregate(buffer, length)));
        return Ok((ReadWork::Done(landed), length));
    }
    let work = match place {
        Some(place) => Work::Transfer { place, buffer, direction: Direction::Read, durable: false },
        None => {
            let (at, store) = late(disk, length);
            work_at(at, move || {
                let target = &mut buffer.bytes_mut()[..length as usize];
                let result = store.read(offset, target).map(|()| length as usize);
                (result, buffer)
            })
        }
    };
    Ok((ReadWork::Begin(work, false), length))
}

/// Returns the store to ask for `length` bytes and, for a disk that only simulates a delay, the time to ask
/// it.
fn late(disk: &Disk, length: u64) -> (Option<Instant>, Arc<dyn BlockStore>) {
    match disk.store.later(length) {
        Some((at, store)) => (Some(at), store),
        None => (None, disk.store.clone()),
    }
}

fn work_at(
    at: Option<Instant>,
    call: impl FnOnce() -> (io::Result<usize>, PoolBuffer) + Send + 'static,
) -> Work {
    match at {
        Some(at) => Work::At(at, Box::new(call)),
        None => Work::Call(Box::new(call)),
    }
}

/// Returns the work that writes the bytes in a buffer.
pub(crate) fn write_work(
    disk: &Arc<Disk>,
    offset: u64,
    buffer: PoolBuffer,
    length: usize,
    durable: bool,
) -> Work {
    let direction = Direction::Write;
    match disk.store.locate(offset, length as u64, direction) {
        Some(place) if place.length == length as u64 => {
            Work::Transfer { place, buffer, direction, durable }
        }
        _ => {
            let (at, store) = late(disk, length as u64);
            work_at(at, move || {
                let result = store.write(offset, &buffer.bytes()[..length], durable);
                (result.map(|()| length), buffer)
            })
        }
    }
}
