//! What was promised to be durable survives a loss of power.

use crate::client::{FLUSH, FUA, Form, WRITE, WRITE_ZEROES};
use crate::stores::{SECTOR, Volatile};
use crate::{World, random};
use std::collections::HashSet;

const SIZE: u64 = 2 << 20;

/// What a sector may hold after a loss of power: what it held at the last promise, or anything
/// written since.
struct Model {
    allowed: Vec<HashSet<u8>>,
    current: Vec<u8>,
}

impl Model {
    fn write(&mut self, sectors: std::ops::Range<usize>, byte: u8, durable: bool) {
        for sector in sectors {
            if durable {
                self.allowed[sector].clear();
            }
            self.allowed[sector].insert(byte);
            self.current[sector] = byte;
        }
    }

    fn flush(&mut self) {
        for (allowed, current) in self.allowed.iter_mut().zip(&self.current) {
            *allowed = HashSet::from([*current]);
        }
    }

    fn check(&self, image: &[u8], what: &str) {
        for (sector, bytes) in image.chunks(SECTOR).enumerate() {
            let byte = bytes[0];
            assert!(bytes.iter().all(|b| *b == byte), "{what}: sector {sector} is torn");
            let allowed = &self.allowed[sector];
            assert!(allowed.contains(&byte), "{what}: sector {sector}: {byte} not in {allowed:?}");
        }
    }
}

/// Random histories on three connections with requests under way together.
fn history(seed: u64) {
    let mut next = random(seed);
    let disk = Volatile::new(SIZE);
    let world = World::new(disk.clone());
    let mut clients = [Form::Simple, Form::Structured, Form::Extended].map(|f| world.client(f));
    let sectors = SIZE as usize / SECTOR;
    let mut model = Model { allowed: vec![HashSet::from([0]); sectors], current: vec![0; sectors] };
    for round in 0..40u8 {
        // Each connection writes in its own third, several requests at once; no order is promised
        // between them, so that ranges of one round do not overlap.
        let mut sent = Vec::new();
        for (number, client) in clients.iter_mut().enumerate() {
            let third = sectors / 3;
            let mut at = third * number;
            for _ in 0..next() % 4 {
                let count = match next() % 3 {
                    0 => 1 + next() as usize % 8,
                    _ => 1 + next() as usize % 700,
                };
                at += next() as usize % 50;
                if at + count > third * (number + 1) {
                    break;
                }
                let byte = round * 5 + number as u8 + 1;
                let (offset, length) = ((at * SECTOR) as u64, (count * SECTOR) as u64);
                let flags = if next().is_multiple_of(4) { FUA } else { 0 };
                let (kind, payload, byte) = match next() % 5 {
                    0 => (WRITE_ZEROES, Vec::new(), 0),
                    _ => (WRITE, vec![byte; length as usize], byte),
                };
                let bytes = client.request_bytes(kind, flags, 1, offset, length, &payload);
                client.send(&bytes);
                sent.push((number, at..at + count, byte, flags == FUA));
                at += count;
            }
        }
        for (number, ..) in &sent {
            assert_eq!(clients[*number].outcome().unwrap(), 0);
        }
        for (_, range, byte, durable) in sent {
            model.write(range, byte, durable);
        }
        model.check(&disk.crash(&mut next), &format!("seed {seed}, round {round}, written"));
        if next().is_multiple_of(3) {
            let client = &mut clients[next() as usize % 3];
            client.request(FLUSH, 0, 2, 0, 0);
            assert_eq!(client.outcome().unwrap(), 0);
            model.flush();
            model.check(&disk.crash(&mut next), &format!("seed {seed}, round {round}, flushed"));
        }
    }
}

#[test]
fn acknowledged_flushes_and_fua_survive_a_loss_of_power() {
    for seed in 1..=12 {
        history(seed);
    }
}
