//! A disk whose file is on a file system that hangs. Only its own requests wait, over sessions and NBD,
//! though one core serves everything. Other requests do not wait for memory either, of which the core has
//! little.

use crate::support::wait_until;
use crate::world::{LONG, Mounted, Serving, begin, connect, in_time};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::sync::{Arc, mpsc};
use towline_attach::nbd::{Caller, Source};
use towline_client::{Client, Disk, ExtentKind, ZeroHow};

const MIB: usize = 1 << 20;
/// Bytes of each disk.
const SIZE: usize = 32 * MIB;
/// Number of waiting clients of each kind: more than the disk has threads.
const MANY: usize = 20;

/// Returns the initial value of a byte of the disk.
fn byte(at: usize) -> u8 {
    (at / 4096 % 251) as u8 + 1
}

fn image(path: &Path) {
    let bytes: Vec<u8> = (0..SIZE).map(byte).collect();
    fs::write(path, bytes).unwrap();
    // Data in the page cache could be read although the file system hangs. Opening the file drops it, except
    // for pages that other processors still hold.
    let file = fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn nbd(socket: &Path, name: &str) -> Caller {
    let url = format!("nbd+unix:///{name}?socket={}", socket.display());
    Caller::connect(&Source::parse(&url).unwrap(), None).unwrap()
}

/// Does all kinds of work on a disk, with more data than the server has buffers for.
fn work_on(disk: &Disk, seed: u8) {
    let data: Vec<u8> = (0..LONG).map(|at| (at / 1000) as u8 ^ seed).collect();
    disk.write_at(&data, MIB as u64).unwrap();
    disk.flush().unwrap();
    let mut found = vec![0; LONG];
    disk.read_at(&mut found, MIB as u64).unwrap();
    assert!(found == data);
    disk.zero(MIB as u64, 65536, ZeroHow::default()).unwrap();
    disk.read_at(&mut found[..65536], MIB as u64).unwrap();
    assert!(found[..65536].iter().all(|byte| *byte == 0));
    disk.extents(0, SIZE as u64, ExtentKind::Allocation).unwrap();
    disk.refresh().unwrap();
}

fn work_over_nbd(disk: &Caller, seed: u8) {
    let data = vec![seed; MIB];
    for at in 0..4 {
        let at = ((20 + at) * MIB) as u64;
        disk.write(data.clone(), at).unwrap();
        assert!(disk.read(vec![0; MIB], at).unwrap() == data);
    }
    disk.flush().unwrap();
}

#[test]
fn a_disk_that_hangs_holds_up_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::new(directory.path()) else { return };
    let (hanging, local) = (mounted.point.join("disk"), directory.path().join("local"));
    image(&hanging);
    image(&local);
    let socket = directory.path().join("nbd");
    let listen = format!("unix://{}", socket.display());
    let exports = [("hangs", &*hanging), ("local", &*local)];
    let mut serving = Serving::new(1, "--disk", exports, &["--nbd", &listen]);
    assert!(serving.said.contains("disk is on fuse"), "{}", serving.said);
    assert!(!serving.said.contains("local is on"), "{}", serving.said);
    let port = serving.port;

    // Everything works while it does not hang.
    let open = |client: &Client, name: &str| client.disk(name.as_bytes()).unwrap();
    let both = connect(port, false);
    let (hangs, stays) = (open(&both, "hangs"), open(&both, "local"));
    work_on(&hangs, 1);
    let over_nbd = Arc::new(nbd(&socket, "hangs"));
    work_over_nbd(&over_nbd, 2);
    let leaving = connect(port, false);
    let left = open(&leaving, "hangs");

    mounted.hang();
    let place = |number: usize| 11 * MIB + number * 65536;
    let reads: Vec<_> = (0..MANY)
        .map(|number| {
            begin(move || {
                let disk = connect(port, number % 2 == 0).disk(b"hangs").unwrap();
                let mut found = vec![0; MIB];
                disk.read_at(&mut found, place(number) as u64).unwrap();
                found
            })
        })
        .collect();
    let writes: Vec<_> = (0..MANY)
        .map(|number| {
            begin(move || {
                let disk = connect(port, number % 2 == 0).disk(b"hangs").unwrap();
                let data = vec![number as u8; 65536];
                disk.write_at(&data, (26 * MIB + number * 65536) as u64).unwrap();
            })
        })
        .collect();
    let foreign: Vec<_> = (0..MANY)
        .map(|number| {
            let disk = over_nbd.clone();
            begin(move || disk.read(vec![0; MIB], place(number) as u64).unwrap())
        })
        .collect();
    let own = Arc::new(hangs);
    let flushed = {
        let own = own.clone();
        begin(move || own.flush().unwrap())
    };
    // The same session, which uses both disks.
    let own_read = begin(move || {
        let mut found = vec![0; 2 * MIB];
        own.read_at(&mut found, place(MANY) as u64).unwrap();
        found
    });

    for nearest in [false, true] {
        let other = begin(move || work_on(&open(&connect(port, nearest), "local"), 3));
        in_time(&other, "another session");
    }
    let stays = in_time(
        &begin(move || {
            work_on(&stays, 4);
            stays
        }),
        "another disk of the same session",
    );
    let another = socket.clone();
    in_time(&begin(move || work_over_nbd(&nbd(&another, "local"), 5)), "another disk over NBD");
    in_time(&begin(move || drop((left, leaving))), "a session that ends");
    for waiting in reads.iter().chain(&foreign).chain([&own_read]) {
        assert!(waiting.try_recv().is_err(), "read, though the file system hangs");
    }
    assert!(writes.iter().chain([&flushed]).all(|waiting| waiting.try_recv().is_err()));

    // Everything that waited is answered.
    mounted.go_on();
    let right = |found: &[u8], at: usize| (0..found.len()).all(|i| found[i] == byte(at + i));
    for (number, read) in reads.iter().enumerate() {
        assert!(right(&in_time(read, "a read"), place(number)));
    }
    for (number, read) in foreign.iter().enumerate() {
        assert!(right(&in_time(read, "a read over NBD"), place(number)));
    }
    assert!(right(&in_time(&own_read, "a read"), place(MANY)));
    in_time(&flushed, "a flush");
    for write in &writes {
        in_time(write, "a write");
    }
    let bytes = fs::read(&hanging).unwrap();
    for number in 0..MANY {
        let at = 26 * MIB + number * 65536;
        assert!(bytes[at..at + 65536].iter().all(|byte| *byte == number as u8), "write {number}");
    }

    // The server can be stopped while requests hang.
    mounted.hang();
    let (opened, is_open) = mpsc::channel();
    let stopped = begin(move || {
        let disk = open(&connect(port, false), "hangs");
        opened.send(()).unwrap();
        disk.flush().is_err()
    });
    in_time(&is_open, "opening");
    in_time(&begin(move || work_on(&stays, 6)), "others, once more");
    serving.process.signal(Signal::TERM);
    wait_until("the server has ended", || serving.process.0.try_wait().unwrap().is_some());
    assert!(serving.process.0.wait().unwrap().success());
    assert!(in_time(&stopped, "a request to a server that is gone"), "answered by nobody");
}
