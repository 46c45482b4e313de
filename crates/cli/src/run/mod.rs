//! `towline run`: runs a program for which paths below given prefixes are remote.
//!
//! The library that does it (crate `preload`) is part of this program. Here a private directory is
//! made for the run, the servers are met, and the program is started; then `keeper.rs` closes what
//! the program and its children leave open.

mod directory;
mod faults;
mod fork;
mod keeper;
mod pager;
mod reach;
mod signals;
mod summary;

use crate::demo::start_server;
use crate::report::{Failure, Outcome, Report};
use directory::{Library, RunDirectory};
use fork::Children;
use keeper::Keeper;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};
use summary::Format;
use towline_client::{Client, File, Options, Transport, Url};
use towline_instance::{Config, MOUNTS_MAX, Mount, State, VARIABLE};
use towline_net::address::Address;
use towline_server::{Config as ServerConfig, Export, ExportKind, Server};

/// What the command does.
pub(crate) const ABOUT: &str = "Run a program with remote files below local paths";

const EXAMPLES: &str = "\
Paths below a prefix are remote for the program and its children, all others are untouched. The
prefix need not exist. Static programs (most of those written in Go) and setuid programs are not
reached; `towline check` tells which. They are not started when an argument names a prefix.

Examples:
  towline run --at /data=towline://host/data -- bash
  towline run --at /data=towline://host/data -- tar xf /data/src.tar -C /data/build
  towline run --at /d=towline://host/data --report -- make -C /d/project -j2
  towline run --serve ./dir --at /d -- python3 train.py --input /d

Exit status: that of the program (128 and the signal's number when a signal ended it), 125 when
Towline failed, 126 or 127 when the program cannot be executed or found.";

/// Exit status for our own failures.
const STATUS_OURS: u8 = 125;
const STATUS_NOT_EXECUTABLE: u8 = 126;
const STATUS_NOT_FOUND: u8 = 127;

/// Arguments of `run`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Absolute path below which files are remote, and what they are there; without URL, the
    /// directory of --serve.
    #[arg(long = "at", value_name = "PREFIX[=URL]", required = true)]
    at: Vec<OsString>,
    /// Serves this directory for the time of the run.
    #[arg(long, value_name = "DIR")]
    serve: Option<PathBuf>,
    /// At the end says on standard error what was taken over and what slipped through.
    #[arg(long, value_name = "FORMAT", num_args = 0..=1, require_equals = true,
          default_missing_value = "text")]
    report: Option<Format>,
    /// Program and its arguments.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("run");
    match start(args) {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            report.check("cannot start", Err::<(), _>(failure));
            ExitCode::from(STATUS_OURS)
        }
    }
}

fn start(args: &Args) -> Outcome<u8> {
    match fork::apart()? {
        fork::Side::Waits(other) => Ok(other.told().unwrap_or(STATUS_OURS)),
        fork::Side::Runs { tell, children } => {
            let report = Report::new("run");
            let status = stay(args, tell, &children).unwrap_or_else(|failure| {
                report.check("cannot start", Err::<(), _>(failure));
                STATUS_OURS
            });
            std::process::exit(i32::from(status));
        }
    }
}

/// Runs the command, and stays until nothing of it is left. The exit status is told when the
/// command has ended; nothing is told when it cannot be run.
fn stay(args: &Args, tell: std::io::PipeWriter, children: &Children) -> Outcome<u8> {
    let directory = RunDirectory::new()?;
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(umask);
    let server = args.serve.as_deref().map(|served| embedded(served, &directory)).transpose()?;
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty())
        .map_err(io::Error::from)?;
    let family = u64::from_le_bytes(random) | 1;
    let mut met = Vec::new();
    for at in &args.at {
        let (prefix, url) = prefix_and_url(at, server.is_some().then_some(&directory))?;
        if met.iter().any(|one: &Met| one.mount.prefix == prefix) {
            return Err(Failure::new("this prefix is given twice").about(shown(&prefix)));
        }
        met.push(meet(prefix, url, family, &met)?);
    }
    // Longest first, so that a prefix below another one is found.
    met.sort_by_key(|one| std::cmp::Reverse(one.mount.prefix.len()));
    let library = Library::new()?;
    let config = Config {
        family,
        parent: std::process::id(),
        umask: umask.bits(),
        report: args.report.is_some(),
        library: library.path().as_os_str().as_bytes().to_vec(),
        mounts: met.iter().map(|one| one.mount.clone()).collect(),
    };
    let state = State::create(directory.path().as_os_str().as_bytes(), &config)?;
    let servers = met.iter().map(|one| (one.client.clone(), one.url.clone())).collect();
    let mut keeper = Keeper::start(&directory, state, servers).ok();
    let prefixes: Vec<&[u8]> = met.iter().map(|one| one.mount.prefix.as_slice()).collect();
    let status = if reach::may_start(&args.command, &prefixes) {
        execute(&args.command, library.path(), &directory, children, &mut keeper)
    } else {
        Ok(STATUS_NOT_EXECUTABLE)
    };
    // What programs in the background still do is not in it: nobody reads it then.
    if let Some(format) = args.report {
        summary::print(directory.path(), format);
    }
    let mut tell = Some(tell);
    if let Ok(status) = status
        && fork::has_others()
        && let Some(mut tell) = tell.take()
    {
        fork::to_background()?;
        // Fails only when nobody waits any more.
        let _ = tell.write_all(&[status]);
        drop(tell);
        children.until_end_of_all(&mut keeper)?;
    }
    if let Some(keeper) = keeper {
        keeper.stop();
    }
    for Met { client, root, .. } in met {
        drop(root);
        client.close();
    }
    if let Some(server) = server {
        server.stop();
    }
    drop(directory);
    if let (Ok(status), Some(mut tell)) = (&status, tell) {
        // Fails only when nobody waits any more.
        let _ = tell.write_all(&[*status]);
    }
    status
}

