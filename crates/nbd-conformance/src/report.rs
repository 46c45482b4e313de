//! Runs rules and reports one line for each.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use crate::launch::Launched;
use crate::rule::{Level, Problem, Rule};
use crate::target::Target;

/// Outcome of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Verdict {
    /// The server keeps the rule.
    Pass,
    /// The server breaks the rule.
    Fail,
    /// The rule could not be tried.
    Skip,
}

/// How long to wait after a failure for a server that it crashed to exit.
pub const CRASH_PATIENCE: Duration = Duration::from_millis(300);

/// One line of the report.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    /// Identifier of the rule.
    pub id: &'static str,
    /// Section of the text.
    pub section: &'static str,
    /// Strength of the demand.
    pub level: Level,
    /// Outcome.
    pub verdict: Verdict,
    /// What was seen, or why the rule was skipped.
    pub seen: String,
}

impl Line {
    /// Tries one rule.
    pub fn of(rule: &Rule, target: &Target, write: bool) -> Self {
        let outcome = if rule.writes && !write {
            Err(Problem::Skip("it writes to the export: needs --write".to_owned()))
        } else {
            (rule.check)(target)
        };
        let (verdict, seen) = match outcome {
            Ok(seen) => (Verdict::Pass, seen),
            Err(Problem::Fail(seen)) => (Verdict::Fail, seen),
            Err(Problem::Skip(seen)) => (Verdict::Skip, seen),
        };
        Self { id: rule.id, section: rule.section, level: rule.level, verdict, seen }
    }

    /// Tries one rule on a server started by this program. A server that exits fails the rule, and is
    /// started again for the next one.
    ///
    /// # Errors
    /// An error message for the user, if the server cannot be started again.
    pub fn of_launched(
        rule: &Rule,
        target: &Target,
        write: bool,
        server: &mut Launched,
    ) -> Result<Self, String> {
        let mut line = Self::of(rule, target, write);
        let patience = match line.verdict {
            Verdict::Fail => CRASH_PATIENCE,
            _ => Duration::ZERO,
        };
        if let Some(status) = server.ended(patience) {
            line.verdict = Verdict::Fail;
            line.seen = format!("the server ended ({status}); before that: {}", line.seen);
            server.restart()?;
        }
        Ok(line)
    }

    /// Writes the line as text.
    ///
    /// # Errors
    /// Those of the output.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let verdict = match self.verdict {
            Verdict::Pass => "PASS",
            Verdict::Fail => "FAIL",
            Verdict::Skip => "SKIP",
        };
        let Self { id, section, level, seen, .. } = self;
        writeln!(out, "{verdict} {level:<6} {id:<32} [{section}] {seen}")
    }
}

/// Counts of a report.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Summary {
    /// Rules kept.
    pub passed: usize,
    /// Rules of level MUST that were broken.
    pub failed_must: usize,
    /// Rules of level SHOULD that were broken.
    pub failed_should: usize,
    /// Rules of level MAY with an unexpected result.
    pub failed_may: usize,
    /// Rules not tried.
    pub skipped: usize,
}

impl Summary {
    /// Counts a line.
    pub fn add(&mut self, line: &Line) {
        *match (line.verdict, line.level) {
            (Verdict::Pass, _) => &mut self.passed,
            (Verdict::Skip, _) => &mut self.skipped,
            (Verdict::Fail, Level::Must) => &mut self.failed_must,
            (Verdict::Fail, Level::Should) => &mut self.failed_should,
            (Verdict::Fail, Level::May) => &mut self.failed_may,
        } += 1;
    }
}

/// The whole report, for output as one JSON object.
#[derive(Serialize)]
pub struct Report<'a> {
    /// The server.
    pub server: String,
    /// The export.
    pub export: &'a str,
    /// One line for each rule.
    pub rules: &'a [Line],
    /// Counts.
    pub summary: Summary,
}
