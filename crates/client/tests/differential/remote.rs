//! The side under test: clients of a server.

use crate::common::pattern;
use crate::op::{At, Op, SLOTS, Time};
use crate::said::{Outcome, Said, Shown};
use std::io::{IoSlice, IoSliceMut};
use std::os::unix::ffi::OsStrExt;
use towline_client::{Client, Errno, Error, File, Lock, Options, SetAttr, Timestamp, Transport};
use towline_wire::request::{lock, open_flag};

/// The process that owns process locks.
const PROCESS: u64 = 1;

/// Clients, and the files that each has open in one tree.
pub(crate) struct Remote {
    clients: Vec<Client>,
    roots: Vec<File>,
    /// The top of the tree, opened by each client.
    tops: Vec<File>,
    slots: [Option<(usize, File)>; SLOTS],
}

fn timestamp(time: Time) -> Timestamp {
    match time {
        Time::Now => Timestamp::NOW,
        Time::Omit => Timestamp::OMIT,
        Time::Past(seconds, nanoseconds) => Timestamp::new(seconds, nanoseconds),
    }
}

/// Flags of `open(2)`, as they are sent.
fn sent(flags: u32) -> u32 {
    open_flag::of_this_machine(flags as i32)
}

impl Remote {
    /// One client for each transport.
    pub(crate) fn new(transports: &[Transport], export: &str) -> Self {
        let connect = |transport| Client::connect(transport, Options::default()).unwrap();
        let clients: Vec<Client> = transports.iter().map(connect).collect();
        let roots = clients.iter().map(|c| c.attach(export.as_bytes()).unwrap()).collect();
        Self { clients, roots, tops: Vec::new(), slots: Default::default() }
    }

    pub(crate) fn make_directory(&self, path: &str) {
        self.roots[0].make_directory(path.as_bytes(), 0o755).unwrap();
    }

    /// Opens the top of a tree.
    pub(crate) fn begin(&mut self, top: &str) {
        self.tops = self.roots.iter().map(|r| r.open(top.as_bytes(), 0, 0).unwrap()).collect();
    }

    /// Closes everything and removes the tree.
    pub(crate) fn end(&mut self, top: &str) {
        std::mem::take(&mut self.slots).into_iter().flatten().for_each(|(_, file)| {
            close(file).unwrap();
        });
        self.tops.clear();
        crate::common::remove(&self.roots[0], top.as_bytes());
    }

    pub(crate) fn clients(&self) -> usize {
        self.clients.len()
    }

    pub(crate) fn open(&self, path: &str) -> File {
        self.roots[0].open(path.as_bytes(), 0, 0).unwrap()
    }

    /// The client that has these slots open, if any; an error if several clients do.
    pub(crate) fn owner(&self, slots: &[usize]) -> Result<Option<usize>, ()> {
        let mut owners = slots.iter().filter_map(|slot| self.slots[*slot].as_ref()).map(|s| s.0);
        let first = owners.next();
        if owners.all(|owner| Some(owner) == first) { Ok(first) } else { Err(()) }
    }

    fn slot(&self, slot: usize) -> &File {
        &self.slots[slot].as_ref().unwrap().1
    }

    /// Does one operation, whose slots are filled.
    pub(crate) fn apply(&mut self, client: usize, op: &Op) -> Outcome {
        match op {
            Op::Open(slot, at, flags, mode) => {
                let opened = self.base(client, at).open(at.path.as_bytes(), sent(*flags), *mode);
                let file = opened.map_err(errno)?;
                let shown = Shown::of(file.attr());
                if let Some((_, old)) = self.slots[*slot].replace((client, file)) {
                    close(old).map_err(errno)?;
                }
                Ok(Said::Attr(shown))
            }
            Op::Close(slot) => {
                let (_, file) = self.slots[*slot].take().unwrap();
                close(file).map(|()| Said::Nothing).map_err(errno)
            }
            op => {
                let said = self.call(client, op);
                match (op, &said) {
                    // A directory is opened, too, and then cannot be read.
                    (Op::ReadPath(at, _), Ok(_) | Err(Error::Errno(Errno::EISDIR)))
                    | (Op::WritePath(at, ..), Ok(_)) => self.opened_and_closed(client, at),
                    _ => {}
                }
                said.map_err(errno)
            }
        }
    }

    /// Releases the process's locks on a file that was opened by its path and closed again.
    fn opened_and_closed(&self, client: usize, at: &At) {
        let attr = self.base(client, at).stat_path(at.path.as_bytes(), true).unwrap();
        let open = self.slots.iter().flatten().map(|(_, file)| file);
        open.filter(|file| file.attr().inode == attr.inode).for_each(release);
    }

