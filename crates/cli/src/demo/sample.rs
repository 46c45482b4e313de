//! The files that the tour measures: a sample tree, or those found in the user's directory.

use crate::report::{Failure, Outcome};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const DIRECTORIES: usize = 20;
const FILES: usize = 100;
const FILE_BYTES: usize = 4096;
const LARGE_BYTES: usize = 64 << 20;
/// What the sample tree occupies.
pub(super) const BYTES: u64 = (DIRECTORIES * FILES * FILE_BYTES + LARGE_BYTES) as u64;
/// A survey, and so the measured scan, ends after this many entries.
const ENTRIES_MAX: usize = 20_000;
/// Maximum number of different files, which are used in turn.
const FILES_MAX: usize = 500;

/// Creates the sample tree: 2,000 files of 4 KiB and one of 64 MiB.
pub(super) fn make(top: &Path) -> Outcome<()> {
    for directory in 0..DIRECTORIES {
        let directory = top.join(format!("directory{directory:02}"));
        fs::create_dir_all(&directory)?;
        for file in 0..FILES {
            fs::write(directory.join(format!("file{file:03}")), [b'x'; FILE_BYTES])?;
        }
    }
    let large: Vec<u8> = (0..LARGE_BYTES).map(|i| (i / 4093) as u8).collect();
    Ok(fs::write(top.join("large"), large)?)
}

/// Files and directories to measure with. Paths are relative to the top.
#[derive(Default)]
pub(super) struct Plan {
    /// The directory served.
    pub(super) top: PathBuf,
    /// Number of entries found, including directories.
    pub(super) entries: usize,
    /// Directories found, the top first.
    pub(super) directories: Vec<PathBuf>,
    /// Some regular files that can be read.
    pub(super) files: Vec<PathBuf>,
    /// The directory with the most entries, and their number.
    pub(super) fullest: (PathBuf, usize),
    /// The largest file, and its length.
    pub(super) largest: (PathBuf, u64),
}

/// Walks a directory breadth first.
pub(super) fn survey(top: &Path) -> Outcome<Plan> {
    let mut plan = Plan { top: top.to_owned(), ..Plan::default() };
    plan.directories.push(PathBuf::new());
    let mut next = 0;
    while next < plan.directories.len() && plan.entries < ENTRIES_MAX {
        let directory = plan.directories[next].clone();
        next += 1;
        // A directory that cannot be listed here is skipped on both sides.
        let Ok(entries) = fs::read_dir(top.join(&directory)) else { continue };
        let mut count = 0;
        for entry in entries.flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            count += 1;
            let path = directory.join(entry.file_name());
            if metadata.is_dir() {
                plan.directories.push(path);
            } else if metadata.is_file() && fs::File::open(entry.path()).is_ok() {
                if metadata.len() > plan.largest.1 {
                    plan.largest = (path.clone(), metadata.len());
                }
                if plan.files.len() < FILES_MAX {
                    plan.files.push(path);
                }
            }
        }
        plan.entries += count;
        if count > plan.fullest.1 {
            plan.fullest = (directory, count);
        }
    }
    // The scan walks exactly the directories that were listed here.
    plan.directories.truncate(next);
    if plan.files.is_empty() {
        let shown = crate::text::escaped(top.as_os_str().as_bytes());
        return Err(Failure::new("has no readable file; try another").about(shown));
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_survey_finds_what_is_there() {
        let scratch = super::super::Scratch::new("survey", 0).unwrap();
        let top = scratch.path.join("top");
        fs::create_dir_all(top.join("a/b")).unwrap();
        assert!(survey(&top).is_err(), "nothing to read");
        fs::write(top.join("a/one"), b"1").unwrap();
        fs::write(top.join("a/b/two"), b"22").unwrap();
        let plan = survey(&top).unwrap();
        assert_eq!((plan.entries, plan.directories.len(), plan.files.len()), (4, 3, 2));
        assert_eq!(plan.largest, (PathBuf::from("a/b/two"), 2));
        assert_eq!(plan.fullest, (PathBuf::from("a"), 2));
    }
}
