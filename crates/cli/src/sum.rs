//! `towline sum`: checksums of file contents, remote or local, to compare copies.

use crate::cat::read_through;
use crate::copy::end::End;
use crate::copy::handle::Handle;
use crate::remote::Remotes;
use crate::report::{Failure, Outcome, Report};
use crate::text::shown;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use towline_client::Errno;

const EXAMPLES: &str = "\
Prints CRC32C, length and name of every file. With -r the names are relative to the directory, so
that the output for two copies of a tree is the same.

Examples:
  towline sum towline://host/data/file ./file
  diff <(towline sum -r ./tree) <(towline sum -r towline://host/data/tree)

Exit status: 0 all summed, 1 something could not be read or changed length, 2 wrong usage.";

/// Bytes of a local file read at once.
const READ_BYTES: usize = 1024 * 1024;

/// Arguments of `sum`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// All regular files below a directory, sorted by name.
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
    for file in &args.files {
        let text = file.to_string_lossy();
        let result = End::parse(&remotes, file).and_then(|end| {
            let status = end.status(true)?;
            if !status.attr.is_directory() {
                line(&sum(&end)?, file.as_bytes(), &report);
                return Ok(());
            }
            if !args.recursive {
                return Err(Failure::from(Errno::EISDIR).with("use -r"));
            }
            tree(end, &report)
        });
        report.check(text, result);
    }
    report.status()
}

/// Sums up all regular files below a directory. Links are not followed.
fn tree(top: End, report: &Report) -> Outcome<()> {
    let mut stack = vec![(top.clone(), Vec::new(), true)];
    while let Some((end, path, directory)) = stack.pop() {
        if !directory {
            if let Some(sum) = report.check(&end, sum(&end)) {
                line(&sum, &path, report);
            }
            continue;
        }
        let listed = end.clone().shortened().and_then(|end| Ok((end.list()?, end)));
        let Some((mut listed, end)) = report.check(&end, listed) else { continue };
        listed.sort_unstable_by(|a, b| b.name.cmp(&a.name));
        for entry in listed {
            let attr = entry.status.attr;
            if attr.is_directory() || attr.is_file() {
                let path = crate::remote::join(&path, &entry.name);
                stack.push((end.child(&entry.name), path, attr.is_directory()));
            }
        }
    }
    Ok(())
}

struct Sum {
    crc: u32,
    bytes: u64,
}

fn sum(end: &End) -> Outcome<Sum> {
    let handle = end.open()?;
    let attr = handle.opened()?;
    let mut sum = Sum { crc: 0, bytes: 0 };
    let mut add = |data: &[u8]| {
        sum.crc = crc32c::crc32c_append(sum.crc, data);
        sum.bytes += data.len() as u64;
    };
    match &handle {
        Handle::Remote(file) => read_through(file, |data| {
            add(data);
            Ok(())
        })?,
        Handle::Local(_) => {
            let mut buffer = vec![0; READ_BYTES];
            let mut at = 0;
            loop {
                let read = handle.read_at(&mut buffer, at)?;
                add(&buffer[..read]);
                at += read as u64;
                if read < buffer.len() {
                    break;
                }
            }
        }
    }
    if attr.is_file() && sum.bytes != attr.size {
        return Err(Failure::new(format!(
            "{} bytes were read where its length was {}: it changed meanwhile",
            sum.bytes, attr.size
        )));
    }
    Ok(sum)
}

fn line(sum: &Sum, name: &[u8], report: &Report) {
    let mut out = io::stdout().lock();
    let mut line = format!("{:08x} {:>12}  ", sum.crc, sum.bytes).into_bytes();
    line.extend(shown(name, out.is_terminal()));
    line.push(b'\n');
    report.output(out.write_all(&line));
}
