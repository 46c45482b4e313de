//! `towline disk copy`: opens source and target, and resumes interrupted copies.

use super::end::{End, Named};
use super::journal::{Journal, Overwritten, forget_others, full_name, write_journal};
use super::noted::{Left, Piece, Title};
use super::pieces::Plan;
use super::stream::Output;
use super::transfer::{Earlier, Source, Target, Transfer};
use super::verify;
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::remote::Remotes;
use crate::report::{Failure, Outcome, Report};
use serde_json::json;
use std::ffi::{OsStr, OsString};
use std::sync::Mutex;
use std::time::Instant;
use towline_client::Errno;

/// Name of standard input and of standard output.
const STREAM: &str = "-";

const EXAMPLES: &str = "\
Examples:
  towline disk copy --verify img.raw towline://host/vm1        holes stay holes
  towline disk copy --resume nbd://host/vm1 vm1.raw            goes on where it was interrupted
  towline disk copy towline://host/vm1 - | zstd >vm1.zst       as a stream
  zstd -d <vm1.zst | towline disk copy - towline://host/vm1    and back

Exit status: 0 all well, 1 an operation failed, 2 wrong usage.";

/// Arguments of `disk copy`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Go on where an earlier copy from there to here was interrupted.
    #[arg(long)]
    resume: bool,
    /// Read the copy back afterwards and compare checksums; data also carries them on its way.
    #[arg(long)]
    verify: bool,
    /// Without a terminal, print a line each second and a summary.
    #[arg(long)]
    progress: bool,
    /// Show no progress.
    #[arg(short, long, conflicts_with = "progress")]
    quiet: bool,
    /// Print what was done as a JSON object.
    #[arg(long)]
    json: bool,
    /// Pieces of 1 MiB under way at once.
    #[arg(short, long, value_name = "N", default_value_t = 8,
        value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,
    /// A disk, or - for standard input.
    pub(super) source: OsString,
    /// A disk, or - for standard output.
    target: OsString,
}

/// Runs the command. If a signal interrupts it, ends the process as the signal would have done.
pub(super) fn run(args: &Args, remotes: &Remotes, report: &Report) -> Outcome<String> {
    check(args)?;
    let interrupt = Interrupt::new("towline: disk: stopped: the copy is not complete");
    match copy(args, remotes, report, &interrupt) {
        Err(failure) if interrupt.came() => {
            report.check(args.target.display(), Err::<(), _>(failure));
            interrupt.end();
            Ok(String::new())
        }
        copied => copied,
    }
}

fn copy(args: &Args, remotes: &Remotes, report: &Report, interrupt: &Interrupt) -> Outcome<String> {
    let started = Instant::now();
    let progress = Progress::new(args.progress, args.quiet);
    if let Some(bar) = progress.bar() {
        report.print_above(bar);
    }
    let source = match &args.source {
        name if name == STREAM => None,
        name => Some(End::open(remotes, name, false, args.verify)?),
    };
    progress.found(0, source.as_ref().map_or(0, End::size));
    let stamp = source.as_ref().map(End::stamp).transpose()?;
    let Prepared { target, journal, earlier } = match &args.target {
        name if name == STREAM => {
            Prepared { target: Target::Output(Output::default()), ..Prepared::default() }
        }
        _ => prepare(args, remotes, report, source.as_ref())?,
    };
    let from = match source {
        Some(disk) => Source::Disk(Mutex::new(Plan::of(&disk)?), disk),
        None => Source::Input(Mutex::new(Some(0))),
    };
    let mut transfer = Transfer::new(from, target, journal, earlier, &progress);
    let resumes = transfer.has_journal();
    let done = transfer.run(args.jobs.into(), interrupt);
    let sums = match done {
        Ok(sums) => sums,
        Err(failure) => {
            progress.finish();
            let more = if resumes { "repeat with --resume to continue" } else { "" };
            return Err(if more.is_empty() { failure } else { failure.with(more) });
        }
    };
    if let (Source::Disk(_, disk), Some(before)) = (&transfer.source, &stamp)
        && before.sure
        && disk.stamp()? != *before
    {
        report.warning(disk.name(), "changed while it was copied");
    }
    let ended = match &transfer.target {
        Target::Disk { end, .. } => {
            let jobs = args.jobs.into();
            let verified = if args.verify { verify::run(end, &sums, jobs) } else { Ok(()) };
            let length = sums.last().map_or(0, |last| last.offset + last.length);
            verified.and_then(|()| end.set_length(length))
        }
        Target::Output(_) => Ok(()),
    };
    // A copy that differs must not be resumed.
    transfer.forget_journal();
    progress.finish();
    ended?;
    Ok(if args.json { summary(args, &transfer, &sums, started) } else { String::new() })
}

fn check(args: &Args) -> Outcome<()> {
    let streams = args.source == STREAM || args.target == STREAM;
    if args.resume && streams {
        return Err(Failure::usage("a stream cannot be resumed: --resume needs two disks"));
    }
    if args.target == STREAM && (args.verify || args.json) {
        return Err(Failure::usage("--verify and --json cannot be used with standard output"));
    }
    Ok(())
}

