//! What is known of a path, or what the server says of it.
//!
//! Of a far server, each answer about a name is kept, also that there is none. Whether a name is a link is always
//! asked in the same round trip: what is found behind a link may change by changes of other names.

use super::listed::Named;
use super::{Asked, KNOWN, Key, Known, SCORE, USED, XATTRS};
use super::{earn, key_from, key_of, leads_to, listed_of, lock, note, path_of, plain, split};
use crate::ahead::FAR;
use crate::hash::hash;
use crate::place::At;
use crate::remote;
use crate::walk::{self, TRIP_MAX};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use towline_client::{Error, File};
use towline_instance::MOUNTS_MAX;
use towline_wire::Attr;
use towline_wire::attr::{TYPE_SYMLINK, attr_flag};
use towline_wire::request::open_flag;

/// For each mount, the shortest time that a short request took, in microseconds.
static TRIPS: [AtomicU32; MOUNTS_MAX] = [const { AtomicU32::new(u32::MAX) }; MOUNTS_MAX];

enum Answer {
    Known(Named),
    /// Ask the server.
    Ask,
    /// List the names from this cookie on, as that should pay.
    List(u64),
    /// Known if the path to the directory still leads there.
    Lead,
}

fn look(known: &mut Known, key: Key<'_>, name: &[u8]) -> Answer {
    let Some(place) = known.find(key) else {
        let place = known.add(None, key);
        let directory = &mut known.directories[place];
        (directory.asked, directory.last) = (1, hash(0, name));
        return if SCORE.load(Ordering::Relaxed) > 0 { Answer::List(0) } else { Answer::Ask };
    };
    let directory = &mut known.directories[place];
    let now = Asked::now();
    directory.is_used = true;
    directory.listed.looks += 1;
    directory.listed.debt = directory.listed.debt.saturating_sub(1);
    if let Some(found) = directory.listed.find(name, now) {
        if directory.path(key).is_some_and(|path| path.is_old(now)) {
            return Answer::Lead;
        }
        if matches!(found, Named::Unknown) {
            return Answer::Ask;
        }
        if directory.listed.is_valid(now) {
            directory.listed.used += 1;
            if directory.listed.used == 2 {
                earn(2);
            }
        }
        return Answer::Known(found);
    }
    // A program that asks for the same name repeatedly waits for a change.
    let last = hash(0, name);
    if directory.last == last {
        return Answer::Ask;
    }
    let cookie = match directory.listed.order.find(last) {
        Some(_) if directory.listed.debt > 0 => return Answer::Ask,
        Some(cookie) => cookie,
        None if directory.listed.is_valid(now) => match directory.listed.missed() {
            Some(cookie) => cookie,
            None => return Answer::Ask,
        },
        None => 0,
    };
    directory.last = last;
    directory.asked += 1;
    let score = SCORE.load(Ordering::Relaxed);
    let needed = if score > 0 { 1 } else { 2 << -score };
    if directory.asked < needed {
        return Answer::Ask;
    }
    directory.asked = 0;
    Answer::List(cookie)
}

fn list(at: &At, key: Key<'_>, name: &[u8], cookie: u64) -> Option<Answer> {
    let asked = Asked::now();
    let list = |base: &File, _: &[u8]| base.list_path(path_of(key), cookie, true);
    let (attr, (entries, end)) = at.with(list).ok()?;
    let mut known = lock(&KNOWN)?;
    let place = leads_to(&mut known, key, Some(attr.identity()), asked);
    let place = place.unwrap_or_else(|| known.add(None, key));
    known.directories[place].listed.debt = entries.len() / USED;
    note(&mut known, place, asked, cookie, (&entries, end));
    if entries.iter().all(|entry| entry.name != name) {
        known.directories[place].listed.order.forget(hash(0, name));
    }
    Some(look(&mut known, key, name))
}

/// Checks whether the path to a directory still leads where it did.
fn lead(at: &At, key: Key<'_>, name: &[u8]) -> Option<Answer> {
    let asked = Asked::now();
    let attr = at.with(|base, _| base.stat_path(path_of(key), true));
    let mut known = lock(&KNOWN)?;
    leads_to(&mut known, key, attr.ok().map(|attr| attr.identity()), asked);
    Some(look(&mut known, key, name))
}

