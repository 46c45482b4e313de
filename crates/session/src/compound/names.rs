//! Changes of names that must not be made twice. What is there before is recorded, so that a look after
//! a restart shows whether the change was made.

use super::once::{Before, server};
use super::{BlockingResult, Compound, Context, Step, Value};
use crate::files::Opened;
use crate::record::{Intent, Kind, Place};
use crate::state::Verdict;
use std::sync::Arc;
use towline_store::{
    Caller, FileStore, OpenFile, OpenHow, Remains, Source, XattrAction, trim_slashes,
};
use towline_wire::codec::Field;
use towline_wire::request::{open_flag, rename_flag};
use towline_wire::{Attr, Errno, Reply};

/// An open directory and a path from there.
type At<'a> = (Arc<dyn OpenFile>, &'a [u8]);

/// A change of one name or two.
pub(super) struct Change<'a> {
    kind: Kind,
    opened: Opened,
    path: &'a [u8],
    second: Option<At<'a>>,
    /// For a link: the file, and whether to follow a symbolic link to it.
    source: Option<(At<'a>, bool)>,
    file_type: u32,
    flags: u32,
}

/// The result of a change.
pub(super) enum Outcome {
    Opened(Arc<dyn OpenFile>, Attr),
    Attributes(Attr),
    Removed(Option<Remains>),
}

impl<'a> Change<'a> {
    fn new(kind: Kind, opened: Opened, path: &'a [u8]) -> Self {
        Self { kind, opened, path, second: None, source: None, file_type: 0, flags: 0 }
    }

    pub(super) fn open(opened: Opened, path: &'a [u8], flags: u32) -> Self {
        let file_type = towline_wire::attr::TYPE_FILE;
        Self { flags, file_type, ..Self::new(Kind::Open, opened, path) }
    }

    pub(super) fn create(opened: Opened, path: &'a [u8], file_type: u32) -> Self {
        Self { file_type, ..Self::new(Kind::Create, opened, path) }
    }

    pub(super) fn link(opened: Opened, path: &'a [u8], source: (At<'a>, bool)) -> Self {
        Self { source: Some(source), ..Self::new(Kind::Link, opened, path) }
    }

    pub(super) fn unlink(opened: Opened, path: &'a [u8]) -> Self {
        Self::new(Kind::Unlink, opened, path)
    }

    pub(super) fn rename((opened, path): (Opened, &'a [u8]), second: At<'a>, flags: u32) -> Self {
        let kind = if flags & rename_flag::EXCHANGE != 0 { Kind::Exchange } else { Kind::Rename };
        Self { second: Some(second), ..Self::new(kind, opened, path) }
    }

    /// Locates its names. `None` for names that no directory can contain; the change will fail for these.
    fn locate(&self, caller: &Caller) -> Result<Option<Vec<Located<'a>>>, Errno> {
        let store = &*self.opened.store;
        let first = locate(store, caller, &self.opened.file, self.path).or_else(|errno| {
            // Errors of the old name are reported first.
            if let Some(((file, path), follow)) = &self.source {
                store.stat(caller, (&**file, path), *follow)?;
            }
            Err(errno)
        });
        let Some(first) = first? else { return Ok(None) };
        let Some((base, path)) = &self.second else { return Ok(Some(vec![first])) };
        Ok(locate(store, caller, base, path)?.map(|second| vec![first, second]))
    }

    fn intent(&self, located: &[Located<'_>], before: [u64; 2]) -> Intent {
        let second = located.get(1).map_or(Place::default(), |l| l.place);
        Intent {
            kind: self.kind,
            reserved: false,
            places: [located[0].place, second],
            before,
            offset: 0,
            length: 0,
        }
    }
}

/// A name in an open directory.
pub(super) struct Located<'a> {
    directory: Arc<dyn OpenFile>,
    /// With the slashes at the end of the path.
    name: &'a [u8],
    place: Place,
}

