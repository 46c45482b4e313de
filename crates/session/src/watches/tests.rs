use super::*;
use std::sync::atomic::{AtomicU32, Ordering};
use towline_wire::event::{CREATE, DELETE, Events, MODIFY, MOVED_FROM};

struct Held;

impl Watch for Held {}

fn queue() -> Arc<EventQueue> {
    Arc::new(EventQueue::new(7, 0x8000_0001))
}

fn teller(queue: &Arc<EventQueue>) -> Teller {
    Teller::new(queue.clone(), 9, ALL, &Watches::default())
}

/// Returns the names of the events, and whether some were lost.
fn names(told: &Told) -> (Vec<String>, bool) {
    let name = |event: Event<'_>| String::from_utf8(event.name.to_vec()).unwrap();
    (Events::new(&told.bytes).map(|event| name(event.unwrap())).collect(), told.lost)
}

/// Asks for events; `None` when the request has to wait.
fn ask(queue: &EventQueue, seen: u64) -> Option<(u64, Vec<String>, bool)> {
    let told = queue.tell(queue.ask(), seen)?;
    let (names, lost) = names(&told);
    Some((told.next, names, lost))
}

/// Returns a counter of wake-ups, and a function that makes the wakes.
fn counting() -> (Arc<AtomicU32>, impl Fn() -> Wake) {
    let count = Arc::new(AtomicU32::new(0));
    let counted = count.clone();
    let wake = move || -> Wake {
        let counted = counted.clone();
        Box::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        })
    };
    (count, wake)
}

#[test]
fn what_was_told_is_told_again_until_it_was_seen() {
    let queue = queue();
    let first = queue.first();
    assert_eq!(ask(&queue, 0), Some((first, vec![], false)), "who has no number gets one");
    assert_eq!(ask(&queue, first), None);
    let file = teller(&queue);
    file.saw(CREATE, 0, b"a");
    for seen in [first, 0, first] {
        assert_eq!(ask(&queue, seen), Some((first + 1, vec!["a".into()], false)));
    }
    file.saw(CREATE, 0, b"b");
    assert_eq!(ask(&queue, first), Some((first + 2, vec!["a".into(), "b".into()], false)));
    assert_eq!(ask(&queue, first + 1), Some((first + 2, vec!["b".into()], false)));
    assert_eq!(ask(&queue, first + 2), None);
    assert_eq!(queue.first(), first + 2);
    // Seen events are gone, so a client that has not seen them has lost them.
    assert_eq!(ask(&queue, first), Some((first + 2, vec![], true)));
}

#[test]
fn numbers_of_other_queues_are_known_for_that() {
    let old = queue();
    for other in [EventQueue::new(7, 0x8000_0003), EventQueue::new(8, 0x8000_0001)] {
        let other = Arc::new(other);
        teller(&other).saw(CREATE, 0, b"new");
        let told = Some((other.first() + 1, vec!["new".into()], true));
        assert_eq!(ask(&other, old.first()), told);
        assert_eq!(ask(&other, old.first() + 5), told);
    }
    for absurd in [1, old.first() - 1, old.first() + 1, u64::MAX] {
        assert_eq!(ask(&old, absurd), Some((old.first(), vec![], true)), "{absurd}");
    }
    assert_eq!(ask(&old, old.first()), None);
}

#[test]
fn equal_neighbours_are_one_until_they_are_told() {
    let queue = queue();
    let file = teller(&queue);
    let first = queue.first();
    for (mask, name) in [(MODIFY, "a"), (MODIFY, "a"), (MODIFY, "b"), (MODIFY, "a")] {
        file.saw(mask, 0, name.as_bytes());
    }
    let (next, names, _) = ask(&queue, first).unwrap();
    assert_eq!(names, ["a", "b", "a"]);
    // Not seen yet, but told: this is a new event.
    file.saw(MODIFY, 0, b"a");
    assert_eq!(ask(&queue, next), Some((next + 1, vec!["a".into()], false)));
    file.saw(MOVED_FROM, 1, b"a");
    file.saw(MOVED_FROM, 2, b"a");
    assert_eq!(ask(&queue, next + 1).unwrap().1.len(), 2, "of two moves");
}

#[test]
fn one_request_waits_and_is_woken_once() {
    let queue = queue();
    let file = teller(&queue);
    let first = queue.first();
    let (count, wake) = counting();
    let woken = || count.load(Ordering::Relaxed);
    let turn = queue.ask();
    assert!(queue.tell(turn, first).is_none() && queue.wait(turn, wake()));
    // Asked again over another lane, it waits once.
    assert!(queue.tell(turn, first).is_none() && queue.wait(turn, wake()));
    file.saw(CREATE, 0, b"a");
    file.saw(CREATE, 0, b"b");
    assert_eq!(woken(), 1);
    assert_eq!(names(&queue.tell(turn, first).unwrap()).0, ["a", "b"]);
    // An event between the check and the wait.
    let turn = queue.ask();
    assert!(queue.tell(turn, first + 2).is_none());
    file.saw(CREATE, 0, b"c");
    assert!(!queue.wait(turn, wake()));
    assert_eq!(names(&queue.tell(turn, first + 2).unwrap()).0, ["c"]);
    assert_eq!(woken(), 1);
    // Another request takes its place: it is woken and gets no events, whatever happens.
    let turn = queue.ask();
    assert!(queue.tell(turn, first + 3).is_none() && queue.wait(turn, wake()));
    let second = queue.ask();
    assert_eq!(woken(), 2);
    file.saw(CREATE, 0, b"d");
    let told = queue.tell(turn, first + 3).unwrap();
    assert_eq!((told.next, told.bytes.len(), told.lost), (first + 3, 0, false));
    assert!(!queue.wait(turn, wake()), "its turn is over");
    assert_eq!(names(&queue.tell(second, first + 3).unwrap()).0, ["d"]);
    assert_eq!(woken(), 2);
}

