//! Changes of mapped files by other calls than stores: the shared memory has them as soon as the file does.

use super::{Which, is_any, is_any_here, touched, which, with_maps, write_back_file};
use crate::descriptors::Open;
use crate::guard::inside;
use crate::hooks::shared::{self, Shared};

/// Most bytes that are written to a mapped file while nobody else may read it in or write it back.
const WRITTEN_BYTES: usize = 1 << 20;

/// Returns true if the run has shared mappings of a file.
pub(crate) fn has_shared(open: Open) -> bool {
    existing(which(open)).is_some()
}

/// Returns the memory of a file if the run has shared mappings of it.
fn existing(file: Which) -> Option<Shared> {
    if shared::is_any() { inside(|| Shared::existing(file)).ok() } else { None }
}

/// Writes to a file by `call`, at an offset or at the end, which returns the number of bytes written and where
/// they are, and brings shared mappings up to date.
pub(crate) fn writing(
    open: Open,
    data: &[u8],
    at: u64,
    appends: bool,
    call: impl Fn(&[u8], u64) -> Result<(usize, i64), i32>,
) -> Result<(usize, i64), i32> {
    let made = shared::made();
    let Some(shared) = existing(which(open)) else {
        let (count, first) = call(data, at)?;
        written_since(open, made, &data[..count.min(data.len())], Some(first));
        return Ok((count, first));
    };
    let (mut done, mut first) = (0, at as i64);
    while done < data.len() {
        // A copy, as the data may be in a mapping of the same file: whoever reads a missing page in takes the turn.
        let length = if appends { data.len() } else { WRITTEN_BYTES.min(data.len() - done) };
        let part = data[done..done + length].to_vec();
        let begin = at + done as u64;
        match shared.writing(&part, (!appends).then_some(begin), || call(&part, begin)) {
            Ok((count, begin)) => {
                first = if done == 0 { begin } else { first };
                done += count;
                if count < length || appends {
                    break;
                }
            }
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    // The file is written by now, whatever becomes of the mappings.
    let _ = with_maps((), |maps| {
        for map in maps.iter().filter(|map| map.is_of(which(open))) {
            if map.is_touched && map.shared.is_some() {
                // Pages may have been touched while the file was shorter.
                touched::forget(map, first, first.saturating_add(done as i64));
            }
        }
        Ok(())
    });
    Ok((done, first))
}

/// Brings shared mappings up to date after a write, at an offset or at the end, to a file that had none when so many
/// [were made](shared::made): this process may have been stopped before it wrote.
pub(crate) fn written_since(open: Open, before: u32, data: &[u8], at: Option<i64>) {
    if shared::made() == before {
        return;
    }
    let _ = inside(|| {
        let shared = Shared::existing(which(open))?;
        match at {
            Some(at) => shared.written(open, data, at),
            None => shared.read_anew(|to, at| shared::read(open, to, at)),
        }
    });
}

/// Makes a range of a file zero by `call`, and the same of its shared mappings.
pub(crate) fn zeroing(
    open: Open,
    range: std::ops::Range<u64>,
    call: impl FnOnce() -> Result<(), i32>,
) -> Result<(), i32> {
    match existing(which(open)) {
        Some(shared) => shared.zeroing(range, call),
        None => call(),
    }
}

/// Changes the length of a file to `length` by `call`, and brings its mappings up to date. Nobody reads pages of the
/// file in or writes them back meanwhile.
///
/// `which` tells which file it is, if there is one, and `now` how long it is, if that is needed; `call` which file it was.
/// `read` reads that at an offset and returns how many bytes there were.
pub(crate) fn resizing<T>(
    length: u64,
    which: impl FnOnce() -> Result<Option<Which>, i32>,
    now: impl FnOnce() -> Result<u64, i32>,
    call: impl FnOnce() -> Result<(Which, T), i32>,
    read: impl Fn(&T, &mut [u8], usize) -> Result<usize, i32>,
) -> Result<T, i32> {
    let seen = if is_any() { which()? } else { None };
    let memory = seen.and_then(existing);
    let ((file, result), from) = match &memory {
        Some(shared) => shared.resizing(length, now, call)?,
        None => {
            let before = if seen.is_some() && is_any_here() { now()? } else { length };
            (call()?, before.min(length))
        }
    };
    let _ = with_maps((), |maps| {
        for map in maps.iter().filter(|map| map.is_of(file) && map.is_touched) {
            touched::forget(map, from as i64, i64::MAX);
        }
        Ok(())
    });
    let is_updated = memory.is_some() && seen == Some(file);
    if !is_updated && let Some(shared) = existing(file) {
        // A process has mapped it meanwhile, and may have read it before or after the change.
        let renewed = shared.read_anew(|to, at| read(&result, to, at));
        let _ = renewed.or_else(|_| shared.clear(length));
    }
    Ok(result)
}

/// Runs a call that changes a file in some other way; reads its shared mappings anew.
pub(crate) fn changing<T>(open: Open, call: impl FnOnce() -> Result<T, i32>) -> Result<T, i32> {
    if !shared::is_any() {
        return call();
    }
    let _ = write_back_file(open);
    let result = call()?;
    let _ =
        inside(|| Shared::existing(which(open))?.read_anew(|to, at| shared::read(open, to, at)));
    Ok(result)
}
