//! Executes one operation of a compound.

use super::names::{Change, Outcome, locate};
use super::{BlockingResult, Closed, Compound, Context, Step, Value, waiting_store};
use crate::files::Opened;
use crate::locks::{Owner, Waiter};
use std::sync::Arc;
use towline_mem::Aggregate;
use towline_store::{
    Caller, FileStore, Listing, OpenFile, OpenHow, SetAttr, XattrAction, trim_slashes,
};
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE, TYPE_MASK, TYPE_SYMLINK};
use towline_wire::entry::Entry;
use towline_wire::limits::LISTING_BYTES_MAX;
use towline_wire::request::{
    CURRENT, DIRECTORY, FOLLOW, NO_FOLLOW, listed, lock, open_flag, rename_flag, sync_kind, valid,
    xattr_how,
};
use towline_wire::{Attr, Errno, Reply, Request};

/// Bits of an open file's flags that contain the access mode; none set: read-only.
const ACCESS_MODE: u32 = 3;

impl Compound {
    /// Executes one operation, or returns what it waits for.
    #[allow(clippy::too_many_lines)] // one arm for each operation, each a few lines
    pub(super) fn execute(
        &mut self,
        request: &Request<'_>,
        context: &mut Context<'_>,
    ) -> Result<Option<Step>, Errno> {
        let caller = context.caller;
        match *request {
            Request::Attach { name } => {
                let (name, path) = export_and_path(name);
                let (store, terms) = context.exports.find(name).ok_or(Errno::ENOENT)?;
                self.reach(context, &store)?;
                let store = at_or_below(store, caller, path)?;
                let (file, attr) = open_root(&*store, caller)?;
                self.opened(context, Opened::new(store, file, terms, 0), None, attr)?;
            }
            Request::Open { base, flags, mode, path } => {
                // As in the kernel, before anything is created or shortened.
                context.files.with(|files| files.check_room())?;
                let at = self.at(context, base)?;
                if flags & open_flag::AGAIN != 0 {
                    if !path.is_empty() {
                        return Err(Errno::EINVAL);
                    }
                    let attr = at.file.stat()?;
                    let again = Opened::new(at.store.clone(), at.file.clone(), at.terms, at.flags);
                    self.opened(context, again, None, attr)?;
                    return Ok(None);
                }
                let flags = allowed_flags(&at, caller, path, flags)?;
                let how = OpenHow { flags, mode };
                if open_flag::creates_exclusively(flags) {
                    let change = Change::open(at.into_owned(), path, flags);
                    return self.change(context, change, |store, (at, _)| {
                        let (file, attr) = store.open(caller, at, how)?;
                        Ok(Outcome::Opened(file, attr))
                    });
                }
                if flags & open_flag::TRUNCATE != 0 {
                    let follow = flags & open_flag::NO_FOLLOW == 0;
                    self.shorten(context, &at, (path, follow), 0)?;
                }
                if flags & (open_flag::CREATE | open_flag::TRUNCATE) != 0 {
                    self.changes(&*at.store);
                }
                let (file, attr) = at.store.open(caller, (&*at.file, path), how)?;
                let (store, terms) = (at.store.clone(), at.terms);
                self.opened(context, Opened::new(store, file, terms, flags), None, attr)?;
            }
            Request::Reclaim { handle, flags, inode, export, path } => {
                // Other sessions of the family may have it open, even if no name leads to it any more.
                if let Ok(known) = context.files.find(handle) {
                    self.reach(context, &known.store)?;
                    let attr = known.file.stat()?;
                    if attr.identity() == inode {
                        self.current = Some(handle);
                        self.left_open += 1;
                        self.result(&Reply::Opened { handle, attr });
                        return Ok(None);
                    }
                }
                let (name, below) = export_and_path(export);
                let (store, terms) = context.exports.find_again(name).ok_or(Errno::ESTALE)?;
                self.reach(context, &store)?;
                let store = at_or_below(store, caller, below).map_err(|_| Errno::ESTALE)?;
                let how = OpenHow { flags: open_flag::without_changes(flags), mode: 0 };
                let kept = context.files.with(|files| files.take_kept(handle, &*store));
                if let Some(kept) = kept {
                    match store.adopt(caller, kept, how) {
                        Ok((file, attr)) if attr.identity() == inode => {
                            let opened = Opened::new(store, file, terms, how.flags);
                            let opened = Opened { is_kept: true, ..opened };
                            let opened = self.opened(context, opened, Some(handle), attr);
                            if opened.is_err() {
                                context.files.with(|files| files.give_up_kept(handle));
                            }
                            return opened.map(|()| None);
                        }
                        _ => context.files.with(|files| files.give_up_kept(handle)),
                    }
                }
                if flags & open_flag::TEMPORARY != 0 {
                    // It had no name, and another one is another file.
                    return Err(Errno::ESTALE);
                }
                let root = store.root()?;
                let flags = how.flags;
                let (file, attr) = if path.is_empty() {
                    open_root(&*store, caller)?
                } else {
                    store.open(caller, (&*root, path), how).map_err(|_| Errno::ESTALE)?
                };
                if attr.identity() != inode {
                    return Err(Errno::ESTALE);
                }
                self.opened(context, Opened::new(store, file, terms, flags), Some(handle), attr)?;
            }
            Request::Close { handle } => return self.close(context, handle, None),
            Request::Stat { base, flags, path } => {
                let opened = self.at(context, base)?;
                let attr =
                    opened.store.stat(caller, (&*opened.file, path), flags & NO_FOLLOW == 0)?;
                self.result(&Reply::Attributes { attr });
            }
            Request::SetAttr {
                base,
                flags,
                valid: set,
                mode,
                uid,
                gid,
                size,
                accessed,
                modified,
                path,
            } => {
                let follow = flags & NO_FOLLOW == 0;
                let opened = self.changeable_at(context, base, path, follow)?;
                let wanted = |bit| set & bit != 0;
                if wanted(valid::SIZE) {
                    self.shorten(context, &opened, (path, follow), size)?;
                }
                let set = SetAttr {
                    mode: wanted(valid::MODE).then_some(mode),
                    uid: wanted(valid::UID).then_some(uid),
                    gid: wanted(valid::GID).then_some(gid),
                    size: wanted(valid::SIZE).then_some(size),
                    times: wanted(valid::TIMES).then_some((accessed, modified)),
                };
                let attr = opened.store.set_attr(caller, (&*opened.file, path), follow, &set)?;
                self.result(&Reply::Attributes { attr });
            }
            Request::Read { handle, offset, length } => {
                return self.read(context, handle, offset, length);
            }
            Request::ReadPath { base, flags, length, path } => {
                return self.read_path(context, (base, path), flags, length);
            }
            Request::Write { handle, offset, length, flags } => {
                return self.begin_write(context, handle, offset, length, flags);
            }
            Request::WriteParts { handle, parts } => {
                return self.begin_parts(context, handle, parts);
            }
            Request::ReadDir { handle, cookie, length, attributes } => {
                let opened = self.at(context, handle)?.into_owned();
                let store = waiting_store(&opened);
                let work = move || list(&*opened.file, cookie, length, attributes);
                if let Some(store) = store.filter(|_| self.shares && !context.files.may_wait()) {
                    let work = Box::new(move || BlockingResult { result: work() });
                    return Ok(Some(Step::Share(store, work)));
                }
                self.unblocked(BlockingResult { result: work() });
            }
            Request::MakeDir { base, mode, path } => {
                let opened = self.creatable_at(context, base, path, true)?;
                let change = Change::create(opened, path, TYPE_DIRECTORY);
                return self.change(context, change, |store, (at, _)| {
                    store.make_directory(caller, at, mode).map(Outcome::Attributes)
                });
            }
            Request::MakeNode { base, mode, rdev, path } => {
                let opened = self.creatable_at(context, base, path, false)?;
                let kind = if mode & TYPE_MASK == 0 { TYPE_FILE } else { mode & TYPE_MASK };
                let change = Change::create(opened, path, kind);
                return self.change(context, change, |store, (at, _)| {
                    store.make_node(caller, at, mode, rdev).map(Outcome::Attributes)
                });
            }
            Request::Symlink { base, path, target } => {
                let opened = self.creatable_at(context, base, path, false)?;
                let change = Change::create(opened, path, TYPE_SYMLINK);
                return self.change(context, change, |store, (at, _)| {
                    store.symlink(caller, at, target).map(Outcome::Attributes)
                });
            }
            Request::ReadLink { base, path } => {
                let opened = self.at(context, base)?;
                let value = opened.store.read_link(caller, (&*opened.file, path))?;
                self.result(&Reply::Bytes { value: &value });
            }
            Request::Link { base, flags, path, new_base, new_path } => {
                let follow = flags & FOLLOW != 0;
                if self.at(context, new_base)?.terms.read_only {
                    // As in the kernel, the old name comes first.
                    let from = self.at(context, base)?;
                    from.store.stat(caller, (&*from.file, path), follow)?;
                }
                let to = self.creatable_at(context, new_base, new_path, false)?;
                same_store(&*self.at(context, base)?, &to)?;
                let from = self.writable_at(context, base)?;
                let source = (from.file, path);
                let change = Change::link(to, new_path, (source.clone(), follow));
                return self.change(context, change, |store, (at, _)| {
                    let source = (&*source.0, path);
                    store.link(caller, source, follow, at).map(Outcome::Attributes)
                });
            }
            Request::Unlink { base, flags, path } => {
                let dots = match flags & DIRECTORY != 0 {
                    false => Errno::EISDIR,
                    true if trim_slashes(path).ends_with(b"..") => Errno::ENOTEMPTY,
                    true => Errno::EINVAL,
                };
                self.check_name(context, base, path, dots)?;
                let opened = self.writable_at(context, base)?;
                let change = Change::unlink(opened, path);
                return self.change(context, change, |store, (at, _)| {
                    store.unlink(caller, at, flags & DIRECTORY != 0).map(Outcome::Removed)
                });
            }
            Request::Rename { base, flags, path, new_base, new_path } => {
                // As in the kernel, names of two mounts come before any that is read-only.
                same_store(&*self.at(context, base)?, &*self.at(context, new_base)?)?;
                let keeps = flags & rename_flag::NO_REPLACE != 0;
                let new_dots = if keeps { Errno::EEXIST } else { Errno::EBUSY };
                self.check_name(context, base, path, Errno::EBUSY)?;
                self.check_name(context, new_base, new_path, new_dots)?;
                let from = self.writable_at(context, base)?;
                let to = self.writable_at(context, new_base)?;
                let change = Change::rename((from, path), (to.file, new_path), flags);
                return self.change(context, change, |store, (at, to)| {
                    let to = to.ok_or(Errno::EINVAL)?;
                    store.rename(caller, at, to, flags).map(Outcome::Removed)
                });
            }
            Request::StatFs { handle } => {
                let opened = self.at(context, handle)?;
                let statfs = opened.store.stat_fs(&*opened.file)?;
                self.result(&Reply::FileSystem { statfs });
            }
            Request::Sync { handle, kind } => {
                let opened = self.at(context, handle)?.into_owned();
                // As in the kernel. Stores can do it with any file, such as a root that may not be read.
                if kind == sync_kind::FILE_SYSTEM && opened.flags & open_flag::PATH != 0 {
                    return Err(Errno::EBADF);
                }
                // What could not be stored is told only once.
                self.changes(&*opened.store);
                let store = waiting_store(&opened);
                return Ok(self.blocking(store, move || match kind {
                    sync_kind::DATA => opened.file.sync(false).map(|()| Value::Done),
                    sync_kind::FULL => opened.file.sync(true).map(|()| Value::Done),
                    sync_kind::SETTLE => opened.file.settle().map(|()| Value::Done),
                    sync_kind::FILE_SYSTEM => {
                        opened.store.sync(&*opened.file).map(|()| Value::Done)
                    }
                    _ => Err(Errno::EINVAL),
                }));
            }
            Request::Allocate { handle, mode, offset, length } => {
                let opened = self.writable_at(context, handle)?;
                let store = waiting_store(&opened);
                return Ok(self.blocking(store, move || {
                    opened.file.allocate(mode, offset, length).map(|()| Value::Done)
                }));
            }
            Request::Seek { handle, offset, whence } => {
                let value = self.at(context, handle)?.file.seek(offset, whence)?;
                self.result(&Reply::Number { value });
            }
            Request::PathOf { handle } => {
                let value = self.at(context, handle)?.file.path()?;
                self.result(&Reply::Bytes { value: &value });
            }
            Request::CopyRange { handle, offset, new_handle, new_offset, length } => {
                let from = self.at(context, handle)?.into_owned();
                let to = self.writable_at(context, new_handle)?;
                same_store(&from, &to)?;
                let store = from.store.clone();
                return Ok(self.blocking(Some(store), move || {
                    from.store
                        .copy_range(&*from.file, offset, &*to.file, new_offset, length)
                        .map(Value::Number)
                }));
            }
            Request::GetXattr { base, flags, path, name } => {
                let opened = self.at(context, base)?;
                let value = opened.store.xattr(
                    caller,
                    (&*opened.file, path),
                    flags & NO_FOLLOW == 0,
                    XattrAction::Get(name),
                )?;
                self.result(&Reply::Bytes { value: &value });
            }
            Request::SetXattr { base, flags, how, path, name, value } => {
                let follow = flags & NO_FOLLOW == 0;
                let opened = self.changeable_at(context, base, path, follow)?;
                let action = XattrAction::Set(name, value, how);
                if how == xattr_how::CREATE {
                    return self.change_xattr(context, &opened, (path, follow), action);
                }
                opened.store.xattr(caller, (&*opened.file, path), follow, action)?;
                self.result(&Reply::Done {});
            }
            Request::ListXattr { base, flags, path } => {
                let opened = self.at(context, base)?;
                let value = opened.store.xattr(
                    caller,
                    (&*opened.file, path),
                    flags & NO_FOLLOW == 0,
                    XattrAction::List,
                )?;
                self.result(&Reply::Bytes { value: &value });
            }
            Request::RemoveXattr { base, flags, path, name } => {
                let follow = flags & NO_FOLLOW == 0;
                let opened = self.changeable_at(context, base, path, follow)?;
                let action = XattrAction::Remove(name);
                return self.change_xattr(context, &opened, (path, follow), action);
            }
            Request::Lock { handle, owner, family, kind, wait, start, length } => {
                let (file, owner, range) =
                    self.lock_of(context, handle, owner, family, kind, start, length)?;
                let (session, slot, sequence) = (context.session, self.slot, self.sequence);
                let is_kept = context.files.find(self.handle(handle)?)?.store.survives_restart();
                let is_again = wait == lock::AGAIN;
                let waiter = Waiter { owner, session, range, slot, sequence, is_kept, is_again };
                self.may_lock(context, handle, family, kind)?;
                if !owner.process {
                    context.files.with(|files| files.note_lock(owner.id))?;
                }
                return Ok(Some(Step::Lock(file, waiter, wait == lock::WAIT)));
            }
            Request::TestLock { handle, owner, family, kind, start, length } => {
                let (file, owner, range) =
                    self.lock_of(context, handle, owner, family, kind, start, length)?;
                return Ok(Some(Step::TestLock(file, owner, range)));
            }
            Request::ProcessEnded { owner } => {
                return Ok(Some(Step::EndProcess(Owner {
                    session: context.files.owner(),
                    id: owner,
                    process: true,
                })));
            }
            Request::HandOver { session, secret, process } => {
                return Ok(Some(Step::HandOver(session, secret, process)));
            }
            Request::Access { base, mode, path } => {
                let opened = self.at(context, base)?;
                opened.store.access(caller, (&*opened.file, path), mode)?;
                if mode & 2 != 0 && opened.terms.read_only {
                    let attr = opened.store.stat(caller, (&*opened.file, path), true)?;
                    if !is_node(&attr) {
                        return Err(Errno::EROFS);
                    }
                }
                self.result(&Reply::Done {});
            }
            Request::Inquire { what } => {
                let answer = match what {
                    0 => context.exports.names(),
                    1 => context.exports.statistics(),
                    _ => return Err(Errno::EINVAL),
                };
                self.result(&Reply::Answer { length: answer.len() as u32 });
                self.data = Aggregate::from_vec(answer);
            }
            Request::Bind { handle, bound } => {
                let handle = self.handle(handle)?;
                context.files.with(|files| files.bind(handle, context.session, bound != 0))?;
                self.result(&Reply::Done {});
            }
            Request::Watch { handle, mask } => self.watch(context, handle, mask)?,
            Request::Events { seen } => return Ok(self.events(context, seen)),
            Request::Reclaimed {} => {
                self.result(&Reply::Done {});
                return Ok(Some(Step::Reclaimed));
            }
            _ => return Err(Errno::ENOSYS),
        }
        Ok(None)
    }

