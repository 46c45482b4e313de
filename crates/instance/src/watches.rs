//! What a process of the run sends the keeper about watched files.
//!
//! When it wants to watch a remote file, it asks a question. This is one packet to [the keeper's socket](crate::KEEPER).
//! It carries one end of a socket pair, over which the keeper answers. The answer is the number of the file's *shadow*:
//! a local directory or file in the folder [`SHADOWS`](crate::SHADOWS), on which the keeper repeats all changes of the
//! remote file, so that the kernel reports them to its watchers.
//!
//! When it lists a directory that is watched, it says which names it has found ([`Listed`]).

/// Length of a question without its path, or of [`Listed`] without its names.
const HEAD_BYTES: usize = 6 * 8;
/// Longest path in a question.
const PATH_BYTES_MAX: usize = 4096;
/// Maximum length of a question in bytes.
pub const ASK_BYTES_MAX: usize = HEAD_BYTES + PATH_BYTES_MAX;
/// Maximum length of [`Listed`] in bytes.
pub const LISTED_BYTES_MAX: usize = 32 << 10;
/// First word of [`Listed`].
const LISTED: u64 = 2;
/// What stands before a name in it.
const DIRECTORY: u8 = b'd';
const OTHER: u8 = b'-';
/// Length of an answer in bytes.
pub const ANSWER_BYTES: usize = 16;
/// Error number answered if the file has no shadow and the question gives no open handle: the process asks
/// again with a handle.
pub const UNKNOWN: i32 = libc::EAGAIN;

/// Asks for the number of a file's shadow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Number of the mount.
    pub mount: u32,
    /// The wanted events: bits of `inotify(7)`.
    pub mask: u32,
    /// Identity of the file in the mount's export.
    pub identity: u64,
    /// Handle by which the file can be watched if it has no shadow. The keeper owns the handle from then
    /// on, whatever it answers.
    pub opened: Option<Opened>,
}

/// An open file of the family, given to the keeper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// A directory is open for reading, anything else for nothing (`O_PATH`).
    pub handle: u64,
    /// Whether it is a directory.
    pub is_directory: bool,
    /// Its path below the mount; empty if it is too long to be sent.
    pub path: Vec<u8>,
}

impl Ask {
    /// Encodes the question.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let nothing = (0, 0, 0, &[][..]);
        let (kind, handle, is_directory, path) = self.opened.as_ref().map_or(nothing, |opened| {
            (1, opened.handle, u64::from(opened.is_directory), &opened.path[..])
        });
        let words =
            [kind, self.mount.into(), self.mask.into(), self.identity, handle, is_directory];
        let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        if path.len() <= PATH_BYTES_MAX {
            bytes.extend_from_slice(path);
        }
        bytes
    }

    /// Decodes a question; returns `None` if it is not valid.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let ([kind, mount, mask, identity, handle, is_directory], path) = words(bytes)?;
        let opened = match kind {
            0 => None,
            1 => Some(Opened { handle, is_directory: is_directory != 0, path: path.to_vec() }),
            _ => return None,
        };
        let (mount, mask) = (u32::try_from(mount).ok()?, u32::try_from(mask).ok()?);
        Some(Self { mount, mask, identity, opened })
    }
}

/// Part of what a program finds when it lists a watched directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listed {
    /// Number of the mount.
    pub mount: u32,
    /// Identity of the directory in the mount's export.
    pub identity: u64,
    /// Handle of the program's opening, which tells listings apart.
    pub handle: u64,
    /// Number of changes ([`State::changes`](crate::State::changes)) before the server was asked.
    pub changes: u64,
    /// Whether this is the first part.
    pub begins: bool,
    /// Whether this is the last part.
    pub ends: bool,
    /// Names, and whether they name directories.
    pub names: Vec<(Vec<u8>, bool)>,
}

impl Listed {
    /// Encodes it, in as many packets as necessary.
    #[must_use]
    pub fn to_packets(&self) -> Vec<Vec<u8>> {
        let mut texts = vec![Vec::new()];
        for (name, is_directory) in &self.names {
            let kind = if *is_directory { DIRECTORY } else { OTHER };
            let length = name.len() + 2;
            match texts.last_mut() {
                Some(text) if HEAD_BYTES + text.len() + length <= LISTED_BYTES_MAX => {
                    text.extend([&[kind], &name[..], &[0]].concat());
                }
                _ => texts.push([&[kind], &name[..], &[0]].concat()),
            }
        }
        let last = texts.len() - 1;
        let packet = |(number, text): (usize, Vec<u8>)| {
            let begins = u64::from(self.begins && number == 0);
            let ends = u64::from(self.ends && number == last);
            let Self { mount, identity, handle, changes, .. } = *self;
            let words = [LISTED, mount.into(), identity, handle, changes, begins | ends << 1];
            words.into_iter().flat_map(u64::to_ne_bytes).chain(text).collect()
        };
        texts.into_iter().enumerate().map(packet).collect()
    }

