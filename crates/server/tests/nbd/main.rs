//! Disks over NBD with back ends that fail, wait, forget and shrink, and with clients that vanish.
#![allow(clippy::unwrap_used)] // a test should say where it fails

mod client;
mod durability;
mod failures;
mod faults;
mod glances;
mod hostile;
mod memory;
mod moving;
// `model` and `volatile` are the checker and the disk of the engine's tests, `processors` is shared with the client's.
mod in_place;
#[path = "../../../block/tests/powerfail/model.rs"]
mod model;
mod order;
mod page_cache;
mod paths;
#[path = "../../../client/tests/common/processors.rs"]
mod processors;
mod rates;
mod reload;
mod resize;
mod shape;
mod stores;
mod vanish;
#[path = "../../../block/tests/powerfail/volatile.rs"]
mod volatile;

use client::{Client, Form};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use towline_net::address::Address;
use towline_server::{Config, Delivery, DiskExport, DiskKind, OwnStore, Server};
use towline_store::BlockStore;

/// A server with one disk.
struct World {
    server: Server,
    disks: Vec<DiskExport>,
}

impl World {
    fn new(store: Arc<dyn BlockStore>) -> Self {
        Self::with(DiskKind::Own(OwnStore(store)), |_| {})
    }

    fn delivered(kind: DiskKind, delivery: Delivery) -> Self {
        Self::with(kind, |config| config.disks[0].delivery = delivery)
    }

    fn with(kind: DiskKind, change: impl FnOnce(&mut Config)) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("towline-nbd-{}-{count}", std::process::id());
        let disks = vec![DiskExport::new("disk", kind)];
        let mut config = Config {
            disks,
            nbd: vec![Address::Unix(std::env::temp_dir().join(name))],
            cores: 2,
            ..Config::default()
        };
        change(&mut config);
        let disks = config.disks.clone();
        Self { server: Server::start(&config).unwrap(), disks }
    }

    fn socket(&self) -> &Path {
        let Address::Unix(path) = &self.server.nbd_addresses()[0] else { panic!("no socket") };
        path
    }

    fn client(&self, form: Form) -> Client {
        Client::connect(self.socket(), form)
    }

    /// Returns a counter of the server.
    fn counter(&self, name: &str) -> u64 {
        let json: serde_json::Value = serde_json::from_str(&self.server.statistics_json()).unwrap();
        json["counters"][name].as_u64().unwrap_or_else(|| panic!("no counter {name}"))
    }
}

/// Waits until a condition holds; fails after too long a wait.
fn wait_until(what: &str, is_so: impl FnMut() -> bool) {
    wait_longer(1, what, is_so);
}

/// As [`wait_until`], so many times as long.
fn wait_longer(times: u32, what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..2000 * times {
        if is_so() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("waited too long until {what}");
}

/// Returns true if `TOWLINE_LONG` asks for the long tier.
fn long() -> bool {
    std::env::var_os("TOWLINE_LONG").is_some()
}

/// Returns a generator of numbers that depend only on the seed.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// Returns bytes that differ from block to block and with the seed.
fn pattern(offset: u64, length: usize, seed: u64) -> Vec<u8> {
    (offset..offset + length as u64).map(|at| (at / 512 * 31 + at + seed * 7) as u8 | 1).collect()
}
