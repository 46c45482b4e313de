//! `towline run`: writes to files of far servers, which the keeper sends.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use support::compare::{Libc, compiled};
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
    // Not the first ones, which are waited for.
    let is_meant: Meant = |requests| {
        std::thread::sleep(Duration::from_millis(8));
        matches!(requests, [Request::Write { offset: 0x80_0000.., .. }, ..])
    };
    write_together(16 << 20, "bs=64k", is_meant);
}

/// That a server is far is not necessary: it is enough that it is not next to us.
#[test]
fn writes_to_servers_in_the_same_building_are_sent_together() {
    // Until then, the keeper is ready.
    let is_meant: Meant = |requests| {
        std::thread::sleep(Duration::from_micros(500));
        matches!(requests, [Request::Write { offset: 0x180_0000.., .. }, ..])
    };
    write_together(32 << 20, "bs=16k", is_meant);
}

/// Writes a file with `dd`; two of the writes that are meant must be under way at once.
fn write_together(bytes: usize, block: &str, is_meant: Meant) {
    let world = World::new();
    let content = noise(bytes, 7);
    fs::write(world.local("f"), &content).unwrap();
    let far = Far::new(&world, 2, is_meant);
    let from = format!("if={}", world.local("f").display());
    let to = format!("of={}/f", world.local("at").display());
    let output = far_away(&world, &far, &["dd", block, "status=none", &from, &to]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(fs::read(world.local("served/f")).unwrap() == content);
    assert!(far.came_together());
}

/// What is appended arrives in its order, many lines with a request; the position is right whenever it counts.
#[test]
fn what_is_appended_is_in_order_and_moves_the_position() {
    static APPENDS: AtomicU32 = AtomicU32::new(0);
    const LINES: u32 = 600;
    let counted: Meant = |requests| {
        let is_write = matches!(requests, [Request::Write { .. }, ..]);
        APPENDS.fetch_add(u32::from(is_write), Ordering::Relaxed);
        FAR(requests)
    };
    if !have("python3") {
        return println!("SKIPPED appending behind: there is no python3");
    }
    let world = World::new();
    let far = Far::new(&world, 1, counted);
    let script = format!(
        "{BEGIN}
import fcntl
g = os.open(name, os.O_RDWR | os.O_APPEND)
lines = [b'line %d\\n' % n for n in range({LINES})]
for line in lines:
    assert os.write(g, line) == len(line)
text = b''.join(lines)
assert os.lseek(g, 0, os.SEEK_CUR) == len(text)
assert os.pread(f, len(text) + 1, 0) == text
# Two processes and two descriptors, one after another.
h = os.open(name, os.O_WRONLY | os.O_APPEND)
for n in range(10):
    os.write(g, b'parent'); os.write(g, b'again')
    if os.fork() == 0:
        os.write(g, b'child'); os.write(h, b'other'); os._exit(0)
    os.wait()
text += b'parentagainchildother' * 10
assert os.fstat(f).st_size == len(text)
assert os.pread(f, len(text), 0) == text
# What is written elsewhere, or read, comes before what is appended after it.
os.write(g, b'a' * 10); os.write(g, b'b' * 10)
os.pwrite(f, b'X', len(text) + 19)
os.write(g, b'c' * 10)
text += b'a' * 10 + b'b' * 9 + b'X' + b'c' * 10
os.lseek(g, len(text) - 1, os.SEEK_SET)
assert os.read(g, 5) == b'c'
os.write(g, b'd'); os.write(g, b'e')
assert os.read(g, 5) == b''
text += b'de'
os.write(g, b'f'); os.write(g, b'g')
fcntl.fcntl(g, fcntl.F_SETFL, 0)
os.write(g, b'h')
text += b'fgh'
os.lseek(g, 0, os.SEEK_SET)
os.write(g, b'L')
text = b'L' + text[1:]
os.close(g)
assert os.pread(f, len(text) + 1, 0) == text
sys.stdout.buffer.write(text)
"
    );
    let said = python(&world, &far, &script);
    assert_eq!(said, fs::read_to_string(world.local("served/f")).unwrap());
    let appends = APPENDS.load(Ordering::Relaxed);
    assert!(appends < LINES / 2, "{appends}");
}

/// Who reads back what he has just written, what lies between, or beyond the end, asks nothing.
#[test]
fn what_was_just_written_is_read_back_without_asking() {
    static READS: AtomicU32 = AtomicU32::new(0);
    const TIMES: u32 = 200;
    let counted: Meant = |requests| {
        let is_read = matches!(requests, [Request::Read { .. }, ..]);
        READS.fetch_add(u32::from(is_read), Ordering::Relaxed);
        FAR(requests)
    };
    if !have("python3") {
        return println!("SKIPPED reading back: there is no python3");
    }
    let world = World::new();
    let far = Far::new(&world, 1, counted);
    let script = format!(
        "{BEGIN}
for number in range({TIMES}):
    at = number * 100 + 50
    os.pwrite(f, wanted(at, 50), at)
    assert os.pread(f, 50, at) == wanted(at, 50)
    # Perhaps the server is asked for these: what is known of the end is older.
    if number % 10 == 9:
        assert os.pread(f, 4096, at - 50) == bytes(50) + wanted(at, 50)
        assert os.lseek(f, -50, os.SEEK_END) == at
        assert os.read(f, 99) == wanted(at, 50) and os.read(f, 99) == b''
"
    );
    python(&world, &far, &script);
    let reads = READS.load(Ordering::Relaxed);
    assert!(reads < TIMES, "{reads}");
}

/// Whatever several processes do to files in turn, they find what local files contain.
#[test]
fn random_writes_are_read_back_as_locally() {
    let world = World::new();
    let far = Far::new(&world, 1, |_| {
        std::thread::sleep(Duration::from_millis(1));
        false
    });
    let program = compiled(Libc::Shared, &world, "readback.c");
    let seeds = if std::env::var_os("TOWLINE_LONG").is_some() { 100 } else { 4 };
    for seed in 1..=seeds {
        for name in fs::read_dir(world.local("served")).unwrap() {
            fs::remove_file(name.unwrap().path()).unwrap();
        }
        let local = world.local(&format!("local{seed}"));
        fs::create_dir(&local).unwrap();
        let processes = (seed % 3 + 1).to_string();
        let [at, local, program] =
            [world.local("at"), local, program.clone()].map(|path| path.display().to_string());
        let seed = seed.to_string();
        let output = far_away(&world, &far, &[&program, &at, &local, &seed, "300", &processes]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
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

/// The server may not make files longer than 100,000 bytes any more.
fn limit_files(world: &World) {
    let limit = Rlimit { current: Some(100_000), maximum: None };
    prlimit(Pid::from_raw(world.server_id() as i32), Resource::Fsize, limit).unwrap();
}

/// Who was told that a write has failed does not read back what it should have written.
#[test]
fn what_was_not_written_is_not_read_back() {
    let Some((world, far)) = far_world() else { return };
    limit_files(&world);
    let script = format!(
        "{BEGIN}
behind = 0
for number in range(5):
    f = os.open(name + str(number), os.O_RDWR | os.O_CREAT)
    for piece in range(3): write(f, piece * 100, 100)
    try:
        os.pwrite(f, b'x', 150000)
        behind += 1
        os.fsync(f)
        print('nothing')
    except OSError: pass
    assert os.pread(f, 1, 150000) == b''
    assert os.lseek(f, 0, os.SEEK_END) == 300
assert behind > 0, 'all writes were waited for'
"
    );
    let output = far_away(&world, &far, &["python3", "-c", &script]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout.is_empty(), "{said}");
}

/// A failure is told once; what comes after it is waited for.
#[test]
fn a_write_behind_that_fails_is_told() {
    let Some((world, far)) = far_world() else { return };
    limit_files(&world);
    let appends = "import fcntl; os.ftruncate(f, 0); fcntl.fcntl(f, fcntl.F_SETFL, os.O_APPEND)";
    let hows = [
        ("", "write(f, offset, 4096)"),
        ("", "os.fsync(f)"),
        ("", "os.close(f)"),
        ("", "os.fsync(another)"),
        ("", "os.pwritev(f, [b'x'], 0, os.RWF_DSYNC)"),
        (appends, "os.fsync(f)"),
        (appends, "write(f, offset, 4096)"),
    ];
    for (begin, how) in hows {
        let script = format!(
            "{BEGIN}
import errno
{begin}
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
