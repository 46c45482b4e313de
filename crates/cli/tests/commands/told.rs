//! What commands tell: helps, errors, and what cannot be printed.

use super::support::{TOWLINE, World, bad, good, run, text};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

#[test]
fn what_cannot_be_printed_is_told() {
    let world = World::new();
    fs::write(world.local("served/one"), b"one").unwrap();
    let one = world.url("dir/one");
    for arguments in [
        &["cat", &one][..],
        &["bench", "file", "--server", &world.url("dir"), "--op", "scan_stat", "--secs", "0.01"],
        &["bench", "limits", "--secs", "0.001"],
        &["ls", "--help"],
        &["--version"],
    ] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = Command::new(TOWLINE).args(arguments).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains("standard output: no space left on device"), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
        for closed in [">&-", "1</dev/null"] {
            let script = format!("exec \"$0\" \"$@\" {closed}");
            let output = Command::new("sh").args(["-c", &script, TOWLINE]).args(arguments).output();
            let output = output.unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{arguments:?} {closed}: {said}");
            assert!(said.contains("standard output: bad file descriptor"), "{closed}: {said}");
        }
    }
    // A wrong command line is told elsewhere, if it can be.
    for closed in [">&-", "2>/dev/full"] {
        for arguments in ["--no-such", "ls", "run --at"] {
            let script = format!("exec \"$0\" {arguments} {closed}");
            let output = Command::new("sh").args(["-c", &script, TOWLINE]).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{script}: {said}");
            assert!(!said.contains("standard output"), "{script}: {said}");
        }
    }
    // These commands have nothing to print.
    for command in ["mkdir", "ls"] {
        let script = "exec \"$0\" \"$@\" >&-";
        let done = Command::new("sh")
            .args(["-c", script, TOWLINE, command, &world.url("dir/made")])
            .status();
        assert!(done.unwrap().success(), "{command}");
    }
}

