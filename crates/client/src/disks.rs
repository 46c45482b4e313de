//! The disks that a client has open, and what it needs to know of them after a restart of the
//! server.

use crate::convert::unexpected;
use crate::core::{Core, Outcome};
use crate::{DiskInfo, Error};
use parking_lot::Mutex;
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
    durability: Mutex<Durability>,
    /// Why the disk cannot be used any more. Checked before each request, so it takes no lock.
    broken: OnceLock<Error>,
}

/// Changes that were answered and not flushed.
#[derive(Default)]
struct Durability {
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
    pub(crate) fn new(number: u32, name: &[u8], info: DiskInfo) -> Self {
        let (durability, broken) = (Mutex::default(), OnceLock::new());
        Self { number, name: name.to_vec(), info: Mutex::new(info), durability, broken }
    }

    /// Fails if the disk cannot be used any more.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.broken.get().cloned().map_or(Ok(()), Err)
    }

    /// Number of changes answered so far.
    pub(crate) fn written(&self) -> u64 {
        self.durability.lock().answered
    }

    /// Notes the answer to a change.
    pub(crate) fn stored(&self, outcome: &Outcome, how: Stored) -> Result<(), Error> {
        let Reply::Stored { epoch } = outcome.single()? else { return Err(unexpected()) };
        self.note(&mut self.durability.lock(), epoch, how)
    }

    /// Notes how the disk came out of a restart; `reply` answers the request that reopened it.
    fn reopened(&self, reply: Reply<'_>) {
        let mut durability = self.durability.lock();
        let before = *self.info.lock();
        match DiskInfo::of(reply) {
            Ok(info) if info.identity == before.identity => {
                *self.info.lock() = info;
                if info.epoch != before.epoch {
                    durability.ended.push(before.epoch);
                }
                // The error stays for the next caller.
                let _ = self.is_under(&durability, info.epoch);
            }
            _ => {
                self.broken.get_or_init(|| Errno::ESTALE.into());
            }
        }
    }

    fn note(&self, durability: &mut Durability, epoch: u64, how: Stored) -> Result<(), Error> {
        match how {
            Stored::Durable => {}
            Stored::Cached => {
                durability.answered += 1;
                let now = durability.answered;
                match durability.unflushed.iter_mut().find(|(known, _)| *known == epoch) {
                    Some((_, changes)) => changes.end = now + 1,
                    None => durability.unflushed.push((epoch, now..now + 1)),
                }
                if durability.ended.contains(&epoch) {
                    self.lose();
                }
            }
            Stored::Flushed(covers) => {
                self.is_under(durability, epoch)?;
                durability.unflushed.retain(|(_, changes)| changes.end > covers + 1);
            }
        }
        self.is_under(durability, epoch)
    }

    /// Takes note that the server's disk is under this epoch: changes left unflushed under another
    /// may be lost.
    fn is_under(&self, durability: &Durability, epoch: u64) -> Result<(), Error> {
        if durability.unflushed.iter().any(|(known, _)| *known != epoch) {
            self.lose();
        }
        self.check()
    }

    /// Fails all later requests, since unflushed changes may be lost.
    fn lose(&self) {
        let disk = String::from_utf8_lossy(&self.name).into_owned();
        self.broken.get_or_init(|| Error::WritesLost { disk });
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
        let mut state = self.state.lock();
        if state.dead.is_some() {
            return;
        }
        state.closing.push(Closing::Disk(number));
        drop(state);
        self.close_pending();
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
