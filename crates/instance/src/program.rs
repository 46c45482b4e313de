//! Detects programs that the preloaded library cannot reach, from their first bytes and their owner.

use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, FileKind};
use std::ffi::CStr;

/// Number of bytes from the beginning of a program that [`Form::of`] expects.
pub const FIRST_BYTES: usize = 4096;

/// The kind of a program file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// A script: its interpreter and the interpreter's single argument, which may be empty.
    Script(Vec<u8>, Vec<u8>),
    /// An ELF binary.
    Binary(Binary),
    /// Neither: shells interpret such files themselves.
    Other,
}

/// Properties of an ELF binary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binary {
    /// Built for 64-bit machines of this architecture.
    pub native: bool,
    /// The dynamic linker that it names; empty if the name lies beyond the first bytes.
    pub loader: Option<Vec<u8>>,
    /// Made by the Go tool chain, and needs no library.
    pub go: bool,
    /// A shared object (`ET_DYN`), which the dynamic linker can load, too.
    pub shared: bool,
}

/// The machine of this build.
const MACHINE: u16 =
    if cfg!(target_arch = "x86_64") { elf::EM_X86_64.0 } else { elf::EM_AARCH64.0 };

/// Maximum size of the dynamic section of a Go program that needs no library: 12 entries, up to 14 with
/// options of its linker. Names of a library, of symbols and of their versions take seven more.
const DYNAMIC_BYTES_ALONE: u64 = 15 * 16;

/// Type and owner of the note in which our own binary names its dynamic linker.
const NOTE: &[u8] = b"\x01\0\0\0Towline\0";

impl Form {
    /// Classifies a file by its first bytes.
    #[must_use]
    pub fn of(first: &[u8]) -> Self {
        if let Some(rest) = first.strip_prefix(b"#!") {
            let line = rest.split(|b| *b == b'\n').next().unwrap_or_default().trim_ascii();
            let cut = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
            return Self::Script(line[..cut].to_vec(), line[cut..].trim_ascii().to_vec());
        }
        let binary = match FileKind::parse(first) {
            Ok(FileKind::Elf64) => binary::<FileHeader64<Endianness>>(first, true),
            Ok(FileKind::Elf32) => binary::<FileHeader32<Endianness>>(first, false),
            _ => None,
        };
        binary.map_or(Self::Other, Self::Binary)
    }
}

fn binary<H: FileHeader<Endian = Endianness>>(first: &[u8], wide: bool) -> Option<Binary> {
    let header = H::parse(first).ok()?;
    let endian = header.endian().ok()?;
    // Our own binary loads the dynamic linker itself and names it in a note.
    let mut loader = first
        .windows(NOTE.len())
        .position(|bytes| bytes == NOTE)
        .and_then(|at| first[at + NOTE.len()..].split(|b| *b == 0).next())
        .map(<[u8]>::to_vec);
    let mut dynamic_bytes = 0;
    // No known linker places the program headers beyond the first bytes.
    for part in header.program_headers(endian, first).ok()? {
        if part.p_type(endian) == elf::PT_INTERP {
            let name = part.interpreter(endian, first).ok().flatten();
            loader = Some(name.unwrap_or_default().to_vec());
        }
        if part.p_type(endian) == elf::PT_DYNAMIC {
            dynamic_bytes = part.p_filesz(endian).into();
        }
    }
    Some(Binary {
        native: wide && header.e_machine(endian).0 == MACHINE,
        loader,
        // The first page holds the note with the Go build ID.
        go: dynamic_bytes <= DYNAMIC_BYTES_ALONE
            && first.windows(8).any(|bytes| bytes == b"\x04\0\0\0Go\0\0"),
        shared: header.e_type(endian) == elf::ET_DYN,
    })
}

/// The dynamic linker of glibc. Run with the library as its program, it hosts a program that the library
/// cannot be preloaded into. Its arguments are the program's name, the library, the program's path, and the
/// program's arguments starting with its name.
pub const LINKER: &CStr = match CStr::from_bytes_with_nul(crate::layout::LINKER) {
    Ok(path) => path,
    Err(_) => panic!("it ends with a zero byte"),
};

