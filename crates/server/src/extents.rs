//! Extents of a disk, as both fronts report them.

use rustix::io::Errno;
use std::io;
use towline_block::{Disk, Status};

/// Returns what is allocated, in whole blocks as clients see them: at most `most` extents from `offset` on.
/// Flags: 1 for a hole, 2 for zeroes; a block has the flags that all its parts have.
///
/// # Errors
/// The disk's error; `EIO` if the disk has shrunk so that no block of the range is left.
pub(crate) fn allocation(
    disk: &Disk,
    offset: u64,
    length: u64,
    most: usize,
) -> io::Result<Vec<Status>> {
    const NOTHING: Status = Status { length: 0, flags: u32::MAX };
    let block = u64::from(disk.geometry().block_minimum);
    let mut list: Vec<Status> = Vec::new();
    // Whole blocks, or the parts of a block whose rest is still to come.
    let mut next = NOTHING;
    disk.store.extents(offset, length, &mut |extent| {
        let flags = u32::from(extent.hole) | u32::from(extent.zero) << 1;
        let mut rest = extent.length;
        while rest > 0 {
            let count = match next.length {
                0 if rest >= block => rest - rest % block,
                begun => rest.min(block - begun),
            };
            rest -= count;
            next = Status { length: next.length + count, flags: next.flags & flags };
            if next.length.is_multiple_of(block) {
                if !append(&mut list, next, most) {
                    return false;
                }
                next = NOTHING;
            }
        }
        true
    })?;
    if list.is_empty() && length > 0 {
        return Err(Errno::IO.into());
    }
    Ok(list)
}

/// Returns what was written since the server started to serve the disk. Flags: 1 for written.
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

/// Adds an extent, merging it with its neighbour if both have the same flags; false: the list is full.
fn append(list: &mut Vec<Status>, status: Status, most: usize) -> bool {
    let full = list.len() == most;
    match list.last_mut() {
        Some(last) if last.flags == status.flags => last.length += status.length,
        _ if full => return false,
        _ => list.push(status),
    }
    true
}

#[cfg(test)]
mod tests {
    use super::allocation;
    use std::sync::Arc;
    use towline_block::{Disk, Shape};
    use towline_store::block::MemoryDisk;
    use towline_store::{BlockStore, ZeroHow};

    const BLOCK: u64 = 64 * 1024;

    /// Clients cannot ask for less than a block, so a part of one means nothing to them.
    #[test]
    fn extents_are_whole_blocks_and_a_mixed_block_is_data() {
        let memory = MemoryDisk::new("test", 8 * BLOCK).unwrap();
        // The second and third blocks have data in one page; the sixth has a hole of one page.
        memory.write(BLOCK + 4096, &[1; 4096], false).unwrap();
        memory.write(3 * BLOCK - 4096, &[1; 4096], false).unwrap();
        memory.write(4 * BLOCK, &[1; 2 * BLOCK as usize], false).unwrap();
        memory.zero(6 * BLOCK - 8192, 4096, ZeroHow::default()).unwrap();
        let shape = Shape { block: BLOCK as u32, ..Shape::default() };
        let disk = Disk::new("test", "", memory as Arc<dyn BlockStore>, false);
        let disk = disk.shaped(shape).unwrap();
        let told = |offset: u64, blocks: u64, most| {
            let list = allocation(&disk, offset * BLOCK, blocks * BLOCK, most).unwrap();
            list.iter().map(|s| (s.length as f64 / BLOCK as f64, s.flags)).collect::<Vec<_>>()
        };
        let all = [(1.0, 3), (2.0, 0), (1.0, 3), (2.0, 0), (2.0, 3)];
        assert_eq!(told(0, 8, 100), all);
        assert_eq!(told(0, 8, 2), all[..2]);
        assert_eq!(told(1, 7, 1), [(2.0, 0)]);
        assert_eq!(told(2, 1, 1), [(1.0, 0)]);
    }
}
