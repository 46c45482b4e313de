//! Writes back what killed processes have left in the memory of mapped files, before their files are closed and
//! their locks go.
//!
//! As long as a process has a file locked, nobody else stores to it, and what it has left belongs to the file,
//! as if the process had been killed on the server's machine. Once the lock is gone, others store to the file,
//! and writing back what was left would undo that.

use super::directory::RunDirectory;
use super::memory::Memory;
use super::pending::Pending;
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
/// How often, and how many times, to look whether others still map a file that a killed process had open.
const LOOK: Duration = Duration::from_millis(2);
const LOOKS: u32 = 20;

/// The servers of a run, each with a thread once there is something to write back: a server that is away does
/// not stop the keeper, nor what is for the others.
pub(super) struct Leftovers {
    mappings: PathBuf,
    state: Arc<State>,
    /// By mount number.
    servers: Vec<Server>,
    pending: Arc<Pending>,
}

struct Server {
    client: Client,
    url: Url,
    jobs: Option<Sender<Job>>,
}

/// What follows once everything is written back.
enum Job {
    /// An open file is closed, which releases its locks.
    Close(Opened),
    /// The locks of a process that has ended are released.
    End(u32),
}

impl Leftovers {
    /// For the servers of a run, by mount number.
    pub(super) fn new(
        directory: &RunDirectory,
        state: Arc<State>,
        servers: Vec<(Client, Url)>,
    ) -> Self {
        let server = |(client, url)| Server { client, url, jobs: None };
        Self {
            mappings: directory.path().join(MAPPINGS),
            state,
            servers: servers.into_iter().map(server).collect(),
            pending: Arc::default(),
        }
    }

    /// Closes an open file on its server.
    pub(super) fn close(&mut self, opened: Opened) {
        let is_mapped = self.is_any_mapped()
            && self.mappings.join(memory::name(opened.mount, opened.inode)).exists();
        let mount = opened.mount;
        self.start(mount as usize, is_mapped, Job::Close(opened));
    }

    /// Releases the locks of a process that has ended.
    pub(super) fn end_process(&mut self, process: u32) {
        for mount in 0..self.servers.len() {
            let is_mapped =
                self.is_any_mapped() && mapped(&self.mappings, mount as u32).next().is_some();
            self.start(mount, is_mapped, Job::End(process));
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

    /// Does a job: after those before it and on a thread if there may be something to write back (`is_mapped`).
    fn start(&mut self, mount: usize, is_mapped: bool, job: Job) {
        let Some(server) = self.servers.get_mut(mount) else { return };
        let worker = || Worker {
            mount: mount as u32,
            mappings: self.mappings.clone(),
            state: Arc::clone(&self.state),
            client: server.client.clone(),
            url: server.url.clone(),
        };
        if !is_mapped && self.pending.is_none() {
            return worker().finish(&job);
        }
        let jobs = server.jobs.take().or_else(|| worker().start(Arc::clone(&self.pending)));
        let Some(jobs) = jobs else { return worker().work(&job) };
        self.pending.begin();
        let _ = jobs.send(job); // its thread works as long as there is a sender
        server.jobs = Some(jobs);
    }
}

/// Does the jobs of a server.
struct Worker {
    mount: u32,
    mappings: PathBuf,
    state: Arc<State>,
    client: Client,
    url: Url,
}

impl Worker {
    /// Returns `None` if there can be no thread.
    fn start(self, pending: Arc<Pending>) -> Option<Sender<Job>> {
        let (sender, jobs) = mpsc::channel();
        let work = move || {
            for job in jobs {
                self.work(&job);
                pending.end();
            }
        };
        let thread = std::thread::Builder::new().name("leftovers".to_owned()).spawn(work);
        thread
            .inspect_err(|error| log::warn!("cannot write back what programs stored: {error}"))
            .ok()?;
        Some(sender)
    }

    fn work(&self, job: &Job) {
        match job {
            Job::Close(opened) => self.write_back(opened.inode, Some(opened)),
            Job::End(_) => {
                for inode in mapped(&self.mappings, self.mount) {
                    self.write_back(inode, None);
                }
            }
        }
        self.finish(job);
    }

    fn finish(&self, job: &Job) {
        match job {
            Job::Close(opened) => self.client.close_handle(opened.handle),
            Job::End(process) => self.client.end_process((*process).into()),
        }
    }

    /// Writes back what was stored to a file. A file that is about to be closed is `own`.
    fn write_back(&self, inode: u64, own: Option<&Opened>) {
        // If its server was restarted, no program reopens this one any more.
        let is_ending = own.is_some();
        let own = own.filter(|own| own.is_writable());
        let own = own.map(|own| Source::kept(own, &self.client, &self.url));
        let others = Opened::all(&self.state, self.mount, inode).into_iter();
        let others = others.filter(Opened::is_writable);
        let others = others.map(|opened| Source::of(&opened, &self.client));
        let path = self.mappings.join(memory::name(self.mount, inode));
        // Without a source, whoever had one has closed it, and has written back before.
        let mut sources = own.into_iter().chain(others).peekable();
        if sources.peek().is_none() {
            return;
        }
        // Nobody maps the file any more if there is no memory.
        let Ok(memory) = Memory::open(path) else { return };
        let is_closed =
            |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EBADF | libc::ESTALE));
        let mut written = Ok(());
        for source in sources {
            written = write_back(&memory, &source, is_ending);
            if !written.as_ref().is_err_and(is_closed) {
                break;
            }
        }
        if let Err(error) = written {
            log::warn!("cannot write back what a program stored to a mapped file: {error}");
        }
    }
}

/// Writes back what was stored to this memory. A process that is being killed (`is_ending`) closes its files one
/// by one, so it may still have the memory open.
fn write_back(memory: &Memory, source: &Source, is_ending: bool) -> io::Result<()> {
    for _ in 0..if is_ending { LOOKS } else { 1 } {
        if memory.write_back(source)? {
            break;
        }
        towline_net::pause(LOOK);
    }
    Ok(())
}

/// Yields the inodes of a mount's files that have memory.
fn mapped(mappings: &Path, mount: u32) -> impl Iterator<Item = u64> {
    let names = std::fs::read_dir(mappings).into_iter().flatten().flatten();
    let name = |name: std::fs::DirEntry| memory::parse_name(name.file_name().to_str()?);
    names.filter_map(name).filter(move |(of, _)| *of == mount).map(|(_, inode)| inode)
}
