use super::*;
use crate::{Config, State};

/// The shared state and a queue, with its directory.
fn queue() -> (tempfile::TempDir, State, Queue) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().as_os_str().as_bytes();
    let state = State::prepare(directory, &Config::default()).unwrap().map().unwrap();
    assert!(state.behind(3).ask() && !state.behind(3).ask());
    assert!(state.behind(3).is_asked() && !state.behind(3).is_asked(), "only once");
    let queue = Queue::create(directory, 3).unwrap();
    assert!(!state.behind(3).is_ready());
    state.behind(3).begin(std::process::id(), 7);
    assert!(state.behind(3).is_ready() && state.behind(3).user() == 7);
    (folder, state, queue)
}

fn place(offset: u64) -> Place {
    Place { entry: 9, handle: 1 << 40, inode: 5, offset }
}

/// All that several threads add arrives once, whole and in the order of each.
#[test]
fn what_is_added_is_taken_in_order() {
    let (folder, state, queue) = queue();
    let behind = state.behind(3);
    // Near the end of the numbers.
    let first = u32::MAX - 20;
    behind.0.added.store(first, Ordering::Relaxed);
    behind.0.done.store(first, Ordering::Relaxed);
    queue.limit(DATA_BYTES);
    const WRITERS: usize = 3;
    const TOTAL: usize = 40 << 20;
    let byte = |writer: usize, at: usize| (at.wrapping_mul(2 * writer + 1) >> 3) as u8;
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let mapped = Queue::open(folder.path().as_os_str().as_bytes(), 3).unwrap();
            scope.spawn(move || {
                let (mut at, mut step) = (0, 1);
                while at < TOTAL {
                    step = (step * 5 + 3) % (2 * RECORD_BYTES_MAX);
                    let data: Vec<u8> =
                        (at..TOTAL.min(at + 1 + step)).map(|at| byte(writer, at)).collect();
                    let place = Place { handle: writer as u64, ..place(at as u64) };
                    at += mapped.add(behind, std::process::id(), &place, &data).unwrap();
                }
            });
        }
        let (mut next, mut seen) = (first, [0; WRITERS]);
        let mut data = Vec::new();
        while seen.iter().any(|seen| *seen < TOTAL) {
            let Some((place, from, length)) = queue.get(behind, next) else {
                behind.wait_for(next);
                continue;
            };
            data.clear();
            queue.load(from, length, &mut data);
            let writer = place.handle as usize;
            assert_eq!(place.offset as usize, seen[writer]);
            assert!((0..).zip(&data).all(|(at, found)| *found == byte(writer, seen[writer] + at)));
            seen[writer] += length;
            next = next.wrapping_add(1);
            behind.finish(next);
        }
    });
    assert!(behind.is_idle() && behind.is_done(behind.added()));
}

#[test]
fn a_full_queue_is_waited_for() {
    let (_folder, state, queue) = queue();
    let (behind, me) = (state.behind(3), std::process::id());
    queue.limit(0);
    let data = vec![1; RECORD_BYTES_MAX];
    assert_eq!(queue.add(behind, me, &place(0), &data), Ok(data.len()));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| queue.add(behind, me, &place(1), &[2]));
        let settles = scope.spawn(|| behind.wait());
        for _ in 0..100 {
            std::thread::yield_now();
            assert!(queue.get(behind, 1).is_none() && !settles.is_finished());
        }
        behind.finish(1);
        assert_eq!(waits.join().unwrap(), Ok(1));
        behind.finish(2);
        settles.join().unwrap().unwrap();
    });
    assert!(behind.is_idle());
}

/// Who waits for a keeper that was killed does not wait for ever.
#[test]
fn a_keeper_that_has_ended_is_noticed() {
    let (_folder, state, queue) = queue();
    let behind = state.behind(3);
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    behind.0.keeper.store(child.id(), Ordering::Relaxed);
    queue.limit(0);
    let data = vec![1; RECORD_BYTES_MAX];
    queue.add(behind, std::process::id(), &place(0), &data).unwrap();
    assert_eq!(behind.wait(), Err(Abandoned));
    assert_eq!(queue.add(behind, std::process::id(), &place(0), &data), Err(Abandoned));
}

#[test]
fn room_is_taken_as_long_as_there_is_enough() {
    let (_folder, state, _queue) = queue();
    let behind = state.behind(3);
    assert!(!behind.take_room(1));
    behind.set_room(10);
    assert!(behind.take_room(7) && !behind.take_room(4) && behind.take_room(3));
    assert_eq!(behind.room(), 0);
    assert!(state.behind(4).is_idle() && !state.behind(4).is_ready(), "another mount");
}
