//! `OPT_STRUCTURED_REPLY`: negotiation. Rules on the form of the replies are in `chunk.rs`.

use crate::client::{Haggle, Mode, Session};
use crate::rule::{Level::*, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_OPT_STRUCTURED_REPLY";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "structured.answer",
        SECTION,
        Must,
        "STRUCTURED_REPLY is answered with ACK or an error, and the connection stays in step",
        answer,
    ),
    Rule::new(
        "structured.data",
        SECTION,
        Should,
        "STRUCTURED_REPLY with data gets ERR_INVALID and is not in force",
        data,
    ),
    Rule::new(
        "structured.repeat",
        SECTION,
        Should,
        "a second STRUCTURED_REPLY does not undo the first",
        repeat,
    ),
    Rule::new(
        "structured.only-if-asked",
        "Simple reply message",
        Must,
        "without negotiation every reply is simple",
        only_if_asked,
    ),
];

fn answer(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_STRUCTURED_REPLY, &[])?;
    ensure!(answer.replies.is_empty(), "{} replies before the final one", answer.replies.len());
    haggle.in_step(target)?;
    Ok(answer.outcome())
}

fn data(target: &Target) -> Seen {
    if !target.profile.modes.contains(&Mode::Structured) {
        skip!("server does not offer structured replies");
    }
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_STRUCTURED_REPLY, &[1, 2, 3, 4])?;
    ensure!(answer.last.kind == REP_ERR_INVALID, "{}", answer.outcome());
    Session::go(haggle, target, Mode::Simple)?.in_step(target)?;
    Ok("ERR_INVALID, replies stay simple".to_owned())
}

fn repeat(target: &Target) -> Seen {
    if !target.profile.modes.contains(&Mode::Structured) {
        skip!("server does not offer structured replies");
    }
    let mut haggle = Haggle::open(target)?;
    haggle.option(OPT_STRUCTURED_REPLY, &[])?;
    let second = haggle.option(OPT_STRUCTURED_REPLY, &[])?;
    let mut session = Session::go(haggle, target, Mode::Structured)?;
    session.in_step(target)?;
    Ok(format!("{}, replies stay structured", second.outcome()))
}

fn only_if_asked(target: &Target) -> Seen {
    let mut session = Session::open(target, Mode::Simple)?;
    session.in_step(target)?;
    session.transact(&crate::client::Request::new(CMD_UNKNOWN, 0, 0))?;
    session.in_step(target)?;
    Ok("success and error are simple".to_owned())
}
