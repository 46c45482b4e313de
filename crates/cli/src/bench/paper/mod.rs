//! `towline bench disk --paper`: repeats the experiments of the gmblock paper on this machine.
//!
//! They compare the data paths of a server:
//!
//! - *staged*: through the page cache with copies, as in traditional servers;
//! - *sendfile*: pages of the cache by reference;
//! - *direct*: bypassing the cache into memory to send from, where the network starts after the disk has
//!   finished;
//! - *synchronised*: the same, but the network starts when the first fragment lands, in one stream;
//! - *streams*: the same with one stream for each member of a stripe.
//!
//! The figures also include the disk itself and the serial formula 1 / (1 / r_disk + 1 / r_net).
//!
//! All systems are measured in turn, several times, and the results are medians.

mod fragments;
mod interference;
mod local;
mod measure;
mod plot;
mod server;
mod table;

use crate::demo::Scratch;
use crate::report::say;
use crate::serve::parse_bytes;
use serde::Serialize;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of the experiments.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub(super) struct Args {
    /// Directory for test files, on the disk to measure.
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Bytes of a test file; should exceed the caches of the device. For a load: bytes of the disk to use, at
    /// most all.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "256M")]
    pub(super) span: u64,
    /// Sizes of requests, separated by commas.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_bytes,
          default_value = "4K,16K,64K,256K,1M,8M")]
    sizes: Vec<u64>,
    /// Numbers of requests under way.
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', default_value = "1,2,4")]
    outstanding: Vec<usize>,
    /// Number of times that everything is measured.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds for each measurement at most; it also ends after the whole file has been requested.
    #[arg(long, default_value_t = 0.3)]
    pub(super) secs: f64,
    /// Disks, separated by commas: plain (a file), stripe (two files in alternating pieces of 64 KiB), delay
    /// (memory with 200 us and 1 GiB/s).
    #[arg(long, value_name = "DISKS", value_delimiter = ',', default_value = "plain,stripe,delay")]
    disks: Vec<DiskName>,
    /// Measure only single reads of 1 MiB and 8 MiB of a plain and a delayed disk, in fragments of at most
    /// these sizes (4K to 256K, separated by commas), and compare with T = l/r_disk + c/r_net.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_bytes,
          conflicts_with_all = ["plot", "sizes", "outstanding"])]
    fragments: Vec<u64>,
    /// Write the plot to this file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Write the JSON to this file; by default, it is the last line of output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Disks to measure.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum DiskName {
    /// One file.
    Plain,
    /// Two files in alternating pieces.
    Stripe,
    /// Memory with a known delay.
    Delay,
}

/// One point of the experiments: medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Point {
    pub(super) disk: DiskName,
    pub(super) system: &'static str,
    pub(super) writes: bool,
    pub(super) size: u64,
    pub(super) outstanding: usize,
    pub(super) bytes_per_s: f64,
    /// Microseconds from the request to the last byte, and to the first.
    pub(super) request_us: f64,
    pub(super) first_data_us: Option<f64>,
    /// How the mean time of one read is split, in microseconds: the disk alone, both, the network alone.
    pub(super) stages_us: Option<[f64; 3]>,
    /// CPU seconds of the server per GiB.
    pub(super) cpu_s_per_gib: Option<f64>,
}

/// How much a busy server slows down a memory-bound program on another processor.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Interference {
    pub(super) system: &'static str,
    /// How much longer the program takes than beside an idle server: 0.1 is a tenth longer.
    pub(super) slowdown: f64,
    /// Rate of the reads that ran meanwhile.
    pub(super) bytes_per_s: f64,
}

/// All results.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    pub(super) points: Vec<Point>,
    pub(super) interference: Vec<Interference>,
}

/// The test files, removed when dropped or when a signal ends this process.
pub(super) struct Files(Scratch);

impl Files {
    fn new(args: &Args) -> Result<Self, String> {
        let directory = args.dir.join(format!(".towline-paper-{}", std::process::id()));
        let failed = |error: std::io::Error| format!("{}: {error}", directory.display());
        let scratch = Scratch::at(directory.clone()).map_err(failed)?;
        scratch.remove_on_signals().map_err(failed)?;
        let files = Self(scratch);
        local::make(&files.plain(), args.span).map_err(failed)?;
        for member in files.members() {
            local::make(&member, args.span / 2).map_err(failed)?;
        }
        Ok(files)
    }

    pub(super) fn plain(&self) -> PathBuf {
        self.0.join("plain")
    }

    pub(super) fn members(&self) -> [PathBuf; 2] {
        ["even", "odd"].map(|name| self.0.join(name))
    }

    /// Drops all files from the page cache.
    pub(super) fn forget(&self) -> std::io::Result<()> {
        let all = [[self.plain()].as_slice(), &self.members()].concat();
        all.iter().try_for_each(|path| local::forget(path))
    }
}

/// Escapes a path for `--disk`.
pub(super) fn escaped(path: &Path) -> String {
    path.display().to_string().replace('\\', "\\\\").replace(':', "\\:")
}

/// Runs the experiments.
pub(super) fn run(args: &Args) -> Result<(), String> {
    if !(0.001..=600.0).contains(&args.secs) || args.rounds == 0 {
        return Err("--secs: expected 0.001 to 600; --rounds: at least 1".into());
    }
    let wrong = |size: &u64| !size.is_multiple_of(4096) || *size > args.span.min(32 << 20);
    if args.fragments.is_empty() && args.sizes.iter().any(wrong) {
        return Err("--sizes: expected multiples of 4K, at most 32M and --span".into());
    }
    if args.outstanding.iter().any(|count| !(1..=64).contains(count)) {
        return Err("--outstanding: expected 1 to 64".into());
    }
    if args.fragments.iter().any(|size| size % 4096 != 0 || !(4096..=256 << 10).contains(size)) {
        return Err("--fragments: expected multiples of 4K, at most 256K".into());
    }
    if !args.fragments.is_empty() && args.disks == [DiskName::Stripe] {
        return Err(
            "--fragments: of --disks, plain and delay are measured; give one of them".into()
        );
    }
    let _kept_open = results(args)?;
    let files = Files::new(args)?;
    if !args.fragments.is_empty() {
        let rows = fragments::sweep(args, &files)?;
        say(fragments::text(&rows).trim_end())?;
        return put_json(args, &rows);
    }
    let points = measure::all(args, &files)?;
    let interference = interference::all(args, &files)?;
    let figures = Figures { points, interference };
    say(table::text(&figures).trim_end())?;
    put_json(args, &figures)?;
    match &args.plot {
        Some(path) => {
            plot::draw(&figures, path).map_err(|error| format!("{}: {error}", path.display()))
        }
        None => Ok(()),
    }
}

/// Opens the files for the results, so that one that cannot be written costs no measurement. They keep what they
/// hold until there are results.
fn results(args: &Args) -> Result<Vec<File>, String> {
    let open = |path: &PathBuf| {
        let file = File::options().write(true).create(true).truncate(false).open(path);
        file.map_err(|error| format!("{}: {error}", path.display()))
    };
    args.plot.iter().chain(&args.json).map(open).collect()
}

fn put_json(args: &Args, figures: &impl Serialize) -> Result<(), String> {
    let json = serde_json::to_string(figures).map_err(|error| error.to_string())?;
    match &args.json {
        Some(path) => {
            std::fs::write(path, json).map_err(|error| format!("{}: {error}", path.display()))
        }
        None => say(json),
    }
}

/// Returns the median, or zero if there are no figures.
pub(super) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

pub(super) fn limit(args: &Args) -> Duration {
    Duration::from_secs_f64(args.secs)
}
