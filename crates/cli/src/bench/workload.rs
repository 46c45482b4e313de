//! Runs the file workloads on a server with the client library.

use super::result::Measured;
use super::tree::{self, Blocks, CREATE, FILE_BYTES, Names, OPERATIONS, ROUND, Random};
use crate::remote::Session;
use crate::report::note;
use crate::serve::parse_bytes;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use towline_client::{DirEntry, Errno, Error, File, Group, Operation, Options, Url};

const EXAMPLES: &str = "\
Examples:
  towline bench file --server towline://127.0.0.1/data --op stat_diff
  towline bench file --server towline://127.0.0.1/data --op clients --bs 64K --procs 184
  towline bench file --server /srv/data --op scan_stat --again      the same without a server

Exit status: 0 measured, 1 an operation failed or a value is beyond its limits, 2 wrong usage.";

/// Arguments of `bench file`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Directory that holds the tree: a URL, HOST:PORT/EXPORT, or a local /PATH for comparison.
    #[arg(long, value_name = "URL")]
    pub(super) server: String,
    /// Operation; see towline-bench(1).
    #[arg(long, value_parser = OPERATIONS, default_value = "stat_diff")]
    pub(super) op: String,
    /// Bytes of each read or write.
    #[arg(long, value_name = "N", value_parser = buffer_bytes, default_value = "4K")]
    pub(super) bs: usize,
    /// Operations in flight in each client; on a local directory always one.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) qd: usize,
    /// Client processes.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) procs: usize,
    /// Clients in each process, each with a session and a thread of its own.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) threads: usize,
    /// Seconds to measure.
    #[arg(long, default_value_t = 1.0)]
    pub(super) secs: f64,
    /// Seconds to run before that, which are not measured.
    #[arg(long, value_name = "SECS", default_value_t = 0.0)]
    pub(super) ramp: f64,
    /// Files in the tree.
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    pub(super) files: u64,
    /// Bytes of the file `big`.
    #[arg(long, value_name = "N", value_parser = parse_bytes, default_value = "256M")]
    pub(super) bigsize: u64,
    /// For scans: repeat until the time is up, instead of scanning the tree once.
    #[arg(long)]
    pub(super) again: bool,
    /// Processors of the client processes, used in turn; default: started on all in turn, then left to the scheduler.
    #[arg(long, value_name = "CPU,...", value_delimiter = ',')]
    pub(super) pin: Vec<usize>,
    /// Microseconds to poll for a reply before sleeping; 0: sleep at once; default: the library's.
    #[arg(long, value_name = "N")]
    pub(super) spin_us: Option<u32>,
    /// Operations in flight that may wait to be sent together; default: half of --qd.
    #[arg(long, value_name = "N")]
    pub(super) coalesce: Option<u32>,
    /// Number of this process; set for those that `--procs` starts.
    #[arg(long, hide = true)]
    pub(super) worker: Option<usize>,
}

impl Args {
    /// Returns the number of clients in all processes.
    pub(super) fn clients(&self) -> usize {
        self.procs * self.threads
    }
}

/// Follows an error that says that a file is missing.
pub(super) const NEEDED: &str = ": it needs tree/, big and wr/, see towline-bench(1)";

fn told(error: &Error) -> String {
    let hint = if error.errno() == Errno::ENOENT { NEEDED } else { "" };
    format!("{error}{hint}")
}

fn buffer_bytes(text: &str) -> Result<usize, String> {
    usize::try_from(parse_bytes(text)?).map_err(|error| error.to_string())
}

/// A client that is connected and ready to run its workload.
pub(super) struct Worker {
    args: Args,
    number: u64,
    root: File,
    client: Session,
    random: Random,
    measured: Measured,
    /// [`Worker::stages`] when the measurement began.
    stages_before: [u64; 4],
}

impl Worker {
    /// Connects.
    pub(super) fn new(args: &Args, number: u64) -> Result<Self, String> {
        let url = if Url::looks_like(&args.server) {
            args.server.clone()
        } else {
            format!("towline+tcp://{}", args.server)
        };
        let url = Url::parse(&url)?;
        let failed = |error: Error| format!("{url}: {error}");
        let mut options = Options::default();
        options.spin_us = args.spin_us.unwrap_or(options.spin_us);
        options.coalesce = args.coalesce.unwrap_or(args.qd as u32 / 2);
        let client = Session::with(&url, options).map_err(failed)?;
        let export = client.attach(&url.export).map_err(failed)?;
        let root = if url.path.is_empty() {
            export
        } else {
            export.open(&url.path, 0, 0).map_err(failed)?
        };
        Ok(Self {
            args: args.clone(),
            number,
            root,
            client,
            random: Random::new(number),
            measured: Measured::new(),
            stages_before: [0; 4],
        })
    }

    pub(super) fn measured(&mut self) -> &mut Measured {
        &mut self.measured
    }

