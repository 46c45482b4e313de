//! The exports of a running server; replaced as a whole when the configuration is read again.

use crate::config::{Export, ExportKind};
use crate::stats::Statistics;
use parking_lot::RwLock;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use towline_block::{ClientKey, Meter, Meters};
use towline_session::Exports as Find;
use towline_session::files::Terms;
use towline_session::state::State;
use towline_store::FileStore;
use towline_store::directory::DirectoryStore;
use towline_store::memory::MemoryStore;

/// How long a file system may take to answer before it is taken to hang.
const ANSWER: Duration = Duration::from_secs(5);

struct Active {
    export: Export,
    store: Arc<dyn FileStore>,
    /// The same store, if it is in memory.
    memory: Option<Arc<MemoryStore>>,
    /// See [`Terms`].
    account: u32,
}

/// The meters of an export's clients.
struct Account {
    name: String,
    meters: Meters,
}

/// Exports that can replace the current ones.
#[derive(Default)]
pub(crate) struct NextExports(Vec<Active>);

/// Exports by name. Sessions keep the stores they have open, whatever happens here.
pub(crate) struct Exports {
    active: RwLock<Vec<Active>>,
    /// Names that stood for other directories before the server restarted.
    moved: RwLock<Vec<Vec<u8>>>,
    /// The accounts of all exports that ever existed; the first has number 1.
    accounts: RwLock<Vec<Account>>,
    /// Some export limits its clients; checked for each request.
    limited: AtomicBool,
    statistics: Arc<Statistics>,
}

impl Exports {
    pub(crate) fn new(exports: &[Export], statistics: Arc<Statistics>) -> io::Result<Self> {
        let this = Self {
            active: RwLock::default(),
            moved: RwLock::default(),
            accounts: RwLock::default(),
            limited: AtomicBool::new(false),
            statistics,
        };
        this.replace(this.prepare(exports)?);
        Ok(this)
    }

    /// Opens those exports that are not open yet or have become another directory. Unchanged exports keep
    /// their stores and contents; memory exports keep their contents even if their size changes.
    pub(crate) fn prepare(&self, exports: &[Export]) -> io::Result<NextExports> {
        let mut next: Vec<Active> = Vec::new();
        for export in exports {
            let name = &export.name;
            let wrong = |what: &str| {
                let what = format!("export \"{name}\": {what}");
                io::Error::new(io::ErrorKind::InvalidInput, what)
            };
            export.check_name().map_err(|what| wrong(&what))?;
            if next.iter().any(|a| a.export.name == *name) {
                return Err(wrong("name is used twice"));
            }
            let old = self
                .active
                .read()
                .iter()
                .find(|a| is_same(&a.export, export))
                .map(|a| a.store.clone());
            let old = old.filter(|store| match &export.kind {
                ExportKind::Directory(path) => !is_replaced(name, store.as_ref(), path),
                _ => true,
            });
            let (store, memory) = match (old, &export.kind) {
                (_, ExportKind::Memory(limit)) => {
                    let old = self.memory(name);
                    if let Some(most) = old.as_ref().map(|m| m.limit_max()).filter(|m| m < limit) {
                        return Err(wrong(&format!("its memory can grow to at most {most} bytes")));
                    }
                    let memory = old.map_or_else(|| MemoryStore::new(name, *limit), Ok);
                    let memory = memory.map_err(|error| {
                        wrong(&format!("a file system of {limit} bytes in memory: {error}"))
                    })?;
                    (memory.clone() as Arc<dyn FileStore>, Some(memory))
                }
                (Some(store), _) => (store, None),
                (None, ExportKind::Own(store)) => (store.0.clone(), None),
                (None, ExportKind::Directory(path)) => {
                    let (wanted, read_only) = (path.clone(), export.read_only);
                    let what = format!("export \"{name}\": directory {}", path.display());
                    match awaited(&what, move || DirectoryStore::new(&wanted, read_only)) {
                        Ok(store) => {
                            if let Some(kind) = store.foreign() {
                                tell_foreign(name, kind);
                            }
                            (store as Arc<dyn FileStore>, None)
                        }
                        Err(error) => {
                            return Err(io::Error::new(error.kind(), format!("{what}: {error}")));
                        }
                    }
                }
            };
            next.push(Active { export: export.clone(), store, memory, account: 0 });
        }
        Ok(NextExports(next))
    }

    /// Makes these the current exports.
    pub(crate) fn replace(&self, NextExports(mut next): NextExports) {
        for Active { export, memory, account, .. } in &mut next {
            *account = self.account(export);
            if let (Some(memory), ExportKind::Memory(limit)) = (memory, &export.kind) {
                memory.set_limit(*limit);
            }
        }
        // Accounts of exports that are gone stay as they are.
        let limited = self.accounts.read().iter().any(|account| account.meters.are_limited());
        self.limited.store(limited, Ordering::Relaxed);
        *self.active.write() = next;
    }

    /// Returns true if answers that clients do not take keep too much memory of an export.
    pub(crate) fn are_overfull(&self) -> bool {
        self.active.read().iter().any(|a| a.memory.as_ref().is_some_and(|m| m.is_overfull()))
    }

