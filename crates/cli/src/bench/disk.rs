//! `towline bench disk`: puts a load on a disk of a Towline server or any NBD server, or runs the experiments
//! of the gmblock paper.

use super::disk_client::DiskClient;
use super::nbd_client::{Client, Load, Order, Outcome, Place};
use super::threads::at_once;
use super::{paper, processor, several};
use crate::report::say;
use crate::serve::parse_bytes;
use clap::ArgGroup;
use std::fmt::Display;
use std::time::{Duration, Instant};
use towline_client::Url;

/// Arguments that apply only to a load, and only to the experiments. `--span` and `--secs` apply to both.
const OF_A_LOAD: [&str; 10] = [
    "export",
    "write",
    "random",
    "size",
    "depth",
    "clients",
    "coalesce",
    "structured",
    "threads",
    "pin",
];
const OF_EXPERIMENTS: [&str; 8] =
    ["dir", "sizes", "outstanding", "rounds", "disks", "fragments", "plot", "json"];

const EXAMPLES: &str = "\
Examples:
  towline bench disk --nbd 127.0.0.1:10809 --export img --size 4K --depth 32 --random
  towline bench disk --server towline://127.0.0.1/img --size 4K --depth 32 --random
  towline bench disk --paper --dir /mnt/disk --plot paper.svg --json paper.json

Exit status: 0 measured, 1 an operation failed or a value is beyond its limits, 2 wrong usage.";

/// Arguments of `bench disk`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
#[command(group = ArgGroup::new("what").args(["paper", "nbd", "server"]).required(true))]
pub(super) struct Args {
    /// Run the experiments of the gmblock paper: bandwidth and latency by data path, request size and number
    /// of requests, over NBD, and how much a busy server slows down its neighbours.
    #[arg(long, conflicts_with_all = OF_A_LOAD)]
    paper: bool,
    /// Put a load on this NBD server: HOST:PORT or unix:///PATH.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "coalesce", conflicts_with_all = OF_EXPERIMENTS)]
    nbd: Option<Place>,
    /// Put a load on this disk of a Towline server, over a Towline session.
    #[arg(long, value_name = "URL", conflicts_with_all = ["export", "structured", "threads"],
          conflicts_with_all = OF_EXPERIMENTS)]
    server: Option<String>,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    experiments: paper::Args,
}

#[derive(clap::Args)]
#[group(skip)]
struct LoadArgs {
    /// With --nbd: name of the disk.
    #[arg(long, default_value = "")]
    export: String,
    #[command(flatten)]
    requests: Requests,
    /// With --server: requests under way that may wait to be sent together; default: a quarter of --depth.
    #[arg(long, value_name = "N")]
    coalesce: Option<u32>,
    /// With --nbd: use structured replies, which may come in pieces and in any order.
    #[arg(long)]
    structured: bool,
    /// With --nbd: threads that share the connections; default: one for each connection.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// For a load: run on this processor.
    #[arg(long, value_name = "N")]
    pin: Option<usize>,
}

/// The requests of a load: arguments of this command and of `disk bench`.
#[derive(clap::Args)]
#[group(skip)]
pub(crate) struct Requests {
    /// For a load: write instead of reading: OVERWRITES THE CONTENTS OF THE DISK.
    #[arg(long)]
    pub(crate) write: bool,
    /// For a load: use random offsets instead of sequential ones.
    #[arg(long)]
    random: bool,
    /// For a load: bytes of each request.
    #[arg(long, value_parser = parse_bytes, default_value = "4K")]
    size: u64,
    /// For a load: requests under way on each connection.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) depth: usize,
    /// For a load: connections, each with its own thread by default.
    #[arg(long, value_name = "N", default_value_t = 1)]
    clients: usize,
}

/// A disk to put a load on.
pub(crate) enum On<'a> {
    /// A disk of any NBD server: the server's address, the name of the disk and the order in which pieces of
    /// reads may come.
    Nbd(&'a Place, &'a str, Order),
    /// A disk of a Towline server, and how many requests may wait to be sent together.
    Towline(&'a Url, u32),
}

impl On<'_> {
    /// Returns the most bytes that a request may have.
    fn size_max(&self) -> u64 {
        match self {
            Self::Nbd(..) => 32 << 20,
            Self::Towline(..) => 8 << 20,
        }
    }
}

