//! Finds obstacles for a program from its first bytes and its permissions.

use crate::report::{Failure, Outcome};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use towline_instance::program::{FIRST_BYTES, Form, Obstacle};

/// Maximum depth of interpreters, as in Linux.
const INTERPRETERS_MAX: usize = 5;

/// The result of examining a program.
pub(crate) struct Verdict {
    /// The program.
    pub(crate) path: PathBuf,
    /// The interpreters of a script, up to the binary.
    pub(crate) run_by: Vec<PathBuf>,
    /// What replaces a script's name in front of its arguments when it is executed: the last interpreter, the
    /// arguments that the others add, and the script. Empty for a binary; `None` if `env` starts the
    /// interpreter.
    pub(crate) line: Option<Vec<OsString>>,
    /// The program or the last interpreter is a binary.
    pub(crate) is_binary: bool,
    /// Why the program does not work, and which of these files is the reason.
    pub(crate) obstacle: Option<(Obstacle, PathBuf)>,
}

/// Returns the file that a shell would execute for this name: the name itself if it contains a slash,
/// otherwise a file found in `PATH`.
pub(crate) fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name));
    }
    let folders = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/bin:/usr/bin"));
    let is_program = |path: &PathBuf| {
        std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.mode() & 0o111 != 0)
    };
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(is_program)
}

/// Examines a program.
///
/// # Errors
/// Fails if the program or an interpreter cannot be read or executed.
pub(crate) fn examine(path: &Path) -> Outcome<Verdict> {
    let mut verdict = Verdict {
        path: path.to_owned(),
        run_by: Vec::new(),
        line: Some(Vec::new()),
        is_binary: false,
        obstacle: None,
    };
    let mut at = path.to_owned();
    while verdict.run_by.len() < INTERPRETERS_MAX {
        match look(&at)? {
            (Form::Other, _) => break,
            (Form::Script(interpreter, option), _) => {
                let next = PathBuf::from(OsStr::from_bytes(&interpreter));
                verdict.run_by.push(next.clone());
                if let Some(line) = &mut verdict.line {
                    // In place of the script's own name.
                    line.splice(..line.len().min(1), [at.into_os_string()]);
                    let option = Some(OsString::from_vec(option.clone()));
                    let option = option.filter(|option| !option.is_empty());
                    line.splice(0..0, [next.clone().into_os_string()].into_iter().chain(option));
                }
                at = next;
                // The program that `env` starts runs the script.
                let started = option.split(u8::is_ascii_whitespace).next().unwrap_or_default();
                let started = started.strip_prefix(b"-S").unwrap_or(started);
                let is_env = at.file_name().is_some_and(|name| name == "env");
                if is_env && let Some(found) = find(OsStr::from_bytes(started)) {
                    verdict.run_by.push(found.clone());
                    verdict.line = None;
                    at = found;
                }
            }
            (Form::Binary(binary), rights) => {
                let name = at.file_name().unwrap_or_default().as_bytes();
                verdict.is_binary = true;
                // A program that gains rights must not be hosted, whatever else it is.
                let found = rights.or_else(|| Obstacle::of(&binary, name));
                verdict.obstacle = found.map(|obstacle| (obstacle, at.clone()));
                break;
            }
        }
    }
    Ok(verdict)
}

/// Returns the form of a file, and the obstacle that its permissions make.
fn look(path: &Path) -> Outcome<(Form, Option<Obstacle>)> {
    let about = |error: std::io::Error| Failure::from(error).about(path.display());
    let status = std::fs::metadata(path).map_err(about)?;
    if !status.is_file() {
        return Err(Failure::new("not a regular file").about(path.display()));
    }
    let mut first = Vec::with_capacity(FIRST_BYTES);
    if status.mode() & 0o111 == 0 {
        return Err(Failure::new("not executable").about(path.display()));
    }
    let file = File::open(path).map_err(about)?;
    let mut name = [0u8; 64];
    let capabilities = rustix::fs::fgetxattr(&file, "security.capability", &mut name[..]).is_ok();
    file.take(FIRST_BYTES as u64).read_to_end(&mut first).map_err(about)?;
    let user = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let rights =
        Obstacle::of_rights((status.mode(), status.uid(), status.gid()), capabilities, user);
    Ok((Form::of(&first), rights))
}
