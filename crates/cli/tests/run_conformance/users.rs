//! Programs that become other users, and files that are made for them.

use super::support::compare::{Libc, compiled};
use super::support::{TOWLINE, World, have, wait_until};
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Returns whether this process may act for other users. If not, prints that the test is skipped.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("SKIPPED: only root acts for other users");
    }
    is_root
}

/// Starts a server of a folder that acts as the users whom clients name, on a socket that all of them may use.
fn serve(folder: &Path, socket: &Path) -> Child {
    let _ = fs::remove_file(socket);
    let command = "umask 0; exec \"$0\" serve --identity --no-root-squash \"$@\"";
    let server = Command::new("sh")
        .args(["-c", command, TOWLINE, "--dir"])
        .arg(format!("d={}", folder.display()))
        .args(["--listen", &format!("unix://{}", socket.display())])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the server listens", || socket.exists());
    server
}

#[test]
fn files_are_made_as_the_user_for_files() {
    if !is_root() {
        return;
    }
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "texts.c");
    let folder = world.local("folder");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let socket = world.local("own");
    let mut server = serve(&folder, &socket);
    let prefix = world.local("at");
    let output = Command::new(TOWLINE)
        .args(["run", "--at"])
        .arg(format!("{}=towline+unix:///d?socket={}", prefix.display(), socket.display()))
        .arg("--")
        .args([program.as_os_str(), "owner".as_ref(), prefix.join("file").as_os_str()])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said, "1 2, 1 2\n", "{}", String::from_utf8_lossy(&output.stderr));
}

/// Also if the connection was made anew by one of them: to move to shared memory, or since the server had restarted.
#[test]
fn files_are_made_as_each_of_several_users_of_one_process() {
    if !is_root() || !have("python3") {
        return;
    }
    let script = "if 1:
        import os
        def make(user, count):
            os.seteuid(0), os.setegid(user), os.seteuid(user)
            for number in range(count):
                name = '%s/%d-%d' % (os.environ['AT'], user, number)
                os.close(os.open(name, os.O_CREAT | os.O_EXCL))
                print(user, os.stat(name).st_uid, flush=True)
        make(0, 1)
        make(1, 1)
        input()
        for user in (1, 2, 0, 3):
            make(user + 4, 40)
    ";
    for (scheme, restarts) in [("shm", false), ("unix", true), ("shm", true)] {
        let world = World::new();
        let folder = world.local("folder");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let socket = world.local("own");
        let mut server = serve(&folder, &socket);
        let at = world.local("at");
        let url = format!("towline+{scheme}:///d?socket={}", socket.display());
        let mut program = Command::new(TOWLINE)
            .args([
                "run",
                "--at",
                &format!("{}={url}", at.display()),
                "--",
                "python3",
                "-c",
                script,
            ])
            .env("AT", &at)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        wait_until("two have made files", || folder.join("1-0").exists());
        if restarts {
            server.kill().unwrap();
            server.wait().unwrap();
            server = serve(&folder, &socket);
        }
        program.stdin.take().unwrap().write_all(b"\n").unwrap();
        let output = program.wait_with_output().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said.lines().count(), 2 + 4 * 40, "{scheme} {restarts}: {said}");
        let is_right = |line: &str| line.split_once(' ').is_some_and(|(user, owner)| user == owner);
        assert!(said.lines().all(is_right), "{scheme} {restarts}: {said}");
    }
}

/// With the run's own server, which is root's but gives other users their own rights.
#[test]
fn other_users_have_their_rights_where_the_run_serves() {
    if !is_root() {
        return;
    }
    let world = World::new();
    fs::write(world.local("served/closed"), "of root\n").unwrap();
    fs::write(world.local("served/legible"), "for all\n").unwrap();
    fs::create_dir(world.local("served/open")).unwrap();
    for (name, mode) in [("closed", 0o600), ("legible", 0o644), ("open", 0o777), ("", 0o755)] {
        let path = world.local("served").join(name);
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    }
    let script = "cat $AT/legible; cat $AT/closed; echo text > $AT/open/made; echo x > $AT/here";
    let at = world.local("at");
    let output = Command::new(TOWLINE)
        .args(["run", "--serve"])
        .arg(world.local("served"))
        .arg("--at")
        .arg(&at)
        .args(["--", "sh", "-c"])
        .arg(format!(
            "cat $AT/closed; setpriv --reuid 65534 --regid 65534 --clear-groups sh -c '{script}'"
        ))
        .env("AT", &at)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "of root\nfor all\n", "{errors}");
    assert_eq!(errors.matches("Permission denied").count(), 2, "{errors}");
    let made = fs::metadata(world.local("served/open/made")).unwrap();
    assert_eq!((made.uid(), made.gid(), made.len()), (65534, 65534, 5));
    assert!(!world.local("served/here").exists());
}

/// A descriptor may write, whatever its user may do with the file by now.
#[test]
fn files_are_mapped_with_the_rights_of_their_descriptors() {
    if !is_root() || !have("python3") {
        return;
    }
    let world = World::new();
    let served = world.local("served");
    fs::set_permissions(&served, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let script = "if 1:
        import mmap, os
        os.chdir(os.environ['AT'])
        roots = os.open('roots', os.O_CREAT | os.O_RDWR, 0o600)
        os.setgid(65534)
        os.setuid(65534)
        own = os.open('own', os.O_CREAT | os.O_RDWR, 0o400)
        for fd in (roots, own):
            os.ftruncate(fd, 4)
            mapped = mmap.mmap(fd, 4)
            os.close(fd)
            mapped[:] = b'text'
            mapped.close()
    ";
    let at = world.local("at");
    let output = Command::new(TOWLINE)
        .args(["run", "--serve"])
        .arg(&served)
        .arg("--at")
        .arg(&at)
        .args(["--", "python3", "-c", script])
        .env("AT", &at)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in ["roots", "own"] {
        assert_eq!(fs::read_to_string(served.join(name)).unwrap(), "text");
    }
}