    fn stages(&self) -> [u64; 4] {
        let times = self.client.times();
        [times.samples, times.client_ns, times.network_ns, times.server_ns]
    }

    /// Runs the workload until then, or until it is over.
    pub(super) fn run(&mut self, end: Instant) -> Result<(), String> {
        if !self.measured.is_ramping() {
            self.stages_before = self.stages();
        }
        match self.args.op.as_str() {
            "stat_same" | "stat_diff" => self.stat(end),
            "orc" => self.open_read_close(end),
            "scan_stat" => self.scan(end),
            "scan_read" => self.scan_read(end),
            "create_unlink" => self.create_unlink(end),
            _ => self.big(end),
        }
        .map_err(|error| format!("{}: {}", self.args.op, told(&error)))?;
        let now = self.stages();
        self.measured.stages = std::array::from_fn(|at| now[at] - self.stages_before[at]);
        Ok(())
    }

    /// Records one operation.
    fn record(&mut self, took: Duration, failed: bool) {
        let was_ramping = self.measured.is_ramping();
        self.measured.one(took, failed);
        if was_ramping && !self.measured.is_ramping() {
            self.stages_before = self.stages();
        }
    }

    /// Records one operation; `good` returns whether its result is as expected. The first failure is printed,
    /// the others are only counted.
    fn note<T>(
        &mut self,
        took: Duration,
        outcome: Result<T, Error>,
        good: impl FnOnce(&T) -> bool,
    ) -> Option<T> {
        let wrong = match &outcome {
            Ok(result) if good(result) => None,
            Ok(_) => Some("the data read differs from what the tree should hold".to_owned()),
            Err(error) => Some(told(error)),
        };
        self.record(took, wrong.is_some());
        if let Some(wrong) = wrong.filter(|_| self.measured.errors == 1) {
            note(format_args!("towline: bench: {}: {wrong}", self.args.op));
        }
        outcome.ok()
    }

    /// Keeps `qd` operations in flight: `next` starts one, or returns `None` if there are no more; `done`
    /// takes its outcome.
    fn pipeline<T>(
        &mut self,
        end: Option<Instant>,
        mut next: impl FnMut(&mut Self) -> Result<Option<Operation<T>>, Error>,
        mut done: impl FnMut(&mut Self, Duration, Result<T, Error>),
    ) -> Result<(), Error> {
        let mut group = Group::new();
        let mut started: Vec<Instant> = vec![Instant::now(); self.args.qd];
        let mut free: Vec<usize> = (0..self.args.qd).collect();
        let mut more = true;
        loop {
            while more && !free.is_empty() {
                let now = Instant::now();
                if end.is_some_and(|end| now >= end) {
                    break;
                }
                let Some(operation) = next(self)? else {
                    more = false;
                    break;
                };
                let place = free.pop().unwrap_or_default();
                started[place] = now;
                group.add(operation, place as u64);
            }
            let Some((place, outcome)) = group.wait_any() else { return Ok(()) };
            let place = place as usize;
            let took = started[place].elapsed();
            free.push(place);
            done(self, took, outcome);
        }
    }

    fn stat(&mut self, end: Instant) -> Result<(), Error> {
        let mut names = Names::new(&self.args, &mut self.random);
        if self.args.qd > 1 {
            return self.pipeline(
                Some(end),
                |this| this.root.start_stat_path(names.advance(), true).map(Some),
                |this, took, outcome| {
                    this.note(took, outcome, |attr| attr.size == FILE_BYTES as u64);
                },
            );
        }
        loop {
            let name = names.advance();
            let start = Instant::now();
            if start >= end {
                return Ok(());
            }
            let outcome = self.root.stat_path(name, true);
            self.note(start.elapsed(), outcome, |attr| attr.size == FILE_BYTES as u64);
        }
    }

    fn open_read_close(&mut self, end: Instant) -> Result<(), Error> {
        let mut names = Names::new(&self.args, &mut self.random);
        if self.args.qd > 1 {
            return self.pipeline(
                Some(end),
                |this| this.root.start_read_path(names.advance(), 0, FILE_BYTES).map(Some),
                |this, took, outcome| this.read_whole(took, outcome.map(|bytes| bytes.len())),
            );
        }
        let mut buffer = [0; FILE_BYTES];
        loop {
            let name = names.advance();
            let start = Instant::now();
            if start >= end {
                return Ok(());
            }
            let outcome = self.root.read_path(name, 0, &mut buffer);
            self.read_whole(start.elapsed(), outcome);
        }
    }

    fn read_whole(&mut self, took: Duration, outcome: Result<usize, Error>) {
        let length = self.note(took, outcome, |length| *length == FILE_BYTES);
        self.measured.moved(false, length.unwrap_or(0));
    }

