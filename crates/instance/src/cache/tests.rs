use super::*;
use std::os::unix::fs::FileExt;
use towline_wire::attr::TYPE_DIRECTORY;

fn attr(size: u64) -> Attr {
    Attr { size, mode: TYPE_FILE, flags: attr_flag::QUIET, inode: 7, change: 5, ..Attr::default() }
}

fn version(size: u64) -> Version {
    Version::of(b"towline://h/x", &attr(size)).unwrap()
}

struct World {
    folder: tempfile::TempDir,
    cached: Cached,
    data: Vec<u8>,
}

impl World {
    fn new(size: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = (0..size).map(|at| (at * 31 + at / 256) as u8).collect();
        let cached = Self::open(&folder, size);
        Self { folder, cached, data }
    }

    fn open(folder: &tempfile::TempDir, size: usize) -> Cached {
        let directory = folder.path().as_os_str().as_bytes();
        Cached::open(directory, version(size as u64), Ok).unwrap()
    }

    fn read(&self, offset: usize, length: usize) -> usize {
        let mut target = vec![0xee; length];
        let count = self.cached.read_at(&mut target, offset as u64);
        assert_eq!(
            &target[..count],
            &self.data[offset.min(self.data.len())..][..count],
            "{offset}, {length}"
        );
        count
    }

    fn store(&self, offset: usize, length: usize) -> u64 {
        self.cached.store(&self.data[offset..][..length], offset as u64).unwrap()
    }

    fn file(&self) -> std::fs::File {
        let path = self.folder.path().join(self.cached.version.name());
        std::fs::File::options().write(true).open(path).unwrap()
    }
}

#[test]
fn what_may_be_changing_is_not_kept() {
    let of = |attr: &Attr| Version::of(b"h", attr);
    assert!(of(&attr(1)).is_some());
    assert_eq!(of(&Attr { flags: 0, ..attr(1) }), None);
    assert_eq!(of(&Attr { mode: TYPE_DIRECTORY, ..attr(1) }), None);
    assert_ne!(of(&attr(1)), of(&Attr { change: 6, ..attr(1) }));
    assert_ne!(of(&attr(1)), Version::of(b"i", &attr(1)));
}

#[test]
fn only_whole_blocks_are_kept_and_any_part_of_them_is_read() {
    let world = World::new(5 * BLOCK_BYTES + 100);
    assert_eq!(world.read(0, 100), 0);
    // The parts of blocks 0 and 3 are not kept.
    assert_eq!(world.store(1, 3 * BLOCK_BYTES), 2 * BLOCK_BYTES as u64);
    assert_eq!(world.read(0, 10), 0);
    assert_eq!(world.read(BLOCK_BYTES, 5 * BLOCK_BYTES), 2 * BLOCK_BYTES);
    assert_eq!(world.read(BLOCK_BYTES + 7, 30), 30);
    assert_eq!(world.read(2 * BLOCK_BYTES - 7, 30), 30);
    assert_eq!(world.read(3 * BLOCK_BYTES - 7, 30), 7);
    // The last block ends with the file.
    assert_eq!(world.store(5 * BLOCK_BYTES, 99), 0);
    assert_eq!(world.store(5 * BLOCK_BYTES, 100), 100);
    assert_eq!(world.read(5 * BLOCK_BYTES + 50, 1000), 50);
    assert_eq!(world.read(5 * BLOCK_BYTES, 1000), 100);
    assert_eq!(world.read(6 * BLOCK_BYTES, 1000), 0);
    let end = world.data.len();
    assert_eq!(world.read(end, 10), 0);
    assert_eq!(world.cached.read_at(&mut [0; 4], u64::MAX), 0);
    assert_eq!(world.cached.store(&[1; 4], u64::MAX - 3).unwrap(), 0);
}

#[test]
fn many_blocks_and_other_processes() {
    let size = 3 * BLOCKS * BLOCK_BYTES + 17;
    let world = World::new(size);
    assert_eq!(world.store(0, size), size as u64);
    let other = World::open(&world.folder, size);
    let mut all = vec![0; size + 5];
    assert_eq!(other.read_at(&mut all, 0), size);
    assert_eq!(all[..size], world.data);
    assert_eq!(world.read(13, size), size - 13);
}

#[test]
fn damaged_blocks_are_not_there() {
    let world = World::new(4 * BLOCK_BYTES);
    world.store(0, 4 * BLOCK_BYTES);
    world
        .file()
        .write_all_at(&[9], version(4 * BLOCK_BYTES as u64).data_at() + BLOCK_BYTES as u64)
        .unwrap();
    assert_eq!(world.read(0, 4 * BLOCK_BYTES), BLOCK_BYTES);
    assert_eq!(world.read(BLOCK_BYTES + 5, 3), 0);
    assert_eq!(world.read(2 * BLOCK_BYTES, 9), 9);
    // A disk that was full, or a crash, may leave a file that ends early.
    world.file().set_len(version(4 * BLOCK_BYTES as u64).data_at() + 10).unwrap();
    assert_eq!(world.read(0, 9), 0);
    world.store(0, BLOCK_BYTES);
    assert_eq!(world.read(0, BLOCK_BYTES), BLOCK_BYTES);
}

#[test]
fn what_was_used_longest_ago_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path();
    std::fs::write(directory.join("other"), [1; 9000]).unwrap();
    let size = 64 * BLOCK_BYTES;
    let path = |change| {
        let attr = Attr { change, ..attr(size as u64) };
        directory.join(Version::of(b"h", &attr).unwrap().name())
    };
    for change in 0..4 {
        let attr = Attr { change, ..attr(size as u64) };
        let version = Version::of(b"h", &attr).unwrap();
        let cached = Cached::open(directory.as_os_str().as_bytes(), version, Ok).unwrap();
        cached.store(&vec![1; size], 0).unwrap();
        let hours = Duration::from_secs(3600 * (10 - change));
        let file = std::fs::File::options().write(true).open(path(change)).unwrap();
        file.set_modified(SystemTime::now() - hours).unwrap();
    }
    let all = trim(directory, u64::MAX).unwrap();
    assert!(all >= 4 * size as u64);
    // Using the oldest one makes it the youngest.
    let oldest = Version::of(b"h", &Attr { change: 0, ..attr(size as u64) }).unwrap();
    Cached::open(directory.as_os_str().as_bytes(), oldest, Ok).unwrap();
    let left = trim(directory, all - 1).unwrap();
    assert!(left < all);
    let there: Vec<bool> = (0..4).map(|change| path(change).exists()).collect();
    assert_eq!(there, [true, false, true, true]);
    assert!(directory.join("other").exists());
}
