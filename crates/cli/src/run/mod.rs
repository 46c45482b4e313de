//! `towline run`: runs a program for which paths below given prefixes are remote.
//!
//! The library that does this (crate `preload`) is part of this executable. This module makes a private
//! directory for the run and splits off a second process, the keeper. The original process becomes the
//! program. The keeper connects to the servers (the library waits for that before its first request) and
//! closes what the program and its children leave open (`keeper.rs`). If the executable starts in `launch`,
//! plain command lines never get here: `launch` does the same, and comes back only as the keeper ([`keep`]).

mod behind;
mod cache;
mod connections;
mod directory;
mod faults;
mod fork;
mod holders;
mod keeper;
mod leftovers;
mod lost;
mod memory;
mod others;
mod pager;
mod pending;
mod program;
mod reach;
mod ready;
mod servers;
pub(crate) mod signals;
mod source;
mod summary;
mod watches;

use crate::demo::start_server;
use crate::remote::no_export;
use crate::report::{Failure, Outcome, Report};
use crate::serve::parse_bytes;
use directory::{Library, RunDirectory};
pub(crate) use fork::close_all_inherited;
use keeper::Keeper;
use program::Command;
use reach::Reach;
use ready::Ready;
use rustix::fs::Mode;
use rustix::process::{Pid, Resource, getrlimit, umask};
use rustix::thread::set_thread_groups;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use summary::Format;
use towline_client::{Client, File, Options, Transport, Url};
use towline_instance::behind::Queue;
use towline_instance::program::LINKER;
use towline_instance::{
    Config, DEVICE_MAJOR, MOUNTS_MAX, Mount, Prepared, Root, STATE_BYTES, State, VARIABLE,
};
use towline_net::address::Address;
use towline_server::{Config as ServerConfig, Export, ExportKind, Server};

/// One-line description of the command.
pub(crate) const ABOUT: &str = "Run a program with remote files below local paths";

const EXAMPLES: &str = "\
Paths below a prefix are remote for the program and its children, all others are untouched. The
prefix need not exist. Static programs (most of those written in Go) and those for musl are hosted,
which makes their system calls slower. Setuid programs are not reached, and not started when an
argument names a prefix; `towline check` tells which they are.

Examples:
  towline run --at /data=towline://host/data -- bash
  towline run --at /data=towline://host/data -- tar xf /data/src.tar -C /data/build
  towline run --at /d=towline://host/data --report -- make -C /d/project -j2
  towline run --serve ./dir --at /d -- python3 train.py --input /d
  towline run --cache 50G --at /data=towline://host/data -- python3 train.py --input /data

