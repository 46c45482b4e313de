//! Reading ahead: a process that reads a file sequentially in short pieces gets them from longer ones. The first
//! ones are requested when they are wanted, each with one request. Once the reader has used up the longest kind,
//! the next ones are requested before: ever more of them, as long as it has to wait for them, so that a far
//! server sends without a pause.
//!
//! Long reads need no longer ones. Only if the server is far ([`Reader::is_far`]) is what follows them requested
//! before: then copying it once more is nothing beside waiting for it.
//!
//! Data read ahead is used only for a moment and until any process of the run changes something or takes a lock,
//! like data from opening (`opened.rs`). The end of a file is not remembered: a read there asks the server.
//!
//! **Age.** Data that a reader has waited for may be used for [`VALID`] after it has arrived. When data arrives
//! that nobody waits for is unknown, as the library has no threads. So it is taken to have been on its way for as
//! long as the fastest answer that was waited for ([`Reader::trip`]): it may be used for that time and
//! [`VALID`] after it was requested. In both cases it is at most [`VALID`] older than what a read would return.

mod reader;

use crate::descriptors::Open;
use crate::known::{changes, lock};
use crate::opened::{self, FIRST_BYTES};
use crate::{remote, written};
use reader::{Data, LONG_BYTES_MAX, Next, Piece, Reader, WINDOW_BYTES, is_long};
pub(crate) use reader::{FAR, VALID};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Maximum number of files tracked at a time.
const READERS_MAX: usize = 8;

static READERS: Mutex<Readers> = Mutex::new(Readers { all: Vec::new(), spare: None });

struct Readers {
    all: Vec<Reader>,
    /// Memory of a previous piece, so that the next one costs no page faults.
    spare: Option<Vec<u8>>,
}

fn find(all: &mut Vec<Reader>, mount: usize, handle: u64) -> &mut Reader {
    let place = all.iter().position(|reader| reader.is(mount, handle));
    let place = place.unwrap_or_else(|| {
        if all.len() == READERS_MAX {
            all.remove(0);
        }
        let size = opened::attr(mount, handle).map_or(u64::MAX, |attr| attr.size);
        all.push(Reader::new(mount, handle, size, FIRST_BYTES as u64));
        all.len() - 1
    });
    &mut all[place]
}

/// Called in a process that uses its parent's memory, or has the parent's connections no more: starts empty and
/// leaves the original untouched.
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
    {
        let pieces = readers.all.remove(place).pieces;
        let memory = pieces.into_iter().find_map(|piece| piece.data.memory());
        readers.spare = memory.or(readers.spare.take());
    }
}

/// Returns true if the kernel would read ahead, and keep what was read.
pub(crate) fn is_followed(open: Open) -> bool {
    let is_direct = open.entry.flags.load(Ordering::Relaxed) & libc::O_DIRECT as u32 != 0;
    !is_direct && open.entry.mode.load(Ordering::Relaxed) & libc::S_IFMT == libc::S_IFREG
}

/// Runs `work` with the reader of a file; returns `None` if others have its lock for long.
fn with_reader<T>(
    (mount, handle): (usize, u64),
    work: impl FnOnce(&mut Reader, &mut Option<Vec<u8>>) -> T,
) -> Option<T> {
    let mut readers = lock(&READERS)?;
    let Readers { all, spare } = &mut *readers;
    Some(work(find(all, mount, handle), spare))
}

/// Reads an open file at an offset.
pub(crate) fn read_at(open: Open, target: &mut [u8], offset: u64) -> Result<usize, i32> {
    if !is_followed(open) {
        return remote::with(open, |file| file.read_at(target, offset));
    }
    let file = (open.entry.mount.load(Ordering::Relaxed) as usize, open.handle);
    let _ = with_reader(file, |reader, _| reader.reads(offset, target.len()));
    let mut done = 0;
    let read = loop {
        let (rest, at) = (&mut target[done..], offset + done as u64);
        let next = with_reader(file, |reader, spare| reader.go_on(rest, at, spare));
        let (count, next) = next.unwrap_or((0, Next::Read));
        done += count;
        let (rest, at) = (&mut target[done..], offset + done as u64);
        let window = match next {
            Next::End => break Ok(0),
            Next::Read => None,
            Next::ReadAhead(window) => Some(window),
            Next::Ask(from) if ask(open, file, from) => continue,
            // Another way to ask is to read.
            Next::Ask(_) => None,
            Next::Wait(mut piece) => match piece.arrive() {
                Ok(()) => {
                    let _ = with_reader(file, |reader, _| reader.put_back(piece));
                    continue;
                }
                // The read itself reports it.
                Err(_) => None,
            },
        };
        let Some((window, memory)) = window.and_then(|window| Some((window, memory()?))) else {
            let (asked, before) = (Instant::now(), changes());
            let read = remote::with(open, |file| file.read_at(rest, at));
            if let Ok(count) = read {
                written::was_read(open, rest.len(), at, &rest[..count], before);
            }
            if is_long(rest.len()) && rest.len() <= LONG_BYTES_MAX {
                let time = asked.elapsed();
                if with_reader(file, |reader, _| reader.took(time)) == Some(true) {
                    look(open, file, at);
                }
            }
            break read;
        };
        break read_piece(open, window, memory, at).map(|mut piece| {
            let count = piece.copy_to(rest, at);
            let _ = with_reader(file, |reader, _| reader.begin(piece));
            count
        });
    };
    match read {
        Ok(count) => Ok(done + count),
        Err(_) if done > 0 => Ok(done),
        Err(error) => Err(error),
    }
}

/// Finds out how long a short read takes.
fn look(open: Open, file: (usize, u64), at: u64) {
    let asked = Instant::now();
    if remote::with(open, |file| file.read_at(&mut [0], at)).is_ok() {
        let time = asked.elapsed();
        let _ = with_reader(file, |reader, _| reader.short_read = Some(time));
    }
}

/// Returns memory for a piece, or `None` if out of memory. Pages that are not touched cost nothing.
fn memory() -> Option<Vec<u8>> {
    if let Some(spare) = lock(&READERS).and_then(|mut readers| readers.spare.take()) {
        return Some(spare);
    }
    let mut memory = Vec::new();
    memory.try_reserve_exact(*WINDOW_BYTES.end()).ok()?;
    Some(memory)
}

/// Reads a piece and waits for it.
fn read_piece(open: Open, window: usize, mut memory: Vec<u8>, from: u64) -> Result<Piece, i32> {
    let (asked, changes) = (Instant::now(), changes());
    if memory.len() < window {
        memory.resize(window, 0);
    }
    let length = remote::with(open, |file| file.read_at(&mut memory[..window], from))?;
    let (data, until) = (Data::Here(memory, length), Instant::now() + VALID);
    Ok(Piece { from, wanted: window, data, asked, until, changes, is_awaited: true, used: 0 })
}

/// Requests a piece. Returns false if that is not possible.
fn ask(open: Open, file: (usize, u64), from: u64) -> bool {
    let (asked, changes) = (Instant::now(), changes());
    let wanted = *WINDOW_BYTES.end();
    let Some(mut memory) = memory() else { return false };
    memory.resize(wanted, 0);
    let Ok(operation) = remote::with(open, |file| file.start_read_at(memory, from)) else {
        return false;
    };
    let add = |reader: &mut Reader, _: &mut _| {
        let until = asked + reader.trip + VALID;
        let (data, is_awaited) = (Data::Asked(operation), false);
        reader.add(Piece { from, wanted, data, asked, until, changes, is_awaited, used: 0 });
    };
    with_reader(file, add).is_some()
}
