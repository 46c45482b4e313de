//! `towline cat`: file contents on standard output.

use crate::ahead::{Ahead, FIRST_BYTES, start_open};
use crate::remote::{Place, Remotes};
use crate::report::{Outcome, Report};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::ops::Range;
use std::process::ExitCode;
use towline_client::{Begun, File};

const EXAMPLES: &str = "\
Examples:
  towline cat towline://host/data/log | less
  towline cat towline://host/data/part1 towline://host/data/part2 > whole

Exit status: 0 all written, 1 something could not be read, 2 wrong usage.";

/// Bytes of one request; several are outstanding at once.
const READ_BYTES: usize = 1024 * 1024;
/// Outstanding requests.
const READS: usize = 4;

/// Arguments of `cat`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Files.
    #[arg(required = true, value_name = "URL")]
    urls: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("cat");
    let remotes = Remotes::default();
    // Unbuffered: the pieces are large, and a line buffer would only copy them.
    let mut out = io::stdout().lock();
    let mut openings = Ahead::new(&remotes, args.urls.iter().map(String::as_str), start_open);
    for url in &args.urls {
        let place = remotes.place(url);
        let ahead = openings.next();
        let result = place.and_then(|place| {
            let (file, first) = ahead.map_or_else(|| open(&place), Ok)?;
            let mut sink = |data: &[u8]| {
                report.output(out.write_all(data));
                Ok(())
            };
            // If it cannot be read, another read tells why.
            let Some(first) = first else { return read_through(&file, 0..u64::MAX, sink) };
            sink(&first)?;
            let read = first.len() as u64;
            if read == 0 || is_whole(&file, read, first.len() < FIRST_BYTES) {
                return Ok(());
            }
            read_through(&file, read..u64::MAX, sink)
        });
        report.check(url, result);
    }
    report.output(out.flush());
    report.status()
}

fn open(place: &Place) -> Outcome<Begun> {
    let mut first = vec![0; FIRST_BYTES];
    let (file, read) = place.base.open_reading(place.path(), 0, 0, &mut first)?;
    first.truncate(read.unwrap_or(0));
    Ok((file, read.map(|_| first)))
}

/// Returns true if nothing is left of a file after `read` bytes, of which the last were fewer than asked for if
/// `is_short`. Only files of unknown size, as in /proc, have to be asked again.
fn is_whole(file: &File, read: u64, is_short: bool) -> bool {
    let attr = file.attr();
    is_short && attr.is_file() && attr.size > 0 && read >= attr.size
}

/// Reads these bytes of a file, or up to its end, some requests ahead, and hands
/// them over in order.
pub(crate) fn read_through(
    file: &File,
    bytes: Range<u64>,
    mut sink: impl FnMut(&[u8]) -> Outcome<()>,
) -> Outcome<()> {
    // Files of unknown size, as in /proc, are read one request at a time.
    let ahead = (file.attr().size / READ_BYTES as u64 + 1).min(READS as u64) as usize;
    let mut spare: Vec<Vec<u8>> = Vec::new();
    let mut offset = bytes.start;
    loop {
        let mut started = VecDeque::with_capacity(ahead);
        let mut next = offset;
        loop {
            while started.len() < ahead && next < bytes.end {
                let buffer = spare.pop().unwrap_or_else(|| vec![0; READ_BYTES]);
                started.push_back(file.start_read_at(buffer, next)?);
                next += READ_BYTES as u64;
            }
            let Some(operation) = started.pop_front() else { return Ok(()) };
            let (count, buffer) = operation.wait()?;
            if count == 0 {
                return Ok(());
            }
            let wanted = (bytes.end - offset).min(count as u64) as usize;
            sink(&buffer[..wanted])?;
            offset += wanted as u64;
            spare.push(buffer);
            if is_whole(file, offset, count < READ_BYTES) {
                return Ok(());
            }
            if count < READ_BYTES {
                // The end, or a short read: the requests behind it have other offsets now.
                break;
            }
        }
    }
}
