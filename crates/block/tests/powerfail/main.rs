//! Changes that were promised to be durable survive a loss of power. Runs random histories of several
//! connections on the engine; the order in which the disk works and the moments of loss depend on a seed.
//! Planted faults must be found.
#![allow(clippy::unwrap_used)] // a test should say where it fails

mod model;
mod volatile;

use model::{Kind, Model};
use std::sync::Arc;
use std::time::Instant;
use towline_block::{Disk, Driver, Engine, How, Limits, Output, OwnerKey, Piece, RequestKey, Work};
use towline_mem::Pool;
use towline_store::ZeroHow;
use volatile::{Mutation, SECTOR, View, Volatile};

const SECTORS: usize = 96;
const FRAGMENT: usize = 4096;
const CONNECTIONS: usize = 3;
const REQUESTS: usize = 60;

fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// Collects the work that the engine starts; the history decides when it is done.
#[derive(Default)]
struct Later(Vec<(u64, Work)>);

impl Driver for Later {
    fn begin(&mut self, token: u64, _: &Arc<Disk>, work: Work) {
        self.0.push((token, work));
    }
}

/// A write whose payload arrives one fragment at a time.
struct Filling {
    key: RequestKey,
    value: u64,
    rest: usize,
}

/// Runs a history; fails with the first broken promise.
fn history(seed: u64, mutation: Mutation) -> Result<(), String> {
    let mut next = random(seed);
    let volatile = Volatile::new(SECTORS, mutation);
    let disks: Vec<Arc<Disk>> = (0..CONNECTIONS)
        .map(|connection| {
            let view = View { disk: volatile.clone(), connection };
            Arc::new(Disk::new("disk", "", Arc::new(view), false))
        })
        .collect();
    let (fragments, small) = (Pool::new(FRAGMENT, 6), Pool::new(SECTOR, 4));
    let limits = Limits { fragments, small, owner_bytes_max: 1 << 20 };
    let mut engine: Engine<usize> = Engine::new(limits);
    let owners: Vec<OwnerKey> = disks.iter().map(|_| engine.add_owner()).collect();
    let mut model = Model::default();
    let mut later = Later::default();
    let mut fillings: Vec<Filling> = Vec::new();
    let mut asked = 0;
    while asked < REQUESTS || !later.0.is_empty() || !fillings.is_empty() {
        let choice = next() % 8;
        if choice < 3 && asked < REQUESTS {
            asked += 1;
            let connection = next() as usize % CONNECTIONS;
            let (owner, disk) = (owners[connection], &disks[connection]);
            let kind = draw(&mut next, asked as u64);
            let tag = model.ask(kind.clone());
            let bytes = |sectors: &std::ops::Range<usize>| {
                (sectors.start * SECTOR) as u64..(sectors.end * SECTOR) as u64
            };
            let now = Instant::now();
            match kind {
                Kind::Write(sectors, 0, fua) => {
                    let (disk, range) = (disk.clone(), bytes(&sectors));
                    let call = move || {
                        disk.store.zero(
                            range.start,
                            range.end - range.start,
                            ZeroHow::default(),
                        )?;
                        if fua {
                            disk.flush()?;
                        }
                        Ok(Vec::new())
                    };
                    engine.ask(owner, tag, &disks[connection], Box::new(call), now, &mut later);
                }
                Kind::Write(sectors, value, fua) => {
                    let key = engine.write(owner, tag, disk, bytes(&sectors), fua, now).unwrap();
                    fillings.push(Filling { key, value, rest: sectors.len() * SECTOR });
                }
                Kind::Trim(sectors) => {
                    let (disk, range) = (disk.clone(), bytes(&sectors));
                    let call = move || {
                        disk.store.trim(range.start, range.end - range.start)?;
                        Ok(Vec::new())
                    };
                    engine.ask(owner, tag, &disks[connection], Box::new(call), now, &mut later);
                }
                Kind::Flush => {
                    let disk = disk.clone();
                    let call = move || disk.flush().map(|()| Vec::new());
                    engine.ask(owner, tag, &disks[connection], Box::new(call), now, &mut later);
                }
            }
        } else if choice < 5 && !fillings.is_empty() {
            let at = next() as usize % fillings.len();
            let filling = &mut fillings[at];
            if let Ok((mut buffer, length)) = engine.room(filling.key) {
                buffer.bytes_mut()[..length]
                    .as_chunks_mut::<8>()
                    .0
                    .fill(filling.value.to_le_bytes());
                filling.rest -= length;
                let (key, over) = (filling.key, filling.rest == 0);
                engine.filled(key, buffer, length, &mut later);
                if over {
                    fillings.swap_remove(at);
                }
            }
        } else if !later.0.is_empty() {
            let at = next() as usize % later.0.len();
            let (token, work) = later.0.swap_remove(at);
            match work {
                Work::Call(call) => {
                    let (result, buffer) = call();
                    engine.finished(token, result, buffer, &mut later);
                }
                Work::Ask(call) => engine.answered(token, call()),
                Work::At(..) | Work::Transfer { .. } => panic!("the disk has no places"),
            }
        }
        // A client may learn of an answer late, but never before it is given.
        while let Some(output) = engine.next_output() {
            let Output::Done { tag, result, .. } = output else { panic!("no read was asked for") };
            result.map_err(|error| error.to_string())?;
            model.answer(tag);
        }
        if next().is_multiple_of(4) {
            model
                .check(&volatile.crash(&mut next))
                .map_err(|what| format!("seed {seed}: {what}"))?;
        }
    }
    assert_eq!(engine.requests_of(owners[0]), 0);
    read_back(&mut engine, owners[0], &disks[0], &mut later);
    Ok(())
}

