//! Creates shadows for programs that ask, and takes note of what programs list.
//!
//! No event after a program learns of a shadow is missed, and no name is left out. First the server is asked
//! to watch the file, then the directory is listed. Events that arrive meanwhile are kept until the shadow
//! has the listed names, and are then applied to it. However many of them the listing reflects already, the
//! shadow ends up like the directory, since the last change of each name decides. Only then can anybody watch
//! the shadow.

use super::shadows::{Entry, OF_DIRECTORIES, OF_FILES, Shadow};
use super::{Common, Met, Shared, failed};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use towline_client::{Client, Errno, Error, Options, Transport};
use towline_instance::watches::{Ask, Listed, Opened, UNKNOWN, answer_bytes};
use towline_wire::event;

/// Events that listing a directory causes, which watchers need not see.
const LISTING: u32 = event::OPEN | event::ACCESS | event::CLOSE_NOWRITE;

/// What a process sends.
pub(super) enum Message {
    /// A question and the descriptor for its answer. Closing the descriptor without an answer is an answer, too.
    Ask(Ask, OwnedFd),
    /// What a program finds in a watched directory.
    Listed(Listed),
}

/// Handles the messages about one server.
pub(super) struct Server {
    common: Arc<Common>,
    transport: Transport,
    /// `None` before the first question that needs a connection.
    met: Option<Met>,
}

impl Server {
    /// Creates it without connecting.
    pub(super) fn new(common: Arc<Common>, transport: Transport) -> Self {
        Self { common, transport, met: None }
    }

    /// Handles messages until the run is over.
    pub(super) fn handle_all(mut self, messages: &Receiver<Message>) {
        while let Ok(message) = messages.recv() {
            let (ask, asker) = match message {
                Message::Ask(ask, asker) => (ask, asker),
                Message::Listed(listed) => {
                    self.take_note(listed);
                    continue;
                }
            };
            let answer = self.answer(&ask).map_err(|error| match error.errno() {
                // The error for programs if no more files can be watched. They then check from time to time.
                Errno::EOPNOTSUPP | Errno::EPROTO | Errno::EMFILE | Errno::ENFILE => libc::ENOSPC,
                errno => i32::from(errno.0),
            });
            // The program that asked may have ended.
            let _ = rustix::io::write(&asker, &answer_bytes(answer));
        }
    }

    /// Notes what a program finds in a watched directory.
    fn take_note(&self, listed: Listed) {
        let Some(Met { client, shared }) = &self.met else { return };
        let Some(handle) = shared.shadows().found(listed) else { return };
        // Asked only now, so that all that happens to the doubted names from here on is an event still to come.
        if let Ok(listing) = list(client, handle)
            && let Err(error) = shared.shadows().settle(handle, listing)
        {
            log::warn!("names in a watched directory cannot be told: {error}");
        }
    }

    /// Returns the number of the shadow that a question asks for.
    fn answer(&mut self, ask: &Ask) -> Result<u64, Error> {
        if self.met.is_none() && ask.opened.is_none() {
            return Err(Errno(UNKNOWN as u16).into());
        }
        let Met { client, shared } = self.meet().inspect_err(|_| self.common.decline(ask))?;
        let which = (ask.mount, ask.identity);
        let found = shared.shadows().find(which);
        match (found, &ask.opened) {
            (None, None) => return Err(Errno(UNKNOWN as u16).into()),
            (None, Some(opened)) => return self.make(ask, opened),
            (Some((handle, shadow)), opened) => {
                if let Some(opened) = opened {
                    // Another process was faster.
                    client.close_handle(opened.handle);
                }
                // What all watchers want together decides how opens are repeated.
                let mask = wanted(ask.mask | shadow.mask, shadow.is_directory);
                if mask & !shadow.mask != 0 {
                    widen(&client, &shared, handle, mask)?;
                }
            }
        }
        // Look again: the shadow may have a new number by now.
        let found = shared.shadows().find(which);
        found.map(|(_, shadow)| shadow.number).ok_or(Errno::ENOENT.into())
    }

    fn meet(&mut self) -> Result<Met, Error> {
        if let Some(met) = &self.met {
            return Ok(met.clone());
        }
        let mut options = Options::default();
        options.family = self.common.family;
        // This session waits for events, which are not urgent, and sends few other requests.
        options.spin_us = 0;
        options.nearer_after = u64::MAX;
        let met = self.common.meet(Client::connect(&self.transport, options)?)?;
        self.met = Some(met.clone());
        Ok(met)
    }

