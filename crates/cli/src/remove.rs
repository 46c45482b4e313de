//! `towline rm`: removes files and trees.
//!
//! Links are never followed: a directory is opened without following one, and everything is
//! removed relative to what was opened.

use crate::remote::{Place, Remotes};
use crate::report::{Failure, Outcome, Report};
use crate::simple::open_directory;
use std::process::ExitCode;
use std::sync::Arc;
use towline_client::{Errno, File, Group};

const EXAMPLES: &str = "\
Examples:
  towline rm towline://host/data/file
  towline rm -rf towline://host/data/tree

Exit status: 0 all removed, 1 something was not, 2 wrong usage.";

/// Removals outstanding at once.
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
        match remotes.place(url).and_then(|place| remove(&place, args, &report)) {
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

/// A directory on the way down, and the directories in it that are still to be removed.
struct Level {
    /// Where it is removed from.
    place: Place,
    /// The open directory, which stays the same if something above it is moved or replaced.
    inside: Place,
    directory: Arc<File>,
    below: Vec<Vec<u8>>,
    complete: bool,
}

/// Removes the contents, then the directory. Failures are reported, and the rest is still removed.
fn remove_tree(top: &Place, report: &Report) -> Outcome<()> {
    let mut levels = Vec::from_iter(enter_unless_removed(top, report)?);
    while let Some(level) = levels.last_mut() {
        if let Some(name) = level.below.pop() {
            let place = level.inside.child(&name);
            match enter_unless_removed(&place, report) {
                Ok(level) => levels.extend(level),
                Err(failure) if failure.is(Errno::ENOENT) => (),
                Err(failure) => {
                    level.complete = false;
                    report.error(place, failure);
                }
            }
            continue;
        }
        // The loop only runs while there is a level.
        let Some(level) = levels.pop() else { break };
        let Level { place, inside, directory, complete, .. } = level;
        drop((inside, directory));
        let removed = complete && leave(&place, report);
        if let Some(above) = levels.last_mut() {
            above.complete &= removed;
        }
    }
    // Anything left was reported when it failed.
    Ok(())
}

fn leave(place: &Place, report: &Report) -> bool {
    match place.base.unlink(place.path(), true) {
        Ok(()) => true,
        Err(error) if error.errno() == Errno::ENOENT => true,
        Err(error) => {
            report.error(place, error.into());
            false
        }
    }
}

/// [`enter`]. Returns `None` if the directory is gone: one that may not be read is removed if it is empty.
fn enter_unless_removed(place: &Place, report: &Report) -> Outcome<Option<Level>> {
    match enter(place.clone(), report) {
        Err(failure)
            if failure.is(Errno::EACCES) && place.base.unlink(place.path(), true).is_ok() =>
        {
            Ok(None)
        }
        entered => entered.map(Some),
    }
}

/// Opens a directory and removes all files in it.
fn enter(place: Place, report: &Report) -> Outcome<Level> {
    let directory = Arc::new(open_directory(&place)?);
    let inside = place.clone().opened(directory.clone());
    let mut level = Level { place, inside, directory, below: Vec::new(), complete: true };
    // All names are collected first: removing while listing may skip some.
    let entries = level.directory.list_all(false)?;
    let mut files = Vec::with_capacity(entries.len());
    for entry in entries {
        let is_directory = match entry.file_type {
            KIND_UNKNOWN => {
                level.directory.stat_path(&entry.name, false).is_ok_and(|attr| attr.is_directory())
            }
            kind => kind == KIND_DIRECTORY,
        };
        if is_directory { level.below.push(entry.name) } else { files.push(entry.name) }
    }
    let mut group = Group::new();
    for (index, name) in files.iter().enumerate() {
        match level.directory.start_unlink(name) {
            Ok(operation) => group.add(operation, index as u64),
            Err(error) => level.failed(name, error.into(), report),
        }
        if group.len() >= AHEAD {
            level.take(&mut group, &files, report);
        }
    }
    while !group.is_empty() {
        level.take(&mut group, &files, report);
    }
    Ok(level)
}

impl Level {
    fn take(&mut self, group: &mut Group<()>, files: &[Vec<u8>], report: &Report) {
        let Some((index, Err(error))) = group.wait_any() else { return };
        if error.errno() != Errno::ENOENT {
            self.failed(&files[index as usize], error.into(), report);
        }
    }

    fn failed(&mut self, name: &[u8], failure: Failure, report: &Report) {
        self.complete = false;
        report.error(self.place.child(name), failure);
    }
}
