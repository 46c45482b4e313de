//! Rules, and the results of their checks.

use std::fmt;

use crate::link::Broken;
use crate::target::Target;

/// How strongly the text demands a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Level {
    /// A failure makes the server non-conforming.
    Must,
    /// A server may break the rule if it has a good reason.
    Should,
    /// Reported for information only.
    May,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Must => "MUST",
            Self::Should => "SHOULD",
            Self::May => "MAY",
        })
    }
}

/// Why a check did not pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The server broke the rule; the text says how.
    Fail(String),
    /// The rule cannot be tried on this server; the text says why.
    Skip(String),
}

impl From<Broken> for Problem {
    fn from(broken: Broken) -> Self {
        Self::Fail(broken.to_string())
    }
}

impl Problem {
    /// Puts the circumstances in front of the problem's text.
    #[must_use]
    pub fn during(self, what: impl fmt::Display) -> Self {
        match self {
            Self::Fail(text) => Self::Fail(format!("{what}: {text}")),
            Self::Skip(text) => Self::Skip(format!("{what}: {text}")),
        }
    }
}

/// Result of a check: what was seen, or why the check did not pass.
pub type Seen = Result<String, Problem>;

/// One rule of the protocol text.
pub struct Rule {
    /// Stable name: `area.rule`.
    pub id: &'static str,
    /// Where the text states the rule: a heading, or the name of an option, command or chunk type.
    pub section: &'static str,
    /// How strongly the text demands it.
    pub level: Level,
    /// Whether the check writes to the export, or tries to.
    pub writes: bool,
    /// The rule in one sentence.
    pub demand: &'static str,
    /// The check.
    pub check: fn(&Target) -> Seen,
}

impl Rule {
    /// Makes a rule whose check does not write to the export.
    pub const fn new(
        id: &'static str,
        section: &'static str,
        level: Level,
        demand: &'static str,
        check: fn(&Target) -> Seen,
    ) -> Self {
        Self { id, section, level, writes: false, demand, check }
    }

    /// Makes a rule whose check writes to the export, or tries to.
    pub const fn writing(
        id: &'static str,
        section: &'static str,
        level: Level,
        demand: &'static str,
        check: fn(&Target) -> Seen,
    ) -> Self {
        Self { id, section, level, writes: true, demand, check }
    }
}

/// Fails the check with a formatted text of what was seen, unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::rule::Problem::Fail(format!($($text)+)));
        }
    };
}

/// Skips the check, with a formatted reason.
#[macro_export]
macro_rules! skip {
    ($($text:tt)+) => {
        return Err($crate::rule::Problem::Skip(format!($($text)+)))
    };
}
