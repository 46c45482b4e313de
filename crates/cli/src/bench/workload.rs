//! The file workloads.

use super::result::Measured;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use towline_client::{Client, Error, File, Group, Operation, Options, Url};

const PER_DIRECTORY: u64 = 100;
const FILE_BYTES: usize = 4096;
/// Coprime to any number of files made of 2s and 5s: visits each once, in no natural order.
const STRIDE: u64 = 7919;
const CREATE_TRUNCATE: u32 = 0o100 | 0o1000 | 2;

/// Arguments of `bench file`.
#[derive(clap::Args, Clone)]
pub(crate) struct Args {
    /// Export (and directory) that holds the tree: a URL, or HOST:PORT/EXPORT.
    #[arg(long, value_name = "URL")]
    pub(crate) server: String,
    /// Operation.
    #[arg(long, default_value = "stat_diff")]
    pub(crate) op: String,
    /// Bytes of each read or write.
    #[arg(long, default_value_t = 4096)]
    pub(crate) bs: usize,
    /// Operations in flight in each client.
    #[arg(long, default_value_t = 1)]
    pub(crate) qd: usize,
    /// Client processes.
    #[arg(long, default_value_t = 1)]
    pub(crate) procs: usize,
    /// Seconds to measure.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) secs: f64,
    /// Files in the tree.
    #[arg(long, default_value_t = 20_000)]
    pub(crate) files: u64,
    /// Bytes of the file `big`.
    #[arg(long, default_value_t = 256 << 20)]
    pub(crate) bigsize: u64,
    /// Number of this client; for the processes that `--procs` starts.
    #[arg(long, hide = true)]
    pub(crate) worker: Option<usize>,
}

/// A client that is connected and ready to run its workload.
pub(crate) struct Worker {
    args: Args,
    number: u64,
    root: File,
    _client: Client,
    random: u64,
    measured: Measured,
}

fn text(error: &Error) -> String {
    error.to_string()
}

impl Worker {
    /// Connects.
    pub(crate) fn new(args: &Args, number: usize) -> Result<Self, String> {
        let known = [
            "stat_same",
            "stat_diff",
            "orc",
            "scan_stat",
            "scan_read",
            "create_unlink",
            "seqread",
            "seqwrite",
            "randread",
            "randwrite",
            "clients",
            "rwmix",
        ];
        if !known.contains(&args.op.as_str()) {
            return Err(format!("unknown operation \"{}\"; one of {}", args.op, known.join(" ")));
        }
        if args.bs == 0
            || args.qd == 0
            || args.files < PER_DIRECTORY
            || (args.bigsize as usize) < args.bs
        {
            return Err("sizes and counts must not be zero, and big must hold one block".into());
        }
        let url = if Url::looks_like(&args.server) {
            args.server.clone()
        } else {
            format!("towline://{}", args.server)
        };
        let url = Url::parse(&url)?;
        let failed = |error: Error| format!("{url}: {error}");
        let client = Client::connect(&url.transport, Options::default()).map_err(failed)?;
        let export = client.attach(&url.export).map_err(failed)?;
        let root = if url.path.is_empty() {
            export
        } else {
            export.open(&url.path, 0, 0).map_err(failed)?
        };
        let number = number as u64;
        let random =
            0x9e37_79b9_7f4a_7c15u64.wrapping_mul(number + 1) ^ u64::from(std::process::id());
        Ok(Self {
            args: args.clone(),
            number,
            root,
            _client: client,
            random,
            measured: Measured::new(),
        })
    }

    fn random(&mut self) -> u64 {
        // xorshift64: speed matters here, quality does not.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn name(index: u64) -> Vec<u8> {
        format!("tree/d{:03}/f{index:05}", index / PER_DIRECTORY).into_bytes()
    }

    /// Runs for the time asked for.
    pub(crate) fn run(mut self) -> Result<Measured, String> {
        let start = Instant::now();
        let end = start + Duration::from_secs_f64(self.args.secs);
        match self.args.op.as_str() {
            "stat_same" | "stat_diff" | "orc" => self.small(end),
            "scan_stat" => self.scan(end),
            "scan_read" => self.scan_read(end),
            "create_unlink" => self.create_unlink(end),
            _ => self.big(end),
        }
        .map_err(|error| text(&error))?;
        self.measured.seconds = start.elapsed().as_secs_f64();
        Ok(self.measured)
    }

