//! The disks that a client has open, and what it needs to know of them after a restart of the
//! server.

use crate::convert::unexpected;
use crate::core::{Core, Outcome};
use crate::{DiskInfo, Error};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use towline_wire::{Errno, Reply, Request};

/// An open disk.
pub(crate) struct DiskState {
    pub(crate) number: u32,
    pub(crate) name: Vec<u8>,
    pub(crate) info: Mutex<DiskInfo>,
    durability: Durability,
}

/// What is known of the durability of a disk's contents, see [`crate::Client::disk_sharing`]. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Durability(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    changes: Mutex<Changes>,
    /// Why the disk cannot be used any more. Checked before each request, so it takes no lock.
    broken: OnceLock<Error>,
    /// Of the disk that was opened first.
    identity: OnceLock<u64>,
}

impl Durability {
    /// For a disk to which somebody else made changes under `epoch` ([`DiskInfo::epoch`]), which may not have been
    /// flushed.
    #[must_use]
    pub fn inherited(epoch: u64) -> Self {
        // Their numbers are smaller than those of all changes still to come.
        let changes = Changes { unflushed: vec![(epoch, 0..1)], ..Changes::default() };
        Self(Arc::new(Shared { changes: Mutex::new(changes), ..Shared::default() }))
    }
}

/// Changes that were answered and not flushed.
#[derive(Debug, Default)]
struct Changes {
    /// Number of changes answered so far.
    answered: u64,
    /// Epochs of the server's disk under which changes were answered and not flushed, each with the
    /// numbers of its first and last of these changes. One epoch, except around a restart.
    unflushed: Vec<(u64, Range<u64>)>,
    /// Epochs that ended with a restart. The caller may take the answer to a change made under one
    /// of them only later.
    ended: Vec<u64>,
}

/// Durability of an answered change.
pub(crate) enum Stored {
    /// Lasts until the server's machine fails.
    Cached,
    /// On stable storage.
    Durable,
    /// On stable storage, with all changes answered before the flush began; the number of these.
    Flushed(u64),
}

impl DiskState {
    pub(crate) fn new(number: u32, name: &[u8], info: DiskInfo, durability: Durability) -> Self {
        Self { number, name: name.to_vec(), info: Mutex::new(info), durability }
    }

    /// Fails if the disk cannot be used any more.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.durability.0.broken.get().cloned().map_or(Ok(()), Err)
    }

    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.durability.0.changes.lock()
    }

    /// Number of changes answered so far, in all sessions that share the durability.
    pub(crate) fn written(&self) -> u64 {
        self.changes().answered
    }

    /// Checks a disk that was just opened against those that share its durability.
    pub(crate) fn opened(&self) -> Result<(), Error> {
        let info = *self.info.lock();
        if *self.durability.0.identity.get_or_init(|| info.identity) != info.identity {
            return Err(Errno::ESTALE.into());
        }
        self.is_under(&self.changes(), info.epoch)
    }

    /// Notes what the server has told about the disk.
    pub(crate) fn learned(&self, info: DiskInfo) -> Result<(), Error> {
        *self.info.lock() = info;
        self.is_under(&self.changes(), info.epoch)
    }

    /// Notes the answer to a change.
    pub(crate) fn stored(&self, outcome: &Outcome, how: Stored) -> Result<(), Error> {
        let Reply::Stored { epoch } = outcome.single()? else { return Err(unexpected()) };
        self.note(&mut self.changes(), epoch, how)
    }

    /// Notes how the disk came out of a restart; `reply` answers the request that reopened it.
    fn reopened(&self, reply: Reply<'_>) {
        let mut changes = self.changes();
        let before = *self.info.lock();
        match DiskInfo::of(reply) {
            Ok(info) if info.identity == before.identity => {
                *self.info.lock() = info;
                // The other sessions find the same end.
                if info.epoch != before.epoch && !changes.ended.contains(&before.epoch) {
                    changes.ended.push(before.epoch);
                }
                // The error stays for the next caller.
                let _ = self.is_under(&changes, info.epoch);
            }
            _ => {
                self.durability.0.broken.get_or_init(|| Errno::ESTALE.into());
            }
        }
    }

    fn note(&self, changes: &mut Changes, epoch: u64, how: Stored) -> Result<(), Error> {
        match how {
            Stored::Durable => {}
            Stored::Cached => {
                changes.answered += 1;
                let now = changes.answered;
                match changes.unflushed.iter_mut().find(|(known, _)| *known == epoch) {
                    Some((_, numbers)) => numbers.end = now + 1,
                    None => changes.unflushed.push((epoch, now..now + 1)),
                }
                if changes.ended.contains(&epoch) {
                    self.lose();
                }
            }
            Stored::Flushed(covers) => {
                self.is_under(changes, epoch)?;
                changes.unflushed.retain(|(_, numbers)| numbers.end > covers + 1);
            }
        }
        self.is_under(changes, epoch)
    }

    /// Takes note that the server's disk is under this epoch: changes left unflushed under another
    /// may be lost.
    fn is_under(&self, changes: &Changes, epoch: u64) -> Result<(), Error> {
        if changes.unflushed.iter().any(|(known, _)| *known != epoch) {
            self.lose();
        }
        self.check()
    }

    /// Fails all later requests, since unflushed changes may be lost.
    fn lose(&self) {
        let disk = String::from_utf8_lossy(&self.name).into_owned();
        self.durability.0.broken.get_or_init(|| Error::WritesLost { disk });
    }
}

