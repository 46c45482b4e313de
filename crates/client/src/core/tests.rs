//! Races in the core: a thread is stopped between two steps while another one replaces the lane or
//! receives.

use super::completing::Completing;
use super::{Buffer, Core, Messages, Outcome, Receiving, SlotRef, Wait};
use crate::disks::Closing;
use crate::{Error, File, Options, Transport};
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use towline_net::Sink;
use towline_net::address::Address;
use towline_server::{Config, DiskExport, DiskKind, Export, ExportKind, Server};
use towline_wire::limits::{FRAGMENT_BYTES_MAX, GRANTS_MAX, INLINE_BYTES_MAX};
use towline_wire::request::{CURRENT, lock};
use towline_wire::{Attr, Errno, Header, Kind, Reply, Request};

fn connect() -> (Server, Arc<Core>) {
    let config = Config {
        exports: vec![Export::new("mem", ExportKind::Memory(1 << 20))],
        disks: vec![DiskExport::new("disk", DiskKind::Memory(1 << 20))],
        listen: vec![Address::parse("tcp://127.0.0.1:0").unwrap()],
        cores: 1,
        ..Config::default()
    };
    let server = Server::start(&config).unwrap();
    let Address::Tcp(address) = server.addresses()[0] else { panic!("no TCP") };
    let transport = Transport::Tcp(address.ip().to_string(), address.port());
    let core = Core::connect(&transport, Options::default()).unwrap();
    (server, core)
}

/// Returns what a thread holds that has taken a slot for a write with inline data and has sent
/// nothing yet.
fn stopped(core: &Core) -> (SlotRef, Messages) {
    let mut state = core.state.lock();
    let data = Buffer::Owned(vec![7; INLINE_BYTES_MAX]);
    let requests = [
        Request::Attach { name: b"mem" },
        Request::Open { base: CURRENT, flags: 0o100 | 2, mode: 0o600, path: b"file" },
        Request::Write { handle: CURRENT, offset: 0, length: data.len() as u32, flags: 0 },
    ];
    let slot = core.fill(&mut state, &requests, data, Buffer::none()).unwrap();
    let messages = state.messages(&slot);
    (slot, messages)
}

/// Has the leader find the lane lost and replace it.
fn lose_lane(core: &Arc<Core>) {
    let mut receiving = core.state.lock().take_lead().unwrap();
    core.reconnect(&mut receiving, &io::ErrorKind::ConnectionReset.into());
    core.state.lock().receiving = Some(receiving);
}

#[test]
fn what_was_to_go_over_the_last_lane_is_not_sent_beside_its_copy() {
    let (_server, core) = connect();
    let (slot, messages) = stopped(&core);
    lose_lane(&core);
    let buffer = core.wait(&slot, &mut Outcome::default()).unwrap();
    assert_eq!(buffer.len(), INLINE_BYTES_MAX);
    drop(buffer); // from here on nothing may look at it
    let before = core.counters.values();
    assert!(core.send_now(messages).unwrap());
    assert_eq!(core.counters.values(), before);
    assert_eq!(core.state.lock().slots[usize::from(slot.slot)].sending, 0);
}

#[test]
fn what_was_to_wait_for_the_last_lane_is_not_queued_beside_its_copy() {
    let (_server, core) = connect();
    let (slot, messages) = stopped(&core);
    lose_lane(&core);
    core.out.lock().queue(messages);
    assert!(core.out.lock().messages.is_empty(), "its copy has been sent over the new lane");
    core.wait(&slot, &mut Outcome::default()).unwrap();
}

#[test]
fn what_failed_with_the_session_is_not_sent() {
    let (_server, core) = connect();
    let (slot, messages) = stopped(&core);
    core.give_up(&Error::from(Errno::EIO));
    core.wait(&slot, &mut Outcome::default()).unwrap_err();
    let before = core.counters.values();
    // The end of the connection is noticed if it was quiet for long enough.
    let has_ended = |error: io::Error| error.kind() == io::ErrorKind::ConnectionReset;
    assert!(core.send_now(messages).unwrap_or_else(has_ended));
    assert!(core.out.lock().messages.is_empty());
    assert_eq!(core.counters.values(), before);
}

/// Waits until a condition holds; fails after a minute.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

