//! `towline bench` measures what it claims to measure.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

fn run(arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.arg("bench").args(arguments).output().unwrap()
}

fn measured(arguments: &[&str]) -> String {
    let done = run(arguments);
    let (out, err) =
        (String::from_utf8(done.stdout).unwrap(), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{arguments:?}: {err}");
    out
}

fn bench(arguments: &[&str]) -> String {
    measured(&[&["disk"], arguments].concat())
}

fn refused(arguments: &[&str], expected: &str) {
    let done = run(&[&["disk"], arguments].concat());
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(!done.status.success() && text.contains(expected), "{arguments:?}: {text}");
}

#[test]
fn raw_clients_get_whole_replies_from_a_file_or_memory() {
    let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // Two replies and a part of a third, which is never sent.
    std::io::Write::write_all(&mut file, &[7; 250_000]).unwrap();
    let path = file.path().to_str().unwrap();
    let sizes = ["net", "--request", "53", "--bs", "100000", "--secs", "0.5"];
    for more in [
        &[][..],
        &["--qd", "8"],
        &["--procs", "3", "--qd", "2"],
        &["--sendfile", path],
        &["--procs", "3", "--sendfile", path],
    ] {
        let out = measured(&[&sizes, more].concat());
        let result: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        let count = |name: &str| result[name].as_u64().unwrap();
        assert!(count("ops") >= 1, "{more:?}: {out}");
        assert_eq!(count("rbytes"), count("ops") * 100_000, "{more:?}: {out}");
        assert_eq!((count("wbytes"), count("errors")), (count("ops") * 53, 0), "{more:?}: {out}");
        // The far end of many clients is in this process.
        assert_eq!(result["far_cpu_secs"].is_f64(), !more.contains(&"--procs"), "{out}");
    }
    for procs in ["1", "3"] {
        let done = run(&["net", "--bs", "250001", "--procs", procs, "--sendfile", path]);
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{procs}: {text}");
        assert!(text.contains("250000 bytes, fewer than a reply"), "{procs}: {text}");
    }
}

/// Starts a server and waits until it listens on these sockets.
fn serve(arguments: &[&str], sockets: &[&str]) -> Running {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.arg("serve").args(arguments).stderr(std::process::Stdio::null());
    let server = Running(command.spawn().unwrap());
    let mut tries = 0;
    while !sockets.iter().all(|path| std::os::unix::net::UnixStream::connect(path).is_ok()) {
        tries += 1;
        assert!(tries < 6000, "the server does not listen");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    server
}

#[test]
fn what_all_client_processes_complain_of_is_said_once() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = place.path().to_str().unwrap();
    let bench = |path: &str| {
        run(&["file", "--server", path, "--op", "randread", "--procs", "3", "--secs", "1"])
    };
    // Without the directory or the file they end at once.
    for (path, said) in
        [(&*format!("{path}/none"), "/none: No such file"), (path, "it needs tree/, big")]
    {
        let done = bench(path);
        let text = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{text}");
        assert!(text.contains(said) && text.lines().count() == 2, "{text}");
    }
    // With other bytes in the file each read fails.
    std::fs::write(place.path().join("big"), [0; 65536]).unwrap();
    let socket = format!("{path}/socket");
    let (export, listen) = (format!("e={path}"), format!("unix://{socket}"));
    let _server = serve(&["--dir", &export, "--listen", &listen], &[&socket]);
    let done = bench(&format!("towline+unix:///e?socket={socket}"));
    let text = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(text.contains("differs from what the tree") && text.lines().count() == 2, "{text}");
}

/// Makes the smallest tree that `bench file` can measure.
fn make_tree(place: &Path) {
    std::fs::create_dir_all(place.join("tree/d000")).unwrap();
    for number in 0..100 {
        std::fs::write(place.join(format!("tree/d000/f{number:05}")), [0; 4096]).unwrap();
    }
    std::fs::write(place.join("big"), [0; 1 << 16]).unwrap();
    std::fs::create_dir(place.join("wr")).unwrap();
}

/// Returns the operations that the manual page names.
fn operations() -> Vec<&'static str> {
    let page = include_str!("../../../man/towline-bench.1");
    let (_, rest) = page.split_once(".BI \\-\\-op \" OP\"\n").unwrap();
    let (names, _) = rest.split_once(".TP").unwrap();
    names.lines().map(|line| line.split(' ').nth(1).unwrap()).collect()
}

