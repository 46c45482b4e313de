//! Peers over shared memory that store anything there, where the server may look at any time: their connections end,
//! and nobody else's.

use super::common::{
    CREATE, Process, Random, ShmRaw, counter, eventually, message, pattern, request, seed,
};
use super::{ATTACH, Honest, start};
use std::path::PathBuf;
use tempfile::TempDir;
use towline_client::Transport;
use towline_wire::request::{CURRENT, encode_compound};
use towline_wire::{Header, Kind, Request};

const RING: u64 = ShmRaw::RING_BYTES as u64;

struct Attacked {
    process: Process,
    /// Over TCP and over shared memory.
    honest: [Honest; 2],
    socket: PathBuf,
    _directory: TempDir,
}

impl Attacked {
    fn new() -> Self {
        let (directory, process, far) = start();
        let [_, _, shared] = process.transports();
        let near = Honest::over(&shared);
        let Transport::Shm(socket) = shared else { panic!("not shared memory") };
        Self { process, honest: [far, near], socket, _directory: directory }
    }

    fn peer(&self) -> ShmRaw {
        ShmRaw::greeted(&self.socket)
    }

    /// A peer whose ring is full of messages to which there is no answer, all of them taken.
    fn peer_with_full_ring(&self) -> ShmRaw {
        let peer = self.peer();
        peer.send(&Header::new(Kind::Cancel, 7, 1).to_bytes().repeat(ShmRaw::RING_BYTES / 32));
        eventually("they are taken", || peer.unread() == 0);
        peer
    }

    /// The number of connections that were ended for what came over them.
    fn ended(&self) -> u64 {
        counter(&self.honest[0].client, "protocol_errors")
    }

    /// Checks that the server has thrown this one out, for what it did, and nobody else.
    fn throws_out(&mut self, peer: &ShmRaw, before: u64, what: &str) {
        assert!(peer.thrown_out(), "{what}: still there");
        assert_eq!(self.ended(), before + 1, "{what}");
        self.serves_others(what);
    }

    fn serves_others(&mut self, what: &str) {
        assert!(self.process.is_alive(), "{what}: the server has ended");
        for honest in &mut self.honest {
            honest.check(what);
        }
    }
}

/// Whatever the server read then would be messages. The last of these positions lies before the one where it is.
#[test]
fn who_says_to_have_written_more_than_fits_is_thrown_out() {
    let mut attacked = Attacked::new();
    for unread in [RING + 32, 2 * RING, 1 << 32, 1 << 63, 32u64.wrapping_neg()] {
        let (peer, before) = (attacked.peer_with_full_ring(), attacked.ended());
        peer.store(ShmRaw::WRITTEN, peer.read().wrapping_add(unread));
        peer.ring();
        attacked.throws_out(&peer, before, &format!("{unread} bytes unread"));
    }
}

/// The server looks at that when it has more to send than there is room for, as far as it knows.
#[test]
fn who_says_to_have_taken_what_was_not_sent_is_thrown_out() {
    let mut attacked = Attacked::new();
    let long = pattern(1 << 20, 1);
    attacked.honest[0].root.write_path(b"long", CREATE, 0o600, &long).unwrap();
    let open = Request::Open { base: CURRENT, flags: 0, mode: 0, path: b"long" };
    let read = Request::Read { handle: CURRENT, offset: 0, length: 1 << 20 };
    for taken in [1, 1 << 32, 1 << 63, u64::MAX - (2 << 20)] {
        let (peer, before) = (attacked.peer(), attacked.ended());
        peer.store(ShmRaw::TAKEN, taken);
        peer.send(&request(0, 1, &[ATTACH, open, read], 0));
        attacked.throws_out(&peer, before, &format!("{taken} bytes taken"));
    }
}

#[test]
fn who_fills_the_control_words_with_noise_is_thrown_out() {
    let (mut attacked, mut random) = (Attacked::new(), Random::new(seed()));
    for round in 0..20 {
        let (peer, before) = (attacked.peer_with_full_ring(), attacked.ended());
        for at in (0..ShmRaw::BYTES).step_by(8) {
            peer.store(at, random.next());
        }
        peer.ring();
        attacked.throws_out(&peer, before, &format!("noise {round}"));
    }
}

#[test]
fn who_fills_the_ring_with_noise_is_thrown_out() {
    let (mut attacked, mut random) = (Attacked::new(), Random::new(seed()));
    let kinds = [Kind::Hello, Kind::Request, Kind::Data, Kind::Cancel, Kind::Release];
    for round in 0..20 {
        let mut noise =
            |bytes: u64| -> Vec<u8> { (0..bytes).map(|_| random.next() as u8).collect() };
        let bytes = match round % 2 {
            0 => noise(64 << 10),
            // Headers as they should be.
            _ => (0..100)
                .flat_map(|number| {
                    let kind = kinds[usize::from(noise(1)[0]) % kinds.len()];
                    message(Header::new(kind, number % 8, 1), &noise(100), &noise(2000))
                })
                .collect(),
        };
        let (peer, before) = (attacked.peer(), attacked.ended());
        peer.send(&bytes);
        attacked.throws_out(&peer, before, &format!("noise {round}"));
    }
}

/// What the server has looked at is different when it looks again.
#[test]
fn who_changes_a_message_while_the_server_reads_it_harms_nobody() {
    let (mut attacked, mut random) = (Attacked::new(), Random::new(seed()));
    let open = Request::Open { base: CURRENT, flags: CREATE, mode: 0o600, path: b"theirs" };
    let write = Request::Write { handle: CURRENT, offset: 0, length: 4096, flags: 0 };
    let body = encode_compound(&[ATTACH, open, write]);
    let write = message(Header::new(Kind::Request, 0, 1), &body, &[7; 4096]);
    let word = |at: usize| u64::from_le_bytes(write[at..at + 8].try_into().unwrap());
    let mut places: Vec<_> = (0..32).step_by(8).map(|at| (ShmRaw::BYTES + at, word(at))).collect();
    places.push((ShmRaw::WRITTEN, write.len() as u64));
    for round in 0..100 {
        let peer = attacked.peer();
        let (at, right) = *random.pick(&places);
        let wrongs = [0, u64::MAX, right ^ 1 << random.below(64), random.next()];
        let wrong = *random.pick(&wrongs);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..50_000 {
                    peer.store(at, wrong);
                    peer.store(at, right);
                }
            });
            peer.send(&write);
        });
        attacked.serves_others(&format!("{wrong} in place of {right} at {at}, round {round}"));
    }
}
