//! `towline check`: checks whether programs work under `towline run`.

mod calls;
mod examine;

pub(crate) use examine::{Verdict, examine, find};

use crate::report::{Outcome, Report};
use calls::Calls;
use serde_json::json;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use towline_instance::program::Obstacle;

const EXAMPLES: &str = "\
A program without a slash in its name is looked for in PATH. Examined are the program and, of a
script, what runs it; not the libraries that they load, nor the programs that they start.

Examples:
  towline check tar /usr/local/bin/tool
  towline check --json ./script.sh

Exit status: 0 all work, 1 some do not or cannot be examined, 2 wrong usage.";

/// Arguments of `check`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
    /// Programs, by path or by name.
    #[arg(required = true, value_name = "PROGRAM")]
    programs: Vec<OsString>,
}

/// The result for one program.
struct Finding {
    name: String,
    verdict: Verdict,
    calls: Calls,
    /// The library cannot be loaded into it, but a Towline process can host it.
    is_hosted: bool,
    works: bool,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("check");
    let has_trap = towline_instance::has_trap();
    let mut all_work = true;
    let mut objects = Vec::new();
    for program in &args.programs {
        let name = program.to_string_lossy().into_owned();
        let Some(finding) = report.check(&name, check(program, name.clone(), has_trap)) else {
            all_work = false;
            continue;
        };
        all_work &= finding.works;
        if args.json {
            objects.push(as_json(&finding, has_trap));
        } else {
            report.output(io::stdout().write_all(as_text(&finding, has_trap).as_bytes()));
        }
    }
    if args.json {
        let text = format!("{}\n", serde_json::Value::Array(objects));
        report.output(io::stdout().write_all(text.as_bytes()));
    }
    if all_work { report.status() } else { ExitCode::FAILURE }
}

fn check(program: &OsString, name: String, has_trap: bool) -> Outcome<Finding> {
    let path = find(program).ok_or(towline_client::Errno::ENOENT)?;
    let verdict = examine(&path)?;
    let binary = verdict.run_by.last().unwrap_or(&path);
    let calls = match verdict.obstacle {
        None if verdict.is_binary => calls::of(&std::fs::read(binary)?),
        _ => Calls::default(),
    };
    let can_be_hosted = |(obstacle, _): &(Obstacle, PathBuf)| obstacle.can_be_hosted();
    let is_hosted =
        verdict.obstacle.as_ref().is_some_and(can_be_hosted) && towline_instance::can_host();
    let works = is_hosted || (verdict.obstacle.is_none() && (calls.sites == 0 || has_trap));
    Ok(Finding { name, verdict, calls, is_hosted, works })
}

/// Returns what the user should know about a program that works, or why it does not.
fn remarks(finding: &Finding, has_trap: bool) -> Vec<String> {
    let Finding { verdict, calls, .. } = finding;
    let mut remarks = Vec::new();
    if !verdict.run_by.is_empty() {
        let by: Vec<_> = verdict.run_by.iter().map(|by| by.to_string_lossy()).collect();
        remarks.push(format!("a script run by {}", by.join(" and then ")));
    } else if !verdict.is_binary && verdict.obstacle.is_none() {
        remarks.push(
            "neither a binary nor a script with an interpreter line: shells run it".to_owned(),
        );
    }
    if let Some((obstacle, program)) = &verdict.obstacle {
        let program = program.display();
        if finding.is_hosted {
            remarks.push(format!(
                "{program} {}: it is hosted, so that each of its system calls is trapped, which \
                 costs some 1 us",
                obstacle.is()
            ));
        } else {
            remarks.push(format!("{program} {}", obstacle.what()));
            remarks.push(obstacle.instead().to_owned());
        }
    }
    if calls.sites > 0 {
        let names: Vec<&str> = calls.names.iter().map(String::as_str).collect();
        let mut text = format!("it makes system calls without libc (at {}", calls.sites);
        if !names.is_empty() {
            let _ = write!(text, "; {}", names.join(", "));
        }
        text.push(')');
        text.push_str(if has_trap {
            ": they are trapped, which costs about 3 us each"
        } else {
            ": this kernel cannot trap them (that needs x86-64 and Linux 5.11), so that they find \
             no remote files"
        });
        remarks.push(text);
    }
    if calls.uring {
        remarks.push("it can use io_uring, which is refused: it must fall back".to_owned());
    }
    remarks
}

fn as_text(finding: &Finding, has_trap: bool) -> String {
    let works = if finding.works { "works" } else { "does not work" };
    let mut text = format!("{}: {works}\n", finding.name);
    for remark in remarks(finding, has_trap) {
        let _ = writeln!(text, "  {remark}");
    }
    text
}

fn as_json(finding: &Finding, has_trap: bool) -> serde_json::Value {
    let Finding { name, verdict, calls, is_hosted, works } = finding;
    let shown = |path: &PathBuf| path.to_string_lossy().into_owned();
    json!({
        "program": name,
        "path": shown(&verdict.path),
        "works": works,
        "run_by": verdict.run_by.iter().map(shown).collect::<Vec<_>>(),
        "hosted": is_hosted,
        "obstacle": verdict.obstacle.as_ref().map(|(obstacle, _)| obstacle.code()),
        "system_calls": { "places": calls.sites, "names": calls.names, "trapped": has_trap },
        "io_uring": calls.uring,
        "remarks": remarks(finding, has_trap),
    })
}
