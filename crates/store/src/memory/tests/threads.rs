//! Tests with several threads.

use super::*;
use crate::memory::arena::page_bytes;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn many_threads_agree() {
    let f = fixture(LIMIT);
    for path in ["x", "y", "x/sub", "y/sub"] {
        f.mkdir(path).unwrap();
    }
    let shared = f.file("shared", b"");
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (f, shared) = (&f, &shared);
            scope.spawn(move || {
                for round in 0..1500u64 {
                    let name = format!("x/{}", (thread + round) % 5);
                    let file = f.open(&name, CREATE);
                    if let Ok(file) = file {
                        file.write(round * 999, &[thread as u8; 5000], false).unwrap();
                        drop(aggregate(&file, 0, 1 << 20));
                    }
                    shared.write(0, &[thread as u8; 8], true).unwrap();
                    let _ = f.rename(&name, &format!("y/sub/{}", round % 3), (round % 6) as u32);
                    let _ = f.rename("x/sub", "y/sub/moved", 0);
                    let _ = f.rename("y/sub/moved", "x/sub", 0);
                    let _ = f.rename("y/sub", "x/sub", 2);
                    let _ = f.unlink(&format!("y/sub/{}", round % 3));
                    list(&f.open("x", 0).unwrap(), 0, 100);
                    list(&f.open("y", 0).unwrap(), 0, 100);
                    let _ = f.rmdir("x/sub");
                    let _ = f.mkdir("x/sub");
                    let _ = f.mkdir("y/sub");
                }
            });
        }
    });
    let size = shared.stat().unwrap().size;
    assert_eq!(size, 8 * 1500 * 8, "appends are atomic");
    let bytes = read(&shared, 0, size as usize);
    assert!(bytes.chunks(8).all(|chunk| chunk.iter().all(|byte| *byte == chunk[0])), "whole");
    remove_all(&f, ".");
    drop(shared);
    let fresh = fixture(LIMIT);
    assert_eq!(f.used(), fresh.used(), "all given back");
    assert_eq!(f.stat(".").unwrap().links, 2, "links counted");
}

fn remove_all(f: &Fixture, path: &str) {
    for (_, name) in list(&f.open(path, 0).unwrap(), 2, usize::MAX).0 {
        let child = format!("{path}/{name}");
        if f.stat(&child).unwrap().is_directory() {
            remove_all(f, &child);
            f.rmdir(&child).unwrap();
        } else {
            f.unlink(&child).unwrap();
        }
    }
}

#[test]
fn readers_see_whole_writes() {
    let f = fixture(LIMIT);
    let file = f.file("a", &vec![0; 4 * BLOCK]);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            (0..3000u32).for_each(|round| {
                file.write(0, &vec![round as u8; 4 * BLOCK], false).unwrap();
            });
        });
        while !writer.is_finished() {
            let held = aggregate(&file, 0, 4 * BLOCK);
            std::thread::yield_now();
            let bytes = held.to_vec().unwrap();
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "mixed bytes");
        }
    });
}

#[test]
fn who_gave_a_file_away_cannot_change_its_mode_any_more() {
    let f = fixture(LIMIT);
    let one = f.as_user(1000, 100);
    one.file("a", b"");
    let owner = |uid| SetAttr { uid: Some(uid), ..SetAttr::default() };
    let stop = AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // Fails while the file is root's.
                let _ = one.chmod("a", 0o4755);
            }
        });
        let found = (0..50_000).find(|_| {
            // Clears the bit; afterwards, a change of the mode may still be under way.
            f.set("a", owner(0)).unwrap();
            let with_bit = (0..10).any(|_| f.stat("a").unwrap().mode & 0o4000 != 0);
            f.set("a", owner(1000)).unwrap();
            with_bit
        });
        stop.store(true, Ordering::Relaxed);
        found
    });
    assert_eq!(found, None, "root's file has a set-user-id bit that root did not set");
}

#[test]
fn what_is_charged_is_given_back_though_the_limit_changes_meanwhile() {
    let f = fixture(LIMIT);
    let arena = &f.store.tree().arena;
    let before = f.used();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // Less than is asked for, and more.
                f.store.set_limit(before + 4 * page_bytes());
                f.store.set_limit(before + 32 * page_bytes());
            }
        });
        for _ in 0..1_000_000 {
            arena.release(arena.charge_pages(16) * page_bytes());
        }
        stop.store(true, Ordering::Relaxed);
    });
    f.store.set_limit(LIMIT);
    assert_eq!(f.used(), before);
}
