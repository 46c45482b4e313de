use super::*;
use crate::{Config, State};

fn this() -> Holder {
    Holder::new(std::process::id(), false)
}

/// The shared state and a queue, with its directory.
fn queue() -> (tempfile::TempDir, State, Queue) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().as_os_str().as_bytes();
    let state = State::prepare(directory, &Config::default()).unwrap().map().unwrap();
    let trip = std::time::Duration::from_millis(9);
    assert!(state.behind(3).ask(trip) && !state.behind(3).ask(trip));
    assert_eq!(state.behind(3).trip(), trip);
    assert!(state.behind(3).take_wish() && !state.behind(3).take_wish(), "only once");
    let queue = Queue::create(directory, 3).unwrap();
    assert!(!state.behind(3).is_ready());
    state.behind(3).begin(std::process::id(), 7);
    assert!(state.behind(3).is_ready() && state.behind(3).user() == 7);
    (folder, state, queue)
}

fn place(offset: u64) -> Place {
    Place { mount: 3, entry: 9, handle: 1 << 40, inode: 5, offset: Some(offset) }
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
                    let writer = writer as u64;
                    let place = Place { handle: writer, inode: writer, ..place(at as u64) };
                    // On a busy machine who has the lock may sleep for longer than others wait for it.
                    let mut tries = (0..1000).map(|_| mapped.add(behind, this(), &place, &data));
                    at += tries.find_map(|added| added).unwrap();
                }
            });
        }
        let (mut next, mut seen) = (first, [0; WRITERS]);
        let mut data = Vec::new();
        while seen.iter().any(|seen| *seen < TOTAL) {
            let news = behind.news();
            let Some((place, from, length)) = queue.get(behind, next) else {
                behind.wait_for_news(news);
                continue;
            };
            data.clear();
            queue.load(from, length, &mut data);
            let writer = place.handle as usize;
            assert_eq!(place.offset, Some(seen[writer] as u64));
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
    let (behind, me) = (state.behind(3), this());
    queue.limit(0);
    let data = vec![1; RECORD_BYTES_MAX];
    assert_eq!(queue.add(behind, me, &place(0), &data), Some(data.len()));
    let end = place(data.len() as u64);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| queue.add(behind, me, &end, &[2]));
        let settles = scope.spawn(|| behind.wait(|| true));
        for _ in 0..100 {
            std::thread::yield_now();
            assert!(queue.get(behind, 1).is_none() && !settles.is_finished());
        }
        behind.finish(1);
        assert_eq!(waits.join().unwrap(), Some(1));
        behind.finish(2);
        settles.join().unwrap().unwrap();
    });
    assert!(behind.is_idle());
}

/// Writes of one place would be done one after another, each in a round trip.
#[test]
fn what_overlaps_with_the_queue_is_not_added() {
    let (_folder, state, queue) = queue();
    let (behind, me) = (state.behind(3), this());
    queue.limit(DATA_BYTES);
    assert_eq!(queue.add(behind, me, &place(100), &[1; 50]), Some(50));
    let add = |at, length| queue.add(behind, me, &place(at), &vec![2; length]);
    assert_eq!([add(100, 1), add(149, 1), add(90, 11), add(90, 200)], [None; 4]);
    assert_eq!([add(90, 10), add(150, 5)], [Some(10), Some(5)]);
    let other = Place { inode: 6, ..place(100) };
    assert_eq!(queue.add(behind, me, &other, &[3]), Some(1));
    behind.finish(1);
    assert_eq!(add(100, 50), Some(50), "it is done");
}

/// However much is known without looking at all records: the same as if each is looked at.
#[test]
fn whatever_overlaps_is_noticed() {
    let (_folder, state, queue) = queue();
    let (behind, me) = (state.behind(3), this());
    queue.limit(DATA_BYTES);
    let mut inside: std::collections::VecDeque<(Place, u64)> = std::collections::VecDeque::new();
    let mut random = 7_u64;
    let mut next = |most: u64| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % most
    };
    let (mut added, mut refused) = (0, 0);
    for _ in 0..20_000 {
        if next(3) == 0 && !inside.is_empty() {
            let count = if next(20) == 0 { inside.len() } else { 1 };
            inside.drain(..count);
            behind.finish(behind.done().wrapping_add(count as u32));
        }
        let (files, length) = (if next(2) == 0 { 1 } else { 3 }, 1 + next(9));
        let offset = if next(6) == 0 { None } else { Some(next(300)) };
        let new = Place { inode: 5 + next(files), handle: 8 + next(8) / 7, offset, ..place(0) };
        let overlaps = inside.iter().any(|(other, other_length)| {
            other.inode == new.inode
                && match (other.offset, new.offset) {
                    (Some(one), Some(two)) => one < two + length && two < one + other_length,
                    (None, None) => other.handle != new.handle,
                    _ => true,
                }
        });
        let count = queue.add(behind, me, &new, &vec![1; length as usize]);
        assert_eq!(count, (!overlaps).then_some(length as usize), "{new:?} beside {inside:?}");
        if overlaps {
            refused += 1;
        } else {
            added += 1;
            inside.push_back((new, length));
        }
        if inside.len() > 40 {
            inside.drain(..30);
            behind.finish(behind.done().wrapping_add(30));
        }
    }
    assert!(added > 2000 && refused > 2000, "{added} {refused}");
}

/// What is appended may be anywhere, but in its order.
#[test]
fn what_is_appended_is_not_mixed_with_other_writes() {
    let (_folder, state, queue) = queue();
    let (behind, me) = (state.behind(3), this());
    queue.limit(DATA_BYTES);
    let end = Place { offset: None, ..place(0) };
    let (other, end_of_other) = (Place { inode: 6, ..place(9) }, Place { inode: 7, ..end });
    let add = |place: &Place| queue.add(behind, me, place, &[1; 5]);
    assert_eq!([add(&end), add(&place(1 << 40)), add(&end)], [Some(5), None, Some(5)]);
    assert_eq!([add(&other), add(&end_of_other)], [Some(5); 2]);
    assert_eq!(add(&Place { offset: None, ..other }), None);
    assert_eq!(queue.get(behind, 1), Some((end, 5, 5)));
    behind.finish(2);
    assert_eq!([add(&place(0)), add(&end)], [Some(5), None]);
}

/// Who waits for a keeper that was killed does not wait for ever.
#[test]
fn a_keeper_that_has_ended_is_noticed() {
    let (folder, state, queue) = queue();
    let behind = state.behind(3);
    let is_served = || Queue::is_served(folder.path().as_os_str().as_bytes(), 3);
    assert_eq!(queue.add(behind, this(), &place(0), &[1]), Some(1));
    assert!(is_served());
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    behind.0.keeper.store(child.id(), Ordering::Relaxed);
    assert_eq!(queue.add(behind, this(), &place(1), &[1]), None);
    assert_eq!(behind.wait(|| false), Err(Abandoned));
    // The lock is the mapping's, too, so this one has to be of a queue that nobody has mapped.
    std::fs::write(folder.path().join("behind-4"), "").unwrap();
    assert!(!Queue::is_served(folder.path().as_os_str().as_bytes(), 4));
}

/// A process that is stopped while it adds something does not stop the others.
#[test]
fn who_cannot_add_for_long_writes_otherwise() {
    let (_folder, state, queue) = queue();
    let _stopped = queue.area.lock.lock(this());
    assert_eq!(queue.add(state.behind(3), this(), &place(0), &[1]), None);
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