/// A server of this run's own.
fn embedded(served: &Path, directory: &RunDirectory) -> Outcome<Server> {
    let served = std::fs::canonicalize(served)
        .map_err(|error| Failure::from(error).about(served.display()))?;
    let config = ServerConfig {
        exports: vec![Export {
            name: SERVED.to_owned(),
            kind: ExportKind::Directory(served),
            read_only: false,
        }],
        listen: vec![Address::Unix(directory.socket())],
        ..ServerConfig::default()
    };
    start_server(&config).map_err(|error| Failure::new(error.to_string()))
}

/// Name of the export of `--serve`.
const SERVED: &str = "served";

/// Takes an argument of `--at` apart.
fn prefix_and_url(at: &OsString, own: Option<&RunDirectory>) -> Outcome<(Vec<u8>, Url)> {
    let bytes = at.as_bytes();
    let cut = bytes.windows(9).position(|part| part == b"=towline:" || part == b"=towline+");
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
            Url::parse(text).map_err(Failure::new)?
        }
        (None, Some(directory)) => Url {
            transport: Transport::Unix(directory.socket()),
            export: SERVED.as_bytes().to_vec(),
            path: Vec::new(),
        },
        (None, None) => return wrong("no \"=URL\" after the prefix, and no --serve"),
    };
    if url.export.is_empty() {
        return wrong("the URL names no export");
    }
    Ok((clean.into_os_string().into_vec(), url))
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A prefix whose server has answered.
struct Met {
    mount: Mount,
    url: Url,
    client: Client,
    /// Stays open for the whole run.
    root: File,
}

/// Major number of the device numbers that files of a run show: one for local use.
const DEVICE_MAJOR: u32 = 240;

fn meet(prefix: Vec<u8>, url: Url, family: u64, met: &[Met]) -> Outcome<Met> {
    if met.len() == MOUNTS_MAX {
        return Err(Failure::new(format!("more than {MOUNTS_MAX} prefixes")));
    }
    let about = |failure: towline_client::Error| Failure::from(failure).about(&url);
    let known = met.iter().find(|one| one.url.transport == url.transport);
    let client = match known {
        Some(known) => known.client.clone(),
        None => {
            let mut options = Options::default();
            options.family = family;
            // Without large mappings it asks little: for the prefix, and what the keeper closes.
            options.nearer_after = 24;
            Client::connect(&url.transport, options).map_err(about)?
        }
    };
    // What is above the prefix is here, whatever is above that directory on the server.
    let root = client.attach(&url.root()).map_err(about)?;
    let same =
        met.iter().find(|one| one.url.transport == url.transport && one.url.export == url.export);
    let device = same.map_or_else(
        || rustix::fs::makedev(DEVICE_MAJOR, met.len() as u32),
        |same| same.mount.device,
    );
    let mount = Mount {
        prefix,
        url: url.to_string(),
        handle: root.handle(),
        inode: root.attr().inode,
        device,
    };
    Ok(Met { mount, url, client, root })
}

/// Starts the program, waits for it, and gives the exit status.
fn execute(
    command: &[OsString],
    library: &Path,
    directory: &RunDirectory,
    children: &Children,
    keeper: &mut Option<Keeper>,
) -> Outcome<u8> {
    let mut preload = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut program = Command::new(&command[0]);
    program.args(&command[1..]).env("LD_PRELOAD", preload).env(VARIABLE, directory.path());
    let child = children.start(|| program.spawn());
    let child = match child {
        Ok(child) => child,
        Err(error) => {
            let status = match error.kind() {
                io::ErrorKind::NotFound => STATUS_NOT_FOUND,
                _ => STATUS_NOT_EXECUTABLE,
            };
            let name = command[0].to_string_lossy();
            Report::new("run").check(&name, Err::<(), Failure>(error.into()));
            return Ok(status);
        }
    };
    let status = children.until_end_of(child.id(), keeper)?;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, signal) => 128 + signal.unwrap_or(0) as u8,
    })
}
