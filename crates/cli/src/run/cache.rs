//! The directory in which programs keep what they read (`--cache`, `instance::cache`), and its limit.

use crate::report::{Failure, Outcome};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use towline_instance::State;
use towline_instance::cache::trim;

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
