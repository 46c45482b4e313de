//! Private decoders of this module, for the fuzzers. What a server sends is given whole and cut in two, with the
//! same result.

use super::handshake::{Agreed, agree};
use super::source::Connection;
use super::{Lane, Source, extents};
use crate::{Backend, Geometry, Operation, Request};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;

/// A server whose answers are these bytes, whatever it is asked.
struct Answers<'a>(&'a [u8]);

impl Read for Answers<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        self.0.read(target)
    }
}

impl Write for Answers<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Parses the server's side of a handshake.
///
/// # Panics
/// When the disk that was agreed on has impossible sizes.
pub fn handshake(name: &str, answers: &[u8]) {
    if let Ok(Agreed { geometry, .. }) = agree(&mut Answers(answers), name, true, &"it") {
        let Geometry { size, block_minimum, block_preferred, transfer_maximum, .. } = geometry;
        assert!(i64::try_from(size).is_ok());
        assert!(block_minimum.is_power_of_two() && block_preferred.is_power_of_two());
        assert!(transfer_maximum > 0 && transfer_maximum.is_multiple_of(block_minimum));
    }
}

/// Parses what a server tells about the extents of a disk.
///
/// # Panics
/// When the extents do not make up the disk.
pub fn extents(size: u64, answers: &[u8]) {
    if let Ok(Some(found)) = extents::ask(&mut Answers(answers), 1, size, &"it") {
        assert_eq!(found.iter().map(|extent| extent.length).sum::<u64>(), size);
        let kinds = found.iter().map(|extent| (extent.hole, extent.zero)).collect::<Vec<_>>();
        assert!(kinds.windows(2).all(|two| two[0] != two[1]));
    }
}

/// The requests under way, whose tags are their places: what they do, where, and how long they are.
const REQUESTS: [(Operation, u64, u32); 4] = [
    (Operation::Read, 0, 16),
    (Operation::Read, 1 << 32, 2048),
    (Operation::Write { durable: false }, 4096, 32),
    (Operation::Flush, 0, 0),
];
const DISK: Geometry = Geometry {
    size: 1 << 40,
    block_minimum: 1,
    block_preferred: 4096,
    transfer_maximum: 1 << 20,
    read_only: false,
    rotational: false,
    flush: true,
    fua: true,
    trim: true,
    zero: true,
    connections: true,
};
/// What is in the buffers before the server answers.
const BEFORE: u8 = 0xa5;

/// Parses replies to the requests of a connection.
///
/// # Panics
/// When requests are answered twice, buffers are not what they were, or it matters where the bytes are cut.
pub fn replies(answers: &[u8], cut: usize) {
    let (first, second) = answers.split_at(cut.min(answers.len()));
    assert_eq!(answered(&[answers]), answered(&[first, second]));
}

/// Tag, result and buffer of a finished request.
type Done = (u16, Result<(), i32>, Vec<u8>);

/// Returns the finished requests, and whether the connection is still used.
fn answered(parts: &[&[u8]]) -> (Vec<Done>, bool) {
    let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
    let source = Source::parse("nbd+unix:///d?socket=/nonexistent").expect("a legal URL");
    let connection = Connection {
        socket: near.into(),
        geometry: DISK,
        flags: 0,
        name: None,
        round_trip: Duration::ZERO,
        allocation: None,
    };
    let (tell, _told) = mpsc::channel();
    let lane = Lane::adopting(&source, connection, false, Some(Duration::ZERO), tell);
    let mut lane = lane.expect("a socket that does not wait");
    for (tag, (operation, offset, length)) in REQUESTS.into_iter().enumerate() {
        let buffer = vec![BEFORE; length as usize];
        lane.begin(Request { tag: tag as u16, operation, offset, length, buffer });
    }
    lane.turn();
    for part in parts {
        // Without its connection it would look for another one.
        if lane.is_connected() {
            far.write_all(part).expect("room in the socket");
            lane.turn();
        }
    }
    let mut finished: Vec<Done> = Vec::new();
    while let Some(one) = lane.finished() {
        let (operation, _, length) = REQUESTS[usize::from(one.tag)];
        assert!(finished.iter().all(|(tag, ..)| *tag != one.tag), "answered twice");
        assert_eq!(one.buffer.len(), length as usize);
        assert!(operation == Operation::Read || one.buffer.iter().all(|byte| *byte == BEFORE));
        finished.push((one.tag, one.result, one.buffer));
    }
    (finished, lane.is_connected())
}