/// The reason why the library cannot be preloaded into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It contains its own copy of libc's functions.
    Static,
    /// It is a Go program without libc.
    Go,
    /// It uses a libc other than glibc, whose dynamic linker cannot load our library.
    OtherLibc,
    /// It is for another machine or for 32 bits.
    OtherMachine,
    /// It gains rights that its user lacks, so the dynamic linker ignores the user's `LD_PRELOAD`.
    Privileged,
    /// The process that executes it has different real and effective users or groups, with the same effect.
    TwoUsers,
}

/// All obstacles.
const OBSTACLES: [Obstacle; 6] = [
    Obstacle::Static,
    Obstacle::Go,
    Obstacle::OtherLibc,
    Obstacle::OtherMachine,
    Obstacle::Privileged,
    Obstacle::TwoUsers,
];

impl Obstacle {
    /// Returns the obstacle that a binary's first bytes reveal, if any. `name` is the last part of its
    /// path.
    #[must_use]
    pub fn of(binary: &Binary, name: &[u8]) -> Option<Self> {
        if !binary.native {
            return Some(Self::OtherMachine);
        }
        match &binary.loader {
            // The dynamic linker itself, which loads the library for any program.
            None if binary.shared && name.starts_with(b"ld-linux") => None,
            // Although some name a linker (`-buildmode=pie`), it only places them: they use libc's thread
            // registers for themselves.
            _ if binary.go => Some(Self::Go),
            None => Some(Self::Static),
            Some(loader) => {
                let name = loader.rsplit(|b| *b == b'/').next().unwrap_or_default();
                (!loader.is_empty() && !name.starts_with(b"ld-linux")).then_some(Self::OtherLibc)
            }
        }
    }

    /// Returns the obstacle that follows from a file's `st_mode` and owners for `user`, if any.
    /// `capabilities` says whether the file has capabilities.
    #[must_use]
    pub fn of_rights(
        (mode, uid, gid): (u32, u32, u32),
        capabilities: bool,
        user: (u32, u32),
    ) -> Option<Self> {
        const SET_UID: u32 = 0o4000;
        /// Set-group-id counts only where the group may execute.
        const SET_GID: u32 = 0o2010;
        let changes = (mode & SET_UID != 0 && uid != user.0)
            || (mode & SET_GID == SET_GID && gid != user.1)
            || (capabilities && user.0 != 0);
        changes.then_some(Self::Privileged)
    }

    /// Returns true if a program with this obstacle can be hosted instead, where the kernel permits it.
    #[must_use]
    pub fn can_be_hosted(self) -> bool {
        matches!(self, Self::Static | Self::Go | Self::OtherLibc)
    }