Exit status: that of the program, which towline becomes, so also its end by a signal (with --report, 128
and the signal's number); 125 when Towline failed, 126 or 127 when the program cannot be executed or found.";

/// Exit status if Towline itself fails.
pub(crate) const STATUS_OURS: u8 = 125;
const STATUS_NOT_EXECUTABLE: u8 = 126;
const STATUS_NOT_FOUND: u8 = 127;

/// Arguments of `run`.
#[derive(clap::Args, Debug, Default, PartialEq, Eq)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Absolute path below which files are remote, and the URL that they come from; without URL, the
    /// directory of --serve.
    #[arg(long = "at", value_name = "PREFIX[=URL]", required = true)]
    at: Vec<OsString>,
    /// Serve this directory while the command runs.
    #[arg(long, value_name = "DIR")]
    serve: Option<PathBuf>,
    /// At the end, report on standard error what was taken over and what slipped through.
    #[arg(long, value_name = "FORMAT", num_args = 0..=1, require_equals = true,
          default_missing_value = "text")]
    report: Option<Format>,
    /// Keep contents of files that programs read, at most this much for all runs of the user (bytes, or with
    /// K, M, G, T). A file is read from there as long as its server says that it has not changed.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    cache: Option<u64>,
    /// Directory of the cache [default: towline in $XDG_CACHE_HOME or ~/.cache].
    #[arg(long, value_name = "DIR", requires = "cache")]
    cache_dir: Option<PathBuf>,
    /// Program and its arguments.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Args {
    /// Parses plain command lines, as nearly all are, in a hundredth of the time of the general parser.
    /// Returns `None` if the general parser must look (wrong arguments, `--help`).
    pub(crate) fn plain(arguments: impl Iterator<Item = OsString>) -> Option<Self> {
        let mut arguments = arguments.peekable();
        let mut args = Self::default();
        loop {
            let argument = arguments.next()?;
            let text = argument.as_bytes();
            let (option, inline) = match text.iter().position(|byte| *byte == b'=') {
                Some(cut) => (&text[..cut], Some(OsString::from_vec(text[cut + 1..].to_vec()))),
                None => (text, None),
            };
            let mut value = || {
                let value = inline.clone().or_else(|| arguments.next())?;
                (!value.is_empty() && value.as_bytes()[0] != b'-').then_some(value)
            };
            match option {
                b"--at" => args.at.push(value()?),
                b"--serve" if args.serve.is_none() => args.serve = Some(value()?.into()),
                b"--report" if args.report.is_none() => {
                    args.report = Some(match inline.as_ref().map(|format| format.as_bytes()) {
                        None | Some(b"text") => Format::Text,
                        Some(b"json") => Format::Json,
                        Some(_) => return None,
                    });
                }
                b"--" if inline.is_none() => break,
                _ => return None,
            }
        }
        args.command = arguments.collect();
        (!args.at.is_empty() && !args.command.is_empty()).then_some(args)
    }
}

/// The umask of all that is made for a run.
const OWN_ONLY: Mode = Mode::RWXG.union(Mode::RWXO);

/// Runs the command and returns the exit status. If the program only has to be started, this process becomes
/// it.
pub(crate) fn run(args: &Args) -> u8 {
    start(args).unwrap_or_else(|failure| {
        Report::new("run").check("cannot start", Err::<(), _>(failure));
        STATUS_OURS
    })
}

/// Prepares the run and splits off the keeper, which does not return.
fn start(args: &Args) -> Outcome<u8> {
    check_file_size_limit()?;
    // What is made for the run is for this user, whatever the umask: that is meant for files of the program.
    let mask = umask(OWN_ONLY);
    let directory = RunDirectory::new()?;
    let own = args.serve.as_ref().map(|_| &directory);
    let mut prefixes =
        args.at.iter().map(|at| prefix_and_url(at, own)).collect::<Outcome<Vec<_>>>()?;
    let is_own = |url: &Url| url.transport == Transport::Unix(directory.socket());
    if own.is_some() && !prefixes.iter().any(|(_, url)| is_own(url)) {
        let what = "nothing would use the directory: each --at has a URL; leave out one of them";
        return Err(Failure::new(what).about("--serve"));
    }
    // The longest prefix comes first, so that a prefix below another one is found.
    prefixes.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
    let mut sorted: Vec<&[u8]> = prefixes.iter().map(|(prefix, _)| prefix.as_slice()).collect();
    sorted.sort_unstable();
    if let Some(twice) = sorted.windows(2).find(|two| two[0] == two[1]) {
        return Err(Failure::new("this prefix is given twice").about(shown(twice[0])));
    }
    if prefixes.len() > MOUNTS_MAX {
        return Err(Failure::new(format!("more than {MOUNTS_MAX} prefixes")));
    }
    let command = reach::beginning(&args.command, &sorted);
    let reach = reach::may_start(&command, &sorted);
    if reach == Reach::Refused {
        return Ok(STATUS_NOT_EXECUTABLE);
    }
    let cache =
        args.cache.map(|limit| cache::Folder::new(args.cache_dir.as_deref(), limit)).transpose()?;
    let library = Library::new()?;
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty())
        .map_err(io::Error::from)?;
    let config = Config {
        family: u64::from_le_bytes(random) | 1,
        report: args.report.is_some(),
        library: library.path().as_os_str().as_bytes().to_vec(),
        cache: cache
            .as_ref()
            .map_or(Vec::new(), |cache| cache.path().as_os_str().as_bytes().to_vec()),
        mounts: mounts(&prefixes),
    };
    let state =
        State::prepare(directory.path().as_os_str().as_bytes(), &config).map_err(|error| {
            directory::elsewhere(Failure::from(error).about(directory.path().display()))
        })?;
    // Mapped here, where a failure can still be reported; the keeper inherits the mapping.
    let mapped = state.map()?;
    let side = fork::apart().map_err(|error| {
        let failure = Failure::from(error).about("cannot create a process");
        failure.with("has the limit of processes been reached (ulimit -u, pids.max)?")
    })?;
    match side {
        fork::Side::Program => {
            // The keeper removes the directory.
            let directory = directory.leave();
            umask(mask);
            execute(args, command, library.path(), &directory, reach)
        }
        fork::Side::Keeper(program) => {
            fork::let_go_of_inherited();
            crate::log_to_standard_error(crate::LOGGED_OF_RUN);
            let urls = Ok(prefixes.into_iter().map(|(_, url)| url).collect());
            let served = args.serve.clone();
            Run { served, cache, directory, state, family: config.family }
                .keep(&program, urls, mapped);
            drop(library);
            std::process::exit(0);
        }
    }
}