#[test]
fn each_operation_on_files_moves_what_it_should() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = place.path().to_str().unwrap();
    make_tree(place.path());
    let socket = format!("{path}/socket");
    let (export, listen) = (format!("e={path}"), format!("unix://{socket}"));
    let _server = serve(&["--dir", &export, "--listen", &listen], &[&socket]);
    let url = format!("towline+unix:///e?socket={socket}");
    let load = ["--bs", "8K", "--bigsize", "64K", "--files", "100", "--secs", "0.05"];
    for op in operations() {
        // Bytes read and written by each.
        let (read, written) = match op {
            "stat_same" | "stat_diff" | "scan_stat" | "create_unlink" => (0, 0),
            "orc" | "scan_read" => (4096, 0),
            "seqread" | "randread" | "clients" => (8192, 0),
            "seqwrite" | "randwrite" => (0, 8192),
            "rwmix" => (8192, 8192),
            other => panic!("what does {other} move?"),
        };
        let threads = if op == "rwmix" { "2" } else { "1" };
        for (server, depth) in [(&*url, "1"), (&*url, "8"), (path, "1")] {
            let more = ["file", "--server", server, "--op", op, "--qd", depth];
            let out = measured(&[&more[..], &load, &["--threads", threads]].concat());
            let result: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
            let count = |name: &str| result[name].as_u64().unwrap();
            let (ops, rbytes, wbytes) = (count("ops"), count("rbytes"), count("wbytes"));
            assert!(ops > 0 && count("errors") == 0, "{op} {depth} {server}: {out}");
            assert_eq!(count("bytes"), rbytes + wbytes, "{op} {depth} {server}: {out}");
            if op == "rwmix" {
                assert!(rbytes > 0 && wbytes > 0, "{op} {depth} {server}: {out}");
                assert_eq!(rbytes + wbytes, ops * read, "{op} {depth} {server}: {out}");
            } else {
                let expected = (ops * read, ops * written);
                assert_eq!((rbytes, wbytes), expected, "{op} {depth} {server}: {out}");
            }
        }
    }
    let left = std::fs::read_dir(place.path().join("wr")).unwrap();
    let left: BTreeSet<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, BTreeSet::from(["big0", "big1"].map(Into::into)), "what was created is gone");
}

#[test]
fn the_manual_page_names_every_operation() {
    let done = run(&["file", "--server", "/", "--op", "none"]);
    let said = String::from_utf8_lossy(&done.stderr);
    let (_, rest) = said.split_once("possible values: ").unwrap();
    let (names, _) = rest.split_once(']').unwrap();
    assert_eq!(names.split(", ").collect::<Vec<_>>(), operations());
}

#[test]
fn the_limits_of_this_machine_are_measured() {
    let out = measured(&["limits", "--secs", "0.05"]);
    let found: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    let is_more = |figure: &Value| figure.as_f64().is_some_and(|number| number > 0.0);
    let processors = found["processors"].as_u64().unwrap();
    let mut names = vec!["processors".to_owned()];
    for kind in ["tcp", "unix", "shm", "futex"] {
        for what in ["round_trip_us", "4k_round_trip_us"] {
            let name = format!("{kind}_{what}");
            let times = found[&name].as_object().unwrap();
            // Together on one processor, apart on two, and as the scheduler likes.
            let ways = if processors > 1 { 3 } else { 1 } - usize::from(kind == "shm");
            assert!(times.len() == ways && times.values().all(is_more), "{name}: {out}");
            names.push(name);
        }
    }
    for name in [
        "tcp_stream_bytes_per_s",
        "tcp_sendfile_bytes_per_s",
        "memcpy_bytes_per_s",
        "system_call_us",
        "local_stat_us",
        "local_scan_entries_per_s",
    ] {
        assert!(is_more(&found[name]), "{name}: {out}");
        names.push(name.to_owned());
    }
    let all: BTreeSet<_> = found.as_object().unwrap().keys().cloned().collect();
    assert_eq!(all, names.into_iter().collect());
    let out = measured(&["limits", "--op", "memcpy,unix", "--secs", "0.01"]);
    let found: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    let names: Vec<_> = found.as_object().unwrap().keys().collect();
    let wanted =
        ["memcpy_bytes_per_s", "processors", "unix_4k_round_trip_us", "unix_round_trip_us"];
    assert_eq!(names, wanted);
}

