//! Data that comes with opening a file, so that it need not be requested: attributes, the first bytes of a
//! file, the first entries of a directory.
//!
//! It is used only for a moment ([`VALID_OPENED`]) and until any process of the run changes something or
//! takes a lock, see `known.rs`.

use crate::descriptors::Open;
use crate::known::{self, Asked, changes, lock};
use crate::place::At;
use crate::{ahead, cache};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use towline_client::DirEntry;
use towline_wire::Attr;

/// How long data from opening may be used after it has arrived.
const VALID_OPENED: Duration = Duration::from_millis(100);
/// Maximum number of opened files whose data is kept.
const OPENED_MAX: usize = 16;
/// After this many successive openings whose bytes were not read, opening no longer requests them.
const UNREAD_MAX: i32 = 8;
/// Number of a file's first bytes that come with opening it: what one reply carries without a grant.
pub(crate) const FIRST_BYTES: usize = towline_wire::limits::INLINE_BYTES_MAX;

static OPENED: Mutex<Kept> = Mutex::new(Kept { all: Vec::new(), spare: None });
/// Number of successive openings whose bytes were not read.
static UNREAD: AtomicI32 = AtomicI32::new(0);
/// Counts openings, to try again now and then.
static OPENINGS: AtomicU64 = AtomicU64::new(0);

/// The data kept of opened files.
struct Kept {
    all: Vec<Opened>,
    /// Memory of a closed file, still in the processor's cache, for the next one.
    spare: Option<Vec<u8>>,
}

impl Kept {
    fn place(&self, mount: usize, handle: u64) -> Option<usize> {
        self.all.iter().position(|one| one.handle == handle && one.mount == mount)
    }

    fn remove(&mut self, place: usize) {
        let data = self.all.remove(place).data;
        self.spare = data.map(|data| data.memory).or(self.spare.take());
    }
}

/// The first bytes of a file.
pub(crate) struct First {
    memory: Vec<u8>,
    length: usize,
}

impl First {
    /// Returns a buffer for them.
    pub(crate) fn memory() -> Vec<u8> {
        let spare = lock(&OPENED).and_then(|mut kept| kept.spare.take());
        spare.unwrap_or_else(|| vec![0; FIRST_BYTES])
    }

    /// Wraps a buffer whose first `length` bytes were read.
    pub(crate) fn new(memory: Vec<u8>, length: usize) -> Self {
        Self { memory, length }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[..self.length]
    }
}

/// Data that came with opening a file.
pub(crate) struct Opened {
    pub(crate) mount: usize,
    pub(crate) handle: u64,
    /// When it was asked for.
    pub(crate) when: Instant,
    pub(crate) arrived: Instant,
    /// Number of changes before the file was opened.
    pub(crate) changes: u64,
    pub(crate) attr: Attr,
    /// The first bytes; the whole file if they are fewer than [`FIRST_BYTES`] and match its size.
    pub(crate) data: Option<First>,
    /// A directory's first entries, and whether these are all.
    pub(crate) listing: Option<(Vec<DirEntry>, bool)>,
    /// End of the last read, if it reached the end that the file had when it was opened.
    pub(crate) end: Option<u64>,
}

/// Called in a process that uses its parent's memory: starts empty and leaves the original untouched.
pub(crate) fn leave_to_parent() {
    if let Some(mut kept) = lock(&OPENED) {
        let all = std::mem::take(&mut kept.all);
        std::mem::forget((all, kept.spare.take()));
    }
}

/// Returns true if opening a file should request its first bytes, too.
pub(crate) fn reads_what_it_opens() -> bool {
    UNREAD.load(Ordering::Relaxed) < UNREAD_MAX
        || OPENINGS.fetch_add(1, Ordering::Relaxed).is_multiple_of(64)
}