    /// Keeps `qd` operations in flight: `next` starts one (or says that there are no more), `done`
    /// takes its outcome.
    fn pipeline<T>(
        &mut self,
        end: Instant,
        mut next: impl FnMut(&mut Self) -> Result<Option<Operation<T>>, Error>,
        mut done: impl FnMut(&mut Self, Duration, Result<T, Error>),
    ) -> Result<(), Error> {
        let mut group = Group::new();
        let mut started: Vec<Instant> = vec![end; self.args.qd];
        let mut free: Vec<usize> = (0..self.args.qd).collect();
        let mut more = true;
        loop {
            while more && Instant::now() < end {
                let Some(place) = free.pop() else { break };
                started[place] = Instant::now();
                match next(self)? {
                    Some(operation) => group.add(operation, place as u64),
                    None => more = false,
                }
            }
            let Some((place, outcome)) = group.wait_any() else { return Ok(()) };
            let place = place as usize;
            let took = started[place].elapsed();
            free.push(place);
            done(self, took, outcome);
        }
    }

    fn small(&mut self, end: Instant) -> Result<(), Error> {
        let same = self.args.op == "stat_same";
        let files = self.args.files;
        let mut index = self.random() % files;
        let mut advance = move || {
            if !same {
                index = (index + STRIDE) % files;
            }
            Self::name(index)
        };
        if self.args.op == "orc" {
            if self.args.qd > 1 {
                return self.pipeline(
                    end,
                    |this| this.root.start_read_path(&advance(), FILE_BYTES).map(Some),
                    |this, took, outcome| this.read_whole(took, outcome.map(|b| b.len())),
                );
            }
            let mut buffer = [0; FILE_BYTES];
            while Instant::now() < end {
                let name = advance();
                let start = Instant::now();
                let outcome = self.root.read_path(&name, &mut buffer);
                self.read_whole(start.elapsed(), outcome);
            }
            return Ok(());
        }
        if self.args.qd > 1 {
            return self.pipeline(
                end,
                |this| this.root.start_stat_path(&advance(), true).map(Some),
                |this, took, outcome| this.measured.one(took, outcome.is_err()),
            );
        }
        while Instant::now() < end {
            let name = advance();
            let start = Instant::now();
            let outcome = self.root.stat_path(&name, true);
            self.measured.one(start.elapsed(), outcome.is_err());
        }
        Ok(())
    }

    fn read_whole(&mut self, took: Duration, outcome: Result<usize, Error>) {
        let length = outcome.unwrap_or(0);
        self.measured.read_bytes += length as u64;
        self.measured.one(took, length != FILE_BYTES);
    }

    fn directories(&self) -> impl Iterator<Item = Vec<u8>> + use<> {
        let count = self.args.files / PER_DIRECTORY;
        let first = self.number * (count / self.args.procs as u64);
        (0..count).map(move |n| format!("tree/d{:03}", (first + n) % count).into_bytes())
    }

    /// Lists every directory with attributes, over and over; each entry counts as an operation.
    fn scan(&mut self, end: Instant) -> Result<(), Error> {
        let mut directories = self.directories();
        self.pipeline(
            end,
            |this| {
                let Some(path) = directories.next().or_else(|| {
                    directories = this.directories();
                    directories.next()
                }) else {
                    return Ok(None);
                };
                this.root.start_list_path(&path, true).map(Some)
            },
            |this, took, outcome| match outcome {
                Ok((entries, end)) => {
                    let found = entries.iter().filter(|e| !e.name.starts_with(b".")).count().max(1);
                    let each = took / found as u32;
                    for entry in entries.iter().filter(|e| !e.name.starts_with(b".")) {
                        this.measured.one(each, entry.attr.is_none() || !end);
                    }
                }
                Err(_) => this.measured.one(took, true),
            },
        )
    }