    /// Lists every directory with attributes. Each entry counts as an operation.
    fn scan(&mut self, end: Instant) -> Result<(), Error> {
        let mut directories = tree::directories(&self.args, self.number);
        self.pipeline(
            Some(end),
            |this| match directories.next() {
                Some(path) => this.root.start_list_path(&path, 0, true).map(Some),
                None => Ok(None),
            },
            |this, took, outcome| match outcome {
                Ok((entries, end)) => {
                    let found = entries.iter().filter(|entry| visible(entry)).count().max(1);
                    let each = took / found as u32;
                    for entry in entries.iter().filter(|entry| visible(entry)) {
                        this.record(each, entry.attr.is_none() || !end);
                    }
                }
                Err(error) => {
                    this.note(took, Err::<(), _>(error), |()| true);
                }
            },
        )
    }

    /// Reads every file, while listing directories one ahead.
    fn scan_read(&mut self, end: Instant) -> Result<(), Error> {
        let mut directories = tree::directories(&self.args, self.number);
        let mut names: VecDeque<Vec<u8>> = VecDeque::new();
        let mut ahead = None;
        self.pipeline(
            Some(end),
            |this| {
                let mut list = || match directories.next() {
                    Some(path) => this
                        .root
                        .start_list_path(&path, 0, false)
                        .map(|listing| Some((path, listing))),
                    None => Ok(None),
                };
                while names.is_empty() {
                    let now = match ahead.take() {
                        Some(listing) => Some(listing),
                        None => list()?,
                    };
                    let Some((path, listing)) = now else { return Ok(None) };
                    ahead = list()?;
                    let (entries, _) = listing.wait()?;
                    for entry in entries.iter().filter(|entry| visible(entry)) {
                        names.push_back([&path[..], b"/", &entry.name].concat());
                    }
                }
                let name = names.pop_front().unwrap_or_default();
                this.root.start_read_path(&name, 0, FILE_BYTES).map(Some)
            },
            |this, took, outcome| this.read_whole(took, outcome.map(|bytes| bytes.len())),
        )
    }

    /// Creates files, then removes them, over and over. Every round is finished even if the time is up, so
    /// that no files are left behind.
    fn create_unlink(&mut self, end: Instant) -> Result<(), Error> {
        let number = self.number;
        let mut first = 0;
        while Instant::now() < end {
            let mut names = (first..first + ROUND).map(|count| tree::new_name(number, count));
            self.pipeline(
                None,
                |this| match names.next() {
                    Some(name) => this.root.start_create(&name, CREATE, 0o644).map(Some),
                    None => Ok(None),
                },
                |this, took, outcome| {
                    this.note(took, outcome, |()| true);
                },
            )?;
            let mut names = (first..first + ROUND).map(|count| tree::new_name(number, count));
            self.pipeline(
                None,
                |this| match names.next() {
                    Some(name) => this.root.start_unlink(&name).map(Some),
                    None => Ok(None),
                },
                |this, took, outcome| {
                    this.note(took, outcome, |()| true);
                },
            )?;
            first += ROUND;
        }
        Ok(())
    }

    fn big(&mut self, end: Instant) -> Result<(), Error> {
        let Args { bs, qd, .. } = self.args;
        let mut blocks = Blocks::new(&self.args, self.number);
        let writes = blocks.writes;
        let file = self.root.open(&blocks.path, if writes { CREATE } else { 0 }, 0o644)?;
        let mut buffers: Vec<Vec<u8>> = (0..qd).map(|_| vec![self.number as u8 + 1; bs]).collect();
        if qd == 1 {
            let buffer = &mut buffers[0];
            loop {
                let offset = blocks.advance(&mut self.random);
                let start = Instant::now();
                if start >= end {
                    return file.close();
                }
                let outcome = if writes {
                    file.write_at(buffer, offset)
                } else {
                    file.read_at(buffer, offset)
                };
                let moved = self.note(start.elapsed(), outcome, |moved| *moved == bs);
                self.measured.moved(writes, moved.unwrap_or(0));
            }
        }
        // Both closures need the buffers, but never at the same time.
        let buffers = std::cell::RefCell::new(buffers);
        self.pipeline(
            Some(end),
            |this| {
                // A failed operation, which is counted as an error, loses its buffer.
                let buffer = buffers.borrow_mut().pop().unwrap_or_else(|| vec![0; bs]);
                let offset = blocks.advance(&mut this.random);
                let operation = if writes {
                    file.start_write_at(buffer, offset)
                } else {
                    file.start_read_at(buffer, offset)
                };
                operation.map(Some)
            },
            |this, took, outcome| {
                if let Some((moved, buffer)) = this.note(took, outcome, |(moved, _)| *moved == bs) {
                    buffers.borrow_mut().push(buffer);
                    this.measured.moved(writes, moved);
                }
            },
        )?;
        file.close()
    }
}

/// Returns true for names that belong to the tree.
fn visible(entry: &DirEntry) -> bool {
    !entry.name.starts_with(b".")
}
