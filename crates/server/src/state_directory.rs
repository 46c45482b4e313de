//! The directory for what outlives a server: a lock file, the state of sessions, and the failed disks.

use crate::failed_disks::FailedDisks;
use rustix::fs::{CWD, FileType, FlockOperation, IFlags, Mode, OFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use towline_mem::SharedMemory;
use towline_session::state::{Boot, STATE_BYTES, State, Unusable};

const LOCK: &str = "lock";
const STATE: &str = "sessions";
/// An unusable state file is kept under this name for inspection.
const ASIDE: &str = "sessions.damaged";

/// A state directory in use.
pub(crate) struct StateDirectory {
    pub(crate) state: Arc<State>,
    pub(crate) failed_disks: Arc<FailedDisks>,
    /// Locked as long as it is open.
    _lock: OwnedFd,
}

impl StateDirectory {
    /// Takes the directory, and creates it if it is missing, for the run of the server with boot epoch
    /// `epoch`. State that cannot be continued is set aside with a warning.
    pub(crate) fn open(directory: &Path, epoch: u32) -> Result<Self, String> {
        let made = std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700)
            .create(directory);
        match made {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(format!("cannot be made: {error}"));
            }
            _ => {}
        }
        let lock = lock(&directory.join(LOCK))?;
        let path = directory.join(STATE);
        let boot = boot()?;
        let wrong = |error: io::Error| format!("{}: {error}", path.display());
        let found = match open_file(&path)? {
            (file, Length::Right) => State::open(map(file, &path)?, &boot, epoch),
            (_, Length::None) => Err(Unusable::Empty),
            (_, Length::Wrong) => {
                Err(Unusable::Damaged("it does not have the length of a state file"))
            }
        };
        let state = match found {
            Ok(state) => {
                let sessions = state.unclaimed().len();
                log::info!("state {}: {sessions} sessions may continue", path.display());
                state
            }
            Err(unusable) => {
                put_away(&path, &directory.join(ASIDE), &unusable)?;
                let (file, _) = open_file(&path)?;
                rustix::fs::ftruncate(&file, STATE_BYTES as u64).map_err(|e| wrong(e.into()))?;
                State::create(map(file, &path)?, &boot, epoch)
                    .map_err(|error| format!("{}: cannot be written: {error}", path.display()))?
            }
        };
        let failed_disks = Arc::new(FailedDisks::open(directory, &boot)?);
        Ok(Self { state: Arc::new(state), failed_disks, _lock: lock })
    }
}

/// Locks a file for as long as the descriptor is open.
fn lock(path: &Path) -> Result<OwnedFd, String> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::openat(CWD, path, flags, Mode::from_raw_mode(0o600))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(fd),
        Err(rustix::io::Errno::AGAIN) => {
            Err("another server uses it; each server needs its own".into())
        }
        Err(error) => Err(format!("{}: cannot be locked: {error}", path.display())),
    }
}

enum Length {
    None,
    Right,
    Wrong,
}

/// Opens the state file, creates it if it is missing, and checks its length.
fn open_file(path: &Path) -> Result<(OwnedFd, Length), String> {
    let wrong = |error: rustix::io::Errno| format!("{}: {error}", path.display());
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let flags = flags | OFlags::NONBLOCK; // does not block on a fifo
    let mode = Mode::from_raw_mode(0o600);
    let file = rustix::fs::openat(CWD, path, flags, mode).map_err(wrong)?;
    let stat = rustix::fs::fstat(&file).map_err(wrong)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(format!("{}: is not a regular file; remove it", path.display()));
    }
    let length = match usize::try_from(stat.st_size) {
        Ok(0) => {
            // The allocated blocks must also take later changes. If a file system (btrfs) copied these to a
            // new place, a full disk would have no room for them, and the server would be killed. Other file
            // systems refuse the flag.
            if let Ok(flags) = rustix::fs::ioctl_getflags(&file) {
                let _ = rustix::fs::ioctl_setflags(&file, flags | IFlags::NOCOW);
            }
            Length::None
        }
        Ok(STATE_BYTES) => Length::Right,
        _ => Length::Wrong,
    };
    Ok((file, length))
}

/// Maps the state file. Nothing keeps other processes from shortening it; the server cannot go on then, and
/// says why.
fn map(file: OwnedFd, path: &Path) -> Result<SharedMemory, String> {
    let memory = SharedMemory::of_file(file, STATE_BYTES);
    let memory = memory.map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(memory.explained(&format!(
        "{}: somebody shortened it while the server used it, or the disk failed; the server ends, and its \
         sessions cannot go on: start it again, and keep other programs away from that directory\n",
        path.display()
    )))
}

/// Moves an unusable state file out of the way of a new one.
fn put_away(path: &Path, aside: &Path, why: &Unusable) -> Result<(), String> {
    match why {
        Unusable::Empty => return Ok(()),
        Unusable::NoRoom => {
            return Err(format!(
                "{}: the disk has no room for what it has to hold; free some, or remove it if no \
                 client has to go on",
                path.display()
            ));
        }
        Unusable::OtherBoot => {
            log::warn!(
                "{}: from before this machine started again: what was not on the disk is missing \
                 there, so no session goes on",
                path.display()
            );
            std::fs::remove_file(path)
        }
        Unusable::Damaged(what) => {
            log::error!(
                "{}: {what}; set aside as {}, no session continues",
                path.display(),
                aside.display()
            );
            std::fs::rename(path, aside)
        }
    }
    .map_err(|error| format!("{}: cannot be set aside: {error}", path.display()))
}

