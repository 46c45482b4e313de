//! Copies many files: workers take files and directories from one queue.

use super::attributes::{self, Parent};
use super::end::{End, FileSystem, Listed, Status};
use super::file::{Existing, Files, check_replaceable};
use super::part;
use crate::report::{Failure, Outcome, Report};
use crate::workers::{Queue, together};
use std::collections::hash_map::{Entry, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use towline_client::{Errno, SetAttr};
use towline_wire::attr::TYPE_SYMLINK;

/// A file or directory to copy.
#[derive(Clone)]
pub(super) struct Job {
    source: Arc<End>,
    target: Arc<End>,
    /// Name in both directories; `None` if the ends are the files themselves.
    name: Option<Vec<u8>>,
    status: Status,
    existing: Existing,
    /// The directory in which the copy is made.
    parent: Arc<Parent>,
}

impl Job {
    /// Makes a job from an argument of the command line.
    pub(super) fn top(source: End, target: End, status: Status) -> Self {
        let (source, target) = (Arc::new(source), Arc::new(target));
        let existing = Existing::Unknown;
        let parent = Arc::default();
        Self { source, target, name: None, status, existing, parent }
    }

    /// Returns the argument that is copied.
    pub(super) fn source(&self) -> &End {
        &self.source
    }

    /// Returns the place of the copy of an argument.
    pub(super) fn target(&self) -> &End {
        &self.target
    }

    /// Returns true if this copies a directory.
    pub(super) fn is_directory(&self) -> bool {
        self.status.attr.is_directory()
    }

    fn ends(&self) -> (End, End) {
        match &self.name {
            Some(name) => (self.source.child(name), self.target.child(name)),
            None => ((*self.source).clone(), (*self.target).clone()),
        }
    }
}

/// A directory whose attributes are set once everything in it is copied.
struct Directory {
    source: End,
    /// Not shortened, so that the directory that holds it can be named, too.
    target: End,
    status: Status,
    /// A mode to set at the end, because it would prevent writing in the directory.
    mode: Option<u32>,
    /// The directory in which this copy made it; `None` if it existed before.
    made_in: Option<Arc<Parent>>,
}

/// The copy of all arguments.
pub(super) struct Tree<'a> {
    files: &'a Files,
    report: &'a Report,
    recursive: bool,
    queue: Queue<Job>,
    directories: Mutex<Vec<Directory>>,
    /// The first copy that a list makes of each file with several names, unless that copy failed.
    first_names: Mutex<HashMap<(FileSystem, u64), Arc<End>>>,
    /// The further names of such files.
    more_names: Mutex<Vec<Job>>,
    /// Directories that this copy writes to, so that it does not copy its own output.
    targets: Mutex<Vec<(Status, End)>>,
}

impl<'a> Tree<'a> {
    /// Makes a copy without jobs.
    pub(super) fn new(files: &'a Files, report: &'a Report, recursive: bool) -> Self {
        Self {
            files,
            report,
            recursive,
            queue: Queue::default(),
            directories: Mutex::default(),
            first_names: Mutex::default(),
            more_names: Mutex::default(),
            targets: Mutex::default(),
        }
    }

    /// Copies everything, one list of jobs after the other, with this number of workers.
    pub(super) fn run(&self, mut lists: Vec<Vec<Job>>, workers: usize) {
        share_parents(&mut lists);
        for job in lists.iter().flatten() {
            self.files.progress.found(1, job.status.attr.data_bytes());
            self.files.not_parts.note(&job.target);
        }
        for jobs in lists {
            self.queue.push(jobs);
            together(workers, || self.work());
            let more_names = std::mem::take(&mut *locked(&self.more_names));
            for job in more_names {
                self.another_name(&job);
            }
            // The next list may replace these copies by others.
            locked(&self.first_names).clear();
        }
        // Deepest first: a directory's times are set after all changes in it.
        for directory in locked(&self.directories).drain(..).rev() {
            let result = self.finish_directory(&directory);
            self.report.check(&directory.target, result);
        }
    }

    fn work(&self) {
        while let Some((job, _under_way)) = self.queue.take() {
            if !self.files.interrupt.came() {
                let (source, target) = job.ends();
                let result = self.copy(&job, source.clone(), target);
                self.report.check(&source, result);
                self.files.progress.file();
            }
        }
    }