    /// Returns the account number of an export and sets its limit from now on. Clients with files open in an
    /// earlier export of this name have the same account.
    fn account(&self, export: &Export) -> u32 {
        let mut accounts = self.accounts.write();
        let same = |known: &Account| known.name == export.name;
        let place = accounts.iter().position(same).unwrap_or_else(|| {
            accounts.push(Account { name: export.name.clone(), meters: Meters::default() });
            accounts.len() - 1
        });
        accounts[place].meters.set(export.limit);
        place as u32 + 1
    }

    /// Returns true if some export limits its clients.
    pub(crate) fn are_limited(&self) -> bool {
        self.limited.load(Ordering::Relaxed)
    }

    /// Returns the meter of a client in this account.
    pub(crate) fn meter(&self, account: u32, client: ClientKey) -> Option<Arc<Meter>> {
        let accounts = self.accounts.read();
        let account = accounts.get((account as usize).checked_sub(1)?)?;
        Some(account.meters.of(client))
    }

    /// Returns the memory store exported under this name.
    fn memory(&self, name: &str) -> Option<Arc<MemoryStore>> {
        self.active.read().iter().find(|a| a.export.name == name)?.memory.clone()
    }

    /// Checks whether a file system that may hang was mounted below an export.
    pub(crate) fn look_at_mounts(&self) {
        for Active { export, store, .. } in self.active.read().iter() {
            if let Some(kind) = store.look_at_mounts() {
                tell_foreign(&export.name, &kind);
            }
        }
    }

    /// Records in the state what is exported. A name that meant another directory before the restart must not
    /// be used to open files again.
    pub(crate) fn note(&self, state: &State) {
        let active = self.active.read();
        let durable = active.iter().filter(|a| a.store.survives_restart());
        let roots: Vec<_> = durable
            .filter_map(|a| Some((a.export.name.as_bytes(), a.store.root().ok()?.identity())))
            .collect();
        for name in state.note_exports(&roots) {
            let shown = String::from_utf8_lossy(name);
            log::warn!("export \"{shown}\" is now another directory: open files are lost");
            self.moved.write().push(name.to_vec());
        }
    }
}

/// Returns true if the directory at this path is no longer the root of the export's store, because of a mount
/// or rename. A file system that does not answer in time is taken to be unchanged. If nothing is there, the
/// store stays, but the next start would fail, so a warning says so.
fn is_replaced(name: &str, store: &dyn FileStore, path: &Path) -> bool {
    let wanted = path.to_owned();
    match (in_time(move || DirectoryStore::identity_at(&wanted)), store.root()) {
        (Some(Ok(now)), Ok(root)) => now != root.identity(),
        (Some(Err(error)), _) => {
            let path = path.display();
            log::warn!(
                "export \"{name}\": directory {path}: {error}; serving the one that was opened before"
            );
            false
        }
        _ => false,
    }
}

/// Returns true if two exports have the same store, whatever their other options.
fn is_same(one: &Export, other: &Export) -> bool {
    one.name == other.name && one.kind == other.kind && one.read_only == other.read_only
}

/// Returns the result of a call to a file system, or `None` if it does not return in time.
pub(crate) fn in_time<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    begun(look).and_then(|told| told.recv_timeout(ANSWER).ok())
}

/// Opens what is to be served. A warning names it if its file system does not answer in time.
pub(crate) fn awaited<T: Send + 'static>(
    what: &str,
    open: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let failed = || io::Error::other("cannot be opened: no thread, or it failed");
    let told = begun(open).ok_or_else(failed)?;
    told.recv_timeout(ANSWER).unwrap_or_else(|_| {
        log::warn!("{what}: waiting for its file system, which does not answer");
        told.recv().map_err(|_| failed())?
    })
}

/// Makes a call that may hang on a thread of its own.
fn begun<T: Send + 'static>(
    look: impl FnOnce() -> T + Send + 'static,
) -> Option<mpsc::Receiver<T>> {
    let (tell, told) = mpsc::channel();
    let look = std::thread::Builder::new().spawn(move || {
        // After a timeout nobody receives it.
        let _ = tell.send(look());
    });
    look.ok().map(|_| told)
}

fn tell_foreign(name: &str, kind: &str) {
    log::info!(
        "export \"{name}\" has files on {kind}, which may hang: separate threads carry out its \
         requests"
    );
}

impl Find for Exports {
    fn find(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)> {
        let active = self.active.read();
        let found = active.iter().find(|a| a.export.name.as_bytes() == name)?;
        let terms = Terms { read_only: found.export.read_only, account: found.account };
        Some((found.store.clone(), terms))
    }

    fn find_again(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)> {
        let (store, terms) = self.find(name)?;
        let moved = self.moved.read().iter().any(|moved| moved == name);
        (store.survives_restart() && !moved).then_some((store, terms))
    }

    fn names(&self) -> Vec<u8> {
        let mut names = Vec::new();
        for active in self.active.read().iter() {
            names.extend_from_slice(active.export.name.as_bytes());
            names.push(0);
        }
        names
    }

    fn statistics(&self) -> Vec<u8> {
        self.statistics.to_json().into_bytes()
    }
}
