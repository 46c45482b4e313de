//! Finds out about a block device in sysfs.
//!
//! Its members, if it is software RAID (md) or a stripe of the device mapper (dm): the result only
//! decides where fragments end and in which order they start, so an unknown layout costs time, not
//! data. And what tells it from other devices.

use crate::block_store::Layout;
use std::path::{Path, PathBuf};

/// Chunks are multiples of this, so that fragments can bypass the page cache.
const CHUNK_UNIT: u64 = 4096;

/// Returns the layout of the block device with this number; `None` if it has one member or is not
/// known.
pub(super) fn layout(sysfs: &Path, major: u32, minor: u32) -> Option<Layout> {
    let (whole, partition) = whole(sysfs, major, minor)?;
    // Sectors in sysfs have 512 bytes.
    let start =
        partition.map_or(Some(0), |partition| Some(number(&partition.join("start"))? * 512))?;
    let (chunk, members) = md(&whole).or_else(|| striped(&whole))?;
    let shift = start % (chunk * u64::from(members)).max(1);
    let fits = chunk > 0 && chunk.is_multiple_of(CHUNK_UNIT) && shift.is_multiple_of(CHUNK_UNIT);
    (members > 1 && fits).then_some(Layout { chunk, members, shift })
}

/// Returns the identifier that a block device, or the device that it is a partition of, has from its
/// manufacturer or from whoever set it up; `None` if it has none.
pub(super) fn unique_id(sysfs: &Path, major: u32, minor: u32) -> Option<Vec<u8>> {
    let (whole, _) = whole(sysfs, major, minor)?;
    // dm, md, NVMe, SCSI, virtio.
    let names = ["dm/uuid", "md/uuid", "wwid", "device/wwid", "serial"];
    let ids = names.into_iter().filter_map(|name| std::fs::read(whole.join(name)).ok());
    ids.map(|id| id.trim_ascii().to_vec()).find(|id| !id.is_empty())
}

/// Returns the directory of a block device and, if it is a partition, that of the partition, which
/// is inside.
fn whole(sysfs: &Path, major: u32, minor: u32) -> Option<(PathBuf, Option<PathBuf>)> {
    let device = sysfs.join(format!("dev/block/{major}:{minor}")).canonicalize().ok()?;
    match number(&device.join("partition")) {
        Some(_) => Some((device.parent()?.to_owned(), Some(device))),
        None => Some((device, None)),
    }
}

/// Returns the chunk size of an md device and the number of members with data of neighbouring
/// chunks.
fn md(whole: &Path) -> Option<(u64, u32)> {
    let md = whole.join("md");
    let level = std::fs::read_to_string(md.join("level")).ok()?;
    let disks = u32::try_from(number(&md.join("raid_disks"))?).ok()?;
    let members = match level.trim() {
        "raid0" => disks,
        "raid4" | "raid5" => disks.checked_sub(1)?,
        "raid6" => disks.checked_sub(2)?,
        "raid10" => {
            // The two low bytes of the layout: the numbers of near copies and of far copies.
            let layout = number(&md.join("layout"))?;
            let copies = (layout & 0xff).max(1) * (layout >> 8 & 0xff).max(1);
            disks / u32::try_from(copies).ok()?
        }
        _ => return None,
    };
    Some((number(&md.join("chunk_size"))?, members))
}

/// Does the same for a dm device on top of several others: it reports its chunk as the minimum size
/// of requests and a whole row of chunks as the optimal one.
fn striped(whole: &Path) -> Option<(u64, u32)> {
    whole.join("dm").is_dir().then_some(())?;
    let below = std::fs::read_dir(whole.join("slaves")).ok()?.count() as u64;
    let chunk = number(&whole.join("queue/minimum_io_size"))?;
    let row = number(&whole.join("queue/optimal_io_size"))?;
    let members = row.checked_div(chunk)?;
    let striped = members > 1 && members <= below && row.is_multiple_of(chunk);
    striped.then_some((chunk, members as u32))
}

