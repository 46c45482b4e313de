//! `towline serve`: the server as a program, with its flags, configuration file, signals and service manager.

mod exports;
mod file;
mod http;
mod metrics;
mod nbd;

use crate::report::{Failure, Report, note};
use clap::builder::{OsStringValueParser, TypedValueParser};
pub(crate) use exports::parse_bytes;
use exports::{parse_directory, parse_disk, parse_memory};
use file::{Engine, FileSettings};
use listenfd::ListenFd;
use nbd::Front;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use towline_net::address::{Address, Listener};
use towline_server::{
    CORE_BUFFER_BYTES_MIN, CORES_MAX, Config, DiskExport, EngineWish, Export, Server,
};

/// The word that makes the executable a process which holds open files of servers. Only `serve` uses it.
pub(crate) const HOLD: &str = "hold";

/// Holds open files of servers with a state directory, see [`towline_server::hold_files`]. Its only argument is
/// the path of the socket that it has as standard input.
pub(crate) fn hold(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    // Locks and pipes of whoever started the server.
    crate::run::close_all_inherited();
    crate::descriptors::raise_limit();
    let held = match (arguments.next(), arguments.next()) {
        (Some(path), None) => towline_server::hold_files(path.as_ref()).map_err(Failure::from),
        _ => Err(Failure::usage("expected the path of a socket")),
    };
    let report = Report::new(HOLD);
    let held = held.map_err(|failure| failure.with("only `towline serve --state` starts this"));
    report.check("cannot hold files", held);
    report.status()
}

/// Allowed values for the maximum length of a fragment.
const FRAGMENT_BYTES: std::ops::RangeInclusive<u64> = 4 << 10..=256 << 10;

const EXAMPLES: &str = "\
Exports:
  --dir NAME=PATH[:ro]    a directory of this machine; symbolic links never lead out of it
  --mem NAME=SIZE[:ro]    a file system in memory, gone when the server ends
  --disk NAME=PATH[:ro][:cached|:direct|:read-direct]
                          a file or block device; how it meets the page cache: all requests go
                          through it (cached, the default), none (direct), or writes and what is
                          not aligned to 4096 bytes (read-direct)
  --disk NAME=mem:SIZE    a disk in memory
  --disk NAME=stripe:CHUNK:PATH,PATH,...[:ro][:MODE]
                          stripes over several files or devices
  --disk NAME=delay:SIZE:MICROSECONDS:BYTES
                          memory with the latency and the bandwidth (bytes a second) of a device,
                          for experiments
  --dir, --mem, --disk NAME=...[:iops=N][:bandwidth=SIZE]
                          requests and bytes that each client may have in a second
  --disk NAME=...[:block=SIZE][:preferred=SIZE][:depth=N]
                          smallest and best unit of requests that clients are told; requests of one
                          NBD connection at once
  --disk NAME=...[:default]
                          the disk with the empty name; else the first one
  --disk NAME=...[:staged|:sendfile|:zero-copy][:serial]
                          how reads leave, for experiments: copied by way of a buffer, as pages of
                          the cache, from the buffer without a copy; serial: nothing before the
                          disk is done with all of a read. Else the server chooses.
  A colon, or a backslash, in PATH is written with a backslash before it. Paths may be any bytes (in the
  configuration file, which is UTF-8, those that are).

Examples:
  towline serve --dir data=/srv/data --listen tcp://127.0.0.1:7440
  towline serve --dir pub=/srv/pub:ro --mem scratch=2G --listen unix:///run/towline.sock
  towline serve --disk vm1=/dev/nvme0n1:direct --nbd 127.0.0.1:10809 --nbd unix:///run/nbd.sock
  nbdinfo -- [ towline serve --disk img=x.raw --nbd - ]
  towline serve --dir data=/srv/data --state /var/lib/towline
  towline serve --config /etc/towline.toml --metrics 127.0.0.1:9440