    /// Returns the obstacle's code in notes.
    #[must_use]
    pub fn code(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Go => "static-go",
            Self::OtherLibc => "other-libc",
            Self::OtherMachine => "other-machine",
            Self::Privileged => "privileged",
            Self::TwoUsers => "two-users",
        }
    }

    /// Returns the obstacle with this code.
    #[must_use]
    pub fn from_code(code: &str) -> Option<Self> {
        OBSTACLES.into_iter().find(|obstacle| obstacle.code() == code)
    }

    /// Describes the obstacle, to follow the program's name.
    #[must_use]
    pub fn is(self) -> &'static str {
        match self {
            Self::Static => "is statically linked",
            Self::Go => "is a Go program without libc",
            Self::OtherLibc => "uses another libc than glibc",
            Self::OtherMachine => "is for another machine or for 32 bits",
            Self::Privileged => "is setuid or setgid or has capabilities",
            Self::TwoUsers => {
                "was executed by a process whose real and effective users or groups differ"
            }
        }
    }

    /// Describes the obstacle and its effect if the program is not hosted.
    #[must_use]
    pub fn what(self) -> String {
        format!("{}, so it cannot see remote files", self.is())
    }

    /// Suggests a remedy.
    #[must_use]
    pub fn instead(self) -> &'static str {
        match self {
            Self::Static | Self::OtherMachine => {
                "use a build of it with shared libraries for this machine, or copy the files \
                 with \"towline cp\""
            }
            Self::Go => {
                "build it with CGO_ENABLED=1 and an import of \"C\" or with -linkmode=external, \
                 or copy the files with \"towline cp\""
            }
            Self::OtherLibc => "use a build of it for glibc, or copy the files with \"towline cp\"",
            Self::Privileged => {
                "run it as the user whose rights it assumes, or copy the files with \"towline cp\""
            }
            Self::TwoUsers => {
                "execute it with the same real and effective user, or copy the files with \"towline cp\""
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_name_their_interpreters() {
        let script = |text: &[u8]| Form::of(text);
        let is = |name: &str, option: &str| Form::Script(name.into(), option.into());
        assert_eq!(script(b"#!/bin/sh\necho\n"), is("/bin/sh", ""));
        assert_eq!(script(b"#! /usr/bin/env  python3 -x \nx"), is("/usr/bin/env", "python3 -x"));
        assert_eq!(script(b"#!"), is("", ""));
        assert_eq!(script(b"echo"), Form::Other);
        assert_eq!(script(b""), Form::Other);
    }

    #[test]
    fn our_own_binary_is_reached_and_cut_ones_do_no_harm() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let Form::Binary(binary) = Form::of(&own[..FIRST_BYTES]) else { panic!("not a binary") };
        assert!(binary.native && binary.loader.is_some() && !binary.go);
        assert_eq!(Obstacle::of(&binary, b"x"), None);
        for cut in 0..FIRST_BYTES {
            let _ = Form::of(&own[..cut]);
        }
        let mut foreign = own[..FIRST_BYTES].to_vec();
        foreign[18..20].copy_from_slice(&8u16.to_le_bytes());
        let Form::Binary(binary) = Form::of(&foreign) else { panic!("not a binary") };
        assert_eq!(Obstacle::of(&binary, b"x"), Some(Obstacle::OtherMachine));
    }

    #[test]
    fn linkers_tell_what_they_load() {
        let with = |loader: Option<&str>, go| {
            let loader = loader.map(|name| name.as_bytes().to_vec());
            Obstacle::of(&Binary { native: true, loader, go, shared: true }, b"ld-linux-x")
        };
        assert_eq!(with(Some("/lib64/ld-linux-x86-64.so.2"), false), None);
        assert_eq!(with(Some("/lib64/ld-linux-x86-64.so.2"), true), Some(Obstacle::Go));
        assert_eq!(with(Some("/lib/ld-musl-x86_64.so.1"), false), Some(Obstacle::OtherLibc));
        assert_eq!(with(None, true), None, "the linker itself");
        let binary = Binary { native: true, loader: None, go: true, shared: true };
        assert_eq!(Obstacle::of(&binary, b"x"), Some(Obstacle::Go));
        let binary = Binary { go: false, ..binary };
        assert_eq!(Obstacle::of(&binary, b"x"), Some(Obstacle::Static));
    }

    #[test]
    fn rights_that_a_user_has_anyway_are_no_obstacle() {
        let rights = |mode, user| Obstacle::of_rights((mode, 0, 5), false, (user, user));
        assert_eq!(rights(0o755, 1000), None);
        assert_eq!(rights(0o4755, 1000), Some(Obstacle::Privileged));
        assert_eq!(rights(0o4755, 0), None);
        assert_eq!(rights(0o2755, 1000), Some(Obstacle::Privileged));
        assert_eq!(rights(0o2745, 1000), None, "a mark for locks");
        assert_eq!(Obstacle::of_rights((0o755, 0, 0), true, (1, 1)), Some(Obstacle::Privileged));
        for obstacle in OBSTACLES {
            assert_eq!(Obstacle::from_code(obstacle.code()), Some(obstacle));
        }
    }
}
