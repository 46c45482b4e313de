//! A client: one session with one server.

use crate::File;
use crate::convert::write_flags;
use crate::core::Core;
use crate::{Error, Transport};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use towline_wire::limits::{CLIENT_STALL_SECONDS, LISTING_BYTES_MAX, RECONNECT_SECONDS};
use towline_wire::{Attr, Request};

/// Whose requests a server takes first, where they wait for it: for its processors, its memory or its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Priority {
    /// In turn with all others.
    #[default]
    Normal,
    /// After those of other clients, but at least one for each eight of theirs. For work that nobody waits for.
    Low,
}

/// How a client behaves.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How long the client tries to replace a lost connection before operations fail.
    pub reconnect: Duration,
    /// How long a server that took a connection may take to answer the greeting, and after a restart each
    /// request to have an open file or a lock again; a server that takes longer counts as one that cannot be reached. Not zero.
    pub greeting: Duration,
    /// How long to spin for an answer before sleeping, in microseconds; where that was in vain it
    /// is done less often, see [`towline_net::Spin`]. Zero: sleep at once.
    pub spin_us: u32,
    /// A random number that names a family of sessions: whoever knows it shares their open files,
    /// see [`File::from_handle`]. Zero: none.
    pub family: u64,
    /// Whether requests of other clients go before this one's.
    pub priority: Priority,
    /// How many requests go over a socket before the session moves to shared memory, where there is
    /// some: to set it up costs as much as it saves some twenty small requests. Zero: at once.
    pub nearer_after: u64,
    /// Each descriptor that the client keeps goes through this first: a library inside another program can give
    /// it a number that the program does not use. The default changes nothing.
    pub hide: fn(OwnedFd) -> io::Result<OwnedFd>,
    /// How many operations that were started may wait to be sent until somebody waits for an
    /// answer, so that many leave by one system call. For programs that keep a pipeline full: half
    /// of its depth is a good number. Zero: each is sent at once.
    pub coalesce: u32,
    /// Counted up before each request that can change what others see of files, and again when it
    /// is answered ([`Request::alters`]). Clients that share the number, also in other processes,
    /// thus know whether what they were told before can still be true.
    pub changes: Option<&'static AtomicU64>,
    /// Listings with attributes also say which files have no extended attributes
    /// ([`towline_wire::attr::attr_flag::NO_XATTRS`]). It costs the server a system call for each.
    /// Asked before each.
    pub tell_xattrs: fn() -> bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            reconnect: Duration::from_secs(RECONNECT_SECONDS),
            greeting: Duration::from_secs(CLIENT_STALL_SECONDS),
            spin_us: 100,
            family: 0,
            priority: Priority::default(),
            nearer_after: 0,
            hide: Ok,
            coalesce: 0,
            changes: None,
            tell_xattrs: || false,
        }
    }
}

/// A session with one server. Cloning shares it.
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

    /// Opens the root directory of an export; or, of `EXPORT/PATH`, that directory of it as a root of
    /// its own, which no `..` and no symbolic link leads out of.
    ///
    /// # Errors
    /// `ENOENT` when there is no such export, `EACCES` when it is not for this user; and as `open`.
    pub fn attach(&self, export: &[u8]) -> Result<File, Error> {
        let outcome = self.core.call(&[Request::Attach { name: export }], &[], &mut [])?;
        File::opened(&self.core, outcome.single()?, None, export, 0)
    }

    /// Which start of the server answers: another number after each.
    #[must_use]
    pub fn boot_epoch(&self) -> u32 {
        self.core.boot_epoch()
    }

    /// Opens again, as after a restart of the server, the files of the family that it was told of by
    /// [`File::from_handle`]: for a new member that comes to another start of the server ([`Client::boot_epoch`]) than
    /// the one that gave the handles. What cannot be had again fails with `ESTALE` from then on. For a client that
    /// nobody else uses yet.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn reclaim(&self) -> Result<(), Error> {
        self.core.reclaim()
    }

    /// Names of the server's exports.
    ///
    /// # Errors
    /// [`Error::Connection`].
    pub fn exports(&self) -> Result<Vec<Vec<u8>>, Error> {
        let names = self.inquire(0)?;
        Ok(names.split(|b| *b == 0).filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect())
    }

    /// The server's counters and stage times, as JSON.
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

    /// The transport of the present connection.
    #[must_use]
    pub fn link_kind(&self) -> towline_net::LinkKind {
        self.core.link().kind()
    }

    /// Where the time of this client's requests went so far.
    #[must_use]
    pub fn times(&self) -> crate::Times {
        self.core.times()
    }

    /// Later requests are made on behalf of this user and group, as far as the server lets clients
    /// choose; at first they are those of the process.
    pub fn act_as(&self, user: u32, group: u32) {
        self.core.act_as(user, group);
    }

    /// Receives what has come, without waiting, and completes what it completes. For programs that
    /// wait for [`Client::fd`] in an event loop of their own.
    pub fn progress(&self) {
        self.core.progress();
    }

    /// True when something waits to be sent, as the connection took no more. Who waits for [`Client::fd`] in an event loop waits
    /// then until it can be written to, too, and calls [`Client::progress`]: the server may wait for what is to be sent.
    #[must_use]
    pub fn waits_to_send(&self) -> bool {
        self.core.waits_to_send()
    }

    /// True when no request is under way, nor a file to be closed.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.core.state.lock().is_idle()
    }

    /// A duplicate of the descriptor that becomes readable when something has come, and can be written to when there is room
    /// for what waits to be sent ([`Client::waits_to_send`]). Over shared
    /// memory it only tells that the server is gone; use [`Operation::wait`] there. It changes
    /// when a lost connection is replaced.
    ///
    /// # Errors
    /// `EMFILE` when there are no descriptors left.
    pub fn fd(&self) -> io::Result<OwnedFd> {
        let link = self.core.link();
        let fd = link.fd().ok_or(io::ErrorKind::Unsupported)?;
        self.core.hide(fd.try_clone_to_owned()?)
    }

    /// Runs `work` with an open file of this family whose handle is known, and the `flags` it was
    /// opened with; it stays open.
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

    /// Closes an open file of this family, without waiting for the answer, unless this client has locked it: whoever
    /// is told then that it is closed may want its locks, and ask for them in another session.
    pub fn close_handle(&self, handle: u64) {
        if self.has_locked(handle) {
            let _ = self.core.call(&[Request::Close { handle }], &[], &mut []); // as `close(2)` of a file that is read
        } else {
            self.core.close_later(handle);
        }
    }

    /// A process of this family, or of this client, that took locks ([`crate::Lock::owner`]) has ended: they
    /// are given back, without waiting for the answer. Should it be alive, it has lost them.
    pub fn end_process(&self, owner: u64) {
        self.core.end_process(owner);
    }

    /// Closes an open file of this family by a message that leaves with the next one, or by
    /// [`Client::flush`].
    pub fn close_with_next(&self, handle: u64) {
        self.core.close_with_next(handle);
    }

    /// Sends what waits to be sent with something else.
    pub fn flush(&self) {
        let _ = self.core.flush(); // a broken connection shows when something is waited for
    }

    /// An open file of this family is closed by somebody else: it is not opened again after a restart
    /// of the server.
    pub fn forget_handle(&self, handle: u64) {
        self.core.forget(handle);
    }

    /// True when locks were taken through this client on an open file, and not given back.
    #[must_use]
    pub fn has_locked(&self, handle: u64) -> bool {
        self.core.state.lock().files.has_locked(handle)
    }

    /// Tells the server that the session is over, so that it keeps nothing for it.
    pub fn close(self) {
        self.core.close();
    }
}