/// Fails where the limit on file sizes forbids a file as long as the state, the longest that is made here: writing
/// beyond it would end this process by `SIGXFSZ`.
fn check_file_size_limit() -> Outcome<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < STATE_BYTES as u64 => Err(Failure::new(format!(
            "the limit on file sizes leaves no room for the state of the run; raise it (ulimit -f) to {} KiB",
            STATE_BYTES.div_ceil(1024)
        ))),
        _ => Ok(()),
    }
}

/// Name of the command with which `launch` starts the keeper of a run that it has made.
pub(crate) const KEEP: &str = "keep";

/// Runs `towline keep DIRECTORY PROCESS DESCRIPTOR`: becomes the keeper of a run whose directory exists, with
/// its state. PROCESS becomes the program. This process has inherited two descriptors: DESCRIPTOR, a pidfd of
/// that process, and one that locks the library.
pub(crate) fn keep(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let mut begin = || -> Outcome<_> {
        let directory = PathBuf::from(arguments.next().unwrap_or_default());
        let mut number = || arguments.next().and_then(|text| text.to_str()?.parse().ok());
        let process = number().filter(|process| *process > 0);
        let process = process.and_then(Pid::from_raw).ok_or(Failure::new("no process"))?;
        let seen = number().and_then(fork::inherited).ok_or(Failure::new("no descriptor"))?;
        let state = Prepared::open(directory.as_os_str().as_bytes())?;
        let mapped = state.map()?;
        let config = mapped.config().ok_or(Failure::new("no run"))?;
        Ok((directory, fork::Program::new(process, Some(seen)), state, mapped, config))
    };
    let Some((directory, program, state, mapped, config)) =
        Report::new(KEEP).check("cannot start", begin())
    else {
        return ExitCode::from(STATUS_OURS);
    };
    fork::let_go_of_inherited();
    umask(OWN_ONLY);
    crate::log_to_standard_error(crate::LOGGED_OF_RUN);
    let urls = config.mounts.iter().map(|mount| Url::parse(&mount.url)).collect();
    let directory = RunDirectory::left(directory);
    let (served, cache) = (None, None);
    Run { served, cache, directory, state, family: config.family }.keep(&program, urls, mapped);
    ExitCode::SUCCESS
}

/// What the keeper starts with.
struct Run {
    served: Option<PathBuf>,
    cache: Option<cache::Folder>,
    directory: RunDirectory,
    state: Prepared,
    family: u64,
}

