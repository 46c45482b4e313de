//! `--report`: shows what was taken over and what slipped through.

use crate::report::note;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use towline_instance::notes::Note;
use towline_instance::program::Obstacle;
use towline_instance::{RECORD, State};

/// The output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// For people.
    Text,
    /// One JSON object.
    Json,
}

/// Maximum number of files that the text format names.
const FILES_MAX: usize = 20;

/// What a run did.
#[derive(Default)]
struct Summary {
    /// Processes by program.
    programs: BTreeMap<String, u64>,
    /// Those of them whose system calls were trapped.
    armed: BTreeMap<String, u64>,
    /// Calls of libc functions that were taken over, by name.
    functions: BTreeMap<String, u64>,
    /// System calls that were trapped and answered.
    answered: BTreeMap<String, u64>,
    /// Number of system calls that were trapped and passed on to the kernel.
    kernels: u64,
    /// Number of times that each file was opened.
    files: BTreeMap<String, u64>,
    slipped: BTreeMap<(Slip, String), u64>,
    /// Bytes read from the cache and put into it, if there is one.
    cached: Option<[u64; 2]>,
}

/// The kinds of things that slip through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Slip {
    Program(&'static str),
    Refused(&'static str),
    Thread,
    Untrapped,
}

impl Slip {
    fn kind(self) -> &'static str {
        match self {
            Self::Program(code) | Self::Refused(code) => code,
            Self::Thread => "thread-without-libc",
            Self::Untrapped => "no-trap",
        }
    }

    fn text(self) -> String {
        let what = |code| Obstacle::from_code(code).map_or_else(|| code.to_owned(), Obstacle::what);
        match self {
            Self::Program(code) => what(code),
            Self::Refused(code) => format!("{}; not started", what(code)),
            Self::Thread => {
                "made threads or processes without libc, whose own system calls are not answered"
                    .to_owned()
            }
            Self::Untrapped => "would have system calls without libc answered, but this kernel \
                                cannot trap them"
                .to_owned(),
        }
    }
}

/// Reads what the processes of a run recorded in its directory.
fn gather(directory: &Path) -> std::io::Result<Summary> {
    use std::os::unix::ffi::OsStrExt;
    let state = State::open(directory.as_os_str().as_bytes())?;
    // There is no record if no program started with the library.
    let record = std::fs::read(directory.join(RECORD)).unwrap_or_default();
    let mut summary = Summary::default();
    let mut functions = Vec::new();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let known = |code: &str| Obstacle::from_code(code).map_or("unknown", Obstacle::code);
    for note in record.split(|b| *b == b'\n').filter_map(Note::parse) {
        let (list, name) = match note {
            Note::Functions(names) => {
                functions = names;
                continue;
            }
            Note::Began { program } => (&mut summary.programs, text(&program)),
            Note::Armed { program } => (&mut summary.armed, text(&program)),
            // Told at once.
            Note::Lost { .. } => continue,
            Note::Opened { path, .. } => (&mut summary.files, text(&path)),
            Note::Refused { obstacle, program } => {
                summary.slip(Slip::Refused(known(&obstacle)), &program);
                continue;
            }
            Note::Unreached { obstacle, program } => {
                summary.slip(Slip::Program(known(&obstacle)), &program);
                continue;
            }
            Note::Thread { program } => {
                summary.slip(Slip::Thread, &program);
                continue;
            }
            Note::Untrapped { program } => {
                summary.slip(Slip::Untrapped, &program);
                continue;
            }
        };
        *list.entry(name).or_default() += 1;
    }
    summary.functions = counted(state.functions(), |at| functions.get(at).cloned());
    summary.answered =
        counted(state.trapped(), |number| Some(syscalls::Sysno::new(number)?.name().to_owned()));
    summary.kernels = state.passed().load(Ordering::Relaxed);
    if state.config().is_some_and(|config| !config.cache.is_empty()) {
        let bytes = |count: &AtomicU64| count.load(Ordering::Relaxed);
        summary.cached = Some([bytes(state.from_cache()), bytes(state.to_cache())]);
    }
    Ok(summary)
}

