//! `OPT_EXPORT_NAME`: the old way to enter transmission.

use crate::client::{Haggle, Session, haggle::be64, info_data};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::{NOBODYS_NAME, Target};
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_OPT_EXPORT_NAME";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "export-name.padding",
        "Newstyle negotiation",
        Must,
        "without NO_ZEROES, size and flags are followed by 124 zero bytes, then transmission",
        padding,
    ),
    Rule::new(
        "export-name.no-zeroes",
        "Handshake flags",
        Must,
        "with NO_ZEROES, transmission follows size and flags at once",
        no_zeroes,
    ),
    Rule::new(
        "export-name.not-fixed",
        SECTION,
        Should,
        "a client without FIXED_NEWSTYLE can open an export",
        not_fixed,
    ),
    Rule::new(
        "export-name.unknown",
        SECTION,
        Must,
        "the server ends the session when the export does not exist",
        unknown,
    ),
    Rule::new(
        "export-name.agrees",
        "NBD_INFO_EXPORT",
        Must,
        "EXPORT_NAME and INFO tell the same size and flags",
        agrees,
    ),
    Rule::new(
        "export-name.too-long",
        "Conventions",
        Should,
        "a name of more than 4096 bytes is refused, and the server goes on",
        too_long,
    ),
    Rule::new(
        "export-name.empty",
        SECTION,
        May,
        "the empty name opens the default export or ends the session",
        empty,
    ),
];

fn padding(target: &Target) -> Seen {
    let mut haggle = Haggle::open_with(target, C_FIXED_NEWSTYLE)?;
    haggle.send(OPT_EXPORT_NAME, target.export.as_bytes())?;
    let reply = haggle.link.recv(10 + EXPORT_NAME_PADDING)?;
    ensure!(reply[10..].iter().all(|byte| *byte == 0), "padding is not all zero");
    open(haggle, &reply).in_step(target)?;
    Ok("124 zero bytes, then transmission".to_owned())
}

fn no_zeroes(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    if !haggle.no_zeroes {
        skip!("NO_ZEROES is not offered");
    }
    haggle.send(OPT_EXPORT_NAME, target.export.as_bytes())?;
    let reply = haggle.link.recv(10)?;
    open(haggle, &reply).in_step(target)?;
    Ok("no padding".to_owned())
}

fn open(haggle: Haggle, reply: &[u8]) -> Session {
    let flags = u16::from_be_bytes([reply[8], reply[9]]);
    Session::new(haggle.link, crate::client::Mode::Simple, be64(reply), flags, None)
}

fn not_fixed(target: &Target) -> Seen {
    let haggle = Haggle::open_with(target, 0)?;
    Session::export_name(haggle, &target.export)?.in_step(target)?;
    Ok("opened".to_owned())
}

fn unknown(target: &Target) -> Seen {
    if target.profile.accepts_any_name {
        skip!("server takes every export name");
    }
    ended(target, NOBODYS_NAME)?;
    Ok("session ended".to_owned())
}

/// Fails unless the server ends the session without sending a byte.
fn ended(target: &Target, name: &str) -> Result<(), Problem> {
    let mut haggle = Haggle::open(target)?;
    haggle.send(OPT_EXPORT_NAME, name.as_bytes())?;
    let answer = haggle.link.recv_until_closed()?;
    ensure!(answer.is_empty(), "{} bytes of answer, then the end", answer.len());
    Ok(())
}

fn agrees(target: &Target) -> Seen {
    let session = Session::export_name(Haggle::open(target)?, &target.export)?;
    let (size, flags) = (session.size, session.flags);
    drop(session);
    let answer = Haggle::open(target)?.option(OPT_INFO, &info_data(&target.export, &[]))?;
    if answer.last.kind == REP_ERR_UNSUP {
        skip!("server does not know INFO");
    }
    let info = answer.export()?;
    ensure!(
        (size, flags) == info,
        "EXPORT_NAME: {size} bytes, flags {flags:#x}; INFO: {} bytes, flags {:#x}",
        info.0,
        info.1
    );
    Ok(format!("{size} bytes, flags {flags:#x}"))
}

fn too_long(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    haggle.send(OPT_EXPORT_NAME, &[b'n'; STRING_MAX + 1])?;
    let answer = haggle.link.recv_until_closed()?;
    ensure!(answer.is_empty(), "{} bytes of answer", answer.len());
    Haggle::open(target)?.in_step(target).map_err(|problem| problem.during("next client"))?;
    Ok("session ended".to_owned())
}

fn empty(target: &Target) -> Seen {
    let known = Haggle::open(target)?.option(OPT_INFO, &info_data("", &[]))?.is_ack();
    if !known {
        ended(target, "")?;
        return Ok("no default export".to_owned());
    }
    let session = Session::export_name(Haggle::open(target)?, "")?;
    Ok(format!("default export of {} bytes", session.size))
}
