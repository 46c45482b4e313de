//! `towline bench disk`.

use super::paper;

/// Arguments of `bench disk`.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Run the experiments of the gmblock paper: bandwidth and latency by the way of the data,
    /// size and number of requests, over NBD, and what a server at work costs its neighbours.
    #[arg(long, required = true)]
    paper: bool,
    #[command(flatten)]
    experiments: paper::Args,
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Result<(), String> {
    match args.paper {
        true => paper::run(&args.experiments),
        false => Err("expected --paper".into()),
    }
}