    /// Closes a file. `known`: what came of that before a restart; the client may have the file open again.
    pub(super) fn close(
        &mut self,
        context: &mut Context<'_>,
        handle: u64,
        known: Option<Result<(), Errno>>,
    ) -> Result<Option<Step>, Errno> {
        let done =
            |outcome: Result<(), Errno>| BlockingResult { result: outcome.map(|()| Value::Done) };
        let absent = done(known.unwrap_or(Err(Errno::EBADF)));
        let of_this = handle == CURRENT;
        let Ok(handle) = self.handle(handle) else {
            self.unblocked(absent);
            return Ok(None);
        };
        let owner = Owner { session: context.files.owner(), id: handle, process: false };
        if self.at(context, handle).is_err() && self.elsewhere.is_some() {
            return Ok(None);
        }
        // The file is closed when `opened` is dropped, unless another request still uses it.
        let Ok(mut opened) = context.files.with(|files| files.remove(handle)) else {
            self.unblocked(absent);
            // It may have been open, and locked, before a restart.
            return Ok(Some(Step::ReleaseLocks(owner, None)));
        };
        let hold = opened.hold.take();
        let is_written = opened.flags & ACCESS_MODE != 0;
        let outcome = match known {
            Some(known) => known,
            // Other file systems have nothing to say.
            None if is_written && opened.store.may_hang() => opened.file.settle(),
            None => Ok(()),
        };
        if outcome.is_err() {
            self.changes(&*opened.store); // it is told only once
        }
        if !context.files.may_wait() && !is_written {
            self.closed = Some(Closed::Handle(opened));
        }
        self.left_open -= usize::from(of_this);
        self.unblocked(done(outcome));
        Ok(hold.map(|hold| Step::ReleaseLocks(owner, Some(hold))))
    }
}

