//! `towline demo`: starts a server in this process and compares it with local access.
//!
//! The figures are medians measured on this machine during the tour; client and server share its processors.
//! The demo writes only to a directory of its own.

mod measure;
mod sample;

use crate::copy::end::End;
use crate::copy::local::Local;
use crate::remote::Remotes;
use crate::report::{Failure, Outcome, Report, writable};
use crate::text::human;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use towline_client::{Errno, Transport, Url};
use towline_net::address::Address;
use towline_server::{Config, Export, ExportKind, Server, StartError};

const EXAMPLES: &str = "\
Without DIR a sample tree of small files and one large file is made in memory and removed at the
end. DIR is only read.

Examples:
  towline demo
  towline demo /usr/share

Exit status: 0 the tour is over, 1 something failed, 2 wrong usage.";

/// Size of the memory export in bytes.
const MEMORY_BYTES: u64 = 256 << 20;
/// Bytes that the tour writes to the memory export over each route.
const WRITE_BYTES: usize = 64 << 20;

/// Arguments of `demo`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Directory to serve.
    dir: Option<PathBuf>,
}

/// Starts an embedded server.
pub(crate) fn start_server(config: &Config) -> Result<Server, StartError> {
    Server::start(config)
}

/// A temporary directory of this process, removed when dropped.
pub(crate) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Creates the directory, in memory if possible and there is room for so many bytes.
    pub(crate) fn new(purpose: &str, bytes: u64) -> Outcome<Self> {
        let name = format!("towline-{purpose}-{}-{:x}", std::process::id(), nanoseconds());
        let memory = Path::new("/dev/shm");
        let has_room = rustix::fs::statvfs(memory)
            .is_ok_and(|found| found.f_bavail.saturating_mul(found.f_frsize) >= bytes);
        let mut result = Err(Failure::from(Errno::ENOENT));
        for parent in has_room.then(|| memory.to_owned()).into_iter().chain([std::env::temp_dir()])
        {
            let path = parent.join(&name);
            result = Self::at(path.clone()).map_err(|error| {
                let failure = Failure::from(error).about(path.display());
                failure.with("set TMPDIR to use another directory")
            });
            if result.is_ok() {
                break;
            }
        }
        result
    }

    /// Creates the directory at this path.
    pub(crate) fn at(path: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }

    /// Returns the path of a file in the directory.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Removes the directory also when a signal ends this process.
    pub(crate) fn remove_on_signals(&self) -> io::Result<()> {
        let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
        let path = self.path.clone();
        let wait = move || {
            if let Some(signal) = signals.forever().next() {
                remove(&path);
                // If the process cannot be ended, nobody is left to report that to.
                let _ = emulate_default_handler(signal);
            }
        };
        std::thread::Builder::new().spawn(wait).map(drop)
    }

    /// The path of a socket in the directory.
    pub(crate) fn socket(&self) -> PathBuf {
        self.join("socket")
    }

    /// The address of that socket.
    pub(crate) fn address(&self) -> Address {
        Address::Unix(self.socket())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

fn remove(path: &Path) {
    // Try several times: files may still be created in it meanwhile.
    let removed = (0..3).map(|_| fs::remove_dir_all(path)).find(Result::is_ok);
    if removed.is_none() && path.exists() {
        log::warn!("cannot remove {}", path.display());
    }
}

fn nanoseconds() -> u32 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.subsec_nanos())
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("demo");
    report.check("tour", tour(args, &report));
    report.status()
}

fn tour(args: &Args, report: &Report) -> Outcome<()> {
    let scratch = Scratch::new("demo", if args.dir.is_none() { sample::BYTES } else { 0 })?;
    scratch.remove_on_signals()?;
    let say = |text: String| {
        let said = writeln!(io::stdout(), "{text}").and_then(|()| writable());
        if said.is_err() {
            remove(&scratch.path); // the report below ends the process
        }
        report.output(said);
    };
    let directory = match &args.dir {
        Some(directory) => fs::canonicalize(directory)
            .map_err(|error| Failure::from(error).about(directory.display()))?,
        None => {
            let tree = scratch.path.join("tree");
            sample::make(&tree).map_err(|error| {
                error.about(tree.display()).with("name a directory to show instead")
            })?;
            tree
        }
    };
    let config = config(&directory, &scratch);
    let started = Instant::now();
    let server = start_server(&config).map_err(|error| Failure::new(error.to_string()))?;
    say(format!(
        "A server runs in this process: {} as export \"tree\" (read only), {} of memory as \
         \"scratch\".",
        directory.display(),
        human(MEMORY_BYTES),
    ));
    let result = stations(&directory, &server, &scratch, started, &say);
    server.stop();
    result
}