    fn base(&self, client: usize, at: &At) -> &File {
        at.base.map_or(&self.tops[client], |slot| self.slot(slot))
    }

    fn call(&self, client: usize, op: &Op) -> Result<Said, Error> {
        let base = |at: &At| self.base(client, at);
        let attr = |attr| Said::Attr(Shown::of(&attr));
        let done = |()| Said::Nothing;
        let set = |at: &At, follow: bool, set: &SetAttr| {
            base(at).set_attr(at.path.as_bytes(), follow, set).map(attr)
        };
        match op {
            Op::Open(..) | Op::Close(_) => unreachable!("treated by the caller"),
            // Blocking calls, in one buffer or several, and operations completed later take turns.
            Op::Write(f, offset, length, byte) => {
                let bytes = pattern(*length, *byte);
                let count = match *byte % 3 {
                    0 if *length <= 1_000_000 => {
                        self.slot(*f).start_write_at(bytes, *offset)?.wait()?.0
                    }
                    1 => {
                        let mut rest = &bytes[..];
                        let parts = part_lengths(bytes.len()).into_iter();
                        let parts = parts.map(|length| {
                            IoSlice::new(rest.split_off(..length).unwrap_or_default())
                        });
                        self.slot(*f).write_vectored_at(&parts.collect::<Vec<_>>(), *offset)?
                    }
                    _ => self.slot(*f).write_at(&bytes, *offset)?,
                };
                Ok(Said::Number(count as u64))
            }
            Op::Append(f, length, byte) => {
                let (count, _) = self.slot(*f).append(&pattern(*length, *byte))?;
                Ok(Said::Number(count as u64))
            }
            Op::Read(f, offset, length) => {
                let mut bytes = vec![0; *length];
                let count = match *length % 3 {
                    0 if *length <= 1_000_000 => {
                        let (count, read) = self.slot(*f).start_read_at(bytes, *offset)?.wait()?;
                        bytes = read;
                        count
                    }
                    1 => {
                        let parts = part_lengths(bytes.len()).into_iter();
                        let mut rest = &mut bytes[..];
                        let parts = parts.map(|length| {
                            IoSliceMut::new(rest.split_off_mut(..length).unwrap_or_default())
                        });
                        let mut parts: Vec<_> = parts.collect();
                        self.slot(*f).read_vectored_at(&mut parts, *offset)?
                    }
                    _ => self.slot(*f).read_at(&mut bytes, *offset)?,
                };
                bytes.truncate(count);
                Ok(Said::Bytes(bytes))
            }
            Op::ReadPath(at, length) if *length % 2 == 0 => {
                base(at).start_read_path(at.path.as_bytes(), 0, *length)?.wait().map(Said::Bytes)
            }
            Op::ReadPath(at, length) => {
                let mut bytes = vec![0; *length];
                let count = base(at).read_path(at.path.as_bytes(), 0, &mut bytes)?;
                bytes.truncate(count);
                Ok(Said::Bytes(bytes))
            }
            Op::WritePath(at, flags, mode, length, byte) => {
                let bytes = pattern(*length, *byte);
                base(at).write_path(at.path.as_bytes(), sent(*flags), *mode, &bytes).map(done)
            }
            Op::Truncate(at, size) => {
                set(at, true, &SetAttr { size: Some(*size), ..SetAttr::default() })
            }
            Op::Allocate(f, mode, offset, length) => {
                self.slot(*f).allocate(*mode, *offset, *length).map(done)
            }
            Op::Seek(f, offset, whence) => self.slot(*f).seek(*offset, *whence).map(Said::Number),
            Op::Copy(f, offset, t, to_offset, length) => {
                let (from, to) = (self.slot(*f), self.slot(*t));
                from.copy_range(*offset, to, *to_offset, *length).map(Said::Number)
            }
            Op::Stat(at, _) if at.path.is_empty() => base(at).stat().map(attr),
            Op::Stat(at, follow) => base(at).stat_path(at.path.as_bytes(), *follow).map(attr),
            Op::Access(at, mode) => base(at).access(at.path.as_bytes(), *mode).map(done),
            Op::MakeDirectory(at, mode) => {
                base(at).make_directory(at.path.as_bytes(), *mode).map(attr)
            }
            Op::MakeNode(at, mode) => base(at).make_node(at.path.as_bytes(), *mode, 0).map(attr),
            Op::Symlink(at, target) => {
                base(at).symlink(at.path.as_bytes(), target.as_bytes()).map(attr)
            }
            Op::ReadLink(at) => base(at).read_link(at.path.as_bytes()).map(Said::Bytes),
            Op::Link(from, follow, to) => {
                let target = (base(to), to.path.as_bytes());
                base(from).link(from.path.as_bytes(), *follow, target.0, target.1).map(attr)
            }
            Op::Unlink(at, directory) => base(at).unlink(at.path.as_bytes(), *directory).map(done),
            Op::Rename(from, to, flags) => {
                let target = (base(to), to.path.as_bytes());
                base(from).rename(from.path.as_bytes(), target.0, target.1, *flags).map(done)
            }
            Op::Chmod(at, mode) => {
                set(at, true, &SetAttr { mode: Some(*mode), ..SetAttr::default() })
            }
            Op::Chown(at, follow, uid, gid) => {
                let ids = SetAttr { uid: Some(*uid), gid: Some(*gid), ..SetAttr::default() };
                set(at, *follow, &ids)
            }
            Op::Times(at, follow, accessed, modified) => {
                let times = (timestamp(*accessed), timestamp(*modified));
                let times = SetAttr { times: Some(times), ..SetAttr::default() };
                let set = base(at).set_attr(at.path.as_bytes(), *follow, &times)?;
                let is = (set.accessed.seconds, set.accessed.nanoseconds);
                Ok(Said::Attr(Shown::of(&set).accessed(*accessed, is)))
            }
            Op::SetXattr(at, follow, name, length, how) => {
                let (path, value) = (at.path.as_bytes(), pattern(*length, 7));
                base(at).set_xattr(path, *follow, name.as_bytes(), &value, *how).map(done)
            }
            Op::GetXattr(at, follow, name) => {
                base(at).xattr(at.path.as_bytes(), *follow, name.as_bytes()).map(Said::Bytes)
            }
            Op::ListXattrs(at, follow) => {
                let names = base(at).list_xattrs(at.path.as_bytes(), *follow)?;
                Ok(Said::of_xattrs(names.into_iter()))
            }
            Op::RemoveXattr(at, follow, name) => {
                base(at).remove_xattr(at.path.as_bytes(), *follow, name.as_bytes()).map(done)
            }
            Op::List(f, attributes) => list(self.slot(*f), *attributes).map(Said::Names),
            Op::StatFs(f) => {
                let s = self.slot(*f).stat_fs()?;
                Ok(Said::Space([s.block_bytes, s.blocks, s.files, s.name_bytes_max]))
            }
            Op::Sync(f, kind) => self.slot(*f).sync(*kind).map(done),
            Op::Lock(f, family, kind, start, length) => {
                let (family, kind, start, length) = (*family, *kind, *start, *length);
                let lock = Lock { family, kind, owner: PROCESS, start, length };
                self.slot(*f).lock(&lock, false).map(done)
            }
            Op::TestLock(f, family, kind, start, length) => {
                let (family, kind, start, length) = (*family, *kind, *start, *length);
                let lock = Lock { family, kind, owner: PROCESS, start, length };
                Ok(Said::Taken(self.slot(*f).test_lock(&lock)?.is_some()))
            }
        }
    }
}