/// A path as it is looked for.
struct Looked<'a> {
    /// The path, if it leads to a directory.
    itself: Key<'a>,
    /// The directory above and the name there.
    named: Option<(Key<'a>, &'a [u8])>,
    /// Only a directory is meant, by a slash at the end, also behind a link.
    is_directory: bool,
}

impl<'a> Looked<'a> {
    /// Returns `None` for a path in a removed working directory.
    fn new(at: &'a At) -> Option<Self> {
        let base = at.base().ok()?;
        let is_directory = at.path.ends_with(b"/") || at.path.ends_with(b"/.");
        let above = split(plain(&at.path));
        let named = above.map(|(above, name)| (key_from(at, base, above), name));
        Some(Self { itself: key_from(at, base, &at.path), named, is_directory })
    }

    /// Returns what is known, or how to find out.
    fn look(&self, known: &mut Known, follow: bool) -> Answer {
        // As old as the attributes of its names: programs check whether those can still be right.
        let follow = follow || self.is_directory;
        let own = known.find(self.itself).and_then(|_| {
            let now = Asked::now();
            listed_of(known, self.itself, now)?.own(follow, now)
        });
        match (own, self.named) {
            (Some(own @ Named::Is(_)), _) => Answer::Known(own),
            (_, Some((key, name))) => look(known, key, name),
            (own, None) => own.map_or(Answer::Ask, Answer::Known),
        }
    }

    /// Keeps an answer of a far server.
    fn keep(&self, asked: Asked, named: Named) {
        let Some(mut known) = lock(&KNOWN) else { return };
        match (self.named, named) {
            (Some((key, name)), _) if !self.is_directory => known.keep(key, name, asked, named),
            (_, Named::Is(attr)) if attr.is_directory() => {
                known.keep_own(self.itself, asked, (self.is_directory, attr));
            }
            _ => {}
        }
    }
}

/// Returns what is known of a path: of a link itself, unless a slash follows it. May list the directory, if that
/// should pay.
fn find(at: &At, follow: bool) -> Option<Named> {
    let looked = Looked::new(at)?;
    if looked.named.is_some() {
        walk::wants_attributes(at.mount);
    }
    let mut answer = lock(&KNOWN).map(|mut known| looked.look(&mut known, follow));
    if let (Some(Answer::Lead), Some((key, name))) = (&answer, looked.named) {
        answer = lead(at, key, name);
    }
    if let (Some(Answer::List(cookie)), Some((key, name))) = (&answer, looked.named) {
        answer = list(at, key, name, *cookie);
    }
    match answer? {
        Answer::Known(named @ Named::Is(attr)) if attr.is_directory() => Some(named),
        Answer::Known(Named::Missing) => Some(Named::Missing),
        Answer::Known(named) if !looked.is_directory => Some(named),
        _ => None,
    }
}

/// Notes how long a short request took.
pub(crate) fn took(mount: usize, time: Duration) {
    let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    if let Some(trip) = TRIPS.get(mount).filter(|trip| trip.load(Ordering::Relaxed) > micros) {
        trip.store(micros, Ordering::Relaxed);
    }
}

/// Returns true if requests to the server of a mount are known to take long.
pub(crate) fn is_far(mount: usize) -> bool {
    let trip = TRIPS.get(mount).map_or(0, |trip| trip.load(Ordering::Relaxed));
    walk::is_far(mount) || (FAR..TRIP_MAX).contains(&Duration::from_micros(trip.into()))
}

/// Asks the server something about a path. Notes how long that takes.
fn ask<T>(at: &At, work: impl FnOnce(&File, &[u8]) -> Result<T, Error>) -> (Asked, Result<T, i32>) {
    let asked = Asked::now();
    let answer = at.with(work);
    took(at.mount, asked.when.elapsed());
    (asked, answer)
}

/// The attributes of a name itself, and something else.
type Both<T> = Result<(Attr, Result<T, Error>), Error>;

