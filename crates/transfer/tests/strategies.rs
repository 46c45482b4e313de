//! Each strategy over each link: the bytes are right, and the counters show that the strategy was used.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod common;

use common::{ALL, LIMIT, Via, bytes, link, node, options, serve};
use towline_transfer::{
    Access, Choice, Errno, Error, Global, Intent, Node, Options, Strategy, Way, choose, import,
};

/// Returns how often each byte was copied, counted at both ends.
fn copies(owner: &Node, receiver: &Node, way: Way, length: u64) -> f64 {
    let copied = owner.counts().of(way).bytes_copied + receiver.counts().of(way).bytes_copied;
    copied as f64 / length as f64
}

fn pair(via: Via) -> (Node, Node, common::Served) {
    let (owner, receiver) = (node(via, options(via)), node(via, options(via)));
    let served = serve(&owner);
    link(via, &receiver, &owner);
    (owner, receiver, served)
}

fn opened(receiver: &Node, global: &Global, strategy: Strategy) -> Result<Vec<u8>, Error> {
    let context = receiver.open(global, Intent::Read, Choice::Forced(strategy))?;
    let bytes = context.to_vec()?;
    context.close()?;
    Ok(bytes)
}

#[test]
fn inline_and_pull_over_every_link() {
    for via in ALL {
        let (owner, receiver, _served) = pair(via);
        for (length, strategy, way) in [
            (1, Strategy::Inline, Way::Inline),
            (16 * 1024, Strategy::Inline, Way::Inline),
            (1, Strategy::Pull, Way::Pull),
            (256 * 1024 + 1, Strategy::Pull, Way::Pull),
            (3 * 1024 * 1024, Strategy::Pull, Way::Pull),
        ] {
            let data = bytes(length, 1);
            let before = (owner.counts().of(way), receiver.counts().of(way));
            let global = owner.globalize(import::host(data.clone()), Access::Read).unwrap();
            assert!(opened(&receiver, &global, strategy).unwrap() == data, "{via:?} {length}");
            let after = (owner.counts().of(way), receiver.counts().of(way));
            assert_eq!(after.0.bytes_out - before.0.bytes_out, length as u64, "{via:?}");
            assert_eq!(after.1.bytes_in - before.1.bytes_in, length as u64, "{via:?}");
            assert_eq!(after.1.operations - before.1.operations, 1);
            let ended = owner.acknowledged(&global, 1, LIMIT).unwrap();
            assert_eq!((ended.closed, ended.lost), (1, 0));
            assert_eq!(owner.reclaim(&global, LIMIT).unwrap().to_vec().unwrap(), data);
        }
        let global = owner.globalize(import::host(bytes(16385, 0)), Access::Read).unwrap();
        let refused = opened(&receiver, &global, Strategy::Inline);
        assert!(matches!(refused, Err(Error::Strategy(_))), "{refused:?}");
        assert_eq!(receiver.pool_in_use().0, 0, "{via:?}: buffers are back");
    }
}

#[test]
fn a_pull_from_host_memory_copies_twice_and_from_files_over_sockets_once() {
    for (via, of_file) in [(Via::Tcp, 1.0), (Via::Unix, 1.0), (Via::Rings, 2.0)] {
        let data = bytes(1024 * 1024, 2);
        let (owner, receiver, _served) = pair(via);
        let global = owner.globalize(import::host(data.clone()), Access::Read).unwrap();
        assert!(opened(&receiver, &global, Strategy::Pull).unwrap() == data);
        assert_eq!(copies(&owner, &receiver, Way::Pull, 1 << 20), 2.0, "{via:?}");

        let (owner, receiver, _served) = pair(via);
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &data).unwrap();
        let local = import::file(file, 0, 1 << 20).unwrap();
        let global = owner.globalize(local, Access::Read).unwrap();
        assert!(opened(&receiver, &global, Strategy::Pull).unwrap() == data);
        assert_eq!(copies(&owner, &receiver, Way::Pull, 1 << 20), of_file, "{via:?}");
    }
}

