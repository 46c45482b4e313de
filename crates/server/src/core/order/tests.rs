//! Tests of the order of connections.

use super::*;

/// Serves connections that send again as soon as they are answered, `width` of them between two checks.
fn serve(order: &mut Order, places: &mut [Place], width: usize, requests: usize) -> Vec<u64> {
    let mut served = Vec::new();
    while served.len() < requests {
        let mut asked = Vec::new();
        for _ in 0..width {
            let next = order.pop(|token| places.get_mut(token as usize)).unwrap();
            places[next as usize].begin();
            asked.push(next);
        }
        for token in &asked {
            order.push(*token, &mut places[*token as usize], false);
        }
        served.append(&mut asked);
    }
    served
}

fn connections(count: usize) -> (Order, Vec<Place>) {
    let mut order = Order::default();
    let mut places = (0..count).map(|_| Place::default()).collect::<Vec<_>>();
    for (token, place) in places.iter_mut().enumerate() {
        order.push(token as u64, place, false);
    }
    (order, places)
}

#[test]
fn each_makes_a_row_of_requests_in_its_turn_and_all_have_turns() {
    let (mut order, mut places) = connections(3);
    let row = ROW as usize;
    let served = serve(&mut order, &mut places, 1, 4 * row);
    let rows = [0, 1, 2, 0].map(|token| vec![token; row]).concat();
    assert_eq!(served, rows);
    let (mut order, mut places) = connections(7);
    let served = serve(&mut order, &mut places, 2, 7 * row * 10);
    for token in 0..7 {
        let count = served.iter().filter(|served| **served == token).count();
        assert!((9 * row..=11 * row).contains(&count), "{token}: {count} of {}", 10 * row);
    }
}

#[test]
fn who_was_found_elsewhere_is_looked_at_again_with_its_next_request() {
    let (mut order, mut places) = connections(3);
    let mut next = |again| {
        let token = order.pop(|token| places.get_mut(token as usize)).unwrap();
        let place = &mut places[token as usize];
        place.looks_again = again;
        order.push(token, place, false);
        (token, order.looks)
    };
    assert_eq!(next(true), (0, true), "its turn begins");
    assert_eq!([next(false), next(false)], [(0, true), (0, false)]);
}

#[test]
fn those_who_always_ask_are_counted() {
    let (mut order, mut places) = connections(7);
    serve(&mut order, &mut places, 2, 7 * ROW as usize * 3);
    assert_eq!(order.round.active(), 7);
    order.round.left(false);
    assert_eq!(order.round.active(), 6);
    order.round.joined();
    order.round.joined();
    assert_eq!(order.round.active(), 8);
    // Nobody else asks any more.
    let mut order = Order { turns: order.turns, round: order.round, ..Order::default() };
    for (token, place) in places.iter_mut().enumerate().take(3) {
        *place = Place { round: place.round, turn: place.turn, ..Place::default() };
        order.push(token as u64, place, false);
    }
    serve(&mut order, &mut places, 1, 3 * ROW as usize * 3);
    assert_eq!(order.round.active(), 3);
    order.round.nobody_asks();
    assert_eq!(order.round.active(), 0);
}

#[test]
fn who_has_moved_enough_starts_no_more() {
    let (mut order, mut places) = connections(2);
    let mut served = Vec::new();
    for _ in 0..6 {
        let next = order.pop(|token| places.get_mut(token as usize)).unwrap();
        let place = &mut places[next as usize];
        place.begin();
        place.spend(ROW_BYTES / 2);
        order.push(next, place, false);
        served.push(next);
    }
    assert_eq!(served, [0, 0, 1, 1, 0, 0]);
}

#[test]
fn who_asks_rarely_hardly_waits_and_keeps_nobody_from_being_served() {
    let (mut order, mut places) = connections(51);
    serve(&mut order, &mut places, 1, 50 * ROW as usize);
    // The last one has had no turn, as it asks only now; then it asks no more for a while.
    let mut pop = |order: &mut Order| order.pop(|token| places.get_mut(token as usize));
    assert_eq!(pop(&mut order), Some(50));
    let served = serve(&mut order, &mut places, 1, 60 * ROW as usize);
    assert!(!served.contains(&50));
    order.push(50, &mut places[50], false);
    let served = serve(&mut order, &mut places, 1, 3 * ROW as usize);
    let before = served.iter().position(|token| *token == 50).unwrap();
    assert!(before <= 1, "{before} requests of others came first");
    // Rare ones and the others have turns alternately.
    let mut order = Order { turns: 100, ..Order::default() };
    let mut places = [100, 100, 10, 10].map(|turn| Place { turn, ..Place::default() });
    for (token, place) in places.iter_mut().enumerate() {
        order.push(token as u64, place, false);
    }
    let mut pop = || order.pop(|token| places.get_mut(token as usize));
    assert_eq!([pop(), pop(), pop(), pop()], [Some(2), Some(0), Some(3), Some(1)]);
}

#[test]
fn who_is_within_a_message_goes_on_and_nobody_is_queued_twice() {
    let (mut order, mut places) = connections(3);
    for token in 0..3 {
        order.push(token, &mut places[token as usize], true);
    }
    let mut pop = |order: &mut Order| order.pop(|token| places.get_mut(token as usize));
    assert_eq!(pop(&mut order), Some(0));
    order.push(0, &mut places[0], true);
    let mut pop = |order: &mut Order| order.pop(|token| places.get_mut(token as usize));
    let rest = std::iter::from_fn(|| pop(&mut order)).collect::<Vec<_>>();
    assert_eq!(rest, [0, 1, 2]);
    assert!(order.is_empty());
}

