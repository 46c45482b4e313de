//! Turns a URL into a session, an open export and a path in it.

use crate::report::{Failure, Outcome};
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use towline_client::{Client, Errno, File, Options, Priority, Transport, Url};

/// The `O_*` flags as sent over the wire: those of Linux on x86-64, whatever this machine is.
pub(crate) mod flag {
    /// `O_WRONLY`.
    pub(crate) const WRITE: u32 = 1;
    /// `O_RDWR`.
    pub(crate) const READ_WRITE: u32 = 2;
    /// `O_CREAT`.
    pub(crate) const CREATE: u32 = 0o100;
    /// `O_EXCL`.
    pub(crate) const EXCLUSIVE: u32 = 0o200;
    /// `O_DIRECTORY`.
    pub(crate) const DIRECTORY: u32 = 0o200_000;
    /// `O_NOFOLLOW`.
    pub(crate) const NO_FOLLOW: u32 = 0o400_000;
    /// `O_PATH`.
    pub(crate) const PATH: u32 = 0o10_000_000;
}

/// Paths of this length or longer are shortened by opening the directory they lead to, so that trees may be
/// deeper than the longest path of the protocol.
const PATH_BYTES_REBASE: usize = 2048;

/// The servers that a command uses. URLs of one server share a session. The sessions end when this is
/// dropped, so it must be declared before everything that uses them.
#[derive(Default)]
pub(crate) struct Remotes {
    /// Priority of all requests.
    pub(crate) priority: Priority,
    /// Request listings that tell which files have no extended attributes, and so no access control lists.
    pub(crate) tell_xattrs: bool,
    exports: Mutex<HashMap<(Transport, Vec<u8>), Place>>,
    /// After the exports, which are closed before their sessions end.
    clients: Mutex<HashMap<Transport, Session>>,
}

/// An export of a server.
struct Origin {
    transport: Transport,
    export: Vec<u8>,
    number: u64,
}

/// A remote file: a path below an open directory.
#[derive(Clone)]
pub(crate) struct Place {
    /// The base directory, initially the export's root.
    pub(crate) base: Arc<File>,
    path: Vec<u8>,
    full: Vec<u8>,
    origin: Arc<Origin>,
}

fn parse(text: &str) -> Outcome<Url> {
    Url::parse(text).map_err(Failure::new)
}

impl Remotes {
    /// Returns the session with the server of a URL, connecting if needed.
    pub(crate) fn client(&self, url: &Url) -> Outcome<Client> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(&url.transport) {
            return Ok(Client::clone(client));
        }
        let mut options = Options::default();
        options.priority = self.priority;
        options.tell_xattrs = if self.tell_xattrs { || true } else { || false };
        let session = Session::with(url, options)?;
        let client = Client::clone(&session);
        clients.insert(url.transport.clone(), session);
        Ok(client)
    }

    /// Returns the session with the server of a URL that is given as text.
    pub(crate) fn server(&self, text: &str) -> Outcome<(Url, Client)> {
        let url = parse(text)?;
        let client = self.client(&url)?;
        Ok((url, client))
    }

    /// Returns the file that a URL names. This opens its export, but does not look at the file itself.
    pub(crate) fn place(&self, text: &str) -> Outcome<Place> {
        self.place_of(&parse(text)?)
    }

    /// Like [`Remotes::place`], but asks no server: returns `None` unless the export is open.
    pub(crate) fn place_if_open(&self, text: &str) -> Option<Place> {
        let url = parse(text).ok()?;
        let exports = self.exports.lock().unwrap_or_else(PoisonError::into_inner);
        let root = exports.get(&(url.transport, url.export))?.clone();
        Some(Place { path: url.path.clone(), full: url.path, ..root })
    }

    /// Like [`Remotes::place`], for a parsed URL.
    pub(crate) fn place_of(&self, url: &Url) -> Outcome<Place> {
        if url.export.is_empty() {
            return Err(Failure::new(
                "the URL names no export; list the exports with `towline ls towline://HOST`",
            ));
        }
        let key = (url.transport.clone(), url.export.clone());
        let mut exports = self.exports.lock().unwrap_or_else(PoisonError::into_inner);
        let root = match exports.get(&key) {
            Some(root) => root.clone(),
            None => {
                let client = self.client(url)?;
                let base =
                    client.attach(&url.export).map_err(|error| no_export(error, url, &client))?;
                let origin = Origin {
                    transport: url.transport.clone(),
                    export: url.export.clone(),
                    number: exports.len() as u64 + 1,
                };
                let root = Place {
                    base: Arc::new(base),
                    path: Vec::new(),
                    full: Vec::new(),
                    origin: Arc::new(origin),
                };
                exports.insert(key, root.clone());
                root
            }
        };
        Ok(Place { path: url.path.clone(), full: url.path.clone(), ..root })
    }
}

/// A session with a server. It ends when this is dropped: without a farewell, the server would keep
/// it until its lease ends.
pub(crate) struct Session(Client);

impl Session {
    /// Connects to the server of a URL.
    pub(crate) fn with(url: &Url, options: Options) -> Result<Self, towline_client::Error> {
        Client::connect(&url.transport, options).map(Self)
    }
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.0.clone().close();
    }
}

/// Explains why an export cannot be opened. Asks the server whether the name is that of a disk.
pub(crate) fn no_export(error: towline_client::Error, url: &Url, client: &Client) -> Failure {
    let name = crate::text::escaped(&url.export);
    let missing = error.errno() == Errno::ENOENT;
    let failure = Failure::from(error);
    if !missing {
        return failure.with(format_args!("opening export \"{name}\""));
    }
    let disks = client.disks().unwrap_or_default();
    if disks.iter().any(|(disk, _)| disk.as_bytes() == url.export) {
        return failure.with(format_args!(
            "\"{name}\" is a disk and has no files; see `towline disk` and `towline attach`"
        ));
    }
    failure.with(format_args!(
        "the server has no export \"{name}\"; `towline ls` of the server lists what it has"
    ))
}

