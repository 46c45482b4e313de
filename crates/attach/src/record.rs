//! What is attached: a small file for each device, by which another process can list it, end it,
//! or go on with it.

use crate::Error;
use rustix::fs::{FlockOperation, Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Where the files are; lost with the devices when the machine starts anew.
const DIRECTORY: &str = "/run/towline/attached";

/// By which way a disk is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(clippy::exhaustive_enums)] // there are these two
pub enum Kind {
    /// Our queues behind the kernel's ublk driver.
    Ublk,
    /// The kernel's NBD client.
    Nbd,
}

/// A device and how it came to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // given by callers
pub struct Record {
    /// The way.
    pub kind: Kind,
    /// N in its name.
    pub number: u32,
    /// The disk.
    pub url: String,
    /// The process that serves it, or did.
    pub process: u32,
    /// Bytes, when it was attached.
    pub size: u64,
    /// Connections to the server.
    pub connections: u16,
    /// How long requests wait for a server that went away, seconds; for ever unless given.
    pub patience: Option<u64>,
    /// Names the bytes of the disk, where its protocol tells: another number, other bytes.
    pub identity: Option<u64>,
    /// What the kernel says who made it, see [`crate::nbd::owner`].
    pub owner: String,
}

/// A record that this process holds: as long as it does, the device is served.
#[derive(Debug)]
pub struct Claim {
    file: File,
    path: PathBuf,
}

impl Record {
    /// `ublkb0` or `nbd0`.
    #[must_use]
    pub fn name(&self) -> String {
        let prefix = match self.kind {
            Kind::Ublk => "ublkb",
            Kind::Nbd => "nbd",
        };
        format!("{prefix}{}", self.number)
    }

    fn path(&self) -> PathBuf {
        Path::new(DIRECTORY).join(format!("{}.json", self.name()))
    }

    /// Where its process tells what happens, while it is in the background.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.path().with_extension("log")
    }

    /// Writes it, and holds it until the claim is dropped or the process ends.
    ///
    /// # Errors
    /// When another process holds it, or the file cannot be written.
    pub fn claim(&self) -> Result<Claim, Error> {
        let path = self.path();
        let failed = |error| Error::system(path.display())(error);
        std::fs::create_dir_all(DIRECTORY).map_err(Error::system(DIRECTORY))?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file =
            rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH)
                .map_err(|error| failed(error.into()))?;
        let mut file = File::from(file);
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            match error {
                rustix::io::Errno::WOULDBLOCK => {
                    Error::Refused(format!("/dev/{} is served by another process", self.name()))
                }
                _ => failed(error.into()),
            }
        })?;
        let text = serde_json::to_string_pretty(self).map_err(|error| failed(error.into()))?;
        file.set_len(0).map_err(failed)?;
        file.rewind().map_err(failed)?;
        writeln!(file, "{text}").map_err(failed)?;
        Ok(Claim { file, path })
    }

    /// True when a process holds it.
    #[must_use]
    pub fn is_held(&self) -> bool {
        let Ok(file) = File::open(self.path()) else { return false };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()
    }

    /// Removes it, and its log.
    pub fn remove(&self) {
        let _ = std::fs::remove_file(self.log());
        let _ = std::fs::remove_file(self.path());
    }

    /// All records that can be read, in order of their names.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let Ok(entries) = std::fs::read_dir(DIRECTORY) else { return Vec::new() };
        let mut records: Vec<Self> = entries
            .filter_map(|entry| {
                let mut text = String::new();
                File::open(entry.ok()?.path()).ok()?.read_to_string(&mut text).ok()?;
                serde_json::from_str(&text).ok()
            })
            .collect();
        records.sort_by_key(|record| (record.kind == Kind::Nbd, record.number));
        records
    }
}

impl Claim {
    /// Removes the record: the device is no more.
    pub fn remove(self) {
        use std::os::unix::fs::MetadataExt;
        // Not that of a successor.
        let same = |a: std::fs::Metadata, b: std::fs::Metadata| a.ino() == b.ino();
        let ours = self.file.metadata().ok().zip(std::fs::metadata(&self.path).ok());
        if ours.is_some_and(|(ours, found)| same(ours, found)) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