impl Run {
    /// Connects to the servers, which programs may be waiting for, and stays until no process of the run is
    /// left.
    fn keep(self, program: &fork::Program, urls: Result<Vec<Url>, String>, state: State) {
        let others = program.others(self.directory.path());
        let state = Arc::new(state);
        let (server, met, mut keeper) = match self.begin(urls, &state) {
            Ok(begun) => begun,
            Err(failure) => {
                // Printed first, since waiting programs end after `fail`; unless no program is left to wait.
                if !program.has_ended() || !others.find().is_empty() {
                    Report::new("run").check("cannot start", Err::<(), _>(failure));
                }
                state.fail();
                // A program that starts later must find the failure, too.
                program.keep_until_end(None, &others, &self.state);
                return;
            }
        };
        // Otherwise the file system of this directory could not be unmounted even after the programs have left
        // it. All paths that are used from here on are absolute.
        let _ = rustix::process::chdir("/");
        if let Some(cache) = &self.cache {
            cache.watch(&state);
        }
        directory::remove_abandoned(self.directory.path());
        program.keep_until_end(Some(&mut keeper), &others, &self.state);
        keeper.stop();
        if let Some(cache) = &self.cache {
            cache.trim(&state);
        }
        for Met { client, root, .. } in met {
            drop(root);
            client.close();
        }
        if let Some(server) = server {
            server.stop();
        }
    }

    /// Connects to the servers, then lets the waiting programs go on.
    fn begin(&self, urls: Result<Vec<Url>, String>, state: &Arc<State>) -> Outcome<Begun> {
        self.directory.fill()?;
        let server =
            self.served.as_deref().map(|served| embedded(served, &self.directory)).transpose()?;
        let mut met = Vec::new();
        for url in urls.map_err(Failure::new)? {
            met.push(meet(url, self.family, state, &met)?);
        }
        let servers = met.iter().map(|one| (one.client.clone(), one.url.clone())).collect();
        let ready = met.iter_mut().filter_map(|one| one.ready.take()).collect();
        let keeper = Keeper::start(&self.directory, Arc::clone(state), servers, ready);
        let roots = met.iter().map(|one| Root {
            handle: one.root.handle(),
            inode: one.root.attr().identity(),
            epoch: one.client.boot_epoch(),
        });
        state.begin(&roots.collect::<Vec<_>>());
        Ok((server, met, keeper))
    }
}

/// What a run has once it has begun: the server of `--serve`, the connected prefixes and the keeper.
type Begun = (Option<Server>, Vec<Met>, Keeper);

/// Starts the run's own server.
fn embedded(served: &Path, directory: &RunDirectory) -> Outcome<Server> {
    let served = std::fs::canonicalize(served)
        .map_err(|error| Failure::from(error).about(served.display()))?;
    let config = ServerConfig {
        exports: vec![Export::new(SERVED, ExportKind::Directory(served))],
        listen: vec![Address::Unix(directory.socket())],
        // Programs that become other users have these users' rights on the server, too, as they have locally.
        identity: may_be_others(),
        no_root_squash: true,
        ..ServerConfig::default()
    };
    start_server(&config).map_err(|error| Failure::new(error.to_string()))
}

/// Returns true for root, except where it is root in name only and cannot become another user.
fn may_be_others() -> bool {
    let same_groups = || set_thread_groups(&rustix::process::getgroups()?);
    rustix::process::geteuid().is_root() && same_groups().is_ok()
}

/// Name of the export of `--serve`.
const SERVED: &str = "served";

