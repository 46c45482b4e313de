//! The form of replies in chunks. The client records every violation while it assembles replies; each
//! rule here looks for its own.

use crate::client::Mode;
use crate::rule::{Level, Level::*, Problem, Rule, Seen};
use crate::skip;
use crate::target::Target;

const TYPES: &str = "Structured reply types";
const READ: &str = "NBD_CMD_READ";
const STATUS: &str = "NBD_REPLY_TYPE_BLOCK_STATUS";

/// Makes a rule whose violations the client records under the rule's identifier.
macro_rules! form {
    ($id:literal, $section:expr, $level:expr, $demand:literal) => {
        form($id, $section, $level, $demand, |target| breaches(target, $id))
    };
}

const fn form(
    id: &'static str,
    section: &'static str,
    level: Level,
    demand: &'static str,
    check: fn(&Target) -> Seen,
) -> Rule {
    Rule::new(id, section, level, demand, check)
}

pub(super) const RULES: &[Rule] = &[
    form!(
        "chunk.read-structured",
        "Structured reply chunk message",
        Must,
        "reads get structured replies, those that fail included"
    ),
    form!(
        "chunk.flags",
        "Structured reply flags",
        Must,
        "no reply flag but DONE is set, and DONE ends the reply"
    ),
    form!(
        "chunk.none",
        "NBD_REPLY_TYPE_NONE",
        Must,
        "chunks of type NONE are empty and carry DONE"
    ),
    form!(
        "chunk.data",
        "NBD_REPLY_TYPE_OFFSET_DATA",
        Must,
        "data chunks hold an offset and at least one byte"
    ),
    form!(
        "chunk.hole",
        "NBD_REPLY_TYPE_OFFSET_HOLE",
        Must,
        "hole chunks have 12 bytes and a size that is not 0"
    ),
    form!("chunk.bounds", TYPES, Must, "content lies within the request"),
    form!("chunk.overlap", TYPES, Must, "content does not overlap content or errors sent before"),
    form!("chunk.coverage", READ, Must, "a successful read is covered by its chunks"),
    form!("chunk.type", TYPES, Must, "each chunk has a type that belongs to its command"),
    form!(
        "chunk.error",
        "NBD_REPLY_TYPE_ERROR",
        Must,
        "error chunks hold an error that is not 0 and a message that is a string and fits"
    ),
    form!(
        "chunk.error-offset",
        "NBD_REPLY_TYPE_ERROR_OFFSET",
        Must,
        "the offset of an error lies within the request"
    ),
    form!("error.values", "Error values", Must, "only errors of the text are sent"),
    form!(
        "status.layout",
        STATUS,
        Must,
        "status chunks hold a context and extents that are not empty"
    ),
    form!(
        "status.chunks",
        "NBD_CMD_BLOCK_STATUS",
        Must,
        "a successful reply has exactly one status chunk for each context"
    ),
    form!("status.surplus", STATUS, Must, "only the last extent reaches beyond the request"),
    form!(
        "extended.offset",
        "Extended reply chunk message",
        Must,
        "each extended reply header repeats the offset of its request"
    ),
];

fn breaches(target: &Target, id: &'static str) -> Seen {
    let modes = &target.profile.modes;
    let chunks = modes.iter().any(|mode| *mode != Mode::Simple);
    if id.starts_with("chunk.") && !chunks {
        skip!("server offers neither structured replies nor extended headers");
    }
    if id.starts_with("extended.") && !modes.contains(&Mode::Extended) {
        skip!("server does not offer extended headers");
    }
    if id.starts_with("status.") && target.profile.contexts.is_empty() {
        skip!("server offers no metadata contexts");
    }
    let found: Vec<_> = target.violations()?.iter().filter(|found| found.rule == id).collect();
    match found.first() {
        None => Ok("no breach in a mixture of requests".to_owned()),
        Some(first) => {
            Err(Problem::Fail(format!("{} breaches, first {}", found.len(), first.text)))
        }
    }
}