/// Draws the next request; its number is the value that it writes.
fn draw(next: &mut impl FnMut() -> u64, number: u64) -> Kind {
    let start = next() as usize % (SECTORS - 1);
    let most = (SECTORS - start).min(if next().is_multiple_of(3) { 40 } else { 4 });
    let sectors = start..start + 1 + next() as usize % most;
    let fua = next().is_multiple_of(4);
    match next() % 10 {
        0..6 => Kind::Write(sectors, number, fua),
        6 => Kind::Write(sectors, 0, fua),
        7 => Kind::Trim(sectors),
        _ => Kind::Flush,
    }
}

/// Reads the whole disk, to show that the engine still works.
fn read_back(engine: &mut Engine<usize>, owner: OwnerKey, disk: &Arc<Disk>, later: &mut Later) {
    let length = (SECTORS * SECTOR) as u64;
    engine.read(owner, 0, disk, 0..length, How::Pieces, Instant::now());
    let mut covered = 0;
    while covered < length {
        engine.pump(later);
        if let Some((token, Work::Call(call))) = later.0.pop() {
            let (result, buffer) = call();
            engine.finished(token, result, buffer, later);
        }
        while let Some(output) = engine.next_output() {
            let Output::Piece { piece: Piece::Data(bytes), .. } = output else { panic!("no data") };
            covered += bytes.len();
        }
        engine.set_unsent(owner, 0);
    }
}

/// Returns the number of histories. `TOWLINE_LONG` is a factor and makes it much larger.
fn histories() -> u64 {
    let length = std::env::var("TOWLINE_LONG").ok();
    length.map_or(400, |length| 8_000 * length.parse::<u64>().expect("TOWLINE_LONG is no number"))
}

#[test]
fn acknowledged_flushes_and_fua_survive_a_loss_of_power() {
    for seed in 1..=histories() {
        if let Err(what) = history(seed, Mutation::Nothing) {
            panic!("{what}");
        }
    }
}

#[test]
fn planted_faults_are_found() {
    use Mutation::{FlushIgnored, FlushOfHalf, FlushOfItsOwn, FuaIgnored};
    for mutation in [FlushIgnored, FuaIgnored, FlushOfItsOwn, FlushOfHalf] {
        let found = (1..=100).filter(|seed| history(*seed, mutation).is_err()).count();
        eprintln!("MEASURED: {mutation:?} is found by {found} of 100 histories");
        assert!(found >= 20, "{mutation:?}: found by {found} of 100 histories");
    }
}