#[test]
fn a_full_queue_says_what_it_lost_and_where() {
    let queue = queue();
    let file = teller(&queue);
    let name = |number: usize| format!("{number:0>200}");
    for number in 0..EVENTS_MAX + 10 {
        file.saw(CREATE, 0, name(number).as_bytes());
    }
    let is_bounded = |queue: &EventQueue| {
        let queue = queue.0.lock();
        let bytes: usize = queue.kept.iter().flatten().map(|event| event.len()).sum();
        assert_eq!(bytes, queue.bytes);
        assert!(queue.kept.len() <= EVENTS_MAX + 1 && bytes <= KEPT_BYTES_MAX);
    };
    is_bounded(&queue);
    let (mut seen, mut told, mut lost) = (0, 0, false);
    while let Some((next, names, loses)) = ask(&queue, seen) {
        assert!(!lost, "what is lost is behind all the rest");
        for found in names {
            assert_eq!(found, name(told));
            told += 1;
        }
        (seen, lost) = (next, loses);
    }
    assert!(lost && told > KEPT_BYTES_MAX / 250 && told < EVENTS_MAX, "{told}");
    file.saw(CREATE, 0, b"later");
    assert_eq!(ask(&queue, seen), Some((seen + 1, vec!["later".into()], false)));
}

#[test]
fn who_never_says_what_was_seen_takes_no_memory() {
    let queue = queue();
    let file = teller(&queue);
    let first = queue.first();
    let mut last = first;
    for _ in 0..100 {
        file.lost();
        let (next, names, lost) = ask(&queue, 0).unwrap();
        assert!(lost && names.is_empty() && next > last, "told of each loss anew");
        assert_eq!(queue.0.lock().kept.len(), 1);
        last = next;
    }
    // A client that has not heard of one loss is told by the next.
    assert!(ask(&queue, first).unwrap().2);
    assert_eq!(ask(&queue, last), None);
    for _ in 0..2 * EVENTS_MAX {
        file.saw(CREATE, 0, b"");
        file.lost();
    }
    let queue = queue.0.lock();
    assert!(queue.kept.len() <= EVENTS_MAX + 1 && queue.kept.back() == Some(&None));
}

#[test]
fn an_answer_is_bounded_and_the_next_one_goes_on() {
    let queue = queue();
    let file = teller(&queue);
    let count = 5 * EVENTS_BYTES_MAX / 120;
    for number in 0..count {
        file.saw(CREATE, 0, format!("{number:0>100}").as_bytes());
    }
    let (mut seen, mut numbers, mut answers) = (0, Vec::new(), 0);
    while let Some(told) = queue.tell(queue.ask(), seen) {
        assert!(told.bytes.len() <= EVENTS_BYTES_MAX);
        numbers.extend(names(&told).0.iter().map(|name| name.parse::<usize>().unwrap()));
        seen = told.next;
        answers += 1;
    }
    assert!(numbers.into_iter().eq(0..count) && answers == 5, "{answers} answers");
}

#[test]
fn watches_of_one_file_tell_each_thing_once() {
    let queue = queue();
    let mut watches = Watches::default();
    let mut tellers = Vec::new();
    for (mask, missing) in [(CREATE, CREATE), (CREATE, 0), (CREATE | DELETE, DELETE), (ALL, 0xcff)]
    {
        assert_eq!(watches.missing(mask) & !DELETE_SELF, missing & !DELETE_SELF);
        let missing = watches.missing(mask);
        if missing != 0 {
            let teller = Teller::new(queue.clone(), 9, missing, &watches);
            watches.keep(teller.tells, Box::new(Held));
            tellers.push(teller);
        }
    }
    assert_eq!((tellers.len(), watches.0.len()), (3, 3));
    assert_eq!(watches.missing(ALL), 0);
    // The store reports the end to all of them, and may report more than was requested.
    for what in [CREATE | ISDIR, DELETE, DELETE_SELF, IGNORED, 0x2000, MODIFY] {
        tellers.iter().for_each(|teller| teller.saw(what, 0, b""));
    }
    let told = queue.tell(queue.ask(), 0).unwrap();
    let masks: Vec<u32> = Events::new(&told.bytes).map(|event| event.unwrap().mask).collect();
    assert_eq!(masks, [CREATE | ISDIR, DELETE, DELETE_SELF, IGNORED, MODIFY]);
    // Two watches requested at the same time do not accumulate.
    watches.keep(CREATE, Box::new(Held));
    assert_eq!(watches.0.len(), 3);
}
