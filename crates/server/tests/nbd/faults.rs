//! Lets each call to the back end fail in turn, during one conversation in each form.

use crate::client::{Client, FLUSH, FUA, Form, TRIM, WRITE_ZEROES};
use crate::{World, long, pattern, wait_until};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use towline_mem::Aggregate;
use towline_store::block::MemoryDisk;
use towline_store::{BlockStore, Direction, Extent, Geometry, Now, Place, ZeroHow};

const MIB: u64 = 1 << 20;
const CACHE: u16 = 5;
const EPERM: u32 = 1;

/// Memory in which one call, given by its number, fails; some calls have to wait, and some are slow.
#[derive(Debug)]
struct Failing {
    memory: Arc<MemoryDisk>,
    calls: AtomicUsize,
    fails: usize,
    errno: i32,
    /// How many failed calls may have lost data: flushes, and durable writes that failed for another reason
    /// than lack of space.
    lost: AtomicUsize,
}

impl Failing {
    /// Counts a call. `loses`: if it fails, data that was promised to be durable may be lost.
    fn call(&self, loses: bool) -> io::Result<()> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        if number.is_multiple_of(7) {
            std::thread::sleep(std::time::Duration::from_micros(300));
        }
        if number != self.fails {
            return Ok(());
        }
        if loses {
            self.lost.fetch_add(1, Ordering::SeqCst);
        }
        Err(io::Error::from_raw_os_error(self.errno))
    }
}

impl BlockStore for Failing {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn read_now(&self, offset: u64, target: &mut [u8]) -> Now {
        match (offset / 4096).is_multiple_of(2) {
            true => Now::Done(self.read(offset, target)),
            false => Now::WouldBlock,
        }
    }

    fn hole_now(&self, _offset: u64, _length: u64) -> u64 {
        0
    }

    fn lend(&self, offset: u64, length: u64) -> Option<Aggregate> {
        // Memory that is lent cannot fail.
        (offset / MIB).is_multiple_of(2).then(|| self.memory.lend(offset, length))?
    }

    fn write_now(&self, offset: u64, data: &[u8], durable: bool) -> Now {
        match (offset / 4096).is_multiple_of(2) {
            true => Now::Done(self.write(offset, data, durable)),
            false => Now::WouldBlock,
        }
    }

    fn locate(&self, _offset: u64, _length: u64, _direction: Direction) -> Option<Place> {
        None
    }

    fn read(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        self.call(false)?;
        self.memory.read(offset, target)
    }

    fn write(&self, offset: u64, data: &[u8], durable: bool) -> io::Result<()> {
        self.call(durable && self.errno != libc::ENOSPC)?;
        self.memory.write(offset, data, durable)
    }

    fn flush(&self) -> io::Result<()> {
        self.call(true)
    }

    fn zero(&self, offset: u64, length: u64, how: ZeroHow) -> io::Result<()> {
        self.call(false)?;
        self.memory.zero(offset, length, how)
    }

    fn trim(&self, offset: u64, length: u64) -> io::Result<()> {
        self.call(false)?;
        self.memory.trim(offset, length)
    }

    fn cache(&self, _offset: u64, _length: u64) -> io::Result<()> {
        self.call(false)
    }

    fn extents(
        &self,
        offset: u64,
        length: u64,
        tell: &mut dyn FnMut(Extent) -> bool,
    ) -> io::Result<()> {
        self.call(false)?;
        self.memory.extents(offset, length, tell)
    }
}

