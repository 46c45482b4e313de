//! The program `towline`: the server, the commands that use remote files, and the tools that measure them.
//!
//! Every command is a module with its `Args` and a `run` that returns the exit status: 0 for success, 1 if an
//! operation failed, 2 for a wrong command line. A command prints an error about one argument as `towline:
//! COMMAND: OBJECT: MESSAGE` and continues with the other arguments.
#![deny(unsafe_code)]
// The std macros panic if the output cannot be written; `report::note` does not.
#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod ahead;
mod allocator;
mod attach;
mod bench;
mod cat;
mod check;
mod copy;
mod demo;
mod descriptors;
mod detach;
mod df;
mod disk;
mod doctor;
mod interrupt;
#[cfg(launch)]
mod launch;
mod ls;
mod progress;
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
mod walk;
mod workers;

use clap::{Args, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator;

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

/// Fast remote files and disks.
#[derive(Parser)]
#[command(name = "towline", version, after_help = EXAMPLES, arg_required_else_help = true)]
// If a flag is repeated, the last one counts. So programs and aliases may add flags.
#[command(args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve directories, memory file systems and disks.
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
    /// Show the total, used and free space of exports.
    Df(df::Args),
    /// Print checksums of file contents.
    Sum(sum::Args),
    /// Show a server's counters and stage times.
    Stats(stats::Args),
    /// Show what this machine offers and which paths Towline will take.
    Doctor(doctor::Args),
    /// Take a tour with an embedded server and real timings.
    Demo(demo::Args),
    /// Make a remote disk a local block device; list and resume such devices.
    Attach(attach::Args),
    /// Remove local block devices made by attach.
    Detach(detach::Args),
    /// Inspect, copy and resize disks.
    Disk(disk::Args),
    #[command(about = run::ABOUT)]
    Run(run::Args),
    /// Check whether programs work under run.
    Check(check::Args),
    /// Measure performance: load generator and limits of this machine.
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next() {
        Some(name) if name == "run" => {
            let plain = run::Args::plain(arguments);
            start(Command::Run(plain.unwrap_or_else(|| parse_run(std::env::args_os().skip(1)))))
        }
        Some(name) if name == run::KEEP => run::keep(arguments),
        Some(name) if name == serve::HOLD => serve::hold(arguments),
        _ if stack_is_short() => {
            // The thread has reported its panic already.
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(parse_and_start);
            match thread.map(std::thread::JoinHandle::join) {
                Ok(ended) => ended.unwrap_or(ExitCode::from(101)),
                Err(error) => {
                    report::note(format_args!(
                        "towline: cannot create a thread with a larger stack: {error}"
                    ));
                    ExitCode::FAILURE
                }
            }
        }
        _ => parse_and_start(),
    }
}

/// Stack size that is enough for all commands: describing them to the parser alone takes 55 KiB.
const STACK_BYTES: usize = 1 << 20;

/// Returns true if the first thread's stack limit (`ulimit -s`) is less than commands may need.
fn stack_is_short() -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack).current;
    limit.is_some_and(|limit| limit < STACK_BYTES as u64)
}

fn parse_and_start() -> ExitCode {
    log_to_standard_error(LOGGED);
    be_told_of_the_file_size_limit();
    start(Cli::try_parse().unwrap_or_else(|error| tell(&error)).command)
}

fn start(command: Command) -> ExitCode {
    match command {
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
        Command::Attach(args) => attach::run(&args),
        Command::Detach(args) => detach::run(&args),
        Command::Disk(args) => disk::run(&args),
        Command::Run(args) => {
            run::signals::take_pipe_signal();
            ExitCode::from(run::run(&args))
        }
        Command::Check(args) => check::run(&args),
        Command::Bench(args) => bench::run(args),
    }
}

/// The default log filter: warnings and worse.
const LOGGED: &str = "warn";
/// The log filter of a run, whose programs write to the same standard error. It leaves out that a server is
/// away for a while, which the programs do not notice.
const LOGGED_OF_RUN: &str = "warn,towline_client=error";

/// Starts logging with this filter, unless the environment sets another (`RUST_LOG`).
fn log_to_standard_error(logged: &str) {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(logged)).init();
}