impl Located<'_> {
    /// Returns the attributes of what has this name. Without the slashes, as system calls that create or
    /// remove a name look at it: a slash would make a file an error, and follow a symbolic link.
    fn look(&self, store: &dyn FileStore, caller: &Caller) -> Result<Option<Attr>, Errno> {
        match store.stat(caller, (&*self.directory, trim_slashes(self.name)), false) {
            Ok(attr) => Ok(Some(attr)),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

/// Finds the directory and the last name of a path; `None` if no directory can contain that name.
pub(super) fn locate<'a>(
    store: &dyn FileStore,
    caller: &Caller,
    base: &Arc<dyn OpenFile>,
    path: &'a [u8],
) -> Result<Option<Located<'a>>, Errno> {
    if path.starts_with(b"/") {
        return Ok(None);
    }
    let (directory, name) = match trim_slashes(path).iter().rposition(|byte| *byte == b'/') {
        None => (base.clone(), path),
        Some(slash) => {
            let how = OpenHow { flags: open_flag::PATH | open_flag::DIRECTORY, mode: 0 };
            let (directory, _) = store.open(caller, (&**base, &path[..slash]), how)?;
            (directory, &path[slash + 1..])
        }
    };
    let trimmed = trim_slashes(name);
    if trimmed.is_empty() || trimmed == b"." || trimmed == b".." {
        return Ok(None);
    }
    let place = Place::named(directory.identity(), &[trimmed]);
    Ok(Some(Located { directory, name, place }))
}

/// Fails if a path could not be created even if its export were not read-only.
pub(super) fn could_create(
    base: &Opened,
    caller: &Caller,
    path: &[u8],
    is_directory: bool,
) -> Result<(), Errno> {
    let store = &*base.store;
    let is_there = match locate(store, caller, &base.file, path)? {
        Some(located) => located.look(store, caller)?.is_some(),
        None if path.is_empty() => return Err(Errno::ENOENT),
        // It ends with `.` or `..`, or is absolute and leads nowhere.
        None => store.stat(caller, (&*base.file, path), false).map(|_| true)?,
    };
    match is_there {
        true => Err(Errno::EEXIST),
        false if path.ends_with(b"/") && !is_directory => Err(Errno::ENOENT),
        false => Ok(()),
    }
}

/// Drops what is left of a file on a thread that may block. The name is gone already, and the request is
/// answered afterwards, so that the client then finds the space free.
fn drop_on(store: Arc<dyn FileStore>, remains: Remains) -> Step {
    let work = move || {
        drop(remains);
        BlockingResult { result: Ok(Value::Freed) }
    };
    Step::Block(store, Box::new(work), 0)
}

fn inode(found: Option<&Attr>) -> u64 {
    found.map_or(0, |attr| attr.identity())
}

/// Returns whether a change was made, when its own client repeats it and all its places are known.
/// `None`: what is there is neither the state before the change nor the state after it.
fn was_made(intent: &Intent, now: &[Option<Attr>]) -> Option<bool> {
    let first = now.first().and_then(Option::as_ref);
    let second = inode(now.get(1).and_then(Option::as_ref));
    let [before, other] = intent.before;
    match (intent.kind, first) {
        (Kind::Open | Kind::Create | Kind::Link, None) => Some(false),
        (Kind::Open | Kind::Create, Some(attr)) => {
            (u64::from(attr.file_type()) == other).then_some(true)
        }
        (Kind::Link, Some(attr)) => (attr.identity() == other).then_some(true),
        (Kind::Unlink, found) => Some(inode(found) != before),
        // Two names of one file: nothing happens, however often it is repeated.
        (Kind::Rename | Kind::Exchange, _) if before == other => Some(false),
        (Kind::Rename | Kind::Exchange, found) if (inode(found), second) == (before, other) => {
            Some(false)
        }
        (Kind::Rename, found) => (second == before && inode(found) != before).then_some(true),
        (Kind::Exchange, found) => ((inode(found), second) == (other, before)).then_some(true),
        _ => None,
    }
}

