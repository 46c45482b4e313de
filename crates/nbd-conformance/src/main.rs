//! The program `nbd-conformance`: parses arguments, runs the rules and prints the report.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use nbd_conformance::launch::Launched;
use nbd_conformance::report::{CRASH_PATIENCE, Line, Report, Summary};
use nbd_conformance::rule::{Problem, Rule};
use nbd_conformance::target::Target;
use nbd_conformance::{rules, uri};

/// Tries every rule of the NBD protocol text against a server, one line per rule
#[derive(Parser)]
#[command(
    version,
    after_help = "\
Exit status: 0 when every MUST was kept, 1 when one was broken, 2 when the test could not be run.

Examples:
  nbd-conformance nbd://localhost/disk
  nbd-conformance --write -- qemu-nbd -t -e 0 -f raw scratch.img
  nbd-conformance --write -- nbdkit -f -U $sock memory 64M     (quote $sock from your shell)"
)]
struct Arguments {
    /// nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH
    #[arg(required_unless_present_any = ["command", "list"], conflicts_with = "command")]
    uri: Option<String>,
    /// Start this server: by socket activation, or with $sock or $port in its arguments replaced
    #[arg(last = true)]
    command: Vec<String>,
    /// Name of the export, for a server started here
    #[arg(long, default_value = "", requires = "command")]
    export: String,
    /// Also try rules that write: OVERWRITES THE CONTENTS OF THE EXPORT
    #[arg(long)]
    write: bool,
    /// Try only this rule, or the rules of this area (the part before the dot); may be repeated
    #[arg(long, value_name = "RULE")]
    only: Vec<String>,
    /// Write one JSON object
    #[arg(long)]
    json: bool,
    /// Show what a server started here prints on standard error
    #[arg(long, requires = "command")]
    verbose: bool,
    /// List the rules and what they demand; try none
    #[arg(long)]
    list: bool,
    /// Longest wait for one answer, in seconds
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    timeout: u64,
    /// Seed of random traffic
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(status) => status,
        Err(text) => {
            eprintln!("nbd-conformance: {text}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let rules = select(&arguments.only)?;
    if arguments.list {
        list(&rules).map_err(|error| error.to_string())?;
        return Ok(ExitCode::SUCCESS);
    }
    let timeout = Duration::from_secs(arguments.timeout.max(1));
    let mut server = None;
    let location = match &arguments.uri {
        Some(uri) => uri::parse(uri)?,
        None => {
            let launched = Launched::start(&arguments.command, timeout, arguments.verbose)?;
            let address = launched.address.clone();
            server = Some(launched);
            uri::Location { address, export: arguments.export.clone() }
        }
    };
    let mut target = Target::new(location, timeout, arguments.seed);
    target.connect().map_err(text)?;
    let probed = target.probe();
    let could_open = probed.is_ok();
    if let Err(problem) = probed {
        let problem = format!("export {:?}: {}", target.export, text(problem));
        if let Some(server) = &mut server
            && let Some(status) = server.ended(CRASH_PATIENCE)
        {
            let end = server.early_end(&status, "before any rule was tried");
            return Err(format!("{end}; before that: {problem}"));
        }
        if target.is_denied() {
            return Err(problem);
        }
        eprintln!("nbd-conformance: {problem}");
    } else if target.usable() == 0 {
        let (export, block) = (&target.export, target.block());
        return Err(format!(
            "export {export:?}: shorter than a block of {block}: nothing to ask for"
        ));
    }
    let summary = report(arguments, &rules, &target, server.as_mut())?;
    Ok(match summary.failed_must {
        0 if could_open => ExitCode::SUCCESS,
        // Most rules were not tried.
        0 => ExitCode::from(2),
        _ => ExitCode::FAILURE,
    })
}

fn report(
    arguments: &Arguments,
    rules: &[&Rule],
    target: &Target,
    mut server: Option<&mut Launched>,
) -> Result<Summary, String> {
    let text = |error: io::Error| format!("standard output: {error}");
    let mut out = io::stdout().lock();
    let mut summary = Summary::default();
    let mut lines = Vec::new();
    for rule in rules {
        let line = match server.as_deref_mut() {
            Some(server) => Line::of_launched(rule, target, arguments.write, server)?,
            None => Line::of(rule, target, arguments.write),
        };
        summary.add(&line);
        if !arguments.json {
            line.write(&mut out).map_err(text)?;
        }
        lines.push(line);
    }
    write_end(arguments, &target.export, &lines, summary, &mut out).map_err(text)?;
    Ok(summary)
}

fn write_end(
    arguments: &Arguments,
    export: &str,
    lines: &[Line],
    summary: Summary,
    out: &mut impl Write,
) -> io::Result<()> {
    let server = match &arguments.uri {
        Some(uri) => uri.clone(),
        None => arguments.command.join(" "),
    };
    if arguments.json {
        let report = Report { server, export, rules: lines, summary };
        serde_json::to_writer_pretty(&mut *out, &report)?;
        return writeln!(out);
    }
    let Summary { passed, failed_must, failed_should, failed_may, skipped } = summary;
    writeln!(
        out,
        "{passed} passed, {failed_must} MUST failed, {failed_should} SHOULD failed, \
         {failed_may} MAY failed, {skipped} skipped: {server}"
    )
}

fn select(only: &[String]) -> Result<Vec<&'static Rule>, String> {
    let wanted = |name: &str, rule: &Rule| {
        rule.id == name || rule.id.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'))
    };
    for name in only {
        if !rules::all().any(|rule| wanted(name, rule)) {
            return Err(format!("no rule is called {name}; --list shows them"));
        }
    }
    let chosen = |rule: &&Rule| only.is_empty() || only.iter().any(|name| wanted(name, rule));
    Ok(rules::all().filter(chosen).collect())
}

fn list(rules: &[&Rule]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for Rule { id, section, level, writes, demand, .. } in rules {
        let writes = if *writes { " (--write)" } else { "" };
        writeln!(out, "{id:<32} {level:<6} [{section}] {demand}{writes}")?;
    }
    Ok(())
}

fn text(problem: Problem) -> String {
    match problem {
        Problem::Fail(text) | Problem::Skip(text) => text,
    }
}
