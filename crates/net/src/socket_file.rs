//! The file of a server's Unix socket: made in the place of a dead server's, and removed at the end.

use crate::address::connect_unix_stream;
use crate::socket::{PeerCredentials, peer_credentials};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest path of a Unix socket: `sun_path` of `unix(7)` without the zero at its end.
const UNIX_PATH_BYTES_MAX: usize = 107;

/// The file of a Unix socket.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode. No other file has them while the socket is open.
    identity: (u64, u64),
}

impl SocketFile {
    /// Binds a socket to a path, which may be that of a socket that a dead server left behind.
    ///
    /// # Errors
    /// `AddrInUse` if another server listens there, or the file is not a socket; `InvalidInput` if the path
    /// is too long; what `bind(2)` and `listen(2)` say.
    pub(crate) fn bind(path: &Path) -> io::Result<(UnixListener, Option<Self>)> {
        let _turn = take_turn(path);
        remove_dead_socket(path)?;
        Ok((UnixListener::bind(path)?, Self::at(path)))
    }

    /// Describes the file at `path`; `None` if there is none.
    fn at(path: &Path) -> Option<Self> {
        let found = std::fs::symlink_metadata(path).ok()?;
        Some(Self { path: path.into(), identity: (found.dev(), found.ino()) })
    }

    /// Removes the file, unless another one has its path now.
    pub(crate) fn remove(&self) {
        if Self::at(&self.path).is_some_and(|found| found.identity == self.identity) {
            // If the file cannot be removed, the next start replaces it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Locks the directory of a socket until the result is dropped. Of servers that start at the same time,
/// one would otherwise remove the new socket of another: a socket that does not listen yet looks like one
/// that a dead server left behind. `None` if the directory cannot be locked; `bind` reports what is wrong
/// with it. Other programs may keep such a lock for any time, so this waits for two seconds only.
fn take_turn(path: &Path) -> Option<File> {
    const TRIES: u32 = 2000;
    const PAUSE: Duration = Duration::from_millis(1);
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = File::open(parent.unwrap_or(".".as_ref())).ok()?;
    for _ in 0..TRIES {
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(directory),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(PAUSE),
            Err(_) => return None,
        }
    }
    None
}

/// Removes a socket that a dead server left behind. Checks the file's kind first, because connecting to
/// a file of another kind fails with the same error.
fn remove_dead_socket(path: &Path) -> io::Result<()> {
    const ANSWER: Duration = Duration::from_secs(1);
    if path.as_os_str().len() > UNIX_PATH_BYTES_MAX {
        let what =
            format!("the path of a Unix socket can have at most {UNIX_PATH_BYTES_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        let what = "a file of this name exists and is not a socket";
        return Err(io::Error::new(io::ErrorKind::AddrInUse, what));
    }
    let taken = || io::Error::new(io::ErrorKind::AddrInUse, "another server listens there");
    match connect_unix_stream(path, ANSWER) {
        Ok(stream) if is_orphaned(&stream) => std::fs::remove_file(path),
        Ok(_) => Err(taken()),
        Err(error) => match error.kind() {
            io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
            // Its queue is full: it accepts nobody at the moment.
            io::ErrorKind::TimedOut => Err(taken()),
            // Let `bind` report any other problem.
            _ => Ok(()),
        },
    }
}

/// Returns true if the process that listens at the other end is gone. After a server was killed, the kernel
/// closes its event loop's sockets only a little after the process is gone.
fn is_orphaned(stream: &UnixStream) -> bool {
    use rustix::process::{PidfdFlags, pidfd_open};
    // For a listener, these are the credentials of the process that called `listen(2)`; none from another
    // PID namespace.
    let Ok(PeerCredentials { process: Some(process), .. }) = peer_credentials(stream.as_fd())
    else {
        return false;
    };
    match pidfd_open(process, PidfdFlags::empty()) {
        // A process that has ended but was not waited for is gone as well: its descriptor is readable.
        Ok(process) => {
            let mut polled = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())) == Ok(1)
        }
        Err(error) => error == Errno::SRCH,
    }
}

#[cfg(test)]
mod tests {
    use crate::address::{Address, Listener, connect_unix};
    use std::os::unix::net::UnixListener;
    use std::sync::Barrier;
    use std::time::Duration;

    #[test]
    fn of_servers_that_start_at_once_one_listens() {
        let name = format!("towline-at-once-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        let path = directory.join("socket");
        for _ in 0..200 {
            drop(UnixListener::bind(&path).unwrap()); // as if its server were dead
            let start = Barrier::new(4);
            let bind = || {
                start.wait();
                Listener::bind(&Address::Unix(path.clone()))
            };
            let listeners: Vec<_> = std::thread::scope(|scope| {
                let servers: Vec<_> = (0..4).map(|_| scope.spawn(bind)).collect();
                servers.into_iter().filter_map(|server| server.join().unwrap().ok()).collect()
            });
            assert_eq!(listeners.len(), 1);
            let _client = connect_unix(&path, Duration::from_secs(60)).unwrap();
            listeners[0].accept().unwrap();
        }
        std::fs::remove_dir(&directory).unwrap(); // the last server removed its socket
    }

    #[test]
    fn a_listener_leaves_the_file_of_another_one() {
        let path = std::env::temp_dir().join(format!("towline-taken-{}", std::process::id()));
        let address = Address::Unix(path.clone());
        let first = Listener::bind(&address).unwrap();
        std::fs::remove_file(&path).unwrap(); // by somebody who takes its server for dead
        let second = Listener::bind(&address).unwrap();
        drop(first);
        let _client = connect_unix(&path, Duration::from_secs(60)).unwrap();
        second.accept().unwrap();
        drop(second);
        assert!(!path.exists());
    }
}
