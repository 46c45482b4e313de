//! How `towline run` starts: `launch` handles plain command lines before the dynamic linker is loaded, and
//! the program handles all others.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime};
use support::compare::{Libc, compiled};
use support::{TOWLINE, World, keeper, wait_until};

const PREFIX: &str = "/towline-start-test";

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Creates a folder for the runs of one test.
fn home(world: &World) -> std::path::PathBuf {
    let home = world.local("home");
    fs::create_dir(&home).unwrap();
    home
}

/// What the program begins with is compiled apart, and must look for the library that the program holds.
#[test]
fn a_run_begins_with_the_library_of_the_program() {
    let program = fs::read(TOWLINE).unwrap();
    let name = |at: usize| {
        let text = &program[at..program.len().min(at + 40)];
        let end = text.windows(3).position(|end| end == b".so")?;
        let is_one = text[8..].iter().take(8).all(u8::is_ascii_hexdigit);
        is_one.then(|| String::from_utf8_lossy(&text[..end]).into_owned())
    };
    let places = program.windows(8).enumerate().filter(|(_, text)| *text == b"preload-");
    let mut names: Vec<String> = places.filter_map(|(at, _)| name(at)).collect();
    names.dedup();
    assert_eq!(names.len(), 1, "{names:?}");
}

/// The program of the run may itself be remote, as may its interpreter or the target of a link.
#[test]
fn a_run_begins_with_a_remote_program() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let world = World::new();
    let served = world.local("served");
    let program = |path: &Path, text: &str| {
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    fs::create_dir(served.join("bin")).unwrap();
    fs::copy("/bin/sh", served.join("bin/shell")).unwrap();
    program(&served.join("bin/tool"), &format!("#!{PREFIX}/bin/shell\necho tool \"$@\"; exit 7\n"));
    // Programs need not come from a remote directory.
    symlink("/bin/sh", served.join("bin/link")).unwrap();
    program(
        &world.local("own-script"),
        &format!("#!{PREFIX}/bin/shell\necho script \"$@\"; exit 7\n"),
    );
    symlink(format!("{PREFIX}/bin/tool"), world.local("link")).unwrap();
    // Another program with the same name, later in the path.
    fs::create_dir(world.local("bin")).unwrap();
    for name in ["bin/tool", "bin/own-script"] {
        program(&world.local(name), "#!/bin/sh\necho not this one\n");
    }
    let local = |name: &str| world.local(name).to_str().unwrap().to_owned();
    let path = format!("{PREFIX}/bin:{}:/usr/bin:/bin", local("bin"));
    let at = format!("{PREFIX}={}", world.url("dir"));
    let tool = format!("{PREFIX}/bin/tool");
    let link = format!("{PREFIX}/bin/link");
    for options in [&["--at", &at][..], &["--at", &at, "--report=json"]] {
        let run = |command: &[&str]| {
            let mut run = Command::new(TOWLINE);
            run.arg("run").args(options).arg("--").args(command).env("PATH", &path);
            run.output().unwrap()
        };
        for (command, said) in [
            (&[tool.as_str(), "a b", ""][..], "tool a b \n"),
            (&[&format!("/{PREFIX}/./bin/../bin/tool"), "x"], "tool x\n"),
            (&["tool", "-c"], "tool -c\n"),
            (&[&link, "-c", "echo \"$0 $1\"; exit 7", "name", "x"], "name x\n"),
            (&[&local("own-script"), "x"], "script x\n"),
            (&[&local("link"), "x"], "tool x\n"),
        ] {
            let output = run(command);
            let got = String::from_utf8_lossy(&output.stdout).into_owned();
            assert_eq!(
                (got.as_str(), output.status.code()),
                (said, Some(7)),
                "{command:?}: {}",
                text(&output)
            );
        }
        // Programs of the run may start the script in any way, also with another one of its name later in the
        // path.
        let by_python = "import os, sys, subprocess\n\
            program, name = sys.argv[1], os.path.basename(sys.argv[1])\n\
            os.environ['PATH'] = os.path.dirname(program) + ':' + os.path.dirname(program) + '/bin:/bin'\n\
            for spawn, file in (os.posix_spawn, program), (os.posix_spawnp, program), (os.posix_spawnp, name):\n\
            \tchild = spawn(file, [name, 'x'], os.environ)\n\
            \tassert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n\
            assert subprocess.call([name, 'x']) == 7\n\
            fd = os.open(program, os.O_RDONLY)\n\
            child = os.fork()\n\
            if child == 0:\n\
            \ttry: os.execve(fd, [name, 'x'], os.environ)\n\
            \texcept FileNotFoundError: os._exit(9)\n\
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9\n\
            os.set_inheritable(fd, True)\n\
            child = os.fork()\n\
            if child == 0: os.execve(fd, [name, 'x'], os.environ)\n\
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n\
            os.execvp(name, [name, 'x'])\n";
        let output = run(&["python3", "-c", by_python, &local("own-script")]);
        assert_eq!(output.status.code(), Some(7), "{}", text(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "script x\n".repeat(6));
        let output = run(&[
            "sh",
            "-c",
            "PATH=${1%/*}:${1%/*}/bin:/bin; own-script x; $1 x; exec $1 x",
            "0",
            &local("own-script"),
        ]);
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "script x\n".repeat(3),
            "{}",
            text(&output)
        );
        let missing = run(&[&format!("{PREFIX}/bin/none")]);
        assert_eq!(missing.status.code(), Some(127), "{}", text(&missing));
        let said = format!("towline: run: {PREFIX}/bin/none: no such file or directory\n");
        assert!(text(&missing).starts_with(&said), "{}", text(&missing));
    }
}

