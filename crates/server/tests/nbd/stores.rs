//! Back ends that misbehave.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use towline_mem::Aggregate;
use towline_store::block::MemoryDisk;
use towline_store::{BlockStore, Direction, Extent, Geometry, Layout, Now, Place, ZeroHow};

/// Memory behind a gate: reads and writes of a place wait until it is opened, and fail if told.
pub(crate) struct Gated {
    memory: Arc<MemoryDisk>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: HashSet<u64>,
    fails: Vec<(u64, i32)>,
    flush_fails: bool,
    /// Calls that wait at a closed gate.
    waiting: usize,
}

/// Bytes that a gate stands before.
const GATE: u64 = 256 * 1024;

impl std::fmt::Debug for Gated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gated")
    }
}

impl Gated {
    pub(crate) fn new(size: u64) -> Arc<Self> {
        Arc::new(Self {
            memory: MemoryDisk::new("gated", size).unwrap(),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn fill(&self, data: &[u8]) {
        self.memory.write(0, data, false).unwrap();
    }

    /// Closes the gates of these offsets.
    pub(crate) fn close(&self, offsets: impl IntoIterator<Item = u64>) {
        self.state.lock().unwrap().closed.extend(offsets.into_iter().map(|at| at / GATE));
    }

    pub(crate) fn open(&self, offset: u64) {
        self.state.lock().unwrap().closed.remove(&(offset / GATE));
        self.changed.notify_all();
    }

    pub(crate) fn open_all(&self) {
        self.state.lock().unwrap().closed.clear();
        self.changed.notify_all();
    }

    /// What touches this byte fails.
    pub(crate) fn fail(&self, offset: u64, errno: i32) {
        self.state.lock().unwrap().fails.push((offset, errno));
    }

    pub(crate) fn fail_flush(&self, fails: bool) {
        self.state.lock().unwrap().flush_fails = fails;
    }

    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().unwrap().waiting
    }

    fn pass(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.waiting += 1;
        while state.closed.contains(&(offset / GATE)) {
            state = self.changed.wait(state).unwrap();
        }
        state.waiting -= 1;
        let hit = state.fails.iter().find(|(at, _)| (offset..offset + length).contains(at));
        match hit {
            Some((_, errno)) => Err(io::Error::from_raw_os_error(*errno)),
            None => Ok(()),
        }
    }
}

impl BlockStore for Gated {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    /// So that fragments end at the gates.
    fn layout(&self) -> Option<Layout> {
        Some(Layout { chunk: GATE, members: 4, shift: 0 })
    }

    fn read_now(&self, _offset: u64, _target: &mut [u8]) -> Now {
        Now::WouldBlock
    }

    fn hole_now(&self, _offset: u64, _length: u64) -> u64 {
        0
    }

    fn lend(&self, _offset: u64, _length: u64) -> Option<Aggregate> {
        None
    }

    fn write_now(&self, _offset: u64, _data: &[u8], _durable: bool) -> Now {
        Now::WouldBlock
    }

    fn locate(&self, _offset: u64, _length: u64, _direction: Direction) -> Option<Place> {
        None
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.pass(offset, target.len() as u64)?;
        self.memory.read(offset, target)
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        self.pass(offset, data.len() as u64)?;
        self.memory.write(offset, data, durable)
    }

    fn flush(&self) -> io::Result<()> {
        match self.state.lock().unwrap().flush_fails {
            true => Err(io::Error::from_raw_os_error(5)),
            false => Ok(()),
        }
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        self.pass(offset, length)?;
        self.memory.zero(offset, length, how)
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.memory.trim(offset, length)
    }

    fn cache(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }

    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        self.memory.extents(offset, length, tell)
    }
}

pub(crate) const SECTOR: usize = 512;

/// A disk with a volatile cache: what was not flushed may or may not survive a loss of power,
/// sector by sector.
pub(crate) struct Volatile {
    state: Mutex<Sectors>,
    size: u64,
}

struct Sectors {
    /// What is on stable storage.
    stable: Vec<u8>,
    /// What reads see.
    current: Vec<u8>,
    /// Sectors written since, in order, with their contents.
    unflushed: Vec<(usize, Vec<u8>)>,
}

impl std::fmt::Debug for Volatile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Volatile")
    }
}

impl Volatile {
    pub(crate) fn new(size: u64) -> Arc<Self> {
        let zeroes = vec![0; size as usize];
        let state = Sectors { stable: zeroes.clone(), current: zeroes, unflushed: Vec::new() };
        Arc::new(Self { state: Mutex::new(state), size })
    }

    /// The contents after a loss of power: of what was not flushed a subset, in any order.
    pub(crate) fn crash(&self, random: &mut impl FnMut() -> u64) -> Vec<u8> {
        let state = self.state.lock().unwrap();
        let mut image = state.stable.clone();
        let mut pending = state.unflushed.clone();
        while !pending.is_empty() {
            let (sector, bytes) = pending.swap_remove(random() as usize % pending.len());
            if random().is_multiple_of(2) {
                image[sector * SECTOR..][..SECTOR].copy_from_slice(&bytes);
            }
        }
        image
    }
}

impl BlockStore for Volatile {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size,
            block_minimum: SECTOR as u32,
            block_preferred: 4096,
            rotational: false,
            read_only: false,
        }
    }

    fn read_now(&self, _offset: u64, _target: &mut [u8]) -> Now {
        Now::WouldBlock
    }

    fn hole_now(&self, _offset: u64, _length: u64) -> u64 {
        0
    }

    fn lend(&self, _offset: u64, _length: u64) -> Option<Aggregate> {
        None
    }

    fn write_now(&self, _offset: u64, _data: &[u8], _durable: bool) -> Now {
        Now::WouldBlock
    }

    fn locate(&self, _offset: u64, _length: u64, _direction: Direction) -> Option<Place> {
        None
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let state = self.state.lock().unwrap();
        target.copy_from_slice(&state.current[offset as usize..][..target.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.current[offset as usize..][..data.len()].copy_from_slice(data);
        for (at, bytes) in data.chunks(SECTOR).enumerate() {
            let sector = offset as usize / SECTOR + at;
            if durable {
                // Older contents must not come back over it.
                state.unflushed.retain(|(other, _)| *other != sector);
                state.stable[sector * SECTOR..][..SECTOR].copy_from_slice(bytes);
            } else {
                state.unflushed.push((sector, bytes.to_vec()));
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.stable = state.current.clone();
        state.unflushed.clear();
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, _how: ZeroHow) -> io::Result<()> {
        self.write(offset, &vec![0; length as usize], false)
    }

    fn trim(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }

    fn cache(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }

    fn extents(
        &self,
        _offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        tell(Extent { length, hole: false, zero: false });
        Ok(())
    }
}