const WRITE: Request<'_> =
    Request::DiskWrite { disk: 1, flags: 0, offset: 0, length: 512, checksums: b"" };

/// Starts a thread that writes the same bytes, and so waits for the write under way.
fn write_again(core: &Arc<Core>) -> JoinHandle<()> {
    let core = core.clone();
    std::thread::spawn(move || drop(core.call(&[WRITE], &[2; 512], &mut []).unwrap()))
}

/// The thread that made the request and another one that wants to write the same bytes both sleep
/// while a third one leads.
#[test]
fn all_who_wait_for_a_request_are_told() {
    for abandoned in [false, true] {
        let (_server, core) = connect();
        drop(core.call(&[Request::DiskOpen { disk: 1, name: b"disk" }], &[], &mut []).unwrap());
        let receiving = core.state.lock().take_lead().unwrap();
        let source = Buffer::Owned(vec![1; 512]);
        let slot = core.submit_if_room(&[WRITE], source, Buffer::none(), 0, true).unwrap().unwrap();
        let mut threads = vec![];
        if abandoned {
            core.abandon(&slot);
        } else {
            let (asked, slot) = (core.clone(), slot.clone());
            threads.push(std::thread::spawn(move || {
                asked.wait(&slot, &mut Outcome::default()).unwrap();
            }));
            eventually("the first one sleeps", || core.state.lock().sleepers == 1);
        }
        threads.push(write_again(&core));
        eventually("all sleep", || core.state.lock().sleepers == threads.len());
        let mut state = core.lead(receiving, Wait::For(Some(std::slice::from_ref(&slot))));
        while !state.is_over(Some(std::slice::from_ref(&slot))) {
            state = core.advance(state, Some(std::slice::from_ref(&slot)));
        }
        core.hand_over(&state);
        drop(state);
        eventually("a thread waits for ever", || threads.iter().all(JoinHandle::is_finished));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// A server grants more once it has what it granted before. The thread that sent that may be
/// stopped before it notes so.
#[test]
fn grants_are_bounded_by_what_may_be_on_its_way() {
    let (_server, core) = connect();
    let mut state = core.state.lock();
    let source = Buffer::Owned(vec![0; 8 * FRAGMENT_BYTES_MAX]);
    let slot = core.fill(&mut state, &[WRITE], source, Buffer::none()).unwrap();
    let link = state.link.clone();
    drop(state.messages(&slot));
    state.slots[usize::from(slot.slot)].sending = 1; // as if it had sent a fragment ahead of a grant
    drop(state);
    let mut completing =
        Completing { core: &core, link: &link, state: None, answers: Vec::new(), bulk: false };
    let part = FRAGMENT_BYTES_MAX / 16;
    let mut grant = |number: usize| {
        let mut header = Header::new(Kind::Grant, slot.slot, slot.sequence);
        header.offset = (number * part) as u64;
        header.word_a = part as u32;
        completing.message(&header, &[], &[])
    };
    for number in 1..=2 * GRANTS_MAX {
        grant(number).unwrap();
    }
    grant(2 * GRANTS_MAX + 1).unwrap_err();
    completing.answers.clear();
}

#[test]
fn a_request_that_was_cancelled_stays_so_on_the_next_lane() {
    let (_server, core) = connect();
    let open = || {
        let requests = [
            Request::Attach { name: b"mem" },
            Request::Open { base: CURRENT, flags: 0o100 | 2, mode: 0o600, path: b"file" },
        ];
        let outcome = core.call(&requests, &[], &mut []).unwrap();
        match outcome.last().unwrap() {
            Reply::Opened { handle, .. } => handle,
            other => panic!("{other:?}"),
        }
    };
    let locking = |handle, wait| Request::Lock {
        handle,
        owner: 0,
        family: lock::OPEN_FILE,
        kind: lock::EXCLUSIVE,
        wait,
        start: 0,
        length: 0,
    };
    let (held, waits) = (open(), open());
    core.call(&[locking(held, 0)], &[], &mut []).unwrap().single().unwrap();
    let mut state = core.state.lock();
    let none = (Buffer::none(), Buffer::none());
    let slot = core.fill(&mut state, &[locking(waits, 1)], none.0, none.1).unwrap();
    let messages = state.messages(&slot);
    drop(state);
    // The server gets the cancellation before the request, which is sent only over the next lane.
    core.cancel(&slot);
    lose_lane(&core);
    core.send_all(messages);
    let waiting = {
        let (core, slot) = (core.clone(), slot.clone());
        std::thread::spawn(move || {
            let mut outcome = Outcome::default();
            core.wait(&slot, &mut outcome).unwrap();
            outcome.single().map(|_| ()).unwrap_err().to_string()
        })
    };
    eventually("it waits though it was cancelled", || waiting.is_finished());
    assert_eq!(waiting.join().unwrap(), Error::from(Errno::EINTR).to_string());
}

/// All slots belong to calls whose threads do not run yet. A thread that waits for a slot receives
/// the answers to all of them, and nothing arrives after those.
#[test]
fn who_waits_for_a_slot_gets_that_of_a_call_that_is_over() {
    let (_server, core) = connect();
    let requests = [Request::Attach { name: b"none" }];
    let count = core.state.lock().slots.len();
    let begin = |_| {
        let lent = std::ptr::dangling_mut();
        let mut state = core.state.lock();
        let (source, target) = (Buffer::Source(lent, 0), Buffer::Target(lent, 0));
        let slot = core.fill(&mut state, &requests, source, target).unwrap();
        let messages = state.messages(&slot);
        drop(state);
        core.send_all(messages);
        slot
    };
    let slots: Vec<_> = (0..count).map(begin).collect();
    let waits = {
        let core = core.clone();
        std::thread::spawn(move || drop(core.call(&requests, &[], &mut []).unwrap()))
    };
    let is_over = |slot| core.state.lock().is_over(Some(std::slice::from_ref(slot)));
    // The waiting thread stops receiving as soon as one of them is over.
    eventually("all are answered", || {
        core.progress();
        slots.iter().all(is_over)
    });
    std::thread::sleep(Duration::from_millis(100));
    core.wait(&slots[0], &mut Outcome::default()).unwrap();
    eventually("it waits for ever", || waits.is_finished());
    waits.join().unwrap();
}

/// Opens a file of `mem` and returns its handle.
fn open(core: &Arc<Core>, path: &[u8]) -> u64 {
    let requests = [
        Request::Attach { name: b"mem" },
        Request::Open { base: CURRENT, flags: 0o100 | 2, mode: 0o600, path },
    ];
    let outcome = core.call(&requests, &[], &mut []).unwrap();
    let Reply::Opened { handle, attr } = outcome.last().unwrap() else { panic!("not opened") };
    core.remember_path(handle, b"mem", path, 2, attr.identity());
    handle
}

/// If the server is killed, requests under way have to be resent to the next one, which has to open
/// the file for them.
#[test]
fn nothing_is_closed_that_a_request_under_way_needs() {
    const LENGTH: usize = 2 * FRAGMENT_BYTES_MAX;
    let (_server, core) = connect();
    drop(core.call(&[Request::DiskOpen { disk: 1, name: b"disk" }], &[], &mut []).unwrap());
    let handle = open(&core, b"file");
    let write = Request::Write { handle, offset: 0, length: LENGTH as u32, flags: 0 };
    let change =
        Request::DiskWrite { disk: 1, flags: 0, offset: 0, length: LENGTH as u32, checksums: b"" };
    let start = |request| {
        let source = Buffer::Owned(vec![1; LENGTH]);
        core.submit_if_room(&[request], source, Buffer::none(), 0, true).unwrap().unwrap()
    };
    let slots = [start(write), start(change)];
    let closes = || {
        let state = core.state.lock();
        let under_way = state.slots.iter().filter(|slot| slot.closes.is_some()).count();
        (state.closing.len(), under_way)
    };
    core.close_later(Closing::File(handle));
    core.close_disk(1);
    core.close_with_next(handle);
    assert_eq!(closes(), (3, 0));
    for slot in &slots {
        let mut outcome = Outcome::default();
        core.wait(slot, &mut outcome).unwrap();
        outcome.single().unwrap();
    }
    eventually("they are closed", || {
        core.progress();
        core.state.lock().is_idle()
    });
    let state = core.state.lock();
    assert!(!state.files.knows(handle) && !state.disks.knows(1));
}

/// The close waits for a request under way. Meanwhile the server restarts, and the file cannot be
/// opened again.
#[test]
fn a_file_lost_while_its_close_waits_is_closed() {
    let (_server, core) = connect();
    let handle = open(&core, b"file");
    drop(core.call(&[Request::Close { handle }], &[], &mut []).unwrap());
    core.remember_path(handle, b"mem", b"file", 2, 1); // as with a server that does not know it
    let messages = {
        let mut state = core.state.lock();
        let request = Request::Stat { base: handle, flags: 0, path: b"" };
        let slot = core.fill(&mut state, &[request], Buffer::none(), Buffer::none()).unwrap();
        state.messages(&slot)
    };
    let file = File { core: core.clone(), handle, attr: Attr::default(), write_flags: 0 };
    let closes = std::thread::spawn(move || file.close());
    eventually("the close waits", || core.state.lock().is_led());
    core.state.lock().files.lose(&HashSet::from([handle]));
    core.send_all(messages);
    closes.join().unwrap().unwrap();
    assert!(!core.state.lock().files.is_lost(handle));
}

/// Here the only thread that runs just receives, like the keeper of a `towline run`.
#[test]
fn what_waits_for_a_slot_is_closed_by_who_receives() {
    let (_server, core) = connect();
    let count = core.state.lock().slots.len() + 3;
    let handles: Vec<u64> = (0..count).map(|_| open(&core, b"file")).collect();
    handles.iter().for_each(|handle| core.close_later(Closing::File(*handle)));
    eventually("all are closed", || {
        core.progress();
        core.state.lock().is_idle()
    });
}

/// Counts how often it is woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Lent data is lost with the lane, and the answer to the resent request arrives before the polling
/// thread has left its waker.
#[test]
fn who_polls_is_told_of_what_was_asked_again() {
    const LENGTH: usize = 64 << 10;
    let directory = tempfile::TempDir::new().unwrap();
    let socket = directory.path().join("socket");
    let config = Config {
        exports: vec![Export::new("mem", ExportKind::Memory(1 << 20))],
        listen: vec![Address::Unix(socket.clone())],
        cores: 1,
        ..Config::default()
    };
    let _server = Server::start(&config).unwrap();
    let core = Core::connect(&Transport::Shm(socket), Options::default()).unwrap();
    let requests = [
        Request::Attach { name: b"mem" },
        Request::Open { base: CURRENT, flags: 0o100 | 2, mode: 0o600, path: b"file" },
    ];
    let outcome = core.call(&requests, &[], &mut []).unwrap();
    let Reply::Opened { handle, .. } = outcome.last().unwrap() else { panic!("not opened") };
    core.write(handle, &vec![7; LENGTH], 0, 0).unwrap();
    let read = Request::Read { handle, offset: 0, length: LENGTH as u32 };
    let target = Buffer::Owned(vec![0; LENGTH]);
    let slot = core.submit_if_room(&[read], Buffer::none(), target, 0, true).unwrap().unwrap();
    let number = usize::from(slot.slot);
    let is_over = || core.state.lock().is_over(Some(std::slice::from_ref(&slot)));
    eventually("it is answered", || {
        core.progress();
        is_over()
    });
    assert!(core.state.lock().slots[number].outcome.borrowed.is_some(), "not lent");
    lose_lane(&core);
    let mut receiving = core.state.lock().take_lead().unwrap();
    let out = core.out.lock();
    let woken = Arc::new(Woken::default());
    let polls = {
        let (core, slot, waker) = (core.clone(), slot.clone(), Waker::from(woken.clone()));
        std::thread::spawn(move || core.poll(&slot, &waker, &mut Outcome::default()).is_some())
    };
    eventually("it is asked again", || !is_over());
    let state = core.state.lock();
    drop(out);
    std::thread::sleep(Duration::from_millis(300)); // until the request was sent and its answer has arrived
    let link = receiving.link.clone();
    let mut completing = Completing {
        core: &core,
        link: &link,
        state: Some(state),
        answers: Vec::new(),
        bulk: false,
    };
    let Receiving { input, scratch, .. } = &mut *receiving;
    input.receive(&link, scratch, None, &mut completing, &core.counters).unwrap();
    drop(completing);
    let is_ready = polls.join().unwrap();
    let mut state = core.state.lock();
    state.receiving = Some(receiving);
    drop(state);
    core.progress();
    assert!(is_over() && (is_ready || woken.0.load(Ordering::Relaxed) > 0), "nobody is told");
}
