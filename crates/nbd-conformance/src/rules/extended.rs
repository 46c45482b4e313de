//! `OPT_EXTENDED_HEADERS`: negotiation, and requests in the extended form.

use crate::client::session::encode;
use crate::client::{Haggle, Mode, Request, Session};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

const OPTION: &str = "NBD_OPT_EXTENDED_HEADERS";
const REQUEST: &str = "Request message";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "extended.answer",
        OPTION,
        Must,
        "EXTENDED_HEADERS is answered with ACK or an error, and the connection stays in step",
        answer,
    ),
    Rule::new(
        "extended.data",
        OPTION,
        Should,
        "EXTENDED_HEADERS with data gets ERR_INVALID and is not in force",
        data,
    ),
    Rule::new(
        "extended.without-structured",
        OPTION,
        Should,
        "EXTENDED_HEADERS works with and without STRUCTURED_REPLY before it",
        without_structured,
    ),
    Rule::new(
        "extended.then-structured",
        "NBD_OPT_STRUCTURED_REPLY",
        Must,
        "STRUCTURED_REPLY after EXTENDED_HEADERS gets ERR_EXT_HEADER_REQD and changes nothing",
        then_structured,
    ),
    Rule::new(
        "extended.replies",
        "Extended reply chunk message",
        Must,
        "every reply is an extended one: success, error, flush, unknown command",
        replies,
    ),
    Rule::new(
        "extended.compact-request",
        REQUEST,
        Should,
        "a compact request after EXTENDED_HEADERS ends the session",
        compact_request,
    ),
    Rule::new(
        "extended.payload-unexpected",
        REQUEST,
        Should,
        "a payload the command does not expect is consumed, and the request gets EINVAL",
        payload_unexpected,
    ),
    Rule::new(
        "extended.payload-too-large",
        REQUEST,
        Should,
        "a payload above the maximum ends the session; the server goes on for others",
        payload_too_large,
    ),
    Rule::new(
        "extended.read-64-bit",
        "Error values",
        Should,
        "a read of 2^32 bytes and more beyond the end gets an error, not its lower 32 bits",
        read_64_bit,
    ),
    Rule::new(
        "extended.status-64-bit",
        "NBD_REPLY_TYPE_BLOCK_STATUS_EXT",
        Must,
        "block status of 2^32 bytes and more is answered, or refused when beyond the end",
        status_64_bit,
    ),
    Rule::writing(
        "extended.write-without-payload-flag",
        REQUEST,
        May,
        "a write without PAYLOAD_LEN gets EINVAL and no payload is awaited, or is taken with it, as QEMU sends it",
        write_without_payload_flag,
    ),
];

fn session(target: &Target) -> Result<Session, Problem> {
    Session::open(target, Mode::Extended)
}

fn answer(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_EXTENDED_HEADERS, &[])?;
    ensure!(answer.replies.is_empty(), "{} replies before the final one", answer.replies.len());
    haggle.in_step(target)?;
    Ok(answer.outcome())
}

fn data(target: &Target) -> Seen {
    session(target)?;
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_EXTENDED_HEADERS, &[0; 4])?;
    ensure!(answer.last.kind == REP_ERR_INVALID, "{}", answer.outcome());
    Session::go(haggle, target, Mode::Simple)?.in_step(target)?;
    Ok("ERR_INVALID, replies stay simple".to_owned())
}

fn without_structured(target: &Target) -> Seen {
    session(target)?.in_step(target)?;
    let mut haggle = Haggle::open(target)?;
    haggle.option(OPT_STRUCTURED_REPLY, &[])?;
    let answer = haggle.option(OPT_EXTENDED_HEADERS, &[])?;
    ensure!(answer.is_ack(), "after STRUCTURED_REPLY: {}", answer.outcome());
    Session::go(haggle, target, Mode::Extended)?.in_step(target)?;
    Ok("both".to_owned())
}

fn then_structured(target: &Target) -> Seen {
    session(target)?;
    let mut haggle = Haggle::open(target)?;
    haggle.option(OPT_EXTENDED_HEADERS, &[])?;
    let answer = haggle.option(OPT_STRUCTURED_REPLY, &[])?;
    Session::go(haggle, target, Mode::Extended)?.in_step(target)?;
    ensure!(answer.last.kind == REP_ERR_EXT_HEADER_REQD, "{}", answer.outcome());
    Ok("ERR_EXT_HEADER_REQD, replies stay extended".to_owned())
}

fn replies(target: &Target) -> Seen {
    // The client accepts only extended replies in this mode.
    let mut session = session(target)?;
    session.in_step(target)?;
    session.transact(&Request::read(session.size, target.block()))?;
    session.transact(&Request::new(CMD_UNKNOWN, 0, 0))?;
    if session.has(FLAG_SEND_FLUSH) {
        session.transact(&Request::new(CMD_FLUSH, 0, 0))?;
    }
    Ok("all extended".to_owned())
}

