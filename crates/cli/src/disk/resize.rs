//! `towline disk resize`.

use super::end;
use crate::remote::Remotes;
use crate::report::{Failure, Outcome};
use towline_attach::nbd::Source;
use towline_client::{Disk, Errno, Url};

const EXAMPLES: &str = "\
Examples:
  towline disk resize towline://host/vm1 +20G
  towline disk resize --shrink towline://host/vm1 10G          WHAT IS BEHIND THE NEW END IS LOST
  towline disk resize towline://host/vm1                       after the file behind it has grown

Exit status: 0 all well, 1 an operation failed, 2 wrong usage.";

/// Arguments of `disk resize`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Allow it to become shorter: what is behind the new end is lost.
    #[arg(long, requires = "size")]
    shrink: bool,
    /// A disk of a Towline server.
    pub(super) disk: String,
    /// Bytes, or with K, M, G, T; with + or - more or less than now; unless given, as long as the
    /// file or device behind it has become.
    #[arg(allow_hyphen_values = true, value_parser = end::size)]
    size: Option<(Option<char>, u64)>,
}

/// Runs the command.
pub(super) fn run(args: &Args, remotes: &Remotes) -> Outcome<String> {
    if Source::looks_like(&args.disk) {
        return Err(Failure::new("NBD has no way to ask for another size"));
    }
    if !Url::looks_like(&args.disk) {
        return Err(Failure::new("for a local file use truncate(1)"));
    }
    let disk = end::remote(remotes, &args.disk)?;
    let before = disk.refresh()?.size;
    let asked = match args.size {
        None => None,
        Some((None, size)) => Some(size),
        Some((Some('+'), more)) => Some(before.checked_add(more).ok_or_else(too_much)?),
        Some((Some(_), less)) => Some(before.checked_sub(less).ok_or_else(too_much)?),
    };
    if asked == Some(0) && before > 0 {
        return Err(Failure::new("no disk can be made empty while it is served"));
    }
    // Zero asks the server to look.
    let size = asked.unwrap_or(0);
    if size > i64::MAX as u64 {
        return Err(too_much());
    }
    if (1..before).contains(&size) && !args.shrink {
        return Err(Failure::new(format!(
            "{size} bytes are fewer than {before}: the data beyond would be lost; --shrink allows it"
        )));
    }
    let after = disk.resize(size).map_err(|error| explained(Failure::from(error), &disk))?.size;
    // What was known before it looked again is gone: it also looks when the disk is opened.
    Ok(if asked.is_some() {
        format!("{before} -> {after} bytes\n")
    } else {
        format!("{after} bytes\n")
    })
}

/// Adds what to do about a failure.
fn explained(failure: Failure, disk: &Disk) -> Failure {
    if failure.is(Errno::EOPNOTSUPP) {
        return failure.with(
            "a device, also one in a stripe, gets another size where it is made; \
             then `towline disk resize` without a size makes it known",
        );
    }
    if failure.is(Errno::EFBIG) {
        return failure.with(
            "memory grows to 16 times its first size, a file to what its file system allows",
        );
    }
    if failure.is(Errno::EINVAL) {
        let block = disk.info().block_minimum;
        return failure.with(format_args!(
            "it has to be in blocks of {block} bytes, for a stripe in its chunk times the number of members"
        ));
    }
    failure
}

fn too_much() -> Failure {
    Failure::new("no disk can have that size")
}