#[test]
fn each_thread_of_each_process_is_a_client() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = place.path().to_str().unwrap();
    make_tree(place.path());
    let socket = format!("{path}/socket");
    let (export, listen) = (format!("e={path}"), format!("unix://{socket}"));
    let _server = serve(&["--dir", &export, "--listen", &listen], &[&socket]);
    let url = format!("towline+unix:///e?socket={socket}");
    let load = ["file", "--server", &url, "--op", "stat_diff", "--files", "100", "--secs", "0.2"];
    let (mut attached, mut counted) = (0, 0);
    for (procs, threads, ramp) in
        [(1, 3, "0"), (2, 3, "0"), (1, 1, "0.2"), (1, 2, "0.2"), (2, 1, "1")]
    {
        let counts = [procs, threads].map(|count: u64| count.to_string());
        let clients = ["--procs", &counts[0], "--threads", &counts[1], "--ramp", ramp];
        let out = measured(&[&load[..], &clients].concat());
        let result: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        assert_eq!(result["errors"], 0, "{out}");
        are_told(&result, "bench file");
        attached += procs * threads;
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        let told = command.args(["stats", "--json", &url.replace("/e?", "/?")]).output().unwrap();
        let told: Value = serde_json::from_slice(&told.stdout).unwrap();
        assert_eq!(told["operations"]["Attach"], attached, "{told}");
        // What runs before the measurement is not measured.
        let all = told["operations"]["Stat"].as_u64().unwrap();
        let (made, measured) = (all - counted, result["ops"].as_u64().unwrap());
        assert!(measured > 0 && (made == measured) == (ramp == "0"), "{made}, {out}");
        counted = all;
        assert_eq!(told["counters"]["sessions"], 1, "only that of stats is left: {told}");
    }
}

#[test]
fn the_experiments_of_the_paper() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = directory.path().to_str().unwrap();
    let (plot, json) = (format!("{place}/p.svg"), format!("{place}/p.json"));
    let text = bench(&[
        "--paper",
        "--dir",
        place,
        "--span",
        "2M",
        "--sizes",
        "64K,1M",
        "--outstanding",
        "1,2",
        "--rounds",
        "1",
        "--secs",
        "0.01",
        "--plot",
        &plot,
        "--json",
        &json,
    ]);
    assert!(text.contains("Plain disk, reads, 2 outstanding"), "{text}");
    let figures: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let points = figures["points"].as_array().unwrap();
    let name = |point: &Value, what: &str| point[what].as_str().unwrap().to_owned();
    let of = |disk: &str, writes: bool| -> BTreeSet<String> {
        let is = |p: &&Value| name(p, "disk") == disk && p["writes"] == writes;
        points.iter().filter(is).map(|point| name(point, "system")).collect()
    };
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let reads: BTreeSet<String> =
        set(&["staged", "sendfile", "direct", "synchronised", "streams", "network"]);
    assert_eq!(of("stripe", false), reads);
    let more: BTreeSet<String> = set(&["disk", "formula"]);
    assert_eq!(of("plain", false), &reads | &more);
    assert_eq!(of("plain", true), set(&["staged", "synchronised", "disk"]));
    assert!(points.iter().all(|p| p["bytes_per_s"].as_f64().unwrap() > 0.0), "{points:?}");
    // The first data of a read arrives no later than its end.
    for point in points.iter().filter(|point| point["first_data_us"].is_f64()) {
        assert!(point["first_data_us"].as_f64() <= point["request_us"].as_f64(), "{point}");
    }
    let rows = figures["interference"].as_array().unwrap().len();
    assert!(rows == 3 || (rows == 0 && std::thread::available_parallelism().unwrap().get() == 1));
    let svg = std::fs::read_to_string(plot).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("Stripe disk, writes, 2 outstanding"));
    let left: Vec<_> = std::fs::read_dir(place).unwrap().collect();
    assert_eq!(left.len(), 2, "test files are gone: {left:?}");
}

