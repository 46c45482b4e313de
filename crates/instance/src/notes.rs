//! Notes that processes of a run leave for `towline run`: messages for the user and data for the report.
//! Each is one line, appended by one `write`: its fields, separated by zero bytes.

/// The content of a note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A program that the library cannot be loaded into was not started, since an argument names a prefix.
    Refused {
        /// Code of the obstacle ([`crate::program::Obstacle::code`]).
        obstacle: String,
        /// The program.
        program: Vec<u8>,
    },
    /// A program that the library cannot be loaded into was started.
    Unreached {
        /// Code of the obstacle.
        obstacle: String,
        /// The program.
        program: Vec<u8>,
    },
    /// A program of the run started.
    Began {
        /// The program.
        program: Vec<u8>,
    },
    /// System calls of this program are trapped.
    Armed {
        /// The program.
        program: Vec<u8>,
    },
    /// System calls of this program should be trapped, but the kernel cannot.
    Untrapped {
        /// The program.
        program: Vec<u8>,
    },
    /// A thread was created without libc: its system calls are not trapped.
    Thread {
        /// The program.
        program: Vec<u8>,
    },
    /// A mapped file was lost in a restart of its server.
    Lost {
        /// Something was stored to the mapping and not written back.
        is_unwritten: bool,
        /// Its absolute path; empty if it is not open any more.
        path: Vec<u8>,
    },
    /// A remote file was opened.
    Opened {
        /// Flags of `open`.
        flags: u32,
        /// Its absolute path.
        path: Vec<u8>,
    },
    /// The names of the counted functions, in the order of their counts.
    Functions(Vec<String>),
}

impl Note {
    /// Encodes the note as a line.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let fields: Vec<&[u8]> = match self {
            Self::Refused { obstacle, program } => vec![b"refused", obstacle.as_bytes(), program],
            Self::Unreached { obstacle, program } => {
                vec![b"unreached", obstacle.as_bytes(), program]
            }
            Self::Began { program } => vec![b"began", program],
            Self::Armed { program } => vec![b"armed", program],
            Self::Untrapped { program } => vec![b"untrapped", program],
            Self::Thread { program } => vec![b"thread", program],
            Self::Lost { is_unwritten: false, path } => vec![b"lost", path],
            Self::Lost { is_unwritten: true, path } => vec![b"unwritten", path],
            Self::Opened { flags, path } => {
                let flags = flags.to_string();
                return line(&[b"opened", flags.as_bytes(), path]);
            }
            Self::Functions(names) => {
                let names = names.iter().map(String::as_bytes);
                return line(
                    &[b"functions".as_slice()].into_iter().chain(names).collect::<Vec<_>>(),
                );
            }
        };
        line(&fields)
    }

    /// Decodes a line without its line end; returns `None` if it is not a note.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|b| *b == 0);
        let kind = fields.next()?;
        if kind == b"functions" {
            let names = fields.map(|name| String::from_utf8(name.to_vec()).ok());
            return Some(Self::Functions(names.collect::<Option<_>>()?));
        }
        let first = fields.next()?.to_vec();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).ok();
        let note = match kind {
            b"began" => Self::Began { program: first },
            b"armed" => Self::Armed { program: first },
            b"untrapped" => Self::Untrapped { program: first },
            b"thread" => Self::Thread { program: first },
            b"lost" => Self::Lost { is_unwritten: false, path: first },
            b"unwritten" => Self::Lost { is_unwritten: true, path: first },
            _ => {
                let second = fields.next()?.to_vec();
                match kind {
                    b"refused" => Self::Refused { obstacle: text(first)?, program: second },
                    b"unreached" => Self::Unreached { obstacle: text(first)?, program: second },
                    b"opened" => Self::Opened { flags: text(first)?.parse().ok()?, path: second },
                    _ => return None,
                }
            }
        };
        fields.next().is_none().then_some(note)
    }
}

/// Joins the fields into a line. Replaces line ends within fields (in names) by `?`.
fn line(fields: &[&[u8]]) -> Vec<u8> {
    let mut line = fields.join(&0);
    line.iter_mut().filter(|byte| **byte == b'\n').for_each(|byte| *byte = b'?');
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_survive_a_round_trip() {
        let program = b"/bin/x y".to_vec();
        let obstacle = "static".to_owned();
        for note in [
            Note::Refused { obstacle: obstacle.clone(), program: program.clone() },
            Note::Unreached { obstacle, program: program.clone() },
            Note::Began { program: program.clone() },
            Note::Armed { program: program.clone() },
            Note::Untrapped { program: program.clone() },
            Note::Thread { program: program.clone() },
            Note::Lost { is_unwritten: false, path: program.clone() },
            Note::Lost { is_unwritten: true, path: Vec::new() },
            Note::Opened { flags: 0o102, path: program },
            Note::Functions(vec!["open".to_owned(), "read".to_owned()]),
        ] {
            let line = note.to_bytes();
            let (end, line) = line.split_last().unwrap();
            assert_eq!(*end, b'\n');
            assert_eq!(Note::parse(line), Some(note));
        }
        let odd = Note::Began { program: b"/a\nb".to_vec() }.to_bytes();
        assert_eq!(odd, b"began\0/a?b\n");
        for wrong in [&b""[..], b"began", b"what\0x\0y", b"opened\0x\0y", b"began\0x\0y"] {
            assert_eq!(Note::parse(wrong), None, "{}", String::from_utf8_lossy(wrong));
        }
    }
}
