//! `towline df`: space and files of exports.

use crate::remote::{Remotes, flag};
use crate::report::{Outcome, Report};
use crate::text::human;
use clap::ArgAction;
use serde_json::json;
use std::io::{self, Write};
use std::process::ExitCode;
use towline_client::{StatFs, Url};

const EXAMPLES: &str = "\
Examples:
  towline df -h towline://host          all exports of a server
  towline df -i towline://host/scratch  files instead of bytes

Exit status: 0 all shown, 1 some could not be, 2 wrong usage.";

/// Arguments of `df`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, disable_help_flag = true)]
pub(crate) struct Args {
    /// Show sizes with units.
    #[arg(short, long)]
    human_readable: bool,
    /// Show files (inodes) instead of bytes.
    #[arg(short, long)]
    inodes: bool,
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
    /// Print help.
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
    /// Exports, paths in them, or servers to show all of their exports.
    #[arg(required = true, value_name = "URL")]
    urls: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("df");
    let remotes = Remotes::default();
    let mut rows = Vec::new();
    for text in &args.urls {
        for url in report.check(text, exports(&remotes, text)).unwrap_or_default() {
            let shown = url.to_string();
            let found = remotes.place_of(&url).and_then(|place| {
                // Other file systems may be mounted below the root of the export.
                Ok(place.base.open(place.path(), flag::PATH, 0)?.stat_fs()?)
            });
            rows.extend(report.check(&shown, found).map(|statfs| (shown, statfs)));
        }
    }
    let text = if args.json { json_lines(&rows) } else { table(&rows, args) };
    report.output(io::stdout().write_all(text.as_bytes()));
    report.status()
}

fn exports(remotes: &Remotes, text: &str) -> Outcome<Vec<Url>> {
    let (url, client) = remotes.server(text)?;
    if !url.export.is_empty() {
        return Ok(vec![url]);
    }
    let mut names = client.exports()?;
    names.sort_unstable();
    Ok(names.into_iter().map(|export| Url { export, ..url.clone() }).collect())
}

fn json_lines(rows: &[(String, StatFs)]) -> String {
    let line = |(url, s): &(String, StatFs)| {
        let object = json!({
            "url": url, "block_bytes": s.block_bytes, "blocks": s.blocks,
            "blocks_free": s.blocks_free, "blocks_available": s.blocks_available,
            "files": s.files, "files_free": s.files_free, "name_bytes_max": s.name_bytes_max,
        });
        format!("{object}\n")
    };
    rows.iter().map(line).collect()
}

/// Returns the table; as with df(1), nothing if there is no row.
fn table(rows: &[(String, StatFs)], args: &Args) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut cells = vec![if args.inodes {
        ["Inodes", "IUsed", "IFree", "IUse%", "Export"].map(str::to_owned)
    } else if args.human_readable {
        ["Size", "Used", "Avail", "Use%", "Export"].map(str::to_owned)
    } else {
        ["1K-blocks", "Used", "Available", "Use%", "Export"].map(str::to_owned)
    }];
    for (url, statfs) in rows {
        let (total, used, free) = amounts(statfs, args.inodes);
        let show = |n: u64| match (args.inodes, args.human_readable) {
            (_, true) => human(n),
            (true, false) => n.to_string(),
            (false, false) => n.div_ceil(1024).to_string(),
        };
        cells.push([show(total), show(used), show(free), percent(used, free), url.clone()]);
    }
    let width = |column: usize| cells.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2), width(3)];
    let line = |row: &[String; 5]| {
        let [a, b, c, d] = widths;
        format!("{:>a$} {:>b$} {:>c$} {:>d$} {}\n", row[0], row[1], row[2], row[3], row[4])
    };
    cells.iter().map(line).collect()
}

/// Total, used and free: bytes or files.
fn amounts(statfs: &StatFs, inodes: bool) -> (u64, u64, u64) {
    if inodes {
        let used = statfs.files.saturating_sub(statfs.files_free);
        return (statfs.files, used, statfs.files_free);
    }
    let bytes = |blocks: u64| blocks.saturating_mul(statfs.block_bytes);
    let used = statfs.blocks.saturating_sub(statfs.blocks_free);
    (bytes(statfs.blocks), bytes(used), bytes(statfs.blocks_available))
}

/// Computes the percentage as `df` does: of used plus available to this user, rounded up.
fn percent(used: u64, free: u64) -> String {
    let all = u128::from(used) + u128::from(free);
    if all == 0 { "-".to_owned() } else { format!("{}%", (u128::from(used) * 100).div_ceil(all)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_counted_as_df_does() {
        let statfs = StatFs {
            block_bytes: 1024,
            blocks: 100,
            blocks_free: 50,
            blocks_available: 45,
            ..StatFs::default()
        };
        assert_eq!(amounts(&statfs, false), (102_400, 51_200, 46_080));
        assert_eq!(percent(50, 45), "53%");
        assert_eq!(percent(0, 0), "-");
        assert_eq!(amounts(&statfs, true), (0, 0, 0));
    }
}