/// [`ask`] for the attributes of a name itself and for something else, with the same question. Keeps the attributes.
fn ask_both<T>(
    at: &At,
    work: impl FnOnce(&File, &[u8]) -> Both<T>,
) -> Result<(Attr, Result<T, i32>), i32> {
    let (asked, answer) = ask(at, work);
    let named = match &answer {
        Ok((attr, _)) => Some(Named::Is(*attr)),
        Err(libc::ENOENT) => Some(Named::Missing),
        Err(_) => None,
    };
    if let (Some(named), Some(looked)) = (named, Looked::new(at)) {
        looked.keep(asked, named);
    }
    answer.map(|(attr, other)| (attr, other.map_err(remote::number)))
}

/// Returns the attributes of a path, known ones or from the server.
pub(crate) fn stat(at: &At, follow: bool) -> Result<Attr, i32> {
    match find(at, follow) {
        Some(Named::Is(attr)) if !(follow && attr.is_symlink()) => Ok(attr),
        Some(Named::Missing) => Err(libc::ENOENT),
        _ => ask_stat(at, follow),
    }
}

fn ask_stat(at: &At, follow: bool) -> Result<Attr, i32> {
    if is_far(at.mount) {
        return match ask_both(at, File::stat_both)? {
            (_, followed) if follow => followed,
            (attr, _) => Ok(attr),
        };
    }
    let (asked, attr) = ask(at, |base, path| base.stat_path(path, follow));
    let attr = attr?;
    // A slash at the end follows a link that the name alone would not.
    if attr.is_directory()
        && let Some(looked) = Looked::new(at).filter(|looked| !looked.is_directory)
        && let Some(mut known) = lock(&KNOWN)
        && let Some(listed) = listed_of(&mut known, looked.itself, asked)
        && listed.is_valid(asked)
    {
        listed.own = Some((follow, Named::Is(attr), asked.when));
    }
    Ok(attr)
}

/// `access`: whether a path is there is known of far servers, other rights are asked for.
pub(crate) fn access(at: &At, mode: u32, follow: bool) -> Result<(), i32> {
    const ALL: u32 = (libc::R_OK | libc::W_OK | libc::X_OK) as u32;
    if is_far(at.mount) && mode & !ALL == 0 {
        let is_it =
            |named: Named| named.file_type().is_some_and(|of| !follow || of != TYPE_SYMLINK);
        match find(at, follow) {
            Some(Named::Missing) => return Err(libc::ENOENT),
            Some(named) if mode == 0 && is_it(named) => return Ok(()),
            _ if mode == 0 => return ask_stat(at, follow).map(|_| ()),
            _ => {}
        }
    }
    ask(at, |base, path| check_access(base, path, mode, follow)).1
}

/// Checks the access to a path. For a link itself, the link is opened first: the request follows links.
fn check_access(base: &File, path: &[u8], mode: u32, follow: bool) -> Result<(), Error> {
    if follow {
        return base.access(path, mode);
    }
    let flags = open_flag::of_this_machine(libc::O_PATH | libc::O_NOFOLLOW);
    base.open(path, flags, 0)?.access(b"", mode)
}

/// `readlink`: whether a name is a link is known of far servers.
pub(crate) fn read_link(at: &At) -> Result<Vec<u8>, i32> {
    if !is_far(at.mount) {
        return ask(at, |base, path| base.read_link(path)).1;
    }
    match find(at, false) {
        Some(Named::Missing) => Err(libc::ENOENT),
        Some(named) if named.file_type().is_some_and(|of| of != TYPE_SYMLINK) => Err(libc::EINVAL),
        _ => ask_both(at, File::stat_link)?.1,
    }
}

/// Returns true if a path is known to have no extended attributes. Notes that the program asks for them.
pub(crate) fn has_no_xattrs(at: &At, follow: bool) -> bool {
    XATTRS.store(true, Ordering::Relaxed);
    let Some((directory, name)) = split(&at.path) else { return false };
    let (Some(key), Some(mut known)) = (key_of(at, directory), lock(&KNOWN)) else { return false };
    let now = Asked::now();
    let found = listed_of(&mut known, key, now).and_then(|listed| listed.find(name, now));
    let is_it =
        |attr: Attr| attr.flags & attr_flag::NO_XATTRS != 0 && !(follow && attr.is_symlink());
    matches!(found, Some(Named::Is(attr)) if is_it(attr))
}
