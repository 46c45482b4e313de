//! `towline run`: large mappings of remote files are read when they are touched.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use support::{TOWLINE, World, forbidding, keeper, noise, text, wait_until};

/// The remote directory's path for the programs; it does not exist locally.
const PREFIX: &str = "/towline-maps-test";
/// How long anything may take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
const LENGTH: u64 = 1 << 30;

/// Returns whether this can be tested. If not, prints that the test is skipped.
fn possible() -> bool {
    if Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: python3 is not installed");
        return false;
    }
    support::maps_on_demand()
}

/// Creates a file of 1 GiB with a few marks and holes.
fn big(path: &Path) {
    let file = fs::File::create(path).unwrap();
    file.set_len(LENGTH).unwrap();
    for mark in 0..16u64 {
        file.write_all_at(format!("mark {mark:2}").as_bytes(), mark * (LENGTH / 16)).unwrap();
    }
}

/// Starts a Python program under `run` with the path of a remote file.
fn python(url: &str, script: &str) -> Child {
    Command::new(TOWLINE)
        .args(["run", "--at", &format!("{PREFIX}={url}"), "--", "python3", "-c", script])
        .arg(format!("{PREFIX}/big"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for its end, which must come in time. Returns its status and output.
fn ended(mut child: Child) -> (std::process::ExitStatus, String, String) {
    let (tell, told) = mpsc::channel();
    let id = child.id();
    let waits = std::thread::spawn(move || {
        drop(child.stdin.take());
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        let complaint = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        let status = child.wait().unwrap();
        let _ = tell.send((status, said, complaint));
    });
    match told.recv_timeout(PATIENCE) {
        Ok(result) => {
            waits.join().unwrap();
            result
        }
        Err(_) => {
            let _ = Command::new("kill").args(["-9", &id.to_string()]).status();
            panic!("the program did not end in {PATIENCE:?}");
        }
    }
}

/// Returns the sum of some of the server's counters.
fn counted(world: &World, names: &[&str]) -> u64 {
    let told: serde_json::Value =
        serde_json::from_str(&text(&["stats", "--json", &world.url("")])).unwrap();
    names.iter().map(|name| told["counters"][name].as_u64().unwrap()).sum()
}

/// Returns the bytes that the server has sent, in whatever way.
fn sent(world: &World) -> u64 {
    counted(world, &["bytes_sent_copied", "bytes_sent_file", "bytes_sent_in_place", "bytes_lent"])
}

#[test]
fn few_bytes_of_a_large_file_are_moved() {
    if !possible() {
        return;
    }
    let world = World::new();
    big(&world.local("served/big"));
    for kind in ["MAP_PRIVATE", "MAP_SHARED"] {
        let before = sent(&world);
        let script = format!(
            r"
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(fd, 0, flags=mmap.{kind}, prot=mmap.PROT_READ)
os.close(fd)
assert len(m) == 1 << 30
for mark in range(16):
    at = mark << 26
    assert m[at:at + 7] == b'mark %2d' % mark, mark
assert m[-1] == 0
child = os.fork()
if child == 0:
    os._exit(m[(1 << 29) + 7 * 4096])
assert os.waitpid(child, 0)[1] == 0
resident = [line for line in open('/proc/self/status') if line.startswith('VmRSS')][0]
assert int(resident.split()[1]) < 100 << 10, resident
print('done')
"
        );
        for transport in ["tcp", "shm"] {
            let (status, said, complaint) =
                ended(python(&world.through(transport, "dir"), &script));
            assert_eq!(said, "done\n", "{kind} {transport}: {status}: {complaint}");
        }
        let moved = sent(&world) - before;
        assert!(moved > 2 * 16 * 4096, "{kind}: {moved} bytes cannot be all");
        assert!(moved < LENGTH / 64, "{kind}: {moved} bytes were moved");
    }
}

#[test]
fn few_pages_of_a_large_file_are_stored_to() {
    if !possible() {
        return;
    }
    let world = World::new();
    let path = world.local("served/big");
    big(&path);
    for (round, transport) in ["tcp", "unix"].into_iter().enumerate() {
        let read = sent(&world);
        let received = || counted(&world, &["bytes_received"]);
        let before = received();
        let script = r"
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(fd, 0)
os.close(fd)
assert len(m) == 1 << 30
m[5 << 20] = m[5 << 20] + 1
if os.fork() == 0:
    m[700 << 20] = m[700 << 20] + 2
    os._exit(0)
assert os.wait()[1] == 0
m.flush()
assert m[700 << 20] > 1
m[900 << 20] = m[900 << 20] + 3
resident = [line for line in open('/proc/self/status') if line.startswith('VmRSS')][0]
assert int(resident.split()[1]) < 100 << 10, resident
print('done')
";
        let (status, said, complaint) = ended(python(&world.through(transport, "dir"), script));
        assert_eq!(said, "done\n", "{transport}: {status}: {complaint}");
        let (read, written) = (sent(&world) - read, received() - before);
        assert!(read > 3 * 4096, "{transport}: {read} bytes cannot be all");
        assert!(read < LENGTH / 256, "{transport}: {read} bytes were read");
        // A header of 32 bytes and a byte for each store; fewer than the pages have.
        assert!(written > 3 * 33, "{transport}: {written} bytes cannot be all");
        assert!(written < 3 * 4096, "{transport}: {written} bytes were written");
        let file = fs::File::open(&path).unwrap();
        let times = round as u8 + 1;
        for (place, wanted) in [(5, times), (700, 2 * times), (900, 3 * times), (6, 0)] {
            let mut byte = [0];
            file.read_exact_at(&mut byte, place << 20).unwrap();
            assert_eq!(byte[0], wanted, "{transport}: at {place} MiB");
        }
        // Holes stay holes.
        let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&path).unwrap());
        assert!(blocks < 2 << 10, "{blocks} blocks");
    }
}

/// As the kernel writes back what a killed process has stored: in its place, however the file was opened.
#[test]
fn what_a_killed_program_stored_is_written() {
    if !possible() {
        return;
    }
    let world = World::new();
    let path = world.local("served/big");
    for flags in ["os.O_RDWR", "os.O_RDWR | os.O_APPEND"] {
        big(&path);
        let script = format!(
            r"
import mmap, os, signal, sys
fd = os.open(sys.argv[1], {flags})
m = mmap.mmap(fd, 0)
m[5 << 20:(5 << 20) + 6] = b'stored'
if os.fork() == 0:
    m[6 << 20:(6 << 20) + 7] = b'by both'
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"
        );
        let (status, _, complaint) = ended(python(&world.through("unix", "dir"), &script));
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{flags}: {status}: {complaint}");
        // The keeper writes it after the program has ended.
        let file = fs::File::open(&path).unwrap();
        let read = |at| {
            let mut bytes = [0; 7];
            file.read_exact_at(&mut bytes, at).unwrap();
            bytes
        };
        wait_until(&format!("what was stored is written ({flags})"), || {
            (read(5 << 20), read(6 << 20)) == (*b"stored\0", *b"by both")
        });
        assert_eq!(file.metadata().unwrap().len(), LENGTH, "{flags}");
    }
}

/// Such a mapping is read when it is made, and nobody fills it. Also if another process, which only reads, still
/// has it mapped.
#[test]
fn what_a_killed_program_stored_to_a_short_mapping_is_written() {
    let world = World::new();
    let path = world.local("served/big");
    for reads in [false, true] {
        fs::write(&path, [1; 5000]).unwrap();
        let script = format!(
            r"
import mmap, os, signal, sys
if {reads}:
    ends, lives = os.pipe()
    if os.fork() == 0:
        with open(sys.argv[1], 'rb') as file:
            m = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            os.write(lives, b'.')
            signal.sigtimedwait([], 2)
            os._exit(m[4500] != 2)
    os.read(ends, 1)
with open(sys.argv[1], 'r+b') as file:
    m = mmap.mmap(file.fileno(), 0)
    m[4500] = 2
    os.kill(os.getpid(), signal.SIGKILL)
",
            reads = if reads { "True" } else { "False" },
        );
        let (status, _, complaint) = ended(python(&world.url("dir"), &script));
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}: {complaint}");
        // The keeper writes it after the program has ended.
        wait_until("what was stored is written", || fs::read(&path).unwrap()[4500] == 2);
        assert_eq!(fs::metadata(&path).unwrap().len(), 5000);
    }
}

