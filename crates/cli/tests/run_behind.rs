//! `towline run`: writes to files of far servers, which the keeper sends.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::fs;
use std::process::Command;
use std::time::Duration;
use support::far::{Far, Meant, far_away};
use support::{TOWLINE, World, have, noise};
use towline_instance::VARIABLE;
use towline_wire::Request;

/// Each request takes long, writes longest, so that others could overtake them.
const FAR: Meant = |requests| {
    let is_write = matches!(requests, [Request::Write { .. }, ..]);
    std::thread::sleep(Duration::from_millis(if is_write { 20 } else { 8 }));
    false
};

/// Returns a server that is far, unless there is no Python to use it.
fn far_world() -> Option<(World, Far)> {
    if !have("python3") {
        println!("SKIPPED writes behind: there is no python3");
        return None;
    }
    let world = World::new();
    let far = Far::new(&world, 1, FAR);
    Some((world, far))
}

/// Runs a Python script, and returns what it has printed. It must succeed.
fn python(world: &World, far: &Far, script: &str) -> String {
    let output = far_away(world, far, &["python3", "-c", script]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// The beginning of scripts: `write(fd, offset, length)` writes bytes that depend on where they are, and `wanted` is
/// what a file contains then.
const BEGIN: &str = "
import os, signal, subprocess, sys
def wanted(offset, length): return bytes((at * 7 >> 4) & 255 for at in range(offset, offset + length))
def write(fd, offset, length): assert os.write(fd, wanted(offset, length)) == length
name = os.environ['AT'] + '/f'
f = os.open(name, os.O_RDWR | os.O_CREAT)
";

/// A program that writes piece by piece does not wait for each.
#[test]
fn writes_to_far_files_are_sent_together() {
    let world = World::new();
    let content = noise(16 << 20, 7);
    fs::write(world.local("f"), &content).unwrap();
    // Not the first ones, which are waited for.
    let is_meant: Meant = |requests| {
        std::thread::sleep(Duration::from_millis(8));
        matches!(requests, [Request::Write { offset: 0x20_0000.., .. }, ..])
    };
    let far = Far::new(&world, 2, is_meant);
    let from = format!("if={}", world.local("f").display());
    let to = format!("of={}/f", world.local("at").display());
    let output = far_away(&world, &far, &["dd", "bs=64k", "status=none", &from, &to]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(fs::read(world.local("served/f")).unwrap() == content);
    assert!(far.came_together());
}

/// All processes of the run see what one has written, as soon as it has; and it stays if that one is killed.
#[test]
fn what_was_written_behind_is_there_for_all() {
    let Some((world, far)) = far_world() else { return };
    let script = format!(
        "{BEGIN}
PIECE = 4096
for number in range(60):
    write(f, number * PIECE, PIECE)
    if number % 20 == 9:
        assert os.pread(f, PIECE, number * PIECE) == wanted(number * PIECE, PIECE)
    if number % 20 == 14:
        assert os.fstat(f).st_size == (number + 1) * PIECE
    if number % 20 == 19:
        told = subprocess.run(['wc', '-c', name], capture_output=True, text=True)
        assert told.stdout.split()[0] == str((number + 1) * PIECE), told
        os.rename(name, name + str(number))
        name += str(number)
# A killed process, which has written over what others have written.
killed = os.fork()
if killed == 0:
    for number in range(60):
        os.pwrite(f, b'x' * PIECE, number * PIECE)
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitpid(killed, 0)[1] == signal.SIGKILL
assert open(name, 'rb').read() == b'x' * 60 * PIECE
assert os.path.exists(os.environ['{VARIABLE}'] + '/behind-0'), 'all writes were waited for'
print(name)
"
    );
    let name = python(&world, &far, &script);
    let name = name.trim_end().rsplit('/').next().unwrap();
    assert!(fs::read(world.local("served").join(name)).unwrap() == [b'x'; 60 * 4096]);
}

/// A file has several names, and several descriptors; what is written by one is not overtaken by the other.
#[test]
fn writes_by_several_prefixes_are_in_order() {
    let Some((world, far)) = far_world() else { return };
    fs::write(world.local("served/f"), "").unwrap();
    let script = format!(
        "{BEGIN}
g = os.open(os.environ['HERE'] + '/also/f', os.O_RDWR)
for number in range(5):
    write(f, 0, 100)
    os.pwrite(g, b'x', 0)
for number in range(5):
    os.pwrite(f, b'a' * 300000, 0)
    os.pwrite(g, b'b', 0)
    assert os.pread(f, 2, 0) == b'ba', number
os.pwrite(g, b'c' * 9, 50)
assert os.path.exists(os.environ['{VARIABLE}'] + '/behind-0'), 'all writes were waited for'
# Changes of times are not waited for either.
for number in range(3):
    new = os.open(name + str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for piece in range(3): write(new, piece * 9, 9)
    os.utime(new, (1e9, 1e9))
    write(new, 27, 9)
    os.close(new)
    assert os.stat(name + str(number)).st_mtime > 1.1e9, 'the write came first'
"
    );
    let prefix = |name: &str| format!("{}={}", world.local(name).display(), far.url("dir"));
    let mut command = Command::new(TOWLINE);
    command.args(["run", "--at", &prefix("at"), "--at", &prefix("also"), "--", "python3", "-c"]);
    command.arg(script).env("AT", world.local("at")).env("HERE", &world.path);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let content = fs::read(world.local("served/f")).unwrap();
    assert!(content.starts_with(&[&b"b"[..], &[b'a'; 49], &[b'c'; 9], b"a"].concat()));
    assert_eq!(content.len(), 300_000);
}

/// The end of the program, however it comes, is not the end of what it has written.
#[test]
fn what_a_killed_program_has_written_behind_arrives() {
    let Some((world, far)) = far_world() else { return };
    let script = format!(
        "{BEGIN}
for number in range(100):
    write(f, number * 50000, 50000)
os.kill(os.getpid(), signal.SIGKILL)"
    );
    let output = far_away(&world, &far, &["python3", "-c", &script]);
    assert!(!output.status.success());
    let wanted: Vec<u8> = (0..5_000_000_u32).map(|at| ((at * 7) >> 4) as u8).collect();
    support::wait_until("everything is written", || {
        fs::read(world.local("served/f")).unwrap() == wanted
    });
}

/// A failure is told once; what comes after it is waited for.
#[test]
fn a_write_behind_that_fails_is_told() {
    let Some((world, far)) = far_world() else { return };
    // The server may not make files longer than this.
    let limit = Rlimit { current: Some(100_000), maximum: None };
    prlimit(Pid::from_raw(world.server_id() as i32), Resource::Fsize, limit).unwrap();
    let hows = [
        "write(f, offset, 4096)",
        "os.fsync(f)",
        "os.close(f)",
        "os.fsync(another)",
        "os.pwritev(f, [b'x'], 0, os.RWF_DSYNC)",
    ];
    for how in hows {
        let script = format!(
            "{BEGIN}
import errno
another = os.open(name, os.O_WRONLY)
offset = 0
try:
    while offset < 200000:
        write(f, offset, 4096)
        offset += 4096
    os.fstat(f)
    {how}
    print('nothing')
except OSError as error:
    print(errno.errorcode[error.errno])
try:
    write(os.open(name, os.O_WRONLY), 0, 4096)
    f = os.open(name, os.O_RDWR)
    assert os.pread(f, 100000, 0) == wanted(0, 100000)
    os.pwrite(f, b'x', 200000)
    print('nothing')
except OSError as error:
    print(errno.errorcode[error.errno])
"
        );
        let output = far_away(&world, &far, &["python3", "-c", &script]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "EFBIG\nEFBIG\n", "{how}: {said}");
        let lost = "at/f: what a program has written to it is lost: file too large";
        assert!(said.contains(lost), "{how}: {said}");
    }
}
