//! The state that all processes of one `towline run` share: a private directory with a mapped file.
//!
//! `DIR/state` holds the configuration (written before the program starts), what the servers answered when
//! the run connected to them, and the table of open file descriptions: offset, flags, handle. Every process
//! that maps the file holds a shared lock on it (`flock`), so `towline run` knows when no process is left.
//! To the kernel, a descriptor of a remote file is a *placeholder*: `DIR/d/N` opened with access mode 3,
//! which permits neither reading nor writing, so that a call that slips past the library fails instead of
//! touching wrong data. N is the number of the table entry. The kernel thus handles `dup`, `fork`, `exec`,
//! close-on-exec and descriptor passing, and inotify tells `towline run` when the last descriptor of an
//! entry is closed. `DIR/cwd` holds empty directories that stand in for remote working directories.
//!
//! Any process of the run can write the table, as all of them act for the user who started it; lengths and
//! numbers are still checked before use.

pub mod behind;
pub mod cache;
mod config;
mod entry;
mod layout;
mod lock;
pub mod memory;
pub mod notes;
pub mod pager;
mod position;
pub mod program;
pub mod ready;
mod set;
mod state;
mod trap;
pub mod userfault;
pub mod watches;

pub use config::{Config, Mount, Root};
pub use entry::{Entry, Taken};
pub use layout::{
    DEVICE_MAJOR, FOLDER_BYTES_MAX, NOT_IN_FOLDER, PLACEHOLDERS, STATE, STATE_BYTES, VARIABLE,
};
pub use lock::{Holder, Locked};
pub use state::{Prepared, State, pid_namespace};
pub use trap::{can_host, has_thread_registers, has_trap};

/// File with messages for the user. It lies in the placeholder folder, so that closing it is noticed.
pub const NOTICES: &str = "notices";
/// File with the data for the report, if one is requested.
pub const RECORD: &str = "record";
/// Maximum number of libc functions, and of system call numbers, that are counted.
pub const COUNTED_MAX: usize = 512;
/// Folder of the stand-ins for remote working directories.
pub const WORKING: &str = "cwd";
/// Folder of the memory files behind files mapped shared.
pub const MAPPINGS: &str = "m";
/// Folder of local copies of remote programs and libraries, by mount and path.
pub const PROGRAMS: &str = "x";
/// Folder of the sockets that stand in for those bound to remote names.
pub const SOCKETS: &str = "s";
/// Socket of the pager, which fills mappings as their pages are touched.
pub const PAGER: &str = "pager";
/// Socket of the keeper. Processes send it their number, with a pidfd of themselves, before they take
/// record locks, questions when they want to watch files ([`watches::Ask`]) or a connection
/// ([`ready::Want`]), and what they list in watched directories ([`watches::Listed`]).
pub const KEEPER: &str = "keeper";
/// Folder of the shadows of watched files; created on demand.
pub const SHADOWS: &str = "w";
/// Socket of the server that a run starts for itself (`--serve`).
pub const SERVER: &str = "socket";
/// Maximum number of open file descriptions in one run.
pub const ENTRIES: usize = 16384;
/// How long a program waits for the keeper to close files that have no descriptors any more.
pub const CLOSING_WAIT: std::time::Duration = std::time::Duration::from_secs(1);
/// Maximum number of prefixes (`--at`).
pub const MOUNTS_MAX: usize = 16;

/// Returns true if `text` names `prefix` or a path below it: `/data`, `--input=/data/x`, but not
/// `/database`.
#[must_use]
pub fn mentions(text: &[u8], prefix: &[u8]) -> bool {
    let Some(first) = prefix.first() else { return true };
    (0..(text.len() + 1).saturating_sub(prefix.len())).any(|at| {
        // Fast path: each program searches its whole environment.
        if text[at] != *first {
            return false;
        }
        let rest = &text[at..];
        let ends = |b: &u8| !b.is_ascii_alphanumeric() && !matches!(b, b'_' | b'-' | b'.');
        rest.starts_with(prefix) && rest.get(prefix.len()).is_none_or(ends)
    })
}

#[cfg(test)]
mod tests {
    use super::mentions;

    #[test]
    fn a_prefix_is_found_whole() {
        for text in ["/data", "/data/x", "--in=/data/x", "a:/data:b", "/database /data"] {
            assert!(mentions(text.as_bytes(), b"/data"), "{text}");
        }
        for text in ["", "/dat", "/database", "/data-1", "/data.old", "/data_", "data"] {
            assert!(!mentions(text.as_bytes(), b"/data"), "{text}");
        }
    }
}
