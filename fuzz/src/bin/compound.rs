//! Fuzzes the execution of a session's requests on a memory store.
//!
//! The input is a list of bodies, each after two bytes with its length (little-endian, 15 bits). If the
//! highest bit is set, the data of a write arrives in fragments.
#![no_main]

use std::sync::Arc;
use towline_session::files::{Files, Table, Terms};
use towline_session::locks::{Locked, Locks, Peer};
use towline_session::{Compound, Context, Exports, Step};
use towline_store::memory::MemoryStore;
use towline_store::{Caller, FileStore};
use towline_wire::Request;
use towline_wire::limits::FRAGMENT_BYTES_MAX;
use towline_wire::parts;
use towline_wire::reply::parse_results;
use towline_wire::request::{encode_compound, parse_compound};

const SESSION: u64 = 1;

struct Here;

impl Peer for Here {
    fn is_there(&self) -> bool {
        true
    }
}

struct One(Arc<dyn FileStore>);

impl Exports for One {
    fn find(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)> {
        // The same store, read-only under a second name.
        matches!(name, b"m" | b"r")
            .then(|| (self.0.clone(), Terms { read_only: name == b"r", ..Terms::default() }))
    }

    fn find_again(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, Terms)> {
        self.find(name)
    }

    fn names(&self) -> Vec<u8> {
        b"m\0r\0".to_vec()
    }

    fn statistics(&self) -> Vec<u8> {
        b"{}".to_vec()
    }
}

/// Runs a request to its end. Requests that would have to wait for a lock or for events give up.
fn run(mut compound: Compound, context: &mut Context<'_>, locks: &mut Locks) {
    loop {
        match compound.run(None, context) {
            Step::Finished => break,
            Step::NeedsData => {
                while let Some((_, missing)) = compound.missing() {
                    let count = missing.min(FRAGMENT_BYTES_MAX as u64) as usize;
                    if compound.write_fragment(&vec![7; count]) {
                        break;
                    }
                }
            }
            Step::Elsewhere(_) => panic!("a memory store does not hang"),
            Step::Block(_, work, _) | Step::Share(_, work) => compound.unblocked(work()),
            Step::Lock(file, waiter, wait) => {
                let peer = wait.then(|| -> Arc<dyn Peer> { Arc::new(Here) });
                let outcome = match locks.lock(file, waiter, peer) {
                    Ok(Locked::Done(_)) => Ok(()),
                    Ok(Locked::Waiting) => {
                        assert!(locks.cancel(SESSION, waiter.slot, waiter.sequence));
                        Err(towline_wire::Errno::EINTR)
                    }
                    Err(errno) => Err(errno),
                };
                compound.locked(outcome.map(|()| true));
            }
            Step::TestLock(file, owner, range) => {
                let conflict = locks.test(SESSION, file, owner, &range);
                compound.tested(owner.session, conflict);
            }
            Step::ReleaseLocks(owner, _) => drop(locks.release(owner)),
            Step::EndProcess(owner) => {
                locks.release(owner);
                compound.process_ended();
            }
            Step::HandOver(session, ..) => {
                compound.handed_over(if session % 2 == 0 { Ok(()) } else { Err(towline_wire::Errno::ENOENT) });
            }
            Step::Reclaimed => {}
            Step::Events(queue, turn) => {
                assert!(queue.wait(turn, Box::new(|| {})), "nobody else asks, and nothing happens");
                compound.interrupted();
            }
        }
    }
    let (results, ..) = compound.reply();
    assert!(parse_results(results).is_ok(), "a reply that no client can read");
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let store = MemoryStore::new("fuzz", 4 << 20).expect("a memory store");
    let exports = One(store.clone());
    let caller = Caller { uid: 1000, gid: 1000, groups: Arc::new([]), enforce: true };
    let (mut files, mut locks) = (Files::new(SESSION, 1), Locks::default());
    let table = Table::Held(&mut files);
    let mut context =
        Context { files: table, exports: &exports, caller: &caller, session: SESSION };
    let attach = encode_compound(&[Request::Attach { name: b"m" }]);
    let attach = Compound::new(0, 0, &attach, &[], 0).expect("a legal request");
    run(attach, &mut context, &mut locks);
    let mut rest = data;
    let mut sequence = 0;
    while let Some(([low, high], behind)) = rest.split_first_chunk().map(|(a, b)| (*a, b)) {
        let length = usize::from(u16::from_le_bytes([low, high & 0x7f])).min(behind.len());
        let (body, behind) = behind.split_at(length);
        rest = behind;
        sequence += 1;
        let Ok(requests) = parse_compound(body) else { continue };
        let written = requests.iter().find_map(|request| match request {
            Request::Write { length, .. } => Some(*length),
            Request::WriteParts { parts, .. } => parts::bytes_of(parts).ok(),
            _ => None,
        });
        let written = u64::from(written.unwrap_or(0));
        let (payload, offered) = match written {
            0 => (Vec::new(), 0),
            1..16384 if high & 0x80 == 0 => (vec![9; written as usize], 0),
            _ => (Vec::new(), written),
        };
        let Ok(compound) = Compound::new(0, sequence, body, &payload, offered) else { continue };
        run(compound, &mut context, &mut locks);
    }
    // Closed and removed files must no longer take space.
    drop(files);
    let root = store.root().expect("a memory store has a root");
    let space = store.stat_fs(&*root).expect("a memory store knows its space");
    assert!(space.blocks_free <= space.blocks);
});