/// Shows the stations of the tour. Its sessions end before the server does.
fn stations(
    directory: &Path,
    server: &Server,
    scratch: &Scratch,
    started: Instant,
    say: &dyn Fn(String),
) -> Outcome<()> {
    let routes = routes(server, scratch)?;
    let remotes = Remotes::default();
    let root = remotes.place_of(&routes[0].1)?;
    root.base.stat_path(b".", true)?;
    let first = milliseconds(started.elapsed());
    say(format!("Start to first answer: {first:.1} ms; event loop: {}.\n", server.engine()));
    say(format!("The same files under a local path and under URLs such as\n  {root}\n"));
    listing(&[End::Local(Local::new(directory.as_os_str())), End::Remote(root)], say)?;
    writing(&remotes, &routes, say)?;
    let plan = sample::survey(directory)?;
    let mut columns = vec![("local".to_owned(), measure::local(&plan)?)];
    for (name, url) in &routes {
        match remotes.place_of(url).and_then(|place| measure::remote(&plan, &place)) {
            Ok(figures) => columns.push(((*name).to_owned(), figures)),
            Err(failure) => say(format!("{name}: left out: {failure}")),
        }
    }
    say(measure::table(&plan, &columns));
    Ok(())
}

fn config(directory: &Path, scratch: &Scratch) -> Config {
    let export = |name: &str, kind, read_only| Export { read_only, ..Export::new(name, kind) };
    Config {
        exports: vec![
            export("tree", ExportKind::Directory(directory.to_owned()), true),
            export("scratch", ExportKind::Memory(MEMORY_BYTES), false),
        ],
        listen: vec![Address::Tcp(([127, 0, 0, 1], 0).into()), scratch.address()],
        ..Config::default()
    }
}

/// The routes to the export `tree`, by name.
fn routes(server: &Server, scratch: &Scratch) -> Outcome<Vec<(&'static str, Url)>> {
    let port = server.addresses().iter().find_map(|address| match address {
        Address::Tcp(address) => Some(address.port()),
        _ => None,
    });
    let port = port.ok_or_else(|| Failure::new("the server does not listen on TCP"))?;
    let url = |transport| Url { transport, export: b"tree".to_vec(), path: Vec::new() };
    Ok(vec![
        ("tcp", url(Transport::Tcp("127.0.0.1".to_owned(), port))),
        ("unix", url(Transport::Unix(scratch.socket()))),
        ("shm", url(Transport::Shm(scratch.socket()))),
    ])
}

/// Shows that both ends list the same names.
fn listing(ends: &[End; 2], say: &dyn Fn(String)) -> Outcome<()> {
    let mut names = Vec::new();
    for end in ends {
        let mut listed: Vec<_> =
            end.list(true, drop)?.into_iter().map(|entry| entry.name).collect();
        listed.sort_unstable();
        names.push(listed);
    }
    let shown: Vec<String> = names[1].iter().take(8).map(|n| crate::text::escaped(n)).collect();
    let more = if names[1].len() > shown.len() { " ..." } else { "" };
    let same = if names[0] == names[1] { "the same names locally" } else { "other names locally!" };
    say(format!("towline ls: {}{more}  ({} names, {same})\n", shown.join("  "), names[1].len()));
    Ok(())
}

/// Writes to the memory export and reads it back, over each route.
fn writing(remotes: &Remotes, routes: &[(&'static str, Url)], say: &dyn Fn(String)) -> Outcome<()> {
    let data: Vec<u8> = (0..WRITE_BYTES).map(|i| (i / 7) as u8).collect();
    for (name, url) in routes {
        let url = Url { export: b"scratch".to_vec(), ..url.clone() };
        let place = match remotes.place_of(&url) {
            Ok(place) => place.child(b"written"),
            Err(failure) => {
                say(format!("{name}: left out: {failure}"));
                continue;
            }
        };
        let end = End::Remote(place);
        let file = end.create(0o600)?;
        let (written, read) = (Instant::now(), |since: Instant| milliseconds(since.elapsed()));
        file.write_at(&data, 0)?;
        let write_ms = read(written);
        // Filled with ones: a zeroed buffer would be given its pages only while the clock runs.
        let mut back = vec![1; data.len()];
        let started = Instant::now();
        let count = file.read_at(&mut back, 0)?;
        let read_ms = read(started);
        let equal = count == data.len() && back == data;
        file.close()?;
        end.unlink()?;
        let verdict = if equal { "equal" } else { "DIFFERENT" };
        say(format!(
            "{name}: {} written to memory in {write_ms:.1} ms, read back in {read_ms:.1} ms: \
             {verdict}",
            human(data.len() as u64)
        ));
        if !equal {
            return Err(Failure::new("data read back differs from data written").about(&end));
        }
    }
    say(String::new());
    Ok(())
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In containers it often has 64 MiB.
    #[test]
    fn where_memory_has_no_room_the_scratch_directory_is_elsewhere() {
        let scratch = Scratch::new("room", u64::MAX).unwrap();
        assert_eq!(scratch.path.parent().unwrap(), std::env::temp_dir());
    }

    #[test]
    fn a_scratch_directory_goes_away() {
        let scratch = Scratch::new("test", 0).unwrap();
        let path = scratch.path.clone();
        fs::write(scratch.socket(), b"x").unwrap();
        assert!(path.is_dir());
        drop(scratch);
        assert!(!path.exists());
    }
}
