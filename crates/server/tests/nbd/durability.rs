//! Changes that were promised to be durable survive a loss of power, over real connections with requests of
//! all of them under way together. (`crates/block/tests/powerfail` does the same without threads, in an order
//! that depends on the seed, and shows that planted faults are found.)

use crate::client::{Chunk, Client, FLUSH, FUA, Form, TRIM, WRITE, WRITE_ZEROES};
use crate::model::{Kind, Model};
use crate::page_cache::{dirty_pages, is_told};
use crate::volatile::{Mutation, SECTOR, View, Volatile};
use crate::{World, long, random, wait_until};
use std::sync::Arc;
use towline_server::{CacheMode, DiskExport, DiskKind, OwnStore};

const SECTORS: usize = 4096;
const REQUESTS: usize = 150;

/// Sends random requests on three connections, each of which uses the disk under a name of its own.
fn history(seed: u64, mutation: Mutation) -> Result<(), String> {
    let mut next = random(seed);
    let disk = Volatile::new(SECTORS, mutation);
    let export = |connection: usize| {
        let kind = DiskKind::Own(OwnStore(Arc::new(View { disk: disk.clone(), connection })));
        DiskExport::new(&connection.to_string(), kind)
    };
    let disks: Vec<DiskExport> = (0..3).map(export).collect();
    let world = World::with(disks[0].kind.clone(), |config| config.disks.clone_from(&disks));
    let forms = [Form::Simple, Form::Structured, Form::Extended];
    let connect = |at: usize| Client::connect_to(world.socket(), forms[at], &at.to_string());
    let mut clients = [0, 1, 2].map(connect);
    let mut outstanding = [0; 3];
    let mut model = Model::default();
    let mut asked = 0;
    while asked < REQUESTS || outstanding != [0; 3] {
        let at = next() as usize % 3;
        let client = &mut clients[at];
        if asked < REQUESTS && outstanding[at] < 8 && next().is_multiple_of(2) {
            asked += 1;
            let kind = draw(&mut next, asked as u64);
            let cookie = model.ask(kind.clone()) as u64;
            let bytes = request(client, &kind, cookie);
            client.send(&bytes);
            outstanding[at] += 1;
        } else if outstanding[at] > 0 {
            let (cookie, error) = next_outcome(client);
            assert_eq!(error, 0, "seed {seed}");
            model.answer(cookie as usize);
            outstanding[at] -= 1;
            if next().is_multiple_of(4) {
                model
                    .check(&disk.crash(&mut next))
                    .map_err(|what| format!("seed {seed}: {what}"))?;
            }
        }
    }
    Ok(())
}

fn draw(next: &mut impl FnMut() -> u64, number: u64) -> Kind {
    let long = next().is_multiple_of(3);
    // Most are in the same place, so that they overlap.
    let start = next() as usize % if long { 3000 } else { 64 };
    let sectors = start..start + 1 + next() as usize % if long { 1000 } else { 24 };
    let fua = next().is_multiple_of(4);
    match next() % 10 {
        0..6 => Kind::Write(sectors, number, fua),
        6 => Kind::Write(sectors, 0, fua),
        7 => Kind::Trim(sectors),
        _ => Kind::Flush,
    }
}

fn request(client: &Client, kind: &Kind, cookie: u64) -> Vec<u8> {
    let (sectors, command, flags, value) = match kind {
        Kind::Write(sectors, 0, fua) => (sectors.clone(), WRITE_ZEROES, u16::from(*fua) * FUA, 0),
        Kind::Write(sectors, value, fua) => (sectors.clone(), WRITE, u16::from(*fua) * FUA, *value),
        Kind::Trim(sectors) => (sectors.clone(), TRIM, 0, 0),
        Kind::Flush => (0..0, FLUSH, 0, 0),
    };
    let (offset, length) = (sectors.start * SECTOR, sectors.len() * SECTOR);
    let payload =
        if command == WRITE { value.to_le_bytes().repeat(length / 8) } else { Vec::new() };
    client.request_bytes(command, flags, cookie, offset as u64, length as u64, &payload)
}

/// Receives the next reply, which has no data, and returns its cookie and error.
fn next_outcome(client: &mut Client) -> (u64, u32) {
    if client.form == Form::Simple {
        let (error, cookie) = client.simple().unwrap();
        return (cookie, error);
    }
    let mut error = 0;
    loop {
        let (cookie, chunk, done) = client.chunk().unwrap();
        if let Chunk::Error(told, _) = chunk {
            error = told;
        }
        if done {
            return (cookie, error);
        }
    }
}

#[test]
fn acknowledged_flushes_and_fua_survive_a_loss_of_power() {
    for seed in 1..=if long() { 600 } else { 8 } {
        if let Err(what) = history(seed, Mutation::Nothing) {
            panic!("{what}");
        }
    }
}

#[test]
fn planted_faults_are_found() {
    use Mutation::{FlushIgnored, FlushOfItsOwn, FuaIgnored};
    for mutation in [FlushIgnored, FuaIgnored, FlushOfItsOwn] {
        let found = (1..=30).find(|seed| history(*seed, mutation).is_err());
        assert!(found.is_some(), "{mutation:?} is not found by any of 30 histories");
    }
}

/// Real files: after a flush on any connection, and after a durable write, no page is dirty.
#[test]
fn files_have_nothing_left_to_write() {
    for mode in [CacheMode::Cached, CacheMode::Direct, CacheMode::ReadDirect] {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        std::fs::write(file.path(), [0; 4096]).unwrap();
        file.as_file().set_len(8 << 20).unwrap();
        if !is_told(file.as_file()) {
            return;
        }
        let world = World::with(DiskKind::File(file.path().into(), mode), |_| {});
        let mut clients = [Form::Simple, Form::Structured, Form::Extended].map(|f| world.client(f));
        let mut was_dirty = false;
        for round in 0..30u64 {
            let data = vec![round as u8; if round % 3 == 0 { 1 << 20 } else { 8192 }];
            let offset = (round % 7) << 20;
            assert_eq!(clients[0].write(0, offset, &data), 0);
            assert_eq!(clients[1].write(0, offset + 4096, &data[..4096]), 0);
            was_dirty |= dirty_pages(file.as_file()) > 0;
            assert_eq!(clients[2].flush(), 0);
            assert_eq!(dirty_pages(file.as_file()), 0, "{mode:?}: after a flush");
            let form = round as usize % 3;
            assert_eq!(clients[form].write(FUA, offset, &data), 0);
            assert_eq!(dirty_pages(file.as_file()), 0, "{mode:?}: after a durable write");
        }
        if mode != CacheMode::Direct {
            assert!(was_dirty, "{mode:?}: the test can fail");
        }
    }
}

/// A flush that arrives while another one runs is not covered by it.
#[test]
fn a_flush_waits_for_one_that_begins_after_it() {
    let disk = crate::stores::Gated::new(1 << 20);
    let world = World::new(disk.clone());
    let mut clients = [Form::Simple, Form::Structured, Form::Extended].map(|f| world.client(f));
    disk.close_flush();
    for client in &mut clients {
        client.request(FLUSH, 0, 1, 0, 0);
        // The first flush is in the store; the others arrive after it has begun.
        wait_until("a flush works", || disk.flushing() == 1);
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    disk.let_one_flush_pass();
    assert_eq!(clients[0].simple().unwrap(), (0, 1));
    wait_until("the next one works", || disk.flushing() == 1);
    disk.open_flush();
    for client in &mut clients[1..] {
        assert_eq!(client.outcome().unwrap(), 0);
    }
    assert_eq!(disk.flushes(), 2, "two share one");
}