/// Explains why a disk cannot be opened. Asks the server whether the name is that of an export of files.
pub(crate) fn no_disk(error: towline_client::Error, url: &Url, client: &Client) -> Failure {
    if error.errno() != Errno::ENOENT {
        return Failure::from(error);
    }
    if client.exports().is_ok_and(|all| all.contains(&url.export)) {
        return Failure::new("the server has files by this name, not a disk; see `towline ls`");
    }
    Failure::new("the server has no such disk; `towline disk info` lists the disks")
}

impl Place {
    /// The path below `base`, or `.` for `base` itself.
    pub(crate) fn path(&self) -> &[u8] {
        if self.path.is_empty() { b"." } else { &self.path }
    }

    /// The path from the export's root.
    pub(crate) fn full(&self) -> &[u8] {
        &self.full
    }

    /// The last name in the URL, or the export's name for its root.
    pub(crate) fn name(&self) -> &[u8] {
        match last_name(&self.full) {
            b"" => &self.origin.export,
            name => name,
        }
    }

    /// Returns the place of a name in this directory.
    pub(crate) fn child(&self, name: &[u8]) -> Self {
        Self { path: join(&self.path, name), full: join(&self.full, name), ..self.clone() }
    }

    /// Returns the place of a name in the directory that contains this file, or `None` for the root of an
    /// export.
    pub(crate) fn sibling(&self, name: &[u8]) -> Option<Self> {
        if last_name(&self.path).is_empty() {
            return None;
        }
        let replace = |path: &[u8]| [parent(path), name].concat();
        Some(Self { path: replace(&self.path), full: replace(&self.full), ..self.clone() })
    }

    /// Returns the same place with a path that leaves room for names below it. Its directory is opened with
    /// these flags as well.
    pub(crate) fn shortened(self, flags: u32) -> Outcome<Self> {
        if self.path.len() < PATH_BYTES_REBASE {
            return Ok(self);
        }
        let base = self.base.open(&self.path, flag::PATH | flag::DIRECTORY | flags, 0)?;
        Ok(Self { base: Arc::new(base), path: Vec::new(), ..self })
    }

    /// Returns the same place with a path that leaves room for longer names in the directory that contains it.
    pub(crate) fn parent_shortened(self) -> Outcome<Self> {
        let directory = parent(&self.path);
        if directory.len() < PATH_BYTES_REBASE {
            return Ok(self);
        }
        let base = self.base.open(directory, flag::PATH | flag::DIRECTORY, 0)?;
        let path = self.path[directory.len()..].to_vec();
        Ok(Self { base: Arc::new(base), path, ..self })
    }

    /// Returns the same place, reached through its open directory.
    pub(crate) fn opened(self, directory: Arc<File>) -> Self {
        Self { base: directory, path: Vec::new(), ..self }
    }

    /// Returns the place in the same export with this path from the root.
    pub(crate) fn elsewhere(&self, root: &Self, path: Vec<u8>) -> Self {
        Self { base: root.base.clone(), path: path.clone(), full: path, ..self.clone() }
    }

    /// Returns a number that is different for each export.
    pub(crate) fn device(&self) -> u64 {
        self.origin.number
    }

    /// Returns true if both are reached through the same session, so that one request can name both.
    pub(crate) fn same_server(&self, other: &Self) -> bool {
        self.origin.transport == other.origin.transport
    }

    /// Returns true if both are in the same export.
    pub(crate) fn same_export(&self, other: &Self) -> bool {
        self.origin.number == other.origin.number
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (transport, export) = (self.origin.transport.clone(), self.origin.export.clone());
        Url { transport, export, path: self.full.clone() }.fmt(f)
    }
}

/// Returns `directory/name`, or just the name if the directory is empty.
pub(crate) fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(directory.len() + 1 + name.len());
    path.extend_from_slice(directory);
    if !path.is_empty() && !path.ends_with(b"/") {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// Returns the last name of a path without trailing slashes. Empty for a path of slashes only.
pub(crate) fn last_name(path: &[u8]) -> &[u8] {
    path.rsplit(|b| *b == b'/').find(|name| !name.is_empty()).unwrap_or(b"")
}

/// Returns everything before the last name, including the slash.
pub(crate) fn parent(path: &[u8]) -> &[u8] {
    let trimmed = path.iter().rposition(|b| *b != b'/').map_or(0, |last| last + 1);
    let name_at = path[..trimmed].iter().rposition(|b| *b == b'/').map_or(0, |slash| slash + 1);
    &path[..name_at]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_joined_and_split_as_bytes() {
        assert_eq!(join(b"", b"a"), b"a");
        assert_eq!(join(b"a", b"\xff"), b"a/\xff");
        assert_eq!(join(b"a/", b"b"), b"a/b");
        assert_eq!(last_name(b"a/b//"), b"b");
        assert_eq!(last_name(b"b"), b"b");
        assert_eq!(last_name(b"//"), b"");
        assert_eq!(parent(b"a/b//"), b"a/");
        assert_eq!(parent(b"b"), b"");
        assert_eq!(parent(b"/b"), b"/");
    }

    #[test]
    fn a_wrong_url_is_a_failure_and_an_empty_export_too() {
        let remotes = Remotes::default();
        assert!(remotes.place("towline://host:x/y").is_err());
        let Err(failure) = remotes.place("towline://host") else { panic!("no export") };
        assert!(failure.to_string().contains("names no export"));
    }
}
