//! `OPT_SET_META_CONTEXT`: selects metadata contexts.

use super::meta_list::{structured, truncated_data};
use crate::client::{Haggle, Mode, Request, Session, context_data};
use crate::rule::{Level::*, Problem, Rule, Seen};
use crate::target::{NOBODYS_NAME, Target};
use crate::wire::*;
use crate::{ensure, skip};

const SECTION: &str = "NBD_OPT_SET_META_CONTEXT";
const BASE: &str = "The base: metadata namespace";
const ALLOCATION: &str = "base:allocation";

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "meta-set.one",
        SECTION,
        Must,
        "a query for base:allocation selects it, with one reply and ACK",
        one,
    ),
    Rule::new(
        "meta-set.unique",
        SECTION,
        Must,
        "several contexts get different identifiers, a repeated query selects once",
        unique,
    ),
    Rule::new("meta-set.none", SECTION, Must, "without queries nothing is selected", none),
    Rule::new("meta-set.wildcard", BASE, Must, "the query base: selects nothing", wildcard),
    Rule::new(
        "meta-set.unknown",
        SECTION,
        Must,
        "unknown namespaces and leaf names of base: are ignored",
        unknown,
    ),
    Rule::new(
        "meta-set.empty-leaf",
        "Metadata querying",
        Should,
        "an empty leaf name selects nothing in any namespace",
        empty_leaf,
    ),
    Rule::new(
        "meta-set.without-structured",
        SECTION,
        Should,
        "SET_META_CONTEXT before structured replies gets ERR_INVALID",
        without_structured,
    ),
    Rule::new(
        "meta-set.truncated",
        SECTION,
        Must,
        "queries that reach beyond the data get ERR_INVALID, and the connection stays in step",
        truncated,
    ),
    Rule::new(
        "meta-set.surplus-data",
        "NBD_REP_ERR_INVALID",
        Should,
        "data after the last query gets ERR_INVALID",
        surplus_data,
    ),
    Rule::new(
        "meta-set.unknown-export",
        SECTION,
        Should,
        "an export that does not exist gets an error and selects nothing",
        unknown_export,
    ),
    Rule::new(
        "meta-set.replaces",
        SECTION,
        Must,
        "each SET_META_CONTEXT replaces the selection before it",
        replaces,
    ),
    Rule::new(
        "meta-set.failure-clears",
        SECTION,
        Must,
        "a SET_META_CONTEXT that fails leaves nothing selected",
        failure_clears,
    ),
    Rule::new(
        "meta-set.other-export",
        "Metadata querying",
        Should,
        "contexts selected for one export do not hold for another",
        other_export,
    ),
    Rule::new(
        "meta-set.many-queries",
        SECTION,
        Should,
        "a thousand queries are answered, with ERR_TOO_BIG at worst",
        many_queries,
    ),
    Rule::new(
        "meta-set.long-query",
        "Conventions",
        Should,
        "a query of more than 4096 bytes is ignored or refused, and the connection stays in step",
        long_query,
    ),
];

/// Returns the contexts that the queries select on a new connection.
fn set(target: &Target, queries: &[&str]) -> Result<Vec<(u32, String)>, Problem> {
    let mut haggle = structured(target)?;
    let answer = haggle.option(OPT_SET_META_CONTEXT, &context_data(&target.export, queries))?;
    haggle.in_step(target)?;
    ensure!(answer.is_ack(), "queries {queries:?}: {}", answer.outcome());
    answer.contexts()
}

fn need_allocation(target: &Target) -> Result<(), Problem> {
    if !target.profile.contexts.iter().any(|name| name == ALLOCATION) {
        skip!("base:allocation is not offered");
    }
    Ok(())
}

fn one(target: &Target) -> Seen {
    need_allocation(target)?;
    let contexts = set(target, &[ALLOCATION])?;
    ensure!(contexts.len() == 1 && contexts[0].1 == ALLOCATION, "{contexts:?}");
    Ok(format!("identifier {}", contexts[0].0))
}

fn unique(target: &Target) -> Seen {
    need_allocation(target)?;
    let twice = set(target, &[ALLOCATION, ALLOCATION])?;
    ensure!(twice.len() == 1, "query twice: {twice:?}");
    let queries: Vec<_> = target.profile.contexts.iter().map(String::as_str).collect();
    let contexts = set(target, &queries)?;
    let mut ids: Vec<_> = contexts.iter().map(|(id, _)| id).collect();
    ids.sort_unstable();
    ids.dedup();
    ensure!(ids.len() == contexts.len(), "identifiers are not unique: {contexts:?}");
    Ok(format!("{} contexts, {} identifiers", contexts.len(), ids.len()))
}

fn none(target: &Target) -> Seen {
    let contexts = set(target, &[])?;
    ensure!(contexts.is_empty(), "{contexts:?}");
    Ok("none".to_owned())
}

fn wildcard(target: &Target) -> Seen {
    let contexts = set(target, &["base:"])?;
    ensure!(contexts.is_empty(), "{contexts:?}");
    Ok("none".to_owned())
}

fn unknown(target: &Target) -> Seen {
    for query in ["base:nbd-conformance", "base:allocatio", "x-nbd-conformance:leaf"] {
        let contexts = set(target, &[query])?;
        ensure!(contexts.is_empty(), "query {query:?}: {contexts:?}");
    }
    Ok("ignored".to_owned())
}

