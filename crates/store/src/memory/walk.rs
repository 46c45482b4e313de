//! Resolves paths to inodes, without leaving the tree.

use super::access::{EXECUTE, check, check_follow};
use super::inode::Inode;
use super::names::Names;
use super::store::ROOT_NUMBER;
use crate::Caller;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use towline_wire::Errno;
use towline_wire::limits::{NAME_BYTES_MAX, PATH_BYTES_MAX};

/// Maximum number of symbolic links in one path, as in Linux.
const LINKS_MAX: u32 = 40;

/// A name that is borrowed from its path, or copied from the target of a link.
pub(super) struct Name<'a>(Cow<'a, [u8]>);

/// The last component of a path.
pub(super) enum Component<'a> {
    /// `.`
    Dot,
    /// `..`
    DotDot,
    /// A name, which may or may not exist.
    Name(Name<'a>),
}

/// The end of a path: the last component, not yet looked up in `directory`.
pub(super) struct Last<'a> {
    /// The directory, which the caller may search.
    pub(super) directory: Arc<Inode>,
    /// The last component.
    pub(super) component: Component<'a>,
    /// Whether slashes follow.
    pub(super) slashes: bool,
    root: u64,
}

/// A path being resolved. It allocates only if it meets symbolic links.
pub(super) struct Walk<'a> {
    caller: &'a Caller,
    directory: Arc<Inode>,
    rest: Rest<'a>,
    pending: Vec<Rest<'a>>,
    links: u32,
    /// Whether slashes followed a symbolic link that was followed.
    wants_directory: bool,
    /// Number of the directory that it does not leave.
    root: u64,
}

/// The rest of a path or of the target of a link.
enum Rest<'a> {
    Path(&'a [u8]),
    Target(Arc<Inode>, usize),
}

impl Name<'_> {
    /// Returns the name for a new file, which must not have zero bytes.
    pub(super) fn checked(&self) -> Result<&[u8], Errno> {
        if self.contains(&0) { Err(Errno::EINVAL) } else { Ok(self) }
    }
}

impl std::ops::Deref for Name<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl<'a> Rest<'a> {
    /// Returns some of its bytes as the last name.
    fn name(&self, range: Range<usize>) -> Result<Name<'a>, Errno> {
        if range.len() > NAME_BYTES_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        Ok(Name(match self {
            Self::Path(bytes) => Cow::Borrowed(&bytes[range]),
            Self::Target(..) => Cow::Owned(self.bytes()[range].to_vec()),
        }))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Path(bytes) => bytes,
            Self::Target(link, from) => &link.target().unwrap_or_default()[*from..],
        }
    }

    fn advance(&mut self, count: usize) {
        match self {
            Self::Path(bytes) => *bytes = &bytes[count..],
            Self::Target(_, from) => *from += count,
        }
    }
}

impl<'a> Walk<'a> {
    /// Starts at `from`, and does not leave the directory with the number `root`. Fails for an
    /// empty path, which has no last component; callers handle it.
    pub(super) fn new(
        caller: &'a Caller,
        from: Arc<Inode>,
        path: &'a [u8],
        root: u64,
    ) -> Result<Self, Errno> {
        match path.first() {
            None => return Err(Errno::ENOENT),
            Some(b'/') => return Err(Errno::EXDEV),
            Some(_) if path.len() > PATH_BYTES_MAX => return Err(Errno::ENAMETOOLONG),
            Some(_) => {}
        }
        let rest = Rest::Path(path);
        let (pending, links) = (Vec::new(), 0);
        Ok(Self { caller, directory: from, rest, pending, links, wants_directory: false, root })
    }

