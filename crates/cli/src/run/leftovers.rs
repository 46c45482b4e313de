//! Writes back what killed processes have left in the memory of mapped files, before their files are closed and
//! their locks go.
//!
//! As long as a process has a file locked, nobody else stores to it, and what it has left belongs to the file,
//! as if the process had been killed on the server's machine. Once the lock is gone, others store to the file,
//! and writing back what was left would undo that.

use super::directory::RunDirectory;
use super::memory::Memory;
use super::pending::{Pending, UnderWay};
use super::servers::{Mounts, by_server};
use super::source::{Opened, Source};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;
use towline_client::{Client, Url};
use towline_instance::{MAPPINGS, State, memory};

/// How long the end of a run waits for data to be written back.
const WRITTEN: Duration = Duration::from_secs(60);

/// The servers of a run, each with a thread once there is something to write back: a server that is away does
/// not stop the keeper, nor what is for the others.
pub(super) struct Leftovers {
    mappings: PathBuf,
    state: Arc<State>,
    servers: Vec<Server>,
    pending: Arc<Pending>,
}

/// A server, which releases all locks of a process together, whatever prefixes it has.
#[derive(Clone)]
struct Server {
    client: Client,
    /// By mount number, of its prefixes.
    mounts: Vec<(u32, Url)>,
    jobs: Option<Sender<(Job, UnderWay)>>,
}

/// What follows once everything is written back.
enum Job {
    /// An open file is closed, which releases its locks.
    Close(Opened),
    /// The locks of a process that has ended are released.
    End(u64),
}

impl Leftovers {
    /// For the servers of a run, by mount number.
    pub(super) fn new(
        directory: &RunDirectory,
        state: Arc<State>,
        servers: &[(Client, Url)],
    ) -> Self {
        let server = |mounts: Mounts| {
            let client = servers[mounts[0].0].0.clone();
            let mounts = mounts.into_iter().map(|(number, url)| (number as u32, url)).collect();
            Server { client, mounts, jobs: None }
        };
        let all = by_server(servers).into_iter().map(server).collect();
        let mappings = directory.path().join(MAPPINGS);
        Self { mappings, state, servers: all, pending: Arc::default() }
    }

    /// Closes an open file on its server.
    pub(super) fn close(&mut self, opened: Opened) {
        let is_mapped = self.is_any_mapped()
            && self.mappings.join(memory::name(opened.mount, opened.inode)).exists();
        let Some(server) = self.server_of(opened.mount) else { return };
        if is_mapped {
            self.start(server, Job::Close(opened));
        } else {
            self.servers[server].client.close_handle(opened.handle);
        }
    }

    /// Returns the number of servers.
    pub(super) fn servers(&self) -> usize {
        self.servers.len()
    }

    /// Returns the number of a server's first mount.
    pub(super) fn first_mount(&self, server: usize) -> usize {
        self.servers[server].mounts[0].0 as usize
    }

    /// Returns the number of the first mount of a mount's server, which names its queue of writes behind.
    pub(super) fn queue_of(&self, mount: u32) -> usize {
        self.server_of(mount).map_or(0, |server| self.first_mount(server))
    }

    fn server_of(&self, mount: u32) -> Option<usize> {
        let is_of = |server: &Server| server.mounts.iter().any(|(of, _)| *of == mount);
        self.servers.iter().position(is_of)
    }

    /// Releases the locks of a process that has ended on a server.
    pub(super) fn end_process(&mut self, process: u64, server: usize) {
        let Server { client, mounts, jobs } = &self.servers[server];
        let is_mapped = self.is_any_mapped()
            && mounts.iter().any(|(mount, _)| mapped(&self.mappings, *mount).next().is_some());
        // After those before it, of whatever process.
        if is_mapped || jobs.is_some() && !self.is_idle() {
            self.start(server, Job::End(process));
        } else {
            client.end_process(process);
        }
    }

