//! What the processes of one `towline run` share: a private directory with a mapped file.
//!
//! `DIR/state` holds the configuration (written before the program is started), what the servers said when they
//! were met, and the table of open file descriptions: offset, flags, handle. Who has it mapped has a shared lock of it
//! (`flock`), so that `towline run` knows when nobody is left. A descriptor of a remote file is, for the kernel, a
//! *placeholder*: `DIR/d/N` opened with access mode 3, which permits neither reading nor writing,
//! so that a call that slips by fails instead of touching wrong data. N names the entry of the
//! table. The kernel thus keeps `dup`, `fork`, `exec`, close-on-exec and descriptor passing right,
//! and tells `towline run` (by inotify) when the last descriptor of an entry is closed.
//! `DIR/cwd` holds empty directories that stand for remote working directories.
//!
//! Any process of the run can write the table, as they all run for one user; lengths and numbers
//! are checked before use all the same.

mod config;
mod entry;
mod layout;
pub mod memory;
pub mod notes;
pub mod pager;
pub mod program;
mod state;
mod trap;
pub mod userfault;
pub mod watches;

pub use config::{Config, Mount, Root};
pub use entry::{Entry, EntryLock, Taken};
pub use layout::{DEVICE_MAJOR, PLACEHOLDERS, STATE, VARIABLE};
pub use state::{Prepared, State};
pub use trap::{can_host, has_thread_registers, has_trap};

/// File in that folder, so that its closing is noticed, with what users are to be told at once.
pub const NOTICES: &str = "notices";
/// File with what a report is made of, where one is wanted.
pub const RECORD: &str = "record";
/// Most functions of libc and system calls that are counted.
pub const COUNTED_MAX: usize = 512;
/// Folder of the stand-ins for remote working directories.
pub const WORKING: &str = "cwd";
/// Folder of the memory that stands for files mapped shared.
pub const MAPPINGS: &str = "m";
/// Folder of local copies of remote programs and libraries, by mount and path.
pub const PROGRAMS: &str = "x";
/// Folder of the sockets that stand for those bound to remote names.
pub const SOCKETS: &str = "s";
/// Socket of the pager, which fills mappings when they are touched.
pub const PAGER: &str = "pager";
/// Socket of the keeper. Processes send it their number, with a descriptor of themselves, before they take record locks, and
/// [questions](watches::Ask) when they want to watch files.
pub const KEEPER: &str = "keeper";
/// Folder of what stands for watched files; it is made when it is needed.
pub const SHADOWS: &str = "w";
/// Socket of the server of a run of its own (`--serve`).
pub const SERVER: &str = "socket";
/// Open file descriptions of one run.
pub const ENTRIES: usize = 16384;
/// Most prefixes (`--at`).
pub const MOUNTS_MAX: usize = 16;

/// True when a text names a prefix or something below it: `/data`, `--input=/data/x`, but not
/// `/database`.
#[must_use]
pub fn mentions(text: &[u8], prefix: &[u8]) -> bool {
    let Some(first) = prefix.first() else { return true };
    (0..(text.len() + 1).saturating_sub(prefix.len())).any(|at| {
        // Each program looks through all its environment.
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
