//! `towline run`: requests whose answers the program does not wait for are carried out all the same.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::process::{Command, Stdio};
use support::{TOWLINE, World};

/// The remote directory's path for the programs; it does not exist locally.
const PREFIX: &str = "/towline-unanswered-test";

/// Runs a Python program with three arguments: the prefix, the same directory's local path, and the server's
/// process number. It must print `done`.
fn python(transport: &str, script: &str) {
    if Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: python3 is not installed");
        return;
    }
    let world = World::new();
    let served = world.local("served");
    for number in 0..20 {
        fs::write(served.join(format!("old{number}")), "old").unwrap();
    }
    let output = Command::new(TOWLINE)
        .args(["run", "--at", &format!("{PREFIX}={}", world.through(transport, "dir"))])
        .args(["--", "timeout", "120", "python3", "-c", script, PREFIX, served.to_str().unwrap()])
        .arg(world.server_id().to_string())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said, "done\n", "{transport}: {:?}: {complaint}", output.status);
}

#[test]
fn attributes_of_a_new_file_are_there_when_it_is_closed() {
    let script = r"
import os, sys, signal
there, here = sys.argv[1:3]
for number in range(200):
    name = f'/new{number}'
    fd = os.open(there + name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, b'x' * number)
    os.utime(fd, ns=(10**18 + number, 2 * 10**18 + number))
    os.fchown(fd, os.getuid(), os.getgid())
    os.fchmod(fd, 0o4755)
    os.fchmod(fd, 0o600)
    os.fchmod(fd, 0o640 | number % 8)
    if number % 3 == 0:
        assert os.fstat(fd).st_mode & 0o7777 == 0o640 | number % 8, 'fstat'
    if number % 5 == 0:
        assert os.stat(there + name).st_mode & 0o7777 == 0o640 | number % 8, 'stat'
    if number % 7 == 0:
        if os.fork() == 0:
            ours = os.stat(here + name)
            os._exit(ours.st_mode & 0o7777 != 0o640 | number % 8)
        assert os.wait()[1] == 0, 'a child sees it'
    if number % 11 == 0:
        os.fsync(fd)
    os.close(fd)
    found = os.stat(here + name)
    assert found.st_mode & 0o7777 == 0o640 | number % 8, (number, oct(found.st_mode))
    assert (found.st_atime_ns, found.st_mtime_ns) == (10**18 + number, 2 * 10**18 + number), number
    assert found.st_size == number
# Who ends without closing, and who executes another program.
for name, end in (('/ended', lambda: os._exit(0)), ('/executed', lambda: os.execlp('true', 'true'))):
    if os.fork() == 0:
        fd = os.open(there + name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.fchmod(fd, 0o751)
        end()
    assert os.wait()[1] == 0
    assert os.stat(here + name).st_mode & 0o7777 == 0o751, name
print('done')
";
    for transport in ["tcp", "unix"] {
        python(transport, script);
    }
}

#[test]
fn attributes_that_were_asked_for_survive_who_asked() {
    let script = r"
import os, sys, signal, time
there, here = sys.argv[1:3]
for number in range(50):
    name = f'/killed{number}'
    child = os.fork()
    if child == 0:
        fd = os.open(there + name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(fd, b'data')
        os.fchmod(fd, 0o751)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert open(here + name).read() == 'data'
    # On its way, not lost, though the run closes the file.
    until = time.monotonic() + 60
    while os.stat(here + name).st_mode & 0o7777 != 0o751:
        assert time.monotonic() < until, f'{name} never changed'
        time.sleep(0.001)
print('done')
";
    for transport in ["tcp", "unix", "shm"] {
        python(transport, script);
    }
}

#[test]
fn files_are_closed_on_the_server_though_no_request_follows() {
    let script = r"
import os, sys, time
there, here, server = sys.argv[1:4]
def still_open():
    found = []
    for fd in os.listdir(f'/proc/{server}/fd'):
        try:
            path = os.readlink(f'/proc/{server}/fd/{fd}')
        except FileNotFoundError:
            continue
        if '/old' in path or '/fresh' in path:
            found.append(path)
    return found
def all_closed(what):
    until = time.monotonic() + 60
    while still_open():
        assert time.monotonic() < until, (what, still_open())
        time.sleep(0.001)
files = [os.open(f'{there}/old{n}', os.O_RDONLY) for n in range(20)]
assert len(still_open()) == 20, 'the test can see them'
for fd in files: os.close(fd)
all_closed('more than are left to the next request')
for n in range(100):
    fd = os.open(f'{there}/old{n % 20}', os.O_RDONLY)
    os.read(fd, 10)
    os.close(fd)
    if n % 10 == 9:
        all_closed('read')
fd = os.open(f'{there}/fresh', os.O_CREAT | os.O_EXCL | os.O_RDWR)
os.write(fd, b'new'); os.close(fd)
all_closed('written')
# A child that ends, is killed or executes another program just after it has closed.
for end in (lambda: os._exit(0), lambda: os.kill(os.getpid(), 9), lambda: os.execlp('true', 'true')):
    if os.fork() == 0:
        fd = os.open(f'{there}/old1', os.O_RDONLY); os.close(fd)
        end()
    os.wait()
    all_closed('by a child')
# And its parent goes on to close what it left before the fork.
fd = os.open(f'{there}/old2', os.O_RDONLY); os.close(fd)
if os.fork() == 0:
    os.stat(f'{there}/old3'); os._exit(0)
os.wait(); os.stat(f'{there}/old4')
all_closed('before a fork')
# A lock goes with the file at once: another process takes it with the next request.
import fcntl
for n in range(50):
    fd = os.open(f'{there}/old5', os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    again = os.open(f'{there}/old5', os.O_RDWR)
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(again)
print('done')
";
    for transport in ["tcp", "unix", "shm"] {
        python(transport, script);
    }
}
