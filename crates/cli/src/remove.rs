//! `towline rm`: removes files and trees.
//!
//! Links are never followed: a directory is opened without following one, and everything is
//! removed relative to what was opened.

use crate::remote::{Place, Remotes, flag};
use crate::report::{Failure, Outcome, Report};
use crate::workers::{Queue, together};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_client::{DirEntry, Errno, Group};

const EXAMPLES: &str = "\
Examples:
  towline rm towline://host/data/file
  towline rm -rf towline://host/data/tree

Exit status: 0 all removed, 1 something was not, 2 wrong usage.";

/// Directories of a tree that are removed at once, so that their round trips overlap.
const WORKERS: usize = 16;
/// Removals of files in one directory that are outstanding at once.
const AHEAD: usize = 32;
/// Errors of unlinking that do not tell whether the name is a directory, or exists at all: a read-only file system
/// does not look.
const LOOK_AGAIN: [Errno; 3] = [Errno::EISDIR, Errno::EPERM, Errno::EROFS];
/// Errors that tell that a name does not exist.
const ABSENT: [Errno; 2] = [Errno::ENOENT, Errno::ENOTDIR];
/// `DT_DIR`.
const KIND_DIRECTORY: u8 = 4;
/// `DT_UNKNOWN`.
const KIND_UNKNOWN: u8 = 0;

/// Arguments of `rm`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Remove directories with all their contents.
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Ignore missing files.
    #[arg(short, long)]
    force: bool,
    /// Remove empty directories.
    #[arg(short, long)]
    dir: bool,
    /// What to remove.
    #[arg(required_unless_present = "force", value_name = "URL")]
    urls: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("rm");
    let remotes = Remotes::default();
    for url in &args.urls {
        // A missing export is an error in any case: the URL is wrong.
        let Some(place) = report.check(url, remotes.place(url)) else { continue };
        match remove(&place, args, &report) {
            // Below a file there is nothing either.
            Err(failure) if args.force && ABSENT.iter().any(|errno| failure.is(*errno)) => (),
            Err(failure) => report.error(url, failure),
            Ok(()) => (),
        }
    }
    report.status()
}

fn remove(place: &Place, args: &Args, report: &Report) -> Outcome<()> {
    let last = crate::remote::last_name(place.full());
    if last.is_empty() || last == b"." || last == b".." {
        return Err(Failure::new("the root of an export and \".\" or \"..\" are not removed"));
    }
    let failure = match place.base.unlink(place.path(), false) {
        Ok(()) => return Ok(()),
        Err(error) if LOOK_AGAIN.contains(&error.errno()) => error,
        Err(error) => return Err(error.into()),
    };
    if !place.base.stat_path(place.path(), false)?.is_directory() {
        return Err(failure.into());
    }
    if args.recursive {
        remove_tree(place, report)
    } else if args.dir {
        Ok(place.base.unlink(place.path(), true)?)
    } else {
        Err(Failure::from(Errno::EISDIR).with("use -r"))
    }
}

/// A directory on the way down. It is removed when the last of the directories in it is done.
struct Level {
    /// Where it is removed from.
    place: Place,
    /// The open directory, which stays the same if something above it is moved or replaced.
    inside: Place,
    /// The directory that contains it, if that is removed, too.
    above: Option<Arc<Self>>,
    /// Everything in it that is done was removed.
    complete: AtomicBool,
}

/// A directory in one that is being removed.
struct Below {
    name: Vec<u8>,
    above: Arc<Level>,
}

/// Removes the contents, then the directory. Failures are reported, and the rest is still removed.
fn remove_tree(top: &Place, report: &Report) -> Outcome<()> {
    let queue = Queue::default();
    enter(top.clone(), None, &queue, report)?;
    together(WORKERS, || {
        while let Some((Below { name, above }, _under_way)) = queue.take() {
            match enter(above.inside.child(&name), Some(above.clone()), &queue, report) {
                Err(failure) if !failure.is(Errno::ENOENT) => above.failed(&name, failure, report),
                _ => (),
            }
            leave(above, report);
        }
    });
    // Anything left was reported when it failed.
    Ok(())
}

/// Called by everyone who is done with a directory or with one in it. The last one removes it, and may then be
/// the last one for the directory above it.
fn leave(level: Arc<Level>, report: &Report) {
    let mut level = Some(level);
    while let Some(Level { place, inside, above, complete }) = level.and_then(Arc::into_inner) {
        drop(inside);
        let removed = complete.into_inner() && remove_emptied(&place, report);
        // It keeps the directory above it open.
        drop(place);
        if let (false, Some(above)) = (removed, &above) {
            above.complete.store(false, Ordering::Relaxed);
        }
        level = above;
    }
}

fn remove_emptied(place: &Place, report: &Report) -> bool {
    match place.base.unlink(place.path(), true) {
        Ok(()) => true,
        Err(error) if error.errno() == Errno::ENOENT => true,
        Err(error) => {
            report.error(place, error.into());
            false
        }
    }
}

/// Opens a directory, removes all files in it, and leaves the directories in it to the queue. One that may not be
/// read is removed if it is empty.
fn enter(
    place: Place,
    above: Option<Arc<Level>>,
    queue: &Queue<Below>,
    report: &Report,
) -> Outcome<()> {
    let flags = flag::DIRECTORY | flag::NO_FOLLOW;
    // All names are collected first: removing while listing may skip some.
    let (directory, entries) = match place.base.open_list_all(place.path(), flags, false) {
        Err(error)
            if error.errno() == Errno::EACCES && place.base.unlink(place.path(), true).is_ok() =>
        {
            return Ok(());
        }
        listed => listed?,
    };
    let is_directory = |entry: &DirEntry| match entry.file_type {
        KIND_UNKNOWN => {
            directory.stat_path(&entry.name, false).is_ok_and(|attr| attr.is_directory())
        }
        kind => kind == KIND_DIRECTORY,
    };
    let (below, files): (Vec<_>, Vec<_>) = entries.into_iter().partition(is_directory);
    let inside = place.clone().opened(Arc::new(directory));
    let level = Arc::new(Level { place, inside, above, complete: AtomicBool::new(true) });
    level.remove_files(&files, report);
    let below = below.into_iter().map(|entry| Below { name: entry.name, above: level.clone() });
    queue.push(below.collect());
    leave(level, report);
    Ok(())
}

impl Level {
    fn remove_files(&self, files: &[DirEntry], report: &Report) {
        let mut group = Group::new();
        for (index, file) in files.iter().enumerate() {
            match self.inside.base.start_unlink(&file.name) {
                Ok(operation) => group.add(operation, index as u64),
                Err(error) => self.failed(&file.name, error.into(), report),
            }
            if group.len() >= AHEAD {
                self.take(&mut group, files, report);
            }
        }
        while !group.is_empty() {
            self.take(&mut group, files, report);
        }
    }

    fn take(&self, group: &mut Group<()>, files: &[DirEntry], report: &Report) {
        let Some((index, Err(error))) = group.wait_any() else { return };
        if error.errno() != Errno::ENOENT {
            self.failed(&files[index as usize].name, error.into(), report);
        }
    }

    fn failed(&self, name: &[u8], failure: Failure, report: &Report) {
        self.complete.store(false, Ordering::Relaxed);
        report.error(self.place.child(name), failure);
    }
}