/// Releases what a process has locked in a file: the caller's task when the process closes any descriptor of it.
fn release(file: &File) {
    let (family, kind) = (lock::PROCESS, lock::UNLOCK);
    let all = Lock { family, kind, owner: PROCESS, start: 0, length: 0 };
    // Files that are open as paths have no locks.
    assert!(matches!(file.lock(&all, false), Ok(()) | Err(Error::Errno(Errno::EBADF))));
}

fn close(file: File) -> Result<(), Error> {
    release(&file);
    file.close()
}

/// Names and types, sorted.
fn list(directory: &File, attributes: bool) -> Result<Vec<(Vec<u8>, u8)>, Error> {
    let mut names = Vec::new();
    let mut cookie = 0;
    loop {
        let (entries, end) = directory.list(cookie, attributes)?;
        for entry in entries {
            if let Some(attr) = &entry.attr {
                assert_eq!(attr.mode >> 12, u32::from(entry.file_type), "type and mode differ");
            }
            cookie = entry.cookie;
            names.push((entry.name, entry.file_type));
        }
        if end {
            names.sort_unstable();
            return Ok(names);
        }
    }
}

/// Splits a length into uneven parts.
fn part_lengths(length: usize) -> Vec<usize> {
    let mut left = length;
    let sizes = [1, length / 50, 0, length / 20 + 4096].into_iter().cycle();
    let parts = sizes.map_while(|size| {
        let part = size.min(left);
        left -= part;
        (left > 0 || part > 0).then_some(part)
    });
    parts.collect()
}

/// The error number of a file operation. A lost connection or a broken protocol has none.
fn errno(error: Error) -> Errno {
    match error {
        Error::Errno(errno) => errno,
        other => panic!("{other}"),
    }
}
