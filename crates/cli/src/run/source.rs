//! Open files of a run's programs, as the keeper uses them.

use super::cache::Contents;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use towline_client::{Client, Error, Url};
use towline_instance::{Entry, State, Taken, memory};
use towline_wire::request::open_flag;

/// What the entry of an open file tells.
pub(super) struct Opened {
    /// Number of the mount.
    pub(super) mount: u32,
    /// [`towline_wire::Attr::identity`].
    pub(super) inode: u64,
    pub(super) handle: u64,
    /// From the root of the export; empty if it is not known.
    pub(super) path: Vec<u8>,
    /// `O_*` flags, as in the protocol.
    flags: u32,
}

impl Opened {
    /// Reads an entry, which may be given to another file meanwhile unless the caller keeps it open.
    pub(super) fn of(entry: &Entry) -> Self {
        Self {
            mount: entry.mount.load(Ordering::Relaxed),
            inode: entry.inode.load(Ordering::Relaxed),
            handle: entry.handle.load(Ordering::Acquire),
            path: entry.path(),
            flags: open_flag::of_this_machine(entry.flags.load(Ordering::Relaxed) as i32),
        }
    }

    /// Returns the open files of this inode of a mount. Programs may close them at any time.
    pub(super) fn all(state: &State, mount: u32, inode: u64) -> Vec<Self> {
        let entries = state.used().filter_map(|number| state.entry(number));
        let opened = entries.filter_map(|entry| {
            let handle = entry.handle.load(Ordering::Acquire);
            let is_meant = entry.mount.load(Ordering::Relaxed) == mount
                && entry.inode.load(Ordering::Relaxed) == inode;
            let opened = is_meant.then(|| Self::of(entry))?;
            let is_still = entry.taken() == Taken::Open
                && entry.handle.load(Ordering::Acquire) == handle
                && opened.handle == handle;
            is_still.then_some(opened)
        });
        opened.collect()
    }

    /// Asks the server again for the file after a restart, for all processes of the run: the one that has it open
    /// may be asleep.
    ///
    /// # Errors
    /// Those of [`Client::reclaim_handle`].
    pub(super) fn reclaim(&self, client: &Client, url: &Url) -> Result<(), Error> {
        let Self { inode, handle, ref path, flags, .. } = *self;
        client.reclaim_handle(handle, &url.root(), path, flags, inode)
    }

    /// Has a client find the file again after a restart of the server.
    pub(super) fn make_known(&self, client: &Client, url: &Url) {
        let Self { handle, flags, inode, ref path, .. } = *self;
        let known =
            towline_client::File::from_handle(client, handle, &url.root(), path, flags, inode);
        let _ = known.into_handle();
    }

    /// Closes the file if it was reclaimed for a process that has closed it meanwhile.
    pub(super) fn close_unless_open(&self, client: &Client, state: &State) {
        let is_this = |opened: &Self| opened.handle == self.handle;
        if !Self::all(state, self.mount, self.inode).iter().any(is_this) {
            client.close_handle(self.handle);
        }
    }

    /// Returns true if it is open for writing.
    pub(super) fn may_write(&self) -> bool {
        self.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32
    }

    /// Returns true if it is open for reading.
    pub(super) fn may_read(&self) -> bool {
        self.flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32
    }

    /// Returns true if what programs store to mappings can be written back through it.
    pub(super) fn is_writable(&self) -> bool {
        self.flags & libc::O_ACCMODE as u32 == libc::O_RDWR as u32
    }
}

/// The keeper's own access to an open file of a program.
pub(super) struct Source {
    /// Number of the mount.
    pub(super) mount: u32,
    client: Client,
    handle: u64,
    pub(super) is_writable: bool,
    contents: Option<Contents>,
}

impl Source {
    pub(super) fn of(opened: &Opened, client: &Client) -> Self {
        let (mount, handle, is_writable) = (opened.mount, opened.handle, opened.is_writable());
        Self { mount, client: client.clone(), handle, is_writable, contents: None }
    }

    /// For a file that the keeper closes: its client finds it again after a restart of the server.
    pub(super) fn kept(opened: &Opened, client: &Client, url: &Url, state: &Arc<State>) -> Self {
        opened.make_known(client, url);
        let source = Self::of(opened, client);
        if opened.may_write() {
            return source;
        }
        let contents = source.with(|file| Ok(Contents::of(state, url, file)));
        Self { contents: contents.unwrap_or_default(), ..source }
    }

    /// Reads the file.
    ///
    /// # Errors
    /// Those of the read.
    pub(super) fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<usize> {
        self.with(|file| match &self.contents {
            Some(contents) => contents.read_at(file, to, offset),
            None => file.read_at(to, offset),
        })
    }

    /// Uses the file.
    ///
    /// # Errors
    /// Those of `work`.
    pub(super) fn with<T>(
        &self,
        work: impl FnOnce(&towline_client::File) -> Result<T, towline_client::Error>,
    ) -> io::Result<T> {
        // Without the program's flags: what was stored is written in its place, also with `O_APPEND`.
        self.client
            .with_handle(self.handle, 0, work)
            .map_err(|error| io::Error::from_raw_os_error(i32::from(error.errno().0)))
    }
}

impl memory::Remote for Source {
    type Error = io::Error;

    fn size(&self) -> io::Result<u64> {
        self.with(towline_client::File::stat).map(|attr| attr.size)
    }

    fn write(&self, parts: &[(u64, &[u8])]) -> io::Result<()> {
        parts.iter().try_for_each(|(at, data)| self.with(|file| file.write_all_at(data, *at)))
    }

    fn write_together(&self, parts: &[(u64, &[u8])]) -> io::Result<()> {
        self.with(|file| file.write_parts(parts))
    }
}
