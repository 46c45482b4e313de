//! Arbitrary requests against a file system in memory: what a client can send after its hello.
#![no_main]

use std::sync::Arc;
use towline_session::files::Files;
use towline_session::{Compound, Context, Exports, Step};
use towline_store::memory::MemoryStore;
use towline_store::{Caller, FileStore};
use towline_wire::Request;
use towline_wire::codec::Field;

struct Names(Arc<dyn FileStore>);

impl Exports for Names {
    fn find(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, bool)> {
        (name.len() < 2).then(|| (self.0.clone(), name == b"r"))
    }

    fn find_again(&self, name: &[u8]) -> Option<(Arc<dyn FileStore>, bool)> {
        self.find(name)
    }

    fn names(&self) -> Vec<u8> {
        b"a\0".to_vec()
    }

    fn statistics(&self) -> Vec<u8> {
        b"{}".to_vec()
    }
}

/// Runs one request to its end, whatever it waits for.
fn run(exports: &Names, files: &mut Files, mut compound: Compound, offered: u64) {
    let caller = Caller { uid: 1000, gid: 1000, groups: Arc::new([]), enforce: true };
    let mut context = Context { files, exports, caller: &caller, session: 1 };
    loop {
        match compound.run(&mut context) {
            Step::Finished => break,
            Step::NeedsData => {
                let part = vec![1; usize::try_from(offered).unwrap_or(0).min(100_000)];
                while compound.missing().is_some() && !compound.write_fragment(&part) {}
            }
            Step::Block(work, _) => compound.unblocked(work()),
            Step::Lock(..) => compound.locked(Ok(())),
            Step::TestLock(..) => compound.tested(1, None),
            Step::ReleaseLocks(_) | Step::Reclaimed => {}
        }
    }
    let (results, ..) = compound.into_reply();
    towline_wire::reply::parse_results(&results).expect("the server sends no illegal reply");
}

libfuzzer_sys::fuzz_target!(|requests: Vec<(Vec<u8>, u16)>| {
    let exports = Names(MemoryStore::new("fuzz", 4 << 20).expect("memory for a store"));
    let mut files = Files::new(1, 1);
    let mut attach = Vec::new();
    Request::Attach { name: b"a" }.encode(&mut attach);
    for (number, (body, length)) in [(attach, 0)].iter().chain(&requests).enumerate() {
        // The same bytes as a request with its data, and as one that offers them.
        let data = vec![2; usize::from(*length)];
        let forms = [(&data[..], 0), (&[][..], u64::from(*length))];
        for (payload, offered) in forms {
            if let Ok(compound) = Compound::new(0, number as u32, body, payload, offered) {
                run(&exports, &mut files, compound, offered);
            }
        }
    }
});
