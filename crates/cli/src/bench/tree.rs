//! The tree of files to measure, and the order in which a client walks it. Both are the same for every
//! system.

use super::check_length;
use super::workload::Args;

/// Files in each directory below `tree`.
pub(super) const PER_DIRECTORY: u64 = 100;
/// Bytes of each small file.
pub(super) const FILE_BYTES: usize = 4096;
/// Flags (`O_CREAT | O_RDWR`) for creating files: existing ones are overwritten, not truncated.
pub(super) const CREATE: u32 = 0o100 | 2;
/// Files that `create_unlink` creates before it removes them again.
pub(super) const ROUND: u64 = 50;
/// A prime, so that steps of this size visit every file once, in no natural order, unless it divides the
/// number of files.
const STRIDE: u64 = 7919;

/// The names of all operations.
pub(super) const OPERATIONS: [&str; 12] = [
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

/// How many operations in flight, and how many processes, threads and clients, there may be.
const COUNTS: std::ops::RangeInclusive<usize> = 1..=4096;

/// Checks the arguments. Returns a message if they make no sense.
pub(super) fn check(args: &Args) -> Result<(), String> {
    if ![args.qd, args.procs, args.threads].iter().all(|count| COUNTS.contains(count)) {
        return Err("--qd, --procs, --threads: expected 1 to 4096".into());
    }
    if !COUNTS.contains(&args.clients()) {
        return Err("--procs, --threads: expected at most 4096 clients in all".into());
    }
    if args.bigsize < args.bs as u64 {
        return Err("--bigsize: expected at least one block of --bs".into());
    }
    if args.files < PER_DIRECTORY {
        return Err(format!("at least one directory is needed: --files {PER_DIRECTORY}"));
    }
    check_length(args.ramp, args.secs)
}

/// A xorshift64 random number generator: speed matters here, quality does not.
pub(super) struct Random(u64);

impl Random {
    /// Starts a sequence that differs for each client and run.
    pub(super) fn new(number: u64) -> Self {
        let seed = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(number + 1);
        Self((seed ^ u64::from(std::process::id())).max(1))
    }

    /// Returns the next number.
    pub(super) fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// The paths of small files, one after the other.
pub(super) struct Names {
    index: u64,
    stride: u64,
    files: u64,
    path: Vec<u8>,
}

impl Names {
    /// Starts at a random file. For `stat_same`, every path is that of this file.
    pub(super) fn new(args: &Args, random: &mut Random) -> Self {
        let stride = if args.op == "stat_same" { 0 } else { STRIDE };
        Self { index: random.draw() % args.files, stride, files: args.files, path: Vec::new() }
    }

    /// Returns the next path, relative to the root of the tree. It does not use `format!`, which would take
    /// half as many instructions as the whole request.
    pub(super) fn advance(&mut self) -> &[u8] {
        self.index = (self.index + self.stride) % self.files;
        self.path.clear();
        self.path.extend_from_slice(b"tree/d");
        append_digits(&mut self.path, self.index / PER_DIRECTORY, 3);
        self.path.extend_from_slice(b"/f");
        append_digits(&mut self.path, self.index, 5);
        &self.path
    }
}

/// Appends a number with at least `least` digits.
fn append_digits(text: &mut Vec<u8>, number: u64, least: usize) {
    const DIGITS_MAX: usize = 20;
    let mut digits = [b'0'; DIGITS_MAX];
    let (mut first, mut rest) = (DIGITS_MAX, number);
    while rest > 0 {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    text.extend_from_slice(&digits[first.min(DIGITS_MAX - least)..]);
}

/// Returns all directories of the tree. Each client starts at a different one.
pub(super) fn directories(args: &Args, number: u64) -> impl Iterator<Item = Vec<u8>> + use<> {
    let count = args.files / PER_DIRECTORY;
    let first = number * (count / args.clients() as u64);
    let rounds = if args.again { u64::MAX / count } else { 1 };
    (0..rounds * count).map(move |n| format!("tree/d{:03}", (first + n) % count).into_bytes())
}

/// Returns the name of a file that this client creates.
pub(super) fn new_name(number: u64, count: u64) -> Vec<u8> {
    format!("wr/p{}_{number}_{count}", std::process::id()).into_bytes()
}

/// The blocks of a large file that a client reads or writes.
pub(super) struct Blocks {
    /// Path of the file.
    pub(super) path: Vec<u8>,
    /// True if the client writes the file.
    pub(super) writes: bool,
    random: bool,
    next: u64,
    count: u64,
    bytes: u64,
}

impl Blocks {
    /// The blocks of client `number`. All readers read the same file, each starting at its own part; each
    /// writer writes its own file.
    pub(super) fn new(args: &Args, number: u64) -> Self {
        let op = args.op.as_str();
        let writes =
            op == "seqwrite" || op == "randwrite" || (op == "rwmix" && !number.is_multiple_of(2));
        let all = args.bigsize / args.bs as u64;
        let part = all / args.clients() as u64;
        Self {
            path: if writes { format!("wr/big{number}").into_bytes() } else { b"big".to_vec() },
            writes,
            random: op.starts_with("rand"),
            next: if writes { 0 } else { part * number },
            count: if writes { part.max(1) } else { all },
            bytes: args.bs as u64,
        }
    }

    /// Returns the next offset.
    pub(super) fn advance(&mut self, random: &mut Random) -> u64 {
        let block = if self.random { random.draw() } else { self.next };
        self.next += 1;
        block % self.count * self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::collections::HashSet;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(line: &str) -> Args {
        Line::parse_from(line.split(' ').map(str::to_owned)).args
    }

    #[test]
    fn every_file_and_directory_is_visited_once() {
        let args = args("x --server h/e --op stat_diff --files 20000 --procs 3");
        let mut names = Names::new(&args, &mut Random::new(0));
        let all: HashSet<_> = (0..20_000).map(|_| names.advance().to_vec()).collect();
        assert_eq!(all.len(), 20_000);
        assert!(all.contains(&b"tree/d199/f19999"[..]));
        let listed: HashSet<_> = directories(&args, 2).collect();
        assert_eq!((directories(&args, 2).count(), listed.len()), (200, 200));
    }

    #[test]
    fn clients_read_their_part_and_write_their_own_file() {
        let args = args("x --server h/e --op rwmix --bs 4096 --bigsize 40960 --procs 2");
        let mut random = Random::new(0);
        let mut offsets = |number| {
            let mut blocks = Blocks::new(&args, number);
            let offsets: Vec<_> = (0..6).map(|_| blocks.advance(&mut random) / 4096).collect();
            (blocks.writes, offsets)
        };
        assert_eq!(offsets(0), (false, vec![0, 1, 2, 3, 4, 5]));
        assert_eq!(offsets(1), (true, vec![0, 1, 2, 3, 4, 0]));
    }

    #[test]
    fn absurd_arguments_are_refused() {
        for line in [
            "x --server h/e --procs 0",
            "x --server h/e --procs 4097",
            "x --server h/e --threads 0",
            "x --server h/e --procs 64 --threads 65",
            "x --server h/e --qd 1000000000000",
            "x --server h/e --files 99",
            "x --server h/e --secs 0",
            "x --server h/e --secs inf",
            "x --server h/e --ramp nan",
            "x --server h/e --bigsize 4095",
        ] {
            assert!(check(&args(line)).is_err(), "{line}");
        }
        assert_eq!(check(&args("x --server h/e")), Ok(()));
        assert!(Line::try_parse_from(["x", "--server", "h/e", "--op", "nonsense"]).is_err());
    }
}