Configuration file (TOML), which says all that flags say; flags add to it:
  listen = [\"tcp://127.0.0.1:7440\", \"unix:///run/towline.sock\"]
  buffer-limit = \"256M\"
  [export.data]
  dir = \"/srv/data\"
  read-only = true
  [export.scratch]
  mem = \"2G\"
  [export.vm1]
  disk = \"/dev/nvme0n1:direct\"

NBD clients find each disk by its name, and one also by the empty name.

State: with --state DIR (made if it is missing; one server at a time) the server records there what
clients do. When it is killed and started again, they go on where they were: what was done is not
done again, what was not is done once. Locks are held for clients that are back within 30 s.
After a restart of the machine nothing there is believed, and clients begin new sessions.

Signals: TERM and INT end requests under way, tell clients and exit; HUP reads the exports of the
configuration file again, opens directories again that were replaced or mounted anew, and allows
changes to a disk again whose flush had failed.

Exit status: 0 told to end, 1 could not start or failed, 2 wrong usage.";

/// Arguments of `serve`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Directory to export.
    #[arg(long, value_name = "NAME=PATH[:ro][:LIMIT]", value_parser = OsStringValueParser::new().try_map(parse_directory))]
    dir: Vec<Export>,
    /// Memory file system to export.
    #[arg(long, value_name = "NAME=SIZE[:ro][:LIMIT]", value_parser = parse_memory)]
    mem: Vec<Export>,
    /// Disk to export.
    #[arg(long, value_name = "NAME=PATH[:ro][:MODE]", value_parser = OsStringValueParser::new().try_map(parse_disk))]
    disk: Vec<DiskExport>,
    /// Address to listen on for NBD clients: HOST:PORT, unix:///PATH, or "-" for the sockets of a service
    /// manager, or else one client on standard input and output.
    #[arg(long, value_name = "ADDRESS")]
    nbd: Vec<Front>,
    /// Address to listen on: tcp://HOST:PORT or unix:///PATH.
    #[arg(long, value_name = "ADDRESS", value_parser = Address::parse)]
    listen: Vec<Address>,
    /// Configuration file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Memory for data in transit, however many clients there are, and again as much for disks; at least
    /// 512K per core; default: 256M.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    buffer_limit: Option<u64>,
    /// Longest fragment of a disk read, 4K to 256K; default: 128K.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    fragment: Option<u64>,
    /// Threads that serve clients, 1 to 256; default: one for each processor.
    #[arg(long, value_name = "N")]
    cores: Option<usize>,
    /// Event loop to use.
    #[arg(long, value_enum)]
    engine: Option<Engine>,
    /// Microseconds that a thread spins for more requests before it sleeps; 0: sleep at once; default: 100.
    #[arg(long, value_name = "N")]
    spin_us: Option<u32>,
    /// Act as the user that a client names (needs root); uid 0 becomes nobody.
    #[arg(long)]
    identity: bool,
    /// With --identity: let uid 0 of clients stay uid 0.
    #[arg(long)]
    no_root_squash: bool,
    /// Listen beyond loopback, although nothing is encrypted or authenticated yet.
    #[arg(long)]
    insecure: bool,
    /// Keep sessions in this directory, so that clients continue after the server is killed and restarted.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Serve metrics for Prometheus on this address: HOST:PORT.
    #[arg(long, value_name = "HOST:PORT", value_parser = metrics::parse_address)]
    metrics: Option<SocketAddr>,
}

/// The settings from flags and configuration file together.
#[derive(Clone)]
struct Settings {
    config: Config,
    metrics: Option<SocketAddr>,
    /// `--nbd -` was given.
    nbd_standard: bool,
}

impl Settings {
    /// Returns true if they differ in anything that a running server cannot change.
    fn differs_besides_exports(&self, other: &Self) -> bool {
        let fixed = |settings: &Self| {
            let (exports, disks) = (Vec::new(), Vec::new());
            let config = Config { exports, disks, ..settings.config.clone() };
            (config, settings.metrics, settings.nbd_standard)
        };
        fixed(self) != fixed(other)
    }
}

/// Returns the address of a host and port. `expected` says what could be written.
fn resolve(text: &str, expected: &str) -> Result<SocketAddr, String> {
    let wrong = |what: &str| format!("address \"{text}\": {what}; expected {expected}");
    let mut found = text.to_socket_addrs().map_err(|error| wrong(&error.to_string()))?;
    found.next().ok_or_else(|| wrong("host has no address"))
}