    fn copy(&self, job: &Job, source: End, target: End) -> Outcome<()> {
        let attr = &job.status.attr;
        if attr.is_directory() {
            return self.directory(job, source, target);
        }
        if self.files.wanted.links && attr.links > 1 {
            return self.first_name(job, &source, &target);
        }
        self.one(job, &source, &target)
    }

    fn one(&self, job: &Job, source: &End, target: &End) -> Outcome<()> {
        let attr = &job.status.attr;
        if attr.is_file() && !(job.name.is_none() && self.goes_to_device(target)) {
            return self.files.copy(source, target, &job.status, job.existing, &job.parent);
        }
        if attr.is_file() || !self.recursive {
            return self.files.stream(source, target, &job.status, &job.parent);
        }
        if attr.is_symlink() {
            return self.symlink(source, target, &job.status);
        }
        self.special(job, source, target)
    }

    fn goes_to_device(&self, target: &End) -> bool {
        let there = target.status_if_any(true).ok().flatten();
        there.is_some_and(|there| target.is_written_in_place(&there))
    }

    /// Copies a file with several names, unless its copy was started under another name.
    fn first_name(&self, job: &Job, source: &End, target: &End) -> Outcome<()> {
        let identity = job.status.identity();
        match locked(&self.first_names).entry(identity) {
            Entry::Occupied(_) => {
                locked(&self.more_names).push(job.clone());
                return Ok(());
            }
            Entry::Vacant(first) => first.insert(Arc::new(target.clone())),
        };
        self.one(job, source, target).inspect_err(|_| {
            // The target is not a copy, so the other names must not become links to it.
            locked(&self.first_names).remove(&identity);
        })
    }

    /// Links a further name to the copy. If the copy under the first name failed, copies under this one.
    fn another_name(&self, job: &Job) {
        let (source, target) = job.ends();
        let first = locked(&self.first_names).get(&job.status.identity()).cloned();
        match first {
            Some(first) => {
                let linked = another_name(&job.status, &first, &target, self.files.run);
                self.report.check(&target, linked);
                self.files.progress.bytes(job.status.attr.data_bytes());
            }
            None if self.files.interrupt.came() => {}
            None => {
                let copied = self.first_name(job, &source, &target);
                self.report.check(&source, copied);
            }
        }
    }

    fn directory(&self, job: &Job, source: End, target: End) -> Outcome<()> {
        if self.is_target(&source, &job.status)? {
            return Err(Failure::new("this directory is the target: cannot copy it into itself"));
        }
        let source_follow = job.status.is_followed;
        let source = source.shortened(source_follow)?;
        let wanted = &self.files.wanted;
        let new = match target.make_directory(wanted.mode(&job.status.attr, None) | 0o700) {
            Ok(()) => true,
            Err(failure) if failure.is(Errno::EEXIST) => false,
            Err(failure) => return Err(failure.about(&target)),
        };
        // Links in the target are not followed.
        let place = target;
        let target = place.clone().shortened(false).map_err(|f| f.about(&place))?;
        let mode = wanted.mode(&job.status.attr, None);
        let mut closed = (new && mode & 0o700 != 0o700).then_some(mode);
        if !new || job.name.is_none() {
            let there = target.status(false).map_err(|f| f.about(&target))?;
            if !there.attr.is_directory() {
                let failure = Failure::new("is not a directory and cannot be replaced by one");
                return Err(failure.about(&target));
            }
            if job.name.is_none() {
                locked(&self.targets).push((there, target.clone()));
            }
            let bits = there.attr.mode & 0o7777;
            // A directory to which an interrupted copy has already given a mode without rights of the owner.
            if self.files.resume && !new && bits & 0o700 != 0o700 && bits & 0o777 == mode & 0o777 {
                let open = SetAttr { mode: Some(bits | 0o700), ..SetAttr::default() };
                closed = target.set_attr(&open).is_ok().then_some(bits);
            }
        }
        let made_in = new.then(|| job.parent.clone());
        // A new directory inherits the default list of its parent.
        let parent = made_in.clone().unwrap_or_default();
        locked(&self.directories).push(Directory {
            source: source.clone(),
            target: place,
            status: job.status,
            mode: closed,
            made_in,
        });
        // Only now, so that a target inside the source is listed, too: then it is found and told.
        let listed = source.list(source_follow, |failure| self.report.error(&source, failure))?;
        for entry in &listed {
            self.files.not_parts.note(&target.child(&entry.name));
        }
        let mut there: HashMap<_, _> = if self.files.resume && !new {
            // What cannot be looked at is told when it is written.
            let names = target.list(false, drop).map_err(|f| f.about(&target))?;
            self.remove_parts(&target, &listed, &names)?;
            names.into_iter().map(|entry| (entry.name, entry.status)).collect()
        } else {
            HashMap::new()
        };
        let known = new || self.files.resume;
        let (source, target) = (Arc::new(source), Arc::new(target));
        let sizes = listed.iter().map(|entry| entry.status.attr.data_bytes());
        let total = sizes.fold(0, u64::saturating_add);
        self.files.progress.found(listed.len() as u64, total);
        let children = listed.into_iter().rev().map(|entry| Job {
            source: source.clone(),
            target: target.clone(),
            status: entry.status,
            existing: match there.remove(&entry.name) {
                None if !known => Existing::Unknown,
                found => found.into(),
            },
            name: Some(entry.name),
            parent: parent.clone(),
        });
        self.queue.push(children.collect());
        Ok(())
    }

