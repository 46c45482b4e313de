//! Three nodes: descriptors pass through the middle one, data does not.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{LIMIT, Via, bytes, link, node, options, serve};
use towline_transfer::{
    Access, Choice, Error, Global, Intent, Node, Options, Reach, Strategy, import,
};

/// Creates owner A, router B and receiver C. A and B are linked, and B and C. A and C are linked too if
/// descriptors carry no address (in one process).
fn three(via: Via) -> (Node, Node, Node) {
    let (a, b, c) = (node(via, options(via)), node(via, options(via)), node(via, options(via)));
    let served = (serve(&b), serve(&c));
    link(via, &a, &b);
    link(via, &b, &c);
    if via == Via::Local {
        link(via, &a, &c);
    }
    drop(served);
    (a, b, c)
}

fn peer_to(from: &Node, to: &Node) -> towline_transfer::PeerHandle {
    let number = to.number();
    from.peers().iter().find(|(_, other)| *other == number).unwrap().0
}

#[test]
fn a_router_forwards_descriptors_and_moves_no_data() {
    for via in [Via::Tcp, Via::Unix, Via::Rings, Via::Local] {
        for choice in [Choice::Automatic, Choice::Forced(Strategy::Pull)] {
            let (a, b, c) = three(via);
            let data = bytes(1_000_000, 1);
            let own = bytes(50_000, 2);
            let global = a.globalize(import::host(data.clone()), Access::Read).unwrap();
            a.send(peer_to(&a, &b), &global.pack().unwrap()).unwrap();

            // B takes 300,000 bytes from the middle of A's data and puts its own around them.
            let message = b.receive(LIMIT).unwrap();
            let mut rest = Global::unpack(&message.bytes).unwrap();
            assert_eq!(rest, global);
            drop(rest.split_to(100_000));
            let middle = rest.split_to(300_000);
            let mut front = b.globalize(import::host(own.clone()), Access::Read).unwrap();
            let mut routed = front.split_to(20_000);
            routed.concatenate(middle.clone()).unwrap();
            routed.concatenate(front).unwrap();
            b.send(peer_to(&b, &c), &routed.pack().unwrap()).unwrap();
            b.send(peer_to(&b, &c), &middle.pack().unwrap()).unwrap();

            let (served_a, served_b) = (serve(&a), serve(&b));
            let routed = Global::unpack(&c.receive(LIMIT).unwrap().bytes).unwrap();
            let before = b.counts();
            let middle = Global::unpack(&c.receive(LIMIT).unwrap().bytes).unwrap();
            let context = c.open(&middle, Intent::Read, choice).unwrap();
            assert!(context.to_vec().unwrap() == data[100_000..400_000], "{via:?}");
            context.close().unwrap();
            assert_eq!(b.counts(), before);
            assert_eq!(b.counts().bytes_moved(), 0, "{via:?}: data went from A to C");
            let received = b.net_counters();
            let received = received.bytes_received.load(std::sync::atomic::Ordering::Relaxed);
            assert!(received < 2000, "B received only control messages, not {received} bytes");

            let context = c.open(&routed, Intent::Read, choice).unwrap();
            let expected = [&own[..20_000], &data[100_000..400_000], &own[20_000..]].concat();
            assert!(context.to_vec().unwrap() == expected, "{via:?}");
            context.close().unwrap();
            assert_eq!(b.counts().bytes_moved(), 50_000, "{via:?}: only what B itself has");
            assert_eq!(a.counts().bytes_moved(), 600_000, "{via:?}");
            // The owners were told: A's buffers were used twice, and can be taken back.
            assert_eq!(a.acknowledged(&global, 2, LIMIT).unwrap().closed, 2);
            assert!(a.reclaim(&global, LIMIT).unwrap().to_vec().unwrap() == data);
            let stale = c.open(&middle, Intent::Read, choice);
            assert!(matches!(stale, Err(Error::Refused(_))), "{via:?}: {stale:?}");
            drop((served_a, served_b));
        }
    }
}

#[test]
fn writing_through_a_router_reaches_the_owner() {
    let (a, b, c) = three(Via::Tcp);
    let global = a.globalize(import::host(vec![0; 600_000]), Access::ReadWrite).unwrap();
    a.send(peer_to(&a, &b), &global.pack().unwrap()).unwrap();
    let message = b.receive(LIMIT).unwrap();
    b.send(peer_to(&b, &c), &message.bytes).unwrap();
    let _served = serve(&a);
    let found = Global::unpack(&c.receive(LIMIT).unwrap().bytes).unwrap();
    let mut context = c.open(&found, Intent::Write, Choice::Automatic).unwrap();
    let data = bytes(600_000, 3);
    context.write_at(0, &data).unwrap();
    context.close().unwrap();
    assert!(a.reclaim(&global, LIMIT).unwrap().to_vec().unwrap() == data);
    assert_eq!(b.counts().bytes_moved(), 0);
}

#[test]
fn descriptors_do_not_make_a_node_connect_where_it_must_not() {
    let owner = node(Via::Tcp, Options::default());
    let _served = serve(&owner);
    let global = owner.globalize(import::host(vec![1; 10]), Access::Read).unwrap();
    let careful = Node::new(Options { reach: Reach::Linked, ..Options::default() }).unwrap();
    let refused = careful.open(&global, Intent::Read, Choice::Automatic);
    assert!(matches!(refused, Err(Error::Unreachable { last: None, .. })), "{refused:?}");
    // Another node that answers at the address is not mistaken for the owner.
    let other = Node::new(Options::default()).unwrap();
    other.listen(&owner.addresses()[0]).unwrap_err();
    let careful = Node::new(Options::default()).unwrap();
    let mut forged = Global::new();
    for part in global.parts() {
        let mut part = part.clone();
        let mut home = (*part.home).clone();
        home.node ^= 1;
        part.home = home.into();
        forged.append(part).unwrap();
    }
    let refused = careful.open(&forged, Intent::Read, Choice::Automatic);
    assert!(matches!(refused, Err(Error::Unreachable { last: Some(_), .. })), "{refused:?}");
    assert!(careful.peers().is_empty());
}