/// Splits an argument of `--at` into prefix and URL.
fn prefix_and_url(at: &OsString, own: Option<&RunDirectory>) -> Outcome<(Vec<u8>, Url)> {
    let bytes = at.as_bytes();
    let cut = bytes
        .windows(9)
        .position(|part| part == b"=towline:" || part == b"=towline+")
        .or_else(|| other_scheme(bytes));
    let (prefix, url) = match cut {
        Some(cut) => (&bytes[..cut], Some(&bytes[cut + 1..])),
        None => (bytes, None),
    };
    let wrong = |what: &str| Err(Failure::new(what).about(shown(bytes)));
    let path = Path::new(std::ffi::OsStr::from_bytes(prefix));
    if !path.is_absolute() {
        return wrong("the prefix is not an absolute path");
    }
    let mut clean = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => return wrong("the prefix has a \"..\" in it"),
            _ => {}
        }
    }
    if clean == Path::new("/") {
        return wrong("the prefix cannot be \"/\"");
    }
    let url = match (url, own) {
        (Some(url), _) => {
            let text = std::str::from_utf8(url).map_err(|_| Failure::new("the URL is not text"))?;
            let mut url =
                Url::parse(text).map_err(|error| Failure::new(error).about(shown(bytes)))?;
            // Programs connect, too, from whatever their working directories are then.
            if let Transport::Unix(socket) | Transport::Shm(socket) = &mut url.transport {
                *socket = std::path::absolute(&*socket)?;
            }
            url
        }
        (None, Some(directory)) => Url {
            transport: Transport::Unix(directory.socket()),
            export: SERVED.as_bytes().to_vec(),
            path: Vec::new(),
        },
        (None, None) => {
            return wrong("expected \"=towline://HOST/EXPORT\" after the prefix, or --serve");
        }
    };
    if url.export.is_empty() {
        return wrong("the URL names no export");
    }
    Ok((clean.into_os_string().into_vec(), url))
}

/// Returns the position of the `=` in front of anything that can only be meant as a URL of some kind.
fn other_scheme(bytes: &[u8]) -> Option<usize> {
    let end = bytes.windows(3).position(|part| part == b"://")?;
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"+-.".contains(byte);
    let start = bytes[..end].iter().rposition(|byte| !is_part(byte))?;
    (bytes[start] == b'=').then_some(start)
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the mounts for the library's configuration. Prefixes in the same export show the same device.
fn mounts(prefixes: &[(Vec<u8>, Url)]) -> Vec<Mount> {
    let is_same =
        |one: &Url, other: &Url| (&one.transport, &one.export) == (&other.transport, &other.export);
    let mount = |(prefix, url): &(Vec<u8>, Url)| {
        let first = prefixes.iter().position(|(_, other)| is_same(url, other)).unwrap_or_default();
        let device = rustix::fs::makedev(DEVICE_MAJOR, first as u32);
        Mount { prefix: prefix.clone(), url: url.to_string(), device }
    };
    prefixes.iter().map(mount).collect()
}

/// A prefix whose server has answered.
struct Met {
    url: Url,
    client: Client,
    /// The remote directory; stays open for the whole run.
    root: File,
    /// For the first mount of a server that may be far.
    ready: Option<Arc<Ready>>,
}

/// Connects to the server of a URL, or uses the session with it in `met`, and opens the remote directory.
fn meet(url: Url, family: u64, state: &Arc<State>, met: &[Met]) -> Outcome<Met> {
    let about = |failure: towline_client::Error| Failure::from(failure).about(&url);
    let known = met.iter().find(|one| one.url.transport == url.transport);
    let began = Instant::now();
    let (client, ready) = match known {
        Some(known) => (known.client.clone(), None),
        None => {
            let mut options = Options::default();
            options.family = family;
            options.reports_ends = holders::can_watch();
            // Unless there are large mappings, this client sends few requests: for the prefix, and what the
            // keeper closes.
            options.nearer_after = 24;
            let ready = Ready::start(&url.transport, family, state, met.len());
            (Client::connect(&url.transport, options).map_err(about)?, ready)
        }
    };
    let note = |began: Instant| ready.iter().for_each(|ready| ready.note(began.elapsed()));
    note(began);
    let began = Instant::now();
    // The parent of the prefix is local, whatever the parent of that directory on the server is.
    let root = client.attach(&url.root()).map_err(|error| match url.path.is_empty() {
        true => no_export(error, &url, &client).about(&url),
        false => about(error),
    })?;
    note(began);
    Ok(Met { url, client, root, ready })
}

/// Becomes the program; or, if something has to be printed at its end, starts it and waits for it. Returns
/// the exit status.
fn execute(
    args: &Args,
    command: Vec<OsString>,
    library: &Path,
    directory: &Path,
    reach: Reach,
) -> Outcome<u8> {
    let is_unreached = reach == Reach::Unreached;
    let is_hosted = matches!(reach, Reach::Hosted(..));
    let command = match reach {
        Reach::Hosted(program, arguments) => hosting(library, program, arguments),
        _ => Command { program: command[0].clone(), arguments: command },
    };
    // The host of a guest has the library already, and the guest must not see it.
    let own = if is_hosted { None } else { Some(library.as_os_str().to_owned()) };
    let others = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty());
    let preload = own.into_iter().chain(others).collect::<Vec<_>>().join(OsStr::new(":"));
    let preload = Some(preload.as_os_str()).filter(|list| !list.is_empty());
    let variables = [("LD_PRELOAD", preload), (VARIABLE, Some(directory.as_os_str()))];
    // The library waits until the run has begun, where that matters. A program without the library must not
    // start before then.
    if (args.report.is_some() || is_unreached)
        && !State::open(directory.as_os_str().as_bytes())?.has_begun()
    {
        return Ok(STATUS_OURS);
    }
    let done = match args.report {
        None => Err(program::become_one(&command, variables)),
        Some(_) => program::wait_for(&command, variables),
    };
    let status = done.unwrap_or_else(|error| {
        let name = args.command[0].to_string_lossy();
        let status = match error.kind() {
            io::ErrorKind::NotFound => STATUS_NOT_FOUND,
            _ => STATUS_NOT_EXECUTABLE,
        };
        Report::new("run").check(&name, Err::<(), Failure>(error.into()));
        status
    });
    // What background programs still do later is not included: nobody would read it then.
    if let Some(format) = args.report {
        settle(directory);
        summary::print(directory, format);
    }
    Ok(status)
}

