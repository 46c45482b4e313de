//! The rules, one file a section of the text. Each file begins with the list of its rules.

use crate::rule::Rule;

mod abort;
mod chunk;
mod export_name;
mod go;
mod greeting;
mod haggling;
mod info;
mod list;
mod read;
mod request;
mod structured;
mod termination;
pub(crate) mod traffic;

/// Every rule, in the order in which they are tried.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    [
        greeting::RULES,
        haggling::RULES,
        export_name::RULES,
        abort::RULES,
        list::RULES,
        info::RULES,
        go::RULES,
        structured::RULES,
        request::RULES,
        read::RULES,
        chunk::RULES,
        termination::RULES,
    ]
    .into_iter()
    .flatten()
}
