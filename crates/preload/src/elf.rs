//! Reads which libraries a program or library needs, and where to look for them.
//!
//! Accepts only 64-bit files of this machine's byte order; the loader refuses all others itself. Every
//! offset is checked, since the file is not trusted.

/// Maximum number of table entries that are read.
const ENTRIES_MAX: usize = 4096;
const HEAD: [u8; 6] =
    [0x7f, b'E', b'L', b'F', 2, if cfg!(target_endian = "little") { 1 } else { 2 }];

/// Names of libraries, and folders as written (with `$ORIGIN`).
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    pub(crate) libraries: Vec<Vec<u8>>,
    pub(crate) folders: Vec<Vec<u8>>,
}

fn number<const BYTES: usize>(bytes: &[u8], at: usize) -> Option<usize> {
    let mut word = [0; 8];
    let from = bytes.get(at..at.checked_add(BYTES)?)?;
    let first = if cfg!(target_endian = "little") { 0 } else { 8 - BYTES };
    word[first..first + BYTES].copy_from_slice(from);
    usize::try_from(u64::from_ne_bytes(word)).ok()
}

fn text(bytes: &[u8], at: usize) -> Option<Vec<u8>> {
    let rest = bytes.get(at..)?;
    Some(rest[..rest.iter().position(|b| *b == 0)?].to_vec())
}

/// Reads the dynamic section of a file; returns `None` if it has none or is damaged.
pub(crate) fn needs(file: &[u8]) -> Option<Needs> {
    const LOAD: usize = 1;
    const DYNAMIC: usize = 2;
    if file.get(..6)? != HEAD {
        return None;
    }
    let (at, size, count) =
        (number::<8>(file, 32)?, number::<2>(file, 54)?, number::<2>(file, 56)?);
    let mut loads = Vec::new();
    let mut dynamic = None;
    for index in 0..count.min(ENTRIES_MAX) {
        let head = at.checked_add(index.checked_mul(size)?)?;
        let field = |offset: usize| number::<8>(file, head.checked_add(offset)?);
        let (offset, address, length) = (field(8)?, field(16)?, field(32)?);
        match number::<4>(file, head)? {
            LOAD => loads.push((offset, address, length)),
            DYNAMIC => dynamic = Some((offset, length)),
            _ => {}
        }
    }
    let (start, length) = dynamic?;
    let (mut strings, mut names, mut paths) = (None, Vec::new(), Vec::new());
    for index in 0..(length / 16).min(ENTRIES_MAX) {
        let entry = start.checked_add(index * 16)?;
        let value = number::<8>(file, entry.checked_add(8)?)?;
        match number::<8>(file, entry)? {
            0 => break,
            1 => names.push(value),
            5 => strings = Some(value),
            15 | 29 => paths.push(value),
            _ => {}
        }
    }
    let strings = strings?;
    let place = loads.iter().find_map(|(offset, address, length)| {
        let into = strings.checked_sub(*address).filter(|into| into < length)?;
        offset.checked_add(into)
    })?;
    let all = |list: Vec<usize>| -> Option<Vec<Vec<u8>>> {
        list.into_iter().map(|at| text(file, place.checked_add(at)?)).collect()
    };
    let folders = all(paths)?
        .iter()
        .flat_map(|path| path.split(|b| *b == b':'))
        .map(<[u8]>::to_vec)
        .collect();
    Some(Needs { libraries: all(names)?, folders })
}