impl Display for On<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nbd(place, ..) => place.fmt(f),
            Self::Towline(url, _) => url.fmt(f),
        }
    }
}

/// What to request from a disk.
pub(crate) struct Asked<'a> {
    pub(crate) requests: &'a Requests,
    /// Threads that share the connections to an NBD server; `None`: one for each connection.
    pub(crate) threads: Option<usize>,
    /// Bytes of the disk to use, at most all of it.
    pub(crate) span: u64,
    pub(crate) secs: f64,
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Result<(), String> {
    let LoadArgs { export, requests, structured, coalesce, threads, pin } = &args.load;
    let url;
    let on = match (&args.nbd, &args.server) {
        (Some(place), _) => {
            On::Nbd(place, export, if *structured { Order::Any } else { Order::Ascending })
        }
        (None, Some(server)) => {
            url = Url::parse(server)?;
            On::Towline(&url, coalesce.unwrap_or(requests.depth as u32 / 4))
        }
        (None, None) => return paper::run(&args.experiments),
    };
    let paper::Args { span, secs, .. } = args.experiments;
    let asked = Asked { requests, threads: *threads, span, secs };
    let _pinned = pin.map(processor::Pinned::to).transpose()?;
    let found = put(&on, &asked, |mark| say(format_args!("#{mark}")))?;
    say(found)
}

/// Checks the values that were given.
pub(crate) fn check(on: &On<'_>, asked: &Asked<'_>) -> Result<(), String> {
    let &Asked { requests, threads, span, secs } = asked;
    let Requests { size, depth, clients, .. } = requests;
    let most = on.size_max();
    if !(1..=most).contains(size) || *size > span {
        return Err(format!("--size: expected at most {}M here, and at most --span", most >> 20));
    }
    if !(0.001..=600.0).contains(&secs)
        || !(1..=1024).contains(depth)
        || !(1..=1024).contains(clients)
    {
        return Err("--secs: expected 0.001 to 600; --depth and --clients: 1 to 1024".into());
    }
    if threads.is_some_and(|threads| !(1..=*clients).contains(&threads)) {
        return Err("--threads: expected at least 1, and at most --clients".into());
    }
    Ok(())
}

/// Puts a load on a disk. Returns rates and latencies, in bytes, seconds and microseconds. Calls `mark` at
/// the start and at the end.
pub(crate) fn put(
    on: &On<'_>,
    asked: &Asked<'_>,
    mark: impl Fn(&str) -> Result<(), String>,
) -> Result<serde_json::Value, String> {
    check(on, asked)?;
    match on {
        On::Nbd(place, export, order) => {
            let failed = |error: std::io::Error| format!("{place}: {error}");
            load(
                asked,
                mark,
                || Client::connect(place, export, *order).map_err(failed),
                Client::size,
                |clients, load| several::run(clients, load).map_err(failed),
            )
        }
        On::Towline(url, coalesce) => {
            let failed = |error: &dyn Display| format!("{url}: {error}");
            load(
                asked,
                mark,
                || DiskClient::connect(url, *coalesce).map_err(|error| failed(&error)),
                DiskClient::size,
                |clients, load| {
                    let run = |client: &mut DiskClient| client.run(load).map_err(|e| failed(&e));
                    clients.iter_mut().map(run).collect()
                },
            )
        }
    }
}

