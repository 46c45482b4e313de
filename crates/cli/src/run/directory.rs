//! The private directory of a run, and the preloaded library as a file.

use crate::report::{Failure, Outcome};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, flock, rmdir, unlink, unlinkat};
use rustix::io::Errno;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use towline_instance::{
    FOLDER_BYTES_MAX, KEEPER, MAPPINGS, NOT_IN_FOLDER, PAGER, PLACEHOLDERS, PROGRAMS, Prepared,
    SERVER, SOCKETS, STATE, WORKING,
};

/// The preloaded library.
static LIBRARY: &[u8] = include_bytes!(env!("TOWLINE_PRELOAD"));
/// The name of its file, with a checksum to tell it from other versions.
const LIBRARY_NAME: &str = env!("TOWLINE_LIBRARY");

/// Folders in the directory of a run, besides that of the placeholders.
const FOLDERS: [&str; 4] = [WORKING, MAPPINGS, PROGRAMS, SOCKETS];

fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}

/// The private directory of this run, removed at the end.
pub(super) struct RunDirectory(PathBuf);

impl RunDirectory {
    /// Creates the directory.
    pub(super) fn new() -> Outcome<Self> {
        let parent = home().map_err(elsewhere)?;
        let mut number = 0;
        loop {
            let path = parent.join(format!("run-{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {
                    let made = Self(path);
                    make_folder(&made.placeholders())
                        .map_err(|error| elsewhere(Failure::from(error).about(made.0.display())))?;
                    return Ok(made);
                }
                // Left behind by a process that was killed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(elsewhere(Failure::from(error).about(path.display()))),
            }
        }
    }

    /// Creates the folders that are not used before the servers have answered.
    pub(super) fn fill(&self) -> io::Result<()> {
        FOLDERS.iter().try_for_each(|name| make_folder(&self.0.join(name)))
    }

    /// Takes over a directory that another process made and left.
    pub(super) fn left(path: PathBuf) -> Self {
        Self(path)
    }

    /// Removes the directory without listing it. Returns false if it holds anything that was not made at the
    /// start.
    fn remove_unused(&self) -> bool {
        let removed = |name: &str| rmdir(self.0.join(name)).is_ok();
        FOLDERS.iter().all(|name| removed(name))
            && removed(PLACEHOLDERS)
            && unlink(self.0.join(STATE)).is_ok()
            // These do not exist if the run did not reach its servers.
            && [PAGER, KEEPER]
                .iter()
                .all(|name| matches!(unlink(self.0.join(name)), Ok(()) | Err(Errno::NOENT)))
            && rmdir(&self.0).is_ok()
    }

    /// Returns the path.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Leaves the directory to another process, and returns its path.
    pub(super) fn leave(self) -> PathBuf {
        std::mem::ManuallyDrop::new(self).0.clone()
    }

    /// The socket of the server of `--serve`.
    pub(super) fn socket(&self) -> PathBuf {
        self.0.join(SERVER)
    }

    /// The folder of the placeholders.
    pub(super) fn placeholders(&self) -> PathBuf {
        self.0.join(PLACEHOLDERS)
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        if self.remove_unused() {
            return;
        }
        if let Err(error) = remove_all(CWD, &self.0) {
            log::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Removes a directory and everything in it. Uses direct system calls, as does everything here that runs
/// after the program: by then, other preloaded libraries (fakeroot) may have lost what their functions need.
fn remove_all(parent: impl AsFd, path: impl rustix::path::Arg + Copy) -> rustix::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || rustix::fs::openat(&parent, path, flags, Mode::empty());
    let directory = match open() {
        // A program has made it under a strange umask.
        Err(Errno::ACCESS) => {
            rustix::fs::chmodat(&parent, path, Mode::RWXU, AtFlags::empty())?;
            open()?
        }
        opened => opened?,
    };
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        match unlinkat(&directory, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => remove_all(&directory, name)?,
            removed => removed?,
        }
    }
    unlinkat(parent, path, AtFlags::REMOVEDIR)
}

/// A run is not taken for one that was killed before this time: nobody may have locked its state yet.
const SETTLED: Duration = Duration::from_secs(60);

/// Removes the directories beside this one of runs all of whose processes were killed. They hold what was mapped,
/// mostly in memory.
pub(super) fn remove_abandoned(own: &Path) {
    for path in beside(own, "run-") {
        if fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir() && age(&found) > SETTLED) {
            // Held while the directory is removed.
            let _state = match Prepared::abandoned(path.as_os_str().as_bytes()) {
                Ok(state) => Some(state),
                // Killed before there was one, or while it was removed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(_) => continue,
            };
            if let Err(error) = remove_all(CWD, &path) {
                log::warn!("cannot remove {}, which a killed run left: {error}", path.display());
            }
        }
    }
}

/// Yields what has a name that begins like this in the folder of `own`, except that.
fn beside<'a>(own: &'a Path, beginning: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
    let is_one = move |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        name.starts_with(beginning.as_bytes()) && path != own
    };
    let entries = own.parent().and_then(|home| fs::read_dir(home).ok()).into_iter().flatten();
    entries.flatten().map(|entry| entry.path()).filter(is_one)
}

/// Adds advice for a folder for runs that cannot be used.
pub(super) fn elsewhere(failure: Failure) -> Failure {
    failure.with("set XDG_RUNTIME_DIR to use another folder")
}