#[test]
fn whichever_way_a_run_begins_its_program_finds_the_same() {
    let world = World::new();
    let home = home(&world);
    fs::write(world.local("served/file"), "12345").unwrap();
    let script = world.local("script");
    let seen = format!(
        "#!/bin/sh\ncat {PREFIX}/file; stat -c ' %d %n' {PREFIX}/file; pwd; echo \"$0 $*\"\n\
         env | sed 's/run-[0-9]*-0/run/' | grep -v '^_=' | sort\n\
         grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status; ls -l /proc/self/fd | wc -l\n"
    );
    fs::write(&script, &seen).unwrap();
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let url = world.url("dir");
    let at = |prefix: &str| format!("{prefix}={url}");
    let run = |options: &[&str], command: &[&str]| {
        let mut run = Command::new(TOWLINE);
        run.arg("run").args(options).arg("--").args(command);
        run.env("XDG_RUNTIME_DIR", &home).env("EMPTY", "").env_remove("LD_PRELOAD");
        run.output().unwrap()
    };
    let script = script.to_str().unwrap();
    for command in [&["sh", "-c", &seen, "0", "a", "b c"][..], &[script, "x"]] {
        // The first run of a new version is never plain, since the library's file does not exist yet.
        let expected = text(&run(&["--at", &at(&format!("{PREFIX}/"))], command));
        assert!(expected.starts_with("12345 "), "{expected}");
        assert!(
            expected.contains("\nLD_PRELOAD=") && expected.contains("\nEMPTY=\n"),
            "{expected}"
        );
        for options in [
            &["--at", &at(PREFIX)][..],
            &[&format!("--at={}", at(PREFIX))],
            &["--at", &at(PREFIX), "--at", &at("/towline-start-other-test")],
        ] {
            assert_eq!(text(&run(options, command)), expected, "{options:?}");
        }
    }
    // Other preloaded libraries stay, after Towline's.
    let mut with = Command::new(TOWLINE);
    with.args(["run", "--at", &at(PREFIX), "--", "sh", "-c", "echo $LD_PRELOAD"]);
    let with = with.env("XDG_RUNTIME_DIR", &home).env("LD_PRELOAD", "libm.so.6").output().unwrap();
    assert!(text(&with).ends_with(".so:libm.so.6\n"), "{}", text(&with));
    // Only the library is left.
    let runs = || {
        let entries = fs::read_dir(&home).unwrap().chain(
            fs::read_dir(&home)
                .unwrap()
                .flat_map(|entry| fs::read_dir(entry.unwrap().path()).unwrap()),
        );
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("run-")).collect::<Vec<_>>()
    };
    let end = Instant::now() + Duration::from_secs(30);
    while !runs().is_empty() {
        assert!(Instant::now() < end, "{:?} are left behind", runs());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The prefix may be an existing directory, with other programs of these names.
#[test]
fn a_program_below_the_prefix_is_remote_however_it_is_named() {
    let world = World::new();
    for (program, copy) in [("echo", "at/sub/tool"), ("basename", "served/sub/tool")] {
        let copy = world.local(copy);
        fs::create_dir_all(copy.parent().unwrap()).unwrap();
        fs::copy(Path::new("/bin").join(program), copy).unwrap();
    }
    let at = format!("{}={}", world.local("at").display(), world.url("dir"));
    let whole = world.local("at/sub/tool").display().to_string();
    let around = whole.replace("/sub/", "/./sub/");
    for options in [&[][..], &["--report=json"]] {
        for (name, path) in [
            (whole.as_str(), "/bin"),
            (&around, "/bin"),
            ("at/sub/tool", "/bin"),
            ("./at/sub/tool", "/bin"),
            ("at/./sub/tool", "/bin"),
            ("tool", "at/sub:/bin"),
        ] {
            let mut run = Command::new(TOWLINE);
            run.args(["run", "--at", &at]).args(options).args(["--", name, "/a/remote"]);
            let output = run.current_dir(&world.path).env("PATH", path).output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert_eq!(said, "remote\n", "{name} {path} {options:?}: {}", text(&output));
        }
    }
}

/// A distant or busy server takes its time for the first answer.
#[test]
fn a_run_waits_for_a_server_that_is_slow() {
    let world = World::new();
    fs::write(world.local("served/file"), "12345").unwrap();
    let at = format!("{PREFIX}={}", world.url("dir"));
    let file = format!("{PREFIX}/file");
    let mut run = Command::new(TOWLINE);
    // Run once before, since the first run of a new version is never plain.
    run.args(["run", "--at", &at, "--", "cat", &file]);
    assert_eq!(text(&run.output().unwrap()), "12345");
    let server = rustix::process::Pid::from_raw(world.server_id() as i32).unwrap();
    rustix::process::kill_process(server, rustix::process::Signal::STOP).unwrap();
    let running = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Longer than the library waits before it checks that its keeper is there; with less, the test is easier
    // to pass.
    std::thread::sleep(Duration::from_millis(500));
    rustix::process::kill_process(server, rustix::process::Signal::CONT).unwrap();
    assert_eq!(text(&running.wait_with_output().unwrap()), "12345");
}

/// The umask of the user is that of the program, but not of what is made for the run, which would be in the way of
/// later ones.
#[test]
fn a_run_works_under_any_umask() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::new();
    let home = home(&world);
    fs::write(world.local("served/file"), "12345").unwrap();
    let at = format!("{PREFIX}={}", world.url("dir"));
    // The first run makes the folder and the library, so the second one begins by the short way.
    for (umask, option) in [("0777", ""), ("0777", ""), ("0377", "--report"), ("0022", "")] {
        let run = format!("umask {umask}; exec \"$0\" run --at \"$1\" {option} -- sh -c \"$2\"");
        let look = format!("umask; cd {PREFIX}; cat file; touch new; stat -c %a new; rm new");
        let mut shell = Command::new("sh");
        shell.args(["-c", &run, TOWLINE, &at, &look]).env("XDG_RUNTIME_DIR", &home);
        let output = shell.output().unwrap();
        let mode = 0o666 & !u32::from_str_radix(umask, 8).unwrap();
        let expected = format!("{umask}\n12345{mode:o}\n");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", text(&output));
        let folder = fs::read_dir(&home).unwrap().next().unwrap().unwrap();
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700, "{umask}");
        let left = || support::names(&folder.path());
        support::wait_until("the run is removed", || left().iter().all(|n| !n.starts_with("run-")));
    }
}