    /// Creates the shadow of an open file, and keeps the file open.
    fn make(&mut self, ask: &Ask, opened: &Opened) -> Result<u64, Error> {
        let Met { client, shared } = self.meet()?;
        let &Opened { handle, is_directory, ref path } = opened;
        let which = (ask.mount, ask.identity);
        shared.shadows().wait_for(handle);
        let mask = wanted(ask.mask, is_directory);
        let made = shared.shadows().make(which, is_directory, mask).map_err(failed);
        let made = made.and_then(|shadow| {
            self.common.state.note_watched(ask.identity);
            self.common.remember(&client, handle, &shadow, path);
            self.fill(handle, &shadow)
        });
        made.inspect_err(|_| {
            shared.shadows().give_up(handle);
            client.close_handle(handle);
        })
    }

    /// Fills a new shadow with its entries. From then on, it follows the file.
    fn fill(&mut self, handle: u64, shadow: &Shadow) -> Result<u64, Error> {
        let Met { client, shared } = self.meet()?;
        loop {
            let losses = shared.losses.load(Ordering::SeqCst);
            let listing = watch_and_list(&client, handle, shadow);
            let changes = self.common.state.changes().load(Ordering::SeqCst);
            let mut shadows = shared.shadows();
            let filled =
                listing.and_then(|listing| shadows.fill(shadow, listing, changes).map_err(failed));
            if let Err(error) = filled {
                shadows.discard(shadow);
                return Err(error);
            }
            if losses == shared.losses.load(Ordering::SeqCst) {
                let is_there = shadows.keep(handle, *shadow);
                return if is_there { Ok(shadow.number) } else { Err(Errno::ENOENT.into()) };
            }
        }
    }
}

/// Asks a server to report more events of a file.
fn widen(client: &Client, shared: &Shared, handle: u64, mask: u32) -> Result<(), Error> {
    loop {
        let losses = shared.losses.load(Ordering::SeqCst);
        client.watch(handle, mask)?;
        shared.shadows().widen(handle, mask);
        // If events were lost meanwhile, the server may have forgotten the watch and may have been asked for
        // the old events only.
        if losses == shared.losses.load(Ordering::SeqCst) {
            return Ok(());
        }
    }
}

/// Watches a file. For a directory, also returns the names in it, read after the watch is in place.
pub(super) fn watch_and_list(
    client: &Client,
    handle: u64,
    shadow: &Shadow,
) -> Result<Vec<Entry>, Error> {
    if !shadow.is_directory {
        return client.watch(handle, shadow.mask).map(|()| Vec::new());
    }
    client.watch(handle, shadow.mask & !LISTING)?;
    let listing = list(client, handle)?;
    if shadow.mask & LISTING != 0 {
        client.watch(handle, shadow.mask)?;
    }
    Ok(listing)
}

/// Returns the names in a directory.
fn list(client: &Client, handle: u64) -> Result<Vec<Entry>, Error> {
    let mut listing = client.with_handle(handle, 0, |directory| directory.list_all(false))?;
    if listing.iter().any(|entry| entry.file_type == libc::DT_UNKNOWN) {
        // Some file systems report the types of names only together with other attributes.
        listing = client.with_handle(handle, 0, |directory| directory.list_all(true))?;
    }
    Ok(listing.into_iter().map(|entry| (entry.name, entry.file_type == libc::DT_DIR)).collect())
}

/// Returns the events to request from the server so that a program gets those it wants.
fn wanted(mask: u32, is_directory: bool) -> u32 {
    const CLOSE: u32 = event::CLOSE_WRITE | event::CLOSE_NOWRITE;
    let own = if is_directory { OF_DIRECTORIES } else { OF_FILES };
    // An open is repeated together with the close, see `Shadows::touch`.
    let both = if mask & event::OPEN != 0 && mask & CLOSE != 0 { CLOSE } else { 0 };
    mask & event::ALL | own | both
}

#[cfg(test)]
mod tests {
    use super::super::Watches;
    use super::*;
    use crate::run::directory::RunDirectory;
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;
    use std::time::{Duration, Instant};
    use tempfile::TempDir;
    use towline_client::{File, Url};
    use towline_instance::{Config, SHADOWS, State};
    use towline_net::address::Address;
    use towline_server::{Export, ExportKind, Server as Served};

