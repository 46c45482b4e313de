//! `towline doctor`: shows what this machine offers and which paths Towline takes because of it. Features are
//! tried out where possible.

use crate::demo::{Scratch, start_server};
use crate::report::{Outcome, Report};
use rustix::process::{Resource, getrlimit};
use serde_json::json;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use towline_client::{Client, Options, Transport};
use towline_server::{Config, EngineWish, Export, ExportKind, StartError};

const EXAMPLES: &str = "\
Examples:
  towline doctor
  towline doctor --json

Exit status: 0 examined, 1 it could not be printed, 2 wrong usage.";

/// The first kernel version in whose io_uring a zero-copy send takes several pieces.
const SEND_ZC_SINCE: (u32, u32) = (6, 1);

/// Arguments of `doctor`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The result of examining one feature.
struct Finding {
    name: &'static str,
    good: bool,
    /// What was found.
    found: String,
    /// What Towline does because of it.
    path: String,
}

fn finding(
    name: &'static str,
    good: bool,
    found: impl Into<String>,
    path: impl Into<String>,
) -> Finding {
    Finding { name, good, found: found.into(), path: path.into() }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> ExitCode {
    let report = Report::new("doctor");
    let findings = examine();
    let text = if args.json {
        let list: serde_json::Map<_, _> = findings
            .iter()
            .map(|f| (f.name.to_owned(), json!({ "ok": f.good, "found": f.found, "path": f.path })))
            .collect();
        format!("{}\n", serde_json::Value::Object(list))
    } else {
        table(&findings)
    };
    report.output(io::stdout().write_all(text.as_bytes()));
    report.status()
}

fn table(findings: &[Finding]) -> String {
    let width = findings.iter().map(|f| f.name.len()).max().unwrap_or(0);
    let line = |f: &Finding| {
        let mark = if f.good { "ok" } else { "--" };
        format!("{mark} {:<width$}  {}\n   {:<width$}  -> {}\n", f.name, f.found, "", f.path)
    };
    findings.iter().map(line).collect()
}

fn examine() -> Vec<Finding> {
    let system = rustix::system::uname();
    let release = system.release().to_string_lossy().into_owned();
    let version = kernel_version(&release);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut findings = vec![finding(
        "kernel",
        version >= (5, 15),
        format!("{release} on {}", system.machine().to_string_lossy()),
        "Towline is made for 5.15 or later",
    )];
    findings.push(finding(
        "cpus",
        cpus > 1,
        format!("{cpus} for this process"),
        "the server runs one thread for each; with one, client and server take turns",
    ));
    let ring = uring();
    let has_ring = ring.good;
    findings.push(ring);
    findings.push(shared_memory());
    findings.push(send_zero_copy(version, has_ring));
    findings.push(memory_lock());
    findings.push(huge_pages());
    findings.push(userfaultfd());
    findings.push(trap());
    findings.push(fuse());
    findings.push(rdma());
    findings
}

/// Returns the major and minor number of a release like `6.1.0-13-amd64`, or zeros for missing numbers.
fn kernel_version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    (next(), next())
}

fn setting(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Starts a server that insists on io_uring: a trial is more reliable than any list of conditions.
fn uring() -> Finding {
    let disabled = setting("/proc/sys/kernel/io_uring_disabled");
    let disabled = disabled.map_or(String::new(), |n| format!(", kernel.io_uring_disabled = {n}"));
    let tried = start_server(&trial(None, EngineWish::Uring));
    match tried.map(|server| server.stop()) {
        Ok(()) => finding(
            "io_uring",
            true,
            format!("a ring was set up{disabled}"),
            "the server's event loops use io_uring",
        ),
        Err(StartError::Engine(error)) => finding(
            "io_uring",
            false,
            format!("setup refused: {error}{disabled}"),
            "the server's event loops use epoll: more system calls per request",
        ),
        Err(error) => finding(
            "io_uring",
            false,
            format!("not tried: {error}"),
            "unknown: a server cannot start here",
        ),
    }
}

/// The configuration of a trial server, with a socket if there is a scratch directory for it.
fn trial(scratch: Option<&Scratch>, engine: EngineWish) -> Config {
    Config {
        exports: vec![Export::new("doctor", ExportKind::Memory(1 << 20))],
        listen: scratch.map(Scratch::address).into_iter().collect(),
        cores: 1,
        buffer_limit: 1 << 20,
        engine,
        ..Config::default()
    }
}

/// Opens a session over shared memory with a trial server.
fn shared_memory() -> Finding {
    let tried = || -> Outcome<()> {
        let scratch = Scratch::new("doctor", 0)?;
        let config = trial(Some(&scratch), EngineWish::Automatic);
        let server =
            start_server(&config).map_err(|e| crate::report::Failure::new(e.to_string()))?;
        let client = Client::connect(&Transport::Shm(scratch.socket()), Options::default())?;
        client.attach(b"doctor")?;
        client.close();
        server.stop();
        Ok(())
    };
    match tried() {
        Ok(()) => finding(
            "shm",
            true,
            "a session over shared memory worked",
            "clients on this machine may use towline+shm: URLs",
        ),
        Err(failure) => finding(
            "shm",
            false,
            failure.to_string(),
            "clients on this machine use Unix sockets or TCP",
        ),
    }
}

fn send_zero_copy(version: (u32, u32), has_ring: bool) -> Finding {
    let good = version >= SEND_ZC_SINCE && has_ring;
    let found = match has_ring {
        false => "needs io_uring",
        true if good => "offered since 6.1",
        true => "needs kernel 6.1",
    };
    let used =
        "for what disks send to other machines; files leave without a copy, the rest is copied";
    let not = "not used: what disks send to other machines is copied";
    finding("SEND_ZC", good, found, if good { used } else { not })
}

fn memory_lock() -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let found = limit.map_or("unlimited".to_owned(), crate::text::human);
    let good = limit.is_none_or(|bytes| bytes >= 8 << 20);
    let path = if good {
        "enough for rings"
    } else {
        "small: raise it (ulimit -l) if setting up rings fails"
    };
    finding("memlock", good, found, path)
}

