//! Reading ahead: who reads a file from front to back in short pieces gets them out of longer ones, each asked
//! for once.
//!
//! What was read ahead is used for a moment ([`VALID`]) and no longer than until a process of the run
//! changes something or takes a lock, as what came with opening (`opened.rs`). That a file ended is not
//! kept: who asks at its end asks the server.

use crate::descriptors::Open;
use crate::known::{changes, lock};
use crate::opened::FIRST_BYTES;
use crate::remote;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long what was read ahead may be used.
const VALID: Duration = Duration::from_millis(100);
/// Bytes that are asked for first, and at most; reads of more than half of that are made as they are.
const WINDOW_BYTES: std::ops::RangeInclusive<usize> = 32 * 1024..=512 * 1024;
/// Reads that have to follow each other before more is asked for than they want.
const IN_ORDER: i32 = 2;
/// So many reads more have to, when most of what was asked for was not used.
const IN_VAIN: i32 = -32;
/// Files that are followed at a time.
const READERS_MAX: usize = 8;

static READERS: Mutex<Readers> = Mutex::new(Readers { all: Vec::new(), spare: None });

struct Readers {
    all: Vec<Reader>,
    /// Memory that was used, so that the next piece costs no page faults.
    spare: Option<Vec<u8>>,
}

/// How a file is read.
struct Reader {
    mount: usize,
    handle: u64,
    /// Where the last read ended.
    next: u64,
    /// Reads before this one of which each began where the one before ended.
    in_order: i32,
    /// Bytes to ask for next.
    window: usize,
    piece: Option<Piece>,
}

/// What was read ahead.
struct Piece {
    /// Memory, of which the first `length` bytes are the file's.
    memory: Vec<u8>,
    length: usize,
    from: u64,
    /// Bytes up to the end of the furthest read from it.
    used: usize,
    /// The file ended behind it.
    is_last: bool,
    when: Instant,
    /// Number of changes before it was asked for.
    changes: u64,
}

impl Piece {
    fn is_valid(&self) -> bool {
        self.changes == changes() && self.when.elapsed() <= VALID
    }

    /// Copies what there is from `offset` on; how much that is.
    fn copy_to(&mut self, target: &mut [u8], offset: u64) -> usize {
        let at = offset.checked_sub(self.from).and_then(|at| usize::try_from(at).ok());
        let Some(at) = at.filter(|at| *at < self.length) else { return 0 };
        let count = target.len().min(self.length - at);
        target[..count].copy_from_slice(&self.memory[at..at + count]);
        self.used = self.used.max(at + count);
        count
    }
}

/// What a read does about the server.
enum Rest {
    /// All is there.
    Nothing,
    /// Asks for what it wants.
    Itself,
    /// Asks for so many bytes, into this memory.
    Ahead(usize, Vec<u8>),
}

impl Reader {
    /// Of a file whose first bytes may have come with opening it.
    fn new(mount: usize, handle: u64) -> Self {
        let (next, in_order) = (FIRST_BYTES as u64, IN_ORDER - 1);
        Self { mount, handle, next, in_order, window: *WINDOW_BYTES.start(), piece: None }
    }

    fn is(&self, mount: usize, handle: u64) -> bool {
        self.handle == handle && self.mount == mount
    }

    /// A read begins: copies what there is for it; how much that is, and what is to be done then.
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
            // Where the file ended, a read is short; the next one asks whether it still does.
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

    /// What was read ahead is not used any more: learns from that.
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

/// Room for as much as will ever be read at once: what nobody touches costs nothing. `None`: the program has no memory left.
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

/// This process uses memory of its parent: it begins anew and leaves what is there as it is.
pub(crate) fn leave_to_parent() {
    if let Some(mut readers) = lock(&READERS) {
        let all = std::mem::take(&mut readers.all);
        std::mem::forget((all, readers.spare.take()));
    }
}

/// Forgets a file that was closed, or opened: its handle may have meant another one.
pub(crate) fn forget(mount: usize, handle: u64) {
    if let Some(mut readers) = lock(&READERS)
        && let Some(place) = readers.all.iter().position(|reader| reader.is(mount, handle))
        && let Some(piece) = readers.all.remove(place).piece
    {
        readers.spare = Some(piece.memory);
    }
}

/// Whether the kernel, too, would read ahead.
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
