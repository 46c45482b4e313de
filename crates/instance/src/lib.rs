//! What the processes of one `towline run` share: a private directory with a mapped file.
//!
//! `DIR/state` holds the configuration (written once by `towline run`) and the table of open file
//! descriptions: offset, flags, handle. A descriptor of a remote file is, for the kernel, a
//! *placeholder*: `DIR/d/N` opened with access mode 3, which permits neither reading nor writing,
//! so that a call that slips by fails instead of touching wrong data. N names the entry of the
//! table. The kernel thus keeps `dup`, `fork`, `exec`, close-on-exec and descriptor passing right,
//! and tells `towline run` (by inotify) when the last descriptor of an entry is closed.
//! `DIR/cwd` holds empty directories that stand for remote working directories.
//!
//! Any process of the run can write the table, as they all run for one user; lengths and numbers
//! are checked before use all the same.

mod config;
mod state;

pub use config::{Config, Mount};
pub use state::{Entry, State, Taken};

/// Environment variable with the private directory of the run.
pub const VARIABLE: &str = "TOWLINE_RUN";
/// Folder of the placeholders in it.
pub const PLACEHOLDERS: &str = "d";
/// Folder of the stand-ins for remote working directories.
pub const WORKING: &str = "cwd";
/// Folder of the memory that stands for files mapped shared.
pub const MAPPINGS: &str = "m";
/// The mapped file.
pub const STATE: &str = "state";
/// Open file descriptions of one run.
pub const ENTRIES: usize = 16384;
/// Most prefixes (`--at`).
pub const MOUNTS_MAX: usize = 16;
