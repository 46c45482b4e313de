//! Operations of a random sequence, and how they are chosen.

use crate::common::{CREATE, EXCLUSIVE, Random, TRUNCATE};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use towline_wire::request::{lock, sync_kind};

/// Files open at once.
pub(crate) const SLOTS: usize = 4;

/// A path from an open file (a slot), or from the top of the tree. Empty: that file itself.
#[derive(Clone, Debug)]
pub(crate) struct At {
    pub(crate) base: Option<usize>,
    pub(crate) path: OsString,
}

impl At {
    /// The directory of the path's last name, and that name.
    pub(crate) fn split(&self) -> (&OsStr, &OsStr) {
        let bytes = self.path.as_bytes();
        let end = bytes.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
        let (parent, name) = match bytes[..end].iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (&bytes[..slash], &bytes[slash + 1..end]),
            None => (&b"."[..], &bytes[..end]),
        };
        (OsStr::from_bytes(parent), OsStr::from_bytes(name))
    }

    /// True if the path has `..` in it.
    pub(crate) fn climbs(&self) -> bool {
        self.path.as_bytes().windows(2).any(|two| two == b"..")
    }
}

/// A time to set.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Time {
    Now,
    Omit,
    /// Seconds and nanoseconds of a time long past.
    Past(i64, u32),
}

/// One operation; `usize` are slots.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Open(usize, At, u32, u32),
    Close(usize),
    Write(usize, u64, usize, u8),
    Append(usize, usize, u8),
    Read(usize, u64, usize),
    /// Open, read or write, and close in one request.
    ReadPath(At, usize),
    WritePath(At, u32, u32, usize, u8),
    Truncate(At, u64),
    Allocate(usize, u32, u64, u64),
    Seek(usize, u64, u32),
    Copy(usize, u64, usize, u64, u64),
    Stat(At, bool),
    Access(At, u32),
    MakeDirectory(At, u32),
    MakeNode(At, u32),
    Symlink(At, OsString),
    ReadLink(At),
    Link(At, bool, At),
    Unlink(At, bool),
    Rename(At, At, u32),
    Chmod(At, u32),
    Chown(At, bool, u32, u32),
    Times(At, bool, Time, Time),
    SetXattr(At, bool, String, usize, u32),
    GetXattr(At, bool, String),
    ListXattrs(At, bool),
    RemoveXattr(At, bool, String),
    List(usize, bool),
    StatFs(usize),
    Sync(usize, u32),
    /// Family, kind, start, length; so are those of the next one.
    Lock(usize, u8, u8, u64, u64),
    TestLock(usize, u8, u8, u64, u64),
}

impl Op {
    /// The slots that have to hold an open file.
    pub(crate) fn slots(&self) -> Vec<usize> {
        let mut slots: Vec<usize> = self.paths().iter().filter_map(|at| at.base).collect();
        match self {
            Self::Write(f, ..) | Self::Append(f, ..) | Self::Read(f, ..) | Self::Close(f) => {
                slots.push(*f);
            }
            Self::Allocate(f, ..) | Self::Seek(f, ..) | Self::List(f, _) => slots.push(*f),
            Self::StatFs(f) | Self::Sync(f, _) => slots.push(*f),
            Self::Lock(f, ..) | Self::TestLock(f, ..) => slots.push(*f),
            Self::Copy(f, _, t, ..) => slots.extend([*f, *t]),
            _ => {}
        }
        slots
    }

    /// True if it goes beyond the largest possible offset.
    pub(crate) fn goes_beyond(&self) -> bool {
        let beyond = |offset: u64, length: u64| offset > i64::MAX as u64 - length;
        match self {
            Self::Write(_, offset, length, _) | Self::Read(_, offset, length) => {
                beyond(*offset, *length as u64)
            }
            Self::Allocate(_, _, offset, length) => beyond(*offset, *length),
            Self::Copy(_, offset, _, to_offset, length) => {
                beyond(*offset, *length) || beyond(*to_offset, *length)
            }
            Self::Seek(_, offset, _) => beyond(*offset, 0),
            _ => false,
        }
    }

