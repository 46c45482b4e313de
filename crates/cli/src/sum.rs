//! `towline sum`: checksums of file contents, remote or local, to compare copies.

use crate::ahead::{Ahead, FIRST_BYTES, start_open};
use crate::cat::read_through;
use crate::copy::end::{End, Listed, Listing, Reading, Status};
use crate::copy::handle::Handle;
use crate::remote::Remotes;
use crate::report::{Failure, Outcome, Report};
use crate::text::shown;
use crate::walk::Walk;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use towline_client::{Attr, Errno};

const EXAMPLES: &str = "\
Prints CRC32C, length and name of every file. With -r the names are relative to the directory, so
that the output for two copies of a tree is the same.

Examples:
  towline sum towline://host/data/file ./file
  diff <(towline sum -r ./tree) <(towline sum -r towline://host/data/tree)

Exit status: 0 all summed, 1 something could not be read or changed length, 2 wrong usage.";

/// Bytes of a local file read at once.
const READ_BYTES: usize = 1024 * 1024;

/// Files up to this size are read in one piece, remote ones in one round trip.
const WHOLE_BYTES_MAX: u64 = 256 * 1024;

/// Such files of a tree that are requested ahead, so that their round trips overlap.
const AHEAD: usize = 32;

/// Arguments of `sum`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Sum up all regular files below a directory, sorted by name.
    #[arg(short, long)]
    recursive: bool,
    /// Files: URLs or local paths.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<OsString>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("sum");
    let remotes = Remotes::default();
    // With -r they are most likely directories.
    let names = args.files.iter().filter(|_| !args.recursive);
    let names = names.map(|file| file.to_str().unwrap_or_default());
    let mut openings = Ahead::new(&remotes, names, start_open);
    for file in &args.files {
        let text = file.to_string_lossy();
        let end = End::parse(&remotes, file);
        let ahead = openings.next().filter(|(file, _)| !file.attr().is_directory());
        let result = end.and_then(|end| {
            if let Some((open, first)) = ahead {
                let sum = sum_open(&Handle::Remote(open), first.as_deref())?;
                line(&sum, file.as_bytes(), &report);
                return Ok(());
            }
            let status = end.status(true)?;
            if !status.attr.is_directory() {
                line(&sum(&end, &status, None)?, file.as_bytes(), &report);
                return Ok(());
            }
            if !args.recursive {
                return Err(Failure::from(Errno::EISDIR).with("use -r"));
            }
            tree(end, &report);
            Ok(())
        });
        report.check(text, result);
    }
    report.status()
}

/// A regular file of a tree.
struct Found {
    end: End,
    /// Its path from the top of the tree.
    path: Vec<u8>,
    status: Status,
}

/// A regular file or a directory of a tree, in its place in the order.
enum Next {
    File(Box<Found>),
    /// The next one of [`Tree::directories`].
    Directory,
}

/// The regular files of a tree that are still to be summed up. Links are not followed.
struct Tree<'a> {
    /// The next one is the last.
    stack: Vec<Next>,
    /// With their paths from the top of the tree.
    directories: Walk<(End, Vec<u8>), Listing>,
    report: &'a Report,
}

/// Sums up all regular files below a directory.
fn tree(top: End, report: &Report) {
    let directories = Walk::new((top, Vec::new()));
    let mut tree = Tree { stack: vec![Next::Directory], directories, report };
    let mut files = VecDeque::new();
    loop {
        while let Some(found) = (files.len() < AHEAD).then(|| tree.next()).flatten() {
            let started = whole(&found.status)
                .and_then(|length| found.end.start_read_start(found.status.is_followed, length));
            files.push_back((found, started));
        }
        let Some((Found { end, path, status }, started)) = files.pop_front() else { return };
        if let Some(sum) = report.check(&end, sum(&end, &status, started)) {
            line(&sum, &path, report);
        }
    }
}

