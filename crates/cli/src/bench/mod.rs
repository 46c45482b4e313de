//! `towline bench`: a load generator that uses the client library, and the limits of this machine.
//!
//! It prints `#start` and `#end` around the measured time and one JSON object on the last line, so that other
//! programs can run it beside the load generators of other systems.

mod clients;
pub(crate) mod disk;
mod disk_client;
mod limits;
mod local;
pub(crate) mod nbd_client;
mod paper;
mod processes;
mod processor;
mod raw;
mod raw_args;
mod raw_clients;
mod result;
mod several;
mod shared;
mod threads;
mod tree;
mod workload;

use crate::report::note;
use std::process::ExitCode;

const EXAMPLES: &str = "\
The tree that is measured holds tree/dNNN/fNNNNN (100 files of 4 KiB in each directory), the file
big, and the directory wr for what is written.

Operations: stat_same stat_diff orc (open, read, close) scan_stat scan_read create_unlink seqread
seqwrite randread randwrite clients (like seqread) rwmix (every other client writes).

Examples:
  towline bench file --server towline://127.0.0.1/data --op stat_diff
  towline bench file --server towline://127.0.0.1/data --op clients --bs 64K --procs 184
  towline bench file --server /srv/data --op scan_stat --again        the same without a server
  towline bench net --kind tcp --bs 4140 --pin 0,1
  towline bench net --op stream --sendfile /srv/data/big
  towline bench net --procs 184 --bs 64K --sendfile /srv/data/big
  towline bench limits
  towline bench limits --op memcpy,sendfile
  towline bench disk --nbd 127.0.0.1:10809 --export img --size 4K --depth 32 --random
  towline bench disk --server towline://127.0.0.1/img --size 4K --depth 32 --random --write
  towline bench disk --paper --dir /mnt/disk --plot paper.svg --json paper.json

To compare one operation at a time, pin both ends (--pin here, taskset for the server): left to
the scheduler, they land on one processor or on two, and that alone changes the latency by half.

Exit status: 0 measured, 1 an operation failed or a value is beyond its limits, 2 wrong usage.";

/// Seconds that `bench file` and `bench net` may take. Nothing can be measured in no time, and more than a day
/// is a mistake.
const SECS: std::ops::RangeInclusive<f64> = 0.001..=86_400.0;
/// Seconds that they may run before they measure.
const RAMP: std::ops::RangeInclusive<f64> = 0.0..=86_400.0;

/// Refuses other seconds than these.
fn check_length(ramp: f64, secs: f64) -> Result<(), String> {
    if !SECS.contains(&secs) {
        return Err("--secs: expected 0.001 to 86400".into());
    }
    if !RAMP.contains(&ramp) {
        return Err("--ramp: expected 0 to 86400".into());
    }
    Ok(())
}

/// Arguments of `bench`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// File operations on a server.
    File(workload::Args),
    /// Load on a disk, or the experiments of the gmblock paper.
    Disk(disk::Args),
    /// Raw round trips and streams without Towline, to compare the other figures with.
    Net(raw_args::Args),
    /// The limits of this machine.
    Limits(limits::Args),
}

/// Runs the command.
pub(crate) fn run(args: Args) -> ExitCode {
    let result = match args.what {
        What::File(args) => clients::run(&args),
        What::Disk(args) => disk::run(&args),
        What::Net(args) => raw::run(&args),
        What::Limits(args) => limits::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            note(format_args!("towline: bench: {message}"));
            ExitCode::FAILURE
        }
    }
}