#[test]
fn mapped_memory_is_not_copied_and_shows_what_the_owner_writes() {
    for via in [Via::Local, Via::Unix, Via::Rings] {
        let (owner, receiver, _served) = pair(via);
        let memory = import::shared_memory(1 << 20, Access::Read).unwrap();
        let data = bytes(1 << 20, 3);
        memory.copy_in(0, &data);
        let global = owner.globalize(import::shared(&memory), Access::Read).unwrap();
        let choice = Choice::Forced(Strategy::Map);
        let context = receiver.open(&global, Intent::Read, choice).unwrap();
        assert!(context.to_vec().unwrap() == data);
        memory.copy_in(5, b"new");
        let mut seen = [0; 3];
        context.read_at(5, &mut seen).unwrap();
        assert_eq!(&seen, b"new", "{via:?}: it is the same memory");
        context.close().unwrap();
        assert_eq!(copies(&owner, &receiver, Way::Map, 1 << 20), 0.0);
        assert_eq!(receiver.counts().of(Way::Map).bytes_in, 1 << 20);
        assert_eq!(receiver.counts().of(Way::Pull).bytes_in, 0);
        assert_eq!(receiver.pool_in_use().1, 0, "{via:?}: no buffer was ever used");
        owner.reclaim(&global, LIMIT).unwrap();
    }
}

/// The owner refuses the operations whose memory does not fit into the socket, and the link goes on.
#[test]
fn more_memory_is_asked_for_than_the_socket_takes_at_once() {
    let (owner, receiver, served) = pair(Via::Unix);
    drop(served);
    let mut local = towline_mem::Aggregate::new();
    for _ in 0..16 {
        let memory = import::shared_memory(4096, Access::Read).unwrap();
        local.concatenate(import::shared(&memory));
    }
    let global = owner.globalize(local, Access::Read).unwrap();
    let choice = Choice::Forced(Strategy::Map);
    let start = || receiver.start_open(&global, Intent::Read, choice, None).unwrap();
    let started: Vec<_> = (0..40).map(|_| start()).collect();
    owner.serve(std::time::Duration::from_millis(200)).unwrap();
    let results: Vec<_> = started.into_iter().map(|one| receiver.wait(one, LIMIT)).collect();
    let again = |error: &Error| matches!(error, Error::Refused(towline_transfer::Errno::EAGAIN));
    assert!(results.iter().any(Result::is_ok), "{results:?}");
    assert!(results.iter().flatten().count() < 40, "the socket took everything");
    assert!(results.iter().all(|one| one.as_ref().err().is_none_or(again)), "{results:?}");
    drop(results);
    let _served = serve(&owner);
    assert_eq!(opened(&receiver, &global, Strategy::Map).unwrap(), vec![0; 16 * 4096]);
}

#[test]
fn more_memories_than_can_be_passed_are_brought_all_the_same() {
    let (owner, receiver, _served) = pair(Via::Unix);
    let (mut local, mut data) = (towline_mem::Aggregate::new(), Vec::new());
    for seed in 0..17 {
        let memory = import::shared_memory(8192, Access::ReadWrite).unwrap();
        memory.copy_in(0, &bytes(8192, seed));
        data.extend(bytes(8192, seed));
        local.concatenate(import::shared(&memory));
    }
    let global = owner.globalize(local, Access::ReadWrite).unwrap();
    let refused = opened(&receiver, &global, Strategy::Map);
    assert!(matches!(refused, Err(Error::Refused(Errno::EOPNOTSUPP))), "{refused:?}");
    // Buffers of the receiver itself are in the same context.
    let own = receiver.globalize(import::host(vec![9; 100]), Access::ReadWrite).unwrap();
    let mut both = own.clone();
    both.concatenate(global.clone()).unwrap();
    for intent in [Intent::Read, Intent::Write, Intent::ReadWrite] {
        let mut context = receiver.open(&both, intent, Choice::Automatic).unwrap();
        if intent != Intent::Write {
            assert!(context.to_vec().unwrap() == [&vec![9; 100][..], &data].concat());
        }
        if intent != Intent::Read {
            context.write_at(20_000, &[7; 30_000]).unwrap();
            data[20_000 - 100..][..30_000].fill(7);
        }
        assert_eq!(context.ways().map(|(way, _)| way).collect::<Vec<_>>(), [Way::Own, Way::Pull]);
        context.close().unwrap();
    }
    assert_eq!(receiver.pool_in_use().0, 0);
    receiver.reclaim(&own, LIMIT).unwrap();
    assert!(owner.reclaim(&global, LIMIT).unwrap().to_vec().unwrap() == data);
    // What needs more buffers than there are is refused, not waited for.
    let small = node(Via::Unix, Options { pool_buffers: 1, ..options(Via::Unix) });
    link(Via::Unix, &small, &owner);
    let mut local = towline_mem::Aggregate::new();
    for _ in 0..17 {
        let memory = import::shared_memory(1 << 16, Access::Read).unwrap();
        local.concatenate(import::shared(&memory));
    }
    let global = owner.globalize(local, Access::Read).unwrap();
    let refused = small.open(&global, Intent::Read, Choice::Automatic);
    assert!(matches!(refused, Err(Error::TooLarge { .. })), "{refused:?}");
    owner.reclaim(&global, LIMIT).unwrap();
}

