//! Threads that are stopped between two steps, while another one replaces the lane or receives.

use super::completing::Completing;
use super::{Buffer, Core, Messages, Outcome, SlotRef};
use crate::{Error, Options, Transport};
use std::io;
use std::sync::Arc;
use towline_net::Sink;
use towline_net::address::Address;
use towline_server::{Config, Export, ExportKind, Server};
use towline_wire::limits::{FRAGMENT_BYTES_MAX, GRANTS_MAX, INLINE_BYTES_MAX};
use towline_wire::request::CURRENT;
use towline_wire::{Errno, Header, Kind, Request};

fn connect() -> (Server, Arc<Core>) {
    let config = Config {
        exports: vec![Export::new("mem", ExportKind::Memory(1 << 20))],
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

/// What a thread has in its hands that took a slot for a write whose data rides along, and has sent nothing yet.
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

/// Whoever leads finds the lane lost, and has another one.
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
    assert_eq!(core.out.lock().messages.len(), 1, "one message of one request");
    core.wait(&slot, &mut Outcome::default()).unwrap();
}

#[test]
fn what_failed_with_the_session_is_not_sent() {
    let (_server, core) = connect();
    let (slot, messages) = stopped(&core);
    core.fail_all(&Error::from(Errno::EIO));
    core.wait(&slot, &mut Outcome::default()).unwrap_err();
    let before = core.counters.values();
    assert!(core.send_now(messages).unwrap());
    assert_eq!(core.counters.values(), before);
}

#[test]
fn more_is_granted_before_it_is_noted_that_data_has_left() {
    let (_server, core) = connect();
    let data = Buffer::Owned(vec![7; (2 * GRANTS_MAX + 1) * FRAGMENT_BYTES_MAX]);
    let length = data.len() as u32;
    let requests = [Request::Write { handle: CURRENT, offset: 0, length, flags: 0 }];
    let slot = core.fill(&mut core.state.lock(), &requests, data, Buffer::none()).unwrap();
    let link = core.link();
    let mut sink =
        Completing { core: &core, link: &link, state: None, answers: Vec::new(), bulk: false };
    let mut grant = |part: usize| {
        let mut header = Header::new(Kind::Grant, slot.slot, slot.sequence);
        header.offset = (part * FRAGMENT_BYTES_MAX) as u64;
        header.word_a = FRAGMENT_BYTES_MAX as u32;
        sink.message(&header, &[], &[])
    };
    // As if a thread had sent the first ones, and were stopped since.
    for part in 0..2 * GRANTS_MAX {
        grant(part).unwrap();
    }
    assert_eq!(grant(2 * GRANTS_MAX).unwrap_err().what, "more grants than there may be");
}
