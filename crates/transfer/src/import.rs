//! Imports a program's buffers as local aggregates, without copying.

use crate::{Access, Error};
use std::fs::File;
use std::sync::Arc;
use towline_mem::{Aggregate, Segment, SharedMemory};

/// Imports ordinary memory.
#[must_use]
pub fn host(bytes: Vec<u8>) -> Aggregate {
    Aggregate::from_vec(bytes)
}

/// Imports all of a shared memory. Other nodes can map it if [`shared_memory`] created it.
#[must_use]
pub fn shared(memory: &Arc<SharedMemory>) -> Aggregate {
    let mut aggregate = Aggregate::new();
    aggregate.append(Segment::Shared(memory.clone(), None), 0, memory.len() as u64);
    aggregate
}

/// Creates shared memory of `length` bytes that other nodes can map for this access and no other. For
/// reading it is sealed, so that only this process can change it.
///
/// # Errors
/// `length` is zero; what `memfd_create(2)` or `mmap(2)` say.
pub fn shared_memory(length: usize, access: Access) -> Result<Arc<SharedMemory>, Error> {
    let memory = match access {
        Access::Read => SharedMemory::create_for_readers("towline-buffer", length)?,
        Access::ReadWrite => SharedMemory::create("towline-buffer", length)?,
    };
    Ok(Arc::new(memory))
}

/// Imports part of a file. Changes that other processes make to the file are visible, as to local readers.
///
/// # Errors
/// The file ends before the range does; what `fstat(2)` says.
pub fn file(file: File, offset: u64, length: u64) -> Result<Aggregate, Error> {
    let end = offset.checked_add(length);
    if end.is_none_or(|end| file.metadata().map_or(true, |data| data.len() < end)) {
        return Err(Error::Invalid("range goes beyond the end of the file"));
    }
    let mut aggregate = Aggregate::new();
    aggregate.append(Segment::File(Arc::new(file.into())), offset, length);
    Ok(aggregate)
}