#[test]
fn memory_given_for_reading_cannot_be_written_by_who_gets_it() {
    let memory = import::shared_memory(4096, Access::Read).unwrap();
    let fd = memory.fd().try_clone_to_owned().unwrap();
    let error = towline_mem::SharedMemory::open(fd, 4096, true).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(1), "mapping it for writing: {error}");
    let fd = memory.fd().try_clone_to_owned().unwrap();
    assert!(rustix::io::pwrite(&fd, b"x", 0).is_err());
    towline_mem::SharedMemory::open(fd, 4096, false).unwrap();
}

#[test]
fn only_whole_memory_is_given_away() {
    let (owner, receiver, _served) = pair(Via::Unix);
    let memory = import::shared_memory(1 << 20, Access::Read).unwrap();
    let data = bytes(1 << 20, 4);
    memory.copy_in(0, &data);
    // Only half of it is globalized, and mapping would show the other half too.
    let half = import::shared(&memory).split_to(1 << 19);
    let global = owner.globalize(half, Access::Read).unwrap();
    let refused = opened(&receiver, &global, Strategy::Map);
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    let context = receiver.open(&global, Intent::Read, Choice::Automatic).unwrap();
    assert!(context.ways().all(|(way, _)| way != Way::Map));
    assert!(context.to_vec().unwrap() == data[..1 << 19]);
    // All of it is globalized and a part of the name is opened, which is allowed.
    let mut global = owner.globalize(import::shared(&memory), Access::Read).unwrap();
    let head = global.split_to(1000);
    assert!(opened(&receiver, &head, Strategy::Map).unwrap() == data[..1000]);
}

#[test]
fn direct_reads_copy_once() {
    let (owner, receiver, _served) = pair(Via::Unix);
    let data = bytes(1_000_000, 5);
    let global = owner.globalize(import::host(data.clone()), Access::Read).unwrap();
    match opened(&receiver, &global, Strategy::PullDirect) {
        Ok(found) => assert!(found == data),
        Err(Error::Strategy(what)) => {
            println!("SKIPPED: this machine forbids process_vm_readv ({what})");
            return;
        }
        Err(error) => panic!("{error}"),
    }
    assert_eq!(copies(&owner, &receiver, Way::PullDirect, 1_000_000), 1.0);
    // Over TCP, or when the owner does not allow it, it is refused before a request is sent.
    let (owner, receiver, _served) = pair(Via::Tcp);
    let global = owner.globalize(import::host(data), Access::Read).unwrap();
    let refused = opened(&receiver, &global, Strategy::PullDirect);
    assert!(matches!(refused, Err(Error::Strategy(_))), "{refused:?}");
}

/// More pieces than one direct read takes.
#[test]
fn memory_in_many_pieces_is_brought_all_the_same() {
    let (owner, receiver, _served) = pair(Via::Unix);
    let data = bytes(300_000, 5);
    let mut local = towline_mem::Aggregate::new();
    data.chunks(1000).for_each(|piece| local.concatenate(import::host(piece.to_vec())));
    let global = owner.globalize(local, Access::Read).unwrap();
    let context = receiver.open(&global, Intent::Read, Choice::Automatic).unwrap();
    assert_eq!(context.ways().collect::<Vec<_>>(), [(Way::Pull, 300_000)]);
    assert!(context.to_vec().unwrap() == data);
    context.close().unwrap();
    let refused = opened(&receiver, &global, Strategy::PullDirect);
    assert!(matches!(refused, Err(Error::Refused(_) | Error::Strategy(_))), "{refused:?}");
    owner.reclaim(&global, LIMIT).unwrap();
}

