//! `towline run`, the safety net behind the replaced symbols: programs that make system calls themselves.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use support::{TOWLINE, World};

/// The remote directory's path for the programs; it does not exist locally.
const PREFIX: &str = "/towline-net-test";
/// How long a program may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

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

/// Runs a command to its end. Panics with a message if it takes too long.
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

/// Returns whether the kernel can trap system calls. If not, prints that the test is skipped.
fn has_trap() -> bool {
    let has = towline_instance::has_trap();
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
    // Everything except the length of the working directory's name.
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

#[test]
fn threads_signals_and_children_without_libc_are_armed() {
    if !has_trap() {
        return;
    }
    let world = World::new();
    let program = compile(&world, "stress", &[]);
    let got = under_run(&world, &[], &[program.to_str().unwrap(), PREFIX]);
    assert_eq!(text(&got.stdout), "all well\n", "{}", text(&got.stderr));
    assert_eq!((got.status.code(), text(&got.stderr)), (Some(0), String::new()));
}

/// Runs `once` under `run`, with a path on its standard input.
fn once(world: &World, options: &[&str], wrapper: &[&str], arguments: &[&str]) -> Output {
    let program = compile(world, "once", &[]);
    let script = format!("echo {PREFIX}/file | \"$@\"");
    // The shell would see the prefix in an inline script; with a file, it is in neither program's arguments.
    fs::write(world.local("script"), script).unwrap();
    let mut command: Vec<&str> = Vec::from(wrapper);
    let (script, program) = (world.local("script"), program.to_str().unwrap().to_owned());
    command.extend(["sh", script.to_str().unwrap(), &program]);
    command.extend(arguments);
    fs::write(world.local("served/file"), "hello").unwrap();
    under_run(world, options, &command)
}

#[test]
fn a_process_is_armed_when_it_knows_of_something_remote() {
    if !has_trap() {
        return;
    }
    let world = World::new();
    // Nothing hints that this process will use remote files: it pays nothing and finds none.
    let got = once(&world, &[], &[], &[]);
    assert_eq!(text(&got.stdout), "open: -2\nopen: -2\n");
    // Trapped from the first remote file on, also in new threads.
    let got = once(&world, &[], &[], &["with libc"]);
    assert_eq!(text(&got.stdout), "open: -2\n5: hello\n5: hello\n");
    // A hint is an argument or a variable of the environment.
    let got = once(&world, &[], &[], &[&format!("--in={PREFIX}/x")]);
    assert_eq!(text(&got.stdout), "5: hello\n5: hello\n5: hello\n");
    let variable = format!("WHERE={PREFIX}");
    let got = once(&world, &[], &["env", &variable], &[]);
    assert_eq!(text(&got.stdout), "5: hello\n5: hello\n");
}

#[test]
fn without_a_trap_the_rest_works_and_the_report_says_it() {
    let world = World::new();
    let wrapper = compile(&world, "without_trap", &[]);
    let got = once(&world, &["--report"], &[wrapper.to_str().unwrap()], &["with libc"]);
    assert_eq!(text(&got.stdout), "open: -2\nopen: -2\nopen: -2\n", "{}", text(&got.stderr));
    let report = text(&got.stderr);
    assert!(report.contains("this kernel cannot trap"), "{report}");
    assert!(report.contains(&format!("{PREFIX}/file")), "{report}");
    let check = finish(Command::new(&wrapper).args([TOWLINE, "check"]).arg(world.local("once")));
    assert!(text(&check.stdout).contains("once: does not work\n"), "{}", text(&check.stdout));
    assert_eq!(check.status.code(), Some(1));
}

#[test]
fn a_report_says_what_was_taken_over_and_what_slipped_through() {
    if !has_trap() {
        return;
    }
    let world = World::new();
    let raw = compile(&world, "raw", &[]);
    let fixed = compile(&world, "once", &["-static"]);
    fs::write(world.local("served/file"), "12345").unwrap();
    let script = format!(
        "cat {PREFIX}/file; cat {PREFIX}/file; {} {PREFIX} x > /dev/null; : | {}",
        raw.display(),
        fixed.display()
    );
    let got = under_run(&world, &["--report=json"], &["sh", "-c", &script]);
    assert_eq!(text(&got.stdout), "1234512345");
    let report: serde_json::Value = serde_json::from_slice(&got.stderr).unwrap();
    let count = |path: &str| report.pointer(path).and_then(serde_json::Value::as_u64);
    let file = format!("{PREFIX}/file").replace('/', "~1");
    assert_eq!(count(&format!("/files/{file}")), Some(2), "{report}");
    assert_eq!(count("/system_calls/answered/mkdir"), Some(2), "{report}");
    assert_eq!(count("/system_calls/answered/pipe"), None, "{report}");
    assert!(count("/functions/read") >= Some(2), "{report}");
    assert!(count("/system_calls/kernel") > Some(3), "{report}");
    let slipped = report["slipped"].as_array().unwrap();
    let has = |kind: &str, program: &Path| {
        let program = program.to_str().unwrap();
        slipped.iter().any(|slip| slip["kind"] == kind && slip["program"] == program)
    };
    assert!(has("static", &fixed) && has("thread-without-libc", &raw), "{report}");
    assert_eq!(slipped.len(), 2, "{report}");
    let programs = report["programs"].as_array().unwrap();
    let of_raw = programs.iter().find(|one| one["program"] == raw.to_str().unwrap());
    assert_eq!(of_raw.unwrap()["trapped"], 1, "{report}");

    let got = under_run(&world, &["--report"], &["cat", &format!("{PREFIX}/file")]);
    let report = text(&got.stderr);
    assert!(report.contains(&format!("1  {PREFIX}/file\n")), "{report}");
    assert!(report.contains("nothing is known to have bypassed interception"), "{report}");
    let got = under_run(&world, &[], &["cat", &format!("{PREFIX}/file")]);
    assert_eq!(text(&got.stderr), "", "no report unasked");
}

#[test]
fn programs_out_of_reach_are_told_of_before_they_run() {
    let world = World::new();
    let program = compile(&world, "once", &["-static"]);
    // Nothing can be hosted where system calls cannot be trapped.
    let wrapper = compile(&world, "without_trap", &[]);
    let under_run = |world: &World, program: &[&str]| {
        let mut command = Command::new(&wrapper);
        let at = format!("{PREFIX}={}", world.url("dir"));
        finish(command.args([TOWLINE, "run", "--at", &at, "--"]).args(program))
    };
    let program = program.to_str().unwrap();
    let file = format!("{PREFIX}/file");
    fs::write(world.local("served/file"), "12345").unwrap();
    let told = |output: &Output, end: &str| {
        let text = text(&output.stderr);
        let wanted = format!("towline: run: {program} is statically linked");
        text.contains(&wanted) && text.contains(end) && text.contains("towline cp")
    };
    // Started by `run` itself.
    let got = under_run(&world, &[program, &file]);
    assert!(told(&got, "; not started:"), "{}", text(&got.stderr));
    assert_eq!((got.status.code(), text(&got.stdout)), (Some(126), String::new()));
    // Started by a child that executes it, spawns it or looks it up.
    let spawn = "import os, sys\ntry: os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)\n\
                 except PermissionError: sys.exit(44)";
    let by_name = format!("PATH={}:$PATH; once {file}; exit $?", world.path.display());
    for (command, status) in [
        (vec!["sh", "-c", "\"$@\"; exit $?", "sh", program, &file], 126),
        (vec!["sh", "-c", &by_name], 126),
        (vec!["env", program, &file], 126),
        (vec!["python3", "-c", spawn, program, &file], 44),
    ] {
        if command[0] == "python3" && !Path::new("/usr/bin/python3").exists() {
            println!("SKIPPED: python3 is not installed");
            continue;
        }
        let got = under_run(&world, &command);
        assert!(told(&got, "; not started:"), "{command:?}: {}", text(&got.stderr));
        assert_eq!(got.status.code(), Some(status), "{command:?}: {}", text(&got.stderr));
    }
    // In a remote directory it is started, since it may not use remote files.
    let script = format!("cd {PREFIX} && echo /etc/hostname | {program} > /dev/null");
    let got = under_run(&world, &["sh", "-c", &script]);
    assert!(told(&got, "remote files: use"), "{}", text(&got.stderr));
    assert_eq!(got.status.code(), Some(0));
    // Elsewhere there is no message.
    let got = under_run(&world, &["sh", "-c", &format!("echo /etc/hosts | {program}")]);
    assert_eq!((got.status.code(), text(&got.stderr)), (Some(0), String::new()));
    // A remote program, too.
    fs::copy(program, world.local("served/once")).unwrap();
    let remote = format!("{PREFIX}/once");
    let got = under_run(&world, &["sh", "-c", &format!("{remote} {file}; exit $?")]);
    assert!(text(&got.stderr).contains(&format!("{remote} is statically linked")));
    assert_eq!(got.status.code(), Some(126), "{}", text(&got.stderr));
}

#[test]
fn check_tells_what_works() {
    let world = World::new();
    let dynamic = compile(&world, "once", &[]);
    let bytes = fs::read(&dynamic).unwrap();
    let fixed = compile(&world, "raw", &["-static"]);
    let place = |name: &str, content: &[u8]| {
        use std::os::unix::fs::PermissionsExt;
        let path = world.local(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let check = |program: &Path| {
        let output = finish(Command::new(TOWLINE).args(["check", "--json"]).arg(program));
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let found = found.as_array().unwrap().first().cloned().unwrap_or_default();
        assert_eq!(output.status.success(), found["works"] == true, "{found}");
        let is_hosted = found["hosted"] == true;
        let can_be = ["static", "static-go", "other-libc"].map(Value::from);
        assert_eq!(is_hosted, has_trap() && can_be.contains(&found["obstacle"]), "{found}");
        assert_eq!(found["works"] == true, is_hosted || found["obstacle"].is_null(), "{found}");
        found
    };
    let obstacle = |program: &Path| check(program)["obstacle"].as_str().map(str::to_owned);
    assert_eq!(obstacle(Path::new("sh")), None);
    assert_eq!(obstacle(&fixed).as_deref(), Some("static"));
    let found = check(&dynamic);
    if cfg!(target_arch = "x86_64") {
        assert_eq!(found["system_calls"]["places"], 3, "{found}");
        assert!(found["system_calls"]["names"].as_array().unwrap().contains(&"open".into()));
        assert_eq!(found["works"], towline_instance::has_trap(), "{found}");
    }
    let mut foreign = bytes.clone();
    foreign[18..20].copy_from_slice(&8u16.to_le_bytes());
    assert_eq!(obstacle(&place("mips", &foreign)).as_deref(), Some("other-machine"));
    let mut musl = bytes.clone();
    let at = musl.windows(8).position(|part| part == b"ld-linux").unwrap();
    musl[at..at + 8].copy_from_slice(b"ld-musl-");
    assert_eq!(obstacle(&place("musl", &musl)).as_deref(), Some("other-libc"));
    let interpreted = place("script", format!("#!{} -x\n", fixed.display()).as_bytes());
    assert_eq!(obstacle(&interpreted).as_deref(), Some("static"));
    assert_eq!(obstacle(&place("by-env", b"#!/usr/bin/env sh\n")), None);
    assert_eq!(obstacle(&place("plain", b"echo\n")), None);
    if std::os::unix::fs::chown(&dynamic, Some(1), Some(1)).is_ok() {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&dynamic, fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(obstacle(&dynamic).as_deref(), Some("privileged"));
        // A hosted program would not get its rights.
        std::os::unix::fs::chown(&fixed, Some(1), Some(1)).unwrap();
        fs::set_permissions(&fixed, fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(obstacle(&fixed).as_deref(), Some("privileged"));
    } else {
        println!("SKIPPED: only root can make a program of somebody else setuid");
    }

    // As text, and with files that cannot be examined.
    let output = finish(Command::new(TOWLINE).args(["check", "sh"]));
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "sh: works\n"));
    for (name, complaint) in [
        ("/no/such/program", "/no/such/program: no such file"),
        ("/etc/passwd", "/etc/passwd: not executable"),
        ("/etc", "/etc: not a regular file"),
    ] {
        let output = finish(Command::new(TOWLINE).args(["check", name, "sh"]));
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains(complaint), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "sh: works\n", "the others are told of all the same");
    }
}

/// A program may be started again and again; some are started for each window.
#[test]
fn unreached_programs_are_told_of_once() {
    use std::os::unix::fs::{PermissionsExt, chown};
    let world = World::new();
    let program = world.local("privileged");
    fs::copy("/bin/true", &program).unwrap();
    if chown(&program, Some(1), Some(1)).is_err() {
        println!("SKIPPED: only root can make a program of somebody else setuid");
        return;
    }
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    let name = program.to_str().unwrap();
    let script = format!("cd {PREFIX} && {name} && {name} && {name}; exit $?");
    let got = under_run(&world, &[], &["sh", "-c", &script]);
    assert_eq!(got.status.code(), Some(0));
    let told = text(&got.stderr);
    assert_eq!(told.matches("/privileged is setuid").count(), 1, "{told}");
}

/// The dynamic linker ignores the library, too, in what a process with two users executes.
#[test]
fn programs_of_two_users_are_not_started_on_remote_files() {
    if !support::have("python3") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can have two users");
        return;
    }
    let world = World::new();
    fs::write(world.local("served/f"), "remote\n").unwrap();
    let execute = |ids: &str| {
        let code = format!(
            "import os\nos.setresuid({ids})\n\
             try: os.execv('/bin/cat', ['cat', '{PREFIX}/f'])\nexcept OSError as e: print(e.errno)"
        );
        under_run(&world, &[], &["python3", "-c", &code])
    };
    let got = execute("1, 0, 0");
    assert_eq!(text(&got.stdout), format!("{}\n", libc::EACCES), "{}", text(&got.stderr));
    let told = text(&got.stderr);
    assert!(told.contains("/bin/cat was executed by a process whose real and effective"), "{told}");
    assert_eq!(text(&execute("0, 0, 0").stdout), "remote\n");
}

