//! Open files that outlive the server. A process of its own, the [holder](hold), has descriptors of all files
//! that stay open for a while. The next server gets them back, and its clients go on with the same files, whatever
//! has become of their names.
//!
//! A thread hands files over a moment after they were opened: most are closed again by then.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use towline_net::{Wait, receive_descriptors, send_descriptors};
use towline_session::files::{Files, Keep, News, SharedFiles};
use towline_store::OpenFile;
use towline_wire::limits::SESSION_LEASE_SECONDS;

pub(crate) mod hold;

use hold::{KEY_BYTES, Key, Kind};

/// How long after a file was opened it is handed over, and after it was closed it is let go of.
const DELAY: Duration = Duration::from_millis(200);
/// How long files of the previous server are kept for clients that are not back yet.
const RETURN: Duration = Duration::from_secs(SESSION_LEASE_SECONDS + 10);

/// The server's side.
pub(crate) struct Kept {
    /// Files of the previous server that no client has asked for yet.
    returned: Mutex<HashMap<Key, OwnedFd>>,
    tables: Mutex<Vec<Weak<Mutex<Files>>>>,
    /// Of tables that have ended.
    gone: Mutex<Vec<Key>>,
    thread: OnceLock<Thread>,
    is_woken: AtomicBool,
    has_ended: AtomicBool,
}

/// The thread that hands files over, and what it talks to.
pub(crate) struct Keeping {
    kept: Arc<Kept>,
    thread: Option<JoinHandle<()>>,
}

impl Kept {
    /// Takes over the files that a holder has for this directory, and starts a holder with `command` if there is
    /// none.
    pub(crate) fn start(
        directory: &Path,
        command: &[OsString],
    ) -> io::Result<(Arc<Self>, Keeping)> {
        let (socket, child) = hold::connect(directory, command)?;
        let kept = Arc::new(Self {
            returned: Mutex::new(returned(&socket)?),
            tables: Mutex::default(),
            gone: Mutex::default(),
            thread: OnceLock::new(),
            is_woken: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        });
        let body = {
            let kept = kept.clone();
            move || kept.work(&socket, child)
        };
        let thread = std::thread::Builder::new().name("towline-kept".to_owned()).spawn(body)?;
        let _ = kept.thread.set(thread.thread().clone()); // nobody else sets it
        Ok((kept.clone(), Keeping { kept, thread: Some(thread) }))
    }

    /// Keeps the files of this table from now on.
    pub(crate) fn add(self: &Arc<Self>, files: &SharedFiles) {
        let keep: Arc<dyn Keep> = self.clone();
        let mut tables = self.tables.lock();
        if !self.has_ended.load(Ordering::Acquire) && files.lock().be_kept(&keep) {
            tables.push(Arc::downgrade(files));
        }
    }

    /// Hands files over until the server ends.
    fn work(&self, socket: &OwnedFd, child: Option<Child>) {
        let until = Instant::now() + RETURN;
        while !self.has_ended.load(Ordering::Acquire) {
            if !self.is_woken.swap(false, Ordering::AcqRel) {
                let left = until.saturating_duration_since(Instant::now());
                let is_any_returned = !self.returned.lock().is_empty();
                match is_any_returned {
                    false => std::thread::park(),
                    true if left.is_zero() => self.give_up_returned(),
                    true => std::thread::park_timeout(left),
                }
                continue;
            }
            towline_net::pause(DELAY);
            if let Err(error) = self.hand_over(socket) {
                log::warn!(
                    "open files without a name will be lost when the server is killed: the process that holds \
                     them cannot be reached: {error}"
                );
                self.give_up();
                break;
            }
        }
        let _ = self.hand_over(socket); // to a holder that may have ended
        // Without a connection it ends by itself; if it has ended, this is all that is left of it.
        drop(child.map(|mut child| child.try_wait()));
    }

    /// Keeps no more files.
    fn give_up(&self) {
        self.has_ended.store(true, Ordering::Release);
        let tables = std::mem::take(&mut *self.tables.lock());
        tables.iter().filter_map(Weak::upgrade).for_each(|files| files.lock().be_left());
    }

    /// Lets go of what no client has asked for.
    fn give_up_returned(&self) {
        let keys: Vec<Key> = self.returned.lock().drain().map(|(key, _)| key).collect();
        self.gone.lock().extend(keys);
        self.is_woken.store(true, Ordering::Release);
    }

    fn hand_over(&self, socket: &OwnedFd) -> io::Result<()> {
        let mut tables = Vec::new();
        self.tables.lock().retain(|table| {
            let table = table.upgrade();
            let is_there = table.is_some();
            tables.extend(table);
            is_there
        });
        let mut gone = std::mem::take(&mut *self.gone.lock());
        for table in tables {
            let (owner, News { opened, closed }) = {
                let mut files = table.lock();
                (files.owner, files.news())
            };
            for files in opened.chunks(hold::FILES_MAX) {
                keep(socket, owner, files)?;
            }
            gone.extend(closed.into_iter().map(|handle| (owner, handle)));
        }
        for keys in gone.chunks(hold::KEYS_MAX) {
            send_descriptors(socket, &hold::message(Kind::LetGo, keys), &[], Wait::Any)?;
        }
        Ok(())
    }

    fn wake_thread(&self) {
        if !self.is_woken.swap(true, Ordering::AcqRel)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }
}

/// Hands files of an owner over.
fn keep(socket: &OwnedFd, owner: u64, files: &[(u64, Arc<dyn OpenFile>)]) -> io::Result<()> {
    let of = |(handle, file): &'_ (u64, Arc<dyn OpenFile>)| {
        Some(((owner, *handle), file.descriptor()?.try_clone_to_owned().ok()?))
    };
    let (keys, files): (Vec<Key>, Vec<OwnedFd>) = files.iter().filter_map(of).unzip();
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    if !files.is_empty() {
        send_descriptors(socket, &hold::message(Kind::Keep, &keys), &files, Wait::Any)?;
    }
    Ok(())
}

/// Receives what the holder has.
fn returned(socket: &OwnedFd) -> io::Result<HashMap<Key, OwnedFd>> {
    let mut returned = HashMap::new();
    let mut bytes = [0; 1 + hold::FILES_MAX * KEY_BYTES];
    loop {
        let (length, files) = receive_descriptors(socket, &mut bytes, Wait::Any)?;
        match hold::parse(&bytes[..length]) {
            Some((Kind::Keep, keys)) => returned.extend(keys.into_iter().zip(files)),
            Some((Kind::End, _)) => return Ok(returned),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl Keep for Kept {
    fn wake(&self) {
        self.wake_thread();
    }

    fn let_go(&self, owner: u64, handles: Vec<u64>) {
        // When the server ends, the next one takes over.
        if !self.has_ended.load(Ordering::Acquire) {
            self.gone.lock().extend(handles.into_iter().map(|handle| (owner, handle)));
            self.wake_thread();
        }
    }

    fn take(&self, owner: u64, handle: u64) -> Option<OwnedFd> {
        self.returned.lock().remove(&(owner, handle))
    }
}

impl Keeping {
    /// To be called before the sessions of a server that ends are dropped: the holder has what it has by now.
    pub(crate) fn end(&mut self) {
        self.kept.has_ended.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join(); // it has reported its panic
        }
    }
}