fn empty_leaf(target: &Target) -> Seen {
    let mut queries: Vec<_> = target
        .profile
        .contexts
        .iter()
        .filter_map(|name| name.split_once(':').map(|(namespace, _)| format!("{namespace}:")))
        .collect();
    queries.extend(["qemu:".to_owned(), "x-nbd-conformance:".to_owned()]);
    for query in &queries {
        let contexts = set(target, &[query])?;
        ensure!(contexts.is_empty(), "query {query:?}: {contexts:?}");
    }
    Ok("none".to_owned())
}

fn without_structured(target: &Target) -> Seen {
    structured(target)?;
    let mut haggle = Haggle::open(target)?;
    let data = context_data(&target.export, &[ALLOCATION]);
    let answer = haggle.option(OPT_SET_META_CONTEXT, &data)?;
    haggle.in_step(target)?;
    ensure!(
        matches!(answer.last.kind, REP_ERR_INVALID | REP_ERR_EXT_HEADER_REQD),
        "{}",
        answer.outcome()
    );
    Ok(answer.outcome())
}

fn truncated(target: &Target) -> Seen {
    let cases = truncated_data(&target.export);
    for data in &cases {
        let mut haggle = structured(target)?;
        let answer = haggle.option(OPT_SET_META_CONTEXT, data)?;
        ensure!(answer.last.kind == REP_ERR_INVALID, "data {data:02x?}: {}", answer.outcome());
        haggle.in_step(target)?;
    }
    Ok(format!("ERR_INVALID for {} forms, in step", cases.len()))
}

fn surplus_data(target: &Target) -> Seen {
    let mut haggle = structured(target)?;
    let mut data = context_data(&target.export, &[ALLOCATION]);
    data.push(0);
    let answer = haggle.option(OPT_SET_META_CONTEXT, &data)?;
    haggle.in_step(target)?;
    ensure!(answer.last.kind == REP_ERR_INVALID, "{}", answer.outcome());
    Ok("ERR_INVALID".to_owned())
}

fn unknown_export(target: &Target) -> Seen {
    if target.profile.accepts_any_name {
        skip!("server takes every export name");
    }
    let mut haggle = structured(target)?;
    let data = context_data(NOBODYS_NAME, &[ALLOCATION]);
    let answer = haggle.option(OPT_SET_META_CONTEXT, &data)?;
    ensure!(!answer.is_ack(), "{} contexts, ACK", answer.replies.len());
    status_refused(haggle, target)?;
    Ok(answer.outcome())
}

/// Opens the export and fails unless block status gets an error, because no context is selected.
fn status_refused(haggle: Haggle, target: &Target) -> Result<(), Problem> {
    let mut session = Session::go(haggle, target, Mode::Structured)?;
    let reply = session.transact(&Request::new(CMD_BLOCK_STATUS, 0, target.clip(512)))?;
    session.in_step(target)?;
    ensure!(reply.error != 0, "block status succeeds with {} contexts", reply.statuses.len());
    Ok(())
}

fn replaces(target: &Target) -> Seen {
    need_allocation(target)?;
    let mut haggle = structured(target)?;
    let first = context_data(&target.export, &[ALLOCATION]);
    haggle.option(OPT_SET_META_CONTEXT, &first)?;
    let answer = haggle.option(OPT_SET_META_CONTEXT, &context_data(&target.export, &[]))?;
    ensure!(answer.is_ack() && answer.replies.is_empty(), "{}", answer.outcome());
    status_refused(haggle, target)?;
    Ok("replaced by nothing".to_owned())
}

fn failure_clears(target: &Target) -> Seen {
    need_allocation(target)?;
    for bad in truncated_data(&target.export) {
        let mut haggle = structured(target)?;
        let first = context_data(&target.export, &[ALLOCATION]);
        haggle.option(OPT_SET_META_CONTEXT, &first)?;
        let answer = haggle.option(OPT_SET_META_CONTEXT, &bad)?;
        ensure!(!answer.is_ack(), "data {bad:02x?}: ACK");
        status_refused(haggle, target)
            .map_err(|problem| problem.during(format_args!("after data {bad:02x?}")))?;
    }
    Ok("nothing selected".to_owned())
}

fn other_export(target: &Target) -> Seen {
    need_allocation(target)?;
    let Some(other) = target.profile.exports.iter().find(|name| **name != target.export) else {
        skip!("server lists no second export");
    };
    let mut haggle = structured(target)?;
    let answer = haggle.option(OPT_SET_META_CONTEXT, &context_data(other, &[ALLOCATION]))?;
    if !answer.is_ack() || answer.replies.is_empty() {
        skip!("{other:?} has no base:allocation: {}", answer.outcome());
    }
    status_refused(haggle, target)?;
    Ok(format!("selected for {other:?}, refused on {:?}", target.export))
}

fn many_queries(target: &Target) -> Seen {
    need_allocation(target)?;
    let mut haggle = structured(target)?;
    let mut queries = vec!["x-nbd-conformance:leaf"; 1000];
    queries.push(ALLOCATION);
    let answer = haggle.option(OPT_SET_META_CONTEXT, &context_data(&target.export, &queries))?;
    haggle.in_step(target)?;
    let kept = answer.last.kind == REP_ERR_TOO_BIG || answer.is_ack() && answer.replies.len() == 1;
    ensure!(kept, "{} contexts, {}", answer.replies.len(), answer.outcome());
    Ok(answer.outcome())
}

fn long_query(target: &Target) -> Seen {
    let mut haggle = structured(target)?;
    let query = format!("x-nbd-conformance:{}", "q".repeat(STRING_MAX));
    let data = context_data(&target.export, &[&query]);
    let answer = haggle.option(OPT_SET_META_CONTEXT, &data)?;
    haggle.in_step(target)?;
    ensure!(answer.replies.is_empty(), "{} contexts", answer.replies.len());
    Ok(answer.outcome())
}
