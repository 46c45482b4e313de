//! What stays known of a far server although this process changes something there.
//!
//! Every change of the run makes what is known of any file invalid (`known.rs`). A program that makes or removes files
//! would then have to ask for all attributes again after each. But if no other change of the run came in between, so
//! that the counter of changes has moved by exactly the two of this one, it is known what the change can have altered:
//!
//! * what is known of the name itself, in its directory and in all that may be the same one by another path;
//! * the attributes of the changed file under all its names, and of the directory that the name is in;
//! * if a link or a directory may have gone, or something new has come, what paths through it lead to.
//!
//! Everything else stays known. What the answer tells of the changed file is kept, too; a directory that was made is
//! empty. Changes of whole directories (renamed ones, rights) make everything invalid, as do those that are not
//! described here.

use crate::known::{self, Asked, Changed, Named, Paths, Touched, changes};
use crate::place::At;
use crate::walk::{self, Removed};
use libc::c_int;
use std::sync::atomic::Ordering;
use towline_wire::Attr;
use towline_wire::attr::{TYPE_DIRECTORY, TYPE_SYMLINK};

/// A change that this process is about to make.
#[derive(Clone, Copy)]
pub(crate) struct Change {
    mount: usize,
    /// `None` for a near server, of which nothing stays known.
    began: Option<Asked>,
}

/// A change that was the only one of the run since it began.
#[derive(Clone, Copy)]
struct Exact {
    mount: usize,
    began: Asked,
}

impl Exact {
    /// Adapts what is known.
    fn end(self, names: &[Option<Touched<'_>>], paths: Paths, file: Option<(u64, Option<Attr>)>) {
        let links = file.is_none() && !names.is_empty();
        let names: Option<Vec<&Touched<'_>>> = names.iter().map(Option::as_ref).collect();
        let (mount, began, after) = (self.mount, self.began, self.after());
        if let Some(names) = names {
            known::changed(&Changed { mount, began, after, names: &names, paths, file, links });
        }
    }

    /// Returns the number of changes after it.
    fn after(self) -> u64 {
        self.began.changes + 2
    }
}

impl Change {
    /// Begins a change; no other request that changes something may be made before it is told how it ended.
    pub(crate) fn begin(mount: usize) -> Self {
        Self { mount, began: known::is_far(mount).then(Asked::now) }
    }

    /// Returns it if nothing else has changed since it began.
    fn exact(self) -> Option<Exact> {
        let began = self.began.filter(|began| changes() == began.changes + 2)?;
        Some(Exact { mount: self.mount, began })
    }

    /// Returns an error. After one that says what is there, nothing has changed.
    pub(crate) fn failed(self, error: i32) -> i32 {
        const TELLING: [i32; 6] =
            [libc::ENOENT, libc::EEXIST, libc::ENOTDIR, libc::EISDIR, libc::ENOTEMPTY, libc::EXDEV];
        if TELLING.contains(&error)
            && let Some(change) = self.exact()
        {
            change.end(&[], Paths::Same, None);
        }
        error
    }

    /// A name was made that was not there.
    pub(crate) fn created(self, at: &At, attr: &Attr) {
        if let Some(change) = self.exact() {
            let file = Some((attr.identity(), Some(*attr)));
            change.end(&[touched(at, Named::Is(*attr))], Paths::New, file);
        }
    }

    /// A file was opened with these flags, and perhaps created or shortened. `is_named`: the path has the name of the
    /// file, rather than that of a link, which leads to a name in another directory.
    pub(crate) fn opened(self, at: &At, flags: c_int, attr: &Attr, is_named: bool) {
        let Some(change) = self.exact() else { return };
        let file = Some((attr.identity(), Some(*attr)));
        if is_named {
            change.end(&[touched(at, Named::Is(*attr))], Paths::New, file);
        } else if flags & libc::O_CREAT == 0 {
            change.end(&[], Paths::Same, file);
        }
    }

    /// A file has these attributes now.
    pub(crate) fn set(self, attr: &Attr) {
        // The rights to a directory are those to all that is below it.
        if !attr.is_directory()
            && let Some(change) = self.exact()
        {
            change.end(&[], Paths::Same, Some((attr.identity(), Some(*attr))));
        }
    }

    /// The file of this identity was written to.
    pub(crate) fn written(self, identity: u64) {
        if let Some(change) = self.exact() {
            change.end(&[], Paths::Same, Some((identity, None)));
        }
    }

    /// A name was removed.
    pub(crate) fn removed(self, at: &At, is_directory: bool) {
        let Some(change) = self.exact() else { return };
        let named = known::peek(at, change.began);
        let walked = || walk::identity(at.mount, at.base().ok()?, &at.path);
        let gone = if is_directory { named.identity().or_else(walked) } else { None };
        if is_directory && gone.is_none() {
            return; // anything may be below it, or be it
        }
        let is_plain = named.file_type().is_some_and(|of| of != TYPE_SYMLINK) && !is_directory;
        let paths = if is_plain { Paths::Same } else { Paths::Other };
        change.end(&[touched(at, Named::Missing)], paths, gone.map(|gone| (gone, None)));
        if let Some(open) = at.directory.filter(|_| !at.path.contains(&b'/')) {
            let (before, after) = (change.began.changes, change.after());
            let parent = open.entry.inode.load(Ordering::Relaxed);
            walk::removed(&Removed { mount: self.mount, parent, gone, before, after });
        }
    }

    /// A name became another one, and replaced what was there.
    pub(crate) fn renamed(self, from: &At, to: &At, flags: u32) {
        if flags & !libc::RENAME_NOREPLACE != 0 || from.mount != to.mount {
            return;
        }
        let Some(change) = self.exact() else { return };
        let (old, new) = (known::peek(from, change.began), known::peek(to, change.began));
        let (Some(of), Some(identity)) = (old.file_type(), old.identity()) else { return };
        if of == TYPE_DIRECTORY {
            return;
        }
        // Two names of one file stay as they are.
        let may_stay =
            !matches!(new, Named::Missing) && new.identity().is_none_or(|new| new == identity);
        let left = if may_stay { Named::Unknown } else { Named::Missing };
        let is_link = |of| of == TYPE_SYMLINK;
        let may_replace_link = match new {
            Named::Missing => false,
            new => new.file_type().is_none_or(is_link),
        };
        let paths = if is_link(of) || may_replace_link { Paths::Other } else { Paths::New };
        change.end(&[touched(from, left), touched(to, Named::There(of, identity))], paths, None);
    }

    /// A file has got another name.
    pub(crate) fn linked(self, to: &At, attr: &Attr) {
        if let Some(change) = self.exact() {
            let file = Some((attr.identity(), Some(*attr)));
            change.end(&[touched(to, Named::Is(*attr))], Paths::New, file);
        }
    }
}

/// Returns the name at a path, of which this is known now.
fn touched(at: &At, now: Named) -> Option<Touched<'_>> {
    Touched::new((at.mount, at.base().ok()?), &at.path, now)
}