/// Splits the name of an export from the path of the directory in it that is to be the root.
fn export_and_path(name: &[u8]) -> (&[u8], &[u8]) {
    match name.iter().position(|byte| *byte == b'/') {
        Some(slash) => (&name[..slash], &name[slash + 1..]),
        None => (name, b""),
    }
}

fn at_or_below(
    store: Arc<dyn FileStore>,
    caller: &Caller,
    path: &[u8],
) -> Result<Arc<dyn FileStore>, Errno> {
    if path.is_empty() { Ok(store) } else { store.below(caller, path) }
}

/// Returns the flags with which a file may be opened: on a read-only export, without what would change
/// anything. As on a read-only mount, a file that is there may be opened for reading even with `O_CREAT`,
/// and `EROFS` comes last.
pub(super) fn allowed_flags(
    at: &Opened,
    caller: &Caller,
    path: &[u8],
    flags: u32,
) -> Result<u32, Errno> {
    let (creates, writes) = (
        flags & open_flag::CREATE != 0,
        flags & (ACCESS_MODE | open_flag::TRUNCATE | open_flag::TEMPORARY) != 0,
    );
    if !at.terms.read_only || flags & open_flag::PATH != 0 || !(creates || writes) {
        return Ok(flags);
    }
    let exclusive = open_flag::creates_exclusively(flags);
    let follow = !exclusive && flags & open_flag::NO_FOLLOW == 0;
    match at.store.stat(caller, (&*at.file, path), follow) {
        Err(errno) if creates => {
            locate(&*at.store, caller, &at.file, path)?;
            Err(match errno {
                _ if path.ends_with(b"/") => Errno::EISDIR,
                Errno::ENOENT => Errno::EROFS,
                errno => errno,
            })
        }
        Err(errno) => Err(errno),
        Ok(_) if exclusive => Err(Errno::EEXIST),
        Ok(attr) if attr.is_directory() && flags & open_flag::TEMPORARY == 0 => Err(Errno::EISDIR),
        Ok(attr) if flags & open_flag::DIRECTORY != 0 && !attr.is_directory() => {
            Err(Errno::ENOTDIR)
        }
        Ok(attr) if attr.is_symlink() => Err(Errno::ELOOP),
        // A read-only mount does not hinder writing to a pipe or device; the server opens none.
        Ok(attr) if writes && is_node(&attr) => Err(Errno::ENXIO),
        Ok(_) if writes => Err(Errno::EROFS),
        Ok(_) => Ok(flags & !open_flag::CREATE),
    }
}

