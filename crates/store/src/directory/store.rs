//! The store: operations on names beneath the root.

use super::attributes::{errno, frees_much, identity_of, stat_file, tells_changes};
use super::changes;
use super::copy::copy_between;
use super::identity::{Acting, ServerIdentity};
use super::known::{self, Known};
use super::mounts;
use super::open_file::DirectoryFile;
use super::open_flags::Opening;
use super::residency::Residency;
use super::resolve::{Found, PARENT, Place, Tree, has_place, is_name, proc_path};
use super::system::mode_for_new;
use crate::{
    Caller, FileStore, OpenFile, OpenHow, PathRead, Remains, SetAttr, Source, XattrAction,
    trim_slashes,
};
use parking_lot::Mutex;
use rustix::fs::{
    Access, AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Statx, StatxFlags,
};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE, TYPE_MASK, TYPE_SYMLINK};
use towline_wire::request::rename_flag;
use towline_wire::{Attr, Errno, StatFs};

/// An export of a directory of the local file system.
///
/// All methods may block on the file system. See [the module](super) for what it guarantees.
#[derive(Debug)]
pub struct DirectoryStore {
    pub(super) tree: Arc<Tree>,
    root: Arc<DirectoryFile>,
    /// Stores of directories in this one that are in use.
    parts: Mutex<Vec<Weak<Self>>>,
    /// The store in which this is a directory.
    whole: Option<Arc<Self>>,
    this: Weak<Self>,
}

