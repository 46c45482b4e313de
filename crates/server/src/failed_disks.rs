//! Records the disks that had a failed flush since the machine booted, in a file in the state directory.
//!
//! Each failure is a line: the boot of the machine, the disk's identity and the epoch that follows, as
//! hexadecimal numbers. A disk's last line counts; lines of other boots do not.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use towline_block::Failures;
use towline_session::state::Boot;

/// Name of the file.
const NAME: &str = "disks";

#[derive(Debug)]
pub(crate) struct FailedDisks {
    boot: u128,
    file: Mutex<File>,
    epochs: Mutex<HashMap<u64, u64>>,
}

impl FailedDisks {
    /// Opens the file in this directory, creates it if it is missing, and reads the lines of this boot.
    pub(crate) fn open(directory: &Path, boot: &Boot) -> Result<Self, String> {
        let path = directory.join(NAME);
        let wrong = |error: io::Error| format!("{}: {error}", path.display());
        let mut how = OpenOptions::new();
        // Does not block on a fifo without a writer.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        how.read(true).append(true).create(true).mode(0o600).custom_flags(flags);
        let mut file = how.open(&path).map_err(wrong)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(wrong)?;
        let boot = u128::from_be_bytes(*boot);
        let text = String::from_utf8_lossy(&bytes);
        let epochs: HashMap<_, _> = text.lines().filter_map(|line| of_line(line, boot)).collect();
        if epochs.is_empty() {
            file.set_len(0).map_err(wrong)?;
        }
        Ok(Self { boot, file: Mutex::new(file), epochs: Mutex::new(epochs) })
    }
}

/// Returns the identity and the epoch of a line if it is of this boot.
fn of_line(line: &str, boot: u128) -> Option<(u64, u64)> {
    let mut words = line.split(' ');
    let of = u128::from_str_radix(words.next()?, 16).ok()?;
    let mut number = || u64::from_str_radix(words.next()?, 16).ok();
    let found = (number()?, number()?);
    (of == boot && words.next() == Some("end")).then_some(found)
}

impl Failures for FailedDisks {
    fn epoch(&self, identity: u64) -> Option<u64> {
        self.epochs.lock().get(&identity).copied()
    }

    fn note(&self, identity: u64, epoch: u64) {
        self.epochs.lock().insert(identity, epoch);
        // Starts on a new line, in case a kill has cut the last one short.
        let line = format!("\n{:x} {identity:x} {epoch:x} end\n", self.boot);
        if let Err(error) = self.file.lock().write_all(line.as_bytes()) {
            log::error!(
                "a disk whose flush failed is not kept in the state: clients that wrote to it are \
                 not told after a restart that their writes may be lost: {error}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    #[test]
    fn failures_are_known_until_the_machine_starts_again() {
        let directory = TempDir::new().unwrap();
        let open = |boot| FailedDisks::open(directory.path(), &[boot; 16]).unwrap();
        let failed = open(1);
        assert_eq!(failed.epoch(5), None);
        failed.note(5, 50);
        failed.note(6, 60);
        failed.note(5, u64::MAX);
        assert_eq!((failed.epoch(5), failed.epoch(6)), (Some(u64::MAX), Some(60)));
        let failed = open(1);
        assert_eq!((failed.epoch(5), failed.epoch(6)), (Some(u64::MAX), Some(60)));
        // A line cut short by a kill must not give another epoch.
        let path = directory.path().join(NAME);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.trim_end().strip_suffix("fff end").unwrap()).unwrap();
        let failed = open(1);
        assert_eq!((failed.epoch(5), failed.epoch(6)), (Some(50), Some(60)));
        failed.note(5, 51);
        assert_eq!(open(1).epoch(5), Some(51));
        assert_eq!(open(2).epoch(5), None);
        assert_eq!(std::fs::read(&path).unwrap(), b"");
    }

    #[test]
    fn what_cannot_be_written_is_named() {
        let directory = TempDir::new().unwrap();
        std::fs::create_dir(directory.path().join(NAME)).unwrap();
        let error = FailedDisks::open(directory.path(), &[1; 16]).unwrap_err();
        assert!(error.contains(NAME), "{error}");
    }
}
