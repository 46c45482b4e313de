//! Locks of a compound: the owner, file and range of each. The driver owns the lock table.

use super::{Compound, Context};
use crate::locks::{FileKey, Owner, Range};
use towline_wire::request::{lock, open_flag};
use towline_wire::{Errno, Reply};

impl Compound {
    /// Takes the outcome of a lock: whether other sessions or families may have had locks on the file since the
    /// last one of this; run again afterwards.
    pub fn locked(&mut self, outcome: Result<bool, Errno>) {
        match outcome {
            Ok(others) => self.result(&Reply::Locked { others: others.into() }),
            Err(errno) => self.fail(errno),
        }
    }

    /// Takes the outcome of [`super::Step::TestLock`]; run again afterwards. `family` owns the session's files;
    /// processes of other families are not named.
    pub fn tested(&mut self, family: u64, tested: Result<Option<(Owner, Range)>, Errno>) {
        let conflict = match tested {
            Ok(conflict) => conflict,
            Err(errno) => return self.fail(errno),
        };
        self.result(&match conflict {
            None => Reply::Conflict { kind: lock::UNLOCK, start: 0, length: 0, owner: 0 },
            Some((owner, range)) => {
                let known = owner.session == family && owner.process;
                let owner = if known { owner.id } else { 0 };
                Reply::Conflict {
                    kind: range.kind,
                    start: range.start,
                    length: range.length(),
                    owner,
                }
            }
        });
    }

    /// Notes that the locks of an ended process are released; run again afterwards.
    pub fn process_ended(&mut self) {
        self.result(&Reply::Done {});
    }

    /// Takes the outcome of [`super::Step::HandOver`]; run again afterwards.
    pub fn handed_over(&mut self, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) => self.result(&Reply::Done {}),
            Err(errno) => self.fail(errno),
        }
    }

    #[allow(clippy::too_many_arguments)] // the fields of one wire structure
    pub(super) fn lock_of(
        &self,
        context: &Context<'_>,
        handle: u64,
        process: u64,
        family: u8,
        kind: u8,
        start: u64,
        length: u64,
    ) -> Result<(FileKey, Owner, Range), Errno> {
        let handle = self.handle(handle)?;
        let opened = context.files.find(handle)?;
        let (process, id, range) = match family {
            lock::PROCESS => (true, process, Range::new(kind, start, length)?),
            lock::OPEN_FILE => (false, handle, Range::new(kind, start, length)?),
            lock::FLOCK => (false, handle, Range::new(kind, 0, 0)?),
            _ => return Err(Errno::EINVAL),
        };
        if opened.flags & open_flag::PATH != 0 {
            return Err(Errno::EBADF);
        }
        let (device, inode) = opened.file.identity();
        Ok((
            (device, inode, family == lock::FLOCK),
            Owner { session: context.files.owner(), id, process },
            range,
        ))
    }

    /// Checks the access mode: as with `fcntl(2)`, a shared lock needs a file open for reading, and an
    /// exclusive one a file open for writing.
    pub(super) fn may_lock(
        &self,
        context: &Context<'_>,
        handle: u64,
        family: u8,
        kind: u8,
    ) -> Result<(), Errno> {
        let access = context.files.find(self.handle(handle)?)?.flags & 3;
        let refused = matches!((kind, access), (lock::SHARED, 1) | (lock::EXCLUSIVE, 0));
        if family != lock::FLOCK && refused { Err(Errno::EBADF) } else { Ok(()) }
    }
}