/// Reads a configuration file, with its addresses for NBD and for metrics.
fn read_file(path: &Path) -> Result<(FileSettings, Vec<Front>, Option<SocketAddr>), String> {
    let wrong = |what: String| format!("configuration {}: {what}", path.display());
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    let file = file::parse(&text).map_err(wrong)?;
    let fronts = file.nbd.iter().map(|text| text.parse()).collect::<Result<_, _>>();
    let metrics = file.metrics.as_deref().map(metrics::parse_address).transpose();
    Ok((file, fronts.map_err(wrong)?, metrics.map_err(wrong)?))
}

/// Why there is no server.
enum Refusal {
    /// The command line is wrong.
    Usage(String),
    /// Anything else, such as a wrong configuration file.
    Failed(String),
}

impl From<String> for Refusal {
    fn from(text: String) -> Self {
        Self::Failed(text)
    }
}

impl Refusal {
    /// Says what is wrong with a setting, and names it as it was given: as a flag, or as a key of the
    /// configuration file.
    fn of(args: &Args, is_flag: bool, key: &str, what: &str) -> Self {
        match &args.config {
            Some(file) if !is_flag => {
                Self::Failed(format!("configuration {}: {key}{what}", file.display()))
            }
            _ => Self::Usage(format!("--{key}{what}")),
        }
    }

    /// Says what is wrong with several settings together. The command line is wrong unless there is a
    /// configuration file, which may be.
    fn of_all(args: &Args, what: String) -> Self {
        if args.config.is_some() { Self::Failed(what) } else { Self::Usage(what) }
    }

    fn text(self) -> String {
        match self {
            Self::Usage(text) | Self::Failed(text) => text,
        }
    }
}

/// Combines the flags and the configuration file. `inherited`: a service manager has given sockets.
fn settings(args: &Args, inherited: bool) -> Result<Settings, Refusal> {
    let read = args.config.as_deref().map(read_file).transpose()?;
    let (file, fronts_of_file, metrics) = read.unwrap_or_default();
    let defaults = Config::default();
    let mut exports = file.exports;
    exports.extend(args.dir.iter().chain(&args.mem).cloned());
    let mut disks = file.disks;
    disks.extend(args.disk.iter().cloned());
    if exports.is_empty() && disks.is_empty() {
        let what = "nothing to export; try --dir data=/srv/data or --mem scratch=1G";
        return Err(Refusal::of_all(args, what.to_owned()));
    }
    let mut names = HashSet::new();
    let of_exports = exports.iter().map(|export| &export.name);
    let mut all = of_exports.chain(disks.iter().map(|disk| &disk.name));
    if let Some(name) = all.find(|name| !names.insert(*name)) {
        return Err(Refusal::of_all(args, format!("export \"{name}\": the name is used twice")));
    }
    let mut fronts = args.nbd.clone();
    fronts.extend(fronts_of_file);
    if !fronts.is_empty() && disks.is_empty() {
        let what = ": there is no disk to serve; try --disk img=/srv/img.raw";
        return Err(Refusal::of(args, !args.nbd.is_empty(), "nbd", what));
    }
    let mut listen = file.listen;
    listen.extend(args.listen.iter().cloned());
    if fronts.is_empty() && listen.is_empty() && exports.is_empty() && !inherited {
        let what = ": no client could reach it; add --nbd 127.0.0.1:10809 or --listen tcp://127.0.0.1:7440";
        return Err(Refusal::of(args, !args.disk.is_empty(), "disk", what));
    }
    let engine = match args.engine.or(file.engine) {
        None | Some(Engine::Auto) => EngineWish::Automatic,
        Some(Engine::Uring) => EngineWish::Uring,
        Some(Engine::Epoll) => EngineWish::Epoll,
    };
    let spin_us = args.spin_us.or(file.spin_us);
    let config = Config {
        exports,
        disks,
        listen,
        nbd: fronts.iter().filter_map(Front::address).collect(),
        cores: args.cores.or(file.cores).unwrap_or(defaults.cores),
        buffer_limit: args.buffer_limit.or(file.buffer_limit).unwrap_or(defaults.buffer_limit),
        fragment_bytes: args.fragment.or(file.fragment).unwrap_or(defaults.fragment_bytes),
        engine,
        spin: spin_us.map_or(defaults.spin, |us| Duration::from_micros(us.into())),
        identity: args.identity || file.identity,
        no_root_squash: args.no_root_squash || file.no_root_squash,
        insecure: args.insecure || file.insecure,
        state: args.state.clone().or(file.state),
        holder: ["/proc/self/exe", HOLD].map(OsString::from).to_vec(),
        nbd_handshake: defaults.nbd_handshake,
        lock_grace: defaults.lock_grace,
    };
    check(args, &config)?;
    let nbd_standard = fronts.iter().any(|front| front.address().is_none());
    Ok(Settings { config, metrics: args.metrics.or(metrics), nbd_standard })
}