fn huge_pages() -> Finding {
    let transparent = setting("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let chosen = transparent.as_deref().and_then(bracketed).unwrap_or("unknown").to_owned();
    let reserved = setting("/proc/sys/vm/nr_hugepages").unwrap_or_else(|| "0".to_owned());
    let good = ["always", "within_size", "advise", "force"].contains(&chosen.as_str());
    finding(
        "huge pages",
        good,
        format!("shared memory: {chosen}; {reserved} reserved"),
        "disks in memory ask for them themselves (Linux 6.1); memory exports get them by this setting",
    )
}

/// Returns the word in brackets, with which the kernel marks the active choice.
fn bracketed(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

fn openable(path: &str) -> io::Result<()> {
    fs::OpenOptions::new().read(true).write(true).open(path).map(drop)
}

/// Examines whether `towline run` reaches programs that make system calls without libc.
fn trap() -> Finding {
    let (has_trap, can_host) = (towline_instance::has_trap(), towline_instance::can_host());
    let (found, path) = match (has_trap, can_host) {
        (true, true) => (
            "system calls of programs can be trapped, and programs hosted",
            "static programs, Go and musl work under `towline run`",
        ),
        (true, false) => (
            "system calls of programs can be trapped, but programs cannot change thread registers",
            "static programs, most Go programs and musl are refused under `towline run`",
        ),
        (false, _) => (
            "this kernel cannot trap system calls of programs (that needs x86-64 and Linux 5.11)",
            "static programs, most Go programs and musl are refused under `towline run`, and calls without \
             libc find no remote files",
        ),
    };
    finding("trap", can_host, found, path)
}

fn userfaultfd() -> Finding {
    let all = setting("/proc/sys/vm/unprivileged_userfaultfd");
    let all = all.map_or(String::new(), |n| format!(", vm.unprivileged_userfaultfd = {n}"));
    match towline_instance::userfault::try_out() {
        Ok(()) => finding(
            "userfaultfd",
            true,
            format!("one was made{all}"),
            "large mappings are read on demand under `towline run`",
        ),
        Err(error) => finding(
            "userfaultfd",
            false,
            format!("refused: {error}{all}"),
            "under `towline run` files are read as a whole when they are mapped; Linux 6.6 and root, or \
             /dev/userfaultfd that opens, or that setting at 1, would change that",
        ),
    }
}

fn fuse() -> Finding {
    let path = "not used by this version, which has no mount";
    match openable("/dev/fuse") {
        Ok(()) => finding("FUSE", true, "/dev/fuse opens", path),
        Err(error) => finding("FUSE", false, format!("/dev/fuse: {error}"), path),
    }
}

fn rdma() -> Finding {
    let names = |directory: &Path| -> Vec<String> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let found = names(Path::new("/sys/class/infiniband"));
    let path = "not used by this version: TCP, Unix sockets and shared memory are";
    if found.is_empty() {
        finding("RDMA", false, "no device in /sys/class/infiniband", path)
    } else {
        finding("RDMA", true, found.join(" "), path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_any_release() {
        assert_eq!(kernel_version("6.1.0-13-amd64"), (6, 1));
        assert_eq!(kernel_version("6.18.44-fc-v657"), (6, 18));
        assert_eq!(kernel_version("strange"), (0, 0));
        assert!(kernel_version("10.0") > SEND_ZC_SINCE);
    }

    #[test]
    fn nothing_is_sent_without_a_copy_where_there_is_no_ring() {
        for (version, has_ring, good) in
            [((6, 1), true, true), ((6, 1), false, false), ((6, 0), true, false)]
        {
            assert_eq!(send_zero_copy(version, has_ring).good, good, "{version:?} {has_ring}");
        }
    }

    #[test]
    fn the_choice_in_force_is_found() {
        assert_eq!(bracketed("always [madvise] never"), Some("madvise"));
        assert_eq!(bracketed("none"), None);
    }
}
