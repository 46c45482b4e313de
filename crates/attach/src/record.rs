//! Records of what is attached: a small file for each device, with which another process can list it,
//! detach it, or take it over.

use crate::Error;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Directory of the files. Like the devices, they do not survive a reboot.
const DIRECTORY: &str = "/run/towline/attached";
/// Attempts to claim a record that other processes are only looking at.
const LOOKS: usize = 5000;

/// The way a disk is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(clippy::exhaustive_enums)] // there are these two
pub enum Kind {
    /// The kernel's ublk driver, with queues of ours.
    Ublk,
    /// The kernel's NBD client.
    Nbd,
}

/// A device and how it was attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // given by callers
pub struct Record {
    /// How it is attached.
    pub kind: Kind,
    /// The number N in its name.
    pub number: u32,
    /// URL of the disk.
    pub url: String,
    /// The process that serves it, or served it last.
    pub process: u32,
    /// Size in bytes when it was attached.
    pub size: u64,
    /// Connections to the server.
    pub connections: u16,
    /// Seconds that requests wait for a lost server; for ever if absent.
    pub patience: Option<u64>,
    /// Identifies the contents of the disk, if its protocol tells: other contents have another number.
    pub identity: Option<u64>,
    /// Changes when answered changes that were not flushed may be lost, if the protocol tells.
    pub epoch: Option<u64>,
    /// Tells the device from others that have its number before or after it, see [`crate::ublk::owner`] and
    /// [`crate::nbd::owner`].
    pub owner: String,
}

/// A record that this process holds for as long as it serves the device.
#[derive(Debug)]
pub struct Claim {
    file: File,
    path: PathBuf,
}

impl Record {
    /// Returns the name of the device: `ublkb0` or `nbd0`.
    #[must_use]
    pub fn name(&self) -> String {
        let prefix = match self.kind {
            Kind::Ublk => "ublkb",
            Kind::Nbd => "nbd",
        };
        format!("{prefix}{}", self.number)
    }

    fn path(&self) -> PathBuf {
        self.path_in(Path::new(DIRECTORY))
    }

    fn path_in(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{}.json", self.name()))
    }

    /// Returns true while the kernel has the device, if it is still the recorded one.
    #[must_use]
    pub fn exists(&self) -> bool {
        let owner = match self.kind {
            Kind::Ublk => crate::ublk::owner(self.number),
            Kind::Nbd => crate::nbd::owner(self.number),
        };
        owner.is_some_and(|owner| owner == self.owner)
    }

    /// Returns the size in bytes that the device has now; the one that it had when it was attached if the
    /// kernel does not have the device.
    #[must_use]
    pub fn size_now(&self) -> u64 {
        let now = if self.exists() { crate::sysfs::size(&self.name()) } else { None };
        now.unwrap_or(self.size)
    }

    /// Returns the path of the log that its process writes in the background.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.path().with_extension("log")
    }

    /// Writes the record, and holds it until the claim is dropped or the process ends.
    ///
    /// # Errors
    /// If another process holds it, or the file cannot be written.
    pub fn claim(&self) -> Result<Claim, Error> {
        self.claim_in(Path::new(DIRECTORY))
    }

    fn claim_in(&self, directory: &Path) -> Result<Claim, Error> {
        let path = self.path_in(directory);
        let failed = |error| Error::system(path.display())(error);
        std::fs::create_dir_all(directory).map_err(Error::system(directory.display()))?;
        let before = lock(&path).map_err(failed)?.ok_or_else(|| {
            Error::Refused(format!("/dev/{} is served by another process", self.name()))
        })?;
        let written = self.replace(&path);
        if written.is_err() && before.metadata().is_ok_and(|before| before.len() == 0) {
            let _ = std::fs::remove_file(&path);
        }
        Ok(Claim { file: written.map_err(failed)?, path })
    }

    /// Writes this record to `path`, and locks it. The caller has locked the file that is there. Without a readable
    /// record nobody could take over or detach the device, so that file stays complete until the new one replaces it.
    fn replace(&self, path: &Path) -> io::Result<File> {
        let new = path.with_extension("json.new");
        self.write(&new)
            .and_then(|file| std::fs::rename(&new, path).map(|()| file))
            .inspect_err(|_| drop(std::fs::remove_file(&new)))
    }

    /// Writes this record to a new file, and locks it.
    fn write(&self, path: &Path) -> io::Result<File> {
        // A process killed at this point leaves it; only the holder of the record gets here.
        let _ = std::fs::remove_file(path);
        let mut file = open(path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        writeln!(file, "{}", serde_json::to_string_pretty(self)?)?;
        Ok(file)
    }

    /// Returns true if it is about the same device and process. The process may have written it again meanwhile.
    fn is_same(&self, other: &Self) -> bool {
        (&self.owner, self.process) == (&other.owner, other.process)
    }

    /// Returns true if a process holds this record, not an earlier or later one of the device.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.is_held_in(Path::new(DIRECTORY))
    }

    fn is_held_in(&self, directory: &Path) -> bool {
        let path = self.path_in(directory);
        loop {
            let Ok(file) = File::open(&path) else { return false };
            let held = rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err();
            if is_at(&file, &path) {
                return held && read(file).is_some_and(|found| found.is_same(self));
            }
        }
    }

    /// Removes the record and its log, unless the device has another record by now.
    pub fn remove(&self) {
        let path = self.path();
        if File::open(&path).ok().and_then(read).is_some_and(|found| found.is_same(self)) {
            let _ = std::fs::remove_file(self.log());
            let _ = std::fs::remove_file(path);
        }
    }

    /// Returns all readable records in the order of their names.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let Ok(entries) = std::fs::read_dir(DIRECTORY) else { return Vec::new() };
        let mut records: Vec<Self> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
            .filter_map(|path| File::open(path).ok().and_then(read))
            .collect();
        records.sort_by_key(|record| (record.kind == Kind::Nbd, record.number));
        records
    }
}

fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, mode)?.into())
}

fn read(mut file: File) -> Option<Record> {
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

/// Returns true while `path` still names this file.
fn is_at(file: &File, path: &Path) -> bool {
    let there = file.metadata().ok().zip(std::fs::metadata(path).ok());
    there.is_some_and(|(file, found)| (file.dev(), file.ino()) == (found.dev(), found.ino()))
}

/// Opens the file, creates it if it is missing, and locks it; `None` if another process holds it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    for _ in 0..LOOKS {
        let file = open(path, OFlags::RDWR | OFlags::CREATE)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Its last holder may have removed or replaced it before unlocking it.
            Ok(()) if is_at(&file, path) => return Ok(Some(file)),
            Ok(()) => continue,
            Err(Errno::WOULDBLOCK) => (),
            Err(error) => return Err(error.into()),
        }
        // `is_held` takes a shared lock for a moment, while a holder's lock is exclusive.
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

impl Claim {
    /// Writes the record again, with what has changed.
    ///
    /// # Errors
    /// If the file cannot be written; the old one stays.
    pub fn renew(&mut self, record: &Record) -> Result<(), Error> {
        self.file = record.replace(&self.path).map_err(Error::system(self.path.display()))?;
        Ok(())
    }

    /// Removes the record of a device that no longer exists.
    pub fn remove(self) {
        // It may be a successor's by now.
        if is_at(&self.file, &self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(process: u32) -> Record {
        Record {
            kind: Kind::Ublk,
            number: 3,
            url: "towline://host:1/disk".to_owned(),
            process,
            size: 1 << 20,
            connections: 2,
            patience: None,
            identity: Some(u64::MAX),
            epoch: Some(1),
            owner: String::new(),
        }
    }

    fn found(directory: &Path) -> Option<Record> {
        File::open(record(0).path_in(directory)).ok().and_then(read)
    }

    #[test]
    fn only_its_own_process_holds_a_record() {
        let place = tempfile::tempdir().unwrap();
        let first = record(1).claim_in(place.path()).unwrap();
        assert!(record(1).is_held_in(place.path()));
        assert!(!record(2).is_held_in(place.path()), "that of a successor");
        let refused = record(2).claim_in(place.path()).unwrap_err().to_string();
        assert_eq!(refused, "/dev/ublkb3 is served by another process");
        assert_eq!(found(place.path()), Some(record(1)));
        drop(first);
        assert!(!record(1).is_held_in(place.path()));
        let second = record(2).claim_in(place.path()).unwrap();
        assert!(!record(1).is_held_in(place.path()), "the one who looks saw an earlier record");
        assert_eq!(found(place.path()), Some(record(2)));
        second.remove();
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_record_that_is_written_again_stays_that_of_its_process() {
        let place = tempfile::tempdir().unwrap();
        let mut claim = record(1).claim_in(place.path()).unwrap();
        let renewed = Record { epoch: Some(2), ..record(1) };
        claim.renew(&renewed).unwrap();
        assert_eq!(found(place.path()), Some(renewed));
        assert!(record(1).is_held_in(place.path()), "who looks may have read it before");
        record(2).claim_in(place.path()).unwrap_err();
        claim.remove();
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_record_that_cannot_be_replaced_stays() {
        let place = tempfile::tempdir().unwrap();
        drop(record(1).claim_in(place.path()).unwrap());
        // There is no room for a file of this name, whoever the user is.
        std::fs::create_dir(record(1).path_in(place.path()).with_extension("json.new")).unwrap();
        record(2).claim_in(place.path()).unwrap_err();
        assert_eq!(found(place.path()), Some(record(1)));
    }

    #[test]
    fn nothing_is_left_of_a_claim_that_failed() {
        let place = tempfile::tempdir().unwrap();
        let path = record(1).path_in(place.path());
        std::fs::create_dir(path.with_extension("json.new")).unwrap();
        record(1).claim_in(place.path()).unwrap_err();
        assert!(!path.exists());
    }

    #[test]
    fn who_looks_does_not_stand_in_the_way_of_a_claim() {
        let place = tempfile::tempdir().unwrap();
        drop(record(1).claim_in(place.path()).unwrap());
        let looking = File::open(record(1).path_in(place.path())).unwrap();
        rustix::fs::flock(&looking, FlockOperation::LockShared).unwrap();
        std::thread::scope(|scope| {
            let claiming = scope.spawn(|| record(2).claim_in(place.path()).map(drop));
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(looking);
            claiming.join().unwrap().unwrap();
        });
        assert_eq!(found(place.path()), Some(record(2)));
    }

    #[test]
    fn a_file_that_lost_its_name_is_nobodys_record() {
        let place = tempfile::tempdir().unwrap();
        let path = record(1).path_in(place.path());
        let first = record(1).claim_in(place.path()).unwrap();
        let opened = File::open(&path).unwrap();
        assert!(is_at(&opened, &path));
        first.remove();
        assert!(!is_at(&opened, &path));
        let _second = record(2).claim_in(place.path()).unwrap();
        assert!(!is_at(&opened, &path));
    }
}
