//! Has the kernel report events on watched remote files to programs of the run.
//!
//! A program watches the local *shadow* of a file (`shadows.rs`), on which the kernel reports events as on
//! any local file. For each server with watched files there is a session, with several threads: one creates
//! shadows for programs that ask (`asks.rs`), the others receive events from the server and repeat them
//! (`events.rs`). So a server that hangs stops only the programs that wait for it.

mod asks;
mod events;
mod names;
mod shadows;

use super::directory::RunDirectory;
use asks::{Message, Server};
use shadows::{Shadow, Shadows};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use towline_client::{Client, Errno, Error, File, Url};
use towline_instance::watches::{Ask, Listed};
use towline_instance::{SHADOWS, State};
use towline_wire::request::open_flag;

/// Bytes of a thread's stack; listings are on the heap.
const STACK_BYTES: usize = 256 << 10;

/// All watched files of the run.
pub(super) struct Watches {
    common: Arc<Common>,
    /// The threads that handle messages about a server, by the number of its first mount. They start with the
    /// first question.
    servers: HashMap<usize, Sender<Message>>,
}

/// What all servers share.
struct Common {
    folder: PathBuf,
    state: Arc<State>,
    /// By mount number: the keeper's own connections, which watch nothing.
    servers: Vec<(Client, Url)>,
    family: u64,
    /// The next shadow number.
    numbers: Arc<AtomicU64>,
    /// The connected servers; `None` at the end.
    met: Mutex<Option<Vec<Met>>>,
}

/// A connected server.
#[derive(Clone)]
struct Met {
    client: Client,
    shared: Arc<Shared>,
}

/// What the threads of a server share.
struct Shared {
    shadows: Mutex<Shadows>,
    /// How often events were lost. What was watched or listed before a loss may no longer be watched, or may
    /// be out of date.
    losses: AtomicU64,
}

impl Watches {
    /// Starts without watches.
    pub(super) fn new(
        directory: &RunDirectory,
        state: Arc<State>,
        servers: Vec<(Client, Url)>,
    ) -> Self {
        let common = Common {
            folder: directory.path().join(SHADOWS),
            family: state.config().map_or(0, |config| config.family),
            state,
            servers,
            numbers: Arc::default(),
            met: Mutex::new(Some(Vec::new())),
        };
        Self { common: Arc::new(common), servers: HashMap::new() }
    }

    /// Passes a question to the thread that answers it. Without an answer, the program cannot watch.
    pub(super) fn ask(&mut self, ask: Ask, asker: OwnedFd) {
        let Some((first, url)) = self.server_of(ask.mount) else { return };
        if !self.servers.contains_key(&first) {
            let (sender, messages) = channel();
            let server = Server::new(Arc::clone(&self.common), url.transport.clone());
            if let Err(error) = start("watches", move || server.handle_all(&messages)) {
                log::warn!("remote files cannot be watched: {error}");
                self.common.decline(&ask);
                return;
            }
            self.servers.insert(first, sender);
        }
        self.pass(first, Message::Ask(ask, asker));
    }

    /// Passes on what a program finds in a directory.
    pub(super) fn listed(&self, listed: Listed) {
        if let Some((first, _)) = self.server_of(listed.mount) {
            self.pass(first, Message::Listed(listed));
        }
    }

    fn pass(&self, first: usize, message: Message) {
        if let Some(server) = self.servers.get(&first) {
            // Fails if the thread has ended, which closes the descriptor for an answer.
            let _ = server.send(message);
        }
    }

    /// Returns the number of the first mount of a mount's server, and how to reach it.
    fn server_of(&self, mount: u32) -> Option<(usize, Url)> {
        let servers = &self.common.servers;
        let (_, url) = servers.get(mount as usize)?;
        let same = |(_, other): &(Client, Url)| other.transport == url.transport;
        Some((servers.iter().position(same)?, url.clone()))
    }

    /// Ends all watches. After that, the directory of the run can be removed.
    pub(super) fn stop(&self) {
        let met = lock(&self.common.met).take();
        for Met { client, shared } in met.into_iter().flatten() {
            shared.shadows().end();
            client.close();
        }
    }
}

impl Common {
    /// Returns what is known of a server that has just been connected to. A server reports the events of a
    /// family's files to one session of it. If two routes lead to the same server, everything is watched
    /// through the first one.
    fn meet(self: &Arc<Self>, client: Client) -> Result<Met, Error> {
        let mut met = lock(&self.met);
        let all = met.as_mut().ok_or(Errno::ECANCELED)?;
        let same = |met: &&Met| met.client.boot_epoch() == client.boot_epoch();
        if let Some(same) = all.iter().find(same).cloned() {
            client.close();
            return Ok(same);
        }
        let shadows = Shadows::new(&self.folder, Arc::clone(&self.numbers)).map_err(failed)?;
        let shared = Shared { shadows: Mutex::new(shadows), losses: AtomicU64::new(0) };
        let new = Met { client, shared: Arc::new(shared) };
        events::listen(&new, self).map_err(|_| Errno::ENOMEM)?;
        all.push(new.clone());
        Ok(new)
    }

    fn is_over(&self) -> bool {
        lock(&self.met).is_none()
    }

    /// Closes the file that came with a question, if its server cannot be met to watch it.
    fn decline(&self, ask: &Ask) {
        if let (Some(opened), Some((client, _))) =
            (&ask.opened, self.servers.get(ask.mount as usize))
        {
            client.close_handle(opened.handle);
        }
    }

    /// Records the path of an open file, so that it can be opened again if the server restarts.
    fn remember(&self, client: &Client, handle: u64, shadow: &Shadow, path: &[u8]) {
        let (mount, inode) = shadow.which;
        let Some((_, url)) = self.servers.get(mount as usize) else { return };
        let flags = if shadow.is_directory { open_flag::DIRECTORY } else { open_flag::PATH };
        client.forget_handle(handle);
        let _ = File::from_handle(client, handle, &url.root(), path, flags, inode).into_handle();
    }
}

impl Shared {
    fn shadows(&self) -> MutexGuard<'_, Shadows> {
        lock(&self.shadows)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Converts the error of a system call.
fn failed(error: rustix::io::Errno) -> Error {
    Errno(error.raw_os_error() as u16).into()
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.stack_size(STACK_BYTES).spawn(work).map(drop)
}
