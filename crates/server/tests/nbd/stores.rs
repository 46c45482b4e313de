//! Back ends that misbehave.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use towline_store::block::MemoryDisk;
use towline_store::{BlockStore, Extent, Geometry, Layout, ZeroHow};

/// Memory with gates: reads and writes at an offset wait until its gate is opened, and fail if told to.
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
    flush_panics: bool,
    /// Flushes that wait.
    flushing: usize,
    /// Flushes have to wait.
    flush_closed: bool,
    /// How many flushes may pass even so.
    flush_passes: usize,
    flushes: usize,
    /// Calls that wait at a closed gate.
    waiting: usize,
}

/// Bytes that one gate covers.
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

    /// Closes the gates at these offsets.
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

    /// Makes every access to this byte fail with `errno`; zero makes it panic.
    pub(crate) fn fail(&self, offset: u64, errno: i32) {
        self.state.lock().unwrap().fails.push((offset, errno));
    }

    pub(crate) fn fail_flush(&self, fails: bool) {
        self.state.lock().unwrap().flush_fails = fails;
    }

    pub(crate) fn let_next_flush_panic(&self) {
        self.state.lock().unwrap().flush_panics = true;
    }

    pub(crate) fn close_flush(&self) {
        self.state.lock().unwrap().flush_closed = true;
    }

    pub(crate) fn let_one_flush_pass(&self) {
        self.state.lock().unwrap().flush_passes += 1;
        self.changed.notify_all();
    }

    pub(crate) fn open_flush(&self) {
        self.state.lock().unwrap().flush_closed = false;
        self.changed.notify_all();
    }

    /// Returns how many flushes the disk is working on.
    pub(crate) fn flushing(&self) -> usize {
        self.state.lock().unwrap().flushing
    }

    /// Returns how many flushes are done.
    pub(crate) fn flushes(&self) -> usize {
        self.state.lock().unwrap().flushes
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
        let hit =
            state.fails.iter().find(|(at, _)| (offset..offset + length).contains(at)).copied();
        drop(state);
        match hit {
            Some((_, 0)) => panic!("a mistake"),
            Some((_, errno)) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }
}

impl BlockStore for Gated {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    /// Makes fragments end at the gates.
    fn layout(&self) -> Option<Layout> {
        Some(Layout { chunk: GATE, members: 4, shift: 0 })
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
        let mut state = self.state.lock().unwrap();
        state.flushing += 1;
        while state.flush_closed && state.flush_passes == 0 {
            state = self.changed.wait(state).unwrap();
        }
        state.flush_passes = state.flush_passes.saturating_sub(1);
        state.flushing -= 1;
        state.flushes += 1;
        if std::mem::take(&mut state.flush_panics) {
            drop(state);
            panic!("a mistake");
        }
        match state.flush_fails {
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
        self.pass(offset, length)?;
        self.memory.extents(offset, length, tell)
    }
}
