//! `towline run`: programs with their own libc, or none, are hosted. They print and leave the same on a local
//! and on a remote directory, as others do (`run_conformance/main.rs`).

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::process::Command;
use support::compare::{Libc, compiled, finished, same};
use support::{TOWLINE, World};

/// Returns whether programs can be hosted. If not, prints that the test is skipped.
fn can_host() -> bool {
    let can = towline_instance::can_host();
    if !can {
        println!("SKIPPED: hosting needs x86-64, FSGSBASE and Linux 5.11");
    }
    can
}

fn same_as_guest(libc: Libc, source: &str) {
    if can_host() && libc.is_here() {
        same(libc, source, &[]);
    }
}

#[test]
fn threads_signals_memory_and_programs_of_static_ones_behave() {
    same_as_guest(Libc::Static, "guests.c");
}

#[test]
fn threads_signals_memory_and_programs_for_musl_behave() {
    same_as_guest(Libc::Musl, "guests.c");
    same_as_guest(Libc::StaticMusl, "guests.c");
}

#[test]
fn descriptors_behave() {
    same_as_guest(Libc::Static, "descriptors.c");
}

#[test]
fn streams_behave() {
    same_as_guest(Libc::Static, "streams.c");
}

#[test]
fn processes_and_locks_behave() {
    same_as_guest(Libc::Static, "processes.c");
}

#[test]
fn handlers_of_signals_behave() {
    same_as_guest(Libc::Static, "signals.c");
}

#[test]
fn cancelled_threads_end_where_they_should() {
    same_as_guest(Libc::Static, "cancelled.c");
}

#[test]
fn handlers_of_sigsys_behave() {
    for libc in [Libc::Static, Libc::Musl, Libc::StaticMusl] {
        same_as_guest(libc, "sigsys.c");
    }
}

#[test]
fn names_of_programs_behave() {
    for libc in [Libc::Static, Libc::Musl, Libc::StaticMusl] {
        same_as_guest(libc, "named.c");
    }
}

#[test]
fn mappings_and_moved_directories_behave() {
    same_as_guest(Libc::Static, "moved.c");
    if support::maps_on_demand() {
        same_as_guest(Libc::Static, "mapped.c");
    }
}

#[test]
fn watched_files_behave() {
    same_as_guest(Libc::Static, "watches.c");
}

#[test]
fn walks_behave() {
    same_as_guest(Libc::Static, "walks.c");
}

#[test]
fn the_stack_of_a_guest_is_as_long_as_its_limit() {
    if !can_host() || !Libc::Static.is_here() {
        return;
    }
    let world = World::new();
    let program = compiled(Libc::Static, &world, "guests.c");
    let prefix = world.local("at");
    let mut run = Command::new(TOWLINE);
    run.args(["run", "--at", &format!("{}={}", prefix.display(), world.url("dir")), "--"]);
    run.args(["sh", "-c", "ulimit -s 65536 && exec \"$0\" deep 60 \"$1\""]);
    run.args([&program, &prefix]);
    let (said, code) = finished(&mut run, &world.local("said"));
    assert_eq!((said.as_str(), code), ("deep\n", Some(0)));
}

/// A guest may be started by `towline run`, by a shell, from a remote directory or for a script.
#[test]
fn guests_are_hosted_however_they_are_started() {
    if !can_host() || !Libc::Static.is_here() {
        return;
    }
    let world = World::new();
    let program = compiled(Libc::Static, &world, "guests.c");
    fs::write(world.local("served/file"), "12345").unwrap();
    fs::copy(&program, world.local("served/guests")).unwrap();
    let script = format!("#!{} again\n", program.display());
    for place in ["script", "served/script"] {
        use std::os::unix::fs::PermissionsExt;
        fs::write(world.local(place), &script).unwrap();
        fs::set_permissions(world.local(place), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let prefix = world.local("at");
    let file = prefix.join("file");
    let at = format!("{}={}", prefix.display(), world.url("dir"));
    let run = |report: &[&str], command: &[&str]| {
        let mut run = Command::new(TOWLINE);
        run.arg("run").args(report).args(["--at", &at, "--"]).args(command);
        run.env("FILE", &file).env("AT", &prefix).env("HERE", &world.path);
        finished(&mut run, &world.local("said"))
    };
    let (path, name) = (program.to_str().unwrap(), file.to_str().unwrap());
    let by_python = "import os, sys; sys.exit(os.waitstatus_to_exitcode(os.waitpid(\
                     os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)[1]))";
    let by_descriptor =
        "import os, sys; os.execve(os.open(sys.argv[1], os.O_RDONLY), sys.argv[1:], os.environ)";
    for command in [
        vec![path, "again", name],
        vec!["sh", "-c", "$HERE/guests again $FILE"],
        vec!["sh", "-c", "PATH=$HERE:$PATH; guests again $FILE"],
        vec!["sh", "-c", "cd $AT && ./guests again file"],
        vec!["env", "-i", path, "again", name],
        vec!["python3", "-c", by_python, path, "again", name],
        vec!["python3", "-c", by_descriptor, path, "again", name],
    ] {
        let (said, code) = run(&[], &command);
        assert_eq!((said.as_str(), code), ("again with 3: 12345\n", Some(7)), "{command:?}");
    }
    // The interpreter of a script: its arguments are the option, the script and the script's arguments.
    let local = world.local("script");
    for command in [vec![local.to_str().unwrap(), name], vec!["sh", "-c", "$AT/script $FILE"]] {
        let (said, code) = run(&[], &command);
        assert_eq!((said.as_str(), code), ("again with 4: 12345\n", Some(7)), "{command:?}");
    }
    // Programs that do not exist or cannot be executed.
    let (said, code) = run(&[], &["sh", "-c", "$HERE/none $FILE"]);
    assert_eq!(code, Some(127), "{said}");
    fs::write(world.local("cut"), &fs::read(&program).unwrap()[..200]).unwrap();
    let (said, code) = run(&[], &["sh", "-c", "chmod +x $HERE/cut; $HERE/cut $FILE"]);
    assert_eq!(code, Some(126), "{said}");
}

#[test]
fn a_report_names_guests_and_what_they_did() {
    if !can_host() || !Libc::Static.is_here() {
        return;
    }
    let world = World::new();
    let program = compiled(Libc::Static, &world, "guests.c");
    let prefix = world.local("at");
    std::fs::create_dir(world.local("served/folder")).unwrap();
    let at = format!("{}={}", prefix.display(), world.url("dir/folder"));
    let output = Command::new(TOWLINE)
        .args(["run", "--report=json", "--at", &at, "--", "sh", "-c", "cd \"$0\" && exec \"$1\""])
        .args([&prefix, &program])
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&output.stderr);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["slipped"].as_array().map(Vec::len), Some(0), "{report}");
    let of_it = |one: &&serde_json::Value| one["program"] == program.to_str().unwrap();
    let programs = report["programs"].as_array().unwrap();
    assert!(programs.iter().find(of_it).unwrap()["trapped"].as_u64() >= Some(1), "{report}");
    let answered = &report["system_calls"]["answered"];
    assert!(answered["write"].as_u64() >= Some(800), "{report}");
}