/// Makes a write beyond `RLIMIT_FSIZE` fail with `EFBIG` instead of ending this process.
fn be_told_of_the_file_size_limit() {
    if let Err(error) = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default()) {
        log::warn!("cannot handle SIGXFSZ: {error}");
    }
}

/// Parses the arguments of `run` alone, with the result that `Cli::parse` would give. Describing all commands
/// takes longer than starting a program.
fn parse_run(arguments: impl Iterator<Item = OsString>) -> run::Args {
    read_run(arguments).unwrap_or_else(|error| tell(&error))
}

/// Prints the help text or the error in the command line, and exits.
fn tell(error: &clap::Error) -> ! {
    let said = error.print().and_then(|()| std::io::stdout().flush());
    // An error that cannot be printed is still an error in the command line.
    if !error.use_stderr() {
        report::Report::new("help").output(said);
    }
    std::process::exit(error.exit_code())
}

fn read_run(arguments: impl Iterator<Item = OsString>) -> Result<run::Args, clap::Error> {
    run::Args::from_arg_matches(&run_alone().try_get_matches_from(arguments)?)
}

fn run_alone() -> clap::Command {
    let command = clap::Command::new("run").bin_name("towline run").args_override_self(true);
    run::Args::augment_args(command).about(run::ABOUT).long_about(None)
}

#[cfg(test)]
mod tests {
    use super::{Cli, read_run, run_alone};
    use clap::{CommandFactory, Parser};

    const PAGES: [(&str, &str); 8] = [
        ("towline", include_str!("../../../man/towline.1")),
        ("towline-cp", include_str!("../../../man/towline-cp.1")),
        ("towline-serve", include_str!("../../../man/towline-serve.1")),
        ("towline-bench", include_str!("../../../man/towline-bench.1")),
        ("towline-run", include_str!("../../../man/towline-run.1")),
        ("towline-check", include_str!("../../../man/towline-check.1")),
        ("towline-disk", include_str!("../../../man/towline-disk.1")),
        ("towline-attach", include_str!("../../../man/towline-attach.1")),
    ];

    /// The manual text of a command: its own page, or its part of towline(1).
    fn page(command: &str) -> String {
        let own = format!("towline-{command}");
        let plain = |text: &str| text.replace("\\-", "-");
        if let Some((_, text)) = PAGES.iter().find(|(name, _)| *name == own) {
            return plain(text);
        }
        let start = format!(".TP\n.BI \"{command} ");
        let (_, rest) = PAGES[0].1.split_once(&start).unwrap_or_else(|| panic!("no {command}"));
        let end = rest.find("\n.TP\n.BI \"").into_iter().chain(rest.find("\n.S")).min();
        plain(&rest[..end.unwrap_or(rest.len())])
    }

    /// Returns true if the text contains the flag as a whole word.
    fn names(text: &str, flag: &str) -> bool {
        text.match_indices(flag).any(|(at, _)| {
            let next = text[at + flag.len()..].chars().next();
            !next.is_some_and(|c| c == '-' || c.is_alphanumeric())
        })
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn run_is_described_alone_as_among_all() {
        let mut all = Cli::command();
        all.build();
        let among = all.find_subcommand_mut("run").expect("there is one").render_long_help();
        assert_eq!(among.to_string(), run_alone().render_long_help().to_string());
    }

    #[test]
    fn what_is_said_twice_holds_once() {
        for line in ["ls -l -l x", "cp -rR -a -a -j 3 -j 4 a b", "serve --cores 1 --cores 2"] {
            let words = std::iter::once("towline").chain(line.split(' '));
            if let Err(error) = Cli::try_parse_from(words) {
                panic!("{line}: {error}");
            }
        }
        let run = "run --report --report=json --at /a=towline://h/e --at /b=towline://h/e -- ls";
        let arguments = read_run(run.split(' ').map(Into::into)).unwrap();
        assert_eq!(format!("{arguments:?}").matches("towline://h/e").count(), 2, "both are kept");
    }

    #[test]
    fn manual_pages_name_every_command_and_flag() {
        fn flags(command: &clap::Command, text: &str, missing: &mut Vec<String>) {
            for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                let long = argument.get_long().filter(|long| *long != "help");
                let short = argument.get_short().filter(|_| argument.get_long().is_none());
                let short = short.map(|short| short.to_string());
                for flag in
                    long.map(|l| format!("--{l}")).into_iter().chain(short.map(|s| format!("-{s}")))
                {
                    if !names(text, &flag) {
                        missing.push(format!("{}: {flag}", command.get_name()));
                    }
                }
            }
            for below in command.get_subcommands() {
                flags(below, text, missing);
            }
        }
        let mut missing = Vec::new();
        for command in Cli::command().get_subcommands() {
            flags(command, &page(command.get_name()), &mut missing);
        }
        assert!(missing.is_empty(), "not in the manual: {missing:?}");
    }

