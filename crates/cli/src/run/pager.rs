//! Fills mappings of remote files when they are touched.
//!
//! A process that maps a large file registers its memory with a userfaultfd and sends that to the pager. From
//! then on a thread of the pager answers each touch of a missing page of this process (`faults.rs`). So a
//! server that hangs stops only the programs that wait for it.

use super::directory::RunDirectory;
use super::faults::{Process, Range};
use super::pending::Pending;
use super::servers::by_server;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use towline_client::{Client, Url};
use towline_instance::behind::Behind;
use towline_instance::{MAPPINGS, PAGER, State};

/// Length of the queue for connecting processes.
const BACKLOG: i32 = 128;
/// Bytes of a thread's stack; data is read into other memory.
const STACK_BYTES: usize = 256 << 10;
/// How long to wait for the announcement of a child: its parent's thread may be waiting for a server.
const ANNOUNCED: Duration = Duration::from_secs(120);
/// How long the end of a run waits for data to be written back after the programs have ended.
const WRITTEN: Duration = Duration::from_secs(60);
/// Maximum number of announced children that have not connected yet.
const FORKS_MAX: usize = 4096;

/// Accepts connections from processes of the run. Its descriptor is readable when one has arrived.
pub(super) struct Pager {
    listener: OwnedFd,
    run: Arc<Run>,
}

/// What the pager's threads share.
pub(super) struct Run {
    /// Folder with the memory of shared mappings.
    pub(super) mappings: PathBuf,
    pub(super) state: Arc<State>,
    /// By mount number.
    pub(super) servers: Vec<(Client, Url)>,
    /// By mount number: the queue of writes behind of its server.
    queues: Vec<usize>,
    /// Mappings of announced children, by token.
    forks: Mutex<HashMap<u64, Announced>>,
    announced: Condvar,
    /// Processes that are served.
    served: Arc<Pending>,
}

/// A child that its parent has announced.
struct Announced {
    since: Instant,
    ranges: Vec<Range>,
}

impl Pager {
    /// Starts to listen.
    pub(super) fn start(
        directory: &RunDirectory,
        state: Arc<State>,
        servers: Vec<(Client, Url)>,
    ) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let address = SocketAddrUnix::new(directory.path().join(PAGER))?;
        rustix::net::bind(&listener, &address)?;
        rustix::net::listen(&listener, BACKLOG)?;
        let mut queues = vec![0; servers.len()];
        for mounts in by_server(&servers) {
            mounts.iter().for_each(|(mount, _)| queues[*mount] = mounts[0].0);
        }
        let run = Run {
            mappings: directory.path().join(MAPPINGS),
            state,
            servers,
            queues,
            forks: Mutex::default(),
            announced: Condvar::new(),
            served: Arc::default(),
        };
        Ok(Self { listener, run: Arc::new(run) })
    }

    /// Serves the processes that have connected.
    pub(super) fn meet(&self) {
        loop {
            match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Ok(socket) => {
                    // Each mapping keeps its file open in this process. The program has been started already
                    // and does not inherit the raised limit.
                    crate::descriptors::raise_limit();
                    let run = Arc::clone(&self.run);
                    let thread = std::thread::Builder::new().name("pager".to_owned());
                    let served = run.served.begin();
                    let serve = move || {
                        Process::serve(&run, socket);
                        drop(served);
                    };
                    // A process that is not served reads whole files when it maps them.
                    if let Err(error) = thread.stack_size(STACK_BYTES).spawn(serve) {
                        log::warn!("cannot fill a process's mappings on demand: {error}");
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }

    /// Waits, after all processes have ended, until the data that they stored is written.
    pub(super) fn finish(&self) {
        if !self.run.served.wait(WRITTEN) {
            log::warn!("not everything that programs stored to mapped files was written back");
        }
    }
}

impl AsFd for Pager {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Run {
    /// Returns what is known of writes behind to the server of a mount.
    pub(super) fn behind(&self, mount: u32) -> Behind<'_> {
        self.state.behind(self.queues.get(mount as usize).copied().unwrap_or_default())
    }

    /// Stores the mappings that a child will inherit.
    pub(super) fn announce(&self, token: u64, ranges: Vec<Range>) {
        let mut forks = self.forks.lock().unwrap_or_else(PoisonError::into_inner);
        // A fork that fails is announced, too, and its child never comes.
        forks.retain(|_, child| child.since.elapsed() < ANNOUNCED);
        if forks.len() < FORKS_MAX {
            forks.insert(token, Announced { since: Instant::now(), ranges });
        }
        self.announced.notify_all();
    }

    /// Returns the mappings of a child. Waits until its parent's thread has announced them.
    pub(super) fn announced(&self, token: u64) -> Option<Vec<Range>> {
        let forks = self.forks.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = |forks: &mut HashMap<u64, _>| !forks.contains_key(&token);
        let waited = self.announced.wait_timeout_while(forks, ANNOUNCED, missing);
        let child = waited.unwrap_or_else(PoisonError::into_inner).0.remove(&token);
        child.map(|child| child.ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;
    use towline_instance::Config;

    /// The memory and files of a fork that has failed do not stay until the run ends.
    #[test]
    fn children_that_never_came_are_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let prepared = State::prepare(folder.path().as_os_str().as_bytes(), &Config::default());
        let run = Run {
            mappings: folder.path().to_owned(),
            state: Arc::new(prepared.unwrap().map().unwrap()),
            servers: Vec::new(),
            queues: Vec::new(),
            forks: Mutex::default(),
            announced: Condvar::new(),
            served: Arc::default(),
        };
        run.announce(1, Vec::new());
        run.announce(2, Vec::new());
        // As if the first had been announced long ago.
        if let Some(first) = run.forks.lock().unwrap().get_mut(&1) {
            first.since = Instant::now().checked_sub(ANNOUNCED).unwrap();
        }
        run.announce(3, Vec::new());
        let mut known: Vec<u64> = run.forks.lock().unwrap().keys().copied().collect();
        known.sort_unstable();
        assert_eq!(known, [2, 3]);
        assert!(run.announced(2).is_some());
    }
}
