//! Short texts and parts of files, without memory allocation.

use core::mem::MaybeUninit;

/// Returns a C string without its zero byte.
///
/// # Safety
/// The string ends with a zero byte, and lives as long as the process.
pub(crate) unsafe fn string(at: *const u8) -> &'static [u8] {
    let mut length = 0;
    // SAFETY: the caller promises a string that ends with a zero byte. The reads are volatile so that the
    // compiler does not turn the loop into a call of `strlen`.
    unsafe {
        while at.add(length).read_volatile() != 0 {
            length += 1;
        }
        core::slice::from_raw_parts(at, length)
    }
}

/// A short text assembled from parts. Unused capacity stays untouched.
pub(crate) struct Text<const ROOM: usize> {
    bytes: [MaybeUninit<u8>; ROOM],
    length: usize,
}

impl<const ROOM: usize> Text<ROOM> {
    /// Creates an empty text.
    pub(crate) fn new() -> Self {
        Self { bytes: [const { MaybeUninit::uninit() }; ROOM], length: 0 }
    }

    /// Joins these parts. Returns `None` if there is not enough room.
    pub(crate) fn of(parts: &[&[u8]]) -> Option<Self> {
        let mut text = Self::new();
        parts.iter().try_for_each(|part| text.push(part))?;
        Some(text)
    }

    /// Appends a part. Returns `None` if there is not enough room.
    pub(crate) fn push(&mut self, part: &[u8]) -> Option<()> {
        let room = self.bytes.get_mut(self.length..)?.get_mut(..part.len())?;
        for (to, from) in room.iter_mut().zip(part) {
            to.write(*from);
        }
        self.length += part.len();
        Some(())
    }

    /// Appends a number in native byte order.
    pub(crate) fn push_word(&mut self, word: u64) -> Option<()> {
        self.push(&word.to_ne_bytes())
    }

    /// Appends the length of a piece and the piece.
    pub(crate) fn push_piece(&mut self, piece: &[u8]) -> Option<()> {
        self.push_word(piece.len() as u64)?;
        self.push(piece)
    }

    /// Returns the text.
    pub(crate) fn get(&self) -> &[u8] {
        // SAFETY: the first `length` bytes have been written.
        unsafe { core::slice::from_raw_parts(self.bytes.as_ptr().cast(), self.length) }
    }

    /// Returns the address of the text.
    pub(crate) fn address(&self) -> usize {
        self.bytes.as_ptr() as usize
    }
}

/// Formats a number in decimal.
pub(crate) fn decimal(mut number: u32) -> Text<10> {
    let mut digits = [0; 10];
    let mut first = digits.len();
    for place in digits.iter_mut().rev() {
        first -= 1;
        *place = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    let mut text = Text::new();
    let _ = text.push(digits.get(first..).unwrap_or_default());
    text
}

/// Reads a little-endian number of `BYTES` bytes from a file.
pub(crate) fn field<const BYTES: usize>(file: &[u8], at: usize) -> Option<usize> {
    let mut word = [0; 8];
    let from = file.get(at..at.checked_add(BYTES)?)?;
    for (to, from) in word.iter_mut().zip(from) {
        *to = *from;
    }
    Some(usize::from_le_bytes(word))
}

/// A program header of an ELF file.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) kind: u32,
    pub(crate) flags: u32,
    pub(crate) offset: usize,
    pub(crate) address: usize,
    pub(crate) physical: usize,
    pub(crate) file_bytes: usize,
    pub(crate) bytes: usize,
    pub(crate) align: usize,
}

/// Kinds of program headers: `PT_LOAD`, `PT_INTERP` and `PT_PHDR`.
pub(crate) const LOAD: u32 = 1;
pub(crate) const INTERPRETER: u32 = 3;
pub(crate) const HEADERS: u32 = 6;

/// Parses the beginning of an ELF file for this machine: returns its entry point and its program headers, or
/// `None` for any other file and if the headers lie beyond this part.
pub(crate) fn elf(first: &[u8]) -> Option<(usize, impl Iterator<Item = Header>)> {
    const MACHINE: usize = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    const HEADER_BYTES: usize = size_of::<Header>();
    let is_ours = first.starts_with(b"\x7fELF\x02\x01")
        && field::<2>(first, 18)? == MACHINE
        && field::<2>(first, 54)? == HEADER_BYTES;
    let (at, count) = (field::<8>(first, 32)?, field::<2>(first, 56)?);
    let table = first.get(at..at.checked_add(count * HEADER_BYTES)?).filter(|_| is_ours)?;
    let headers = table.chunks_exact(HEADER_BYTES).filter_map(|header| {
        Some(Header {
            kind: field::<4>(header, 0)? as u32,
            flags: field::<4>(header, 4)? as u32,
            offset: field::<8>(header, 8)?,
            address: field::<8>(header, 16)?,
            physical: field::<8>(header, 24)?,
            file_bytes: field::<8>(header, 32)?,
            bytes: field::<8>(header, 40)?,
            align: field::<8>(header, 48)?,
        })
    });
    Some((field::<8>(first, 24)?, headers))
}
