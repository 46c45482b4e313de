//! The disks that a client has open: what has to be known of them after a restart of the server.

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
    /// Why nothing works any more. Looked at before each request, so without a lock.
    broken: OnceLock<Error>,
}

/// What was answered and not flushed.
#[derive(Default)]
struct Durability {
    /// Changes that were answered so far.
    answered: u64,
    /// Epochs of the server's disk under which changes were answered and not flushed, with the
    /// first and last of these changes. One, but around a restart.
    unflushed: Vec<(u64, Range<u64>)>,
    /// Epochs that ended with a restart. Changes may have been answered under one, and be taken later by who asked.
    ended: Vec<u64>,
}

/// How safe a change is that was answered.
pub(crate) enum Stored {
    /// Until the machine of the server fails.
    Cached,
    /// On stable storage.
    Durable,
    /// And so are all changes that were answered before it began: so many.
    Flushed(u64),
}

impl DiskState {
    pub(crate) fn new(number: u32, name: &[u8], info: DiskInfo) -> Self {
        let (durability, broken) = (Mutex::default(), OnceLock::new());
        Self { number, name: name.to_vec(), info: Mutex::new(info), durability, broken }
    }

    /// Fails when the disk cannot be used any more.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.broken.get().cloned().map_or(Ok(()), Err)
    }

    /// Changes answered so far.
    pub(crate) fn written(&self) -> u64 {
        self.durability.lock().answered
    }

    /// Takes the answer to a change.
    pub(crate) fn stored(&self, outcome: &Outcome, how: Stored) -> Result<(), Error> {
        let Reply::Stored { epoch } = outcome.single()? else { return Err(unexpected()) };
        self.note(&mut self.durability.lock(), epoch, how)
    }

    /// What became of it in a restart: `reply` is the server's to its being opened again.
    fn reopened(&self, reply: Reply<'_>) {
        let mut durability = self.durability.lock();
        let before = *self.info.lock();
        match DiskInfo::of(reply) {
            Ok(info) if info.identity == before.identity => {
                *self.info.lock() = info;
                if info.epoch != before.epoch {
                    durability.ended.push(before.epoch);
                }
                // The error is kept for whoever calls next.
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

    /// The server's disk is under this epoch now: what was not flushed under another may be lost.
    fn is_under(&self, durability: &Durability, epoch: u64) -> Result<(), Error> {
        if durability.unflushed.iter().any(|(known, _)| *known != epoch) {
            self.lose();
        }
        self.check()
    }

    /// What was not flushed may be lost.
    fn lose(&self) {
        let disk = String::from_utf8_lossy(&self.name).into_owned();
        self.broken.get_or_init(|| Error::WritesLost { disk });
    }
}

/// Disks by number. No number is given twice: nothing that is still under way can mean another disk.
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

    /// Calls `each` with the request that opens a disk again; it hands the reply to the function
    /// that comes with it.
    ///
    /// # Errors
    /// The connection was lost: all is to be asked for again on the next one.
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
    /// A number for a disk to be opened.
    pub(crate) fn number_disk(&self) -> u32 {
        let next = &mut self.state.lock().disks.next;
        *next = next.wrapping_add(1);
        *next
    }

    pub(crate) fn remember_disk(&self, disk: &Arc<DiskState>) {
        self.state.lock().disks.open.insert(disk.number, disk.clone());
    }

    /// Closes a disk with the next request.
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

/// What is to be closed, without anybody waiting for it.
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
    /// What requests close that were remembered as open.
    pub(crate) fn of(requests: &[Request<'_>]) -> Option<Self> {
        match *requests {
            [Request::Close { handle }] => Some(Self::File(handle)),
            [Request::DiskClose { disk }] => Some(Self::Disk(disk)),
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