#[test]
fn pushed_data_is_there_when_the_message_is() {
    for via in ALL {
        let (receiver, owner) = (node(via, options(via)), node(via, options(via)));
        let served = serve(&receiver);
        let to = link(via, &owner, &receiver);
        drop(served);
        let data = bytes(600_000, 6);
        let global = owner.globalize(import::host(data.clone()), Access::Read).unwrap();
        let forced = Choice::Forced(Strategy::Push);
        let refused = owner.send_data(to, b"early", &global, forced);
        assert!(matches!(refused, Err(Error::Strategy(_))), "nothing was granted: {refused:?}");

        let from = receiver.peers()[0].0;
        receiver.grant_push(from, 3).unwrap();
        let _served = serve(&owner);
        // The grant has to arrive first.
        let pushed = loop {
            match owner.send_data(to, &global.pack().unwrap(), &global, forced) {
                Err(Error::Strategy(_)) => std::thread::yield_now(),
                other => break other.unwrap(),
            }
        };
        assert!(pushed);
        let message = receiver.receive(LIMIT).unwrap();
        assert!(message.is_pushed());
        let mut found = Global::unpack(&message.bytes).unwrap();
        let before = receiver.net_counters().values();
        let context = receiver.open(&found.split_to(300_000), Intent::Read, forced).unwrap();
        assert_eq!(receiver.net_counters().values(), before, "{via:?}: nothing was asked for");
        assert!(context.to_vec().unwrap() == data[..300_000]);
        let rest = receiver.open(&found, Intent::Read, Choice::Automatic).unwrap();
        assert!(rest.to_vec().unwrap() == data[300_000..]);
        assert_eq!(rest.ways().next().unwrap().0, Way::Push);
        rest.close().unwrap();
        drop(message);
        assert_eq!(copies(&owner, &receiver, Way::Push, 600_000), 2.0);
        // The last holder acknowledges.
        context.close().unwrap();
        owner.acknowledged(&global, 1, LIMIT).unwrap();
        owner.reclaim(&global, LIMIT).unwrap();
        receiver.serve(std::time::Duration::from_millis(1)).unwrap();
        assert_eq!(receiver.pool_in_use().0, 3, "{via:?}: what is used up is granted again");
    }
}

#[test]
fn what_is_written_reaches_the_owner() {
    for via in ALL {
        for choice in [
            Choice::Automatic,
            Choice::Forced(Strategy::Inline),
            Choice::Forced(Strategy::Pull),
            Choice::Forced(Strategy::Push),
        ] {
            for (length, intent) in [
                (9_000, Intent::ReadWrite),
                (9_000, Intent::Write),
                (700_000, Intent::ReadWrite),
                (700_000, Intent::Write),
            ] {
                if choice == Choice::Forced(Strategy::Inline) && length > 16384 {
                    continue;
                }
                let (owner, receiver, _served) = pair(via);
                if choice == Choice::Forced(Strategy::Push) {
                    let from = owner.peers()[0].0;
                    owner.grant_push(from, 8).unwrap();
                    // The message after the grant shows that the grant has arrived.
                    owner.send(from, b"granted").unwrap();
                    receiver.receive(LIMIT).unwrap();
                }
                let mut file = tempfile::tempfile().unwrap();
                let mut data = bytes(length, 7);
                std::io::Write::write_all(&mut file, &data[length / 2..]).unwrap();
                let mut local = import::host(data[..length / 2].to_vec());
                local.concatenate(import::file(file, 0, (length / 2) as u64).unwrap());
                let global = owner.globalize(local, Access::ReadWrite).unwrap();

                let mut context = receiver.open(&global, intent, choice).unwrap();
                let at = length / 2 - 2000;
                for (at, new) in [(at, bytes(4000, 8)), (7, bytes(9, 9)), (length - 1, vec![0])] {
                    context.write_at(at as u64, &new).unwrap();
                    data[at..at + new.len()].copy_from_slice(&new);
                }
                context.close().unwrap();
                if choice == Choice::Forced(Strategy::Push) {
                    assert_eq!(owner.counts().of(Way::Push).bytes_in, 4000 + 9 + 1);
                }
                let found = owner.reclaim(&global, LIMIT).unwrap().to_vec().unwrap();
                assert!(found == data, "{via:?} {choice:?} {length} {intent:?}");
                assert_eq!(receiver.pool_in_use().0, 0);
            }
        }
    }
}

