//! Reads and writes of no bytes.

use crate::setup::{KINDS, disks};
use std::io::{IoSlice, IoSliceMut};
use std::sync::mpsc::channel;
use std::time::Duration;

/// They are answered for every kind of disk, even if it can read nothing without waiting.
#[test]
fn no_bytes_are_read_and_written_at_once() {
    let mut unanswered = Vec::new();
    for (kind, checksums) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let disks = disks();
        let client = disks.client();
        let (tell, told) = channel();
        std::thread::spawn(move || {
            let disk = client.disk(kind.as_bytes()).unwrap().with_checksums(checksums);
            disk.write_at(&[], 0).unwrap();
            disk.read_at(&mut [], 0).unwrap();
            let (mut first, mut last) = ([1; 4096], [2; 4096]);
            let parts = &[IoSlice::new(&first), IoSlice::new(&[]), IoSlice::new(&last)];
            disk.write_vectored_at(parts, 4096, false).unwrap();
            let parts = &mut [
                IoSliceMut::new(&mut first),
                IoSliceMut::new(&mut []),
                IoSliceMut::new(&mut last),
            ];
            disk.read_vectored_at(parts, 4096).unwrap();
            tell.send((first[0], last[0])).unwrap();
        });
        match told.recv_timeout(Duration::from_secs(10)) {
            Ok(read) => assert_eq!(read, (1, 2), "{kind}, {checksums}"),
            Err(_) => unanswered.push((kind, checksums)),
        }
    }
    assert_eq!(unanswered, [], "disks, with checksums or without");
}
