//! `OPT_LIST`: the names of exports.

use crate::client::haggle::{Answer, check_string};
use crate::client::{Haggle, info_data};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::Target;
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_OPT_LIST";

/// Most names that `list.names` tries.
const NAMES_MAX: usize = 16;

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "list.answer",
        SECTION,
        Must,
        "LIST is answered with replies of type SERVER, then ACK or an error",
        answer,
    ),
    Rule::new(
        "list.entries",
        "NBD_REP_SERVER",
        Must,
        "each entry has a name no longer than its reply, and strings are strings",
        entries,
    ),
    Rule::new("list.data", SECTION, Should, "LIST with data gets ERR_INVALID", data),
    Rule::new("list.names", "NBD_REP_SERVER", Should, "listed names can be opened", names),
    Rule::new(
        "list.repeat",
        SECTION,
        Should,
        "LIST may be sent again and gives the same names",
        repeat,
    ),
];

fn list(target: &Target) -> Result<Answer, Problem> {
    let answer = Haggle::open(target)?.option(OPT_LIST, &[])?;
    if !answer.is_ack() {
        skip!("server does not list its exports: {}", answer.outcome());
    }
    Ok(answer)
}

fn answer(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_LIST, &[])?;
    ensure!(
        answer.replies.iter().all(|reply| reply.kind == REP_SERVER),
        "a reply of another type than SERVER"
    );
    ensure!(
        answer.last.kind != REP_ERR_UNSUP,
        "{}: LIST is part of the baseline",
        answer.outcome()
    );
    haggle.in_step(target)?;
    Ok(format!("{} exports, {}", answer.replies.len(), answer.outcome()))
}

/// Parses the names and descriptions of an answer.
fn parse(answer: &Answer) -> Result<Vec<(String, String)>, Problem> {
    let mut entries = Vec::new();
    for reply in &answer.replies {
        let Some((length, rest)) = reply.data.split_first_chunk::<4>() else {
            return Err(Problem::Fail(format!("entry of {} bytes", reply.data.len())));
        };
        let length = u32::from_be_bytes(*length) as usize;
        ensure!(length <= rest.len(), "name of {length} bytes in an entry of {}", reply.data.len());
        let name = check_string("name of an export", &rest[..length])?;
        entries.push((name, check_string("description of an export", &rest[length..])?));
    }
    Ok(entries)
}

fn entries(target: &Target) -> Seen {
    let entries = parse(&list(target)?)?;
    let described = entries.iter().filter(|(_, text)| !text.is_empty()).count();
    Ok(format!("{} names, {described} with a description", entries.len()))
}

fn data(target: &Target) -> Seen {
    let mut haggle = Haggle::open(target)?;
    let answer = haggle.option(OPT_LIST, &[0])?;
    haggle.in_step(target)?;
    ensure!(answer.last.kind == REP_ERR_INVALID, "{}", answer.outcome());
    Ok("ERR_INVALID".to_owned())
}

fn names(target: &Target) -> Seen {
    let entries = parse(&list(target)?)?;
    if entries.is_empty() {
        skip!("no export is listed");
    }
    let mut haggle = Haggle::open(target)?;
    for (name, _) in entries.iter().take(NAMES_MAX) {
        let answer = haggle.option(OPT_INFO, &info_data(name, &[]))?;
        if answer.last.kind == REP_ERR_UNSUP {
            skip!("server does not know INFO");
        }
        ensure!(answer.is_ack(), "INFO for {name:?}: {}", answer.outcome());
    }
    Ok(format!("{} names", entries.len().min(NAMES_MAX)))
}

fn repeat(target: &Target) -> Seen {
    list(target)?;
    let mut haggle = Haggle::open(target)?;
    let first = haggle.option(OPT_LIST, &[])?;
    let second = haggle.option(OPT_LIST, &[])?;
    ensure!(first == second, "{} exports, then {}", first.replies.len(), second.replies.len());
    Ok("the same twice".to_owned())
}