/// The rule chooses a push for each of them, and there is room for one.
#[test]
fn two_ranges_are_written_back_though_only_one_can_be_pushed() {
    let (owner, receiver, _served) = pair(Via::Unix);
    let from = owner.peers()[0].0;
    owner.grant_push(from, 1).unwrap();
    owner.send(from, b"granted").unwrap();
    receiver.receive(LIMIT).unwrap();
    let mut data = bytes(700_000, 11);
    let global = owner.globalize(import::host(data.clone()), Access::ReadWrite).unwrap();
    let mut context = receiver.open(&global, Intent::Write, Choice::Automatic).unwrap();
    for at in [1000, 400_000] {
        context.write_at(at as u64, &bytes(100_000, 12)).unwrap();
        data[at..at + 100_000].copy_from_slice(&bytes(100_000, 12));
    }
    context.close().unwrap();
    let counts = owner.counts();
    assert_eq!((counts.of(Way::Push).operations, counts.of(Way::Pull).operations), (1, 1));
    assert!(owner.reclaim(&global, LIMIT).unwrap().to_vec().unwrap() == data);
}

#[test]
fn buffers_of_a_pool_can_be_written_by_their_node_and_by_who_read_them_directly() {
    let (owner, receiver, _served) = pair(Via::Unix);
    let _too = serve(&receiver);
    let mut data = bytes(100_000, 13);
    let source = receiver.globalize(import::host(data.clone()), Access::Read).unwrap();
    let choice = Choice::Forced(Strategy::Pull);
    let brought = owner.open(&source, Intent::Read, choice).unwrap();
    let global = owner.globalize(brought.aggregate(), Access::ReadWrite).unwrap();
    brought.close().unwrap();
    for (node, at) in [(&owner, 5), (&receiver, 50_000)] {
        let mut context = node.open(&global, Intent::ReadWrite, Choice::Automatic).unwrap();
        context.write_at(at as u64, b"new").unwrap();
        data[at..at + 3].copy_from_slice(b"new");
        assert!(context.to_vec().unwrap() == data);
        context.close().unwrap();
    }
    assert!(owner.reclaim(&global, LIMIT).unwrap().to_vec().unwrap() == data);
}

#[test]
fn mapped_memory_is_written_in_place() {
    let (owner, receiver, _served) = pair(Via::Rings);
    let memory = import::shared_memory(100_000, Access::ReadWrite).unwrap();
    let global = owner.globalize(import::shared(&memory), Access::ReadWrite).unwrap();
    let choice = Choice::Forced(Strategy::Map);
    let mut context = receiver.open(&global, Intent::ReadWrite, choice).unwrap();
    context.write_at(50_000, b"in place").unwrap();
    let mut seen = [0; 8];
    memory.copy_out(50_000, &mut seen);
    assert_eq!(&seen, b"in place");
    context.close().unwrap();
    let moved: u64 = Way::ALL.iter().map(|way| receiver.counts().of(*way).bytes_copied).sum();
    assert_eq!(moved, 0);
}

