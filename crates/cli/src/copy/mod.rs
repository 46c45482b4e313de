//! `towline cp`: copies to, from and between servers.
//!
//! A file appears under its name only when it is complete: all data goes to a part beside the target that is
//! renamed at the end, of short files in one request. Nothing here changes a source.

mod attributes;
mod closing;
pub(crate) mod end;
mod file;
pub(crate) mod handle;
pub(crate) mod local;
mod part;
mod pieces;
mod short;
mod stamp;
mod tree;

use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::remote::{Place, Remotes};
use crate::report::{Failure, Outcome, Report, note};
use attributes::Wanted;
use clap::ValueEnum;
use end::{End, FileSystem, Status};
use file::{Files, Permits};
use part::NotParts;
use rustix::fs::Mode;
use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::ffi::OsString;
use std::io::{stderr, stdout};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use towline_client::{Errno, Priority, Url};
use tree::{Job, Tree};

const EXAMPLES: &str = "\
A file is written to .NAME.towline-part beside its place and renamed when it is complete. Holes
stay holes. If the target is an existing directory, the copies are made inside it.

Examples:
  towline cp -r ./tree towline://host/data/tree         to a server
  towline cp towline://host/data/a.iso .                from a server
  towline cp -r --resume ./big towline://host/data/     go on after an interruption
  towline cp -rp --verify towline://a/data/x towline://b/data/

Exit status: 0 all copied, 1 something was not, 2 wrong usage.";

/// What besides the bytes is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preserve {
    /// Permission bits.
    Mode,
    /// Times of access and modification.
    Times,
    /// User and group, where allowed.
    Owner,
    /// Hard links between the files copied.
    Links,
    /// Extended attributes.
    Xattr,
    /// All of these.
    All,
}

/// When servers take the requests of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Precedence {
    /// After those of all other clients, but at least one for each eight of theirs.
    Low,
    /// In turn with those of others.
    Normal,
}

/// Arguments of `cp`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = "towline cp [OPTIONS] SOURCE... TARGET")]
pub(crate) struct Args {
    /// Copy directories with all that is in them; symbolic links stay links.
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Like -r --preserve=all.
    #[arg(short, long)]
    archive: bool,
    /// Keep attributes: mode,times,owner unless given.
    #[arg(short, long, value_name = "WHAT", value_delimiter = ',', num_args = 0..,
        require_equals = true, default_missing_value = "mode,times,owner")]
    preserve: Vec<Preserve>,
    /// Show progress also where there is no terminal, a line a second.
    #[arg(long)]
    progress: bool,
    /// Show no progress.
    #[arg(short, long, conflicts_with = "progress")]
    quiet: bool,
    /// Skip files whose copy has the same size and time and go on with incomplete ones; keeps
    /// times.
    #[arg(long)]
    resume: bool,
    /// Read every copy back and compare.
    #[arg(long)]
    verify: bool,
    /// Files copied at once.
    #[arg(short, long, value_name = "N", default_value_t = 16,
        value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    /// When the servers take the requests of this copy.
    #[arg(long, value_enum, value_name = "WHICH", default_value = "normal")]
    priority: Precedence,
    /// Sources, then the target: URLs or local paths, at least one side remote.
    #[arg(required = true, num_args = 2.., value_name = "PATH")]
    paths: Vec<OsString>,
}