fn compact_request(target: &Target) -> Seen {
    let mut session = session(target)?;
    let read = Request::read(0, target.clip(512));
    session.link.send(&encode(Mode::Simple, 0, 1, &read))?;
    session.link.half_close();
    let answer = session.link.recv_until_closed()?;
    ensure!(answer.is_empty(), "{} bytes of answer", answer.len());
    Session::open(target, Mode::Simple)?.in_step(target)?;
    Ok("session ended".to_owned())
}

fn payload_unexpected(target: &Target) -> Seen {
    let mut session = session(target)?;
    for command in [CMD_READ, CMD_FLUSH, CMD_UNKNOWN] {
        let mut request = Request::new(command, 0, 4096).with(CMD_FLAG_PAYLOAD_LEN);
        request.payload = vec![0x55; 4096];
        let reply = session.transact(&request)?;
        session.in_step(target)?;
        ensure!(reply.error == EINVAL, "{request}: {}", reply.outcome());
    }
    Ok("consumed, EINVAL".to_owned())
}

fn payload_too_large(target: &Target) -> Seen {
    let mut session = session(target)?;
    for length in [1 << 33, u64::MAX] {
        let request = Request::new(CMD_WRITE, 0, length).with(CMD_FLAG_PAYLOAD_LEN);
        let message = encode(Mode::Extended, request.flags, 1, &request);
        session.link.send(&message)?;
        session.link.half_close();
        session.link.recv_until_closed()?;
        session = self::session(target)?;
        session.in_step(target).map_err(|problem| problem.during("next client"))?;
    }
    Ok("session ended".to_owned())
}

fn read_64_bit(target: &Target) -> Seen {
    let mut session = session(target)?;
    for length in [1 << 32, (1 << 32) + target.block(), 1 << 63, u64::MAX - target.block() + 1] {
        let request = Request::read(0, length);
        let reply = session.transact(&request)?;
        ensure!(reply.error != 0, "{request}: success");
        session.in_step(target)?;
    }
    Ok("errors".to_owned())
}

fn status_64_bit(target: &Target) -> Seen {
    if target.profile.contexts.is_empty() {
        skip!("server offers no metadata contexts");
    }
    let mut session = Session::open_with_contexts(target, Mode::Extended, &["base:allocation"])?;
    let length = (1 << 32) + target.block();
    let inside = length <= session.size;
    let reply = session.transact(&Request::new(CMD_BLOCK_STATUS, 0, length))?;
    session.in_step(target)?;
    if let Some(found) = reply.violations.first() {
        return Err(Problem::Fail(found.text.clone()));
    }
    ensure!(!inside || reply.error == 0, "{length} bytes: {}", reply.outcome());
    Ok(format!(
        "{length} bytes, {}: {}",
        if inside { "inside" } else { "beyond the end" },
        reply.outcome()
    ))
}

/// The payload is a sequence of requests, so that the answers tell whether it was taken for one.
fn write_without_payload_flag(target: &Target) -> Seen {
    const COOKIE: u64 = 7;
    let mut session = session(target)?;
    if session.has(FLAG_READ_ONLY) {
        skip!("export is read-only");
    }
    let header = encode(Mode::Extended, 0, COOKIE, &Request::new(CMD_WRITE, 0, target.clip(512)));
    let count = target.clip(512) / header.len() as u64;
    let read = Request::read(0, target.block().min(target.clip(512)));
    let payload = (1..=count).flat_map(|n| encode(Mode::Extended, 0, COOKIE + n, &read));
    let payload: Vec<u8> = payload.collect();
    if payload.len() as u64 != target.clip(512) {
        skip!("requests do not fill a write");
    }
    session.expect_reply(COOKIE, &Request::new(CMD_WRITE, 0, target.clip(512)));
    session.link.send(&[header, payload.clone()].concat())?;
    let reply = session.wait(COOKIE)?;
    if reply.error == 0 {
        session.in_step(target)?;
        let there = session.transact(&Request::read(0, target.clip(512)))?.data()?;
        ensure!(there == payload, "its payload is not there");
        return Ok("taken with its payload".to_owned());
    }
    for cookie in (1..=count).map(|n| COOKIE + n) {
        session.expect_reply(cookie, &read);
    }
    for cookie in (1..=count).map(|n| COOKIE + n) {
        session.wait(cookie)?.data()?;
    }
    session.in_step(target)?;
    ensure!(reply.error == EINVAL, "{}", reply.outcome());
    Ok("EINVAL".to_owned())
}