    /// The paths it takes.
    pub(crate) fn paths(&self) -> Vec<&At> {
        match self {
            Self::Open(_, at, ..) | Self::ReadPath(at, _) | Self::WritePath(at, ..) => vec![at],
            Self::Truncate(at, _) | Self::Stat(at, _) | Self::Access(at, _) => vec![at],
            Self::MakeDirectory(at, _) | Self::MakeNode(at, _) | Self::Symlink(at, _) => vec![at],
            Self::ReadLink(at) | Self::Unlink(at, _) | Self::Chmod(at, _) => vec![at],
            Self::Chown(at, ..) | Self::Times(at, ..) | Self::SetXattr(at, ..) => vec![at],
            Self::GetXattr(at, ..) | Self::ListXattrs(at, _) | Self::RemoveXattr(at, ..) => {
                vec![at]
            }
            Self::Link(from, _, to) | Self::Rename(from, to, _) => vec![from, to],
            _ => vec![],
        }
    }
}

fn path(random: &mut Random) -> OsString {
    // The last one is not UTF-8.
    const NAMES: [&[u8]; 5] = [b"a", b"b", b"c", "\u{e9}".as_bytes(), b"d\xff"];
    let count = 1 + random.below(3);
    let mut parts = Vec::new();
    for _ in 0..count {
        parts.push(match random.below(12) {
            0 => &b"."[..],
            1 => b"..",
            _ => *random.pick(&NAMES),
        });
    }
    let mut path = parts.join(&b'/');
    if random.below(10) == 0 {
        path.push(b'/');
    }
    OsString::from_vec(path)
}

fn at(random: &mut Random) -> At {
    let base = (random.below(3) == 0).then(|| slot(random));
    At { base, path: path(random) }
}

/// An open file itself, or a path.
fn file_or_path(random: &mut Random) -> At {
    match random.below(3) {
        0 => At { base: Some(slot(random)), path: OsString::new() },
        _ => at(random),
    }
}

fn slot(random: &mut Random) -> usize {
    random.below(SLOTS as u64) as usize
}

fn offset(random: &mut Random) -> u64 {
    match random.below(40) {
        // Around the largest possible offset.
        0 => i64::MAX as u64 - 3 + random.below(6),
        1..8 => random.below(100) * 4096,
        8..20 => random.below(400_000),
        _ => random.below(9000),
    }
}

/// Small lengths, and some around the limits of inline data, of one grant, and of one request.
fn length(random: &mut Random) -> usize {
    let most = match random.below(80) {
        0 => return 8 * 1024 * 1024 + random.below(5000) as usize,
        1..4 => 1_200_000,
        4..12 => 300_000,
        12..20 => 17_000,
        _ => 5_000,
    };
    random.below(most) as usize
}

/// A length that fits into one request.
fn short(random: &mut Random) -> usize {
    length(random).min(8 * 1024 * 1024)
}

fn byte(random: &mut Random) -> u8 {
    1 + random.below(255) as u8
}

fn open_flags(random: &mut Random) -> u32 {
    const EXTRA: [i32; 10] = [
        libc::O_APPEND,
        libc::O_APPEND,
        libc::O_DIRECTORY,
        libc::O_DIRECTORY,
        libc::O_NOFOLLOW,
        libc::O_PATH,
        libc::O_DIRECT,
        libc::O_DSYNC,
        libc::O_SYNC,
        libc::O_NOATIME,
    ];
    let mut flags = *random.pick(&[0, 1, 2, 2, 2, 2]);
    match random.below(10) {
        0..5 => flags |= CREATE & !3,
        5 => flags |= (CREATE | EXCLUSIVE) & !3,
        6 => flags |= (CREATE & !3) | TRUNCATE,
        7 => flags |= TRUNCATE,
        8 => return flags | libc::O_TMPFILE as u32,
        _ => {}
    }
    while random.below(3) == 0 {
        flags |= *random.pick(&EXTRA) as u32;
    }
    flags
}

/// Permission bits. Users other than root keep their own permissions, since `mem` lets its single
/// owner do everything.
fn mode(random: &mut Random, root: bool) -> u32 {
    let bits = *random.pick(&[0o644, 0o600, 0o755, 0o777, 0o1777, 0o2755, 0o4711, 0o000, 0o7777]);
    if root { bits } else { bits & 0o1777 | 0o700 }
}

fn xattr_name(random: &mut Random) -> String {
    (*random.pick(&["user.a", "user.a", "user.b", "user.\u{e9}", "user.", "odd", ""])).into()
}