fn summary(args: &Args, transfer: &Transfer<'_>, sums: &[Piece], started: Instant) -> String {
    let count = |data: bool| -> u64 {
        sums.iter().filter(|piece| piece.sum.is_some() == data).map(|piece| piece.length).sum()
    };
    let line = json!({
        "bytes": count(true) + count(false),
        "data": count(true),
        "zeroes": count(false),
        "from_earlier": transfer.taken_over(),
        "copied_again": transfer.copied_again(),
        "verified": args.verify,
        "seconds": started.elapsed().as_secs_f64(),
    });
    format!("{line}\n")
}

/// A writable target, and what an earlier copy left in it.
#[derive(Default)]
struct Prepared {
    target: Target,
    journal: Option<Journal>,
    earlier: Earlier,
}

/// Returns true if the name is that of a local file, existing or to be created.
fn is_file(name: &OsStr) -> bool {
    matches!(Named::of(name), Named::File(path)
        if std::fs::metadata(path).ok().is_none_or(|found| found.is_file()))
}

fn prepare(
    args: &Args,
    remotes: &Remotes,
    report: &Report,
    source: Option<&End>,
) -> Outcome<Prepared> {
    let (name, is_file) = (&args.target, is_file(&args.target));
    let there = if is_file { End::open(remotes, name, false, false).ok() } else { None };
    if let (Some(source), Some(there)) = (source, &there)
        && source.is_same(there)?
    {
        return Err(same_disk());
    }
    let place = there.map(|there| overwritten(&there)).transpose()?;
    let mut journal = match source {
        Some(_) => open_journal(args)?,
        None => None,
    };
    let open = || -> Outcome<End> {
        let end = End::open(remotes, name, true, args.verify)?;
        if let Some(source) = source {
            if source.is_same(&end)? {
                return Err(same_disk());
            }
            // The last block is filled with zeroes after the end of the source.
            let needed = source.size().next_multiple_of(end.block());
            if end.size() < needed && !is_file {
                return Err(Failure::new(format!(
                    "{} bytes are not enough for {needed}",
                    end.size()
                ))
                .about(name.display()));
            }
        }
        Ok(end)
    };
    let mut found = None;
    let title = |target: &End| -> Outcome<Option<Title>> {
        let Some(source) = source else { return Ok(None) };
        Ok(Some(Title {
            source: full_name(&args.source),
            source_is: source.stamp()?,
            target: full_name(name),
            target_is: target.place()?,
        }))
    };
    let left = match args.resume.then(&open).transpose() {
        // Nothing is left in a target that is not there.
        Err(failure) if is_file && failure.is(Errno::ENOENT) => None,
        // Otherwise what was noted stays for the next attempt.
        left => left?,
    };
    if let (Some(journal), Some(end)) = (&mut journal, left)
        && let Some(title) = title(&end)?
    {
        match journal.read(&title)? {
            Left::Pieces(pieces) => found = Some((end, title, pieces)),
            Left::Other(what) => {
                report
                    .remark(format_args!("the {what} has changed since: copying everything again"));
            }
            Left::Nothing => {}
        }
    }
    if let Some((end, title, pieces)) = found {
        // Before the journal is begun, after which it may be given up.
        let is_doubtful = journal.as_ref().is_some_and(Journal::is_doubtful);
        write_journal(&mut journal, |journal| journal.begin(&title, &pieces))?;
        let (source_sure, target_sure) = title.sure();
        let earlier = Earlier { pieces, sure: (source_sure, target_sure && !is_doubtful) };
        forget_others(journal.as_ref(), &overwritten(&end)?)?;
        let target = Target::Disk { end, holes_from: u64::MAX };
        return Ok(Prepared { target, journal, earlier });
    }
    // Before the target is changed, so that a copy that is killed right after that cannot be resumed. But only
    // once the target is open, so that one that cannot be opened costs an earlier copy nothing.
    let mut forget = |place: Option<&Overwritten>| -> Outcome<()> {
        if let Some(journal) = &mut journal {
            journal.clear()?;
        }
        place.map_or(Ok(()), |place| forget_others(journal.as_ref(), place))
    };
    let (end, holes_from) = if is_file {
        // The length of a stream is unknown, so the file grows with it. Otherwise it is too long until all is
        // copied, so that what a killed copy leaves is not taken for all.
        let length = source.map(|source| source.size() + 1);
        End::create(name, length, || forget(place.as_ref()))?
    } else {
        let end = open()?;
        forget(Some(&overwritten(&end)?))?;
        (end, u64::MAX)
    };
    if let Some(title) = title(&end)? {
        write_journal(&mut journal, |journal| journal.begin(&title, &[]))?;
    }
    let target = Target::Disk { end, holes_from };
    Ok(Prepared { target, journal, earlier: Earlier::default() })
}

fn overwritten(end: &End) -> Outcome<Overwritten> {
    Ok(Overwritten { place: end.place()?, of_server: end.place_of_server() })
}

/// Opens the journal. Without one the copy goes on, unless it is to resume an earlier one.
fn open_journal(args: &Args) -> Outcome<Option<Journal>> {
    match Journal::open(&full_name(&args.source), &full_name(&args.target)) {
        Ok(journal) => Ok(Some(journal)),
        Err(failure) if args.resume || failure.is(Errno::EBUSY) => Err(failure),
        Err(failure) => {
            log::info!("this copy cannot be resumed: {failure}");
            Ok(None)
        }
    }
}

fn same_disk() -> Failure {
    Failure::new("source and target are the same disk")
}