/// Opens all connections and measures them at the same time.
fn load<C: Send>(
    asked: &Asked<'_>,
    mark: impl Fn(&str) -> Result<(), String>,
    connect: impl Fn() -> Result<C, String>,
    size_of: impl Fn(&C) -> u64,
    run: impl Fn(&mut [C], Load) -> Result<Vec<Outcome>, String> + Sync,
) -> Result<serde_json::Value, String> {
    let &Asked { requests, threads, span, secs } = asked;
    let Requests { write, random, size, depth, clients } = requests;
    let each = clients.div_ceil(threads.unwrap_or(*clients));
    let mut connected: Vec<C> = (0..*clients).map(|_| connect()).collect::<Result<_, _>>()?;
    let span = connected.iter().map(size_of).fold(span, u64::min);
    if *size > span {
        return Err(format!("--size: the disk has {span} bytes"));
    }
    let load = Load {
        writes: *write,
        random: *random,
        size: *size as usize,
        outstanding: *depth,
        span,
        again: true,
        limit: Duration::from_secs_f64(secs),
    };
    mark("start")?;
    let results = at_once(0, connected.chunks_mut(each), load.limit, |clients, limit| {
        let began = Instant::now();
        Ok((began, run(clients, Load { limit, ..load })?, Instant::now()))
    });
    mark("end")?;
    let results: Vec<_> = results.into_iter().collect::<Result<_, _>>()?;
    // From the first request of any of them to the last answer.
    let began = results.iter().map(|(began, ..)| *began).min();
    let ended = results.iter().map(|(.., ended)| *ended).max();
    let seconds = began.zip(ended).map_or(0.0, |(began, ended)| (ended - began).as_secs_f64());
    let outcomes: Vec<Vec<Outcome>> =
        results.into_iter().map(|(_, outcomes, _)| outcomes).collect();
    Ok(summary(&outcomes.concat(), seconds))
}

/// Summarises the results: the rate of all clients together, which worked for `seconds`, latencies over all
/// requests, and the rates of the slowest and the fastest client.
fn summary(outcomes: &[Outcome], seconds: f64) -> serde_json::Value {
    let rates = rates_together(outcomes);
    let bytes: u64 = outcomes.iter().map(|outcome| outcome.bytes).sum();
    let all = |of: fn(&Outcome) -> &Vec<f64>| -> Vec<f64> {
        let mut all: Vec<f64> = outcomes.iter().flat_map(|outcome| of(outcome).clone()).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let at = |all: &[f64], part: f64| {
        all.get((all.len() as f64 * part) as usize).copied().unwrap_or_default()
    };
    let (whole, first) = (all(|outcome| &outcome.whole_us), all(|outcome| &outcome.first_us));
    serde_json::json!({
        "ops": whole.len(),
        "bytes": bytes,
        "secs": seconds,
        "bytes_per_s": bytes as f64 / seconds.max(1e-9),
        "p10_us": at(&whole, 0.1),
        "p50_us": at(&whole, 0.5),
        "p99_us": at(&whole, 0.99),
        // Towline's own client does not measure this.
        "first_data_us": if first.is_empty() { None } else { Some(at(&first, 0.5)) },
        "slowest": rates.iter().copied().fold(f64::INFINITY, f64::min),
        "fastest": rates.iter().copied().fold(0.0, f64::max),
    })
}

/// Returns the bytes per second of each client while all were at work. What the first clients reach alone,
/// before the last one has a processor, does not show how the server shares its capacity; and the rate of a
/// client that started late would cover only a moment.
fn rates_together(outcomes: &[Outcome]) -> Vec<f64> {
    let began = outcomes.iter().filter_map(|outcome| outcome.began).max();
    let ended = outcomes.iter().filter_map(|outcome| outcome.answered.last()).max();
    let (Some(began), Some(ended)) = (began, ended) else { return Vec::new() };
    let seconds = ended.saturating_duration_since(began).as_secs_f64().max(1e-9);
    let rate = |outcome: &Outcome| {
        let each = outcome.bytes as f64 / outcome.answered.count().max(1) as f64;
        outcome.answered.after(began) as f64 * each / seconds
    };
    outcomes.iter().map(rate).collect()
}

#[cfg(test)]
mod tests {
    use super::super::nbd_client::Answered;
    use super::*;

    #[test]
    fn who_begins_late_is_compared_for_the_time_with_the_others() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let client = |began: u32, times: std::ops::Range<u32>| {
            let bytes = 10 * u64::from(times.end - times.start);
            let mut answered = Answered::default();
            times.for_each(|at| answered.note(start + second * at));
            let began = Some(start + second * began);
            Outcome { began, answered, bytes, ..Outcome::default() }
        };
        // The third client starts when half of the time is over; the last one gets less than the others from
        // then on.
        let four = [client(0, 1..21), client(0, 2..21), client(10, 11..21), client(0, 1..16)];
        assert_eq!(rates_together(&four), [10.0, 10.0, 10.0, 5.0]);
        assert_eq!(rates_together(&[]), [0.0; 0]);
    }
}