/// Runs the command.
pub(crate) fn run(mut args: Args) -> ExitCode {
    let remote = |path: &OsString| path.to_str().is_some_and(Url::looks_like);
    if !args.paths.iter().any(remote) {
        note("towline: cp: source and target are local: use cp(1), or name one side by URL");
        return ExitCode::from(2);
    }
    if args.archive {
        args.recursive = true;
        args.preserve.push(Preserve::All);
    }
    if args.resume {
        args.preserve.push(Preserve::Times);
    }
    crate::descriptors::raise_limit();
    let report = Arc::new(Report::new("cp"));
    let priority = match args.priority {
        Precedence::Low => Priority::Low,
        Precedence::Normal => Priority::Normal,
    };
    let wanted = Wanted::new(&args.preserve, umask());
    let mut remotes = Remotes::default();
    remotes.priority = priority;
    // Costs the server one system call for each file, and saves a round trip.
    remotes.tell_xattrs = wanted.mode || wanted.xattr;
    let files = Files {
        wanted,
        resume: args.resume,
        verify: args.verify,
        run: run_number(),
        report: report.clone(),
        progress: Progress::new(args.progress, args.quiet),
        interrupt: Interrupt::new(
            "towline: cp: stopped: partial copies may remain; repeat with --resume, or remove them",
        ),
        large: Permits::default(),
        not_parts: NotParts::default(),
        met: AtomicBool::new(false),
        refused: AtomicBool::new(false),
    };
    if let Some(bar) = files.progress.bar() {
        report.print_above(bar);
    }
    if let Some(jobs) = plan(&args, &remotes, &report) {
        Tree::new(&files, &report, args.recursive).run(jobs, args.jobs.into());
    }
    files.progress.finish();
    if files.interrupt.came() {
        report.remark("interrupted");
        files.interrupt.end();
    }
    report.status()
}

fn umask() -> u32 {
    // The mask can only be read by setting it, which is safe while there is no other thread.
    let mask = rustix::process::umask(Mode::empty());
    rustix::process::umask(mask);
    mask.as_raw_mode()
}

fn run_number() -> u32 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let nanoseconds = since.map_or(0, |since| since.subsec_nanos());
    std::process::id().rotate_left(16) ^ nanoseconds
}

/// Returns what to copy where, as lists of jobs to run one after the other. `None` if nothing can be copied.
fn plan(args: &Args, remotes: &Remotes, report: &Report) -> Option<Vec<Vec<Job>>> {
    let (target, sources) = args.paths.split_last()?;
    let shown = target.to_string_lossy();
    let target = report.check(&shown, End::parse(remotes, target))?;
    let (target, directory) = report.check(&target, look_at(remotes, target.clone()))?;
    if sources.len() > 1 && directory.is_none() {
        report.error(
            &target,
            Failure::from(Errno::ENOTDIR).with("several sources need a directory as target"),
        );
        return None;
    }
    let mut lists: Vec<Vec<Job>> = Vec::new();
    let mut taken = HashMap::with_capacity(sources.len());
    let mut named = HashSet::with_capacity(sources.len());
    for source in sources {
        let shown = source.to_string_lossy();
        if !named.insert(source) {
            report.warning(&shown, "named more than once");
            continue;
        }
        let job = End::parse(remotes, source)
            .and_then(|source| job(remotes, source, &target, directory.is_some(), args.recursive))
            .and_then(|job| Ok((take(&mut taken, &job, &target, directory)?, job)));
        let Some((is_together, job)) = report.check(&shown, job) else { continue };
        match lists.last_mut() {
            Some(last) if is_together && !last.first().is_some_and(is_nameless) => last.push(job),
            _ => lists.push(vec![job]),
        }
    }
    Some(lists)
}

/// Looks at the target. Returns it without a link that leads to a directory, and the directory's status.
fn look_at(remotes: &Remotes, target: End) -> Outcome<(End, Option<Status>)> {
    let mut there = target.status_if_any(false)?;
    let is_link = there.is_some_and(|there| there.attr.is_symlink());
    if is_link {
        there = target.status_if_any(true)?;
    }
    let directory = there.filter(|there| there.attr.is_directory());
    if directory.is_some_and(|there| is_closed_stream(&target, &there)) {
        return Err(Errno::EBADF.into());
    }
    match is_link && directory.is_some() {
        true => Ok((target.resolved(|place| root(remotes, place))?, directory)),
        false => Ok((target, directory)),
    }
}

/// Returns true for `/dev/stdout` and the like if the stream is closed: a directory is in its place then
/// (`launch/system.rs`).
fn is_closed_stream(target: &End, there: &Status) -> bool {
    let same = |stream: Outcome<Status>| stream.is_ok_and(|s| s.identity() == there.identity());
    target.is_local()
        && target.status(false).is_ok_and(|link| link.attr.is_symlink())
        && (same(local::status_of_file(stdout())) || same(local::status_of_file(stderr())))
}