    fn scan_read(&mut self, end: Instant) -> Result<(), Error> {
        let mut directories = self.directories();
        let mut names: VecDeque<Vec<u8>> = VecDeque::new();
        self.pipeline(
            end,
            |this| {
                while names.is_empty() {
                    let Some(path) = directories.next() else { return Ok(None) };
                    let (entries, _) = this.root.start_list_path(&path, false)?.wait()?;
                    for entry in entries.iter().filter(|e| !e.name.starts_with(b".")) {
                        names.push_back([&path[..], b"/", &entry.name].concat());
                    }
                }
                let name = names.pop_front().unwrap_or_default();
                this.root.start_read_path(&name, FILE_BYTES).map(Some)
            },
            |this, took, outcome| this.read_whole(took, outcome.map(|b| b.len())),
        )
    }

    /// Creates 50 files, then removes them, over and over.
    fn create_unlink(&mut self, end: Instant) -> Result<(), Error> {
        let process = std::process::id();
        let number = self.number;
        let name = |n: u64| format!("wr/p{process}_{number}_{n}").into_bytes();
        let mut first = 0;
        while Instant::now() < end {
            // Rounds are finished whatever the time, so that nothing is left behind.
            let far = end + Duration::from_secs(3600);
            let mut next = first;
            self.pipeline(
                far,
                |this| {
                    next += 1;
                    if next > first + 50 {
                        return Ok(None);
                    }
                    this.root.start_create(&name(next - 1), CREATE_TRUNCATE, 0o644).map(Some)
                },
                |this, took, outcome| this.measured.one(took, outcome.is_err()),
            )?;
            let mut next = first;
            self.pipeline(
                far,
                |this| {
                    next += 1;
                    if next > first + 50 {
                        return Ok(None);
                    }
                    this.root.start_unlink(&name(next - 1)).map(Some)
                },
                |this, took, outcome| this.measured.one(took, outcome.is_err()),
            )?;
            first += 50;
        }
        Ok(())
    }

    fn big(&mut self, end: Instant) -> Result<(), Error> {
        let Args { op, bs, qd, procs, bigsize, .. } = self.args.clone();
        let writes =
            op == "seqwrite" || op == "randwrite" || (op == "rwmix" && self.number % 2 == 1);
        let random = op.starts_with("rand");
        let file = if writes {
            self.root.open(format!("wr/big{}", self.number).as_bytes(), CREATE_TRUNCATE, 0o644)?
        } else {
            self.root.open(b"big", 0, 0)?
        };
        let all = bigsize / bs as u64;
        let blocks = if writes { (all / procs as u64).max(1) } else { all };
        let mut block = if writes { 0 } else { all / procs as u64 * self.number };
        let mut offset = |this: &mut Self| {
            block += 1;
            (if random { this.random() } else { block - 1 }) % blocks * bs as u64
        };
        let count = |this: &mut Self, took, moved: usize| {
            let bytes = if writes {
                &mut this.measured.written_bytes
            } else {
                &mut this.measured.read_bytes
            };
            *bytes += moved as u64;
            this.measured.one(took, moved != bs);
        };
        let mut buffers: Vec<Vec<u8>> = (0..qd).map(|_| vec![self.number as u8 + 1; bs]).collect();
        if qd == 1 {
            let buffer = &mut buffers[0];
            while Instant::now() < end {
                let at = offset(self);
                let start = Instant::now();
                let moved =
                    if writes { file.write_at(buffer, at) } else { file.read_at(buffer, at) };
                count(self, start.elapsed(), moved.unwrap_or(0));
            }
        } else {
            let buffers = std::cell::RefCell::new(buffers);
            self.pipeline(
                end,
                |this| {
                    let mut buffer = buffers.borrow_mut().pop().unwrap_or_default();
                    buffer.resize(bs, 0);
                    let at = offset(this);
                    let operation = if writes {
                        file.start_write_at(buffer, at)
                    } else {
                        file.start_read_at(buffer, at)
                    };
                    operation.map(Some)
                },
                |this, took, outcome| {
                    let (moved, buffer) = outcome.unwrap_or_default();
                    buffers.borrow_mut().push(buffer);
                    count(this, took, moved);
                },
            )?;
        }
        file.close()
    }
}