#[test]
fn results_are_not_lost_with_one_of_their_files() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = directory.path().to_str().unwrap();
    let json = format!("{place}/p.json");
    let small = "--span 1M --sizes 64K --outstanding 1 --rounds 1 --secs 0.01 --disks delay";
    let arguments: Vec<&str> =
        ["disk", "--paper", "--dir", place].into_iter().chain(small.split(' ')).collect();
    for option in ["--plot", "--json"] {
        let done = run(&[&arguments, &[option, "/no/such/place/p"][..]].concat());
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(said.contains("/no/such/place/p: ") && !done.status.success(), "{said}");
        assert!(done.stdout.is_empty(), "{option}: it was measured first");
    }
    // This one can be opened, but not written.
    let done = run(&[&arguments, &["--plot", "/dev/full", "--json", &json][..]].concat());
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(said.contains("/dev/full: ") && !done.status.success(), "{said}");
    let figures: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert!(!figures["points"].as_array().unwrap().is_empty());
}

/// Checks that the manual page names exactly these fields where it tells what `kind` prints.
fn are_told(result: &Value, kind: &str) {
    let page = include_str!("../../../man/towline-bench.1");
    let (_, told) = page.split_once(&format!(".SH RESULT\n.B {kind}\n")).unwrap_or_else(|| {
        page.split_once(&format!(".PP\n.B {kind}\nprints\n")).expect("a paragraph about it")
    });
    let told = told.split("\n.PP").next().unwrap();
    let is_part = |c: char| c == '_' || c.is_ascii_alphanumeric();
    let words: Vec<&str> = told.split(|c| !is_part(c)).collect();
    for name in result.as_object().unwrap().keys() {
        assert!(words.contains(&&**name), "{kind} prints {name}");
    }
    for name in words.iter().filter(|word| word.contains('_')) {
        assert!(result.get(*name).is_some() || *name == "far_cpu_secs", "{kind}: {name}");
    }
}

#[test]
fn a_load_on_every_kind_of_server() {
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (socket, nbd) = (place("socket"), place("nbd"));
    let [listen, serve_nbd] = [&socket, &nbd].map(|path| format!("unix://{path}"));
    let exports = ["--disk", "d=mem:4M", "--disk", "slow=mem:4M:iops=100"];
    let addresses = ["--listen", &*listen, "--nbd", &*serve_nbd];
    let _server = serve(&[exports, addresses].concat(), &[&socket, &nbd]);
    let load = |arguments: &[&str]| -> Value {
        // The disks are shorter than the default span.
        let text = bench(&[arguments, &["--depth", "4"]].concat());
        assert!(text.starts_with("#start\n#end\n"), "{text}");
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    };
    let unix = format!("towline+unix:///d?socket={socket}");
    let shm = unix.replace("+unix", "+shm");
    for server in
        [&["--server", &unix[..]], &["--server", &shm], &["--nbd", &format!("unix://{nbd}")]]
    {
        for (more, bytes) in [
            (&["--random"][..], 4096),
            (&["--random", "--write", "--clients", "2"], 4096),
            (&["--size", "1M"], 1 << 20),
        ] {
            let found = load(&[server, more, &["--secs", "0.05"]].concat());
            let (ops, moved) = (found["ops"].as_u64().unwrap(), found["bytes"].as_u64().unwrap());
            assert!(ops >= 4 && moved == ops * bytes, "{server:?} {more:?}: {found}");
            assert!(found["secs"].as_f64().unwrap() >= 0.05, "{found}");
            are_told(&found, "bench disk");
        }
    }
    for server in [["--server", &unix[..]], ["--nbd", &format!("unix://{nbd}")]] {
        refused(&[&server[..], &["--size", "5M"]].concat(), "4194304 bytes");
    }
    let shared = ["--nbd", &format!("unix://{nbd}"), "--clients", "5", "--threads", "2"];
    for (more, size) in [(&["--size", "64K", "--write"][..], 64 << 10), (&["--random"], 4096)] {
        let found = load(&[&shared, more, &["--secs", "0.05"]].concat());
        let (ops, moved) = (found["ops"].as_u64().unwrap(), found["bytes"].as_u64().unwrap());
        assert!(ops >= 5 * 4 && moved == ops * size, "{more:?}: {found}");
        // Zero is reported if the last client began when the others had ended.
        let of = |name: &str| found[name].as_f64().unwrap();
        assert!(of("fastest") >= of("slowest") && of("slowest") >= 0.0, "{found}");
    }
    // A disk that is known to be slow is measured as slow.
    let slow =
        load(&["--server", &format!("towline+shm:///slow?socket={socket}"), "--secs", "0.5"]);
    assert!(slow["ops"].as_u64().unwrap() <= 100, "{slow}");
}

struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn experiments_that_a_signal_ends_leave_no_files() {
    use std::os::unix::process::ExitStatusExt;
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(["bench", "disk", "--paper", "--span", "16M", "--dir"]).arg(directory.path());
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut child = Running(command.spawn().unwrap());
    let entries =
        || std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
    // Signals are caught before the first file is made.
    while !entries().any(|made| made.join("plain").exists()) {
        assert_eq!(child.0.try_wait().unwrap(), None);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_child(&child.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.0.wait().unwrap().signal(), Some(15));
    assert_eq!(entries().count(), 0);
}

#[test]
fn lengths_of_fragments_are_swept() {
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
    command.args(["bench", "disk", "--paper", "--fragments", "16K,256K", "--span", "2M"]);
    command.args(["--rounds", "1", "--secs", "0.05", "--disks", "delay"]);
    command.arg("--json").arg(&json).arg("--dir").arg(directory.path());
    let done = command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let text = String::from_utf8(done.stdout).unwrap();
    assert!(text.contains("16K") && text.contains("serial"), "{text}");
    let rows: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let rows = rows.as_array().unwrap();
    // Reads of 8 MiB do not fit into the span.
    assert_eq!(rows.len(), 3, "{text}");
    for row in rows {
        // The time that the disk is known to need; no measurement can be shorter.
        let alone = 200.0 + 1e6 / 1024.0;
        let of = |name: &str| row[name].as_f64().unwrap();
        assert!(of("measured_us") > alone && of("formula_us") > of("formula_short_us") - 1e-6);
        assert!(of("formula_short_us") > alone, "{row}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    refused(&[], "<--paper|--nbd <ADDRESS>|--server <URL>>");
    refused(&["--paper", "--sizes", "5K"], "--sizes");
    refused(&["--paper", "--fragments", "1M"], "256K");
    refused(&["--paper", "--dir", "/no/such/place"], "/no/such/place");
    refused(&["--nbd", "unix:///no/such/socket"], "/no/such/socket");
    refused(&["--nbd", "nowhere"], "HOST:PORT");
    refused(&["--nbd", "nbd://127.0.0.1/d"], "HOST:PORT");
    refused(&["--server", "towline+unix:///d?socket=/no/such/socket"], "/no/such/socket");
    refused(&["--server", "towline://h/d", "--size", "16M"], "8M");
    refused(&["--paper", "--fragments", "64K", "--disks", "stripe"], "plain and delay");
}

/// An argument that would be ignored is named, together with those that it conflicts with.
#[test]
fn what_belongs_to_another_measurement_is_refused() {
    let refused = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towline"));
        let done = command.args(["bench", "disk"]).args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        let named = arguments.iter().filter(|argument| argument.starts_with("--"));
        assert!(
            done.status.code() == Some(2)
                && text.contains("cannot be used with")
                && named.clone().all(|argument| text.contains(argument)),
            "{arguments:?}: {text}"
        );
    };
    let server = ["--server", "towline+unix:///d?socket=/no/such/socket"];
    let nbd = ["--nbd", "unix:///no/such/socket"];
    let experiments: [&[&str]; 8] = [
        &["--dir", "."],
        &["--sizes", "4K"],
        &["--outstanding", "1"],
        &["--rounds", "1"],
        &["--disks", "plain"],
        &["--fragments", "64K"],
        &["--plot", "p.svg"],
        &["--json", "p.json"],
    ];
    for more in experiments {
        refused(&[&nbd, more].concat());
        refused(&[&server, more].concat());
    }
    let of_nbd: [&[&str]; 3] = [&["--export", "d"], &["--structured"], &["--threads", "1"]];
    for more in of_nbd {
        refused(&[&server, more].concat());
    }
    refused(&[&nbd[..], &["--coalesce", "1"]].concat());
    let of_loads: [&[&str]; 8] = [
        &["--write"],
        &["--random"],
        &["--size", "4K"],
        &["--depth", "1"],
        &["--clients", "1"],
        &["--pin", "0"],
        &["--coalesce", "1"],
        &nbd,
    ];
    for more in [&of_loads[..], &of_nbd].concat() {
        refused(&[&["--paper"], more].concat());
    }
    refused(&["--paper", "--fragments", "64K", "--sizes", "4K"]);
    refused(&["--paper", "--fragments", "64K", "--outstanding", "2"]);
}