impl Tree<'_> {
    fn next(&mut self) -> Option<Found> {
        loop {
            match self.stack.pop()? {
                Next::File(found) => return Some(*found),
                Next::Directory => self.list(),
            }
        }
    }

    /// Lists the next directory.
    fn list(&mut self) {
        // For the argument itself, a link may have been followed.
        let start = |(end, path): &mut (End, Vec<u8>)| {
            let follow = path.is_empty();
            *end = end.clone().shortened(follow).ok()?;
            end.start_list(follow)
        };
        let Some(((end, path), started)) = self.directories.take(start) else { return };
        let follow = path.is_empty();
        let listed = end.clone().shortened(follow).and_then(|end| {
            let failed = |failure| self.report.error(&end, failure);
            let listed = match started {
                Some(listing) => listing.wait(failed),
                None => end.list(follow, failed),
            }?;
            Ok((listed, end))
        });
        let Some((mut listed, end)) = self.report.check(&end, listed) else { return };
        listed.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let mut below = Vec::new();
        let mut next = Vec::new();
        for Listed { name, status } in listed {
            let (end, path) = (end.child(&name), crate::remote::join(&path, &name));
            if status.attr.is_directory() {
                below.push((end, path));
                next.push(Next::Directory);
            } else if status.attr.is_file() {
                next.push(Next::File(Box::new(Found { end, path, status })));
            }
        }
        self.directories.enter(below);
        self.stack.extend(next.into_iter().rev());
    }
}

/// The checksum of what was read so far.
#[derive(Debug, Default)]
struct Sum {
    crc: u32,
    bytes: u64,
}

impl Sum {
    fn add(&mut self, data: &[u8]) {
        self.crc = crc32c::crc32c_append(self.crc, data);
        self.bytes += data.len() as u64;
    }

    /// Adds `count` zeros in logarithmic time: the sum of twice as many follows from that of half.
    fn add_zeros(&mut self, count: u64) {
        let (mut zeros, mut length, mut left) = (crc32c::crc32c(&[0]), 1, count);
        while left > 0 {
            if left & 1 == 1 {
                self.crc = crc32c::crc32c_combine(self.crc, zeros, length);
            }
            zeros = crc32c::crc32c_combine(zeros, zeros, length);
            // The last doubling is not used.
            length = length.wrapping_mul(2);
            left >>= 1;
        }
        self.bytes += count;
    }

    /// Adds these bytes of a file, or fewer if it ends before.
    fn read(&mut self, handle: &Handle, bytes: Range<u64>) -> Outcome<()> {
        if let Handle::Remote(file) = handle {
            return read_through(file, bytes, |data| {
                self.add(data);
                Ok(())
            });
        }
        let mut buffer = vec![0; READ_BYTES.min((bytes.end - bytes.start) as usize)];
        let mut at = bytes.start;
        while at < bytes.end {
            let wanted = (bytes.end - at).min(buffer.len() as u64) as usize;
            let read = handle.read_at(&mut buffer[..wanted], at)?;
            self.add(&buffer[..read]);
            at += read as u64;
            if read < wanted {
                break;
            }
        }
        Ok(())
    }
}

/// How much to read of a file that is read in one piece: one byte more than it has, so that its end is seen.
fn whole(seen: &Status) -> Option<usize> {
    let Attr { size, .. } = seen.attr;
    let is_whole = seen.attr.is_file() && size <= WHOLE_BYTES_MAX && !seen.attr.is_sparse();
    is_whole.then_some(size as usize + 1)
}

/// Sums up the file whose attributes were read.
fn sum(end: &End, seen: &Status, started: Option<Reading>) -> Outcome<Sum> {
    if let Some(length) = whole(seen) {
        let data = match started {
            Some(reading) => reading.wait(),
            None => end.read_start(seen.is_followed, length),
        }?;
        if data.len() as u64 == seen.attr.size {
            let mut sum = Sum::default();
            sum.add(&data);
            return Ok(sum);
        }
    }
    let handle = if seen.attr.is_file() { end.open_regular(seen.is_followed) } else { end.open() }?;
    sum_open(&handle, None)
}

