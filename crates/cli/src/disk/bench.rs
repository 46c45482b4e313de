//! `towline disk bench`.

use super::end;
use crate::bench::disk::{Asked, On, Requests, check, put};
use crate::bench::nbd_client::{Order, Place};
use crate::report::{Failure, Outcome};
use crate::serve::parse_bytes;
use crate::text::human;
use serde_json::Value;
use towline_attach::nbd::Source;
use towline_client::Url;

const EXAMPLES: &str = "\
Examples:
  towline disk bench towline://host/vm1                          reads one after the other
  towline disk bench --random --depth 32 nbd://host/vm1
  towline disk bench --write --span 1G --size 64K towline://host/vm1   OVERWRITES THE FIRST GIB

Exit status: 0 all well, 1 an operation failed, 2 wrong usage.";

/// Arguments of `disk bench`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(flatten)]
    requests: Requests,
    /// Only so many bytes from the beginning of the disk; unless given, all of it.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    span: Option<u64>,
    /// How long.
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    secs: f64,
    /// One JSON object.
    #[arg(long)]
    json: bool,
    /// A disk of a Towline server or of any NBD server.
    pub(super) disk: String,
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Outcome<String> {
    let (url, place, source);
    let on = if Url::looks_like(&args.disk) {
        url = Url::parse(&args.disk).map_err(Failure::new)?;
        end::named(&url)?;
        On::Towline(&url, args.requests.depth as u32 / 4)
    } else if Source::looks_like(&args.disk) {
        source = Source::parse(&args.disk).map_err(Failure::new)?;
        place = source.address().parse::<Place>().map_err(Failure::new)?;
        On::Nbd(&place, source.name(), Order::Ascending)
    } else {
        return Err(Failure::new("for a local file or device use fio(1)"));
    };
    let span = args.span.unwrap_or(u64::MAX);
    let asked = Asked { requests: &args.requests, threads: None, span, secs: args.secs };
    check(&on, &asked).map_err(Failure::usage)?;
    let found = put(&on, &asked, |_| Ok(())).map_err(Failure::new)?;
    Ok(if args.json { format!("{found}\n") } else { text(&found, args.requests.write) })
}

fn text(found: &Value, writes: bool) -> String {
    let number = |key: &str| found[key].as_f64().unwrap_or_default();
    format!(
        "{}: {:.0} per second, {}/s\nlatency: {:.0} us (median), {:.0} us (99th percentile)\n",
        if writes { "writes" } else { "reads" },
        number("ops") / number("secs").max(1e-9),
        human(number("bytes_per_s") as u64),
        number("p50_us"),
        number("p99_us"),
    )
}
