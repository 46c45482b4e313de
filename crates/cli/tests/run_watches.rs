//! `towline run`: programs that watch remote files see what others do to them. `run_conformance/main.rs` and
//! `run_guests.rs` compare the events of their own actions with a local directory.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use support::compare::{Libc, compiled, finished};
use support::{TOWLINE, World, good, have, keeper, names, under_run, wait_until};

/// How long anything may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program under `run` that prints each event as a line.
struct Watcher {
    child: Child,
    lines: Receiver<String>,
}

impl Watcher {
    /// Watches below an export with `programs/watcher.c`.
    fn start(world: &World, program: &Path, export: &str, arguments: &[&str]) -> Self {
        Self::start_through(world, &[("at", world.url(export))], program, arguments)
    }

    /// Like [`Self::start`], with these prefixes; `AT` in arguments stands for the first.
    fn start_through(
        world: &World,
        prefixes: &[(&str, String)],
        program: &Path,
        arguments: &[&str],
    ) -> Self {
        let mut command = Command::new(TOWLINE);
        command.arg("run");
        for (prefix, url) in prefixes {
            command.args(["--at", &format!("{}={url}", world.local(prefix).display())]);
        }
        let first = world.local(prefixes[0].0);
        let arguments = arguments.iter().map(|argument| match argument.strip_prefix("AT") {
            Some(rest) => format!("{}{rest}", first.display()),
            None => (*argument).to_owned(),
        });
        let watcher = Self::spawn(command.arg("--").arg(program).args(arguments));
        watcher.expect(&["ready"]);
        watcher
    }

    fn spawn(command: &mut Command) -> Self {
        Self::of(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap())
    }

