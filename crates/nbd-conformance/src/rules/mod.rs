//! The rules, one file for each section of the text. Each file begins with the list of its rules.

use crate::rule::Rule;

mod abort;
mod area;
mod chunk;
mod export_name;
mod extended;
mod flush_cache;
mod go;
mod greeting;
mod haggling;
mod info;
mod list;
mod meta_list;
mod meta_set;
mod multi;
mod pattern;
mod read;
mod request;
mod starttls;
mod status;
mod structured;
mod termination;
pub(crate) mod traffic;
mod write;
mod zeroes;

/// Returns all rules in the order in which they are tried.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    [
        greeting::RULES,
        haggling::RULES,
        export_name::RULES,
        abort::RULES,
        list::RULES,
        info::RULES,
        go::RULES,
        starttls::RULES,
        structured::RULES,
        extended::RULES,
        meta_list::RULES,
        meta_set::RULES,
        request::RULES,
        read::RULES,
        chunk::RULES,
        flush_cache::RULES,
        status::RULES,
        multi::RULES,
        write::RULES,
        zeroes::RULES,
        termination::RULES,
    ]
    .into_iter()
    .flatten()
}