/// Returns whether a change was made, when another client is about to change one of its places. No other
/// client has changed them since the server was killed, so one place is enough to tell.
fn settle(intent: &Intent, place: &Place, now: Option<Attr>) -> Verdict {
    let is_first = intent.places[0] == *place;
    let [before, other] = intent.before;
    let made = match intent.kind {
        Kind::Open | Kind::Create => now.is_some(),
        Kind::Link => inode(now.as_ref()) == other,
        Kind::Rename if !is_first => inode(now.as_ref()) == before,
        Kind::Exchange if !is_first => inode(now.as_ref()) != other,
        _ => inode(now.as_ref()) != before,
    };
    let mut result = Vec::new();
    match (intent.kind, now) {
        _ if !made => return Verdict::NotDone,
        (Kind::Open, Some(attr)) => Reply::Opened { handle: 0, attr }.encode(&mut result),
        (Kind::Create | Kind::Link, Some(attr)) => Reply::Attributes { attr }.encode(&mut result),
        _ => Reply::Done {}.encode(&mut result),
    }
    Verdict::Done(result)
}

impl Compound {
    /// Makes a change of names.
    pub(super) fn change(
        &mut self,
        context: &mut Context<'_>,
        change: Change<'_>,
        run: impl FnOnce(&dyn FileStore, (Source<'_>, Option<Source<'_>>)) -> Result<Outcome, Errno>,
    ) -> Result<Option<Step>, Errno> {
        let caller = context.caller;
        let store = change.opened.store.clone();
        let journal = self.pen.as_ref().map(|pen| pen.journal.clone());
        let journal = journal.filter(|_| store.survives_restart());
        let located = match &journal {
            Some(_) => self.sure(change.locate(caller))?,
            None => None,
        };
        let (Some(journal), Some(located)) = (journal, located) else {
            let second = change.second.as_ref().map(|(file, path)| (&**file, *path));
            let outcome = run(&*store, ((&*change.opened.file, change.path), second))?;
            let remains = self.changed(context, &change, outcome)?;
            return Ok(remains.map(|remains| drop_on(store, remains)));
        };
        self.changes(&*store);
        let mut places = [Place::default(); 2];
        for (place, located) in places.iter_mut().zip(&located) {
            *place = located.place;
        }
        let _guard = journal.state().guard(&places[..located.len()], store.may_hang());
        for located in &located {
            journal.settle(self.slot, &located.place, |intent| {
                let now = located.look(&*store, &server()).ok()?;
                (intent.kind != Kind::Append).then(|| settle(intent, &located.place, now))
            });
        }
        let now: Result<Vec<_>, _> = located.iter().map(|l| l.look(&*store, caller)).collect();
        let now = self.sure(now)?;
        match self.before() {
            Before::NotBegun => {}
            Before::Settled(record) => {
                let reply = towline_wire::reply::parse_results(&record.results).ok();
                match reply.as_ref().and_then(|replies| replies.get(self.index)) {
                    Some(Reply::Opened { attr, .. }) => {
                        self.again(context, &change, &located, attr.identity())?;
                    }
                    Some(reply) => self.result(reply),
                    None => return Err(Errno::EIO),
                }
                return Ok(None);
            }
            Before::Intended(intent) => {
                let same = intent.kind == change.kind && intent.places == places;
                match was_made(&intent, &now).filter(|_| same) {
                    Some(false) => {}
                    Some(true) => {
                        match (change.kind, &now[0]) {
                            (Kind::Open, Some(attr)) => {
                                self.again(context, &change, &located, attr.identity())?;
                            }
                            (Kind::Create | Kind::Link, Some(attr)) => {
                                self.result(&Reply::Attributes { attr: *attr });
                            }
                            _ => self.result(&Reply::Done {}),
                        }
                        self.record();
                        return Ok(None);
                    }
                    None => {
                        self.undecided = true;
                        return Err(Errno::EIO);
                    }
                }
            }
        }
        let found = [now.first(), now.get(1)].map(|now| now.and_then(Option::as_ref));
        let before = match (change.kind, found) {
            (Kind::Open | Kind::Create, [None, _]) => Some([0, u64::from(change.file_type)]),
            (Kind::Link, [None, _]) => {
                let source = change.source.as_ref().and_then(|((file, path), follow)| {
                    store.stat(caller, (&**file, path), *follow).ok()
                });
                source.map(|attr| [0, attr.identity()])
            }
            (Kind::Unlink | Kind::Rename, [Some(first), second]) => {
                Some([first.identity(), inode(second)])
            }
            (Kind::Exchange, [Some(first), Some(second)]) => {
                Some([first.identity(), second.identity()])
            }
            // It will fail and change nothing.
            _ => None,
        };
        if let Some(before) = before {
            self.intend(change.intent(&located, before));
        }
        let source = |l: usize| located.get(l).map(|l| (&*l.directory, l.name));
        let outcome = source(0).ok_or(Errno::EINVAL).and_then(|at| run(&*store, (at, source(1))));
        // Record the outcome before releasing the places.
        let changed = outcome.and_then(|outcome| self.changed(context, &change, outcome));
        let remains = changed.unwrap_or_else(|errno| {
            self.fail(errno);
            None
        });
        self.record();
        Ok(remains.map(|remains| drop_on(store, remains)))
    }