/// As one that writes all the time with several requests in flight.
#[test]
fn who_is_always_within_a_message_lets_others_have_their_turns() {
    let (mut order, mut places) = connections(4);
    let mut served = [0; 4];
    for _ in 0..4000 {
        let next = order.pop(|token| places.get_mut(token as usize)).unwrap();
        served[next as usize] += 1;
        let place = &mut places[next as usize];
        place.begin();
        order.push(next, place, next < 3);
    }
    assert!(served[3] > 4000 / (3 * READS as usize + 4), "{served:?}");
}

/// Their requests come one at a time, though all of them ask as often as they can.
#[test]
fn who_queues_for_the_processor_does_not_ask_rarely() {
    let (mut order, mut places) = connections(20);
    (0..20).for_each(|_| assert!(order.pop(|token| places.get_mut(token as usize)).is_some()));
    for _ in 0..3 * ROW {
        for token in 0..20 {
            let place = &mut places[token as usize];
            place.begin();
            order.push(token, place, false);
            assert!(order.rare.is_empty());
            assert_eq!(order.pop(|_| Some(place)), Some(token));
        }
    }
    assert_eq!(order.round.active(), 20);
}

#[test]
fn those_who_are_not_awaited_go_on_between_two_turns() {
    let (mut order, mut places) = connections(20);
    places.iter_mut().for_each(|place| place.client = Whereabouts::Here);
    let mut serve = |order: &mut Order, asking: &[u64], count: usize| {
        for token in asking {
            order.push(*token, &mut places[*token as usize], false);
        }
        let served = (0..count).map(|_| order.pop(|token| places.get_mut(token as usize)).unwrap());
        served.collect::<Vec<_>>()
    };
    assert_eq!(serve(&mut order, &[], 17), Vec::from_iter(0..17));
    assert!(order.is_crowded());
    // 15 and 16 are awaited.
    assert_eq!(serve(&mut order, &[0, 1, 16], 3), [16, 0, 1]);
    assert_eq!(serve(&mut order, &[2, 16], 3), [16, 17, 2]);
    // Those that ask again at once do not keep the next turn from beginning.
    assert_eq!(serve(&mut order, &[0, 1, 2], 2), [18, 0]);
    assert_eq!(serve(&mut order, &[0], 4), [1, 2, 19, 0]);
    // Who asked rarely when its turn began does not wait in it either.
    places[3].was_rare = true;
    order.push(3, &mut places[3], false);
    assert_eq!(order.first, [3]);
    order.first.clear();
    // Clients on other machines, for example, are no better off if they wait.
    places.iter_mut().for_each(|place| place.client = Whereabouts::Unknown);
    let mut ask = |token: u64| order.push(token, &mut places[token as usize], false);
    [0, 19].into_iter().for_each(&mut ask);
    assert_eq!((order.first.len(), order.late.len()), (2, 0));
}

#[test]
fn who_was_awaited_in_vain_keeps_its_turn_only_if_others_are_served_before_it() {
    for (client, left) in [(Whereabouts::Here, 3), (Whereabouts::Unknown, 0)] {
        let mut place = Place { client, left: 3, ..Place::default() };
        place.was_late();
        assert_eq!(place.left, left);
    }
}

#[test]
fn a_connection_that_has_got_the_token_of_another_is_not_taken_for_it() {
    let (mut order, mut places) = connections(2);
    places[0] = Place::default();
    let mut pop = || order.pop(|token| places.get_mut(token as usize));
    assert_eq!([pop(), pop(), pop()], [None, Some(1), None]);
}

#[test]
fn more_small_requests_than_long_ones_are_served_between_two_looks() {
    let mut order = Order { served: 10, ..Order::default() };
    assert_eq!(order.width(10 * 64 * 1024), WIDTH_MIN);
    order.served = 10;
    assert_eq!(order.width(10 * 64 * 1024 + 10 * 4096), 32);
    order.served = 10;
    assert_eq!(order.width(10 * 64 * 1024 + 10 * 4096 + 100), WIDTH_MAX);
}

#[test]
fn turns_are_long_while_most_of_many_are_on_the_processor_of_the_core() {
    let count = CROWD as usize + 2;
    let (mut order, mut places) = connections(count);
    let row = ROW as usize;
    let long = row * LONG_TURN as usize;
    for (client, is_local, length) in [
        (Whereabouts::Here, true, long),
        (Whereabouts::Elsewhere, true, row),
        (Whereabouts::Here, true, long),
        (Whereabouts::Unknown, false, row),
    ] {
        for place in &mut places {
            (place.client, place.is_local) = (client, is_local);
        }
        // The rounds in which that is noticed.
        serve(&mut order, &mut places, 1, 3 * count * long);
        let served = serve(&mut order, &mut places, 1, count * long);
        let rows: Vec<_> = served.chunk_by(|one, next| one == next).map(<[u64]>::len).collect();
        // The first and the last may be cut.
        let whole = &rows[1..rows.len() - 1];
        assert!(whole.iter().all(|row| *row == length), "{client:?}: {rows:?}");
        assert_eq!(order.has_local_crowd(), is_local, "{client:?}");
    }
    assert!(!order.has_emptied());
    order.round.nobody_asks();
    assert!(order.has_emptied() && !order.has_local_crowd());
}