fn number(path: &PathBuf) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a tree like sysfs with one device and these files with their contents.
    fn device(device: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
        let sysfs = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = sysfs.path().join("devices").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{text}\n")).unwrap();
        }
        let links = sysfs.path().join("dev/block");
        std::fs::create_dir_all(&links).unwrap();
        let target = sysfs.path().join("devices").join(device);
        std::fs::create_dir_all(&target).unwrap();
        std::os::unix::fs::symlink(target, links.join("9:1")).unwrap();
        sysfs
    }

    fn of_md(level: &str, layout: &str, disks: &str, chunk: &str) -> Option<Layout> {
        let files = [
            ("md1/md/level", level),
            ("md1/md/layout", layout),
            ("md1/md/raid_disks", disks),
            ("md1/md/chunk_size", chunk),
        ];
        super::layout(device("md1", &files).path(), 9, 1)
    }

    #[test]
    fn levels_of_md() {
        let members = |level, layout, disks| {
            of_md(level, layout, disks, "65536").map(|layout| {
                assert_eq!((layout.chunk, layout.shift), (65536, 0));
                layout.members
            })
        };
        assert_eq!(members("raid0", "0", "4"), Some(4));
        assert_eq!(members("raid5", "2", "4"), Some(3));
        assert_eq!(members("raid6", "2", "6"), Some(4));
        assert_eq!(members("raid10", "258", "6"), Some(3), "two near copies");
        assert_eq!(members("raid10", "513", "4"), Some(2), "two far copies");
        assert_eq!(members("raid1", "0", "2"), None);
        assert_eq!(members("linear", "0", "2"), None);
        assert_eq!(members("raid5", "2", "0"), None, "nonsense");
        assert_eq!(of_md("raid0", "0", "2", "0"), None);
        assert_eq!(of_md("raid0", "0", "2", "none"), None);
        assert_eq!(of_md("raid0", "0", "2", "512"), None, "fragments would not be aligned");
    }

    #[test]
    fn stripes_of_the_device_mapper() {
        let of_dm = |least, best| {
            let files = [
                ("dm-3/dm/name", "fast"),
                ("dm-3/slaves/sda/dev", "8:0"),
                ("dm-3/slaves/sdb/dev", "8:16"),
                ("dm-3/queue/minimum_io_size", least),
                ("dm-3/queue/optimal_io_size", best),
            ];
            super::layout(device("dm-3", &files).path(), 9, 1)
        };
        let expected = Layout { chunk: 131_072, members: 2, shift: 0 };
        assert_eq!(of_dm("131072", "262144"), Some(expected));
        assert_eq!(of_dm("512", "0"), None, "a device after the other");
        assert_eq!(of_dm("65536", "262144"), None, "more members than there are devices");
    }

    #[test]
    fn partitions_begin_within_a_chunk() {
        let files = [
            ("md1/md/level", "raid0"),
            ("md1/md/raid_disks", "2"),
            ("md1/md/chunk_size", "524288"),
            ("md1/md1p1/partition", "1"),
            ("md1/md1p1/start", "2056"),
        ];
        let found = super::layout(device("md1/md1p1", &files).path(), 9, 1);
        let expected = Layout { chunk: 524_288, members: 2, shift: 4096 };
        assert_eq!(found, Some(expected));
        assert_eq!(expected.chunk_end(0), 520_192);
    }

    #[test]
    fn identifiers() {
        let id = |device: tempfile::TempDir| super::unique_id(device.path(), 9, 1);
        let nvme = |id| device("nvme0n1", &[("nvme0n1/wwid", id)]);
        assert_eq!(id(nvme("eui.01")), Some(b"eui.01".to_vec()));
        assert_ne!(id(nvme("eui.01")), id(nvme("eui.02")));
        let partition =
            device("sda/sda1", &[("sda/device/wwid", "naa.5"), ("sda/sda1/partition", "1")]);
        assert_eq!(id(partition), Some(b"naa.5".to_vec()));
        // Only what is set up with an identifier has one there.
        assert_eq!(id(device("dm-3", &[("dm-3/dm/uuid", "")])), None);
        assert_eq!(id(device("loop0", &[("loop0/size", "8")])), None);
    }

    #[test]
    fn others_have_no_members() {
        let disk = device("sda", &[("sda/queue/minimum_io_size", "4096")]);
        assert_eq!(super::layout(disk.path(), 9, 1), None);
        assert_eq!(super::layout(disk.path(), 9, 2), None, "no such device");
    }
}