#[test]
fn a_context_needs_no_more_than_the_pool() {
    let owner = node(Via::Unix, options(Via::Unix));
    let small = Options { pool_buffers: 2, ..options(Via::Unix) };
    let receiver = node(Via::Unix, small);
    let _served = serve(&owner);
    link(Via::Unix, &receiver, &owner);
    let data = bytes(2_000_000, 10);
    let mut global = owner.globalize(import::host(data.clone()), Access::Read).unwrap();
    let refused = opened(&receiver, &global, Strategy::Pull);
    assert!(matches!(refused, Err(Error::TooLarge { .. })), "{refused:?}");
    // Many operations at once wait for each other and never exceed the pool.
    let group = receiver.group();
    let (mut offset, mut started) = (0, Vec::new());
    while !global.is_empty() {
        let part = global.split_to(200_000);
        let choice = Choice::Forced(Strategy::Pull);
        let operation = receiver.start_open(&part, Intent::Read, choice, Some(group)).unwrap();
        started.push((operation, offset, part.len() as usize));
        offset += part.len() as usize;
    }
    while !started.is_empty() {
        let (operation, result) = receiver.wait_group(group, LIMIT).unwrap();
        let at = started.iter().position(|s| s.0 == operation).unwrap();
        let (_, offset, length) = started.swap_remove(at);
        let towline_transfer::Finished::Opened(context) = result.unwrap() else { panic!() };
        assert!(context.to_vec().unwrap() == data[offset..offset + length]);
        context.close().unwrap();
    }
    assert!(receiver.pool_in_use().1 <= 2);
    assert!(matches!(receiver.wait_group(group, LIMIT), Err(Error::NoOperation)));
}

/// They would wait for ever for buffers that stay reserved as long as the link.
#[test]
fn contexts_do_not_wait_for_buffers_reserved_for_pushes() {
    let owner = node(Via::Tcp, options(Via::Tcp));
    let receiver = node(Via::Tcp, Options { pool_buffers: 4, ..options(Via::Tcp) });
    let _served = serve(&owner);
    let peer = link(Via::Tcp, &receiver, &owner);
    let refused = receiver.grant_push(peer, 4);
    assert!(matches!(refused, Err(Error::TooLarge { pool: 786_432, .. })), "{refused:?}");
    receiver.grant_push(peer, 3).unwrap();
    let data = bytes(500_000, 1);
    let mut global = owner.globalize(import::host(data.clone()), Access::Read).unwrap();
    let refused = receiver.start_open(&global, Intent::Read, Choice::Forced(Strategy::Pull), None);
    assert!(matches!(refused, Err(Error::TooLarge { pool: 262_144, .. })), "{refused:?}");
    let part = global.split_to(250_000);
    assert!(opened(&receiver, &part, Strategy::Pull).unwrap() == data[..250_000]);
}

#[test]
fn buffers_that_cannot_all_be_taken_back_stay_as_they_are() {
    let (owner, receiver, _served) = pair(Via::Tcp);
    let [first, second] =
        [1, 2].map(|seed| owner.globalize(import::host(bytes(9000, seed)), Access::Read).unwrap());
    let mut both = first.clone();
    both.concatenate(second.clone()).unwrap();
    owner.reclaim(&second, LIMIT).unwrap();
    let refused = owner.reclaim(&both, LIMIT);
    assert!(matches!(refused, Err(Error::Refused(Errno::ESTALE))), "{refused:?}");
    assert!(opened(&receiver, &first, Strategy::Pull).unwrap() == bytes(9000, 1));
    owner.reclaim(&first, LIMIT).unwrap();
}

#[test]
fn the_longest_limit_is_none() {
    let (owner, receiver, _served) = pair(Via::Local);
    let global = owner.globalize(import::host(vec![1; 100]), Access::Read).unwrap();
    let operation = receiver.start_open(&global, Intent::Read, Choice::Automatic, None).unwrap();
    receiver.wait(operation, Some(std::time::Duration::MAX)).unwrap();
}

#[test]
fn the_rule_says_what_happens() {
    let (owner, receiver, _served) = pair(Via::Unix);
    let memory = import::shared_memory(1 << 20, Access::Read).unwrap();
    let mapped = owner.globalize(import::shared(&memory), Access::Read).unwrap();
    let small = owner.globalize(import::host(vec![1; 100]), Access::Read).unwrap();
    for (global, way) in [(&mapped, Way::Map), (&small, Way::Inline)] {
        let context = receiver.open(global, Intent::Read, Choice::Automatic).unwrap();
        assert_eq!(context.ways().collect::<Vec<_>>(), [(way, global.len())]);
    }
    let table = choose::table();
    for word in ["tcp", "unix", "shm", "Inline", "Push", "Pull", "PullDirect", "Map"] {
        assert!(table.contains(word), "{table}");
    }
}
