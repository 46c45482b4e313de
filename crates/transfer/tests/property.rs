//! Random buffers, random splitting and joining of their names, random strategies to fetch them: the
//! bytes that arrive must match plain vectors.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{LIMIT, Via, bytes, link, node, options, serve};
use proptest::prelude::*;
use std::sync::LazyLock;
use towline_transfer::{
    Access, Address, Choice, Error, Global, Intent, Node, Options, PeerHandle, Strategy as Way,
    import,
};

/// Two owners that are served until the program ends, and a receiver linked to both.
struct Bench {
    owners: [Node; 2],
    receiver: Node,
    from: [PeerHandle; 2],
}

fn bench(via: Via) -> Bench {
    let owners = [node(via, options(via)), node(via, options(via))];
    let receiver = node(via, Options { pool_buffers: 32, ..options(via) });
    let from = [0, 1].map(|index| {
        // Served until the program ends.
        std::mem::forget(serve(&owners[index]));
        link(via, &receiver, &owners[index])
    });
    // The nodes are never dropped, so nothing else removes their sockets.
    for node in owners.iter().chain([&receiver]) {
        if let [Address::Unix(socket)] = &node.addresses()[..] {
            std::fs::remove_file(socket).unwrap();
        }
    }
    for peer in from {
        receiver.grant_push(peer, 4).unwrap();
    }
    Bench { owners, receiver, from }
}

static TCP: LazyLock<Bench> = LazyLock::new(|| bench(Via::Tcp));
static UNIX: LazyLock<Bench> = LazyLock::new(|| bench(Via::Unix));
static RINGS: LazyLock<Bench> = LazyLock::new(|| bench(Via::Rings));

#[derive(Clone, Debug)]
struct Buffer {
    owner: usize,
    kind: u8,
    length: usize,
    seed: u8,
}

#[derive(Clone, Debug)]
enum Step {
    /// Takes part of a buffer's name and adds it at the end or the front.
    Add { buffer: usize, from: u64, length: u64, front: bool },
    /// Keeps what is before, or after, this place.
    Split { at: u64, head: bool },
    /// Packs and unpacks.
    Pack,
    /// Moves the first bytes to the end.
    Rotate { count: u64 },
}

fn buffer() -> impl Strategy<Value = Buffer> {
    let length = prop_oneof![1usize..300, 1usize..40_000, 200_000usize..600_000];
    (0usize..2, 0u8..3, length, any::<u8>()).prop_map(|(owner, kind, length, seed)| Buffer {
        owner,
        kind,
        length,
        seed,
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (any::<usize>(), any::<u64>(), any::<u64>(), any::<bool>()).prop_map(
            |(buffer, from, length, front)| Step::Add { buffer, from, length, front }
        ),
        1 => (any::<u64>(), any::<bool>()).prop_map(|(at, head)| Step::Split { at, head }),
        1 => Just(Step::Pack),
        1 => any::<u64>().prop_map(|count| Step::Rotate { count }),
    ]
}

fn globalize(owner: &Node, buffer: &Buffer) -> (Global, Vec<u8>) {
    let data = bytes(buffer.length, buffer.seed);
    let local = match buffer.kind {
        0 => import::host(data.clone()),
        1 => {
            let memory = import::shared_memory(data.len(), Access::Read).unwrap();
            memory.copy_in(0, &data);
            import::shared(&memory)
        }
        _ => {
            let mut file = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut file, &data).unwrap();
            import::file(file, 0, data.len() as u64).unwrap()
        }
    };
    (owner.globalize(local, Access::Read).unwrap(), data)
}

/// Returns the name after all steps, and its bytes.
fn build(buffers: &[(Global, Vec<u8>)], steps: &[Step]) -> (Global, Vec<u8>) {
    let (mut name, mut model) = (Global::new(), Vec::new());
    for step in steps {
        match step {
            Step::Add { buffer, from, length, front } => {
                let (global, data) = &buffers[buffer % buffers.len()];
                let from = from % global.len();
                let length = 1 + length % (global.len() - from);
                let mut part = global.clone();
                drop(part.split_to(from));
                let part = part.split_to(length);
                let bytes = &data[from as usize..(from + length) as usize];
                if *front {
                    let parts: Vec<_> = part.parts().cloned().collect();
                    parts.into_iter().rev().for_each(|part| name.prepend(part).unwrap());
                    model.splice(0..0, bytes.iter().copied());
                } else {
                    name.concatenate(part).unwrap();
                    model.extend_from_slice(bytes);
                }
            }
            Step::Split { at, head } => {
                let at = at % (name.len() + 1);
                let first = name.split_to(at);
                let rest = model.split_off(at as usize);
                if *head {
                    name = first;
                } else {
                    model = rest;
                }
            }
            Step::Pack => name = Global::unpack(&name.pack().unwrap()).unwrap(),
            Step::Rotate { count } => {
                let count = count % (name.len() + 1);
                let first = name.split_to(count);
                name.concatenate(first).unwrap();
                model.rotate_left(count as usize);
            }
        }
        assert_eq!(name.len(), model.len() as u64);
    }
    (name, model)
}