/// Checks the values of flags and keys.
fn check(args: &Args, config: &Config) -> Result<(), Refusal> {
    if config.identity && !rustix::process::geteuid().is_root() {
        let what = ": only root can act as other users; start as root, or leave it out to serve as yourself";
        return Err(Refusal::of(args, args.identity, "identity", what));
    }
    if config.no_root_squash && !config.identity {
        let what = ": needs --identity; without it the server acts as its own user for everybody";
        return Err(Refusal::of(args, args.no_root_squash, "no-root-squash", what));
    }
    let mut seen = HashSet::new();
    for address in config.listen.iter().chain(&config.nbd) {
        let any_port = matches!(address, Address::Tcp(tcp) if tcp.port() == 0);
        if !any_port && !seen.insert(address) {
            return Err(Refusal::of_all(args, format!("address {address}: given twice")));
        }
    }
    let cores = config.cores;
    if !(1..=CORES_MAX).contains(&cores) {
        let what = format!(" {cores}: expected a number from 1 to {CORES_MAX}");
        return Err(Refusal::of(args, args.cores.is_some(), "cores", &what));
    }
    if !FRAGMENT_BYTES.contains(&config.fragment_bytes) {
        let what = format!(" {}: expected 4K to 256K", config.fragment_bytes);
        return Err(Refusal::of(args, args.fragment.is_some(), "fragment", &what));
    }
    let (given, least) = (config.buffer_limit, CORE_BUFFER_BYTES_MIN * cores as u64);
    if given < least {
        let what = format!(" {given}: too little; {cores} cores need at least {}K", least >> 10);
        return Err(Refusal::of(args, args.buffer_limit.is_some(), "buffer-limit", &what));
    }
    Ok(())
}

