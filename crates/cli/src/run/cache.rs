//! The cache of file contents (`--cache`, `instance::cache`): the limit of its directory, and what the keeper reads
//! for mappings of programs.

use crate::report::{Failure, Outcome};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use towline_client::{Attr, Error, File, Url};
use towline_instance::State;
use towline_instance::cache::{Cached, VALID, Version, trim};

/// How often to look how much was kept.
const LOOK: Duration = Duration::from_secs(2);
/// When a run has kept this part of the limit, the directory is listed to see how much there is.
const PART: u64 = 16;

/// The directory of the cache.
#[derive(Clone)]
pub(super) struct Folder {
    path: PathBuf,
    /// How many bytes all files in it may occupy, about.
    limit: u64,
}

impl Folder {
    /// Makes the directory if it is missing; without a path, the user's own one.
    pub(super) fn new(path: Option<&Path>, limit: u64) -> Outcome<Self> {
        let path = match path {
            Some(path) => std::path::absolute(path)?,
            None => users_own()?,
        };
        let about = |error: io::Error| {
            Failure::from(error).about(path.display()).with("--cache-dir names another")
        };
        DirBuilder::new().mode(0o700).recursive(true).create(&path).map_err(about)?;
        let about_it = std::fs::metadata(&path).map_err(about)?;
        // Others could put there what programs would read.
        if about_it.uid() != rustix::process::geteuid().as_raw() || about_it.mode() & 0o022 != 0 {
            let what =
                "the directory of the cache must belong to you, and no one else may write in it";
            return Err(Failure::new(what).about(path.display()));
        }
        Ok(Self { path, limit })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps the limit while the run lasts, on a thread of its own.
    pub(super) fn watch(&self, state: &Arc<State>) {
        let (folder, state) = (self.clone(), Arc::clone(state));
        let watch = move || {
            let mut trimmed = 0;
            loop {
                std::thread::sleep(LOOK);
                let kept = state.to_cache().load(Ordering::Relaxed);
                if kept - trimmed > folder.limit / PART {
                    folder.trim(&state);
                    trimmed = kept;
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("cache".to_owned()).spawn(watch) {
            log::warn!(
                "the cache may grow beyond its limit until the run ends: no thread: {error}"
            );
        }
    }

    /// Removes what is too much, if the run has kept anything.
    pub(super) fn trim(&self, state: &State) {
        if state.to_cache().load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Err(error) = trim(&self.path, self.limit) {
            log::warn!("cannot keep the cache within its limit: {}: {error}", self.path.display());
        }
    }
}

/// What is kept of a file that a program has mapped and cannot write.
pub(super) struct Contents {
    state: Arc<State>,
    /// `None` once the file has another version.
    cached: Mutex<Option<(Arc<Cached>, Confirmed)>>,
}

/// When the server has last told the version, and the number of changes of the run before that.
#[derive(Clone, Copy)]
struct Confirmed {
    when: Instant,
    changes: u64,
}

impl Confirmed {
    /// Asks the server for the attributes of a file; `None` if it does not answer.
    fn ask(state: &State, file: &File) -> Option<(Attr, Self)> {
        let changes = state.changes().load(Ordering::Acquire);
        let attr = file.stat().ok()?;
        Some((attr, Self { when: Instant::now(), changes }))
    }

    fn is_valid(self, state: &State) -> bool {
        self.changes == state.changes().load(Ordering::Acquire) && self.when.elapsed() < VALID
    }
}

impl Contents {
    /// Returns what is kept of an open file, or `None` if the run has no cache or the file may not be kept.
    pub(super) fn of(state: &Arc<State>, url: &Url, file: &File) -> Option<Self> {
        let directory = state.config()?.cache;
        if directory.is_empty() {
            return None;
        }
        let (attr, confirmed) = Confirmed::ask(state, file)?;
        let version = Version::of(url.of_export().to_string().as_bytes(), &attr)?;
        let cached = Arc::new(Cached::open(&directory, version, Ok).ok()?);
        let cached = Mutex::new(Some((cached, confirmed)));
        Some(Self { state: Arc::clone(state), cached })
    }

    /// Returns the cached file if the remote one still has that version.
    fn confirmed(&self, file: &File) -> Option<Arc<Cached>> {
        let mut known = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let (cached, confirmed) = known.as_mut()?;
        if !confirmed.is_valid(&self.state) {
            match Confirmed::ask(&self.state, file) {
                Some((attr, now)) if cached.version().is_still(&attr) => *confirmed = now,
                _ => *known = None,
            }
        }
        known.as_ref().map(|(cached, _)| Arc::clone(cached))
    }

    /// Reads the file, from the cache as far as it is there.
    ///
    /// # Errors
    /// As [`File::read_at`].
    pub(super) fn read_at(&self, file: &File, to: &mut [u8], offset: u64) -> Result<usize, Error> {
        let Some(cached) = self.confirmed(file) else { return file.read_at(to, offset) };
        let done = cached.read_at(to, offset);
        self.state.from_cache().fetch_add(done as u64, Ordering::Relaxed);
        let (rest, at) = (&mut to[done..], offset.saturating_add(done as u64));
        if rest.is_empty() || at >= cached.size() {
            return Ok(done);
        }
        let count = file.read_at(rest, at)?;
        // If it cannot be kept, for example as the disk is full, it is read again next time.
        let kept = cached.store(&rest[..count], at).unwrap_or(0);
        self.state.to_cache().fetch_add(kept, Ordering::Relaxed);
        Ok(done + count)
    }
}

/// Returns the directory for this user (XDG Base Directory Specification).
fn users_own() -> Outcome<PathBuf> {
    let named =
        |variable| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(".cache")));
    let folder = folder.ok_or_else(|| {
        Failure::new("no directory for the cache: neither XDG_CACHE_HOME nor HOME is set")
            .with("--cache-dir names one")
    })?;
    Ok(folder.join("towline"))
}
