//! What could not be stored, as some file systems say only when a file is closed.

use super::*;
use crate::simulation::fragile::Fragile;
use std::sync::atomic::{AtomicBool, Ordering};
use towline_wire::request::sync_kind;

/// The answer is lost with the server, and the client has the file open again when it repeats the request.
#[test]
fn what_could_not_be_stored_is_told_again_after_a_restart_and_the_file_is_closed() {
    for kind in [None, Some(sync_kind::DATA), Some(sync_kind::SETTLE)] {
        for is_changed in [false, true] {
            let unstored = Arc::new(AtomicBool::new(true));
            let inner = MemoryStore::new("m", 64 << 20).unwrap();
            let store = Fragile { inner, unstored: Some(unstored.clone()) };
            let mut world = World::new(Arc::new(store), false);
            let (memory, state) = Memory::new();
            let journal = state.begin(5, 50).unwrap();
            let handle = world.open(b"f", READ_WRITE | open_flag::CREATE).handle();
            let inode = world.files.lock().find(handle).unwrap().file.stat().unwrap().identity();
            let last = match kind {
                None => Request::Close { handle },
                Some(kind) => Request::Sync { handle, kind },
            };
            let requests = [resize(handle, b""), last];
            let requests = &requests[usize::from(!is_changed)..];
            let failed = world.ask_kept(&journal, false, 1, requests).failed();
            assert_eq!(failed, Some(Errno::ENOSPC));
            assert!(!unstored.load(Ordering::Relaxed), "it is told once");
            drop((journal, state));

            let mut session = memory.restarted();
            world.files.lock().remove(handle).ok();
            let (flags, export, path) = (READ_WRITE, b"x", b"f");
            let again = Request::Reclaim { handle, flags, inode, export, path };
            assert_eq!(world.ask(&[again]).failed(), None);
            let recorded = session.take_recorded(0);
            let journal = session.journal.clone().unwrap();
            let failed = world.ask_kept(&journal, recorded, 1, requests).failed();
            assert_eq!(failed, Some(Errno::ENOSPC), "{requests:?}");
            let is_open = world.files.lock().find(handle).is_ok();
            assert_eq!(is_open, kind.is_some(), "{requests:?}");
            // It may have been locked again.
            assert_eq!(world.released.is_empty(), is_open, "{requests:?}");
        }
    }
}
