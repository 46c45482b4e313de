//! A node whose process has no descriptors left.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{Via, node, options};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_connection_that_cannot_be_accepted_waits_and_keeps_no_processor_busy() {
    let (owner, other) = (node(Via::Unix, options(Via::Unix)), node(Via::Unix, options(Via::Unix)));
    let address = owner.addresses()[0].clone();
    let connecting = std::thread::spawn(move || other.connect(&address).map(|_| other));
    std::thread::sleep(Duration::from_millis(100)); // so that it is in the queue
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
    let (before, start) = (processor_time(), Instant::now());
    owner.serve(Duration::from_millis(500)).unwrap();
    let (busy, took) = (processor_time() - before, start.elapsed());
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(busy < took / 10, "{busy:?} of {took:?}");
    while !connecting.is_finished() {
        owner.serve(Duration::from_millis(20)).unwrap();
    }
    let _other = connecting.join().unwrap().unwrap();
    assert_eq!(owner.peers().len(), 1);
}
