//! Reads: of open files, and of files that are opened only for it.

use super::operations::allowed_flags;
use super::{BlockingResult, Closed, Compound, Context, Step, Value};
use std::sync::Arc;
use towline_mem::{Aggregate, Segment};
use towline_store::{FileStore, PathRead, ReadOutcome};
use towline_wire::limits::TRANSFER_BYTES_MAX;
use towline_wire::request::{CURRENT, Operations, open_flag};
use towline_wire::{Errno, Reply, Request};

impl Compound {
    /// Reads an open file, or returns the step for which that waits.
    pub(super) fn read(
        &mut self,
        context: &Context<'_>,
        handle: u64,
        offset: u64,
        length: u32,
    ) -> Result<Option<Step>, Errno> {
        let opened = self.at(context, handle)?;
        let length = checked(length)?;
        match opened.file.read(offset, length, false)? {
            ReadOutcome::Ready(data) => Ok(self.take_read(&opened.store, data)),
            ReadOutcome::WouldBlock => {
                let opened = opened.into_owned();
                let (store, flags) = (opened.store.clone(), opened.flags);
                let read = move || opened.file.read(offset, length, true);
                Ok(Some(self.waiting(store, flags, length, read)))
            }
        }
    }

    /// The same for a file that is opened only for this read.
    pub(super) fn read_path(
        &mut self,
        context: &Context<'_>,
        (base, path): (u64, &[u8]),
        flags: u32,
        length: u32,
    ) -> Result<Option<Step>, Errno> {
        let length = checked(length)?;
        if open_flag::alters(flags) {
            return Err(Errno::EINVAL);
        }
        let at = self.at(context, base)?;
        let flags = allowed_flags(&at, context.caller, path, flags)?;
        match at.store.read_path(context.caller, (&*at.file, path), flags, length)? {
            PathRead::Ready(data, closing) => {
                if !context.files.may_wait() {
                    self.closed = closing.map(Closed::Read);
                }
                Ok(self.take_read(&at.store, data))
            }
            PathRead::WouldBlock(file) => {
                let read = move || file.read(0, length, true);
                Ok(Some(self.waiting(at.store.clone(), flags, length, read)))
            }
        }
    }

    /// Takes what was read, or returns the step in which pages of files are copied.
    fn take_read(&mut self, store: &Arc<dyn FileStore>, data: Aggregate) -> Option<Step> {
        let refers =
            |data: &Aggregate| data.slices().any(|slice| matches!(slice.segment, Segment::File(_)));
        if !self.copies || !refers(&data) {
            self.has_read(data);
            return None;
        }
        let length = data.len();
        let work = Box::new(move || BlockingResult { result: copied(&data).map(Value::Read) });
        Some(Step::Block(store.clone(), work, length))
    }

    /// A read that waits for its store.
    fn waiting(
        &self,
        store: Arc<dyn FileStore>,
        flags: u32,
        length: usize,
        read: impl FnOnce() -> Result<ReadOutcome, Errno> + Send + 'static,
    ) -> Step {
        // Other reads refer to the page cache, or are small.
        let direct = flags & open_flag::DIRECT != 0;
        let copies = self.copies;
        let bytes = if direct || copies { length as u64 } else { 0 };
        let work = Box::new(move || {
            let result = match read() {
                Ok(ReadOutcome::Ready(data)) if copies => copied(&data).map(Value::Read),
                Ok(ReadOutcome::Ready(data)) => Ok(Value::Read(data)),
                Ok(ReadOutcome::WouldBlock) => Err(Errno::EAGAIN),
                Err(errno) => Err(errno),
            };
            BlockingResult { result }
        });
        Step::Block(store, work, bytes)
    }

    pub(super) fn has_read(&mut self, data: Aggregate) {
        self.result(&Reply::Read { length: data.len() as u32, errno: 0 });
        self.data_of_file = true;
        self.data = data;
    }
}

fn checked(length: u32) -> Result<usize, Errno> {
    Some(length as usize).filter(|length| *length <= TRANSFER_BYTES_MAX).ok_or(Errno::EINVAL)
}

/// Copies what was read; what a file no longer has was not read.
fn copied(data: &Aggregate) -> Result<Aggregate, Errno> {
    data.to_vec_until_end().map(Aggregate::from_vec).map_err(|error| Errno::of(&error))
}

/// Returns true if the operations of a legal body change nothing but open files, which the server closes if the reply is
/// lost ([`Compound::left`]).
pub(super) fn only_opens(body: &[u8]) -> bool {
    let opens = |request: &Request<'_>| match request {
        Request::Attach { .. } | Request::Open { .. } => !request.alters(),
        Request::Close { handle } => *handle == CURRENT,
        other => !other.modifies(),
    };
    Operations::of(body).flatten().all(|request| opens(&request))
}
