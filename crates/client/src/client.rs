//! The client handle: one session with one server.

use crate::File;
use crate::convert::{check_text, unexpected, write_flags};
use crate::core::Core;
use crate::disks::Closing;
use crate::{Error, Lock, Transport};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use towline_wire::limits::{
    CLIENT_STALL_SECONDS, LISTING_BYTES_MAX, PATH_BYTES_MAX, RECONNECT_SECONDS,
};
use towline_wire::{Attr, Errno, Reply, Request};

/// How a server ranks this client's requests while they wait for its processors, memory or devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Priority {
    /// In turn with all other clients.
    #[default]
    Normal,
    /// After other clients' requests, but at least one for every eight of theirs. For background
    /// work.
    Low,
}

/// Returns the export and the path of the open file with this handle; see [`Options::place_of`].
pub type PlaceOf = fn(u64) -> Option<(Vec<u8>, Vec<u8>)>;

/// Settings of a client.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How long the client tries to replace a lost connection before operations fail. A connection
    /// that is lost within seconds, before anything arrived over it, replaces none. Later operations
    /// fail at once, but at most twice a second one tries the server again: once it is back, they go on
    /// in another session, as after a restart of the server.
    pub reconnect: Duration,
    /// How long the server may take to answer the greeting once it has accepted a connection and,
    /// after a restart, to answer each request that reopens a file or takes a lock again. A slower
    /// server counts as unreachable. Must not be zero.
    pub greeting: Duration,
    /// How long to spin for an answer before sleeping, in microseconds. The client spins less often
    /// where spinning has not helped, see [`towline_net::Spin`]. Zero: sleep at once.
    pub spin_us: u32,
    /// A random number that names a family of sessions, which share their open files: every session
    /// that gives the number belongs to the family, see [`File::from_handle`]. Zero: none.
    pub family: u64,
    /// This client promises to report the end of each process of the family that took locks
    /// ([`Client::end_process`]). Until then, the locks last as long as this session does, even if
    /// the process has no connection.
    pub reports_ends: bool,
    /// The process of the family that uses this client, by its number as an owner of locks
    /// ([`crate::Lock::owner`]). If the process ends, the server carries out what this client has sent before it
    /// releases the locks of the process ([`Client::end_process`]). Zero: none.
    pub process: u64,
    /// Whether requests of other clients go before those of this one.
    pub priority: Priority,
    /// Number of requests after which the session moves from a socket to shared memory, if it can:
    /// setting up shared memory costs as much as it saves over some twenty small requests. Zero: at
    /// once.
    pub nearer_after: u64,
    /// Called with each descriptor that the client keeps; the client uses the descriptor it
    /// returns. A library inside another program can move descriptors to numbers that the program
    /// does not use. The default changes nothing.
    pub hide: fn(OwnedFd) -> io::Result<OwnedFd>,
    /// Started operations are queued, to leave with one system call, until this many messages wait
    /// or a caller waits for an answer. For programs that keep a pipeline full: half its depth is a
    /// good number. Zero: send each at once.
    pub coalesce: u32,
    /// Incremented before each request that can change what others see of files, and again when it
    /// is answered ([`Request::alters`]). Clients that share the counter, also across processes,
    /// can tell whether earlier answers may still hold.
    pub changes: Option<&'static AtomicU64>,
    /// Whether listings with attributes also say which files have no extended attributes
    /// ([`towline_wire::attr::attr_flag::NO_XATTRS`]), which costs the server one system call per
    /// file. Called before each such listing.
    pub tell_xattrs: fn() -> bool,
    /// Called with the handle of each open file before it is reopened after a restart of the server.
    /// Returns its export and path as [`File::from_handle`] takes them, if it may have been renamed
    /// since it was opened. Must not use the client. By default, files are reopened by the path that
    /// they were opened by.
    pub place_of: PlaceOf,
    /// Returns the user for whom a server on this machine takes this process if it connects now: by default the effective
    /// user.
    pub connects_as: fn() -> u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            reconnect: Duration::from_secs(RECONNECT_SECONDS),
            greeting: Duration::from_secs(CLIENT_STALL_SECONDS),
            spin_us: 100,
            family: 0,
            reports_ends: false,
            process: 0,
            priority: Priority::default(),
            nearer_after: 0,
            hide: Ok,
            coalesce: 0,
            changes: None,
            tell_xattrs: || false,
            place_of: |_| None,
            connects_as: || rustix::process::geteuid().as_raw(),
        }
    }
}

