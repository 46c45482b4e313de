//! Extents of a disk, as every front tells them.

use std::io;
use towline_block::{Disk, Status};

/// What is allocated: at most `most` extents from `offset` on. Flags: 1 for a hole, 2 for zeroes.
pub(crate) fn allocation(
    disk: &Disk,
    offset: u64,
    length: u64,
    most: usize,
) -> io::Result<Vec<Status>> {
    let mut list: Vec<Status> = Vec::new();
    disk.store.extents(offset, length, &mut |extent| {
        let flags = u32::from(extent.hole) | u32::from(extent.zero) << 1;
        append(&mut list, Status { length: extent.length, flags }, most)
    })?;
    Ok(list)
}

/// What was written since the server began to serve the disk. Flags: 1 for written.
pub(crate) fn written(disk: &Disk, offset: u64, length: u64, most: usize) -> Vec<Status> {
    let mut list = Vec::new();
    let mut done = 0;
    while done < length {
        let (run, changed) = disk.changes.run(offset + done, length - done);
        if !append(&mut list, Status { length: run, flags: u32::from(changed) }, most) {
            break;
        }
        done += run;
    }
    list
}

/// Adds an extent, to its neighbour if that is alike; false when the list is full.
fn append(list: &mut Vec<Status>, status: Status, most: usize) -> bool {
    let full = list.len() == most;
    match list.last_mut() {
        Some(last) if last.flags == status.flags => last.length += status.length,
        _ if full => return false,
        _ => list.push(status),
    }
    true
}
