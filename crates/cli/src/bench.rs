//! `towline bench`: placeholder.

use std::process::ExitCode;

/// Arguments of `bench`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the command.
pub(crate) fn run(_args: Args) -> ExitCode {
    eprintln!("towline: bench: not built yet");
    ExitCode::FAILURE
}