    #[test]
    fn manual_pages_name_no_flag_that_is_none() {
        fn collect(command: &clap::Command, flags: &mut Vec<String>) {
            flags.extend(command.get_arguments().filter_map(|a| a.get_long()).map(str::to_owned));
            command.get_subcommands().for_each(|below| collect(below, flags));
        }
        // The last three belong to other programs.
        let mut flags = ["help", "version", "input", "dev", "bind"].map(str::to_owned).to_vec();
        collect(&Cli::command(), &mut flags);
        let mut unknown = Vec::new();
        for (page, text) in PAGES {
            let text = text.replace("\\-", "-");
            for (at, _) in text.match_indices("--") {
                let rest = &text[at + 2..];
                let end = rest.find(|c: char| c != '-' && !c.is_ascii_alphanumeric());
                let flag = &rest[..end.unwrap_or(rest.len())];
                let begins = flag.starts_with(|c: char| c.is_ascii_lowercase());
                if begins && !flags.iter().any(|known| known == flag) {
                    unknown.push(format!("{page}: --{flag}"));
                }
            }
        }
        assert!(unknown.is_empty(), "no command has them: {unknown:?}");
    }

    #[test]
    fn manual_pages_name_every_value_and_default() {
        /// The forms in which the manual may give a number of bytes.
        fn ways(value: &str) -> Vec<String> {
            let mut ways = vec![value.to_owned()];
            for (unit, bytes) in [("K", 1_u64 << 10), ("M", 1 << 20), ("G", 1 << 30)] {
                if let Ok(number) = value.parse::<u64>()
                    && number >= bytes
                    && number.is_multiple_of(bytes)
                {
                    let count = number / bytes;
                    ways.extend([format!("{count}{unit}"), format!("{count} {unit}iB")]);
                }
            }
            ways
        }
        fn look(command: &clap::Command, text: &str, missing: &mut Vec<String>) {
            let told = |word: &str| {
                text.match_indices(word).any(|(at, _)| {
                    !text[..at].chars().next_back().is_some_and(char::is_alphanumeric)
                        && names(&text[at..], word)
                })
            };
            let visible = command.get_arguments().filter(|a| !a.is_hide_set());
            for argument in visible.filter(|a| a.get_action().takes_values()) {
                let values = argument.get_possible_values();
                let values =
                    values.iter().filter(|v| !v.is_hide_set()).map(|v| v.get_name().to_owned());
                let defaults = argument.get_default_values().iter();
                let defaults = defaults.map(|v| v.to_string_lossy().into_owned());
                let lists = values.chain(defaults).collect::<Vec<_>>();
                for value in lists.iter().flat_map(|list| list.split(',')) {
                    if !ways(value).iter().any(|way| told(way)) {
                        missing.push(format!(
                            "{} {}: {value}",
                            command.get_name(),
                            argument.get_id()
                        ));
                    }
                }
            }
            for below in command.get_subcommands() {
                look(below, text, missing);
            }
        }
        let mut missing = Vec::new();
        for command in Cli::command().get_subcommands() {
            look(command, &page(command.get_name()), &mut missing);
        }
        assert!(missing.is_empty(), "not in the manual: {missing:?}");
    }

    #[test]
    fn help_of_every_command_has_examples() {
        fn look(command: &clap::Command, above: &str) {
            let name = format!("{above} {}", command.get_name());
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let example = format!("\n  {name} ");
            let plain = format!("\n  {name}\n");
            assert!(after.contains(&example) || after.contains(&plain), "no example for {name}");
            command.get_subcommands().for_each(|below| look(below, &name));
        }
        Cli::command().get_subcommands().for_each(|command| look(command, "towline"));
    }
}