    /// Removes parts that killed copies left of the files that are copied now.
    fn remove_parts(&self, target: &End, listed: &[Listed], there: &[Listed]) -> Outcome<()> {
        let names = || listed.iter().map(|entry| entry.name.as_slice());
        let left = |name: &[u8]| part::is_of_another_run(name, self.files.run, names());
        for entry in there.iter().filter(|entry| left(&entry.name)) {
            let part = target.child(&entry.name);
            if !self.files.not_parts.has(&part) {
                match part.unlink() {
                    Err(failure) if !failure.is(Errno::ENOENT) => return Err(failure.about(part)),
                    _ => (),
                }
            }
        }
        Ok(())
    }

    /// Returns true if this copy writes to a source directory, even if that is reached in another way (a
    /// local path and a URL, or two transports).
    fn is_target(&self, source: &End, status: &Status) -> Outcome<bool> {
        for (there, target) in locked(&self.targets).iter() {
            let is_one = match there.is_seen_with(status) {
                true => there.identity() == status.identity(),
                false => there.attr.inode == status.attr.inode && is_one_directory(source, target)?,
            };
            if is_one {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn finish_directory(&self, directory: &Directory) -> Outcome<()> {
        let (wanted, attr) = (&self.files.wanted, &directory.status.attr);
        let (source, target) = (&directory.source, &directory.target);
        if wanted.xattr {
            attributes::copy_xattrs(source, attr, target, self.report)?;
        }
        let mut set = wanted.rest(attr, None);
        set.mode = set.mode.or(directory.mode);
        if wanted.mode {
            let has_list = match &directory.made_in {
                Some(parent) => parent.hands_down(target),
                None => attributes::has_list(target),
            }?;
            if let Some(list) = wanted.access_list((source, attr), None, || Ok(has_list))? {
                set = list.hand_down(target, set);
            }
            attributes::copy_default_list(source, attr, target, has_list)?;
        }
        attributes::set(target, &set)
    }

    fn symlink(&self, source: &End, target: &End, status: &Status) -> Outcome<()> {
        let leads_to = source.read_link()?;
        let made = match target.symlink(&leads_to) {
            Err(failure) if failure.is(Errno::EEXIST) => {
                let there = target.status(false).map_err(|f| f.about(target))?;
                if there.attr.is_directory() {
                    let failure = Failure::new("is a directory and cannot be replaced by a link");
                    return Err(failure.about(target));
                }
                if source.status(true).is_ok_and(|leads_to| leads_to.is_same(&there)) {
                    return Err(Failure::new("is the file that the link leads to").about(target));
                }
                let same = there.attr.file_type() == TYPE_SYMLINK
                    && target.read_link().is_ok_and(|there| there == leads_to);
                let make = |beside: &End| beside.symlink(&leads_to);
                if same { Ok(()) } else { replace(target, self.files.run, make) }
            }
            result => result,
        };
        made.and_then(|()| {
            match attributes::set(target, &self.files.wanted.rest_of_link(&status.attr)) {
                // Not every store can set the times of a link, and programs rarely need them.
                Err(failure) if failure.is(Errno::EOPNOTSUPP) => Ok(()),
                result => result,
            }
        })
        .map_err(|failure| failure.about(target))
    }

    fn special(&self, job: &Job, source: &End, target: &End) -> Outcome<()> {
        let attr = &job.status.attr;
        let mode = attr.file_type() | self.files.wanted.mode(attr, None);
        let new = match target.make_node(mode, attr.rdev) {
            Ok(()) => true,
            Err(failure) if failure.is(Errno::EEXIST) => {
                let there = target.status(false).map_err(|f| f.about(target))?;
                if there.attr.is_directory() {
                    let text = "is a directory and cannot be replaced by a fifo, socket or device";
                    return Err(Failure::new(text).about(target));
                }
                let is_other =
                    there.attr.file_type() != attr.file_type() || there.attr.rdev != attr.rdev;
                if is_other {
                    let make = |beside: &End| beside.make_node(mode, attr.rdev);
                    replace(target, self.files.run, make).map_err(|f| f.about(target))?;
                }
                is_other
            }
            // A missing right to the directory is an error, as it would be for a file.
            Err(failure) if failure.is_refusal() && !failure.is(Errno::EACCES) => {
                let kind = crate::text::type_name(attr.mode);
                self.report.warning(source, format_args!("{kind} skipped: {failure}"));
                return Ok(());
            }
            Err(failure) => return Err(failure.about(target)),
        };
        let has_list =
            || if new { job.parent.hands_down(target) } else { attributes::has_list(target) };
        let mut set: SetAttr = self.files.wanted.rest(attr, None);
        if let Some(list) = self.files.wanted.access_list((source, attr), None, has_list)? {
            set = list.hand_down(target, set);
        }
        attributes::set(target, &set).map_err(|failure| failure.about(target))
    }
}

/// Lets all arguments that are copied into one directory share its [`Parent`].
fn share_parents(lists: &mut [Vec<Job>]) {
    let mut parents: HashMap<String, Arc<Parent>> = HashMap::new();
    for job in lists.iter_mut().flatten() {
        // The root of an export has no parent, and is never made.
        if let Ok(directory) = job.target.sibling(b".") {
            job.parent = parents.entry(directory.to_string()).or_default().clone();
        }
    }
}

/// Links a further name of the source to its first copy.
fn another_name(source: &Status, first: &End, new: &End, run: u32) -> Outcome<()> {
    let link = |new: &End| {
        first.link(new).map_err(|failure| match failure.is(Errno::EXDEV) {
            true => failure.with(
                "a hard link must stay on its file system; without --preserve=links it is a copy",
            ),
            false => failure,
        })
    };
    match link(new) {
        Err(failure) if failure.is(Errno::EEXIST) => {
            let (one, other) = (first.status(false)?, new.status(false)?);
            if one.identity() == other.identity() {
                return Ok(());
            }
            if one.attr.is_file() {
                check_replaceable(source, &other)?;
            }
            replace(new, run, link)
        }
        result => result,
    }
}

/// Makes something beside a file and renames it over the file. If it cannot be made, as on file systems
/// without links, the file stays.
fn replace(target: &End, run: u32, make: impl FnOnce(&End) -> Outcome<()>) -> Outcome<()> {
    let beside = target.sibling(&part::unique_name(target.name(), run))?;
    make(&beside)?;
    beside.rename(target).inspect_err(|_| {
        // The error of the rename matters, not that of the clean-up.
        let _ = beside.unlink();
    })
}

/// Returns true if a source and a target with the same inode number are one directory, seen from two sides:
/// then both were changed in the same nanosecond. Other workers may change the target meanwhile, so this
/// compares the source with the target before and after, until one is equal or the target did not change
/// between the two.
fn is_one_directory(source: &End, target: &End) -> Outcome<bool> {
    let look = |end: &End, follow| end.status(follow).map(|status| status.seen());
    let mut before = look(target, true)?;
    loop {
        let seen = look(source, false)?;
        let after = look(target, true)?;
        if seen == before || seen == after {
            return Ok(true);
        }
        if before == after {
            return Ok(false);
        }
        before = after;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