/// A program finds the same standard streams open as without Towline, and `cat` of a remote file ends the
/// same way.
#[test]
fn streams_that_are_closed_stay_closed() {
    let world = World::new();
    fs::write(world.local("served/file"), "12345").unwrap();
    let at = format!("{PREFIX}={}", world.url("dir"));
    let out = world.local("out");
    let here = world.local("served/file");
    let there = format!("{PREFIX}/file");
    let look = "seen=; for fd in 0 1 2; do [ -e /proc/$$/fd/$fd ] && seen=\"$seen $fd\"; done
        cat \"$1\"; echo \"$seen, $?\" >\"$0\"";
    for closed in ["", "<&-", ">&-", "2>&-", "<&- >&- 2>&-"] {
        let seen = |before: &[&str], file: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("exec \"$@\" {closed}"), "sh"]);
            command.args(before).args(["sh", "-c", look]).args([out.as_os_str(), file.as_ref()]);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{closed}: {}", text(&output));
            fs::read_to_string(&out).unwrap()
        };
        let expected = seen(&[], here.to_str().unwrap());
        for option in [&[][..], &["--report"]] {
            let before = [&[TOWLINE, "run", "--at", &at], option, &["--"]].concat();
            assert_eq!(seen(&before, &there), expected, "{closed} {option:?}");
        }
    }
}

