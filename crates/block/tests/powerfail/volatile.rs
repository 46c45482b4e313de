//! A disk with a volatile cache, which records what is written to it. After a loss of power each sector holds
//! either what it held at the last flush or any value written to it since.

use std::io;
use std::sync::{Arc, Mutex};
use towline_mem::Aggregate;
use towline_store::{BlockStore, Direction, Extent, Geometry, Now, Place, ZeroHow};

/// The unit that is written atomically, even when power fails.
pub(crate) const SECTOR: usize = 512;

/// A fault of the disk, or of a layer between it and the clients, which the checker has to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    Nothing,
    FlushIgnored,
    FuaIgnored,
    /// A flush covers only the writes of its own connection.
    FlushOfItsOwn,
    /// A flush covers only half of the writes.
    FlushOfHalf,
}

struct Written {
    sector: usize,
    value: u64,
    connection: usize,
}

struct State {
    /// Contents of stable storage. A sector holds one number, repeated.
    stable: Vec<u64>,
    /// What reads return.
    current: Vec<u64>,
    /// Writes since the last flush, in order.
    unflushed: Vec<Written>,
}

/// The disk.
pub(crate) struct Volatile {
    state: Mutex<State>,
    mutation: Mutation,
}

impl Volatile {
    pub(crate) fn new(sectors: usize, mutation: Mutation) -> Arc<Self> {
        let zeroes = vec![0; sectors];
        let state = State { stable: zeroes.clone(), current: zeroes, unflushed: Vec::new() };
        Arc::new(Self { state: Mutex::new(state), mutation })
    }

    /// Returns the contents of each sector after a loss of power at this moment: any part of the unflushed
    /// writes, in any order.
    pub(crate) fn crash(&self, random: &mut impl FnMut() -> u64) -> Vec<u64> {
        let state = self.state.lock().unwrap();
        let mut image = state.stable.clone();
        let mut seen = vec![1u64; image.len()];
        for written in &state.unflushed {
            // Each write to a sector is as likely to survive as the contents before.
            seen[written.sector] += 1;
            if random().is_multiple_of(seen[written.sector]) {
                image[written.sector] = written.value;
            }
        }
        image
    }

    fn put(&self, offset: u64, values: impl Iterator<Item = u64>, durable: bool, by: usize) {
        let mut state = self.state.lock().unwrap();
        let durable = durable && self.mutation != Mutation::FuaIgnored;
        for (sector, value) in (offset as usize / SECTOR..).zip(values) {
            state.current[sector] = value;
            if durable {
                // Older contents must not come back over this write.
                state.unflushed.retain(|written| written.sector != sector);
                state.stable[sector] = value;
            } else {
                state.unflushed.push(Written { sector, value, connection: by });
            }
        }
    }

    fn flush(&self, by: usize) {
        // A flush does not cover what is written while it works.
        let mut covered = self.state.lock().unwrap().unflushed.len();
        std::thread::yield_now();
        if self.mutation == Mutation::FlushOfHalf {
            covered /= 2;
        }
        let mut state = self.state.lock().unwrap();
        let state = &mut *state;
        let mut at = 0;
        state.unflushed.retain(|written| {
            at += 1;
            let goes = at <= covered
                && match self.mutation {
                    Mutation::FlushIgnored => false,
                    Mutation::FlushOfItsOwn => written.connection == by,
                    _ => true,
                };
            if goes {
                state.stable[written.sector] = written.value;
            }
            !goes
        });
    }
}

/// The disk as seen by one connection.
pub(crate) struct View {
    pub(crate) disk: Arc<Volatile>,
    pub(crate) connection: usize,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "View {}", self.connection)
    }
}

/// Returns the number that a sector repeats.
fn value_of(sector: &[u8]) -> u64 {
    let mut words = sector.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    let first = words.next().unwrap();
    assert!(words.all(|word| word == first), "a sector is torn before it reached the disk");
    first
}

impl BlockStore for View {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: (self.disk.state.lock().unwrap().stable.len() * SECTOR) as u64,
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

    fn write_now(&self, offset: u64, data: &[u8], durable: bool) -> Now {
        // Use both ways of writing.
        match (offset / SECTOR as u64).is_multiple_of(3) {
            true => Now::Done(self.write(offset, data, durable)),
            false => Now::WouldBlock,
        }
    }

    fn locate(&self, _offset: u64, _length: u64, _direction: Direction) -> Option<Place> {
        None
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let state = self.disk.state.lock().unwrap();
        let values = &state.current[offset as usize / SECTOR..];
        for (sector, value) in target.chunks_mut(SECTOR).zip(values) {
            sector.as_chunks_mut::<8>().0.fill(value.to_le_bytes());
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        self.disk.put(offset, data.chunks(SECTOR).map(value_of), durable, self.connection);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.disk.flush(self.connection);
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, _how: ZeroHow) -> io::Result<()> {
        let zeroes = std::iter::repeat_n(0, length as usize / SECTOR);
        self.disk.put(offset, zeroes, false, self.connection);
        Ok(())
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        // Like some devices: every other sector becomes zero.
        for sector in (0..length / SECTOR as u64).step_by(2) {
            let at = offset + sector * SECTOR as u64;
            self.disk.put(at, std::iter::once(0), false, self.connection);
        }
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
