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
    pub(crate) folders: Folders,
}

/// Folders in which the loader looks for a file's libraries.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Folders {
    pub(crate) paths: Vec<Vec<u8>>,
    /// Before it looks in those of `LD_LIBRARY_PATH` (`DT_RPATH`), not after that (`DT_RUNPATH`).
    pub(crate) are_first: bool,
}

fn number<const BYTES: usize>(bytes: &[u8], at: usize) -> Option<usize> {
    let mut word = [0; 8];
    let from = bytes.get(at..at.checked_add(BYTES)?)?;
    let first = if cfg!(target_endian = "little") { 0 } else { 8 - BYTES };
    word[first..first + BYTES].copy_from_slice(from);
    usize::try_from(u64::from_ne_bytes(word)).ok()
}

/// Longest name or search path that is read, in bytes.
const TEXT_BYTES_MAX: usize = 16 * 1024;

/// Reads at most this many bytes at an offset; fewer at the end of the file.
pub(crate) type Read<'a> = &'a dyn Fn(usize, usize) -> Option<Vec<u8>>;

fn text(read: Read<'_>, at: usize) -> Option<Vec<u8>> {
    // Nearly all are short.
    [256, TEXT_BYTES_MAX].into_iter().find_map(|length| {
        let rest = read(at, length)?;
        Some(rest[..rest.iter().position(|b| *b == 0)?].to_vec())
    })
}

/// Where a file's dynamic section says that the texts are.
struct Places {
    libraries: Vec<usize>,
    /// Of `DT_RUNPATH`, if there is one: the loader then looks at no other.
    folders: Vec<usize>,
    are_first: bool,
}

/// Returns what a file says it needs; `None` if it has no dynamic section or is damaged.
pub(crate) fn needs(read: Read<'_>) -> Option<Needs> {
    let places = places(read)?;
    Some(Needs { libraries: texts(read, &places.libraries)?, folders: folders_at(read, &places)? })
}

/// Returns only the folders of [`needs`], of which most programs have none: two reads tell.
pub(crate) fn folders(read: Read<'_>) -> Option<Folders> {
    folders_at(read, &places(read)?)
}

fn folders_at(read: Read<'_>, places: &Places) -> Option<Folders> {
    let paths = split(&texts(read, &places.folders)?);
    Some(Folders { paths, are_first: places.are_first })
}

fn texts(read: Read<'_>, places: &[usize]) -> Option<Vec<Vec<u8>>> {
    places.iter().map(|at| text(read, *at)).collect()
}

fn split(paths: &[Vec<u8>]) -> Vec<Vec<u8>> {
    paths.iter().flat_map(|path| path.split(|b| *b == b':')).map(<[u8]>::to_vec).collect()
}

fn places(read: Read<'_>) -> Option<Places> {
    const LOAD: usize = 1;
    const DYNAMIC: usize = 2;
    /// The program headers of nearly all files lie within these bytes.
    const FIRST_BYTES: usize = 1024;
    let first = read(0, FIRST_BYTES)?;
    if first.get(..6)? != HEAD {
        return None;
    }
    let (at, size, count) =
        (number::<8>(&first, 32)?, number::<2>(&first, 54)?, number::<2>(&first, 56)?);
    let length = size * count.min(ENTRIES_MAX);
    let parts = match first.get(at..at.checked_add(length)?) {
        Some(parts) => parts.to_vec(),
        None => read(at, length)?,
    };
    let mut loads = Vec::new();
    let mut dynamic = None;
    for index in 0..count.min(ENTRIES_MAX) {
        let head = index * size;
        let field = |offset: usize| number::<8>(&parts, head + offset);
        let (offset, address, length) = (field(8)?, field(16)?, field(32)?);
        match number::<4>(&parts, head)? {
            LOAD => loads.push((offset, address, length)),
            DYNAMIC => dynamic = Some((offset, length)),
            _ => {}
        }
    }
    let (start, length) = dynamic?;
    let entries = read(start, (length / 16).min(ENTRIES_MAX) * 16)?;
    let (mut strings, mut libraries) = (None, Vec::new());
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for index in 0..(length / 16).min(ENTRIES_MAX) {
        let value = number::<8>(&entries, index * 16 + 8)?;
        match number::<8>(&entries, index * 16)? {
            0 => break,
            1 => libraries.push(value),
            5 => strings = Some(value),
            15 => first.push(value),
            29 => last.push(value),
            _ => {}
        }
    }
    let strings = strings?;
    let place = loads.iter().find_map(|(offset, address, length)| {
        let into = strings.checked_sub(*address).filter(|into| into < length)?;
        offset.checked_add(into)
    })?;
    let all = |list: Vec<usize>| -> Option<Vec<usize>> {
        list.into_iter().map(|at| place.checked_add(at)).collect()
    };
    let are_first = last.is_empty();
    let folders = all(if are_first { first } else { last })?;
    Some(Places { libraries: all(libraries)?, folders, are_first })
}