/// A session with one server. Clones share it.
#[derive(Clone)]
pub struct Client {
    pub(crate) core: Arc<Core>,
}

impl Client {
    /// Connects and begins a session.
    ///
    /// # Errors
    /// [`Error::Connection`] says where and why.
    pub fn connect(transport: &Transport, options: Options) -> Result<Self, Error> {
        Ok(Self { core: Core::connect(transport, options)? })
    }

    /// Opens the root directory of an export. With `EXPORT/PATH`, opens that directory as a root of
    /// its own, which no `..` and no symbolic link leads out of.
    ///
    /// # Errors
    /// `ENOENT` if there is no such export, `EACCES` if this user may not use it; and as `open`.
    pub fn attach(&self, export: &[u8]) -> Result<File, Error> {
        let name = check_text(export, PATH_BYTES_MAX, Errno::ENAMETOOLONG)?;
        let outcome = self.core.call(&[Request::Attach { name }], &[], &mut [])?;
        File::opened(&self.core, outcome.single()?, None, export, 0)
    }

    /// The boot epoch of the server: identifies its current run. That of a family also changes when all its
    /// sessions had ended.
    #[must_use]
    pub fn boot_epoch(&self) -> u32 {
        self.core.boot_epoch()
    }

    /// Reopens the files of the family that this client knows from [`File::from_handle`], as after
    /// a restart of the server. For a new member of the family that connects to another run of the
    /// server ([`Client::boot_epoch`]) than the one that issued the handles. Files that cannot be
    /// reopened fail with `ESTALE` from then on. Nobody else may be using this client yet.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn reclaim(&self) -> Result<(), Error> {
        self.core.reclaim()
    }

    /// Returns the names of the server's exports.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn exports(&self) -> Result<Vec<Vec<u8>>, Error> {
        let names = self.inquire(0)?;
        Ok(names.split(|b| *b == 0).filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect())
    }

    /// Returns the server's counters and stage times, as JSON.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn statistics(&self) -> Result<String, Error> {
        Ok(String::from_utf8_lossy(&self.inquire(1)?).into_owned())
    }

    fn inquire(&self, what: u32) -> Result<Vec<u8>, Error> {
        let mut answer = vec![0; LISTING_BYTES_MAX];
        let outcome = self.core.call(&[Request::Inquire { what }], &[], &mut answer)?;
        outcome.single()?;
        answer.truncate(outcome.payload);
        Ok(answer)
    }

    /// The transport of the current connection.
    #[must_use]
    pub fn link_kind(&self) -> towline_net::LinkKind {
        self.core.link().kind()
    }

    /// Where the time of this client's requests has gone so far.
    #[must_use]
    pub fn times(&self) -> crate::Times {
        self.core.times()
    }

    /// Makes later requests on behalf of this user and group, as far as the server lets clients
    /// choose. Initially they are the effective user and group of the process.
    pub fn act_as(&self, user: u32, group: u32) {
        self.core.act_as(user, group);
    }

    /// The user who has made the connection, see [`Options::connects_as`]: another one if a lost connection was replaced after
    /// this process had changed its user. A server on this machine lets only root's connections act for other users.
    #[must_use]
    pub fn connected_as(&self) -> u32 {
        self.core.connected_as()
    }

    /// Sends waiting messages and receives what has arrived, all without waiting, and completes the
    /// requests that are answered. For programs that wait for [`Client::fd`] in their own event
    /// loop. Only a lost connection makes it wait: until that is replaced or given up.
    pub fn progress(&self) {
        self.core.progress();
    }

    /// [`Client::progress`] that does not wait for a lost connection either, but leaves it to other
    /// calls.
    ///
    /// # Errors
    /// The connection was given up ([`Options::reconnect`]), and none has been made since.
    pub fn glance(&self) -> Result<(), Error> {
        self.core.glance();
        self.core.check()
    }

    /// Replaces a lost connection, if no other thread is doing that. A client that is not used
    /// does not notice the loss, and its session ends. A program that must keep the session, for
    /// its locks, calls this when [`Client::fd`] reports that the server has hung up. If the
    /// connection was given up, tries once to begin another session, unless that was just tried.
    ///
    /// # Errors
    /// The connection was given up ([`Options::reconnect`]), and there is no other one.
    pub fn restore(&self) -> Result<(), Error> {
        self.core.progress();
        self.core.recover()
    }

    /// True while messages wait to be sent, as when the connection takes no more. An event loop
    /// that waits for [`Client::fd`] then also waits until it is writable and calls
    /// [`Client::progress`]: the server may be waiting for these messages.
    #[must_use]
    pub fn waits_to_send(&self) -> bool {
        self.core.waits_to_send()
    }

    /// True when no request is under way and no close is pending, or the connection was given up.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.core.state.lock().is_idle()
    }

    /// Returns a duplicate of the connection's descriptor. It becomes readable when something has
    /// arrived, and writable when there is room for waiting messages ([`Client::waits_to_send`]).
    /// Over shared memory it only shows that the server is gone; use [`crate::Operation::wait`] there. The
    /// descriptor changes when a lost connection is replaced.
    ///
    /// # Errors
    /// `EMFILE` if there are no descriptors left.
    pub fn fd(&self) -> io::Result<OwnedFd> {
        let link = self.core.link();
        let fd = link.fd().ok_or(io::ErrorKind::Unsupported)?;
        self.core.hide(fd.try_clone_to_owned()?)
    }

    /// Runs `work` with the open file of this family that has this `handle` and was opened with
    /// `flags`. The file stays open.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn with_handle<T>(
        &self,
        handle: u64,
        flags: u32,
        work: impl FnOnce(&File) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (core, attr) = (self.core.clone(), Attr::default());
        let file = File { core, handle, attr, write_flags: write_flags(flags) };
        let result = work(&file);
        let _ = file.into_handle();
        result
    }

    /// Asks the server again for a file that was open in this family before a restart, unless it is open already.
    /// The server has kept it, or opens it at `path`; the parameters are those of [`File::from_handle`].
    ///
    /// # Errors
    /// `ESTALE` if the file cannot be found.
    pub fn reclaim_handle(
        &self,
        handle: u64,
        export: &[u8],
        path: &[u8],
        flags: u32,
        inode: u64,
    ) -> Result<(), Error> {
        let request = Request::Reclaim { handle, flags, inode, export, path };
        self.with_handle(handle, 0, |file| {
            file.one(request, |reply| match reply {
                Reply::Opened { .. } => Ok(()),
                _ => Err(unexpected()),
            })
        })
    }

    /// Closes an open file of this family. Waits for the answer only if this client has locks on
    /// the file: another process that learns of the close may ask for these locks at once, in
    /// another session.
    pub fn close_handle(&self, handle: u64) {
        if self.has_locked(handle) {
            let _ = self.core.call(&[Request::Close { handle }], &[], &mut []); // its result is not needed
        } else {
            self.core.close_later(Closing::File(handle));
        }
    }

    /// Tells the server that a process of this family or client, which took locks
    /// ([`crate::Lock::owner`]), has ended. The server releases its locks, after it has carried out what its
    /// own clients have sent ([`Options::process`]); this does not wait for the answer. A process that is
    /// still alive has lost its locks.
    pub fn end_process(&self, owner: u64) {
        self.core.close_later(Closing::Process(owner));
    }

    /// Closes an open file of this family with a message that leaves with the next one, or on
    /// [`Client::flush`].
    pub fn close_with_next(&self, handle: u64) {
        self.core.close_with_next(handle);
    }

    /// Sends messages that are queued to leave with others.
    pub fn flush(&self) {
        let _ = self.core.flush(); // a later wait reports a broken connection
    }

    /// Forgets an open file of this family that somebody else closes, so that it is not reopened
    /// after a restart of the server.
    pub fn forget_handle(&self, handle: u64) {
        self.core.forget(handle);
    }

    /// True if this open file was lost: the server was restarted, and the file could not be reopened.
    #[must_use]
    pub fn is_lost(&self, handle: u64) -> bool {
        self.core.state.lock().files.is_lost(handle)
    }

    /// True if locks taken through this client on an open file are still held.
    #[must_use]
    pub fn has_locked(&self, handle: u64) -> bool {
        self.core.state.lock().files.has_locked(handle)
    }

    /// True if this client has locked something within the range of `lock` for its owner, and all of
    /// it shared.
    #[must_use]
    pub fn has_only_shared(&self, handle: u64, lock: &Lock) -> bool {
        self.core.state.lock().files.has_only_shared(handle, lock)
    }

    /// Tells the server that the session is over, so that it keeps no state for it.
    pub fn close(self) {
        self.core.close();
    }
}