/// Open disks by number. Numbers are never reused, so no request under way can refer to another
/// disk.
#[derive(Default)]
pub(crate) struct OpenDisks {
    open: BTreeMap<u32, Arc<DiskState>>,
    next: u32,
}

impl OpenDisks {
    /// Why a request about a disk cannot be sent.
    pub(crate) fn failure(&self, request: &Request<'_>) -> Option<Error> {
        if matches!(request, Request::DiskOpen { .. } | Request::DiskClose { .. }) {
            return None;
        }
        self.open.get(&request.disk()?)?.check().err()
    }

    pub(crate) fn forget(&mut self, number: u32) {
        self.open.remove(&number);
    }

    pub(crate) fn knows(&self, number: u32) -> bool {
        self.open.contains_key(&number)
    }

    /// Calls `each` with a request to reopen each disk, and with a function that `each` passes the
    /// reply to.
    ///
    /// # Errors
    /// The connection was lost: ask for everything again on the next one.
    pub(crate) fn reclaim(
        &self,
        mut each: impl FnMut(&Request<'_>, &mut dyn FnMut(Reply<'_>)) -> io::Result<()>,
    ) -> io::Result<()> {
        for state in self.open.values() {
            let request = Request::DiskOpen { disk: state.number, name: &state.name };
            each(&request, &mut |reply| state.reopened(reply))?;
        }
        Ok(())
    }
}

impl Core {
    /// Returns a number for a disk to be opened.
    pub(crate) fn number_disk(&self) -> u32 {
        let next = &mut self.state.lock().disks.next;
        *next = next.wrapping_add(1);
        *next
    }

    pub(crate) fn remember_disk(&self, disk: &Arc<DiskState>) {
        self.state.lock().disks.open.insert(disk.number, disk.clone());
    }

    /// Closes a disk once no request needs it, without waiting for the answer.
    pub(crate) fn close_disk(self: &Arc<Self>, number: u32) {
        self.close_later(Closing::Disk(number));
    }
}

/// A close whose answer nobody waits for.
#[derive(Clone, Copy)]
pub(crate) enum Closing {
    /// A file.
    File(u64),
    /// A disk.
    Disk(u32),
    /// The locks of a process.
    Process(u64),
}

impl Closing {
    /// What these requests close or end, if they are a close.
    pub(crate) fn of(requests: &[Request<'_>]) -> Option<Self> {
        match *requests {
            [Request::Close { handle }] => Some(Self::File(handle)),
            [Request::DiskClose { disk }] => Some(Self::Disk(disk)),
            [Request::ProcessEnded { owner }] => Some(Self::Process(owner)),
            _ => None,
        }
    }

    pub(crate) fn request(self) -> Request<'static> {
        match self {
            Self::File(handle) => Request::Close { handle },
            Self::Disk(disk) => Request::DiskClose { disk },
            Self::Process(owner) => Request::ProcessEnded { owner },
        }
    }
}