    fn of(mut child: Child) -> Self {
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut lines = output.lines().map_while(Result::ok);
            lines.try_for_each(|line| sender.send(line))
        });
        Self { child, lines }
    }

    /// Returns the next line.
    fn next(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("nothing more is told")
    }

    /// Checks that these lines come next.
    fn expect(&self, expected: &[&str]) {
        for line in expected {
            assert_eq!(self.next(), *line, "of {expected:?}");
        }
    }

    /// Returns all lines up to `last`, except those that repeat the line before.
    fn until(&self, last: &str) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        loop {
            let line = self.next();
            if lines.last() != Some(&line) {
                lines.push(line);
            }
            if lines.last().is_some_and(|line| line == last) {
                return lines;
            }
        }
    }

    fn ends(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The events are those of a local directory.
#[test]
fn what_others_do_in_an_exported_directory_is_told() {
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    let folder = world.local("served/folder");
    fs::create_dir_all(folder.join("before")).unwrap();
    fs::write(folder.join("old"), "text").unwrap();
    let watcher = Watcher::start(&world, &program, "dir", &["AT/folder"]);
    // By programs on the server's machine.
    fs::create_dir(folder.join("made")).unwrap();
    fs::write(folder.join("old"), "other text").unwrap();
    fs::rename(folder.join("old"), folder.join("new")).unwrap();
    fs::set_permissions(folder.join("new"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::remove_dir(folder.join("before")).unwrap();
    let told = watcher.until("DELETE before");
    let expected = [
        "CREATE made",
        "MODIFY old",
        "MOVED_FROM old",
        "MOVED_TO new",
        "ATTRIB new",
        "DELETE before",
    ];
    assert_eq!(told, expected);
    // By other clients.
    let url = |path: &str| world.url(&format!("dir/folder/{path}"));
    fs::write(world.local("local"), "a text").unwrap();
    good(&["mkdir", &url("by-client")]);
    good(&["cp", world.local("local").to_str().unwrap(), &url("copied")]);
    // It has another name until it is complete.
    let told = watcher.until("MOVED_TO copied");
    assert_eq!(
        (&told[..1], told.last().unwrap().as_str()),
        (&["CREATE by-client".to_owned()][..], "MOVED_TO copied")
    );
    assert!(told.iter().any(|event| event.starts_with("MODIFY .copied.")), "{told:?}");
    good(&["rm", &url("copied")]);
    watcher.until("DELETE copied");
    // By another run.
    let script = "cd $AT/folder && mv new newer && rmdir made && touch end";
    assert!(under_run(&world, script).status.success());
    assert_eq!(
        watcher.until("CREATE end"),
        ["MOVED_FROM new", "MOVED_TO newer", "DELETE made", "CREATE end"]
    );
    watcher.ends();
}

#[test]
fn what_others_do_in_an_export_in_memory_is_told() {
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    let url = |path: &str| world.url(&format!("mem/{path}"));
    fs::write(world.local("local"), "a text").unwrap();
    good(&["mkdir", &url("folder")]);
    let watcher = Watcher::start(&world, &program, "mem", &["-s", "AT/folder"]);
    good(&["mkdir", &url("folder/made")]);
    good(&["cp", world.local("local").to_str().unwrap(), &url("folder/copied")]);
    let told = watcher.until("MOVED_TO copied 6");
    assert_eq!(told[0], "CREATE made");
    assert!(told.iter().any(|event| event.starts_with("MODIFY .copied.")), "{told:?}");
    good(&["rm", &url("folder/copied")]);
    watcher.until("DELETE copied");
    good(&["mkdir", &url("folder/end")]);
    watcher.until("CREATE end");
    watcher.ends();
}

/// `run_conformance/main.rs` checks the same for an exported directory.
#[test]
fn a_program_in_an_export_in_memory_is_told_what_it_is_told_locally() {
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "watches.c");
    let (local, at) = (world.local("local"), world.local("at"));
    fs::create_dir(&local).unwrap();
    let mut command = Command::new(&program);
    let (expected, code) = finished(command.current_dir(&local), &world.local("expected"));
    assert_eq!(code, Some(0), "{expected}");
    let mut command = Command::new(TOWLINE);
    command.args(["run", "--at", &format!("{}={}", at.display(), world.url("mem")), "--"]);
    command.args(["sh", "-c", &format!("cd {} && exec {}", at.display(), program.display())]);
    let (told, code) = finished(&mut command, &world.local("told"));
    assert_eq!((told.as_str(), code), (expected.as_str(), Some(0)));
}

/// A program that sees the event of a change also sees the change: what the run has cached of the file is
/// dropped.
#[test]
fn who_is_told_of_a_change_sees_it() {
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    let folder = world.local("served/folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("f"), "").unwrap();
    let watcher = Watcher::start(&world, &program, "dir", &["-s", "AT/folder"]);
    let mut file = fs::OpenOptions::new().append(true).open(folder.join("f")).unwrap();
    for length in 1..200 {
        file.write_all(b"x").unwrap();
        watcher.expect(&[&format!("MODIFY f {length}")]);
    }
    for length in [3, 9, 1] {
        fs::write(world.local("served/new"), &b"123456789"[..length]).unwrap();
        fs::rename(world.local("served/new"), folder.join("f")).unwrap();
        watcher.expect(&[&format!("MOVED_TO f {length}")]);
    }
}

/// Events from while the server was away are found out, and later ones are reported.
#[test]
fn a_server_that_is_killed_is_watched_on_by_its_successor() {
    let mut world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    let folder = world.local("served/folder");
    fs::create_dir_all(folder.join("sub")).unwrap();
    for name in ["kept", "written", "removed", "moved"] {
        fs::write(folder.join(name), "text").unwrap();
    }
    fs::write(world.local("served/file"), "text").unwrap();
    fs::create_dir(world.local("served/gone")).unwrap();
    let watched = ["AT/folder", "AT/folder/sub", "AT/file", "AT/gone"];
    let watcher = Watcher::start(&world, &program, "dir", &watched);
    fs::create_dir(folder.join("before")).unwrap();
    watcher.expect(&["CREATE before"]);
    world.stop();
    fs::write(folder.join("written"), "other text").unwrap();
    fs::remove_file(folder.join("removed")).unwrap();
    fs::rename(folder.join("moved"), folder.join("sub/moved")).unwrap();
    fs::create_dir(folder.join("made")).unwrap();
    fs::remove_dir(world.local("served/gone")).unwrap();
    world.restart();
    let mut told = Vec::new();
    let all = [
        "MODIFY written",
        "DELETE removed",
        "DELETE moved",
        "CREATE moved",
        "CREATE made",
        "DELETE_SELF ",
        "IGNORED ",
    ];
    while let Some(missing) = all.iter().find(|line| told.iter().all(|told| told != **line)) {
        match watcher.lines.recv_timeout(PATIENCE) {
            Ok(line) => told.push(line),
            Err(_) => panic!("{missing} is not told, but {told:?}"),
        }
    }
    for line in told {
        let is_true = all.contains(&&*line) || ["MODIFY kept", "MODIFY "].contains(&&*line);
        assert!(is_true, "nothing like that happened: {line}");
    }
    fs::create_dir(folder.join("sub/after")).unwrap();
    watcher.until("CREATE after");
    fs::set_permissions(world.local("served/file"), fs::Permissions::from_mode(0o600)).unwrap();
    watcher.expect(&["ATTRIB "]);
    fs::create_dir(folder.join("end")).unwrap();
    watcher.expect(&["CREATE end"]);
    watcher.ends();
}

/// They are found by the name that they have when the server ends.
#[test]
fn watched_files_that_were_renamed_are_watched_after_a_restart() {
    let mut world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    let served = world.local("served");
    fs::create_dir(served.join("folder")).unwrap();
    fs::write(served.join("file"), "text").unwrap();
    let watcher = Watcher::start(&world, &program, "dir", &["AT/folder", "AT/file"]);
    fs::rename(served.join("file"), served.join("folder/renamed")).unwrap();
    watcher.expect(&["MOVED_TO renamed", "MOVE_SELF "]);
    // Once this is told, the new name is known.
    fs::create_dir(served.join("folder/later")).unwrap();
    watcher.expect(&["CREATE later"]);
    world.restart();
    // The file as such, and as an entry, in any order.
    let mut told = vec![watcher.next(), watcher.next()];
    told.sort();
    assert_eq!(told, ["MODIFY ", "MODIFY renamed"]);
    fs::create_dir(served.join("folder/end")).unwrap();
    watcher.expect(&["CREATE end"]);
    watcher.ends();
}

/// Many programs want to know only which files are complete.
#[test]
fn files_closed_while_the_server_was_away_are_told_as_well() {
    let mut world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    let folder = world.local("served/folder");
    fs::create_dir_all(folder.join("sub")).unwrap();
    for file in ["folder/old", "file"] {
        fs::write(world.local("served").join(file), "text").unwrap();
    }
    let watcher = Watcher::start(&world, &program, "dir", &["-c", "AT/folder", "AT/file"]);
    world.stop();
    for file in ["folder/old", "folder/new", "file"] {
        fs::write(world.local("served").join(file), "other text").unwrap();
    }
    world.restart();
    let mut told: Vec<String> = (0..3).map(|_| watcher.next()).collect();
    told.sort();
    assert_eq!(told, ["CLOSE_WRITE ", "CLOSE_WRITE new", "CLOSE_WRITE old"]);
    fs::write(folder.join("end"), "").unwrap();
    watcher.expect(&["CLOSE_WRITE end"]);
    watcher.ends();
}

/// What a program has found in a watched directory itself, and what it is told, go together, even if the
/// background process learns nothing of what happens in between.
#[test]
fn names_that_come_and_go_while_nobody_watches_are_told_to_who_has_found_them() {
    let mut world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    let folder = world.local("served/folder");
    fs::create_dir(&folder).unwrap();
    ["kept", "anew"].iter().for_each(|name| fs::write(folder.join(name), "").unwrap());
    let at = world.local("at");
    let script = "$1 $2/folder & read go; cd $2; for name in folder/*; do echo $name; done; wait";
    let mut child = Command::new(TOWLINE)
        .args(["run", "--at", &format!("{}={}", at.display(), world.url("dir"))])
        .args(["--", "sh", "-c", script, "sh"])
        .args([&program, &at])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let watcher = Watcher::of(child);
    watcher.expect(&["ready"]);
    let keeper = keeper(watcher.child.id()).unwrap();
    let signal = |name: &str| {
        let sent = Command::new("kill").args([name, &keeper]).status();
        assert!(sent.unwrap().success());
    };
    signal("-STOP");
    world.stop();
    fs::write(folder.join("short-lived"), "").unwrap();
    fs::remove_file(folder.join("anew")).unwrap();
    world.restart();
    input.write_all(b"\n").unwrap();
    watcher.expect(&["folder/kept", "folder/short-lived"]);
    fs::remove_file(folder.join("short-lived")).unwrap();
    fs::write(folder.join("anew"), "").unwrap();
    signal("-CONT");
    let mut told = Vec::new();
    let all = ["DELETE short-lived", "CREATE anew"];
    while all.iter().any(|line| told.iter().all(|told| told != line)) {
        told.push(watcher.next());
    }
    fs::create_dir(folder.join("end")).unwrap();
    told.extend(watcher.until("CREATE end"));
    assert!(told.contains(&"DELETE anew".to_owned()), "{told:?}");
    watcher.ends();
}

/// A program that watches a directory, lists it and then applies all events knows its names, although they
/// change all the time and the server is killed again and again.
#[test]
fn who_believes_what_is_told_knows_all_names() {
    let mut world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    let folder = world.local("served/folder");
    fs::create_dir(&folder).unwrap();
    for round in 0..4 {
        let is_over = AtomicBool::new(false);
        let watcher = std::thread::scope(|scope| {
            scope.spawn(|| change_names(&folder, round, &is_over));
            let watcher = Watcher::start(&world, &program, "dir", &["-l", "AT/folder"]);
            for _ in 0..round {
                world.restart();
                std::thread::sleep(Duration::from_millis(200));
            }
            is_over.store(true, Ordering::Relaxed);
            watcher
        });
        // After a restart, names are told in any order. What is made once one of them was told comes last.
        fs::create_dir(folder.join("over")).unwrap();
        let mut told = watcher.until("CREATE over");
        fs::create_dir(folder.join("end")).unwrap();
        told.extend(watcher.until("CREATE end"));
        let mut known = BTreeSet::new();
        for line in told {
            let (what, name) = line.split_once(' ').unwrap();
            match what {
                "HAS" | "CREATE" | "MOVED_TO" => drop(known.insert(name.to_owned())),
                "DELETE" | "MOVED_FROM" => drop(known.remove(name)),
                _ => assert!(["MODIFY", "ATTRIB"].contains(&what), "{line}"),
            }
        }
        let names = names(&folder);
        assert_eq!(known.into_iter().collect::<Vec<_>>(), names, "in round {round}");
        watcher.ends();
        ["over", "end"].iter().for_each(|name| fs::remove_dir(folder.join(name)).unwrap());
    }
}

/// Creates, renames and removes names in a directory until told to stop.
fn change_names(folder: &Path, seed: u64, is_over: &AtomicBool) {
    let mut state = seed;
    let mut draw = move |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    while !is_over.load(Ordering::Relaxed) {
        let mut name = || folder.join(format!("n{}", draw(60)));
        let (one, other) = (name(), name());
        // Calls that fail cause no events.
        let _ = match draw(6) {
            0 => fs::File::create_new(one).map(drop),
            1 => fs::create_dir(one),
            2 => fs::remove_file(one),
            3 => fs::remove_dir(one),
            4 => fs::rename(one, other),
            _ => fs::rename(one, folder.with_file_name("aside")),
        };
        if draw(20) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// With two prefixes of one server, and two routes to it, all events are reported, and moves between the
/// prefixes are moves.
#[test]
fn servers_with_several_prefixes_are_watched() {
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    for name in ["a", "b"] {
        fs::create_dir(world.local("served").join(name)).unwrap();
    }
    for other in ["tcp", "unix"] {
        let prefixes =
            [("at", world.through("tcp", "dir/a")), ("at2", world.through(other, "dir/b"))];
        let second = world.local("at2");
        let watched = ["AT", second.to_str().unwrap()];
        let watcher = Watcher::start_through(&world, &prefixes, &program, &watched);
        for number in 0..20 {
            fs::write(world.local("served/a/x"), "").unwrap();
            watcher.expect(&["CREATE x"]);
            fs::rename(world.local("served/a/x"), world.local("served/b/y")).unwrap();
            watcher.expect(&["MOVED_FROM x", "MOVED_TO y"]);
            fs::remove_file(world.local("served/b/y")).unwrap();
            watcher.expect(&["DELETE y"]);
            if number % 5 == 0 {
                // As a program does that has nothing else to do.
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// The run ends although files are watched, and leaves nothing behind.
#[test]
fn a_run_with_watches_ends_as_any() {
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    fs::create_dir(world.local("served/folder")).unwrap();
    let runtime = world.local("runtime");
    fs::create_dir(&runtime).unwrap();
    let at = format!("{}={}", world.local("at").display(), world.url("dir"));
    let script = format!("{} $AT/folder & sleep 0.5; kill $!; wait", program.display());
    let run = Command::new(TOWLINE)
        .args(["run", "--at", &at, "--", "sh", "-c", &script])
        .env("AT", world.local("at"))
        .env("XDG_RUNTIME_DIR", &runtime)
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&run.stdout), "ready\n");
    wait_until("its directory is gone", || {
        fs::read_dir(&runtime)
            .unwrap()
            .flatten()
            .all(|user| names(&user.path()).iter().all(|name| !name.starts_with("run-")))
    });
}

/// Programs then check from time to time instead.
#[test]
fn where_nobody_repeats_what_happens_there_is_no_room_for_watches() {
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    fs::create_dir(world.local("served/folder")).unwrap();
    let at = world.local("at");
    let mut run = Command::new(TOWLINE);
    run.args(["run", "--at", &format!("{}={}", at.display(), world.url("dir")), "--", "sh", "-c"]);
    let shown = at.join("folder").display().to_string();
    let script = format!("cd {shown} && echo begun && read go; {} {shown}", program.display());
    // The files of a killed keeper are removed with the rest.
    fs::create_dir(world.local("runtime")).unwrap();
    run.env("XDG_RUNTIME_DIR", world.local("runtime"));
    let mut child = run.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "begun\n");
    let keeper = keeper(child.id()).unwrap();
    assert!(Command::new("kill").args(["-9", &keeper]).status().unwrap().success());
    wait_until("the keeper has ended", || !Path::new("/proc").join(&keeper).join("exe").exists());
    drop(child.stdin.take());
    let said = std::io::read_to_string(output).unwrap();
    assert_eq!(said, format!("{shown}: ENOSPC\nready\n"));
    child.wait().unwrap();
}

#[test]
fn other_users_watch_what_they_may_read() {
    if !rustix::process::geteuid().is_root() || !have("setpriv") {
        println!("SKIPPED: only root can become another user");
        return;
    }
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "watcher.c");
    let served = world.local("served");
    for (name, mode) in [("closed", 0o700), ("passed", 0o711), ("open", 0o755), ("shared", 0o755)] {
        fs::create_dir(served.join(name)).unwrap();
        fs::set_permissions(served.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let at = world.local("at");
    let shown = |name: &str| format!("{}/{name}", at.display());
    // The second watcher watches a file that root, who started the run, watches already.
    let user = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    let script = format!(
        "{0} {1} & {user} {0} {2} {3} {1} {4}; wait",
        program.display(),
        shown("shared"),
        shown("closed/in"),
        shown("passed"),
        shown("open"),
    );
    let mut command = Command::new(TOWLINE);
    command
        .args(["run", "--serve"])
        .arg(&served)
        .arg("--at")
        .arg(&at)
        .args(["--", "sh", "-c", &script]);
    let watcher = Watcher::spawn(&mut command);
    let mut said: Vec<String> = (0..4).map(|_| watcher.next()).collect();
    said.sort();
    let refused = ["closed/in", "passed"].map(|name| format!("{}: EACCES", shown(name)));
    assert_eq!(said, [&refused[0], &refused[1], "ready", "ready"]);
    fs::create_dir(served.join("open/made")).unwrap();
    watcher.expect(&["CREATE made"]);
    fs::create_dir(served.join("shared/end")).unwrap();
    watcher.expect(&["CREATE end", "CREATE end"]);
    watcher.ends();
}

/// A typical use: a whole tree, parts of which appear later.
#[test]
fn inotifywait_watches_remote_trees() {
    if !have("inotifywait") {
        return;
    }
    let world = World::new();
    fs::create_dir_all(world.local("served/tree/sub/deep")).unwrap();
    let at = world.local("at");
    let mut command = Command::new(TOWLINE);
    command.args([
        "run",
        "--at",
        &format!("{}={}", at.display(), world.url("dir")),
        "--",
        "sh",
        "-c",
    ]);
    let wait = "exec inotifywait -m -r --format '%w%f %e' -e create,modify,move,delete,attrib AT/tree 2>&1";
    command.arg(wait.replace("AT", at.to_str().unwrap()));
    let watcher = Watcher::spawn(&mut command);
    while watcher.next() != "Watches established." {}
    let tree = world.local("served/tree");
    let expect = |line: &str| watcher.expect(&[&format!("{}/tree/{line}", at.display())]);
    fs::write(tree.join("sub/deep/f"), "text").unwrap();
    expect("sub/deep/f CREATE");
    expect("sub/deep/f MODIFY");
    fs::create_dir(tree.join("sub/new")).unwrap();
    expect("sub/new CREATE,ISDIR");
    fs::rename(tree.join("sub/deep/f"), tree.join("f")).unwrap();
    expect("sub/deep/f MOVED_FROM");
    expect("f MOVED_TO");
    fs::remove_file(tree.join("f")).unwrap();
    expect("f DELETE");
}