    /// Decodes a packet; returns `None` if it is not valid.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let ([kind, mount, identity, handle, changes, place], names) = words(bytes)?;
        if kind != LISTED {
            return None;
        }
        let (begins, ends) = (place & 1 != 0, place & 2 != 0);
        let names = names.split(|byte| *byte == 0).filter_map(<[u8]>::split_first);
        let names = names.map(|(kind, name)| (name.to_vec(), *kind == DIRECTORY)).collect();
        let mount = u32::try_from(mount).ok()?;
        Some(Self { mount, identity, handle, changes, begins, ends, names })
    }
}

/// Returns the words at the beginning of a packet, and the rest.
fn words(bytes: &[u8]) -> Option<([u64; HEAD_BYTES / 8], &[u8])> {
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
    let mut words = [0; HEAD_BYTES / 8];
    for (word, place) in words.iter_mut().zip(head.chunks_exact(8)) {
        *word = u64::from_ne_bytes(place.try_into().ok()?);
    }
    Some((words, rest))
}

/// Encodes an answer: the number of a shadow, or an error number.
#[must_use]
pub fn answer_bytes(answer: Result<u64, i32>) -> [u8; ANSWER_BYTES] {
    let (number, error) = answer.map_or_else(|error| (0, error), |number| (number, 0));
    let mut bytes = [0; ANSWER_BYTES];
    bytes[..8].copy_from_slice(&number.to_ne_bytes());
    bytes[8..12].copy_from_slice(&error.to_ne_bytes());
    bytes
}

/// Decodes an answer.
///
/// # Errors
/// The error number answered.
pub fn parse_answer(bytes: &[u8; ANSWER_BYTES]) -> Result<u64, i32> {
    let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = *bytes;
    match i32::from_ne_bytes([i, j, k, l]) {
        0 => Ok(u64::from_ne_bytes([a, b, c, d, e, f, g, h])),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_and_answers_are_understood_and_nonsense_is_not() {
        let opened = Opened { handle: u64::MAX - 1, is_directory: true, path: b"a/b".to_vec() };
        let ask = Ask { mount: 3, mask: 0xfff, identity: 7 << 40, opened: Some(opened) };
        assert_eq!(Ask::parse(&ask.to_bytes()), Some(ask.clone()));
        let short = Ask { opened: None, ..ask.clone() };
        assert_eq!(Ask::parse(&short.to_bytes()), Some(short));
        let mut long = ask;
        let path = long.opened.as_mut().map(|opened| &mut opened.path);
        path.unwrap().resize(PATH_BYTES_MAX + 1, b'x');
        assert!(long.to_bytes().len() <= ASK_BYTES_MAX);
        assert_eq!(Ask::parse(&long.to_bytes()).unwrap().opened.unwrap().path, b"");
        assert_eq!(Ask::parse(&[0; HEAD_BYTES - 1]), None);
        assert_eq!(Ask::parse(&[2; HEAD_BYTES]), None);
        assert_eq!(Listed::parse(&Ask::parse(&[0; HEAD_BYTES]).unwrap().to_bytes()), None);
        for answer in [Ok(u64::MAX), Ok(0), Err(UNKNOWN)] {
            assert_eq!(parse_answer(&answer_bytes(answer)), answer);
        }
    }
    #[test]
    fn listings_arrive_in_packets() {
        let name = |number: u32| (format!("name {number}").into_bytes(), number.is_multiple_of(3));
        for count in [0, 1, 9999] {
            let names: Vec<_> = (0..count).map(name).collect();
            let whole = Listed {
                mount: 3,
                identity: 7 << 40,
                handle: u64::MAX,
                changes: 5,
                begins: true,
                ends: true,
                names,
            };
            let packets = whole.to_packets();
            assert!(packets.iter().all(|packet| packet.len() <= LISTED_BYTES_MAX));
            assert!(packets.iter().all(|packet| Ask::parse(packet).is_none()));
            let mut parts: Vec<_> =
                packets.iter().map(|packet| Listed::parse(packet).unwrap()).collect();
            assert_eq!(parts.len() > 1, count == 9999);
            assert_eq!(parts.iter().filter(|part| part.begins).count(), 1);
            assert_eq!(parts.iter().filter(|part| part.ends).count(), 1);
            assert!(parts[0].begins && parts[parts.len() - 1].ends);
            let names = parts.iter_mut().flat_map(|part| std::mem::take(&mut part.names)).collect();
            assert_eq!(Listed { names, begins: true, ends: true, ..parts.remove(0) }, whole);
        }
    }
}