    /// Returns true if nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_none()
    }

    /// Waits until everything is written back.
    pub(super) fn finish(&self) {
        if !self.pending.wait(WRITTEN) {
            log::warn!(
                "not everything that killed programs stored to mapped files was written back"
            );
        }
    }

    fn is_any_mapped(&self) -> bool {
        self.state.mapped().load(Ordering::Acquire) != 0
    }

    /// Does a job after those before it, on a thread if there can be one.
    fn start(&mut self, server: usize, job: Job) {
        let Some(server) = self.servers.get_mut(server) else { return };
        let jobs = server.jobs.take();
        let worker = || Worker {
            mappings: self.mappings.clone(),
            state: Arc::clone(&self.state),
            server: server.clone(),
        };
        let jobs = jobs.or_else(|| worker().start());
        let Some(jobs) = jobs else { return worker().work(&job) };
        // Its thread works as long as there is a sender, unless it has failed.
        match jobs.send((job, self.pending.begin())) {
            Ok(()) => server.jobs = Some(jobs),
            Err(mpsc::SendError((job, _))) => worker().work(&job),
        }
    }
}

/// Does the jobs of a server.
struct Worker {
    mappings: PathBuf,
    state: Arc<State>,
    server: Server,
}

impl Worker {
    /// Returns `None` if there can be no thread.
    fn start(self) -> Option<Sender<(Job, UnderWay)>> {
        let (sender, jobs) = mpsc::channel::<(Job, UnderWay)>();
        let work = move || jobs.into_iter().for_each(|(job, _under_way)| self.work(&job));
        let thread = std::thread::Builder::new().name("leftovers".to_owned()).spawn(work);
        thread
            .inspect_err(|error| log::warn!("cannot write back what programs stored: {error}"))
            .ok()?;
        Some(sender)
    }

    fn work(&self, job: &Job) {
        let client = &self.server.client;
        match job {
            Job::Close(opened) => {
                let url = self.server.mounts.iter().find(|(mount, _)| *mount == opened.mount);
                if let Some((_, url)) = url {
                    self.write_back(url, (opened.mount, opened.inode), Some(opened));
                }
                client.close_handle(opened.handle);
            }
            Job::End(process) => {
                for (mount, url) in &self.server.mounts {
                    for inode in mapped(&self.mappings, *mount) {
                        self.write_back(url, (*mount, inode), None);
                    }
                }
                client.end_process(*process);
            }
        }
    }

    /// Writes back what was stored to a file, and brings its memory up to date. A file that is about to be closed is
    /// `own`.
    fn write_back(&self, url: &Url, (mount, inode): (u32, u64), own: Option<&Opened>) {
        let client = &self.server.client;
        let others = Opened::all(&self.state, mount, inode);
        let mut all: Vec<_> =
            own.into_iter().chain(&others).filter(|opened| opened.may_read()).collect();
        // If none is writable, whoever had one has closed it, and has written back before.
        all.sort_by_key(|opened| !opened.is_writable());
        // Nobody maps the file any more if there is no memory.
        let path = self.mappings.join(memory::name(mount, inode));
        let Ok(memory) = Memory::open(path) else { return };
        // Nobody could do it later.
        let is_last =
            own.is_some_and(Opened::is_writable) && !others.iter().any(Opened::is_writable);
        let mut written = Ok(());
        for opened in all {
            let source = Source::of(opened, client);
            let write_back = || {
                memory.renew_interrupted(&source)?;
                if opened.is_writable() { memory.write_back(&source, is_last) } else { Ok(()) }
            };
            written = write_back();
            // After a restart of the server, nobody may have asked for this one again yet.
            if written.as_ref().is_err_and(is_closed) && opened.reclaim(client, url).is_ok() {
                written = write_back();
                if !own.is_some_and(|own| std::ptr::eq(own, opened)) {
                    opened.close_unless_open(client, &self.state);
                }
            }
            if !written.as_ref().is_err_and(is_closed) {
                break;
            }
        }
        if let Err(error) = written {
            log::warn!("cannot write back what a program stored to a mapped file: {error}");
        }
    }
}

/// Returns true if the file is not open on the server.
fn is_closed(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBADF | libc::ESTALE))
}

/// Yields the inodes of a mount's files that have memory.
fn mapped(mappings: &Path, mount: u32) -> impl Iterator<Item = u64> {
    let names = std::fs::read_dir(mappings).into_iter().flatten().flatten();
    let name = |name: std::fs::DirEntry| memory::parse_name(name.file_name().to_str()?);
    names.filter_map(name).filter(move |(of, _)| *of == mount).map(|(_, inode)| inode)
}