    /// Returns the result of a look at a place of the next operation. If that operation may have been
    /// done before the restart and its place cannot be looked at any more, its outcome is unknown.
    fn sure<T>(&mut self, look: Result<T, Errno>) -> Result<T, Errno> {
        look.map_err(|errno| {
            let is_pending = self.is_pending() && self.elsewhere.is_none();
            self.undecided |= is_pending;
            if is_pending { Errno::EIO } else { errno }
        })
    }

    fn changed(
        &mut self,
        context: &mut Context<'_>,
        change: &Change<'_>,
        outcome: Outcome,
    ) -> Result<Option<Remains>, Errno> {
        match outcome {
            Outcome::Opened(file, attr) => {
                let Opened { store, terms, .. } = &change.opened;
                let (store, terms, flags) = (store.clone(), *terms, change.flags);
                self.opened(context, Opened::new(store, file, terms, flags), None, attr)?;
            }
            Outcome::Attributes(attr) => self.result(&Reply::Attributes { attr }),
            Outcome::Removed(remains) => {
                self.result(&Reply::Done {});
                return Ok(remains);
            }
        }
        Ok(None)
    }

    /// Opens the file that an exclusive open created before the restart.
    fn again(
        &mut self,
        context: &mut Context<'_>,
        change: &Change<'_>,
        located: &[Located<'_>],
        inode: u64,
    ) -> Result<(), Errno> {
        let Located { directory, name, .. } = &located[0];
        let at = Opened { file: directory.clone(), ..change.opened.clone() };
        self.open_again(context, at, name, change.flags, inode)
    }

    /// Creates an extended attribute that must not exist yet, or removes one.
    pub(super) fn change_xattr(
        &mut self,
        context: &Context<'_>,
        opened: &Opened,
        (path, follow): (&[u8], bool),
        action: XattrAction<'_>,
    ) -> Result<Option<Step>, Errno> {
        let (store, caller) = (&*opened.store, context.caller);
        let at = (&*opened.file, path);
        let journal = self.pen.as_ref().map(|pen| pen.journal.clone());
        let (Some(journal), true) = (journal, store.survives_restart()) else {
            store.xattr(caller, at, follow, action)?;
            self.result(&Reply::Done {});
            return Ok(None);
        };
        let (kind, name) = match action {
            XattrAction::Set(name, ..) => (Kind::MakeXattr, name),
            XattrAction::Remove(name) => (Kind::RemoveXattr, name),
            XattrAction::Get(_) | XattrAction::List => return Err(Errno::EINVAL),
        };
        let place = Place::named(opened.file.identity(), &[path, name]);
        let made = |is_there: bool| is_there == (kind == Kind::MakeXattr);
        let _guard = journal.state().guard(&[place], store.may_hang());
        let is_there = match store.xattr(caller, at, follow, XattrAction::Get(name)) {
            Err(errno) if errno != Errno::ENODATA && self.is_pending() => self.sure(Err(errno))?,
            // A caller that may set the attribute may not be allowed to read it; then setting reports
            // what is wrong.
            found => found.is_ok(),
        };
        journal.settle(self.slot, &place, |intent| {
            let mut result = Vec::new();
            Reply::Done {}.encode(&mut result);
            let made = is_there == (intent.kind == Kind::MakeXattr);
            Some(if made { Verdict::Done(result) } else { Verdict::NotDone })
        });
        match self.before() {
            Before::Intended(intent) if intent.kind != kind || intent.places[0] != place => {
                self.undecided = true;
                return Err(Errno::EIO);
            }
            Before::Intended(_) if made(is_there) => {
                self.result(&Reply::Done {});
                self.record();
                return Ok(None);
            }
            Before::Settled(_) => {
                self.result(&Reply::Done {});
                return Ok(None);
            }
            Before::Intended(_) | Before::NotBegun => {}
        }
        if !made(is_there) {
            self.intend(Intent {
                kind,
                reserved: false,
                places: [place, Place::default()],
                before: [0; 2],
                offset: 0,
                length: 0,
            });
        }
        match store.xattr(caller, at, follow, action) {
            Ok(_) => self.result(&Reply::Done {}),
            Err(errno) => self.fail(errno),
        }
        self.record();
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use towline_wire::attr::{TYPE_DIRECTORY, TYPE_FILE};

    fn file(inode: u64) -> Option<Attr> {
        Some(Attr { inode, mode: TYPE_FILE | 0o644, ..Attr::default() })
    }

    fn intent(kind: Kind, before: [u64; 2]) -> Intent {
        let place = |name: &[u8]| Place::named((1, 1), &[name]);
        Intent {
            kind,
            reserved: false,
            places: [place(b"a"), place(b"b")],
            before,
            offset: 0,
            length: 0,
        }
    }

    #[test]
    fn a_look_tells_whether_a_change_was_made() {
        let made = |kind, before, now: &[Option<Attr>]| was_made(&intent(kind, before), now);
        let a_file = u64::from(TYPE_FILE);
        assert_eq!(made(Kind::Create, [0, a_file], &[None]), Some(false));
        assert_eq!(made(Kind::Open, [0, a_file], &[file(5)]), Some(true));
        assert_eq!(made(Kind::Create, [0, u64::from(TYPE_DIRECTORY)], &[file(5)]), None);
        assert_eq!(made(Kind::Link, [0, 5], &[file(5)]), Some(true));
        assert_eq!(made(Kind::Link, [0, 5], &[file(6)]), None);
        assert_eq!(made(Kind::Unlink, [5, 0], &[file(5)]), Some(false));
        assert_eq!(made(Kind::Unlink, [5, 0], &[None]), Some(true));
        assert_eq!(made(Kind::Rename, [5, 0], &[file(5), None]), Some(false));
        assert_eq!(made(Kind::Rename, [5, 0], &[None, file(5)]), Some(true));
        assert_eq!(made(Kind::Rename, [5, 6], &[file(5), file(6)]), Some(false));
        assert_eq!(made(Kind::Rename, [5, 6], &[None, file(5)]), Some(true));
        assert_eq!(made(Kind::Rename, [5, 6], &[None, file(6)]), None);
        assert_eq!(made(Kind::Exchange, [5, 6], &[file(6), file(5)]), Some(true));
        assert_eq!(made(Kind::Exchange, [5, 6], &[file(5), file(6)]), Some(false));
    }

    #[test]
    fn one_place_tells_as_much_as_all() {
        // For each kind: what was in its places before, and what is there afterwards.
        let cases = [
            (Kind::Create, [0, u64::from(TYPE_FILE)], [0, 0], [9, 0]),
            (Kind::Link, [0, 5], [0, 0], [5, 0]),
            (Kind::Unlink, [5, 0], [5, 0], [0, 0]),
            (Kind::Rename, [5, 0], [5, 0], [0, 5]),
            (Kind::Rename, [5, 6], [5, 6], [0, 5]),
            // With a whiteout at the old name.
            (Kind::Rename, [5, 0], [5, 0], [9, 5]),
            (Kind::Rename, [5, 6], [5, 6], [9, 5]),
            (Kind::Exchange, [5, 6], [5, 6], [6, 5]),
        ];
        let attr = |inode| if inode == 0 { None } else { file(inode) };
        for (kind, before, old, new) in cases {
            let intent = intent(kind, before);
            for (found, made) in [(old, false), (new, true)] {
                let now = found.map(attr);
                assert_eq!(was_made(&intent, &now), Some(made), "{kind:?} {found:?}");
                for (place, now) in intent.places().iter().zip(now) {
                    let verdict = settle(&intent, place, now);
                    assert_eq!(matches!(verdict, Verdict::Done(_)), made, "{kind:?} {found:?}");
                }
            }
        }
    }
}
