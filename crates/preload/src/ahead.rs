//! Reading ahead: a process that reads a file sequentially in short pieces gets them from longer ones, each
//! fetched by one request.
//!
//! Data read ahead is used only for a moment ([`VALID`]) and until any process of the run changes something
//! or takes a lock, like data from opening (`opened.rs`). The end of a file is not remembered: a read there
//! asks the server.

use crate::descriptors::Open;
use crate::known::{changes, lock};
use crate::opened::FIRST_BYTES;
use crate::remote;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long data read ahead may be used.
const VALID: Duration = Duration::from_millis(100);
/// Bytes requested at first, and at most; reads of more than half the maximum are not extended.
const WINDOW_BYTES: std::ops::RangeInclusive<usize> = 32 * 1024..=512 * 1024;
/// Number of sequential reads before more is requested than they want.
const IN_ORDER: i32 = 2;
/// Start value of that count after most of a piece was not used: this many more sequential reads are
/// needed.
const IN_VAIN: i32 = -32;
/// Maximum number of files tracked at a time.
const READERS_MAX: usize = 8;

static READERS: Mutex<Readers> = Mutex::new(Readers { all: Vec::new(), spare: None });

struct Readers {
    all: Vec<Reader>,
    /// Memory of a previous piece, so that the next one costs no page faults.
    spare: Option<Vec<u8>>,
}

/// The read pattern of a file.
struct Reader {
    mount: usize,
    handle: u64,
    /// Where the last read ended.
    next: u64,
    /// Number of previous successive reads that each began where the one before ended.
    in_order: i32,
    /// Number of bytes to request next.
    window: usize,
    piece: Option<Piece>,
}

/// Data read ahead.
struct Piece {
    /// Memory whose first `length` bytes are the file's.
    memory: Vec<u8>,
    length: usize,
    from: u64,
    /// End of the furthest read from it, in bytes.
    used: usize,
    /// The file ended at its end.
    is_last: bool,
    when: Instant,
    /// Number of changes before it was requested.
    changes: u64,
}

impl Piece {
    fn is_valid(&self) -> bool {
        self.changes == changes() && self.when.elapsed() <= VALID
    }

    /// Copies the data from `offset` on and returns its length.
    fn copy_to(&mut self, target: &mut [u8], offset: u64) -> usize {
        let at = offset.checked_sub(self.from).and_then(|at| usize::try_from(at).ok());
        let Some(at) = at.filter(|at| *at < self.length) else { return 0 };
        let count = target.len().min(self.length - at);
        target[..count].copy_from_slice(&self.memory[at..at + count]);
        self.used = self.used.max(at + count);
        count
    }
}

/// What a read still needs from the server.
enum Rest {
    /// Nothing.
    Nothing,
    /// Only the bytes that it wants.
    Itself,
    /// This many bytes, read ahead into this memory.
    Ahead(usize, Vec<u8>),
}

impl Reader {
    /// Starts with a file whose first bytes may have come with opening it.
    fn new(mount: usize, handle: u64) -> Self {
        let (next, in_order) = (FIRST_BYTES as u64, IN_ORDER - 1);
        Self { mount, handle, next, in_order, window: *WINDOW_BYTES.start(), piece: None }
    }

    fn is(&self, mount: usize, handle: u64) -> bool {
        self.handle == handle && self.mount == mount
    }

    /// Starts a read: copies the data that is there and returns its length and what to do next.
    fn begin(
        &mut self,
        target: &mut [u8],
        offset: u64,
        spare: &mut Option<Vec<u8>>,
    ) -> (usize, Rest) {
        self.in_order = if offset == self.next { self.in_order.saturating_add(1) } else { 0 };
        self.next = offset.saturating_add(target.len() as u64);
        let mut done = 0;
        if let Some(piece) = self.piece.as_mut().filter(|piece| piece.is_valid()) {
            done = piece.copy_to(target, offset);
            // At the end of the file a read is short; the next one asks whether the file still ends there.
            if done == target.len() || (done > 0 && piece.is_last) {
                return (done, Rest::Nothing);
            }
        }
        if let Some(piece) = self.piece.take() {
            self.judge(&piece);
            *spare = Some(piece.memory);
        }
        let wanted = target.len() - done;
        if self.in_order < IN_ORDER || wanted > *WINDOW_BYTES.end() / 2 {
            return (done, Rest::Itself);
        }
        self.window = self.window.max(4 * wanted).min(*WINDOW_BYTES.end());
        let memory = spare.take().or_else(new_memory);
        (done, memory.map_or(Rest::Itself, |memory| Rest::Ahead(self.window, memory)))
    }

