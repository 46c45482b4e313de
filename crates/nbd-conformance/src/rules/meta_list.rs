//! `OPT_LIST_META_CONTEXT`: lists the metadata contexts.

use crate::client::haggle::Answer;
use crate::client::{Haggle, Mode, Request, Session, context_data};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::{NOBODYS_NAME, Target};
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_OPT_LIST_META_CONTEXT";
const BASE: &str = "The base: metadata namespace";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "meta-list.all",
        SECTION,
        Must,
        "without a query every context is listed, each with a name of namespace:leaf",
        all,
    ),
    Rule::new(
        "meta-list.wildcard",
        BASE,
        Must,
        "the query base: lists the contexts of that namespace",
        wildcard,
    ),
    Rule::new("meta-list.exact", SECTION, Must, "the query of a listed name finds it alone", exact),
    Rule::new(
        "meta-list.unknown-namespace",
        SECTION,
        Must,
        "queries of unknown namespaces are ignored",
        unknown_namespace,
    ),
    Rule::new(
        "meta-list.unknown-leaf",
        BASE,
        Must,
        "unknown leaf names of base: are ignored",
        unknown_leaf,
    ),
    Rule::new(
        "meta-list.mixed",
        SECTION,
        Must,
        "a known query among unknown ones is answered",
        mixed,
    ),
    Rule::new(
        "meta-list.truncated",
        SECTION,
        Must,
        "queries that reach beyond the data get ERR_INVALID, and the connection stays in step",
        truncated,
    ),
    Rule::new(
        "meta-list.unknown-export",
        SECTION,
        Should,
        "an export that does not exist gets an error, and the connection stays in step",
        unknown_export,
    ),
    Rule::new(
        "meta-list.no-colon",
        SECTION,
        May,
        "a query without a colon is ignored or gets ERR_INVALID",
        no_colon,
    ),
    Rule::new(
        "meta-list.selects-nothing",
        SECTION,
        Should,
        "LIST_META_CONTEXT selects nothing: block status gets EINVAL",
        selects_nothing,
    ),
];

/// Opens a connection with structured replies; skips if the server has no metadata contexts.
pub(super) fn structured(target: &Target) -> Result<Haggle, Problem> {
    if target.profile.contexts.is_empty() {
        skip!("server offers no metadata contexts");
    }
    let mut haggle = Haggle::open(target)?;
    haggle.option(OPT_STRUCTURED_REPLY, &[])?;
    Ok(haggle)
}

/// Returns the names that match the queries.
fn list(target: &Target, queries: &[&str]) -> Result<Vec<String>, Problem> {
    let mut haggle = structured(target)?;
    let data = context_data(&target.export, queries);
    let answer = haggle.option(OPT_LIST_META_CONTEXT, &data)?;
    haggle.in_step(target)?;
    ensure!(answer.is_ack(), "queries {queries:?}: {}", answer.outcome());
    Ok(answer.contexts()?.into_iter().map(|(_, name)| name).collect())
}

fn all(target: &Target) -> Seen {
    let names = list(target, &[])?;
    ensure!(!names.is_empty(), "none");
    for name in &names {
        let namespace = name.split_once(':').map_or("", |(namespace, _)| namespace);
        let printable = namespace.chars().all(|c| !c.is_whitespace() && !c.is_control());
        ensure!(!namespace.is_empty() && printable, "context {name:?} has no namespace");
    }
    Ok(names.join(", "))
}

fn base(target: &Target) -> Vec<String> {
    let names = target.profile.contexts.iter();
    names.filter(|name| name.starts_with("base:")).cloned().collect()
}

fn wildcard(target: &Target) -> Seen {
    let mut names = list(target, &["base:"])?;
    let mut known = base(target);
    names.sort();
    known.sort();
    ensure!(names == known, "{names:?}, without a query {known:?}");
    Ok(names.join(", "))
}

