//! The program `towline`: the server, the commands that use remote files, and what measures them.
//!
//! Every command is a module with its `Args` and a `run` that gives the exit status: 0 when all
//! went well, 1 when an operation failed, 2 for a wrong command line. An error about one argument
//! is printed as `towline: COMMAND: OBJECT: MESSAGE` and the others are still worked on.
#![forbid(unsafe_code)]

mod bench;
mod cat;
mod copy;
mod demo;
mod df;
mod doctor;
mod ls;
mod remote;
mod remove;
mod report;
mod run;
mod serve;
mod simple;
mod stat;
mod stats;
mod sum;
mod text;
mod time;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Names of remote files:
  towline://HOST[:PORT]/EXPORT/PATH                  TCP (port 7440 unless given), or shared memory
                                                     when the server is on this machine
  towline+tcp://HOST[:PORT]/EXPORT/PATH              TCP always
  towline+unix:///EXPORT/PATH?socket=/run/t.sock     a Unix socket
  towline+shm:///EXPORT/PATH?socket=/run/t.sock      shared memory, set up through that socket
Bytes that a URL cannot hold are written %XX.

Examples:
  towline serve --dir data=/srv/data --listen tcp://127.0.0.1:7440
  towline ls -lR towline://127.0.0.1/data
  towline cp -r ./tree towline://127.0.0.1/data/tree
  towline demo

Exit status: 0 all well, 1 an operation failed, 2 wrong usage.";

/// Fast remote files.
#[derive(Parser)]
#[command(name = "towline", version, about, after_help = EXAMPLES, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve directories and memory file systems.
    Serve(serve::Args),
    /// List directories, or the exports of a server.
    Ls(ls::Args),
    /// Show all attributes of files.
    Stat(stat::Args),
    /// Write the contents of files to standard output.
    Cat(cat::Args),
    /// Copy files to, from and between servers.
    Cp(copy::Args),
    /// Remove files and directories.
    Rm(remove::Args),
    /// Make directories.
    Mkdir(simple::MkdirArgs),
    /// Rename or move within an export.
    Mv(simple::MvArgs),
    /// Make links.
    Ln(simple::LnArgs),
    /// Show the space of exports.
    Df(df::Args),
    /// Checksums of file contents.
    Sum(sum::Args),
    /// Show a server's counters and stage times.
    Stats(stats::Args),
    /// Show what this machine offers and which paths will be taken.
    Doctor(doctor::Args),
    /// A tour with an embedded server and real timings.
    Demo(demo::Args),
    /// Run a program with remote files below local paths.
    Run(run::Args),
    /// Measure: load generator and limits.
    Bench(bench::Args),
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    match Cli::parse().command {
        Command::Serve(args) => serve::run(args),
        Command::Ls(args) => ls::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Cat(args) => cat::run(&args),
        Command::Cp(args) => copy::run(args),
        Command::Rm(args) => remove::run(&args),
        Command::Mkdir(args) => simple::make_directories(&args),
        Command::Mv(args) => simple::rename(&args),
        Command::Ln(args) => simple::link(&args),
        Command::Df(args) => df::run(&args),
        Command::Sum(args) => sum::run(&args),
        Command::Stats(args) => stats::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Bench(args) => bench::run(args),
    }
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