/// Waits until everything is written that programs have written behind: one that was killed has not waited for it.
fn settle(directory: &Path) {
    let directory = directory.as_os_str().as_bytes();
    let Ok(state) = State::open(directory) else { return };
    for number in 0..MOUNTS_MAX {
        // The keeper tells if it cannot be written.
        let _ = state.behind(number).wait(|| Queue::is_served(directory, number));
    }
}

/// Returns the command that hosts a program with these arguments.
fn hosting(library: &Path, program: PathBuf, arguments: Vec<OsString>) -> Command {
    let own = [arguments[0].clone(), library.into(), program.into()];
    Command {
        program: OsStr::from_bytes(LINKER.to_bytes()).into(),
        arguments: own.into_iter().chain(arguments).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_command_lines_are_read_as_all_are() {
        let read = |line: &str| {
            let arguments = || line.split(' ').map(OsString::from);
            (Args::plain(arguments().skip(1)), crate::read_run(arguments()).ok())
        };
        for plain in [
            "run --at /d=towline://h/x -- true",
            "run --at=/d --serve dir --report -- sh -c --at=x -- y",
            "run --report=json --at /d=towline://h/x?a=b --at /e --serve=dir -- env A=b",
            "run --at /d --report=text -- --help",
        ] {
            let (ours, general) = read(plain);
            assert!(ours.is_some() && ours == general, "{plain}: {ours:?}, {general:?}");
        }
        for other in [
            "run",
            "run --",
            "run -- true",
            "run --at /d=towline://h/x true",
            "run --at /d=towline://h/x --",
            "run --at -- true",
            "run --at -x -- true",
            "run --at= -- true",
            "run --at /d --report=xml -- true",
            "run --at /d --report --report -- true",
            "run --at /d --serve a --serve b -- true",
            "run --at /d --other -- true",
            "run --at /d --=x -- true",
            "run --help",
        ] {
            assert_eq!(read(other).0, None, "{other}");
        }
    }
}