fn time(random: &mut Random) -> Time {
    match random.below(6) {
        0 => Time::Now,
        1 => Time::Omit,
        2 => Time::Past(random.below(1000) as i64, 1_000_000_000),
        3 => Time::Past(-(random.below(1000) as i64), 5),
        _ => Time::Past(random.below(900_000_000) as i64, random.below(1_000_000_000) as u32),
    }
}

/// The next operation of a sequence. With `root`, also changes owners.
pub(crate) fn any_op(random: &mut Random, root: bool) -> Op {
    let r = random;
    match r.below(124) {
        0..18 => {
            let (slot, at) = (slot(r), at(r));
            Op::Open(slot, at, open_flags(r), mode(r, root))
        }
        18..21 => Op::Close(slot(r)),
        21..33 => Op::Write(slot(r), offset(r), length(r), byte(r)),
        33..37 => Op::Append(slot(r), short(r), byte(r)),
        37..47 => Op::Read(slot(r), offset(r), length(r)),
        47..49 => Op::ReadPath(at(r), short(r)),
        49..52 => {
            let flags = CREATE | *r.pick(&[0, 0, EXCLUSIVE, TRUNCATE, TRUNCATE, 0o2000]);
            let at = at(r);
            Op::WritePath(at, flags, mode(r, root), short(r), byte(r))
        }
        52..56 => Op::Truncate(file_or_path(r), offset(r).min(20_000_000)),
        56..61 => {
            let mode = *r.pick(&[0, 1, 3, 3, 16, 17, 2, 8, 32]);
            Op::Allocate(slot(r), mode, offset(r), r.below(100_000))
        }
        61..66 => Op::Seek(slot(r), offset(r), *r.pick(&[3, 4])),
        66..69 => {
            let (from, to) = (slot(r), slot(r));
            Op::Copy(from, offset(r), to, offset(r), length(r) as u64)
        }
        69..73 => Op::Stat(file_or_path(r), r.below(2) == 0),
        73..75 => Op::Access(at(r), r.below(8) as u32),
        75..80 => Op::MakeDirectory(at(r), mode(r, root)),
        80..82 => {
            let kind =
                *r.pick(&[0o010_000, 0o010_000, 0o140_000, 0o100_000, 0, 0o020_000, 0o040_000]);
            Op::MakeNode(at(r), kind | mode(r, root))
        }
        82..85 => Op::Symlink(at(r), if r.below(20) == 0 { "/nowhere".into() } else { path(r) }),
        85 => Op::ReadLink(at(r)),
        86..89 => Op::Link(file_or_path(r), r.below(2) == 0, at(r)),
        89..93 => Op::Unlink(at(r), r.below(2) == 0),
        93..99 => Op::Rename(at(r), at(r), *r.pick(&[0, 1, 2, 3, 4, 4, 4, 5, 6])),
        99..101 => Op::Chmod(file_or_path(r), mode(r, root)),
        101 if root => {
            let id = |r: &mut Random| *r.pick(&[0, 1000, 1001, u32::MAX]);
            Op::Chown(file_or_path(r), r.below(2) == 0, id(r), id(r))
        }
        101..104 => Op::Times(file_or_path(r), r.below(2) == 0, time(r), time(r)),
        104..107 => {
            let at = file_or_path(r);
            Op::SetXattr(
                at,
                r.below(2) == 0,
                xattr_name(r),
                r.below(300) as usize,
                r.below(4) as u32,
            )
        }
        107 => Op::GetXattr(file_or_path(r), r.below(2) == 0, xattr_name(r)),
        108 => Op::ListXattrs(file_or_path(r), r.below(2) == 0),
        109 => Op::RemoveXattr(file_or_path(r), r.below(2) == 0, xattr_name(r)),
        110..113 => Op::List(slot(r), r.below(2) == 0),
        113 => Op::StatFs(slot(r)),
        114 => {
            let (data, full) = (sync_kind::DATA, sync_kind::FULL);
            Op::Sync(slot(r), *r.pick(&[data, data, full, full, sync_kind::FILE_SYSTEM]))
        }
        115..121 => {
            let family = *r.pick(&[lock::PROCESS, lock::OPEN_FILE, lock::FLOCK]);
            Op::Lock(slot(r), family, r.below(3) as u8, r.below(20), r.below(20))
        }
        _ => {
            let family = *r.pick(&[lock::PROCESS, lock::OPEN_FILE]);
            Op::TestLock(slot(r), family, r.below(2) as u8, r.below(20), r.below(20))
        }
    }
}
