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
use towline_session::files::{Files, Keep, SharedFiles, ToKeep};
use towline_wire::limits::SESSION_LEASE_SECONDS;

pub(crate) mod hold;

use hold::{ENTRY_BYTES, Entry, Key, Kind, Root};

/// How long after a file was opened it is handed over.
const DELAY: Duration = Duration::from_millis(200);
/// How long files of the previous server are kept for clients that are not back yet.
const RETURN: Duration = Duration::from_secs(SESSION_LEASE_SECONDS + 10);

/// The server's side.
pub(crate) struct Kept {
    /// Files of the previous server that no client has asked for yet.
    returned: Mutex<HashMap<Key, (Root, OwnedFd)>>,
    tables: Mutex<Vec<Weak<Mutex<Files>>>>,
    /// Files that are closed.
    gone: Mutex<Vec<Key>>,
    thread: OnceLock<Thread>,
    /// Files were opened.
    is_woken: AtomicBool,
    /// The holder cannot be reached any more.
    is_alone: AtomicBool,
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
        let mut child = None;
        let mut connect = || {
            let (socket, started) = hold::connect(directory, command)?;
            child = started.or(child.take());
            Ok::<_, io::Error>((returned(&socket)?, socket))
        };
        let (returned, socket) = match connect() {
            // It was just ending, as it had nothing to hold.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => connect()?,
            connected => connected?,
        };
        let kept = Arc::new(Self {
            returned: Mutex::new(returned),
            tables: Mutex::default(),
            gone: Mutex::default(),
            thread: OnceLock::new(),
            is_woken: AtomicBool::new(false),
            is_alone: AtomicBool::new(false),
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

    /// Keeps the files of this table from now on. `owner` is a secret of its owner.
    pub(crate) fn add(self: &Arc<Self>, files: &SharedFiles, owner: u64) {
        let keep: Arc<dyn Keep> = self.clone();
        let mut tables = self.tables.lock();
        if files.lock().be_kept(&keep, owner) {
            tables.push(Arc::downgrade(files));
        }
    }

    /// Hands files over until the server ends.
    fn work(&self, socket: &OwnedFd, child: Option<Child>) {
        let until = Instant::now() + RETURN;
        let mut due = None;
        loop {
            let has_ended = self.has_ended.load(Ordering::Acquire);
            let now = Instant::now();
            if now >= until {
                let returned = std::mem::take(&mut *self.returned.lock());
                self.gone.lock().extend(returned.into_keys());
            }
            if self.is_woken.swap(false, Ordering::AcqRel) {
                due.get_or_insert(now + DELAY);
            }
            let is_due = has_ended || due.is_some_and(|due| due <= now);
            if let Err(error) = self.tell(socket, is_due)
                && !self.is_alone.swap(true, Ordering::AcqRel)
            {
                log::warn!(
                    "open files without a name will be lost when the server is killed: the process that holds \
                     them cannot be reached: {error}"
                );
            }
            if has_ended {
                break;
            }
            due = due.filter(|_| !is_due);
            let is_any_returned = !self.returned.lock().is_empty();
            match due.into_iter().chain(is_any_returned.then_some(until)).min() {
                Some(next) => std::thread::park_timeout(next.saturating_duration_since(now)),
                None => std::thread::park(),
            }
        }
        // Without a connection it ends by itself; if it has ended, this is all that is left of it.
        drop(child.map(|mut child| child.try_wait()));
    }

    /// Tells the holder which files are closed and, if `is_due`, hands over those that were opened.
    fn tell(&self, socket: &OwnedFd, is_due: bool) -> io::Result<()> {
        let gone = std::mem::take(&mut *self.gone.lock());
        let tables = if is_due { self.tables() } else { Vec::new() };
        let opened: Vec<(u64, Vec<ToKeep>)> =
            tables.iter().map(|table| table.lock().opened()).collect();
        drop(tables);
        if self.is_alone.load(Ordering::Acquire) {
            return Ok(());
        }
        // First, as the same files may be open again.
        for keys in gone.chunks(hold::KEYS_MAX) {
            let entries: Vec<Entry> = keys.iter().map(|key| (*key, Root::default())).collect();
            send_descriptors(socket, &hold::message(Kind::LetGo, &entries), &[], Wait::Any)?;
        }
        for (owner, files) in opened {
            for files in files.chunks(hold::FILES_MAX) {
                keep(socket, owner, files)?;
            }
        }
        Ok(())
    }

    /// Returns the tables that are still there.
    fn tables(&self) -> Vec<SharedFiles> {
        let mut found = Vec::new();
        self.tables.lock().retain(|table| {
            let table = table.upgrade();
            let is_there = table.is_some();
            found.extend(table);
            is_there
        });
        found
    }

    fn unpark(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// Hands files of an owner over.
fn keep(socket: &OwnedFd, owner: u64, files: &[ToKeep]) -> io::Result<()> {
    let of = |kept: &ToKeep| {
        let fd = kept.file.descriptor()?.try_clone_to_owned().ok()?;
        Some((((owner, kept.handle), kept.root), fd))
    };
    let (entries, files): (Vec<Entry>, Vec<OwnedFd>) = files.iter().filter_map(of).unzip();
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    if !files.is_empty() {
        send_descriptors(socket, &hold::message(Kind::Keep, &entries), &files, Wait::Any)?;
    }
    Ok(())
}

/// Receives what the holder has.
fn returned(socket: &OwnedFd) -> io::Result<HashMap<Key, (Root, OwnedFd)>> {
    let mut returned = HashMap::new();
    let mut bytes = [0; 1 + hold::FILES_MAX * ENTRY_BYTES];
    loop {
        let (length, files) = match receive_descriptors(socket, &mut bytes, Wait::Any) {
            // There are too many open files; these will be opened by their paths.
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => continue,
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            received => received?,
        };
        match hold::parse(&bytes[..length]) {
            Some((Kind::Keep, entries)) => {
                let entries = entries.into_iter().zip(files);
                returned.extend(entries.map(|((key, root), file)| (key, (root, file))));
            }
            Some((Kind::End, _)) => return Ok(returned),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl Keep for Kept {
    fn wake(&self) -> bool {
        if self.is_alone.load(Ordering::Relaxed) {
            return false;
        }
        if !self.is_woken.load(Ordering::Relaxed) && !self.is_woken.swap(true, Ordering::AcqRel) {
            self.unpark();
        }
        true
    }

    fn let_go(&self, owner: u64, handles: Vec<u64>) {
        // When the server ends, the next one takes over.
        if !self.has_ended.load(Ordering::Acquire) && !handles.is_empty() {
            self.gone.lock().extend(handles.into_iter().map(|handle| (owner, handle)));
            self.unpark();
        }
    }

    fn take(&self, owner: u64, handle: u64, root: Root) -> Option<OwnedFd> {
        let mut returned = self.returned.lock();
        let (of, _) = returned.get(&(owner, handle))?;
        (*of == root).then(|| returned.remove(&(owner, handle)))?.map(|(_, file)| file)
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
