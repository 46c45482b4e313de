//! `towline disk map`.

use super::end::{self, Content, End, Named};
use crate::remote::Remotes;
use crate::report::{Failure, Outcome};
use crate::text::human;
use serde_json::json;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::Range;
use towline_client::ExtentKind;

const EXAMPLES: &str = "\
Examples:
  towline disk map towline://host/vm1
  towline disk map --totals img.raw                            how much is allocated
  towline disk map --written --json towline://host/vm1         for an incremental backup

Exit status: 0 all well, 1 an operation failed, 2 wrong usage.";

/// Arguments of `disk map`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    /// Only the sum of each kind.
    #[arg(long)]
    totals: bool,
    /// What was written since the server began to serve it, not what is allocated.
    #[arg(long)]
    written: bool,
    /// A disk.
    #[arg(value_name = "DISK")]
    pub(super) disk: OsString,
}

/// Runs the command.
pub(super) fn run(args: &Args, remotes: &Remotes) -> Outcome<String> {
    let rows = if args.written { written(args, remotes)? } else { allocated(args, remotes)? };
    let mut out = String::new();
    if args.totals {
        let size = rows.last().map_or(0, |(range, _)| range.end);
        let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
        for (range, kind) in &rows {
            *sums.entry(*kind).or_default() += range.end - range.start;
        }
        for (kind, sum) in sums {
            let percent = sum as f64 * 100.0 / size as f64;
            out += &match args.json {
                true => format!("{}\n", json!({"type": kind, "length": sum})),
                false => format!("{sum:>16} {:>6} {percent:>5.1}% {kind}\n", human(sum)),
            };
        }
        return Ok(out);
    }
    for (Range { start, end }, kind) in rows {
        let length = end - start;
        out += &match args.json {
            true => format!("{}\n", json!({"offset": start, "length": length, "type": kind})),
            false => format!("{start:>16} {length:>16} {kind}\n"),
        };
    }
    Ok(out)
}

fn allocated(args: &Args, remotes: &Remotes) -> Outcome<Vec<(Range<u64>, &'static str)>> {
    let end = End::open(remotes, &args.disk, false, false)?;
    let mut rows = Vec::new();
    if !end.extents(|range, content: Content| rows.push((range, content.name())))? {
        return Err(Failure::new("this NBD server does not report allocation"));
    }
    Ok(rows)
}

fn written(args: &Args, remotes: &Remotes) -> Outcome<Vec<(Range<u64>, &'static str)>> {
    let Named::Towline(text) = Named::of(&args.disk) else {
        return Err(Failure::new("only a Towline server reports what was written"));
    };
    let disk = end::remote(remotes, text)?;
    let (mut rows, mut at): (Vec<(Range<u64>, _)>, u64) = (Vec::new(), 0);
    while at < disk.size() {
        for extent in disk.extents(at, disk.size() - at, ExtentKind::Written)? {
            let kind = if extent.flags == 0 { "unchanged" } else { "written" };
            let next = at + extent.length;
            match rows.last_mut() {
                Some((range, same)) if *same == kind => range.end = next,
                _ => rows.push((at..next, kind)),
            }
            at = next;
        }
    }
    Ok(rows)
}
