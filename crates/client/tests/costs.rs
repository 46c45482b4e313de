//! The cost of a request that can be counted: allocations on either side. Does not measure time.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use towline_client::{Client, Options, Transport};
use towline_net::address::Address;
use towline_server::{Config, DiskExport, DiskKind, EngineWish, Server};

/// Counts allocations of the client's thread and of all other threads.
struct Counting;

static OTHERS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static CLIENT: Cell<Option<u64>> = const { Cell::new(None) };
}

fn count() {
    CLIENT.with(|client| match client.get() {
        Some(count) => client.set(Some(count + 1)),
        None => drop(OTHERS.fetch_add(1, Ordering::Relaxed)),
    });
}

// SAFETY: everything is passed on to the system's allocator, with the same arguments.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, bytes) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROUNDS: u64 = 1000;

/// Returns the allocations of client and server per call, averaged over many calls and rounded
/// down: so occasional allocations of the rest of the process do not count.
fn each(mut call: impl FnMut()) -> (u64, u64) {
    for _ in 0..100 {
        call();
    }
    let others = OTHERS.load(Ordering::Relaxed);
    CLIENT.set(Some(0));
    for _ in 0..ROUNDS {
        call();
    }
    let own = CLIENT.replace(None).unwrap();
    let others = OTHERS.load(Ordering::Relaxed) - others;
    (own / ROUNDS, others / ROUNDS)
}

/// The figures are in ARCHITECTURE.md, "The life of a read". Higher ones have to be justified
/// there.
#[test]
fn small_requests_allocate_little() {
    let setup = common::setup(EngineWish::Automatic);
    for transport in &setup.transports {
        let client = Client::connect(transport, Options::default()).unwrap();
        for (export, most) in [(&b"mem"[..], [0, 0, 1]), (b"dir", [0, 0, 2])] {
            let top = client.attach(export).unwrap();
            let mut page = [7; 4096];
            top.write_path(b"f", common::CREATE, 0o600, &page).unwrap();
            let file = top.open(b"f", 0, 0).unwrap();
            let stat = each(|| assert_eq!(top.stat_path(b"f", true).unwrap().size, 4096));
            let read = each(|| assert_eq!(file.read_at(&mut page, 0).unwrap(), 4096));
            let whole = each(|| assert_eq!(top.read_path(b"f", 0, &mut page).unwrap(), 4096));
            let names = ["stat", "read", "open, read, close"];
            let seen = [stat, read, whole];
            let export = export.escape_ascii();
            eprintln!("{export} over {transport:?}: {seen:?}");
            for (((client, server), name), most) in seen.into_iter().zip(names).zip(most) {
                assert!(client == 0, "{export}, {name}: the client allocates {client} times");
                assert!(server <= most, "{export}, {name}: the server, {server} times");
            }
        }
    }
    // Not in a test of its own, which would run at the same time.
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let config = Config {
        disks: vec![DiskExport::new("disk", DiskKind::Memory(1 << 20))],
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap(), Address::Unix(socket.clone())],
        cores: 1,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    for transport in common::transports(&server, socket) {
        let client = Client::connect(&transport, Options::default()).unwrap();
        let disk = client.disk(b"disk").unwrap();
        let mut page = [7; 4096];
        let write = each(|| disk.write_at(&page, 4096).unwrap());
        let read = each(|| disk.read_at(&mut page, 4096).unwrap());
        eprintln!("disk over {transport:?}: write {write:?}, read {read:?}");
        assert_eq!(write, (0, 0), "a write to a disk, over {transport:?}");
        // Read in place over shared memory; otherwise the server puts the answer together in memory
        // of its own.
        let most = if matches!(transport, Transport::Shm(_)) { 0 } else { 5 };
        assert!(read.0 == 0 && read.1 <= most, "a read of a disk, over {transport:?}: {read:?}");
    }
}
