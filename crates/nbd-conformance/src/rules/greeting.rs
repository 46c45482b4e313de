//! The first bytes of a connection: magic numbers, handshake flags, client flags.

use crate::client::{Haggle, info_data};
use crate::ensure;
use crate::rule::{Level::*, Rule, Seen};
use crate::skip;
use crate::target::Target;
use crate::wire::*;

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "greeting.magic",
        "Newstyle negotiation",
        Must,
        "the server greets with NBDMAGIC, IHAVEOPT and 16 handshake flags",
        magic,
    ),
    Rule::new(
        "greeting.fixed-newstyle",
        "Handshake flags",
        Must,
        "FIXED_NEWSTYLE is set",
        fixed_newstyle,
    ),
    Rule::new(
        "greeting.reserved-flags",
        "Handshake flags",
        Must,
        "no handshake flag but FIXED_NEWSTYLE and NO_ZEROES is set",
        reserved_flags,
    ),
    Rule::new(
        "greeting.unknown-client-flag",
        "Client flags",
        Must,
        "the server drops a client that sets an unknown flag",
        unknown_client_flag,
    ),
    Rule::new(
        "greeting.unoffered-no-zeroes",
        "Client flags",
        Must,
        "the server drops a client that sets NO_ZEROES when it was not offered",
        unoffered_no_zeroes,
    ),
    Rule::new(
        "greeting.slow-client",
        "Newstyle negotiation",
        Should,
        "a client that sends its flags byte by byte is served",
        slow_client,
    ),
];

fn magic(target: &Target) -> Seen {
    let (_, flags) = Haggle::greet(target)?;
    Ok(format!("handshake flags {flags:#x}"))
}

fn fixed_newstyle(target: &Target) -> Seen {
    let (_, flags) = Haggle::greet(target)?;
    ensure!(flags & FLAG_FIXED_NEWSTYLE != 0, "handshake flags {flags:#x}");
    Ok("set".to_owned())
}

fn reserved_flags(target: &Target) -> Seen {
    let (_, flags) = Haggle::greet(target)?;
    let reserved = flags & !(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
    ensure!(reserved == 0, "reserved handshake flags {reserved:#x} are set");
    Ok("none".to_owned())
}

fn unknown_client_flag(target: &Target) -> Seen {
    for bit in [2, 15, 31] {
        dropped(target, C_FIXED_NEWSTYLE | 1 << bit)?;
    }
    Ok("dropped for bits 2, 15, 31".to_owned())
}

fn unoffered_no_zeroes(target: &Target) -> Seen {
    let (_, flags) = Haggle::greet(target)?;
    if flags & FLAG_NO_ZEROES != 0 {
        skip!("NO_ZEROES is offered");
    }
    dropped(target, C_FIXED_NEWSTYLE | C_NO_ZEROES)?;
    Ok("dropped".to_owned())
}

/// Fails unless the server closes a connection that begins with these client flags, without an answer.
fn dropped(target: &Target, flags: u32) -> Result<(), crate::rule::Problem> {
    let mut haggle = Haggle::open_with(target, flags)?;
    // An error means that the server has closed already; what it sent is checked below.
    let _ = haggle.send(OPT_INFO, &info_data(&target.export, &[]));
    let answer = haggle.link.recv_until_closed().map_err(|broken| {
        crate::rule::Problem::Fail(format!("client flags {flags:#x}: not dropped: {broken}"))
    })?;
    ensure!(answer.is_empty(), "client flags {flags:#x}: {} bytes of answer", answer.len());
    Ok(())
}

fn slow_client(target: &Target) -> Seen {
    let (mut link, server_flags) = Haggle::greet(target)?;
    link.send_slowly(&C_FIXED_NEWSTYLE.to_be_bytes())?;
    Haggle { link, server_flags, no_zeroes: false }.in_step(target)?;
    Ok("served".to_owned())
}