    /// Resolves everything before the last component.
    pub(super) fn last(&mut self) -> Result<Last<'a>, Errno> {
        loop {
            let mut rest = std::mem::replace(&mut self.rest, Rest::Path(b""));
            let bytes = rest.bytes();
            let skipped = count_slashes(bytes);
            if skipped == bytes.len() {
                // Only the target of a link can be left with nothing, or only slashes, here.
                self.rest = self.pending.pop().ok_or(Errno::ENOENT)?;
                continue;
            }
            let bytes = &bytes[skipped..];
            let end = bytes.iter().position(|byte| *byte == b'/').unwrap_or(bytes.len());
            let (component, after) = bytes.split_at(end);
            let slashes = count_slashes(after);
            let exhausted = slashes == after.len();
            self.directory.directory()?;
            check(self.caller, &self.directory, EXECUTE)?;
            if exhausted && self.pending.is_empty() {
                let component = match component {
                    b"." => Component::Dot,
                    b".." => Component::DotDot,
                    _ => Component::Name(rest.name(skipped..skipped + end)?),
                };
                let directory = self.directory.clone();
                let slashes = slashes != 0 || self.wants_directory;
                return Ok(Last { directory, component, slashes, root: self.root });
            }
            let next = step(&self.directory, component, self.root)?;
            let link = next.target().is_some();
            if !exhausted {
                rest.advance(skipped + end + slashes);
                if link {
                    self.pending.push(rest);
                } else {
                    self.rest = rest;
                }
            }
            if link {
                self.enter(next)?;
            } else {
                self.directory = next;
            }
        }
    }

    /// Continues with the target of a link that is the last component; then call [`Walk::last`]
    /// again.
    pub(super) fn follow(&mut self, last: &Last<'_>, link: Arc<Inode>) -> Result<(), Errno> {
        check_follow(self.caller, &last.directory, &link)?;
        self.wants_directory |= last.slashes;
        self.enter(link)
    }

    fn enter(&mut self, link: Arc<Inode>) -> Result<(), Errno> {
        self.links += 1;
        if self.links > LINKS_MAX {
            return Err(Errno::ELOOP);
        }
        link.accessed();
        if link.target().is_some_and(|target| target.starts_with(b"/")) {
            return Err(Errno::EXDEV);
        }
        self.rest = Rest::Target(link, 0);
        Ok(())
    }

    /// Resolves the whole path. A symbolic link at the end is followed if `follow` is set, or if
    /// slashes follow.
    pub(super) fn finish(&mut self, follow: bool) -> Result<Arc<Inode>, Errno> {
        self.finish_by(follow).map(|(inode, _)| inode)
    }

    /// Like [`Walk::finish`], and also returns the number of the directory with the last component.
    pub(super) fn finish_by(&mut self, follow: bool) -> Result<(Arc<Inode>, u64), Errno> {
        loop {
            let last = self.last()?;
            let inode = last.find()?;
            if inode.target().is_some() && (follow || last.slashes) {
                self.follow(&last, inode)?;
                continue;
            }
            if last.slashes && !inode.is_directory() {
                return Err(Errno::ENOTDIR);
            }
            return Ok((inode, last.directory.number));
        }
    }
}

impl Last<'_> {
    /// Returns the inode that it names, or `ENOENT`.
    pub(super) fn find(&self) -> Result<Arc<Inode>, Errno> {
        match &self.component {
            Component::Dot => Ok(self.directory.clone()),
            Component::DotDot => parent(&self.directory, self.root),
            Component::Name(name) => child(&self.directory, name),
        }
    }

    /// Returns the name for a new inode; `EEXIST` for `.` and `..`, which exist.
    pub(super) fn new_name(&self) -> Result<&[u8], Errno> {
        match &self.component {
            Component::Name(name) => name.checked(),
            Component::Dot | Component::DotDot => Err(Errno::EEXIST),
        }
    }

    /// Locks the names of the directory for a change; `ENOENT` if it was removed.
    pub(super) fn lock_names(&self) -> Result<parking_lot::RwLockWriteGuard<'_, Names>, Errno> {
        let names = self.directory.directory()?.names.write();
        if names.is_dead() { Err(Errno::ENOENT) } else { Ok(names) }
    }
}

fn count_slashes(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| **byte == b'/').count()
}

fn step(directory: &Arc<Inode>, component: &[u8], root: u64) -> Result<Arc<Inode>, Errno> {
    match component {
        b"." => Ok(directory.clone()),
        b".." => parent(directory, root),
        name if name.len() > NAME_BYTES_MAX => Err(Errno::ENAMETOOLONG),
        name => child(directory, name),
    }
}

/// Returns the parent; `EXDEV` if it is outside the root.
fn parent(directory: &Inode, root: u64) -> Result<Arc<Inode>, Errno> {
    if directory.number == root {
        return Err(Errno::EXDEV);
    }
    let parent = directory.parent().ok_or(Errno::ENOENT)?;
    // An open directory may have moved out from under the root.
    if root == ROOT_NUMBER || is_below(&parent, root) { Ok(parent) } else { Err(Errno::EXDEV) }
}

/// Returns true if the directory is the root or below it.
fn is_below(directory: &Arc<Inode>, root: u64) -> bool {
    let mut node = directory.clone();
    while node.number != root {
        let Some(parent) = node.parent() else { return false };
        node = parent;
    }
    true
}

fn child(directory: &Inode, name: &[u8]) -> Result<Arc<Inode>, Errno> {
    directory.directory()?.names.read().find(name).cloned().ok_or(Errno::ENOENT)
}