/// Notes that a job takes its place in the target, which is this directory. Returns true if it may be done together
/// with those before it. Only directories may share a place, one after the other: of anything else one copy would
/// replace the other.
fn take(
    taken: &mut HashMap<((FileSystem, u64), Vec<u8>), bool>,
    job: &Job,
    target: &End,
    directory: Option<Status>,
) -> Outcome<bool> {
    // What is copied without its own name may hold the names of other sources.
    let Some(directory) = directory.filter(|_| !is_nameless(job)) else { return Ok(false) };
    let mut directory = directory.identity();
    let parent = job.target().sibling(b".")?;
    if parent.to_string() != target.child(b".").to_string() {
        // A link led there; it may have led back to the same directory.
        directory = parent.status(true)?.identity();
    }
    match taken.entry((directory, job.target().name().to_vec())) {
        Entry::Vacant(place) => {
            place.insert(job.is_directory());
            Ok(true)
        }
        Entry::Occupied(place) if *place.get() && job.is_directory() => Ok(false),
        Entry::Occupied(_) => {
            let place = job.target();
            Err(Failure::new(format!("not copied: another source goes to {place}, too")))
        }
    }
}

/// Returns true if this copies a directory without its own name.
fn is_nameless(job: &Job) -> bool {
    inner_name(job.source().name()).is_none()
}

fn job(remotes: &Remotes, source: End, target: &End, into: bool, recursive: bool) -> Outcome<Job> {
    if source.is_local() && target.is_local() {
        return Err(Failure::new("source and target are local: use cp(1)"));
    }
    let status = source.status(!recursive)?;
    if status.attr.is_directory() && !recursive {
        return Err(Failure::new("is a directory, omitted: use -r"));
    }
    let mut target = target.clone();
    if into {
        target = match inner_name(source.name()) {
            Some(name) => target.child(name),
            None => target,
        };
    } else if target.must_be_directory() && !status.attr.is_directory() {
        return Err(Failure::from(Errno::ENOTDIR).about(&target));
    }
    if !status.attr.is_directory() && !status.attr.is_symlink() {
        let shown = target.clone();
        let root = |place: &Place| root(remotes, place);
        target = target.resolved(root).map_err(|failure| failure.about(&shown))?;
    }
    // The name of a part is longer.
    let target = target.clone().parent_shortened().map_err(|failure| failure.about(&target))?;
    Ok(Job::top(source, target, status))
}

/// Returns the name that a copy gets inside a directory; `None` if its contents go directly into that directory.
fn inner_name(source: &[u8]) -> Option<&[u8]> {
    if source.is_empty() || source == b"." || source == b".." { None } else { Some(source) }
}

fn root(remotes: &Remotes, place: &Place) -> Outcome<Place> {
    let text = place.to_string();
    let url = Url::parse(&text).map_err(Failure::new)?;
    remotes.place_of(&Url { path: Vec::new(), ..url })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Cli::try_parse_from(format!("cp {line}").split(' ')).map(|cli| cli.args)
    }

    #[test]
    fn arguments_are_those_of_cp() {
        let default = [Preserve::Mode, Preserve::Times, Preserve::Owner];
        for line in ["-p -r a b", "-rp a b", "-pr a b", "--preserve -r a b"] {
            let args = parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert_eq!(args.preserve, default, "{line}");
            assert!(args.recursive && args.paths == ["a", "b"], "{line}");
        }
        let args = parse("--preserve=links,xattr a b c").unwrap();
        assert_eq!(args.preserve, [Preserve::Links, Preserve::Xattr]);
        assert_eq!(args.paths.len(), 3);
        assert!(parse("a b").unwrap().preserve.is_empty());
        for wrong in ["a", "--jobs 0 a b", "--preserve=what a b", "-q --progress a b"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_inside_a_directory() {
        assert_eq!(inner_name(b"a"), Some(&b"a"[..]));
        assert_eq!(inner_name(b"."), None);
        assert_eq!(inner_name(b".."), None);
        assert_eq!(inner_name(b""), None);
    }
}