/// Runs the command.
pub(crate) fn run(args: Args) -> ExitCode {
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(refusal) => {
            let is_usage = matches!(refusal, Refusal::Usage(_));
            note(format_args!("towline: serve: {}", refusal.text()));
            if is_usage { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn serve(args: &Args) -> Result<(), Refusal> {
    let inherited = inherited_listeners()?;
    let is_managed = !inherited.is_empty();
    let at_start = settings(args, is_managed)?;
    let Settings { mut config, metrics, nbd_standard } = at_start.clone();
    // Before anything else, so that no signal is lost during the start.
    let mut signals =
        Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(|e| format!("signals: {e}"))?;
    let (for_files, for_disks) = match nbd_standard {
        true => (Vec::new(), inherited),
        false => (inherited, Vec::new()),
    };
    if !for_files.is_empty() {
        let left_out: Vec<_> = config.listen.drain(..).map(|at| at.to_string()).collect();
        if !left_out.is_empty() {
            note(format_args!(
                "towline: not listening on {}: the sockets of the service manager are used instead",
                left_out.join(", ")
            ));
        }
    } else if config.listen.is_empty() && !config.exports.is_empty() {
        if is_managed {
            let what = " -: the sockets of the service manager are for disks; add --listen for the other exports";
            return Err(Refusal::of(args, args.nbd.contains(&Front::Standard), "nbd", what));
        }
        config.listen.push(Address::parse("tcp://127.0.0.1:7440")?);
    }
    crate::descriptors::raise_limit();
    let standard = nbd_standard && !is_managed;
    let server = Server::start_on(&config, for_files, for_disks);
    let server = server.map_err(|error| error.to_string())?;
    let (handle, (tell, failure)) = (signals.handle(), std::sync::mpsc::channel());
    server.when_failed(move |why| {
        // Fails only if the server is being stopped anyway.
        let _ = tell.send(why.to_owned());
        handle.close();
    });
    if let Some(address) = metrics {
        let bound = metrics::start(address, config.insecure, server.prometheus())?;
        note(format_args!("towline: metrics on http://{bound}/metrics"));
    }
    if standard {
        return serve_standard(server, signals, &failure);
    }
    let plural = if config.cores == 1 { "" } else { "s" };
    let how = format!("{}, {} core{plural}", server.engine(), config.cores);
    for address in server.addresses() {
        note(format_args!("towline: listening on {address} ({how})"));
    }
    for address in server.nbd_addresses() {
        note(format_args!("towline: listening for NBD on {address} ({how})"));
    }
    if let Some(why) = server.no_ring() {
        note(format_args!(
            "towline: io_uring is not available here; using epoll, which is slower with many clients: {why}"
        ));
    }
    let (ask, asked) = std::sync::mpsc::channel();
    let (args, replace) = (args.clone(), server.replacing());
    // A thread of its own: while a file system hangs that it opens, the server can be stopped.
    let reading = std::thread::Builder::new().name("towline-reload".to_owned()).spawn(move || {
        for () in asked {
            read_again(&args, is_managed, &at_start, &replace);
        }
    });
    reading.map_err(|error| format!("cannot create a thread: {error}"))?;
    notify(&[NotifyState::Ready]);
    for signal in signals.forever() {
        if signal != SIGHUP {
            break;
        }
        // The thread ends only with the process.
        let _ = ask.send(());
    }
    notify(&[NotifyState::Stopping]);
    note("towline: shutting down");
    server.stop();
    failure.try_recv().map_or(Ok(()), |why| Err(why.into()))
}

/// Reads the configuration again, and has its exports and disks served.
fn read_again(
    args: &Args,
    is_managed: bool,
    at_start: &Settings,
    replace: impl Fn(&[Export], &[DiskExport]) -> io::Result<()>,
) {
    // systemd uses the time to match this to its reload request.
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => log::warn!("cannot read the system's clock: {error}"),
    }
    let again = settings(args, is_managed).map_err(Refusal::text).and_then(|next| {
        let Config { exports, disks, .. } = &next.config;
        replace(exports, disks).map_err(|e| e.to_string()).map(|()| next)
    });
    match again {
        Ok(next) if next.differs_besides_exports(at_start) => note(
            "towline: read the configuration again: exports and disks are as it says; its other \
             changes need a new start",
        ),
        Ok(_) => note("towline: read the configuration again"),
        Err(message) => {
            note(format_args!("towline: serve: keeping the old configuration: {message}"));
        }
    }
    notify(&[NotifyState::Ready]);
}

/// Serves the client on standard input and output until it leaves, a signal comes or the server fails.
fn serve_standard(
    server: Server,
    mut signals: Signals,
    failure: &Receiver<String>,
) -> Result<(), Refusal> {
    let (link, output) = nbd::standard_link()?;
    let (over, left) = (server.serve_nbd(link), signals.handle());
    let wait = move || {
        let _ = over.recv();
        left.close();
    };
    let thread = std::thread::Builder::new().name("towline-client".to_owned()).spawn(wait);
    thread.map_err(|error| format!("--nbd -: {error}"))?;
    let is_told = signals.forever().any(|signal| signal != SIGHUP);
    server.stop();
    if let Ok(why) = failure.try_recv() {
        return Err(why.into());
    }
    if let Some(output) = output {
        output.finish(is_told)?;
    }
    Ok(())
}

/// Notifies the service manager, if there is one.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        log::warn!("cannot notify the service manager: {error}");
    }
}

/// Returns the sockets on which a service manager already listens (systemd's socket activation).
fn inherited_listeners() -> Result<Vec<Listener>, String> {
    let mut found = ListenFd::from_env();
    let mut listeners = Vec::new();
    for index in 0..found.len() {
        let tcp = found.take_tcp_listener(index).ok().flatten().map(OwnedFd::from);
        let fd = match tcp {
            Some(fd) => Some(fd),
            None => found.take_unix_listener(index).ok().flatten().map(OwnedFd::from),
        };
        let fd = fd.ok_or_else(|| {
            format!("inherited socket {index} is not a listening TCP or Unix socket")
        })?;
        listeners
            .push(Listener::from_fd(fd).map_err(|e| format!("inherited socket {index}: {e}"))?);
    }
    Ok(listeners)
}