/// For a process that ignores SIGCHLD, as some services do for what they start, the kernel keeps no ended
/// children. The program finds that signal as it was.
#[test]
fn a_run_with_a_report_ends_although_ends_of_children_are_ignored() {
    let world = World::new();
    let at = format!("{PREFIX}={}", world.url("dir"));
    let seen = |before: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["60", "env", "--ignore-signal=CHLD"]).args(before);
        command.args(["sh", "-c", "grep SigIgn /proc/self/status; exit 7"]).output().unwrap()
    };
    let expected = seen(&[]);
    assert_eq!(expected.status.code(), Some(7), "{}", text(&expected));
    for option in [&[][..], &["--report"]] {
        let output = seen(&[&[TOWLINE, "run", "--at", &at], option, &["--"]].concat());
        assert_eq!(output.status.code(), Some(7), "{option:?}: {}", text(&output));
        assert_eq!(output.stdout, expected.stdout, "{option:?}");
    }
}

/// What the run's own processes use does not keep a file system busy that the program has left, and is found
/// from everywhere.
#[test]
fn a_run_does_not_depend_on_the_directory_where_it_was_started() {
    let world = World::new();
    fs::write(world.local("served/file"), "12345").unwrap();
    for options in [&[][..], &["--report"]] {
        let mut run = Command::new(TOWLINE);
        run.args(["run", "--at", &format!("{PREFIX}=towline+unix:///dir?socket=socket")]);
        run.args(options).args(["--", "sh", "-c"]);
        run.arg(format!("cd /; cat {PREFIX}/file; echo; read go"));
        run.current_dir(&world.path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut run = run.stderr(Stdio::null()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(run.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "12345\n", "{options:?}");
        let keeper = Path::new("/proc").join(keeper(run.id()).unwrap());
        assert_eq!(fs::read_link(keeper.join("cwd")).unwrap(), Path::new("/"), "{options:?}");
        drop(run.stdin.take());
        run.wait().unwrap();
    }
}

#[test]
fn the_program_itself_is_reached_and_can_be_started_by_the_linker() {
    let world = World::new();
    fs::write(world.local("served/file"), "12345").unwrap();
    let at = format!("{PREFIX}={}", world.url("dir"));
    let sum = |command: &mut Command| {
        let output = command.arg("sum").arg(format!("{PREFIX}/file")).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        output.stdout
    };
    let start = || {
        let mut run = Command::new(TOWLINE);
        run.args(["run", "--at", &at, "--"]);
        run
    };
    let known = sum(start().arg(TOWLINE));
    assert!(String::from_utf8_lossy(&known).contains(PREFIX));
    let linker = "/lib64/ld-linux-x86-64.so.2";
    if cfg!(target_arch = "x86_64") && Path::new(linker).exists() {
        assert_eq!(sum(start().args([linker, TOWLINE])), known);
        assert!(
            Command::new(linker).args([TOWLINE, "--version"]).output().unwrap().status.success()
        );
    }
    let check = Command::new(TOWLINE).args(["check", TOWLINE]).output().unwrap();
    assert!(text(&check).contains(": works"), "{}", text(&check));
}

/// The keeper of the run is an orphan or, if the program adopts orphans, a child that the program does not
/// see. Nor does the program notice the process between the two, however late that ends. The program keeps
/// the process that was started.
#[test]
fn programs_have_no_children_but_their_own() {
    let world = World::new();
    let alone = compiled(Libc::Shared, &world, "alone.c");
    let alone = alone.to_str().unwrap();
    let at = format!("{}={}", world.local("at").display(), world.url("dir"));
    let other = format!("/else{}", &at[at.find('=').unwrap()..]);
    let plain = [TOWLINE, "run", "--at", &at, "--", alone];
    let longer = [TOWLINE, "run", "--at", &at, "--at", &other, "--", alone];
    let said = |line: &[&str]| {
        let mut command = Command::new(line[0]);
        let command = command.args(&line[1..]).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = command.spawn().unwrap();
        let pid = format!(" {}\n", child.id());
        let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        said.strip_suffix(&pid).unwrap_or(&format!("{said}, not by{pid}")).to_owned()
    };
    for line in [&plain[..], &longer] {
        for how in ["waits", "calls", "handles", "waits-to-handle", "adopts"] {
            let line = [line, &[how]].concat();
            assert_eq!(said(&[&[alone, "takes-orphans"], &line[..]].concat()), "1 1", "{line:?}");
            assert_eq!(said(&line), "0 1", "{line:?}");
            // On one processor, the process between ends later.
            for _ in 0..5 {
                let line = [&[alone, "one-processor"], &line[..]].concat();
                assert_eq!(said(&line), "0 1", "{line:?}");
            }
        }
        for how in ["one-processor", "takes-orphans"] {
            let line = [&[alone, "blocks", alone, how], line, &["has-blocked"]].concat();
            assert!(said(&line).ends_with(" 1"), "{line:?}");
        }
        let again = [&[alone, "one-processor"], line, &["again", alone, "waits"]].concat();
        assert_eq!(said(&again), "0 1", "{again:?}");
    }
}

/// All processes of a run may be killed together, as when a container ends.
#[test]
fn what_killed_runs_leave_is_removed_by_a_later_run() {
    let world = World::new();
    fs::write(world.local("served/f"), "here\n").unwrap();
    let home = home(&world);
    let runs = home.join(format!("towline-{}", rustix::process::geteuid().as_raw()));
    let command = |script: &str| {
        let mut command = Command::new(TOWLINE);
        command.args(["run", "--at", &format!("{PREFIX}={}", world.url("dir")), "--"]);
        command.args(["sh", "-c", script]).env("XDG_RUNTIME_DIR", &home);
        command
    };
    let start = || {
        let mut command = command(&format!("cat {PREFIX}/f; read line; cat {PREFIX}/f"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        assert_eq!(said.by_ref().lines().next().unwrap().unwrap(), "here");
        let keeper = keeper(child.id()).unwrap();
        let folder = runs.join(format!("run-{}-0", child.id()));
        assert!(folder.is_dir());
        (child, keeper, folder, said)
    };
    let [whole, keeperless, mut killed] = [(); 3].map(|()| start());
    killed.0.kill().unwrap();
    killed.0.wait().unwrap();
    for keeper in [&keeperless.1, &killed.1] {
        let keeper = rustix::process::Pid::from_raw(keeper.parse().unwrap()).unwrap();
        rustix::process::kill_process(keeper, rustix::process::Signal::KILL).unwrap();
    }
    let long_ago = SystemTime::now() - Duration::from_secs(3600);
    // Killed before there was more of it.
    let begun = runs.join("run-1-0");
    fs::create_dir(&begun).unwrap();
    for folder in [&whole.2, &keeperless.2, &killed.2, &begun] {
        fs::File::open(folder).unwrap().set_modified(long_ago).unwrap();
    }
    let young = runs.join("run-2-0");
    fs::create_dir(&young).unwrap();
    // What was killed ends some time.
    wait_until("what was left is removed", || {
        assert!(command("true").status().unwrap().success());
        !killed.2.exists() && !begun.exists()
    });
    assert!(whole.2.is_dir() && keeperless.2.is_dir() && young.is_dir());
    for (mut child, _, _, mut said) in [whole, keeperless] {
        drop(child.stdin.take());
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "here\n");
        assert!(child.wait().unwrap().success());
    }
}