impl DirectoryStore {
    /// Exports the directory at `path`, which may be a symbolic link to one. With `read_only`,
    /// every change fails with `EROFS`, and so does opening for writing; `access` looks at rights
    /// alone.
    ///
    /// After acting as a client's user, the server's threads return to the identity that the
    /// calling thread has now.
    ///
    /// # Errors
    /// There is no such directory, or `openat2(2)` is missing or forbidden.
    pub fn new(path: &Path, read_only: bool) -> std::io::Result<Arc<Self>> {
        let root = Arc::new(rustix::fs::open(path, PARENT, Mode::empty())?);
        // Better to report now than with each request that it is missing or forbidden.
        match rustix::fs::openat2(&root, c".", PARENT, Mode::empty(), ResolveFlags::BENEATH) {
            Err(error @ rustix::io::Errno::PERM) => {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::PermissionDenied,
                    format!(
                        "openat2(2): {error}; it keeps paths inside an export, and a container's filter of \
                         system calls may forbid it"
                    ),
                ));
            }
            Err(rustix::io::Errno::NOSYS) => {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::Unsupported,
                    "this kernel has no openat2(2) (Linux 5.6), which keeps paths inside of an export",
                ));
            }
            tried => drop(tried?),
        }
        let foreign = Arc::new(OnceLock::new());
        if let Some(kind) = mounts::foreign(&root)? {
            // Nothing else has set it yet.
            let _ = foreign.set(kind);
        }
        let server = Arc::new(ServerIdentity::of_this_thread()?);
        Ok(Self::of(root, server, read_only, foreign, None)?)
    }

    /// Returns the [`OpenFile::identity`] of the root of a store at this path from the kernel's
    /// cache: where possible the file system is not asked.
    ///
    /// # Errors
    /// Errors of `open(2)` and `statx(2)`.
    pub fn identity_at(path: &Path) -> std::io::Result<(u64, u64)> {
        let root = rustix::fs::open(path, PARENT, Mode::empty())?;
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        Ok(identity_of(&rustix::fs::statx(&root, c"", flags, StatxFlags::INO)?))
    }

    fn of(
        root: Arc<OwnedFd>,
        server: Arc<ServerIdentity>,
        read_only: bool,
        foreign: Arc<OnceLock<String>>,
        whole: Option<Arc<Self>>,
    ) -> Result<Arc<Self>, Errno> {
        let stat = stat_file(&root)?;
        let root_identity = identity_of(&stat);
        let (device, tells_changes) = match &whole {
            Some(whole) => (whole.tree.device, whole.tree.tells_changes),
            None => (root_identity.0, tells_changes(&root)?),
        };
        let tree = Arc::new(Tree {
            root: root.clone(),
            root_identity,
            device,
            tells_changes,
            server,
            read_only,
            known: Known::default(),
            residency: Residency::default(),
            foreign,
        });
        let opening = Opening::of(OpenHow { flags: super::open_flags::PATH_ONLY, mode: 0 })?;
        let root = Arc::new(DirectoryFile::new(&tree, root, &opening, &stat, None));
        let parts = Mutex::default();
        Ok(Arc::new_cyclic(|this| Self { tree, root, parts, whole, this: this.clone() }))
    }

    /// Returns the type of a file system in the tree, for example `nfs4`, that asks another machine
    /// or another process, as far as one has been found.
    #[must_use]
    pub fn foreign(&self) -> Option<&str> {
        self.tree.foreign.get().map(String::as_str)
    }

    /// Returns an open file as this store's own type, if it belongs to this store.
    pub(super) fn file<'a>(&self, file: &'a dyn OpenFile) -> Result<&'a DirectoryFile, Errno> {
        let file = file.as_any().downcast_ref::<DirectoryFile>().ok_or(Errno::EXDEV)?;
        if Arc::ptr_eq(&file.tree, &self.tree) { Ok(file) } else { Err(Errno::EXDEV) }
    }

    /// Opens the file that `path` leads to, or for an empty path the open file itself.
    fn descriptor(
        &self,
        acting: Option<&Acting<'_>>,
        base: &DirectoryFile,
        path: &[u8],
        opening: &Opening,
    ) -> Result<OwnedFd, Errno> {
        if path.is_empty() {
            return reopen(&Found::Base(base), base.kind, opening.flags, opening.mode);
        }
        match self.tree.open(acting, base, path, opening.flags, opening.mode) {
            // Another process holds a lease on the file, which takes time to break.
            Err(Errno::EAGAIN) => {
                let follow = !opening.flags.contains(OFlags::NOFOLLOW);
                let found = self.tree.find(acting, base, path, follow)?;
                let kind = u32::from(stat_file(&found)?.stx_mode) & TYPE_MASK;
                if kind != TYPE_FILE {
                    return Err(Errno::ENXIO);
                }
                reopen(&found, kind, opening.flags.difference(OFlags::NONBLOCK), opening.mode)
            }
            result => result,
        }
    }

    /// Opens a file, directory or reference on behalf of a caller.
    pub(super) fn open_as(
        &self,
        (caller, acting): (&Caller, Option<Acting<'_>>),
        (base, path): Source<'_>,
        mut opening: Opening,
    ) -> Result<(Arc<DirectoryFile>, Statx), Errno> {
        let base = self.file(base)?;
        if self.tree.read_only {
            opening = self.restrict(acting.as_ref(), base, path, opening)?;
        }
        let fd = self.descriptor(acting.as_ref(), base, path, &opening)?;
        drop(acting);
        let stat = stat_file(&fd)?;
        let kind = u32::from(stat.stx_mode) & TYPE_MASK;
        if !opening.is_path_only() && kind != TYPE_FILE && kind != TYPE_DIRECTORY {
            return Err(Errno::ENXIO);
        }
        let file = DirectoryFile::new(&self.tree, Arc::new(fd), &opening, &stat, Some(caller));
        Ok((Arc::new(file), stat))
    }

    /// Returns the attributes of what was just created at `place`. If another process has removed it
    /// since, it was created all the same, and nothing is known about it.
    fn attr_of_new(&self, place: &Place<'_>) -> Result<Attr, Errno> {
        match place.stat() {
            Ok(stat) => Ok(self.tree.attr_of(&stat)),
            Err(Errno::ENOENT) => Ok(Attr::default()),
            Err(error) => Err(error),
        }
    }

    /// If a large file has this name and no other, returns a reference to it, which keeps its pages until it is
    /// dropped. So removing the name takes no time, and no lock of the directory is held while the pages are
    /// freed.
    fn remains(&self, place: &Place<'_>) -> Option<Remains> {
        // NFS gives a file that is removed while somebody has it open another name.
        if self.may_hang() {
            return None;
        }
        let stat = place.stat().ok()?;
        let kind = u32::from(stat.stx_mode) & TYPE_MASK;
        if kind != TYPE_FILE || stat.stx_nlink > 1 || !frees_much(&stat) {
            return None;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let name = trim_slashes(place.name);
        let file = rustix::fs::openat(&place.directory, name, flags, Mode::empty()).ok()?;
        Some(Box::new(file))
    }

    /// Removes from `opening` what would change anything, for a read-only export.
    fn restrict(
        &self,
        acting: Option<&Acting<'_>>,
        base: &DirectoryFile,
        path: &[u8],
        mut opening: Opening,
    ) -> Result<Opening, Errno> {
        let creates = opening.flags.contains(OFlags::CREATE);
        if !creates && !opening.changes() {
            return Ok(opening);
        }
        let exclusive = creates && opening.flags.contains(OFlags::EXCL);
        let follow = !exclusive && !opening.flags.contains(OFlags::NOFOLLOW);
        match self.tree.find(acting, base, path, follow) {
            Err(Errno::ENOENT) if creates => return Err(Errno::EROFS),
            Err(error) => return Err(error),
            Ok(_) if exclusive => return Err(Errno::EEXIST),
            Ok(_) if opening.changes() => return Err(Errno::EROFS),
            Ok(_) => {}
        }
        opening.flags.remove(OFlags::CREATE);
        opening.mode = Mode::empty();
        Ok(opening)
    }
}

impl FileStore for DirectoryStore {
    fn root(&self) -> Result<Arc<dyn OpenFile>, Errno> {
        Ok(self.root.clone())
    }

    fn below(&self, caller: &Caller, path: &[u8]) -> Result<Arc<dyn FileStore>, Errno> {
        let acting = self.tree.server.act_as(caller)?;
        let root = self.tree.open(acting.as_ref(), &self.root, path, PARENT, Mode::empty())?;
        drop(acting);
        let identity = identity_of(&stat_file(&root)?);
        let mut parts = self.parts.lock();
        parts.retain(|part| part.strong_count() > 0);
        let mut known = parts.iter().filter_map(Weak::upgrade);
        if let Some(part) = known.find(|part| part.tree.root_identity == identity) {
            return Ok(part);
        }
        let Tree { server, read_only, foreign, .. } = &*self.tree;
        let (server, foreign) = (server.clone(), foreign.clone());
        let whole = self.whole.clone().or_else(|| self.this.upgrade());
        let part = Self::of(Arc::new(root), server, *read_only, foreign, whole)?;
        parts.push(Arc::downgrade(&part));
        Ok(part)
    }

    fn whole(&self) -> Option<Arc<dyn FileStore>> {
        self.whole.clone().map(|whole| whole as _)
    }

    fn open(
        &self,
        caller: &Caller,
        at: Source<'_>,
        how: OpenHow,
    ) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
        let opening = Opening::of(how)?;
        let acting = self.tree.server.act_as(caller)?;
        let (file, stat) = self.open_as((caller, acting), at, opening)?;
        Ok((file, self.tree.attr_of(&stat)))
    }

    fn read_path(
        &self,
        caller: &Caller,
        at: Source<'_>,
        flags: u32,
        length: usize,
    ) -> Result<PathRead, Errno> {
        self.read_start_of(caller, at, flags, length)
    }

    fn adopt(
        &self,
        caller: &Caller,
        fd: OwnedFd,
        how: OpenHow,
    ) -> Result<(Arc<dyn OpenFile>, Attr), Errno> {
        let opening = Opening::of(how)?;
        let is_as = rustix::fs::fcntl_getfl(&fd).map_err(errno)?;
        let kind = OFlags::ACCMODE | OFlags::PATH;
        if is_as & kind != opening.flags & kind || self.tree.read_only && opening.writable {
            return Err(Errno::ESTALE);
        }
        let stat = stat_file(&fd)?;
        let file = DirectoryFile::new(&self.tree, Arc::new(fd), &opening, &stat, Some(caller));
        Ok((Arc::new(file), self.tree.attr_of(&stat)))
    }

    fn stat(&self, caller: &Caller, (base, path): Source<'_>, follow: bool) -> Result<Attr, Errno> {
        let base = self.file(base)?;
        if path.is_empty() {
            return base.stat();
        }
        let acting = self.tree.server.act_as(caller)?;
        let is_done = |attr: &Attr| !follow || !attr.is_symlink();
        if let Some((directory, name)) = self.tree.known(acting.as_ref(), base, path) {
            match self.tree.attr_of_name(&directory, name) {
                Err(Errno::ENOENT) if !has_place(&directory)? => {}
                Ok(attr) if !is_done(&attr) => {}
                result => return result,
            }
        } else if is_name(path) {
            let attr = self.tree.attr_of_name(&base.fd, path)?;
            if is_done(&attr) {
                return Ok(attr);
            }
        }
        let found = self.tree.find(acting.as_ref(), base, path, follow)?;
        stat_file(&found).map(|stat| self.tree.attr_of(&stat))
    }

    fn set_attr(
        &self,
        caller: &Caller,
        (base, path): Source<'_>,
        follow: bool,
        set: &SetAttr,
    ) -> Result<Attr, Errno> {
        let base = self.file(base)?;
        let acting = self.tree.server.act_as(caller)?;
        let found = self.tree.find(acting.as_ref(), base, path, follow)?;
        self.tree.check_writable()?;
        let result = changes::set_attributes(&self.tree, &found, set);
        if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() {
            known::changed();
        }
        result
    }

    fn access(&self, caller: &Caller, (base, path): Source<'_>, mode: u32) -> Result<(), Errno> {
        let access = Access::from_bits(mode).ok_or(Errno::EINVAL)?;
        let base = self.file(base)?;
        let acting = self.tree.server.act_as(caller)?;
        let found = self.tree.find(acting.as_ref(), base, path, true)?;
        rustix::fs::accessat(CWD, proc_path(&found), access, AtFlags::EACCESS).map_err(errno)
    }

    fn make_directory(
        &self,
        caller: &Caller,
        (base, path): Source<'_>,
        mode: u32,
    ) -> Result<Attr, Errno> {
        let base = self.file(base)?;
        let acting = self.tree.server.act_as(caller)?;
        self.tree.check_writable()?;
        let place = self.tree.place(acting.as_ref(), base, path)?;
        let mode = mode_for_new(mode);
        rustix::fs::mkdirat(&place.directory, place.name, mode).map_err(errno)?;
        self.attr_of_new(&place)
    }

    fn make_node(
        &self,
        caller: &Caller,
        (base, path): Source<'_>,
        mode: u32,
        rdev: u64,
    ) -> Result<Attr, Errno> {
        let kind = match FileType::from_raw_mode(mode) {
            FileType::Unknown if mode & TYPE_MASK == 0 => FileType::RegularFile,
            FileType::Unknown | FileType::Symlink => return Err(Errno::EINVAL),
            FileType::Directory => return Err(Errno::EPERM),
            kind => kind,
        };
        let base = self.file(base)?;
        let acting = self.tree.server.act_as(caller)?;
        self.tree.check_writable()?;
        let place = self.tree.place(acting.as_ref(), base, path)?;
        let mode = mode_for_new(mode);
        rustix::fs::mknodat(&place.directory, place.name, kind, mode, rdev).map_err(errno)?;
        self.attr_of_new(&place)
    }

    fn symlink(
        &self,
        caller: &Caller,
        (base, path): Source<'_>,
        target: &[u8],
    ) -> Result<Attr, Errno> {
        let base = self.file(base)?;
        let acting = self.tree.server.act_as(caller)?;
        self.tree.check_writable()?;
        let place = self.tree.place(acting.as_ref(), base, path)?;
        rustix::fs::symlinkat(target, &place.directory, place.name).map_err(errno)?;
        self.attr_of_new(&place)
    }

    fn read_link(&self, caller: &Caller, (base, path): Source<'_>) -> Result<Vec<u8>, Errno> {
        let base = self.file(base)?;
        let acting = self.tree.server.act_as(caller)?;
        let target = if is_name(path) {
            rustix::fs::readlinkat(&base.fd, path, Vec::new())
        } else {
            let found = self.tree.find(acting.as_ref(), base, path, false)?;
            // For what is no symbolic link, Linux returns ENOENT if it is an open file, as here, and
            // EINVAL if it is a path.
            rustix::fs::readlinkat(&found, c"", Vec::new()).map_err(|error| match error {
                rustix::io::Errno::NOENT if !path.is_empty() => rustix::io::Errno::INVAL,
                error => error,
            })
        };
        target.map(std::ffi::CString::into_bytes).map_err(errno)
    }

    fn link(
        &self,
        caller: &Caller,
        (base, path): Source<'_>,
        follow: bool,
        (new_base, new_path): Source<'_>,
    ) -> Result<Attr, Errno> {
        let base = self.file(base)?;
        let new_base = self.file(new_base)?;
        let acting = self.tree.server.act_as(caller)?;
        self.tree.check_writable()?;
        let place = match self.tree.place(acting.as_ref(), new_base, new_path) {
            Ok(place) => place,
            // Errors of the old name are reported first.
            Err(error) => {
                self.tree.find(acting.as_ref(), base, path, follow)?;
                return Err(error);
            }
        };
        if is_name(path) && !follow {
            let to = &place.directory;
            rustix::fs::linkat(&base.fd, path, to, place.name, AtFlags::empty()).map_err(errno)?;
        } else {
            let found = self.tree.find(acting.as_ref(), base, path, follow)?;
            let from = proc_path(&found);
            let flags = AtFlags::SYMLINK_FOLLOW;
            rustix::fs::linkat(CWD, from, &place.directory, place.name, flags).map_err(errno)?;
        }
        self.attr_of_new(&place)
    }

    fn unlink(
        &self,
        caller: &Caller,
        (base, path): Source<'_>,
        directory: bool,
    ) -> Result<Option<Remains>, Errno> {
        let base = self.file(base)?;
        let acting = self.tree.server.act_as(caller)?;
        self.tree.check_writable()?;
        let place = self.tree.place(acting.as_ref(), base, path)?;
        let remains = if directory { None } else { self.remains(&place) };
        let flags = if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        rustix::fs::unlinkat(&place.directory, place.name, flags).map_err(errno)?;
        Ok(remains)
    }

    fn rename(
        &self,
        caller: &Caller,
        (base, path): Source<'_>,
        (new_base, new_path): Source<'_>,
        flags: u32,
    ) -> Result<Option<Remains>, Errno> {
        if !rename_flag::are_legal(flags) {
            return Err(Errno::EINVAL);
        }
        let flags = RenameFlags::from_bits_retain(flags);
        let base = self.file(base)?;
        let new_base = self.file(new_base)?;
        let acting = self.tree.server.act_as(caller)?;
        self.tree.check_writable()?;
        let from = self.tree.place(acting.as_ref(), base, path)?;
        let to = self.tree.place(acting.as_ref(), new_base, new_path)?;
        let replaces = !flags.intersects(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE);
        let remains = if replaces { self.remains(&to) } else { None };
        let result =
            rustix::fs::renameat_with(&from.directory, from.name, &to.directory, to.name, flags);
        known::changed();
        result.map_err(errno)?;
        Ok(remains)
    }

    fn xattr(
        &self,
        caller: &Caller,
        (base, path): Source<'_>,
        follow: bool,
        action: XattrAction<'_>,
    ) -> Result<Vec<u8>, Errno> {
        let base = self.file(base)?;
        let acting = self.tree.server.act_as(caller)?;
        let found = self.tree.find(acting.as_ref(), base, path, follow)?;
        if matches!(action, XattrAction::Set(..) | XattrAction::Remove(_)) {
            self.tree.check_writable()?;
        }
        changes::xattr(&found, action)
    }

    fn copy_range(
        &self,
        from: &dyn OpenFile,
        offset: u64,
        to: &dyn OpenFile,
        to_offset: u64,
        length: u64,
    ) -> Result<u64, Errno> {
        copy_between(self.file(from)?, offset, self.file(to)?, to_offset, length)
    }

    fn stat_fs(&self, file: &dyn OpenFile) -> Result<StatFs, Errno> {
        let stat = rustix::fs::fstatvfs(&self.file(file)?.fd).map_err(errno)?;
        Ok(StatFs {
            block_bytes: stat.f_frsize,
            blocks: stat.f_blocks,
            blocks_free: stat.f_bfree,
            blocks_available: stat.f_bavail,
            files: stat.f_files,
            files_free: stat.f_ffree,
            name_bytes_max: stat.f_namemax,
            id: stat.f_fsid,
        })
    }

    fn sync(&self, file: &dyn OpenFile) -> Result<(), Errno> {
        let file = self.file(file)?;
        if !file.path_only {
            return rustix::fs::syncfs(&file.fd).map_err(errno);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(&file.fd, c".", flags, Mode::empty()) {
            Ok(directory) => rustix::fs::syncfs(directory).map_err(errno),
            // A directory that may not be read can still be synchronized, along with everything else.
            Err(rustix::io::Errno::ACCESS) => {
                rustix::fs::sync();
                Ok(())
            }
            Err(error) => Err(errno(error)),
        }
    }

    fn may_block(&self) -> bool {
        true
    }

    fn may_hang(&self) -> bool {
        self.tree.foreign.get().is_some()
    }

    fn look_at_mounts(&self) -> Option<String> {
        if self.may_hang() {
            return None;
        }
        // Without `/proc` the store would not have started.
        let kind = mounts::foreign(&self.tree.root).ok()??;
        self.tree.foreign.set(kind.clone()).is_ok().then_some(kind)
    }

    fn survives_restart(&self) -> bool {
        true
    }
}

/// Reopens a file that is already open, perhaps only as a reference.
fn reopen(found: &Found<'_>, kind: u32, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    if kind != TYPE_FILE && kind != TYPE_DIRECTORY && !flags.contains(OFlags::PATH) {
        return Err(if kind == TYPE_SYMLINK { Errno::ELOOP } else { Errno::ENXIO });
    }
    let flags = flags.difference(OFlags::NOFOLLOW | OFlags::CREATE | OFlags::EXCL);
    let temporary = flags.contains(OFlags::TMPFILE);
    let mode = if temporary { mode } else { Mode::empty() };
    rustix::fs::open(proc_path(found), flags, mode).map_err(errno)
}
