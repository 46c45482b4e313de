//! The kit on the servers of the field. Each one's known failures are listed here with the reason; any
//! other failure, and a listed rule that passes, fails the test.
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

/// Whether the program is here and prints this version; says so loudly when not.
fn present(program: &str, version: &str) -> bool {
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

fn conforms(address: Address, export: &str, known: &[(&str, &str)]) {
    let location = Location { address, export: export.to_owned() };
    let mut target = Target::new(location, TIMEOUT, 1);
    target.probe().unwrap();
    let mut wrong = Vec::new();
    for rule in rules::all() {
        let line = Line::of(rule, &target, true);
        let reason = known.iter().find(|(id, _)| *id == rule.id).map(|(_, reason)| reason);
        match (line.verdict, reason) {
            (Verdict::Fail, None) => wrong.push(format!("{} fails: {}", rule.id, line.seen)),
            (Verdict::Pass | Verdict::Skip, Some(reason)) => {
                wrong.push(format!("{} does not fail any more ({reason})", rule.id));
            }
            _ => {}
        }
    }
    for (id, _) in known {
        assert!(rules::all().any(|rule| rule.id == *id), "no rule is called {id}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
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
    conforms(server.address.clone(), "", &[]);
}

#[test]
fn nbdkit() {
    if !present("nbdkit", "1.32.") {
        return;
    }
    let command = words("nbdkit -f memory 16M");
    let server = Launched::start(&command, TIMEOUT, false).unwrap();
    conforms(
        server.address.clone(),
        "",
        &[
            ("list.repeat", "the second LIST names no export"),
            ("end.client-gone", "aborts: raw_send_socket: Assertion `sock >= 0' failed"),
            ("end.client-gone-in-request", "has aborted in the rule before"),
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
    // It goes to the background, and has written its number when it listens.
    let pid = loop {
        match std::fs::read_to_string(&pid) {
            Ok(text) if text.ends_with('\n') => break text.trim().to_owned(),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let _ended = Ended(pid);
    conforms(
        Address::Unix(socket.into()),
        "disk",
        &[
            ("greeting.unknown-client-flag", "serves on"),
            ("option.error-text", "out of step after LIST with data"),
            ("list.data", "out of step after LIST with data"),
            ("export-name.agrees", "INFO says size 0"),
            ("go.same-as-info", "INFO says size 0"),
            ("abort.ack", "closes without ACK"),
            ("abort.end", "closes without ACK"),
            ("abort.data", "closes without ACK"),
            ("info.short-data", "waits for more data"),
            ("info.name-beyond-data", "waits for more data"),
            ("info.count-mismatch", "waits for more data"),
            ("request.misplaced-flag", "ignores NO_HOLE"),
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