/// Returns this user's folder for runs, in memory if possible. Other users cannot write there.
fn home() -> Outcome<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let name = format!("towline-{uid}");
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let parents = runtime.into_iter().chain([PathBuf::from("/dev/shm"), std::env::temp_dir()]);
    let mut last = Failure::new("cannot create a folder for the run");
    for parent in parents.filter(|parent| parent.is_absolute()) {
        let path = parent.join(&name);
        if let Some(why) = unusable(path.as_os_str().as_bytes()) {
            last = Failure::new(why).about(path.display());
            continue;
        }
        // Neither the library nor copies of programs could be mapped there.
        let flags = rustix::fs::statvfs(&parent).map(|found| found.f_flag);
        if flags.is_ok_and(|flags| flags.contains(rustix::fs::StatVfsMountFlags::NOEXEC)) {
            last = Failure::new("it is mounted noexec").about(parent.display());
            continue;
        }
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                last = Failure::from(error).about(path.display());
                continue;
            }
            _ => {}
        }
        let found = fs::symlink_metadata(&path)?;
        if found.is_dir() && found.uid() == uid && found.mode() & 0o022 == 0 {
            return Ok(path);
        }
        last =
            Failure::new("belongs to another user or is writable by others").about(path.display());
    }
    Err(last)
}

/// Returns why programs could not use what is in a folder of this name, or `None` if they can.
fn unusable(folder: &[u8]) -> Option<&'static str> {
    if folder.iter().any(|byte| NOT_IN_FOLDER.contains(byte)) {
        return Some("no library can be preloaded from a folder with a space, : or $ in its name");
    }
    (folder.len() > FOLDER_BYTES_MAX).then_some("the name is too long for sockets in it")
}

/// A library is removed if no run has used it for this long: users with two versions of the program use them
/// alternately.
const UNUSED: Duration = Duration::from_secs(3600);
/// Precision with which the last use is recorded.
const NOTED: Duration = Duration::from_secs(300);

/// Returns how long ago a library was used, or a directory changed; zero if the clock has been set back since.
fn age(found: &Metadata) -> Duration {
    found.modified().ok().and_then(|used| used.elapsed().ok()).unwrap_or_default()
}

/// The library as a file. It stays for later runs of the same version of the program. When it is created,
/// libraries of other versions are removed unless runs use them.
pub(super) struct Library {
    path: PathBuf,
    /// Locked while the run lasts, so that it is not removed: programs load it by its name.
    _used: File,
}

impl Library {
    /// Finds or creates the file.
    pub(super) fn new() -> Outcome<Self> {
        let home = home()?;
        let path = home.join(LIBRARY_NAME);
        loop {
            match File::open(&path) {
                Ok(file) => {
                    flock(&file, FlockOperation::LockShared).map_err(io::Error::from)?;
                    let locked = file.metadata()?;
                    // The file may have been removed before it was locked.
                    let is_same = fs::metadata(&path).is_ok_and(|at| at.ino() == locked.ino());
                    if is_same && locked.len() == LIBRARY.len() as u64 {
                        if age(&locked) > NOTED {
                            // If this fails, the library may be removed between two runs.
                            let _ = file.set_modified(SystemTime::now());
                        }
                        return Ok(Self { path, _used: file });
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Failure::from(error).about(path.display())),
            }
            make(&home, &path).map_err(|error| elsewhere(error.about(path.display())))?;
        }
    }

    /// Returns the path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

fn make(home: &Path, path: &Path) -> Outcome<()> {
    let new = home.join(format!("preload-new-{}", std::process::id()));
    // Left behind by a process with this number that was killed; its mode forbids writing to it.
    let _ = fs::remove_file(&new);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o500).open(&new)?;
    let written = file.write_all(LIBRARY).and_then(|()| fs::rename(&new, path));
    if let Err(error) = written {
        // If there is no space, a part of the library is of no use.
        let _ = fs::remove_file(&new);
        return Err(error.into());
    }
    remove_unused_libraries(path);
    Ok(())
}

/// Removes libraries of other versions, and unfinished ones of processes that were killed. Those that cannot
/// be removed may stay: they only take up space.
fn remove_unused_libraries(own: &Path) {
    for path in beside(own, "preload-") {
        if let Ok(file) = File::open(&path)
            && file.metadata().is_ok_and(|found| age(&found) > UNUSED)
            && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            let _ = fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Processes that are killed while they make the library leave a part of it.
    #[test]
    fn unfinished_libraries_are_no_obstacle_and_do_not_stay() {
        let folder = tempfile::tempdir().unwrap();
        let name = |process: u32| folder.path().join(format!("preload-new-{process}"));
        let [own, old, recent] = [std::process::id(), 1, 2].map(|process| {
            fs::write(name(process), "part").unwrap();
            name(process)
        });
        // A reader that has the file of that process open notices if it is written to.
        let mut reader = File::open(&own).unwrap();
        fs::set_permissions(&own, fs::Permissions::from_mode(0o500)).unwrap();
        let long_ago = SystemTime::now() - 2 * UNUSED;
        File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
        let path = folder.path().join(LIBRARY_NAME);
        assert!(make(folder.path(), &path).is_ok());
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
        assert!(!own.exists() && !old.exists() && recent.exists());
        assert_eq!(
            io::read_to_string(&mut reader).unwrap(),
            "part",
            "as only root could change it"
        );
    }
}
