//! `towline cat`: file contents on standard output.

use crate::remote::Remotes;
use crate::report::{Outcome, Report};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::ops::Range;
use std::process::ExitCode;
use towline_client::File;

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
    for url in &args.urls {
        let result = remotes.place(url).and_then(|place| {
            let file = place.base.open(place.path(), 0, 0)?;
            read_through(&file, 0..u64::MAX, |data| {
                report.output(out.write_all(data));
                Ok(())
            })
        });
        report.check(url, result);
    }
    report.output(out.flush());
    report.status()
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
            if count < READ_BYTES {
                // The end, or a short read: the requests behind it have other offsets now.
                break;
            }
        }
    }
}