/// Sums up an open file, whose first [`FIRST_BYTES`] may have been read: fewer if there are no more.
fn sum_open(handle: &Handle, first: Option<&[u8]>) -> Outcome<Sum> {
    let attr = handle.opened()?;
    let mut sum = Sum::default();
    if let Some(first) = first {
        sum.add(first);
        if attr.is_file() && first.len() < FIRST_BYTES && sum.bytes == attr.size {
            return Ok(sum);
        }
    }
    if attr.is_sparse() {
        // Holes are not read.
        while sum.bytes < attr.size {
            let data = handle.data(sum.bytes)?.unwrap_or(attr.size).min(attr.size);
            sum.add_zeros(data.saturating_sub(sum.bytes));
            let end = handle.hole(data)?.unwrap_or(attr.size).clamp(data, attr.size);
            sum.read(handle, data..end)?;
            if sum.bytes < end {
                break;
            }
        }
        // Data appended meanwhile.
        sum.read(handle, attr.size..attr.size + 1)?;
    } else {
        sum.read(handle, sum.bytes..u64::MAX)?;
    }
    // Files that the kernel generates when they are read have no blocks and a meaningless size.
    let is_made_up = || Ok::<_, Failure>(attr.blocks == 0 && handle.opened()?.size == attr.size);
    if attr.is_file() && sum.bytes != attr.size && !is_made_up()? {
        return Err(Failure::new(format!(
            "read {} bytes of a file of {} bytes: it changed meanwhile",
            sum.bytes, attr.size
        )));
    }
    Ok(sum)
}

fn line(sum: &Sum, name: &[u8], report: &Report) {
    let mut out = io::stdout().lock();
    let line = line_of(sum, name, out.is_terminal());
    report.output(out.write_all(&line));
}

/// Returns the line for a file. As with `sha256sum`, it begins with a backslash if the name has characters that would
/// make it ambiguous; these are escaped.
fn line_of(sum: &Sum, name: &[u8], terminal: bool) -> Vec<u8> {
    let is_ambiguous = name.iter().any(|byte| matches!(byte, b'\\' | b'\n' | b'\r'));
    let mut line = if is_ambiguous { b"\\".to_vec() } else { Vec::new() };
    line.extend(format!("{:08x} {:>12}  ", sum.crc, sum.bytes).into_bytes());
    if terminal {
        line.extend(shown(name, true));
    } else {
        for byte in name {
            match byte {
                b'\\' => line.extend(b"\\\\"),
                b'\n' => line.extend(b"\\n"),
                b'\r' => line.extend(b"\\r"),
                other => line.push(*other),
            }
        }
    }
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_line() {
        let line = |name: &[u8], terminal| line_of(&Sum::default(), name, terminal);
        let sum = "00000000            0  ";
        for terminal in [false, true] {
            assert_eq!(line(b"a b", terminal), format!("{sum}a b\n").into_bytes());
            let escaped = format!("\\{sum}a\\nb\\\\c\n").into_bytes();
            assert_eq!(line(b"a\nb\\c", terminal), escaped);
        }
        assert_eq!(line(b"\r", false), format!("\\{sum}\\r\n").into_bytes());
        assert_eq!(line(b"\xff\x1b", false), [sum.as_bytes(), b"\xff\x1b\n"].concat());
    }

    #[test]
    fn zeros_are_summed_without_being_read() {
        for count in [0, 1, 2, 3, 4095, 4096, 100_001] {
            let (mut short, mut long) = (Sum::default(), Sum::default());
            for sum in [&mut short, &mut long] {
                sum.add(b"before");
            }
            short.add_zeros(count);
            long.add(&vec![0; count as usize]);
            assert_eq!((short.crc, short.bytes), (long.crc, long.bytes), "{count}");
        }
    }
}
