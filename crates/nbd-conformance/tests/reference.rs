//! Tests the kit on other projects' servers. The known failures of each are listed here with the reason. Any
//! other failure fails the test, and so does a rule that is listed as failing but does not.
#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nbd_conformance::launch::Launched;
use nbd_conformance::report::{Line, Verdict};
use nbd_conformance::rules;
use nbd_conformance::target::Target;
use nbd_conformance::uri::{Address, Location};

const TIMEOUT: Duration = Duration::from_secs(5);

/// Size of the export in bytes.
const SIZE: u64 = 16 << 20;

/// Returns true if the program is installed in this version; otherwise prints that the test is skipped.
fn present(program: &str, version: &str) -> bool {
    if std::env::var_os("TOWLINE_LONG").is_none() {
        println!("SKIPPED: the servers of others, and their races, are tried by `make test-long`");
        return false;
    }
    let Ok(output) = Command::new(program).arg("--version").output() else {
        println!("SKIPPED: {program} is not installed");
        return false;
    };
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let here = text.contains(version);
    if !here {
        let first = text.lines().next().unwrap_or_default();
        println!("SKIPPED: known failures are those of {program} {version}, this is {first}");
    }
    here
}

fn image(directory: &Path) -> String {
    let path = directory.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A known failure of a rule on a server.
enum Known {
    /// Fails each time.
    Fails(&'static str),
    /// Fails on some runs.
    Races(&'static str),
}
use Known::{Fails, Races};

fn conforms(place: Place, export: &str, known: &[(&str, Known)]) {
    for (id, _) in known {
        assert!(rules::all().any(|rule| rule.id == *id), "no rule is called {id}");
    }
    let (address, mut server) = match place {
        Place::Launched(server) => (server.address.clone(), Some(server)),
        Place::Address(address) => (address, None),
    };
    let mut target = Target::new(Location { address, export: export.to_owned() }, TIMEOUT, 1);
    target.probe().unwrap();
    let mut wrong = Vec::new();
    for rule in rules::all() {
        let line = match &mut server {
            Some(server) => Line::of_launched(rule, &target, true, server).unwrap(),
            None => Line::of(rule, &target, true),
        };
        let reason = known.iter().find(|(id, _)| *id == rule.id).map(|(_, reason)| reason);
        match (line.verdict, reason) {
            (Verdict::Fail, None) => wrong.push(format!("{} fails: {}", rule.id, line.seen)),
            (Verdict::Pass | Verdict::Skip, Some(Fails(reason))) => {
                wrong.push(format!("{} does not fail any more ({reason})", rule.id));
            }
            (Verdict::Pass, Some(Races(reason))) => {
                println!("{}: not this time: {reason}", rule.id);
            }
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A server under test.
enum Place {
    /// Started by the kit.
    Launched(Launched),
    /// Already running.
    Address(Address),
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn qemu_nbd() {
    if !present("qemu-nbd", "7.2.") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let command = format!("qemu-nbd -t -e 0 -A -f raw {}", image(directory.path()));
    let server = Launched::start(&words(&command), TIMEOUT, false).unwrap();
    conforms(
        Place::Launched(server),
        "",
        &[
            ("meta-set.surplus-data", Fails("takes the surplus for the next option")),
            ("disc.outstanding", Races("closes before the last replies are sent")),
            ("zeroes.no-hole-status", Fails("unwritten extents of the file system count as holes")),
        ],
    );
}

const ABORTS: &str = "aborts: raw_send_socket: Assertion `sock >= 0' failed";

#[test]
fn nbdkit() {
    if !present("nbdkit", "1.32.") {
        return;
    }
    let command = words("nbdkit -f memory 16M");
    let server = Launched::start(&command, TIMEOUT, false).unwrap();
    conforms(
        Place::Launched(server),
        "",
        &[
            ("list.repeat", Fails("the second LIST names no export")),
            ("meta-set.unique", Fails("answers a repeated query twice, with one identifier")),
            ("meta-set.surplus-data", Fails("ACK")),
            ("meta-set.failure-clears", Fails("an option too short to be read keeps the contexts")),
            ("zeroes.no-hole-status", Fails("memory is given back all the same")),
            ("disc.outstanding", Races(ABORTS)),
            ("disc.outstanding-writes", Races("closes before the last write is done")),
            ("end.half-closed", Races(ABORTS)),
            ("end.client-gone", Races(ABORTS)),
            ("end.client-gone-in-request", Races(ABORTS)),
        ],
    );
}

#[test]
fn nbd_server() {
    if !present("nbd-server", "3.24") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (socket, configuration, pid) = (path("sock"), path("conf"), path("pid"));
    let text = format!(
        "[generic]\nunixsock = {socket}\nallowlist = true\n\
         [disk]\nexportname = {}\ntrim = true\nflush = true\nfua = true\n",
        image(directory.path())
    );
    std::fs::write(&configuration, text).unwrap();
    let started = Command::new("nbd-server").args(["-C", &configuration, "-p", &pid]).status();
    assert!(started.unwrap().success());
    // It becomes a daemon, and has written its process number when it listens.
    let pid = loop {
        match std::fs::read_to_string(&pid) {
            Ok(text) if text.ends_with('\n') => break text.trim().to_owned(),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let _ended = Ended(pid);
    while !Path::new(&socket).exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    conforms(
        Place::Address(Address::Unix(socket.into())),
        "disk",
        &[
            ("greeting.unknown-client-flag", Fails("serves on")),
            ("option.error-text", Fails("out of step after LIST with data")),
            ("list.data", Fails("out of step after LIST with data")),
            ("export-name.agrees", Fails("INFO says size 0")),
            ("go.same-as-info", Fails("INFO says size 0")),
            ("abort.ack", Fails("closes without ACK")),
            ("abort.end", Fails("closes without ACK")),
            ("abort.data", Fails("closes without ACK")),
            ("info.short-data", Fails("waits for more data")),
            ("info.name-beyond-data", Fails("waits for more data")),
            ("info.count-mismatch", Fails("waits for more data")),
            ("request.misplaced-flag", Fails("ignores NO_HOLE")),
            ("write.misplaced-flag", Fails("ignores NO_HOLE")),
            ("trim.unknown-flag", Fails("ignores NO_HOLE")),
        ],
    );
}

/// Ends a background process when dropped.
struct Ended(String);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(&self.0).status();
    }
}