/// Returns the counts that are not zero, by name.
fn counted(counts: &[AtomicU64], name: impl Fn(usize) -> Option<String>) -> BTreeMap<String, u64> {
    let counts = counts.iter().map(|count| count.load(Ordering::Relaxed)).enumerate();
    let named = |at: usize| name(at).unwrap_or_else(|| format!("number {at}"));
    counts.filter(|(_, count)| *count > 0).map(|(at, count)| (named(at), count)).collect()
}

impl Summary {
    fn slip(&mut self, kind: Slip, program: &[u8]) {
        let program = String::from_utf8_lossy(program).into_owned();
        *self.slipped.entry((kind, program)).or_default() += 1;
    }

    fn json(&self) -> serde_json::Value {
        let programs: Vec<_> = self
            .programs
            .iter()
            .map(|(program, count)| {
                let trapped = self.armed.get(program).copied().unwrap_or(0);
                json!({ "program": program, "processes": count, "trapped": trapped })
            })
            .collect();
        let slipped: Vec<_> = self
            .slipped
            .iter()
            .map(|((slip, program), count)| {
                let started = !matches!(slip, Slip::Refused(_));
                json!({ "kind": slip.kind(), "program": program, "count": count,
                        "started": started, "text": slip.text() })
            })
            .collect();
        json!({
            "programs": programs,
            "functions": self.functions,
            "system_calls": { "answered": self.answered, "kernel": self.kernels },
            "files": self.files,
            "cache": self.cached.map(|[read, stored]| json!({ "read": read, "stored": stored })),
            "slipped": slipped,
        })
    }

    fn text(&self) -> String {
        let mut out = String::from("towline: run: report\n");
        let sum = |list: &BTreeMap<String, u64>| list.values().sum::<u64>();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "  processes: {} of {} programs; system calls without libc trapped in {}",
            sum(&self.programs),
            self.programs.len(),
            sum(&self.armed)
        );
        let _ = writeln!(out, "  libc calls intercepted: {}", sum(&self.functions));
        list(&mut out, &self.functions);
        let _ = writeln!(
            out,
            "  system calls without libc intercepted: {} ({} others passed on)",
            sum(&self.answered),
            self.kernels
        );
        list(&mut out, &self.answered);
        let files = &self.files;
        let _ = writeln!(out, "  remote files opened: {}, {} times", files.len(), sum(files));
        let mut most: Vec<_> = files.iter().collect();
        most.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        for (path, count) in most.iter().take(FILES_MAX) {
            let _ = writeln!(out, "    {count:>7}  {path}");
        }
        if most.len() > FILES_MAX {
            let more = most.len() - FILES_MAX;
            let _ = writeln!(out, "    and {more} more; --report=json lists all");
        }
        if let Some([read, stored]) = self.cached {
            let _ = writeln!(out, "  bytes read from the cache: {read}; put into it: {stored}");
        }
        if self.slipped.is_empty() {
            out.push_str("  nothing is known to have bypassed interception\n");
        } else {
            out.push_str("  slipped through:\n");
        }
        for ((slip, program), count) in &self.slipped {
            let _ = writeln!(out, "    {count:>7}  {program} {}", slip.text());
        }
        out
    }
}

fn list(out: &mut String, counts: &BTreeMap<String, u64>) {
    let mut most: Vec<_> = counts.iter().collect();
    most.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (name, count) in most {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "    {count:>7}  {name}");
    }
}

/// Prints the report to standard error.
pub(super) fn print(directory: &Path, format: Format) {
    match gather(directory) {
        Ok(summary) if format == Format::Json => note(summary.json()),
        Ok(summary) => summary.text().lines().for_each(note),
        Err(error) => log::warn!("no report: {error}"),
    }
}
