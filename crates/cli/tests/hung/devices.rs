//! A local device that does not answer: the core that waits for it is reported, and the others go on.

use crate::world::{CREATE, Serving, WRITE, begin, connect, in_time, work_on};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A local file system that is frozen, so that its device takes no writes for a while.
struct Frozen {
    point: PathBuf,
}

impl Frozen {
    /// Returns `None`, and prints the reason, if a file system cannot be had.
    fn new(directory: &Path) -> Option<Self> {
        let (image, point) = (directory.join("image"), directory.join("mounted"));
        fs::create_dir(&point).unwrap();
        fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let made = ran("mke2fs", &["-q", "-F", "-t", "ext4", image.to_str().unwrap()]);
        let frozen = Self { point };
        let point = frozen.point.to_str().unwrap();
        if !(made && ran("mount", &["-o", "loop", image.to_str().unwrap(), point])) {
            eprintln!("SKIPPED: no file system can be made and mounted here");
            return None;
        }
        Some(frozen)
    }

    fn freeze(&self) -> bool {
        let done = ran("fsfreeze", &["--freeze", self.point.to_str().unwrap()]);
        if !done {
            eprintln!("SKIPPED: a file system cannot be frozen here");
        }
        done
    }

    fn thaw(&self) {
        assert!(ran("fsfreeze", &["--unfreeze", self.point.to_str().unwrap()]));
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // These fail if it is not frozen or not mounted.
        let _ = ran("fsfreeze", &["--unfreeze", self.point.to_str().unwrap()]);
        let _ = ran("umount", &["--lazy", self.point.to_str().unwrap()]);
    }
}

/// Runs a system program. Returns true if it exists and succeeds.
fn ran(program: &str, arguments: &[&str]) -> bool {
    let paths = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(program);
    command.env("PATH", paths).args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// One of two cores waits for a device: first the one that accepts connections, then the other.
#[test]
fn a_device_that_does_not_answer_is_told_and_other_cores_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let local = directory.path().join("local");
    fs::create_dir(&local).unwrap();
    let Some(frozen) = Frozen::new(directory.path()) else { return };
    let serving = Serving::new(2, "--dir", [("frozen", &frozen.point), ("local", &local)], &[]);
    let port = serving.port;
    let mut told = Vec::new();
    for round in 0..2 {
        // Connections are assigned to the cores in turn: 0, then 0 and 1.
        let others: Vec<_> = (0..round).map(|_| connect(port, false)).collect();
        let stuck = connect(port, false);
        let root = stuck.attach(b"frozen").unwrap();
        if !frozen.freeze() {
            return;
        }
        let name = format!("new-{round}").into_bytes();
        let made = begin(move || root.open(&name, WRITE | CREATE, 0o600).map(drop));
        let line = serving.says("has been waiting");
        assert!(line.contains("openat2 of") && line.contains("mounted"), "{line}");
        told.extend(
            line.split_whitespace().skip_while(|word| *word != "core").nth(1).map(str::to_owned),
        );
        for number in 0..4 {
            let other = begin(move || {
                let client = connect(port, number % 2 == 1);
                work_on(&client, "other");
                client.statistics().unwrap()
            });
            let statistics = in_time(&other, "a new session while a core waits");
            assert!(statistics.contains("\"cores_waiting\":1"), "{statistics}");
        }
        assert!(made.try_recv().is_err(), "made, though the file system is frozen");
        frozen.thaw();
        in_time(&made, "what had to wait").unwrap();
        serving.says("continues after");
        drop(others);
    }
    told.sort();
    told.dedup();
    assert_eq!(told.len(), 2, "both cores had their turn: {told:?}");
}
