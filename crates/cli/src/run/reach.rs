//! Detects programs that the library cannot reach, and tells the user about them.

use crate::check::{Verdict, examine, find};
use crate::report::{Outcome, Report};
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use towline_client::Errno;
use towline_instance::notes::Note;
use towline_instance::program::Obstacle;
use towline_instance::{NOTICES, mentions};

/// Whether the library reaches the command, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// The library reaches it, or the command cannot be executed.
    Reached,
    /// As a guest: the program, and its arguments starting with its name.
    Hosted(PathBuf, Vec<OsString>),
    /// The library does not reach it.
    Unreached,
    /// The library does not reach it, and the command must not start, since an argument names one of the
    /// prefixes.
    Refused,
}

/// Shell command that replaces the shell by the command in its arguments. A program whose directory can be
/// searched and which is not there is reported as a local one is; of other failures, the shell knows more.
const EXECUTE: &str = "\
    if [ ! -e \"$0\" ] && [ -x \"${0%/*}\" ]; then \
    printf 'towline: run: %s: no such file or directory\\n' \"$0\" >&2; exit 127; fi; \
    exec \"$0\" \"$@\"";

/// Returns the command to start. The kernel finds neither a remote program nor the remote interpreter of a
/// script. If either is possible, a local shell executes the command, and finds what any program of the run
/// finds.
pub(super) fn beginning(command: &[OsString], prefixes: &[&[u8]]) -> Vec<OsString> {
    if !may_be_remote(&command[0], prefixes) {
        return command.to_vec();
    }
    let shell = ["/bin/sh", "-c", EXECUTE].map(OsString::from);
    shell.into_iter().chain(command.to_vec()).collect()
}

fn may_be_remote(name: &OsStr, prefixes: &[&[u8]]) -> bool {
    let is_below = |path: &Path| {
        // Relative paths start at the working directory, which may be below the parent of a prefix.
        let Ok(path) = std::path::absolute(path) else { return false };
        let path = lexically(&path);
        prefixes.iter().any(|prefix| path.starts_with(Path::new(OsStr::from_bytes(prefix))))
    };
    if name.as_bytes().contains(&b'/') {
        if is_below(Path::new(name)) {
            return true;
        }
    } else if std::env::var_os("PATH")
        .is_some_and(|folders| std::env::split_paths(&folders).any(|folder| is_below(&folder)))
    {
        return true;
    }
    // A local link or script that refers to something that does not exist locally.
    let Some(path) = find(name) else { return false };
    path.symlink_metadata().is_ok() && is_missing(examine(&path))
}

/// Returns true if a program or its interpreter does not exist.
fn is_missing(examined: Outcome<Verdict>) -> bool {
    examined.is_err_and(|failure| failure.is(Errno::ENOENT))
}

/// Resolves `..` in the path by name only.
fn lexically(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}

/// Examines the command before it is started.
pub(super) fn may_start(command: &[OsString], prefixes: &[&[u8]]) -> Reach {
    // A command that is not found fails at its start, with the right status.
    let Some(path) = find(&command[0]) else { return Reach::Reached };
    let Ok(Verdict { obstacle: Some((obstacle, program)), line, .. }) = examine(&path) else {
        return Reach::Reached;
    };
    if obstacle.can_be_hosted()
        && towline_instance::can_host()
        && let Some(line) = line
    {
        let before = if line.is_empty() { vec![command[0].clone()] } else { line };
        return Reach::Hosted(program, before.into_iter().chain(command[1..].to_vec()).collect());
    }
    let names = |argument: &OsString| prefixes.iter().any(|p| mentions(argument.as_bytes(), p));
    let is_named = command[1..].iter().any(names);
    tell(obstacle, &program, is_named);
    if is_named { Reach::Refused } else { Reach::Unreached }
}

fn tell(obstacle: Obstacle, program: &Path, is_refused: bool) {
    let refused = if is_refused { "; not started" } else { "" };
    let text = format!("{}{refused}: {}", obstacle.what(), obstacle.instead());
    Report::new("run").remark(format_args!("{} {text}", program.display()));
}

/// Messages of processes of the run that are printed at once.
pub(super) struct Notices {
    path: PathBuf,
    file: Option<File>,
    /// The beginning of an incomplete line.
    rest: Vec<u8>,
    /// Messages printed about programs that were started anyway; some are started again and again.
    told: HashSet<Vec<u8>>,
}

impl Notices {
    /// Reads the notices of a run with this folder of placeholders.
    pub(super) fn new(placeholders: &Path) -> Self {
        Self {
            path: placeholders.join(NOTICES),
            file: None,
            rest: Vec::new(),
            told: HashSet::new(),
        }
    }

    /// Prints new messages.
    pub(super) fn print(&mut self) {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else { return };
        // The file is in memory, so an error would be the machine's; whatever was read is printed.
        let _ = file.read_to_end(&mut self.rest);
        while let Some(end) = self.rest.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            let (obstacle, program, is_refused) = match Note::parse(&line[..end]) {
                Some(Note::Refused { obstacle, program }) => (obstacle, program, true),
                Some(Note::Lost { path, is_unwritten }) => {
                    super::lost::tell(&path, is_unwritten);
                    continue;
                }
                Some(Note::Unreached { obstacle, program }) if self.told.insert(line) => {
                    (obstacle, program, false)
                }
                _ => continue,
            };
            if let Some(obstacle) = Obstacle::from_code(&obstacle) {
                let program = Path::new(std::ffi::OsStr::from_bytes(&program));
                tell(obstacle, program, is_refused);
            }
        }
    }
}
