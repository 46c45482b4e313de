//! `towline disk`: shows, maps, copies, resizes and measures disks.

mod bench;
mod copy;
mod end;
mod info;
mod journal;
mod map;
mod noted;
mod pieces;
mod resize;
mod stream;
mod transfer;
mod verify;

use crate::remote::Remotes;
use crate::report::Report;
use clap::Subcommand;
use std::io::{self, Write};
use std::process::ExitCode;

const EXAMPLES: &str = "\
A DISK is towline://HOST/NAME (also towline+unix: and towline+shm:), nbd://HOST/NAME,
nbd+unix:///NAME?socket=PATH, or a local file or block device.

Examples:
  towline disk info towline://host                        all disks of a server
  towline disk map --totals towline://host/vm1            what is allocated
  towline disk copy --verify img.raw towline://host/vm1   holes stay holes
  towline disk copy --resume towline://host/vm1 vm1.raw   goes on where it was interrupted
  towline disk copy towline://host/vm1 - | zstd >vm1.zst  as a stream
  towline disk bench --random --depth 32 towline://host/vm1
  towline disk resize towline://host/vm1 +20G             for all who use it

Exit status: 0 all well, 1 an operation failed, 2 wrong usage.";

/// Arguments of `disk`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Measure how fast a disk of a server is.
    Bench(bench::Args),
    /// Copy all of a disk.
    Copy(copy::Args),
    /// Show what a disk is like, or all disks of a server.
    Info(info::Args),
    /// Show the extents of a disk.
    Map(map::Args),
    /// Change the size of a disk while it is served.
    Resize(resize::Args),
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("disk");
    let remotes = Remotes::default();
    let (object, done) = match &args.what {
        What::Bench(args) => (args.disk.as_ref(), bench::run(args)),
        What::Copy(args) => (args.source.as_os_str(), copy::run(args, &remotes, &report)),
        What::Info(args) => (args.disk.as_os_str(), info::run(args, &remotes)),
        What::Map(args) => (args.disk.as_os_str(), map::run(args, &remotes)),
        What::Resize(args) => (args.disk.as_ref(), resize::run(args, &remotes)),
    };
    if let Some(text) = report.check(object.display(), done) {
        report.output(io::stdout().write_all(text.as_bytes()));
    }
    report.status()
}
