//! What stays known although this process has changed something: see `crate::changed`.

use super::{Asked, Directory, KNOWN, Key, Known, Named};
use super::{goes_up, key_of, listed_of, lock, plain, split};
use crate::place::At;
use crate::{descriptors, start};
use std::sync::atomic::Ordering;
use towline_wire::Attr;
use towline_wire::attr::TYPE_DIRECTORY;

/// Maximum number of names of a directory that are looked through for each change.
const NAMES_MAX: usize = 1024;

/// A name that was changed.
pub(crate) struct Touched<'a> {
    mount: usize,
    base: u64,
    /// The directory that it is in, and the name there.
    above: &'a [u8],
    name: &'a [u8],
    /// What is known of it now.
    now: Named,
}

impl<'a> Touched<'a> {
    /// Returns `None` if it is not certain which name in which directory is meant.
    pub(crate) fn new((mount, base): (usize, u64), path: &'a [u8], now: Named) -> Option<Self> {
        let (above, name) = split(plain(path))?;
        let above = plain(above);
        (!goes_up(above)).then_some(Self { mount, base, above, name, now })
    }

    fn key(&self) -> Key<'a> {
        Key { mount: self.mount, base: self.base, path: self.above }
    }
}

/// What a change can do to paths through the changed names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Paths {
    /// All lead where they led, or still nowhere.
    Same,
    /// Those that led nowhere may lead to something new.
    New,
    /// They may lead elsewhere.
    Other,
}

/// A change that this process has made.
pub(crate) struct Changed<'a> {
    pub(crate) mount: usize,
    /// When it began, and the number of changes before it.
    pub(crate) began: Asked,
    /// Number of changes after it.
    pub(crate) after: u64,
    pub(crate) names: &'a [&'a Touched<'a>],
    pub(crate) paths: Paths,
    /// Identity of a file whose attributes have changed, and what they are now if that is known.
    pub(crate) file: Option<(u64, Option<Attr>)>,
    /// The attributes of files with several names may have changed.
    pub(crate) links: bool,
}

impl Changed<'_> {
    /// Returns what is known of attributes now. `above` are the identities of the directories with the changed
    /// names; `None` for one that is not known.
    fn adapt(&self, named: Named, above: &[Option<u64>]) -> Named {
        let Some(identity) = named.identity() else { return named };
        if let Some((_, new)) = self.file.filter(|(file, _)| *file == identity) {
            return new.map_or(named.changed(), Named::Is);
        }
        let may_be = |one: &Option<u64>| one.is_none_or(|one| one == identity);
        let concerns = match named {
            Named::Is(attr) if attr.is_directory() => above.iter().any(may_be),
            Named::Is(attr) => self.links && attr.links > 1,
            _ => false,
        };
        if concerns { named.changed() } else { named }
    }
}

/// How a known directory stands to the one with a changed name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Relation {
    Same,
    Other,
    Unsure,
}

impl Known {
    /// Returns the identity of a directory, if that is known after these changes.
    fn identity(&self, key: Key<'_>, asked: Asked) -> Option<u64> {
        if key.path.is_empty() {
            let root = start::mounts().get(key.mount)?.root().ok()?;
            let is_it = |open: &descriptors::Open| {
                open.handle == key.base
                    && open.entry.mount.load(Ordering::Relaxed) as usize == key.mount
            };
            return match root.handle == key.base {
                true => Some(root.inode),
                false => descriptors::all(0, u32::MAX)
                    .map(|(_, open)| open)
                    .find(is_it)
                    .map(|open| open.entry.inode.load(Ordering::Relaxed)),
            };
        }
        let place = self.current(key, asked);
        if let Some(path) = place.and_then(|place| self.directories[place].path(key)) {
            return Some(path.inode);
        }
        let own = place.and_then(|place| self.directories[place].listed.own(true, asked));
        let named = || {
            let (above, name) = split(key.path)?;
            let above = self.current(Key { path: above, ..key }, asked)?;
            self.directories[above].listed.find(name, asked)
        };
        let is_directory = |named: &Named| named.file_type() == Some(TYPE_DIRECTORY);
        own.or_else(named).filter(is_directory)?.identity()
    }

