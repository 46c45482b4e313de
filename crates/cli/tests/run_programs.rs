//! `towline run` with programs and libraries that replace libc functions themselves, or that have much code
//! of their own between libc and the program.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::{TOWLINE, World};

/// The remote directory's path for the programs; it does not exist locally.
const PREFIX: &str = "/towline-run-test";

/// Runs a script in a directory. Returns its output and exit status. It is killed after two minutes.
fn script(start: &Command, text: &str, directory: &str, scratch: &Path) -> (String, Option<i32>) {
    let output = again(start)
        .args(["sh", "-c", &format!("cd {directory} || exit 99\n{text}")])
        .env("SCRATCH", scratch)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&text).replace(directory, "HERE"), output.status.code())
}

/// Returns a copy of the command: the same program with the same arguments.
fn again(command: &Command) -> Command {
    let mut again = Command::new(command.get_program());
    again.args(command.get_args());
    again
}

fn limited() -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after", "5", "120"]);
    command
}

const WORK: &str = "
set -e
rm -rf x y x.tar; mkdir x; cd x
for i in 1 2 3; do echo $i > f$i; done
cat f1 f2 f3 | sort -r
tar cf ../x.tar . && tar tf ../x.tar | sort
cp -a f1 h && stat -c '%s %a' h && grep -r 2 . | sort
mv h g && ln -s g l && readlink l && cat l && find . | sort
(cd .. && cp -r x y && rm -r y) && ls | wc -l
! command -v python3 >/dev/null || python3 -c '
import os, mmap, threading
open(\"p\", \"w\").write(\"hello\" * 1000)
f = open(\"p\", \"r+b\"); m = mmap.mmap(f.fileno(), 0); m[0:5] = b\"HELLO\"; m.flush(); m.close()
threads = [threading.Thread(target=lambda: [os.stat(\"p\") for _ in range(200)]) for _ in range(3)]
[t.start() for t in threads]; [t.join() for t in threads]
print(open(\"p\").read(8), os.stat(\"p\").st_size, sorted(os.listdir(\".\")), os.system(\"cat f1\"))'
";

#[test]
fn other_preloaded_libraries_work_before_and_after() {
    let world = World::new();
    let local = world.local("local");
    fs::create_dir(&local).unwrap();
    let expected = script(&limited(), WORK, local.to_str().unwrap(), &world.path);
    assert_eq!(expected.1, Some(0), "{}", expected.0);
    let at = format!("{PREFIX}={}", world.url("dir"));
    let folders = ["x86_64-linux-gnu", "aarch64-linux-gnu"].map(|m| Path::new("/usr/lib").join(m));
    let names =
        ["libjemalloc.so.2", "faketime/libfaketime.so.1", "../../libexec/coreutils/libstdbuf.so"];
    for name in names {
        let Some(library) = folders.iter().map(|f| f.join(name)).find(|path| path.exists()) else {
            println!("SKIPPED: {name} is not installed");
            continue;
        };
        let preload = format!("LD_PRELOAD={}", library.display());
        let mut before = limited();
        before.args(["env", &preload, TOWLINE, "run", "--at", &at, "--"]);
        let mut after = limited();
        after.args([TOWLINE, "run", "--at", &at, "--", "env", &preload]);
        for (place, start) in [("before", &before), ("after", &after)] {
            let got = script(start, WORK, PREFIX, &world.path);
            assert_eq!(got, expected, "{name} {place} ours");
        }
    }
}

#[test]
fn fakeroot_works_outside_and_inside() {
    let world = World::new();
    if Command::new("fakeroot").arg("true").output().is_err() {
        println!("SKIPPED: no fakeroot");
        return;
    }
    let local = world.local("local");
    fs::create_dir(&local).unwrap();
    let text = &format!(
        "{WORK}\nchown 7:8 f1; stat -c '%u %g' f1; mknod n c 1 3; stat -c '%t %T' n; id -u"
    );
    let mut plain = limited();
    plain.arg("fakeroot");
    let expected = script(&plain, text, local.to_str().unwrap(), &world.path);
    assert_eq!(expected.1, Some(0), "{}", expected.0);
    let at = format!("{PREFIX}={}", world.url("dir"));
    let mut outside = limited();
    outside.args(["fakeroot", TOWLINE, "run", "--at", &at, "--"]);
    let mut inside = limited();
    inside.args([TOWLINE, "run", "--at", &at, "--", "fakeroot"]);
    // Outside, its library is also in the process that keeps the run, which outlives the program by a moment; if
    // its daemon has ended by then, the library complains.
    let script = |start: &Command, text: &str, directory: &str| {
        let tries = (0..5).map(|_| script(start, text, directory, &world.path));
        let mut tries = tries.skip_while(|got| got.0.contains("fakeroot internal error"));
        tries.next().expect("its library complains each time")
    };
    for (place, start) in [("inside", &inside), ("outside", &outside)] {
        // The server decides the owners and devices of remote files.
        let got = script(start, WORK, PREFIX);
        let end = expected.0.find("7 8\n").unwrap();
        assert_eq!((got.0.as_str(), got.1), (&expected.0[..end], Some(0)), "fakeroot {place}");
        let local = script(start, text, local.to_str().unwrap());
        assert_eq!(local, expected, "fakeroot {place}, local files");
    }
}

#[test]
fn java_uses_files() {
    let world = World::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/Use.java");
    let compiled = Command::new("javac").arg("-d").args([&world.path, &source]).output();
    match compiled {
        Ok(output) if output.status.success() => {}
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            println!("SKIPPED: no javac: {error}");
            return;
        }
    }
    let local = world.local("local");
    fs::create_dir(&local).unwrap();
    let text = "exec java -cp \"$SCRATCH\" Use";
    let expected = script(&limited(), text, local.to_str().unwrap(), &world.path);
    assert_eq!(expected.1, Some(0), "{}", expected.0);
    for transport in ["shm", "tcp"] {
        let served = world.local("served").join(transport);
        fs::create_dir(&served).unwrap();
        let at = format!("{PREFIX}={}", world.through(transport, &format!("dir/{transport}")));
        let mut start = limited();
        start.args([TOWLINE, "run", "--at", &at, "--"]);
        assert_eq!(script(&start, text, PREFIX, &world.path), expected, "{transport}");
        assert_eq!(names(&served), names(&local), "{transport}");
    }
}

/// Returns the names below a directory.
fn names(directory: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        all.push(PathBuf::from(entry.file_name()));
        if entry.file_type().unwrap().is_dir() {
            let below = names(&entry.path());
            all.extend(below.into_iter().map(|name| Path::new(&entry.file_name()).join(name)));
        }
    }
    all.sort();
    all
}