    const FAMILY: u64 = 7;

    /// A run whose server has the directory `data`.
    struct World {
        folder: TempDir,
        directory: RunDirectory,
        url: Url,
    }

    impl World {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let directory = RunDirectory::left(folder.path().join("run"));
            for name in ["run", "data"] {
                std::fs::create_dir(folder.path().join(name)).unwrap();
            }
            let url = format!("towline+unix:///dir?socket={}", directory.socket().display());
            Self { folder, directory, url: Url::parse(&url).unwrap() }
        }

        fn data(&self) -> PathBuf {
            self.folder.path().join("data")
        }

        fn serve(&self) -> Served {
            let config = towline_server::Config {
                exports: vec![Export::new("dir", ExportKind::Directory(self.data()))],
                listen: vec![Address::Unix(self.directory.socket())],
                ..Default::default()
            };
            Served::start(&config).unwrap()
        }

        /// Returns a client that soon gives up a server that is away.
        fn client(&self) -> Client {
            let mut options = Options::default();
            (options.family, options.reconnect) = (FAMILY, Duration::from_millis(20));
            Client::connect(&self.url.transport, options).unwrap()
        }

        fn watches(&self, client: &Client) -> Watches {
            let config = Config { family: FAMILY, ..Config::default() };
            let path = self.directory.path().as_os_str().as_bytes();
            let state = State::prepare(path, &config).unwrap().map().unwrap();
            let servers = vec![(client.clone(), self.url.clone())];
            Watches::new(&self.directory, Arc::new(state), servers)
        }

        /// Opens a directory below `data`, to be watched.
        fn asking(&self, client: &Client, path: &[u8]) -> Ask {
            let root = client.attach(&self.url.root()).unwrap();
            let opened = root.open(path, 0, 0).unwrap();
            let (identity, handle) = (opened.attr().identity(), opened.into_handle());
            let opened = Opened { handle, is_directory: true, path: path.to_vec() };
            Ask { mount: 0, mask: event::CREATE, identity, opened: Some(opened) }
        }
    }

    /// The keeper owns the handle that came with a question, whatever it answers.
    #[test]
    fn a_file_that_cannot_be_watched_is_closed() {
        let world = World::new();
        // In place of the folder of the shadows.
        std::fs::write(world.directory.path().join(SHADOWS), "").unwrap();
        let _server = world.serve();
        let client = world.client();
        let watches = world.watches(&client);
        let mut server = Server::new(Arc::clone(&watches.common), world.url.transport.clone());
        let ask = world.asking(&client, b".");
        assert_eq!(server.answer(&ask).unwrap_err().errno(), Errno::ENOTDIR);
        // Whatever is asked for later finds the file closed.
        let found = client.with_handle(ask.opened.unwrap().handle, 0, File::stat);
        assert_eq!(found.unwrap_err().errno(), Errno::EBADF);
    }

    #[test]
    fn a_server_that_was_given_up_and_is_back_reports_events_again() {
        let world = World::new();
        let served = world.serve();
        let (client, watching) = (world.client(), world.client());
        let watches = world.watches(&client);
        let mut server = Server::new(Arc::clone(&watches.common), world.url.transport.clone());
        server.met = Some(watches.common.meet(watching.clone()).unwrap());
        std::fs::create_dir(world.data().join("below")).unwrap();
        let shadow = server.answer(&world.asking(&client, b"below")).unwrap();
        let shadow = world.directory.path().join(SHADOWS).join(shadow.to_string());
        let end = Instant::now() + Duration::from_secs(60);
        let until = |what: &str, holds: &dyn Fn() -> bool| {
            while !holds() {
                assert!(Instant::now() < end, "{what}");
                towline_net::pause(Duration::from_millis(5));
            }
        };
        served.stop();
        until("the server is given up", &|| watching.glance().is_err());
        std::fs::write(world.data().join("below/missed"), "").unwrap();
        let _served = world.serve();
        until("what was missed is reported", &|| shadow.join("missed").exists());
        std::fs::write(world.data().join("below/new"), "").unwrap();
        until("what is new is reported", &|| shadow.join("new").exists());
        until("the other client is back", &|| client.restore().is_ok());
        server.answer(&world.asking(&client, b".")).unwrap();
    }
}
