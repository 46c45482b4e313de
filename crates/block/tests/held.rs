//! A long read holds memory for its fragments, not for its length. Counts the engine's buffers after every
//! step, with the sizes that the server uses.
#![allow(clippy::unwrap_used)] // a test should say where it fails

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_block::{Disk, Driver, Engine, How, Limits, Output, Piece, Work};
use towline_mem::Pool;
use towline_store::BlockStore;
use towline_store::block::{DelayStore, MemoryDisk, StripeDisk};

const READ: u64 = 8 << 20;
const LIMIT: u64 = 1 << 20;

#[derive(Default)]
struct Later(Vec<(u64, Work)>);

impl Driver for Later {
    fn begin(&mut self, token: u64, _: &Arc<Disk>, work: Work) {
        self.0.push((token, work));
    }
}

/// Which of the fragments under way lands next.
#[derive(Clone, Copy, Debug)]
enum Order {
    First,
    Last,
    /// The second, so that the first lands only when it is alone.
    FirstLast,
}

/// Reads 8 MiB, several times at once, for a client that takes the answers slowly. Returns the most bytes
/// held.
fn most_held(store: Arc<dyn BlockStore>, how: How, reads: usize, order: Order) -> u64 {
    let store = DelayStore::new(store, Duration::ZERO, 0);
    let disk = Arc::new(Disk::new("disk", "", store, false));
    let (fragments, small) = (Pool::new(128 << 10, 1000), Pool::new(16 << 10, 1000));
    let limits =
        Limits { fragments: fragments.clone(), small: small.clone(), owner_bytes_max: LIMIT };
    let mut engine: Engine<usize> = Engine::new(limits);
    let owner = engine.add_owner();
    for tag in 0..reads {
        engine.read(owner, tag, &disk, 0..READ, how, Instant::now());
    }
    let mut later = Later::default();
    // Bytes on their way to the client.
    let mut unsent: VecDeque<Piece> = VecDeque::new();
    let (mut covered, mut most) = (0, 0);
    while covered < reads as u64 * READ {
        engine.pump(&mut later);
        while let Some(output) = engine.next_output() {
            let Output::Piece { piece, .. } = output else { panic!("something failed") };
            covered += piece.len();
            unsent.push_back(piece);
        }
        let held = fragments.in_use().0 * fragments.buffer_bytes()
            + small.in_use().0 * small.buffer_bytes();
        most = most.max(held as u64);
        let count = later.0.len();
        // The client takes something when the disk has nothing to do.
        if count == 0 {
            assert!(unsent.pop_front().is_some() || covered == reads as u64 * READ, "it stands");
        } else {
            let at = match order {
                Order::First => 0,
                Order::Last => count - 1,
                Order::FirstLast => (count - 1).min(1),
            };
            let (token, Work::Call(call)) = later.0.remove(at) else { panic!("no call") };
            let (result, buffer) = call();
            engine.finished(token, result, buffer, &mut later);
        }
        engine.set_unsent(owner, unsent.iter().map(Piece::len).sum());
    }
    most
}

#[test]
fn a_read_of_8_mib_holds_at_most_1_mib() {
    let memory = || -> Arc<dyn BlockStore> { MemoryDisk::new("test", READ).unwrap() };
    for how in [How::Pieces, How::Ordered] {
        for order in [Order::First, Order::Last, Order::FirstLast] {
            for reads in [1, 4] {
                let stripe = |chunk| StripeDisk::new(vec![memory(), memory()], chunk).unwrap();
                let stores: [Arc<dyn BlockStore>; 3] = [memory(), stripe(64 << 10), stripe(4096)];
                for (number, store) in stores.into_iter().enumerate() {
                    let most = most_held(store, how, reads, order);
                    let what = format!("{how:?}, {order:?}, {reads} reads, store {number}");
                    assert!(most <= LIMIT, "{what}: {most} bytes were held");
                    assert!(most >= LIMIT / 2, "{what}: {most} bytes: it could do more at once");
                }
            }
        }
    }
}