fn check(bench: &Bench, buffers: &[Buffer], steps: &[Step], choice: Choice) {
    let named: Vec<_> =
        buffers.iter().map(|buffer| globalize(&bench.owners[buffer.owner], buffer)).collect();
    let (name, model) = build(&named, steps);
    let name = Global::unpack(&name.pack().unwrap()).unwrap();
    if choice == Choice::Forced(Way::Push) {
        pushed(bench, &named, buffers);
    } else {
        match bench.receiver.open(&name, Intent::Read, choice) {
            Ok(context) => {
                assert!(context.to_vec().unwrap() == model, "{choice:?}");
                assert!(context.aggregate().to_vec().unwrap() == model, "{choice:?}");
                context.close().unwrap();
            }
            // The strategy was forced where it is impossible: too long, not memory, not mappable, or
            // more than the pool.
            Err(Error::Strategy(_) | Error::Refused(_)) => {
                assert_ne!(choice, Choice::Automatic);
                assert_ne!(choice, Choice::Forced(Way::Pull));
            }
            Err(Error::TooLarge { needed, .. }) => assert!(needed > 32 * 256 * 1024),
            Err(error) => panic!("{choice:?}: {error}"),
        }
    }
    for ((global, data), buffer) in named.iter().zip(buffers) {
        let found = bench.owners[buffer.owner].reclaim(global, LIMIT).unwrap();
        assert!(found.to_vec().unwrap() == *data);
    }
}

/// Each owner pushes its buffer with the descriptor.
fn pushed(bench: &Bench, named: &[(Global, Vec<u8>)], buffers: &[Buffer]) {
    for ((global, data), buffer) in named.iter().zip(buffers) {
        let owner = &bench.owners[buffer.owner];
        let (to, _) = owner.peers()[0];
        let descriptor = global.pack().unwrap();
        let choice = Choice::Forced(Way::Push);
        loop {
            match owner.send_data(to, &descriptor, global, choice) {
                Ok(pushed) => break assert!(pushed),
                // Used buffers are granted again when the receiver has closed.
                Err(Error::Strategy(_)) => {
                    bench.receiver.serve(std::time::Duration::from_millis(1)).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
        let message = bench.receiver.receive(LIMIT).unwrap();
        assert_eq!(message.peer, bench.from[buffer.owner]);
        let found = Global::unpack(&message.bytes).unwrap();
        let context = bench.receiver.open(&found, Intent::Read, choice).unwrap();
        assert!(context.to_vec().unwrap() == *data);
        context.close().unwrap();
    }
}

fn choice() -> impl Strategy<Value = Choice> {
    prop_oneof![
        3 => Just(Choice::Automatic),
        1 => Just(Choice::Forced(Way::Inline)),
        2 => Just(Choice::Forced(Way::Pull)),
        1 => Just(Choice::Forced(Way::PullDirect)),
        1 => Just(Choice::Forced(Way::Map)),
        1 => Just(Choice::Forced(Way::Push)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn data_arrives_as_the_model_says(
        via in 0..3,
        buffers in proptest::collection::vec(buffer(), 1..5),
        steps in proptest::collection::vec(step(), 0..12),
        choice in choice(),
    ) {
        let bench = match via {
            0 => &*TCP,
            1 => &*UNIX,
            _ => &*RINGS,
        };
        check(bench, &buffers, &steps, choice);
    }
}

proptest! {
    #[test]
    fn what_is_unpacked_packs_to_the_same_bytes(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..400),
        at in any::<usize>(),
        flip in any::<u8>(),
    ) {
        // Noise is nearly always refused; a damaged descriptor is refused, or harmless.
        if let Ok(global) = Global::unpack(&bytes) {
            prop_assert_eq!(global.pack().unwrap(), bytes.clone());
        }
        let node = Node::new(Options::default()).unwrap();
        let global = node.globalize(import::host(vec![0; 100]), Access::Read).unwrap();
        bytes = global.pack().unwrap();
        let at = at % bytes.len();
        bytes[at] ^= flip;
        if let Ok(global) = Global::unpack(&bytes) {
            prop_assert_eq!(global.pack().unwrap(), bytes);
        }
    }
}

#[test]
fn a_relative_path_is_packed_as_an_absolute_one() {
    let node = Node::new(Options::default()).unwrap();
    let name = format!("relative-{}.sock", std::process::id());
    let bound = node.listen(&Address::Unix((&name).into())).unwrap();
    assert_eq!(bound, Address::Unix(std::env::current_dir().unwrap().join(&name)));
    let global = node.globalize(import::host(vec![1; 9]), Access::Read).unwrap();
    assert_eq!(Global::unpack(&global.pack().unwrap()).unwrap(), global);
}