/// Maps the file, touches a page, prints a line, waits for a line, and touches another page.
const TOUCHES_TWICE: &str = r"
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
assert m[:7] == b'mark  0'
print('touched', flush=True)
sys.stdin.readline()
assert m[1 << 26:(1 << 26) + 7] == b'mark  1'
print('done')
";

/// Returns its first line.
fn touched(child: &mut Child) -> String {
    let mut line = String::new();
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    reader.read_line(&mut line).unwrap();
    // Only one line follows, which is not written before this one has been read.
    assert!(reader.buffer().is_empty());
    child.stdout = Some(reader.into_inner());
    line
}

#[test]
fn a_program_ends_when_nobody_fills_its_pages() {
    if !possible() {
        return;
    }
    let world = World::new();
    big(&world.local("served/big"));
    let mut child = python(&world.through("unix", "dir"), TOUCHES_TWICE);
    touched(&mut child);
    let program = child.id();
    let keeper = keeper(program).unwrap();
    assert!(Command::new("kill").args(["-9", &keeper]).status().unwrap().success());
    // Whatever it does: touching a page, or waiting for something else.
    let (status, said, _) = ended(child);
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    assert_eq!(said, "", "the program went on");
}

/// Old filters of containers forbid `clone3`, so that threads cannot be created. Files are then read when
/// they are mapped.
#[test]
fn programs_map_files_where_their_keeper_can_have_no_thread() {
    if !possible() {
        return;
    }
    let world = World::new();
    let content = noise(1 << 20, 3);
    fs::write(world.local("served/file"), &content).unwrap();
    let script = "import mmap, sys
with open(sys.argv[1], 'rb') as file:
    for access in (mmap.ACCESS_READ, mmap.ACCESS_COPY):
        sys.stdout.buffer.write(mmap.mmap(file.fileno(), 0, access=access))";
    // The program's progress when its keeper gives up differs each time.
    for _ in 0..8 {
        let output = forbidding(libc::SYS_clone3)
            .args([TOWLINE, "run", "--at"])
            .args([&format!("{PREFIX}={}", world.url("dir")), "--", "python3", "-c", script])
            .arg(format!("{PREFIX}/file"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", output.status);
        assert!(said.contains("cannot fill a process's mappings on demand"), "{said}");
        assert!(output.stdout == [&content[..], &content].concat(), "contents differ");
    }
}

#[test]
fn a_page_that_cannot_be_read_raises_sigbus() {
    if !possible() {
        return;
    }
    let world = World::new();
    let url = world.through("unix", "mem");
    let made = python(
        &url,
        "import sys; f = open(sys.argv[1], 'wb'); f.write(b'mark  0'); f.truncate(100 << 20)",
    );
    let (status, _, complaint) = ended(made);
    assert!(status.success(), "{complaint}");
    let mut child = python(&url, TOUCHES_TWICE);
    touched(&mut child);
    // The file's contents disappear with the server's memory export.
    let mut world = world;
    world.restart();
    writeln!(child.stdin.as_mut().unwrap()).unwrap();
    let (status, said, complaint) = ended(child);
    let bus = status.code() == Some(128 + libc::SIGBUS) || status.signal() == Some(libc::SIGBUS);
    assert!(bus && said.is_empty(), "{status}: {said}{complaint}");
}

#[test]
fn a_page_that_is_waited_for_comes_when_the_server_does() {
    if !possible() {
        return;
    }
    let mut world = World::new();
    big(&world.local("served/big"));
    let mut child = python(&world.through("unix", "dir"), TOUCHES_TWICE);
    touched(&mut child);
    world.stop();
    writeln!(child.stdin.as_mut().unwrap()).unwrap();
    world.restart();
    let (status, said, complaint) = ended(child);
    assert_eq!(said, "done\n", "{status}: {complaint}");
}

/// Databases map gigabytes from the start. This also covers runs where nothing is read when it is touched,
/// because the folder for runs is on a disk, whose files userfaultfd does not support (if it is not on a disk
/// here, userfaultfd is used).
#[test]
fn what_is_mapped_behind_the_end_of_a_file_takes_no_memory() {
    if Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("SKIPPED: python3 is not installed");
        return;
    }
    let world = World::new();
    fs::write(world.local("served/big"), "bytes").unwrap();
    let home = world.local("home");
    fs::create_dir(&home).unwrap();
    let script = "import ctypes, os, sys\n\
        libc = ctypes.CDLL(None)\n\
        libc.mmap.restype = ctypes.c_void_p\n\
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]\n\
        at = libc.mmap(None, 1 << 30, 1, 1, os.open(sys.argv[1], os.O_RDONLY), 0)\n\
        print(ctypes.string_at(at, 6))\n\
        folders = os.walk(os.environ['TOWLINE_RUN'])\n\
        used = sum(os.stat(os.path.join(folder, name)).st_blocks for folder, _, names in folders for name in names)\n\
        print('little' if used * 512 < 64 << 20 else used)\n";
    let child = Command::new(TOWLINE)
        .args(["run", "--at", &format!("{PREFIX}={}", world.url("dir")), "--"])
        .args(["python3", "-c", script, &format!("{PREFIX}/big")])
        .env("XDG_RUNTIME_DIR", &home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (status, said, told) = ended(child);
    assert!(status.success(), "{status}: {told}");
    assert_eq!(said, "b'bytes\\x00'\nlittle\n", "{told}");
}

/// Defines `ends(touch)`: whether `SIGBUS` ends a child that touches memory.
const ENDS: &str = r"
import errno, mmap, os, signal, sys
def ends(touch):
    child = os.fork()
    if child == 0:
        touch()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS
";

/// Renames a file while the server is away, so that programs lose it, and starts the server again.
fn lose(world: &mut World, name: &str, new: &str) {
    world.stop();
    fs::rename(world.local("served").join(name), world.local("served").join(new)).unwrap();
    world.restart();
}

/// The second file is read when it is touched, where that is possible.
const LENGTHS: [(&str, usize); 2] = [("small", 8192), ("large", 1 << 20)];

/// Their keeper learns it.
#[test]
fn programs_that_only_look_at_a_file_lost_in_a_restart_get_sigbus() {
    let mut world = World::new();
    for (name, length) in LENGTHS {
        for name in [name, "other"] {
            fs::write(world.local("served").join(name), vec![b'a'; length]).unwrap();
        }
        let script = format!(
            r"{ENDS}
os.chdir('{PREFIX}')
lost, other = [open(name, 'r+b') for name in ('{name}', 'other')]
m, there = [mmap.mmap(file.fileno(), 0) for file in (lost, other)]
private = mmap.mmap(lost.fileno(), 0, flags=mmap.MAP_PRIVATE)
assert m[0] == private[0] == there[0] == ord('a')
ready, to_parent = os.pipe()
to_child, go = os.pipe()
child = os.fork()
if child == 0:
    os.close(go)
    # Without any mapping by the parent's addresses.
    own = mmap.mmap(lost.fileno(), 0)
    own[5000] = ord('b')
    os.write(to_parent, b'x')
    os.read(to_child, 1)
    own[0]
    os._exit(0)
os.read(ready, 1)
assert m[5000] == ord('b')
print('ready', flush=True)
sys.stdin.readline()
os.write(go, b'x')
status = os.waitpid(child, 0)[1]
assert os.WTERMSIG(status) == signal.SIGBUS, status
assert ends(lambda: m[5000]) and ends(lambda: m.__setitem__(0, 1))
assert private[0] == there[0] == ord('a')
there[1] = ord('c')
there.flush()
try: m.flush()
except OSError as error: assert error.errno == errno.ESTALE, error
else: assert False, 'what was stored is lost'
print('done')
"
        );
        let mut child = python(&world.through("unix", "dir"), &script);
        assert_eq!(touched(&mut child), "ready\n");
        lose(&mut world, name, "gone");
        let complaints = child.stderr.take().unwrap();
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || {
            let mut complaints = BufReader::new(complaints);
            let mut line = String::new();
            complaints.read_line(&mut line).unwrap();
            tell.send((line, complaints.into_inner()))
        });
        let Ok((told, complaints)) = told.recv_timeout(PATIENCE) else {
            child.kill().unwrap();
            panic!("nobody was told that {name} is lost");
        };
        assert!(told.contains(&format!("{PREFIX}/{name} was lost in a restart")), "{told}");
        assert!(told.contains("stored there and not written is lost"), "{told}");
        child.stderr = Some(complaints);
        child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        let (status, said, complaint) = ended(child);
        assert_eq!(said, "done\n", "{name}: {status}: {complaint}");
        assert_eq!(fs::read(world.local("served/other")).unwrap()[..3], *b"aca", "{name}");
    }
}

/// Without the help of their keeper.
#[test]
fn programs_that_use_a_file_lost_in_a_restart_lose_its_mapping() {
    let mut world = World::new();
    fs::write(world.local("served/old"), vec![b'a'; 8192]).unwrap();
    let script = format!(
        r"{ENDS}
os.chdir('{PREFIX}')
file = open('old', 'r+b')
m = mmap.mmap(file.fileno(), 0)
m[5000] = ord('b')
print('ready', flush=True)
sys.stdin.readline()
# Of the same inode, by another name.
again = open('new', 'r+b')
fresh = mmap.mmap(again.fileno(), 0)
assert fresh[5000] == ord('a')
fresh[1] = ord('c')
fresh.flush()
assert ends(lambda: m[0])
try: os.pread(file.fileno(), 1, 0)
except OSError as error: assert error.errno == errno.ESTALE, error
else: assert False, 'the file is lost'
assert ends(lambda: m[0]) and not ends(lambda: fresh[0])
print('done')
"
    );
    let mut child = python(&world.through("unix", "dir"), &script);
    assert_eq!(touched(&mut child), "ready\n");
    let keeper = keeper(child.id()).unwrap();
    assert!(Command::new("kill").args(["-9", &keeper]).status().unwrap().success());
    lose(&mut world, "old", "new");
    child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    let (status, said, complaint) = ended(child);
    assert_eq!(said, "done\n", "{status}: {complaint}");
    assert_eq!(fs::read(world.local("served/new")).unwrap()[..3], *b"aca");
}
