//! Requests with odd numbers in them.

use crate::common::{Random, Raw, message, request};
use crate::setup::{SIZE, disks};
use std::io::{IoSlice, IoSliceMut};
use towline_wire::request::encode_compound;
use towline_wire::{Errno, Header, Kind, Request};

#[test]
fn odd_numbers_end_no_server() {
    let disks = disks();
    let mut random = Random::new(7);
    let bystander = disks.client();
    let size = SIZE as u64;
    let numbers = [
        0,
        1,
        511,
        512,
        4095,
        4096,
        65_536,
        1 << 20,
        8 << 20,
        size - 4096,
        size - 1,
        size,
        size + 1,
        2 * size,
        u32::MAX as u64,
        1 << 40,
        i64::MAX as u64,
        i64::MAX as u64 + 1,
        u64::MAX - 4095,
        u64::MAX - 1,
        u64::MAX,
    ];
    for round in 0..3000 {
        let kind = *random.pick(&[&b"memory"[..], b"cached", b"stripe", b"delay", b"read-only"]);
        let (mut raw, _) = Raw::greeted(disks.port());
        raw.send(&request(0, 1, &[Request::DiskOpen { disk: 5, name: kind }], 0));
        raw.receive().unwrap();
        for sequence in 2..8 {
            let (offset, length) = (*random.pick(&numbers), *random.pick(&numbers));
            let flags = random.below(64) as u32;
            let short = random.below(300) as usize;
            let sums = vec![7; *random.pick(&[0, 4, 8, short])];
            let asked = match random.below(7) {
                0 => Request::DiskRead { disk: 5, flags, offset, length: length as u32 },
                1 => Request::DiskZero { disk: 5, flags, offset, length },
                2 => Request::DiskTrim { disk: 5, flags, offset, length },
                3 => Request::DiskStatus {
                    disk: 5,
                    kind: random.below(3) as u32,
                    offset,
                    length,
                    most: *random.pick(&numbers) as u32,
                },
                4 => Request::DiskCache { disk: 5, offset, length },
                5 => {
                    let length = *random.pick(&[0, 1, 512, 4096, 16_384]);
                    let write =
                        Request::DiskWrite { disk: 5, flags, offset, length, checksums: &sums };
                    let header = Header::new(Kind::Request, 1, sequence - 1);
                    raw.send(&message(
                        header,
                        &encode_compound(&[write]),
                        &vec![1; length as usize],
                    ));
                    continue;
                }
                _ => Request::DiskInfo { disk: 5 },
            };
            raw.send(&request(1, sequence - 1, &[asked], 0));
        }
        // Until everything is answered, or the peer is thrown out.
        raw.send(&request(2, 1, &[Request::Inquire { what: 0 }], 0));
        while let Some((header, _)) = raw.receive()
            && header.slot != 2
        {}
        if round % 50 == 0 {
            let disk = bystander.disk(b"memory").unwrap();
            disk.read_at(&mut [0; 512], 0).unwrap();
        }
    }
}

/// The second buffer would be for the start of the disk.
#[test]
fn buffers_that_reach_beyond_the_largest_offset_are_refused() {
    let disks = disks();
    let disk = disks.client().disk(b"memory").unwrap();
    disk.write_at(&[1; 4096], 0).unwrap();
    let (one, mut two, last) = ([2; 4096], [2; 4096], u64::MAX - 4095);
    let sources = [IoSlice::new(&one), IoSlice::new(&one)];
    let error = disk.write_vectored_at(&sources, last, false).unwrap_err();
    assert_eq!(error.errno(), Errno::EINVAL);
    let mut back = [0; 4096];
    let mut targets = [IoSliceMut::new(&mut two), IoSliceMut::new(&mut back)];
    let error = disk.read_vectored_at(&mut targets, last).unwrap_err();
    assert_eq!(error.errno(), Errno::EINVAL);
    disk.read_at(&mut back, 0).unwrap();
    assert!(back == [1; 4096], "the start of the disk was written");
}
