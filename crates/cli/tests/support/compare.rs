//! Runs C programs that print everything they see (`programs/*.c`), on a local and on a remote directory.

use super::{TOWLINE, World};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for one program; the machine may be busy.
const LIMIT: Duration = Duration::from_secs(170);

/// The libc of a program, and how it is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Libc {
    /// glibc, dynamically linked.
    Shared,
    /// glibc, statically linked.
    Static,
    /// musl, dynamically linked.
    Musl,
    /// musl, statically linked.
    StaticMusl,
}

impl Libc {
    /// Returns the compiler for it, and its flags.
    fn compiler(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Shared => ("cc", &[]),
            Self::Static => ("cc", &["-static", "-DGUEST"]),
            Self::Musl => ("musl-gcc", &["-DGUEST"]),
            Self::StaticMusl => ("musl-gcc", &["-static", "-DGUEST"]),
        }
    }

    /// Returns whether programs for it can be compiled here. If not, prints that the test is skipped.
    pub(crate) fn is_here(self) -> bool {
        let (compiler, _) = self.compiler();
        let found = Command::new(compiler).arg("--version").stdout(Stdio::null()).status();
        let is_here = found.is_ok_and(|status| status.success());
        if !is_here {
            println!("SKIPPED: {self:?} programs need {compiler}, which is not installed");
        }
        is_here
    }
}

/// Compiles one of the programs.
pub(crate) fn compiled(libc: Libc, world: &World, name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name);
    let program = world.local(name.strip_suffix(".c").unwrap());
    // As distributions compile: with the variants of functions that check lengths.
    let (compiler, flags) = libc.compiler();
    let output = Command::new(compiler)
        .args(flags)
        .args(["-O1", "-D_FORTIFY_SOURCE=2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-result"])
        .arg("-o")
        .args([&program, &source])
        .args(["-pthread", "-ldl"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Runs a command, which must end in time. Returns its output and exit code.
pub(crate) fn finished(command: &mut Command, transcript: &Path) -> (String, Option<i32>) {
    let file = fs::File::create(transcript).unwrap();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .spawn()
        .unwrap();
    let start = Instant::now();
    loop {
        let text = || String::from_utf8_lossy(&fs::read(transcript).unwrap()).into_owned();
        if let Some(status) = child.try_wait().unwrap() {
            return (text(), status.code());
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{command:?} did not end in {LIMIT:?}; it said:\n{}", text());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Describes a directory: names, kinds, modes, links, targets and contents.
pub(crate) fn tree(directory: &Path) -> String {
    let script = "find . -printf '%p %y %m %n %l\\n' | sort; find . -type f | sort | xargs cksum";
    let output = Command::new("sh").args(["-c", script]).current_dir(directory).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a program on a local directory and under `run`, and compares.
pub(crate) fn same(libc: Libc, source: &str, arguments: &[&str]) {
    same_over(&["shm", "tcp"], libc, source, arguments);
}

/// Like [`same`], over these transports.
pub(crate) fn same_over(transports: &[&str], libc: Libc, source: &str, arguments: &[&str]) {
    let world = World::new();
    let program = compiled(libc, &world, source);
    // The parent of the prefix is a local directory, like that of the local one.
    for side in ["local", "remote"] {
        fs::create_dir(world.local(side)).unwrap();
    }
    let local = world.local("local/data");
    fs::create_dir(&local).unwrap();
    let mut command = Command::new(&program);
    command.args(arguments).current_dir(&local);
    let (expected, code) = finished(&mut command, &world.local("expected"));
    assert_eq!(code, Some(0), "{expected}");
    for transport in transports {
        let served = world.local("served").join(transport);
        fs::create_dir(&served).unwrap();
        let prefix = world.local("remote/data");
        let url = world.through(transport, &format!("dir/{transport}"));
        let mut command = Command::new(TOWLINE);
        command
            .args(["run", "--at", &format!("{}={url}", prefix.display()), "--", "sh", "-c"])
            .args(["cd \"$0\" && exec \"$@\""])
            .args([&prefix, &program])
            .args(arguments);
        let (got, code) = finished(&mut command, &world.local("got"));
        let wanted = expected.replace(local.to_str().unwrap(), prefix.to_str().unwrap());
        if got != wanted || code != Some(0) {
            let output = Command::new("diff")
                .args(["-U4"])
                .args([world.local("expected"), world.local("got")])
                .output()
                .unwrap();
            let difference = String::from_utf8_lossy(&output.stdout);
            panic!("{source} over {transport} ends with {code:?}; {difference}");
        }
        assert_eq!(tree(&served), tree(&local), "{source} over {transport} leaves other files");
    }
}