/// Checks that whatever is answered without an error is true. Returns true if the fault occurred.
fn conversation(form: Form, fails: usize, errno: i32) -> bool {
    let what = format!("{form:?}, call {fails}, error {errno}");
    let memory = MemoryDisk::new("failing", 4 * MIB).unwrap();
    let lost = AtomicUsize::new(0);
    let disk = Arc::new(Failing { memory, calls: AtomicUsize::new(0), fails, errno, lost });
    let world = World::new(disk.clone());
    let mut client = world.client(form);
    let mut errors = Vec::new();
    let lost = |errors: &mut Vec<u32>, error: u32| {
        if error != 0 {
            errors.push(error);
        }
        error != 0
    };
    // Durable or not, long or short, answered at once or later.
    let mut expected = vec![0; 4 << 20];
    let mut unknown = vec![false; 4 << 20];
    let writes = [
        (0, 4096, 0),
        (4096, 4096, FUA),
        (8192, 512, FUA),
        (MIB, 300_000, 0),
        (3 * MIB, 300_000, FUA),
    ];
    for (number, (offset, length, flags)) in writes.into_iter().enumerate() {
        let data = pattern(offset, length, number as u64);
        let failed = lost(&mut errors, client.write(flags, offset, &data));
        let range = offset as usize..offset as usize + length;
        expected[range.clone()].copy_from_slice(&data);
        unknown[range].fill(failed);
    }
    let others = [
        (WRITE_ZEROES, 0, 2 * MIB - 8192, 8192),
        (WRITE_ZEROES, FUA, 4096, 4096),
        (TRIM, FUA, 0, 4096),
    ];
    for (kind, flags, offset, length) in others {
        client.request(kind, flags, 1, offset, length);
        let failed = lost(&mut errors, client.outcome().unwrap());
        let range = offset as usize..(offset + length) as usize;
        expected[range.clone()].fill(0);
        // It may have failed after it took effect.
        unknown[range].fill(failed);
    }
    for (kind, length) in [(CACHE, 65536), (FLUSH, 0)] {
        client.request(kind, 0, 1, 0, length);
        lost(&mut errors, client.outcome().unwrap());
    }
    for (offset, length) in
        [(0, 4096), (4096, 4096), (0, 16384), (MIB, 400_000), (3 * MIB, 400_000)]
    {
        match read(&world, &mut client, offset, length) {
            Ok(data) if data == expected[offset as usize..][..data.len()] => {}
            Ok(data) => {
                for (at, byte) in (offset as usize..).zip(data) {
                    assert!(unknown[at] || byte == expected[at], "{what}: byte {at} is wrong");
                }
            }
            Err(error) => errors.push(error),
        }
    }
    let met = disk.calls.load(Ordering::SeqCst) > fails;
    let durable = disk.lost.load(Ordering::SeqCst) > 0;
    let own = errors.iter().filter(|error| **error == errno as u32).count();
    assert!(own <= 1 + usize::from(durable) * errors.len(), "{what}: {errors:?}");
    assert_eq!(!errors.is_empty(), met, "{what}: an error is told: {errors:?}");
    if durable {
        assert_eq!(client.write(0, 0, &[1; 512]), EPERM, "{what}: read-only from then on");
        assert!(world.client(form).flags & 2 != 0, "{what}: and new clients are told");
        assert_eq!(world.counter("disks_failed"), 1, "{what}");
        world.server.replace(&[], &world.disks).unwrap();
        assert_eq!(world.counter("disks_failed"), 0, "{what}");
    }
    if met {
        assert_eq!(client.write(0, 0, &[1; 512]), 0, "{what}: the connection goes on");
    }
    drop(client);
    wait_until("memory is back", || world.counter("buffer_bytes_in_use") == 0);
    met
}

/// Reads; if the server hangs up behind the header of a simple reply, which is all it can do, continues on a
/// new connection.
fn read(world: &World, client: &mut Client, offset: u64, length: u64) -> Result<Vec<u8>, u32> {
    const EIO: u32 = 5;
    match client.try_read(offset, length) {
        Ok(outcome) => outcome,
        Err(_) if client.form == Form::Simple => {
            *client = world.client(client.form);
            Err(EIO)
        }
        Err(error) => panic!("the connection ended: {error}"),
    }
}

#[test]
fn each_call_of_the_back_end_fails_once() {
    for form in [Form::Simple, Form::Structured, Form::Extended] {
        for errno in [libc::EIO, libc::ENOSPC] {
            if errno == libc::ENOSPC && form != Form::Structured && !long() {
                continue;
            }
            let calls = (0..).take_while(|call| conversation(form, *call, errno)).count();
            assert!((18..200).contains(&calls), "{calls} calls");
        }
    }
}
