//! What came with opening, so that it need not be asked for: attributes, the first bytes of a file,
//! the first entries of a directory.
//!
//! It is used for a moment ([`VALID_OPENED`]) and no longer than until a process of the run changes
//! something or takes a lock, see `known.rs`.

use crate::ahead;
use crate::descriptors::Open;
use crate::known::{self, Asked, changes, lock};
use crate::place::At;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use towline_client::DirEntry;
use towline_wire::Attr;

/// How long what came with opening may be used.
const VALID_OPENED: Duration = Duration::from_millis(100);
/// Opened files of which something is kept.
const OPENED_MAX: usize = 16;
/// After so many openings in a row whose bytes nobody read they come no more.
const UNREAD_MAX: i32 = 8;
/// A file's first bytes that come with opening it: what one reply carries without a grant.
pub(crate) const FIRST_BYTES: usize = towline_wire::limits::INLINE_BYTES_MAX;

static OPENED: Mutex<Kept> = Mutex::new(Kept { all: Vec::new(), spare: None });
/// Openings in a row whose bytes nobody read.
static UNREAD: AtomicI32 = AtomicI32::new(0);
/// One more with each opening, to try again now and then.
static OPENINGS: AtomicU64 = AtomicU64::new(0);

/// What is kept of opened files.
struct Kept {
    all: Vec<Opened>,
    /// Memory of one that was closed, still in the processor's cache, for the next.
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
    /// Room for them.
    pub(crate) fn memory() -> Vec<u8> {
        let spare = lock(&OPENED).and_then(|mut kept| kept.spare.take());
        spare.unwrap_or_else(|| vec![0; FIRST_BYTES])
    }

    /// So many were read.
    pub(crate) fn new(memory: Vec<u8>, length: usize) -> Self {
        Self { memory, length }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[..self.length]
    }
}

/// What came with opening.
pub(crate) struct Opened {
    pub(crate) mount: usize,
    pub(crate) handle: u64,
    pub(crate) when: Instant,
    /// Number of changes before it was opened.
    pub(crate) changes: u64,
    pub(crate) attr: Attr,
    /// The first bytes; fewer than [`FIRST_BYTES`] are all if the file has no more.
    pub(crate) data: Option<First>,
    /// A directory's first entries, and whether they are all.
    pub(crate) listing: Option<(Vec<DirEntry>, bool)>,
    /// The last read got all up to here, which is where the file ended when it was opened.
    pub(crate) end: Option<u64>,
}

/// This process uses memory of its parent: it begins anew and leaves what is there as it is.
pub(crate) fn leave_to_parent() {
    if let Some(mut kept) = lock(&OPENED) {
        let all = std::mem::take(&mut kept.all);
        std::mem::forget((all, kept.spare.take()));
    }
}

/// True when the first bytes of files had better come with opening them.
pub(crate) fn reads_what_it_opens() -> bool {
    UNREAD.load(Ordering::Relaxed) < UNREAD_MAX
        || OPENINGS.fetch_add(1, Ordering::Relaxed).is_multiple_of(64)
}

/// Notes what came with opening `at`.
pub(crate) fn keep(at: &At, new: Opened) {
    if new.attr.is_directory() {
        let (entries, complete) = new.listing.as_ref().map_or((&[][..], false), |l| (&l.0, l.1));
        let asked = Asked { when: new.when, changes: new.changes };
        known::listed_at(at, (new.handle, new.attr.identity()), asked, entries, complete);
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
    if one.changes != changes() || one.when.elapsed() > VALID_OPENED {
        kept.remove(place);
        return None;
    }
    work(one)
}

/// The attributes of a file that was just opened.
pub(crate) fn attr(mount: usize, handle: u64) -> Option<Attr> {
    with_opened(mount, handle, |opened| Some(opened.attr))
}

/// Copies what is known of a file from `offset` on; how much that is, and whether the file ends
/// there, which is told only once.
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
        // Where the size says nothing (`/proc`), a read may be short before the end.
        let is_all = data.len() < FIRST_BYTES && data.len() as u64 == opened.attr.size;
        let rest = usize::try_from(offset).ok().and_then(|offset| data.get(offset..))?;
        let count = rest.len().min(target.len());
        target[..count].copy_from_slice(&rest[..count]);
        let ends = is_all && count < target.len();
        if ends && count == 0 {
            opened.data = None; // whoever asks again waits for more
        }
        (count > 0 || ends).then_some((count, ends))
    });
    if done.is_some() {
        UNREAD.store(0, Ordering::Relaxed);
    }
    done
}

/// A read of less than was asked for found the end of a file: most programs ask once more.
fn found_end(mount: usize, handle: u64, end: u64) {
    let note = |opened: &mut Opened| {
        opened.end = (opened.attr.size == end).then_some(end);
        Some(())
    };
    let _ = with_opened(mount, handle, note);
}

/// The first entries of a directory that was just opened, once.
pub(crate) fn listing(mount: usize, handle: u64) -> Option<(Vec<DirEntry>, bool)> {
    with_opened(mount, handle, |opened| opened.listing.take())
}

/// Forgets what came with opening: the file is closed.
pub(crate) fn closed(mount: usize, handle: u64) {
    ahead::forget(mount, handle);
    if let Some(mut kept) = lock(&OPENED)
        && let Some(place) = kept.place(mount, handle)
    {
        kept.remove(place);
    }
}

/// Reads an open file at an offset: first what came with opening it.
pub(crate) fn read_at(open: Open, target: &mut [u8], offset: u64) -> Result<usize, i32> {
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    let handle = open.handle;
    let (done, ends) = read(mount, handle, target, offset).unwrap_or((0, false));
    if ends || done == target.len() {
        return Ok(done);
    }
    match ahead::read_at(open, &mut target[done..], offset + done as u64) {
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