/// Returns the id of the machine's current boot.
fn boot() -> Result<Boot, String> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(PATH).map_err(|error| format!("{PATH}: {error}"))?;
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |i: usize| {
        u8::from_str_radix(std::str::from_utf8(digits.get(2 * i..2 * i + 2)?).ok()?, 16).ok()
    };
    let mut boot = [0; 16];
    for (i, place) in boot.iter_mut().enumerate() {
        *place = byte(i).ok_or_else(|| format!("{PATH}: does not name this boot"))?;
    }
    Ok(boot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn begin(directory: &Path, session: u64) {
        let opened = StateDirectory::open(directory, 1).unwrap();
        assert!(opened.state.begin(session, 2).is_some());
    }

    #[test]
    fn sessions_are_there_again_and_one_server_at_a_time() {
        let _none = PROCESSES.lock();
        let parent = TempDir::new().unwrap();
        let directory = parent.path().join("state");
        begin(&directory, 5);
        let opened = StateDirectory::open(&directory, 2).unwrap();
        assert_eq!(opened.state.unclaimed(), [5]);
        let refused = StateDirectory::open(&directory, 3).err().unwrap();
        assert!(refused.contains("another server"), "{refused}");
        drop(opened);
        assert!(StateDirectory::open(&directory, 4).is_ok());
    }

    type Damage = fn(&Path);

    /// Held by tests that start processes and by tests that lock files. Until it executes its program, a new
    /// process shares the locked files of all tests.
    static PROCESSES: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn what_is_no_state_is_set_aside() {
        let _none = PROCESSES.lock();
        let damages: [(&str, Damage); 4] = [
            ("foreign", |p| std::fs::write(p, b"something else").unwrap()),
            ("cut", |p| {
                std::fs::OpenOptions::new().write(true).open(p).unwrap().set_len(5000).unwrap();
            }),
            ("magic", |p| patch(p, 0, b"?")),
            ("version", |p| patch(p, 8, b"?")),
        ];
        for (name, damage) in damages {
            let directory = TempDir::new().unwrap();
            begin(directory.path(), 5);
            damage(&directory.path().join(STATE));
            let before = std::fs::metadata(directory.path().join(STATE)).unwrap().len();
            let opened = StateDirectory::open(directory.path(), 2).unwrap();
            assert!(opened.state.unclaimed().is_empty(), "{name}");
            let aside = std::fs::metadata(directory.path().join(ASIDE)).unwrap().len();
            assert_eq!(aside, before, "{name}: what was there is not lost");
        }
    }

    fn ran(program: &str, arguments: &[&str]) -> bool {
        std::process::Command::new(program)
            .args(arguments)
            .output()
            .is_ok_and(|o| o.status.success())
    }

    #[test]
    fn what_is_stored_again_needs_no_room() {
        let _only = PROCESSES.lock();
        let parent = TempDir::new().unwrap();
        let (image, place) = (parent.path().join("image"), parent.path().join("mounted"));
        std::fs::create_dir(&place).unwrap();
        std::fs::File::create(&image).unwrap().set_len(128 << 20).unwrap();
        let (image, at) = (image.to_str().unwrap(), place.to_str().unwrap());
        if !ran("mkfs.btrfs", &["-q", "-f", image]) || !ran("mount", &["-o", "loop", image, at]) {
            return eprintln!(
                "SKIPPED: btrfs cannot be mounted here, which needs root and btrfs-progs"
            );
        }
        let flags = std::panic::catch_unwind(|| {
            begin(&place.join("state"), 5);
            let file = std::fs::File::open(place.join("state").join(STATE)).unwrap();
            rustix::fs::ioctl_getflags(file).unwrap()
        });
        assert!(ran("umount", &[at]));
        assert!(flags.unwrap().contains(IFlags::NOCOW), "it is written in place");
    }

    #[test]
    fn nothing_is_believed_of_another_boot() {
        let _none = PROCESSES.lock();
        let directory = TempDir::new().unwrap();
        begin(directory.path(), 5);
        patch(&directory.path().join(STATE), 24, b"?");
        let opened = StateDirectory::open(directory.path(), 2).unwrap();
        assert!(opened.state.unclaimed().is_empty());
        assert!(!directory.path().join(ASIDE).exists());
    }

    #[test]
    fn mistakes_are_named() {
        let _none = PROCESSES.lock();
        let directory = TempDir::new().unwrap();
        let error = |path: &Path| StateDirectory::open(path, 1).err().unwrap();
        assert!(error(&directory.path().join("no/such")).contains("cannot be made"));
        std::fs::create_dir(directory.path().join(STATE)).unwrap();
        assert!(error(directory.path()).contains(STATE));
    }

    fn patch(path: &Path, at: u64, bytes: &[u8]) {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(bytes, at).unwrap();
    }
}
