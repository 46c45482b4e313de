//! Cores that stay on their processors while many clients ask.
//!
//! The only test of this file, since it looks at all threads of the process.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::processors::processors;
use common::{CREATE, eventually, setup, skipped};
use rustix::thread::{CpuSet, Pid, sched_getaffinity};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use towline_server::EngineWish;
use towline_wire::request::sync_kind;

/// Far more than make a crowd, on each of two cores.
const CLIENTS: usize = 48;
const BYTES: usize = 16 * 1024;

/// The threads with names that begin like this, and where they may run.
fn threads(name: &str) -> Vec<(i32, CpuSet)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let processors = tasks.filter_map(|task| {
        let path = task.ok()?.path();
        // Threads end at any time.
        let its_name = std::fs::read_to_string(path.join("comm")).ok()?;
        let number = path.file_name()?.to_str()?.parse().ok()?;
        let processors = sched_getaffinity(Pid::from_raw(number)).ok()?;
        its_name.starts_with(name).then_some((number, processors))
    });
    processors.collect()
}

/// Where the cores may run.
fn cores() -> Vec<CpuSet> {
    threads("towline-core").into_iter().map(|(_, processors)| processors).collect()
}

#[test]
fn cores_stay_apart_while_many_ask_and_their_threads_do_not() {
    if processors().is_none() {
        return skipped("cores that stay on their processors: there is one processor");
    }
    let both = sched_getaffinity(None).unwrap();
    for engine in [EngineWish::Automatic, EngineWish::Epoll] {
        let setup = setup(engine);
        let over = AtomicBool::new(false);
        let before = threads("towline-block");
        assert_eq!(cores(), [both, both]);
        std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                let (client, over) = (setup.client(), &over);
                scope.spawn(move || {
                    let root = client.attach(b"dir").unwrap();
                    let name = format!("file{number}");
                    let file = root.open(name.as_bytes(), CREATE, 0o600).unwrap();
                    let mut bytes = vec![1; BYTES];
                    while !over.load(Ordering::Relaxed) {
                        assert_eq!(file.write_at(&bytes, 0).unwrap(), BYTES);
                        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), BYTES);
                    }
                });
            }
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                eventually("each core stays on a processor of its own", || {
                    let cores = cores();
                    cores.iter().all(|core| core.count() == 1) && cores[0] != cores[1]
                });
                let root = setup.client().attach(b"dir").unwrap();
                let file = root.open(b"file0", 2, 0).unwrap();
                eventually("threads that a core starts may use both", || {
                    file.sync(sync_kind::DATA).unwrap();
                    let mut blocking = threads("towline-block");
                    blocking.retain(|(number, _)| before.iter().all(|(old, _)| old != number));
                    !blocking.is_empty()
                        && blocking.iter().all(|(_, processors)| *processors == both)
                });
            }));
            over.store(true, Ordering::Relaxed);
            outcome.unwrap_or_else(|cause| resume_unwind(cause));
        });
        eventually("no core stays", || cores() == [both, both]);
    }
}