/// Files are named by path, by path relative to a remote working directory, and by system calls without libc.
/// They can be watched, but have no handles. A local file to which a remote link leads is like any local
/// file.
#[test]
fn remote_files_are_watched_and_have_no_handles() {
    let world = World::new();
    fs::write(world.local("served/f"), "text").unwrap();
    fs::write(world.local("here"), "text").unwrap();
    std::os::unix::fs::symlink(world.local("here"), world.local("served/out")).unwrap();
    let source = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <errno.h>
#include <sys/fanotify.h>
#include <sys/inotify.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int count, char **names) {
    int fd = inotify_init1(0), all = fanotify_init(FAN_REPORT_FID, 0);
    union { struct file_handle handle; char room[256]; } to;
    for (int i = 1; i < count; i++) {
        int mount;
        to.handle.handle_bytes = 128;
        int by_libc = inotify_add_watch(fd, names[i], IN_MODIFY);
        const char *error = by_libc < 0 ? strerrorname_np(errno) : "watched";
        int by_call = syscall(SYS_inotify_add_watch, fd, names[i], IN_MODIFY);
        int named = name_to_handle_at(AT_FDCWD, names[i], &to.handle, &mount, AT_SYMLINK_FOLLOW);
        printf("%s %d %s", error, by_call == by_libc, named < 0 ? strerrorname_np(errno) : "named");
        int open_file = open(names[i], O_PATH);
        named = name_to_handle_at(open_file, "", &to.handle, &mount, AT_EMPTY_PATH);
        printf(" %s", open_file < 0 ? "" : named < 0 ? strerrorname_np(errno) : "named");
        open_file = open(names[i], O_RDONLY);
        int marked = fanotify_mark(all, FAN_MARK_ADD, FAN_MODIFY, open_file, NULL);
        printf(" %s\n", open_file < 0 ? "" : marked < 0 ? strerrorname_np(errno) : "marked");
    }
}
"#;
    fs::write(world.local("watch.c"), source).unwrap();
    let program = world.local("watch");
    let built = finish(Command::new("cc").arg("-o").args([&program, &world.local("watch.c")]));
    assert!(built.status.success(), "{}", text(&built.stderr));
    let script = format!("cd {PREFIX} && {} . f {PREFIX} none out", program.display());
    let got = under_run(&world, &[], &["sh", "-c", &script]);
    let watched = "watched 1 EOPNOTSUPP EOPNOTSUPP ENOENT\n".repeat(3);
    let found = text(&got.stdout);
    let local = found.strip_prefix(&format!("{watched}ENOENT 1 ENOENT  \n"));
    assert!(local.is_some_and(|rest| rest.starts_with("watched 1 ")), "{found}");
}

