//! `towline run`: how many requests programs make.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::process::Command;
use std::time::Duration;
use support::far::{Far, Meant, far_away};
use support::{TOWLINE, World, have, under_run};
use towline_wire::Request;

/// Returns how many operations of a kind the server has received.
fn operations(world: &World, kind: &str) -> u64 {
    let output = Command::new(TOWLINE).args(["stats", "--json", &world.url("")]).output().unwrap();
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    told["operations"][kind].as_u64().unwrap_or(0)
}

/// Returns how many operations of a kind the server receives from a script, which must succeed.
fn asked(world: &World, kind: &str, script: &str) -> u64 {
    let before = operations(world, kind);
    let output = under_run(world, &format!("{script}; exit $?"));
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    operations(world, kind) - before
}

/// The first bytes come with the open, all others with one read. The next read returns the end of the file
/// without a request.
#[test]
fn a_file_is_read_to_its_end_by_one_read() {
    let world = World::new();
    fs::write(world.local("served/f"), vec![b'x'; 50_000]).unwrap();
    let reads = || operations(&world, "Read");
    // On a busy machine, the bytes that came with the open may be too old when they are used.
    let fewest = (0..50).map(|_| {
        let before = reads();
        let output = under_run(&world, "cat $AT/f; exit $?");
        assert_eq!(output.stdout.len(), 50_000, "{}", String::from_utf8_lossy(&output.stderr));
        reads() - before
    });
    assert!(fewest.into_iter().any(|count| count == 1));
    // A later read sees what was added since.
    let script = "exec 3< $AT/f; cat <&3 | wc -c; printf more >> $HERE/served/f; cat <&3 | wc -c";
    let output = under_run(&world, script);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "50000\n4\n");
}

#[test]
fn a_directory_whose_names_are_known_is_not_asked_for_again() {
    let world = World::new();
    fs::create_dir(world.local("served/d")).unwrap();
    (0..10).for_each(|n| fs::write(world.local(&format!("served/d/{n}")), "").unwrap());
    let look = "i=0; while [ $i -lt 40 ]; do [ -d $AT/d ] || exit 1; i=$((i + 1)); done";
    let asked = |first: &str| asked(&world, "Stat", &format!("{first}; {look}"));
    assert!(asked(":") >= 40, "who only looks at it waits for a change");
    // On a busy machine, cached data may be too old when it is used.
    let names = "for n in $AT/d/*; do [ -e $n ] || exit 1; done";
    assert!((0..50).any(|_| asked(names) < 20));
    // Changes by the run itself are seen at once.
    let script = format!(
        "{names}; stat -c %h $AT/d; [ -d $AT/d ] && mkdir $AT/d/in && [ -d $AT/d/in ] && stat -c %h $AT/d"
    );
    assert_eq!(String::from_utf8_lossy(&under_run(&world, &script).stdout), "2\n3\n");
}

/// A program that reads on in short pieces gets them from longer ones.
#[test]
fn short_reads_in_order_are_few_requests() {
    let world = World::new();
    fs::write(world.local("served/f"), vec![b'x'; 4 << 20]).unwrap();
    // On a busy machine, data read ahead may be too old when it is used.
    let in_order = "dd if=$AT/f bs=4k of=/dev/null status=none";
    assert!((0..50).any(|_| asked(&world, "Read", in_order) < 20));
}

/// A program that has to wait for what is read ahead gets more of it at a time.
#[test]
fn far_files_are_read_by_several_requests_together() {
    let world = World::new();
    let content = support::noise(4 << 20, 7);
    fs::write(world.local("served/f"), &content).unwrap();
    // From the third long piece on, which is behind 16 KiB that come with the open, and 192, 384 and 512 KiB.
    let is_meant: Meant =
        |requests| matches!(requests, [Request::Read { offset: 1_130_496.., length: 524_288, .. }]);
    let is_together = || {
        let far = Far::new(&world, 2, is_meant);
        let file = format!("if={}/f", world.local("at").display());
        let output = far_away(&world, &far, &["dd", "bs=64k", "status=none", &file]);
        assert!(output.stdout == content, "{}", String::from_utf8_lossy(&output.stderr));
        far.came_together()
    };
    // On a busy machine, data read ahead may be too old when it is used; then there is less of it.
    assert!((0..3).any(|_| is_together()));
}

/// A program that waits long for each of its long reads gets the next ones together.
#[test]
fn long_reads_of_far_files_are_requested_together() {
    let world = World::new();
    let content = support::noise(32 << 20, 7);
    fs::write(world.local("served/f"), &content).unwrap();
    let is_meant: Meant = |requests| {
        let [Request::Read { length, .. }, ..] = requests else { return false };
        // Answers to long reads take long.
        std::thread::sleep(Duration::from_millis(10));
        *length == 524_288
    };
    let is_together = || {
        let far = Far::new(&world, 2, is_meant);
        let file = format!("if={}/f", world.local("at").display());
        let output = far_away(&world, &far, &["dd", "bs=1M", "status=none", &file]);
        assert!(output.stdout == content, "{}", String::from_utf8_lossy(&output.stderr));
        far.came_together()
    };
    // On a busy machine, data read ahead may be too old when it is used; then there is less of it.
    assert!((0..3).any(|_| is_together()));
}