    /// Adapts to how much of a piece was used.
    fn judge(&mut self, piece: &Piece) {
        if piece.used == piece.length {
            self.window = (2 * self.window).min(*WINDOW_BYTES.end());
        } else {
            self.window = *WINDOW_BYTES.start();
            if piece.used < piece.length / 2 {
                self.in_order = IN_VAIN;
            }
        }
    }
}

/// Allocates memory for the longest piece; pages that are not touched cost nothing. Returns `None` if out
/// of memory.
fn new_memory() -> Option<Vec<u8>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(*WINDOW_BYTES.end()).ok()?;
    Some(memory)
}

fn find(all: &mut Vec<Reader>, mount: usize, handle: u64) -> &mut Reader {
    let place = all.iter().position(|reader| reader.is(mount, handle));
    let place = place.unwrap_or_else(|| {
        if all.len() == READERS_MAX {
            all.remove(0);
        }
        all.push(Reader::new(mount, handle));
        all.len() - 1
    });
    &mut all[place]
}

/// Called in a process that uses its parent's memory: starts empty and leaves the original untouched.
pub(crate) fn leave_to_parent() {
    if let Some(mut readers) = lock(&READERS) {
        let all = std::mem::take(&mut readers.all);
        std::mem::forget((all, readers.spare.take()));
    }
}

/// Forgets a file that was closed or opened, whose handle may have meant another one.
pub(crate) fn forget(mount: usize, handle: u64) {
    if let Some(mut readers) = lock(&READERS)
        && let Some(place) = readers.all.iter().position(|reader| reader.is(mount, handle))
        && let Some(piece) = readers.all.remove(place).piece
    {
        readers.spare = Some(piece.memory);
    }
}

/// Returns true if the kernel would read ahead, too.
fn is_followed(open: Open) -> bool {
    let is_direct = open.entry.flags.load(Ordering::Relaxed) & libc::O_DIRECT as u32 != 0;
    !is_direct && open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT == libc::S_IFREG
}

/// Reads an open file at an offset.
pub(crate) fn read_at(open: Open, target: &mut [u8], offset: u64) -> Result<usize, i32> {
    let mount = open.entry.mount.load(Ordering::Relaxed) as usize;
    let handle = open.handle;
    let readers = is_followed(open).then(|| lock(&READERS)).flatten();
    let (done, rest) = readers.map_or((0, Rest::Itself), |mut readers| {
        let Readers { all, spare } = &mut *readers;
        find(all, mount, handle).begin(target, offset, spare)
    });
    let (target, offset) = (&mut target[done..], offset + done as u64);
    let read = match rest {
        Rest::Nothing => Ok(0),
        Rest::Itself => remote::with(open, |file| file.read_at(target, offset)),
        Rest::Ahead(window, memory) => read_piece(open, window, memory, offset).map(|mut piece| {
            let count = piece.copy_to(target, offset);
            if let Some(mut readers) = lock(&READERS) {
                find(&mut readers.all, mount, handle).piece = Some(piece);
            }
            count
        }),
    };
    match read {
        Ok(count) => Ok(done + count),
        Err(_) if done > 0 => Ok(done),
        Err(error) => Err(error),
    }
}

fn read_piece(open: Open, window: usize, mut memory: Vec<u8>, from: u64) -> Result<Piece, i32> {
    let (when, changes) = (Instant::now(), changes());
    if memory.len() < window {
        memory.resize(window, 0);
    }
    let length = remote::with(open, |file| file.read_at(&mut memory[..window], from))?;
    Ok(Piece { memory, length, from, used: 0, is_last: length < window, when, changes })
}