#[test]
fn go_programs_work_with_libc_and_without() {
    if std::env::var_os("TOWLINE_LONG").is_none() || !has_trap() {
        println!("SKIPPED: Go programs are tried in the long tier");
        return;
    }
    if Command::new("go").arg("version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: go is not installed");
        return;
    }
    let world = World::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/files.go");
    let program = world.local("files");
    let build = |source: &Path, cgo: &str, mode: &str| {
        let mut command = Command::new("go");
        command.args(["build", mode, "-o"]).arg(&program).arg(source).env("CGO_ENABLED", cgo);
        let built = finish(&mut command);
        assert!(built.status.success(), "{}", text(&built.stderr));
    };
    let plain = fs::read_to_string(&source).unwrap();
    let plain = plain.replace("// #include <stdlib.h>\nimport \"C\"\n", "");
    let other = world.local("plain.go");
    fs::write(&other, plain.replace("C.abs(-1)", "1")).unwrap();
    // The last one names glibc's dynamic linker, but none of its libraries.
    let ways = [
        ("libc", &source, "1", "exe"),
        ("static", &other, "0", "exe"),
        ("pie", &other, "0", "pie"),
    ];
    for (way, source, cgo, mode) in ways {
        build(source, cgo, &format!("-buildmode={mode}"));
        let local = world.local("local").join(way);
        fs::create_dir_all(&local).unwrap();
        let expected = finish(Command::new(&program).arg(&local));
        assert_eq!(text(&expected.stderr), "");
        for round in 0..5 {
            let top = world.local("served").join(format!("round-{way}-{round}"));
            fs::create_dir(&top).unwrap();
            let name = format!("{PREFIX}/round-{way}-{round}");
            let got = under_run(&world, &[], &[program.to_str().unwrap(), &name]);
            assert_eq!(text(&got.stdout), text(&expected.stdout), "{}", text(&got.stderr));
            assert!(got.status.success());
        }
    }
}