/// Keeps the data that came with opening `at`.
pub(crate) fn keep(at: &At, new: Opened) {
    if new.attr.is_directory() {
        let (entries, complete) = new.listing.as_ref().map_or((&[][..], false), |l| (&l.0, l.1));
        let asked = Asked { when: new.when, changes: new.changes };
        known::listed_at(at, (new.handle, new.attr.identity()), asked, entries, complete);
        known::opened(at, asked, &new.attr);
    }
    ahead::forget(new.mount, new.handle);
    if new.data.is_some() {
        UNREAD.fetch_add(1, Ordering::Relaxed);
    }
    if let Some(mut kept) = lock(&OPENED) {
        let same = kept.place(new.mount, new.handle);
        let is_full = kept.all.len() == OPENED_MAX;
        if let Some(place) = same.or(is_full.then_some(0)) {
            kept.remove(place);
        }
        kept.all.push(new);
    }
}

fn with_opened<T>(
    mount: usize,
    handle: u64,
    work: impl FnOnce(&mut Opened) -> Option<T>,
) -> Option<T> {
    let mut kept = lock(&OPENED)?;
    let place = kept.place(mount, handle)?;
    let one = &mut kept.all[place];
    if one.changes != changes() || one.arrived.elapsed() > VALID_OPENED {
        kept.remove(place);
        return None;
    }
    work(one)
}

/// Returns the attributes of a file that was just opened.
pub(crate) fn attr(mount: usize, handle: u64) -> Option<Attr> {
    with_opened(mount, handle, |opened| Some(opened.attr))
}

/// Copies known bytes of a file from `offset` on. Returns their number, and whether the file ends there,
/// which is reported only once.
pub(crate) fn read(
    mount: usize,
    handle: u64,
    target: &mut [u8],
    offset: u64,
) -> Option<(usize, bool)> {
    let done = with_opened(mount, handle, |opened| {
        if opened.end.take() == Some(offset) {
            return Some((0, true));
        }
        let data = opened.data.as_ref()?.bytes();
        // If the size is meaningless (`/proc`), a read may be short before the end.
        let is_all = data.len() < FIRST_BYTES && data.len() as u64 == opened.attr.size;
        let rest = usize::try_from(offset).ok().and_then(|offset| data.get(offset..))?;
        let count = rest.len().min(target.len());
        target[..count].copy_from_slice(&rest[..count]);
        let ends = is_all && count < target.len();
        if ends && count == 0 {
            opened.data = None; // the next reader waits for more data
        }
        (count > 0 || ends).then_some((count, ends))
    });
    if done.is_some() {
        UNREAD.store(0, Ordering::Relaxed);
    }
    done
}

/// Notes that a short read found the end of a file: most programs read once more.
fn found_end(mount: usize, handle: u64, end: u64) {
    let note = |opened: &mut Opened| {
        opened.end = (opened.attr.size == end).then_some(end);
        Some(())
    };
    let _ = with_opened(mount, handle, note);
}

/// Returns, once, the first entries of a directory that was just opened, whether these are all, and the
/// number of changes before.
pub(crate) fn listing(mount: usize, handle: u64) -> Option<(Vec<DirEntry>, bool, u64)> {
    with_opened(mount, handle, |opened| {
        opened.listing.take().map(|(entries, end)| (entries, end, opened.changes))
    })
}

/// Forgets the data of a file that is closed.
pub(crate) fn closed(mount: usize, handle: u64) {
    ahead::forget(mount, handle);
    cache::closed(mount, handle);
    if let Some(mut kept) = lock(&OPENED)
        && let Some(place) = kept.place(mount, handle)
    {
        kept.remove(place);
    }
}

/// Reads an open file at an offset, starting with data from opening it.
pub(crate) fn read_at(open: Open, target: &mut [u8], offset: u64) -> Result<usize, i32> {
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    let handle = open.handle;
    let (done, ends) = read(mount, handle, target, offset).unwrap_or((0, false));
    if ends || done == target.len() {
        return Ok(done);
    }
    match cache::read_at(open, &mut target[done..], offset + done as u64) {
        Err(_) if done > 0 => Ok(done),
        Ok(more) => {
            if more > 0 && done + more < target.len() {
                found_end(mount, handle, offset + (done + more) as u64);
            }
            Ok(done + more)
        }
        Err(error) => Err(error),
    }
}