    fn relation(
        &self,
        place: usize,
        touched: &Touched<'_>,
        above: Option<u64>,
        asked: Asked,
    ) -> Relation {
        let directory = &self.directories[place];
        let key = touched.key();
        let is_path = || {
            directory
                .also
                .as_ref()
                .is_some_and(|path| path.name.key() == key && !path.is_old(asked))
        };
        if directory.name.key() == key || is_path() {
            return Relation::Same;
        }
        if !directory.listed.has_like(touched.name) {
            // It makes no difference.
            return Relation::Other;
        }
        match (self.identity(directory.name.key(), asked), above) {
            (Some(one), Some(other)) if one == other => Relation::Same,
            (Some(_), Some(_)) => Relation::Other,
            _ => Relation::Unsure,
        }
    }
}

impl Directory {
    /// Adapts what is known to a change; `names` says how each changed name stands to this directory.
    fn adapt(&mut self, changed: &Changed<'_>, above: &[Option<u64>], names: &[Relation]) {
        let listed = &mut self.listed;
        let is_here = names.contains(&Relation::Same);
        let is_lost = match changed.paths {
            Paths::Same => false,
            Paths::New => !listed.is_there() && !is_here,
            Paths::Other => true,
        };
        let is_path = !self.name.path.is_empty();
        if is_path && (is_lost || goes_up(&self.name.path)) {
            return;
        }
        for (named, _) in listed.names.values_mut() {
            *named = changed.adapt(*named, above);
        }
        for (touched, relation) in changed.names.iter().zip(names) {
            let now = match relation {
                Relation::Same => touched.now,
                Relation::Unsure => Named::Unknown,
                Relation::Other => continue,
            };
            listed.change(touched.name, now, changed.began.when);
        }
        if let Some((_, own, _)) = &mut listed.own {
            *own = changed.adapt(*own, above);
        }
        listed.last.changes = changed.after;
        if let Some(path) = &mut self.also {
            let is_same = changed.paths != Paths::Other && !goes_up(&path.name.path);
            path.when = path.when.filter(|when| is_same && when.changes == changed.began.changes);
            path.when = path.when.map(|when| Asked { changes: changed.after, ..when });
        }
    }
}

/// Adapts what is known of all directories.
pub(crate) fn changed(changed: &Changed<'_>) {
    let Some(mut known) = lock(&KNOWN) else { return };
    let began = changed.began;
    let above: Vec<_> =
        changed.names.iter().map(|touched| known.identity(touched.key(), began)).collect();
    let is_concerned = |Directory { name, listed, .. }: &Directory| {
        let is_short = listed.names.len() <= NAMES_MAX;
        name.mount == changed.mount && listed.last.changes == began.changes && is_short
    };
    let relations: Vec<_> = (0..known.directories.len())
        .filter(|place| is_concerned(&known.directories[*place]))
        .map(|place| {
            let names = changed.names.iter().zip(&above);
            let of = |(name, above): (&&Touched<'_>, &Option<u64>)| {
                known.relation(place, name, *above, began)
            };
            (place, names.map(of).collect::<Vec<_>>())
        })
        .collect();
    for (place, names) in relations {
        known.directories[place].adapt(changed, &above, &names);
    }
    let asked = Asked { changes: changed.after, ..began };
    for touched in changed.names {
        if let Some(place) = known.place_of(touched.key(), asked) {
            known.make_room(place, 1);
            let listed = &mut known.directories[place].listed;
            listed.renew(asked);
            // Otherwise it was adapted with the others.
            if !listed.names.contains_key(touched.name) {
                listed.change(touched.name, touched.now, began.when);
            }
        }
        // A directory was made.
        if let Named::Is(attr) = touched.now
            && attr.is_directory()
        {
            let path = match touched.above {
                b"" => touched.name.to_vec(),
                above => [above, b"/", touched.name].concat(),
            };
            known.keep_empty(Key { path: &path, ..touched.key() }, asked, attr);
        }
    }
}

/// Returns what is known of the name at a path, of a link itself, without asking.
pub(crate) fn peek(at: &At, asked: Asked) -> Named {
    let find = || {
        let (above, name) = split(plain(&at.path))?;
        let (key, mut known) = (key_of(at, above)?, lock(&KNOWN)?);
        listed_of(&mut known, key, asked)?.find(name, asked)
    };
    find().unwrap_or(Named::Unknown)
}