fn exact(target: &Target) -> Seen {
    for name in &base(target) {
        let names = list(target, &[name])?;
        ensure!(names == [name.as_str()], "query {name:?}: {names:?}");
    }
    Ok(base(target).join(", "))
}

fn unknown_namespace(target: &Target) -> Seen {
    for query in ["x-nbd-conformance:", "x-nbd-conformance:leaf", "x-nbd-conformance:a:b"] {
        let names = list(target, &[query])?;
        ensure!(names.is_empty(), "query {query:?}: {names:?}");
    }
    Ok("ACK alone".to_owned())
}

fn unknown_leaf(target: &Target) -> Seen {
    for query in ["base:nbd-conformance", "base:allocation2", "base:allocatio", "base:Allocation"] {
        let names = list(target, &[query])?;
        ensure!(names.is_empty(), "query {query:?}: {names:?}");
    }
    Ok("ACK alone".to_owned())
}

fn mixed(target: &Target) -> Seen {
    if !base(target).iter().any(|name| name == "base:allocation") {
        skip!("base:allocation is not offered");
    }
    let queries = ["x-nbd-conformance:a", "base:allocation", "base:nbd-conformance"];
    let names = list(target, &queries)?;
    ensure!(names == ["base:allocation"], "{names:?}");
    Ok("base:allocation alone".to_owned())
}

/// Returns invalid data of context options: truncated, or with lengths and counts that are too large.
pub(super) fn truncated_data(export: &str) -> Vec<Vec<u8>> {
    let whole = context_data(export, &["base:allocation"]);
    let mut name_beyond = whole.clone();
    name_beyond[..4].copy_from_slice(&u32::MAX.to_be_bytes());
    let mut count_beyond = whole.clone();
    count_beyond[4 + export.len() + 3] = 2;
    let mut query_beyond = whole.clone();
    query_beyond[4 + export.len() + 4] = 0xff;
    let short = whole[..whole.len() - 1].to_vec();
    let header = vec![0; 3];
    vec![header, short, name_beyond, count_beyond, query_beyond]
}

fn truncated(target: &Target) -> Seen {
    let cases = truncated_data(&target.export);
    for data in &cases {
        let mut haggle = structured(target)?;
        let answer = haggle.option(OPT_LIST_META_CONTEXT, data)?;
        ensure!(answer.last.kind == REP_ERR_INVALID, "data {data:02x?}: {}", answer.outcome());
        haggle.in_step(target)?;
    }
    Ok(format!("ERR_INVALID for {} forms, in step", cases.len()))
}

fn unknown_export(target: &Target) -> Seen {
    if target.profile.accepts_any_name {
        skip!("server takes every export name");
    }
    let mut haggle = structured(target)?;
    let data = context_data(NOBODYS_NAME, &[]);
    let answer: Answer = haggle.option(OPT_LIST_META_CONTEXT, &data)?;
    haggle.in_step(target)?;
    ensure!(!answer.is_ack(), "ACK");
    Ok(answer.outcome())
}

fn no_colon(target: &Target) -> Seen {
    let mut haggle = structured(target)?;
    let data = context_data(&target.export, &["nbd-conformance", ""]);
    let answer = haggle.option(OPT_LIST_META_CONTEXT, &data)?;
    haggle.in_step(target)?;
    let kept = answer.last.kind == REP_ERR_INVALID || answer.is_ack() && answer.replies.is_empty();
    ensure!(kept, "{} contexts, {}", answer.replies.len(), answer.outcome());
    Ok(answer.outcome())
}

fn selects_nothing(target: &Target) -> Seen {
    let mut haggle = structured(target)?;
    haggle.option(OPT_LIST_META_CONTEXT, &context_data(&target.export, &[]))?;
    let mut session = Session::go(haggle, target, Mode::Structured)?;
    let reply = session.transact(&Request::new(CMD_BLOCK_STATUS, 0, target.clip(512)))?;
    session.in_step(target)?;
    ensure!(reply.error == EINVAL, "{}", reply.outcome());
    Ok("EINVAL".to_owned())
}