/// True for pipes, sockets and devices.
fn is_node(attr: &Attr) -> bool {
    !attr.is_file() && !attr.is_directory() && !attr.is_symlink()
}

/// Opens the root of a store: for listing if the caller may, otherwise only as the start of paths.
fn open_root(store: &dyn FileStore, caller: &Caller) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
    let root = store.root()?;
    let how = OpenHow { flags: open_flag::DIRECTORY, mode: 0 };
    if let Ok(opened) = store.open(caller, (&*root, b"."), how) {
        return Ok(opened);
    }
    let attr = root.stat()?;
    Ok((root, attr))
}

fn same_store(a: &Opened, b: &Opened) -> Result<(), Errno> {
    if Arc::ptr_eq(&a.store, &b.store) { Ok(()) } else { Err(Errno::EXDEV) }
}

/// Lists a directory from `cookie` on: as many entries as fit in `length` bytes, with the attributes that the bits
/// in `attributes` say.
fn list(file: &dyn OpenFile, cookie: u64, length: u32, attributes: u8) -> Result<Value, Errno> {
    let room = (length as usize).min(LISTING_BYTES_MAX);
    let bytes = Vec::with_capacity(room.min(32 * 1024));
    let with = |bit| attributes & bit != 0;
    let mut listing = Collect { bytes, room, xattrs: with(listed::XATTRS) };
    let end = file.read_directory(cookie, with(listed::ATTRIBUTES), &mut listing)?;
    if listing.bytes.is_empty() && !end {
        return Err(Errno::EINVAL); // not even one entry fits; EINVAL as in getdents64(2)
    }
    Ok(Value::Listed(listing.bytes, end))
}

struct Collect {
    bytes: Vec<u8>,
    room: usize,
    xattrs: bool,
}

impl Listing for Collect {
    fn wants_xattrs(&self) -> bool {
        self.xattrs
    }

    fn entry(
        &mut self,
        cookie: u64,
        inode: u64,
        file_type: u8,
        name: &[u8],
        attr: Option<Attr>,
    ) -> bool {
        let entry = Entry { cookie, inode, file_type, name, attr };
        if self.bytes.len() + entry.encoded_bytes() > self.room {
            return false;
        }
        entry.encode(&mut self.bytes);
        true
    }
}