#[test]
fn messages_take_one_line_whatever_the_names() {
    let world = World::new();
    let name = "no\nsuch\x1b[2J \\file";
    for arguments in [
        &["cp", name, &world.url("dir")][..],
        &["sum", name],
        &["check", name],
        &["demo", name],
        &["disk", "info", name],
        &["serve", "--config", name],
        &["bench", "file", "--server", &format!("/{name}"), "--op", "stat_same"],
    ] {
        let said = bad(1, arguments);
        assert!(said.contains("no\\nsuch\\u{1b}[2J \\file"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn what_is_not_there_is_told_with_what_to_do() {
    let world = World::new();
    let complaint = bad(1, &["ls", &world.url("nothing")]);
    assert!(complaint.contains("no export \"nothing\"; `towline ls`"), "{complaint}");
    let complaint = bad(1, &["disk", "info", &world.url("nothing")]);
    assert!(complaint.contains(&world.url("nothing")), "{complaint}");
    assert!(complaint.contains("no such disk; `towline disk info` lists"), "{complaint}");
    let complaint = bad(1, &["disk", "bench", &world.url("nothing")]);
    assert_eq!(complaint.matches(&world.url("nothing")).count(), 1, "{complaint}");
    assert!(complaint.contains("no such disk; `towline disk info` lists"), "{complaint}");
    for url in ["nbd+unix:///d?socket=/no/socket", "towline+unix:///d?socket=/no/socket"] {
        let complaint = bad(1, &["disk", "info", url]);
        assert!(complaint.contains("cannot connect"), "{complaint}");
        assert!(complaint.contains("there is no such socket"), "{complaint}");
    }
    // A missing server does not mean that the file is missing.
    for socket in ["/no/socket", "/etc/passwd/socket"] {
        let complaint = bad(1, &["rm", "-rf", &format!("towline+unix:///d/x?socket={socket}")]);
        assert!(complaint.contains("cannot connect"), "{complaint}");
    }
    let complaint = bad(1, &["disk", "info", "ftp://host/disk"]);
    assert!(complaint.contains("towline://HOST/DISK"), "{complaint}");
    // Another kind of server listens there.
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let hangs_up = std::thread::spawn(move || drop(other.accept()));
    let complaint = bad(1, &["ls", &format!("towline://127.0.0.1:{port}/x")]);
    hangs_up.join().unwrap();
    assert!(complaint.contains("cannot connect"), "{complaint}");
}

#[test]
fn every_command_has_help_with_examples_and_refuses_nonsense() {
    for command in [
        "serve", "ls", "stat", "cat", "cp", "rm", "mkdir", "mv", "ln", "df", "sum", "stats",
        "doctor", "demo", "attach", "detach", "disk", "run", "check", "bench",
    ] {
        let help = text(&[command, "--help"]);
        assert!(help.contains("Examples:") && help.contains("xit status"), "{command}: {help}");
        bad(2, &[command, "--no-such-option"]);
    }
    for (command, all) in [
        ("disk", &["bench", "copy", "info", "map", "resize"][..]),
        ("bench", &["file", "disk", "net", "limits"]),
    ] {
        let above = text(&[command, "--help"]);
        let (_, listed) = above.split_once("Commands:\n").unwrap();
        let listed = listed.lines().take_while(|line| !line.is_empty());
        let listed = listed.map(|line| line.split_whitespace().next().unwrap());
        assert!(listed.filter(|name| *name != "help").eq(all.iter().copied()), "{above}");
        for below in all {
            let help = text(&[command, below, "--help"]);
            let example = format!("Examples:\n  towline {command} {below}");
            assert!(help.contains(&example) && help.contains("xit status"), "{below}: {help}");
            bad(2, &[command, below, "--no-such-option"]);
        }
    }
    for command in ["ls", "stat", "cat", "cp", "rm", "mkdir", "mv", "ln", "df", "sum", "stats"] {
        bad(2, &[command]);
    }
    assert!(bad(1, &["attach", "/etc/passwd"]).contains("expected towline://"));
    assert_eq!(run(&["df", "/etc/passwd"]).stdout, b"", "a heading of nothing");
    for wrong in ["x", "towline://", "towline+unix:///x", "/etc/passwd"] {
        assert!(bad(1, &["stat", wrong]).contains("expected towline://"), "{wrong}");
        // Whatever the kernel has.
        let attach = bad(1, &["attach", wrong]);
        assert!(attach.contains(wrong) && !attach.contains("/dev/ublk"), "{attach}");
    }
    // Not the server.
    let doubled = "towline://localhost:1//dir/x";
    for command in [&["ls"][..], &["df"], &["stats"], &["disk", "info"], &["attach"]] {
        let complaint = bad(1, &[command, &[doubled]].concat());
        assert!(complaint.contains("no name of an export"), "{command:?}: {complaint}");
    }
    let attach = bad(1, &["attach", "nbd://host:x/vm1"]);
    assert_eq!(attach.matches("nbd://host:x/vm1").count(), 1, "{attach}");
}

/// Processes that other commands start for themselves.
#[test]
fn commands_that_are_not_for_users_refuse_them() {
    let here = std::env::temp_dir().display().to_string();
    let open = std::io::pipe().unwrap();
    for command in ["hold", "keep"] {
        for arguments in [
            &[][..],
            &["--help"],
            &["-h"],
            &["--no-such-option"],
            &[""],
            &[&here],
            &["/nonexistent"],
            &[&here, "1"],
            &[&here, "1", "0"],
            &[&here, "-1", "x", "y"],
        ] {
            for stdin in [Stdio::null(), open.0.try_clone().unwrap().into()] {
                let mut run = Command::new("timeout");
                run.args(["60", TOWLINE, command]).args(arguments).stdin(stdin);
                let output = run.output().unwrap();
                let told = String::from_utf8(output.stderr).unwrap();
                let status = output.status.code();
                assert!(matches!(status, Some(1 | 2 | 125)), "{command} {arguments:?}: {status:?}");
                assert!(told.starts_with(&format!("towline: {command}: cannot ")), "{told}");
            }
        }
    }
    // A socket that listens, but no path that leads to it.
    let world = World::new();
    let listener = UnixListener::bind(world.local("holder")).unwrap();
    let mut run = Command::new("timeout");
    run.args(["60", TOWLINE, "hold", "/nonexistent"]).stdin(OwnedFd::from(listener));
    let output = run.output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("no such file or directory"), "{told}");
}

/// What failed, and on which of the two names.
#[test]
fn why_a_name_is_not_made_is_told() {
    let world = World::new();
    for export in ["dir", "mem"] {
        let url = |path: &str| world.url(&format!("{export}/{path}"));
        good(&["mkdir", "-p", &url("d/sub")]);
        good(&["cp", "/proc/version", &url("file")]);
        for (arguments, told) in [
            (["mv", "file", "none/x"], "/file: no such file or directory; moving it to "),
            (["mv", "none", "x"], "/none: no such file or directory\n"),
            (
                ["mv", "d", "d/sub/x"],
                "/d: invalid argument; a directory cannot be moved into itself",
            ),
            (["mv", "d", "d"], "/d: invalid argument; a directory cannot be moved into itself"),
            (["ln", "none", "x"], "/none: no such file or directory\n"),
            (["ln", "file", "none/x"], "/none/x: no such file or directory\n"),
            (["ln", "d", "x"], "/d: operation not permitted; a directory has no hard links"),
        ] {
            let [command, source, target] = arguments;
            let complaint = bad(1, &[command, &url(source), &url(target)]);
            let told = format!("towline: {command}: {}", url(told.trim_start_matches('/')));
            assert!(complaint.starts_with(&told), "{arguments:?}: {complaint}");
        }
        let complaint = bad(1, &["mkdir", &url("none/x")]);
        assert!(complaint.contains("no such file or directory; use -p"), "{complaint}");
    }
    // As with rm(1), also where a read-only file system would say only that.
    let none = world.url("ro/none");
    good(&["rm", "-f", &none]);
    assert!(bad(1, &["rm", &none]).contains("no such file"));
    assert!(bad(1, &["rm", "-f", &world.url("ro/file")]).contains("read-only"));
    assert!(bad(1, &["rm", &world.url("ro/d")]).contains("is a directory; use -r"));
    assert!(bad(1, &["rm", "-rf", &world.url("ro/d")]).contains("read-only"));
}