/// What `sendfile` and `copy_file_range` copy into a far file is written by few requests.
#[test]
fn copies_into_far_files_are_few_requests() {
    if !have("python3") {
        return println!("SKIPPED copies into far files: there is no python3");
    }
    let world = World::new();
    let content = support::noise((16 << 20) + 7, 7);
    fs::write(world.local("f"), &content).unwrap();
    for call in ["os.sendfile(to, source, 0, 1 << 30)", "os.copy_file_range(source, to, 1 << 30)"] {
        let writes = || {
            let before = operations(&world, "Write");
            let far = Far::new(&world, 1, |requests| {
                let is_meant = matches!(requests, [Request::Write { .. }, ..]);
                // Each answer takes long, however much is written.
                std::thread::sleep(Duration::from_millis(if is_meant { 20 } else { 0 }));
                is_meant
            });
            let text = format!(
                "
import os
source = os.open(os.environ['HERE'] + '/f', os.O_RDONLY)
to = os.open(os.environ['AT'] + '/f', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
print({call})"
            );
            let output = far_away(&world, &far, &["python3", "-c", &text]);
            let said = String::from_utf8_lossy(&output.stdout);
            assert_eq!(said, "16777223\n", "{}", String::from_utf8_lossy(&output.stderr));
            assert!(fs::read(world.local("served/f")).unwrap() == content);
            operations(&world, "Write") - before
        };
        // By 256 KiB, they are 65. On a busy machine, the time of a request may vary.
        assert!((0..5).any(|_| writes() < 8));
    }
}

/// In a very long directory, data from the beginning of the listing may be too old before the end is used.
#[test]
fn names_of_long_directories_are_asked_for_together() {
    if !have("python3") {
        return println!("SKIPPED long directories: there is no python3");
    }
    const NAMES: u64 = 6000;
    let world = World::new();
    fs::create_dir(world.local("served/d")).unwrap();
    (0..NAMES).for_each(|n| fs::write(world.local(&format!("served/d/{n}")), "").unwrap());
    let asked = |script: &str| {
        let script = format!("cd $AT && python3 -c '\nimport os, time\n{script}'");
        asked(&world, "Stat", &script)
    };
    let after_a_pause = "
names = os.listdir(\"d\")
for place, name in enumerate(names):
    if place in (0, 2000): time.sleep(1.1)
    os.lstat(\"d/\" + name)";
    let while_listed = "
for place, entry in enumerate(os.scandir(\"d\")):
    if place in (1000, 2000): time.sleep(1.1)
    os.lstat(entry.path)";
    let by_the_open_directory = "
directory = os.open(\"d\", os.O_RDONLY)
for place, entry in enumerate(os.scandir(directory)):
    if place in (1000, 2000): time.sleep(1.1)
    os.lstat(entry.name, dir_fd=directory)";
    let in_the_working_directory = "
os.chdir(\"d\")
for place, name in enumerate(os.listdir(os.open(\".\", os.O_RDONLY))):
    if place == 2000: time.sleep(1.1)
    os.lstat(name)";
    for script in [after_a_pause, while_listed, by_the_open_directory, in_the_working_directory] {
        // On a busy machine, cached data may be too old when it is used.
        assert!((0..10).any(|_| asked(script) < NAMES / 10), "{script}");
    }
}

/// A program that knows the names from elsewhere gets a part of the directory, and then the next.
#[test]
fn names_in_an_order_of_their_own_are_asked_for_together_too() {
    if !have("python3") {
        return println!("SKIPPED names of long directories: there is no python3");
    }
    const NAMES: u64 = 6000;
    let world = World::new();
    fs::create_dir(world.local("served/d")).unwrap();
    (0..NAMES).for_each(|n| fs::write(world.local(&format!("served/d/{n}")), "").unwrap());
    let asked = |names: &str| {
        let look = format!("[os.path.lexists(\"d/%d\" % n) for n in {names}]");
        asked(&world, "Stat", &format!("cd $AT && python3 -c 'import os; {look}'"))
    };
    // On a busy machine, cached data may be too old when it is used.
    assert!((0..10).any(|_| asked("range(6000)") < NAMES / 3));
    // Missing names are requested one by one.
    assert!(asked("range(6000, 7000)") >= 1000);
}

/// From 10,000 names on, walkers would sort them by inode and request them one by one, if they did not know
/// that the file system is remote.
#[test]
fn walks_of_trees_take_names_in_the_order_in_which_they_are_listed() {
    const NAMES: u64 = 12_000;
    let world = World::new();
    fs::create_dir(world.local("served/d")).unwrap();
    (0..NAMES).for_each(|n| fs::write(world.local(&format!("served/d/{n}")), "").unwrap());
    for walk in ["find $AT/d -size +1k", "du -s $AT/d"] {
        assert!((0..10).any(|_| asked(&world, "Stat", walk) < NAMES / 10), "{walk}");
    }
}

/// Attributes from the listing of an open directory do not apply to a path that leads elsewhere by now.
#[test]
fn a_directory_that_took_the_place_of_a_listed_one_is_seen_after_a_second() {
    if !have("python3") {
        return println!("SKIPPED a directory in place of another: there is no python3");
    }
    let world = World::new();
    for (directory, text) in [("d", ""), ("new", "new")] {
        fs::create_dir(world.local(&format!("served/{directory}"))).unwrap();
        let write = |n| fs::write(world.local(&format!("served/{directory}/{n}")), text).unwrap();
        (0..6000).for_each(write);
    }
    let script = r#"cd $AT && python3 - $HERE/served <<'P'
import os, sys, time
served = sys.argv[1]
listing = os.scandir("d")
for _ in range(1000):
    assert os.lstat(next(listing).path).st_size == 0
os.rename(served + "/d", served + "/old")
os.rename(served + "/new", served + "/d")
time.sleep(1.1)
seen = [os.lstat(entry.path).st_size for entry in listing]
assert len(seen) == 5000, len(seen)
assert set(seen) == {3}, seen
P
exit $?"#;
    let output = under_run(&world, script);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Nor does it keep back what others hold, not even at the end of the program.
#[test]
fn what_a_mapping_holds_and_cannot_be_stored_is_told() {
    if !have("python3") {
        return println!("SKIPPED mappings of a full export: there is no python3");
    }
    let world = World::new();
    let script = r#"
import errno, mmap, os, sys
os.chdir(sys.argv[1])
def new(name):
    return os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
hole, other, full = new("hole"), new("other"), new("full")
os.ftruncate(hole, 4096)
os.write(other, b"." * 4096)
for count in 1 << 16, 4096:
    try:
        while os.write(full, bytes(count)):
            pass
    except OSError as error:
        print(errno.errorcode[error.errno])
lost, kept = mmap.mmap(hole, 4096), mmap.mmap(other, 4096)
lost[:4] = b"lost"
try:
    os.fsync(hole)
    print("stored")
except OSError as error:
    print(errno.errorcode[error.errno])
kept[:4] = b"kept"
sys.stdout.flush()
os._exit(0)"#;
    let prefix = world.local("at");
    let run = |command: &[&str]| {
        let output = Command::new(TOWLINE)
            .args(["run", "--at", &format!("{}={}", prefix.display(), world.url("small")), "--"])
            .args(command)
            .output()
            .unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{complaint}");
        String::from_utf8(output.stdout).unwrap()
    };
    let said = run(&["python3", "-c", script, prefix.to_str().unwrap()]);
    assert_eq!(said, "ENOSPC\n".repeat(3));
    let other = run(&["cat", prefix.join("other").to_str().unwrap()]);
    assert_eq!(&other[..5], "kept.");
}

/// What a mapping holds is not only written, but as safe as after `fsync`.
#[test]
fn a_mapping_that_is_flushed_is_synced() {
    if !have("python3") {
        return println!("SKIPPED mappings that are flushed: there is no python3");
    }
    let world = World::new();
    for kib in [4, 1024] {
        fs::write(world.local("served/f"), vec![b'x'; kib << 10]).unwrap();
        let store = "
import mmap
file = open(\"f\", \"r+b\")
map = mmap.mmap(file.fileno(), 0)
map[5] = 7";
        let asked =
            |more: &str| asked(&world, "Sync", &format!("cd $AT && python3 -c '{store}\n{more}'"));
        assert_eq!(asked("map.close()"), 0);
        assert_eq!(asked("map.flush()"), 1);
        assert_eq!(asked("map.flush(0, 4096); map.flush()"), 2);
    }
}

#[test]
fn little_that_was_stored_to_a_mapping_takes_one_request() {
    if !have("python3") {
        return println!("SKIPPED mappings that are stored to: there is no python3");
    }
    let world = World::new();
    fs::write(world.local("served/f"), vec![b'x'; 1 << 20]).unwrap();
    let script = "cd $AT && python3 -c '
import mmap
file = open(\"f\", \"r+b\")
map = mmap.mmap(file.fileno(), 0)
for page in range(0, 100, 10): map[page * 4096 + 7] = 7
map.flush()'";
    let others = || operations(&world, "Write");
    let before = others();
    assert_eq!(asked(&world, "WriteParts", script), 1);
    assert_eq!(others(), before);
    let written = fs::read(world.local("served/f")).unwrap();
    assert_eq!(written.iter().filter(|byte| **byte == 7).count(), 10);
}
