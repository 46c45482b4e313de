//! `towline run`, the net behind the symbols: programs that make system calls themselves.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use support::{TOWLINE, World};

/// Where the remote directory is for the programs; it does not exist here.
const PREFIX: &str = "/towline-net-test";
/// Longest that a program may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(100);

/// Compiles a program of `tests/programs`.
fn compile(world: &World, name: &str, flags: &[&str]) -> PathBuf {
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name).with_extension("c");
    let program = world.local(name);
    let output = Command::new("cc")
        .args(["-O1", "-Wall", "-pthread", "-o"])
        .arg(&program)
        .arg(source)
        .args(flags)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Runs a command to its end, or fails with words.
fn finish(command: &mut Command) -> Output {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("{command:?} does not end: {}", String::from_utf8_lossy(&output.stdout));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

fn under_run(world: &World, options: &[&str], program: &[&str]) -> Output {
    let mut command = Command::new(TOWLINE);
    command.arg("run").args(options).args(["--at", &format!("{PREFIX}={}", world.url("dir"))]);
    finish(command.arg("--").args(program))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// True when the kernel can trap system calls; says it when not.
fn has_trap() -> bool {
    let has = cfg!(target_arch = "x86_64")
        && fs::read_to_string("/proc/sys/kernel/osrelease")
            .ok()
            .and_then(|release| {
                let mut numbers = release.split(['.', '-']).map_while(|n| n.parse::<u32>().ok());
                Some((numbers.next()?, numbers.next()?) >= (5, 11))
            })
            .unwrap_or(false);
    if !has {
        println!("SKIPPED: this kernel has no Syscall User Dispatch (x86-64, Linux 5.11)");
    }
    has
}

#[test]
fn system_calls_without_libc_are_answered() {
    if !has_trap() {
        return;
    }
    let world = World::new();
    let program = compile(&world, "raw", &[]);
    let program = program.to_str().unwrap();
    let local = world.local("local");
    fs::create_dir(&local).unwrap();
    let expected = finish(Command::new(program).arg(&local));
    assert!(expected.status.success(), "{}", text(&expected.stdout));
    // All but the length of the working directory's name.
    let lines = |output: &Output| {
        let all = text(&output.stdout);
        all.lines().filter(|line| !line.starts_with("getcwd")).collect::<Vec<_>>().join("\n")
    };
    let got = under_run(&world, &[], &[program, PREFIX, "under run"]);
    assert_eq!(lines(&got), lines(&expected), "{}", text(&got.stderr));
    assert_eq!(text(&got.stderr), "");
    assert!(got.status.success());
    assert_eq!(fs::read_dir(world.local("served")).unwrap().count(), 0, "it cleans up");
}
