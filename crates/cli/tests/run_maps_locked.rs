//! `towline run`: mappings of files that programs of several runs store to, mostly under locks. Each run has its
//! own memory for a mapping, as if it were on another machine.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use support::{TOWLINE, World};

/// The remote directory's path for the programs; it does not exist locally.
const PREFIX: &str = "/towline-maps-test";

/// A Python program under `run`.
struct Program {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Program {
    /// Starts a script with these arguments. The same server is behind another prefix, too.
    fn start(world: &World, script: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(TOWLINE)
            .args(["run", "--at", &format!("{PREFIX}-other={}", world.url("mem"))])
            .args(["--at", &format!("{PREFIX}={}", world.url("dir"))])
            .args(["--", "python3", "-c", script])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, said }
    }

    /// Returns the next line that it prints.
    fn says(&mut self) -> String {
        self.said.next().unwrap().unwrap()
    }

    /// Lets it go on that waits for a line.
    fn go_on(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Waits until it ends, which must be without an error.
    fn end(mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

/// Runs a script in several runs, each with the name and one of the numbers as its arguments. Each prints a line,
/// and goes on once all have done so.
fn run_together<const RUNS: usize>(world: &World, script: &str, name: &str, numbers: [u8; RUNS]) {
    let start = |number: u8| Program::start(world, script, &[name, &number.to_string()]);
    let mut programs = numbers.map(start);
    for program in &mut programs {
        program.says();
    }
    for program in &mut programs {
        program.go_on();
    }
    for program in programs {
        program.end();
    }
}

#[test]
fn runs_that_lock_a_file_share_its_mapping() {
    const ROUNDS: u64 = 100;
    let world = World::new();
    let script = format!(
        "import fcntl, mmap, struct, sys\n\
         file = open('{PREFIX}/' + sys.argv[1], 'r+b')\n\
         writes = open(file.name, 'ab')\n\
         memory, own = mmap.mmap(file.fileno(), 0), int(sys.argv[2])\n\
         def count(at, form='<Q'):\n\
         \x20   struct.pack_into(form, memory, at, struct.unpack_from(form, memory, at)[0] + 1)\n\
         print(flush=True)\n\
         input()\n\
         for _ in range({ROUNDS}):\n\
         \x20   fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)\n\
         \x20   count(0)\n\
         \x20   fcntl.lockf(file, fcntl.LOCK_UN, 1, 0)\n\
         \x20   fcntl.lockf(file, fcntl.LOCK_EX, 1, own)\n\
         \x20   count(own, 'B')\n\
         \x20   fcntl.lockf(file, fcntl.LOCK_UN, 1, own)\n\
         \x20   fcntl.flock(file, fcntl.LOCK_EX)\n\
         \x20   count(16)\n\
         \x20   fcntl.flock(file, fcntl.LOCK_UN)\n\
         \x20   fcntl.lockf(writes, fcntl.LOCK_EX, 1, 24)\n\
         \x20   count(24)\n\
         \x20   fcntl.lockf(writes, fcntl.LOCK_UN, 1, 24)\n"
    );
    // The second one is read when it is touched, where that is possible.
    for (name, length) in [("small", 4096), ("large", 1 << 20)] {
        let path = world.local("served").join(name);
        fs::File::create(&path).unwrap().set_len(length).unwrap();
        run_together(&world, &script, name, [8, 9]);
        let counted = fs::read(&path).unwrap();
        let word = |at: usize| u64::from_le_bytes(counted[at..at + 8].try_into().unwrap());
        assert_eq!([0, 16, 24].map(word), [2 * ROUNDS; 3], "{name}");
        assert_eq!(counted[8..10], [ROUNDS as u8; 2], "{name}");
    }
}

/// What one stores to a page does not undo what another one stores to the rest of it.
#[test]
fn runs_that_store_to_parts_of_a_page_without_locks_keep_them_all() {
    let world = World::new();
    let script = format!(
        "import mmap, sys\n\
         file, own = open('{PREFIX}/' + sys.argv[1], 'r+b'), int(sys.argv[2])\n\
         memory = mmap.mmap(file.fileno(), 0)\n\
         assert memory[:4096] == bytes(4096)\n\
         print(flush=True)\n\
         input()\n\
         memory[own * 100:own * 100 + 50] = bytes([own] * 50)\n\
         memory.flush()\n"
    );
    // The second one is read when it is touched, where that is possible.
    for (name, length) in [("small", 4096), ("large", 1 << 20)] {
        let path = world.local("served").join(name);
        fs::File::create(&path).unwrap().set_len(length).unwrap();
        run_together(&world, &script, name, [1, 2, 3]);
        let stored = fs::read(&path).unwrap();
        for own in [1, 2, 3] {
            assert_eq!(stored[own * 100..][..50], [own as u8; 50], "{name}");
            assert_eq!(stored[own * 100 + 50..][..50], [0; 50], "{name}");
        }
    }
}

/// The memory of the mapping is that of the process that mapped it first.
#[test]
fn a_process_that_locks_before_it_maps_sees_what_another_run_has_stored() {
    let world = World::new();
    fs::write(world.local("served/file"), [1; 4096]).unwrap();
    let script = |script: &str| {
        format!(
            "import fcntl, mmap, subprocess, sys\n\
             file = open('{PREFIX}/file', 'r+b')\n\
             def lock(kind): fcntl.lockf(file, kind, 1, 0)\n\
             {script}"
        )
    };
    let child = script(
        "lock(fcntl.LOCK_EX)\n\
         print(mmap.mmap(file.fileno(), 0)[5], flush=True)\n",
    );
    let first = script(&format!(
        "memory = mmap.mmap(file.fileno(), 0)\n\
         print(memory[5], flush=True)\n\
         input()\n\
         subprocess.run([sys.executable, '-c', {child:?}], check=True)\n"
    ));
    let mut first = Program::start(&world, &first, &[]);
    assert_eq!(first.says(), "1");
    let other = script(
        "memory = mmap.mmap(file.fileno(), 0)\n\
         lock(fcntl.LOCK_EX)\n\
         memory[5] = 7\n\
         lock(fcntl.LOCK_UN)\n",
    );
    Program::start(&world, &other, &[]).end();
    first.go_on();
    assert_eq!(first.says(), "7");
    first.end();
}

/// As if it had been killed on the server's machine: it is there for whoever locks the file next, and does not
/// come again after that.
#[test]
fn what_a_killed_process_stored_under_a_lock_is_written_before_the_lock_goes() {
    let world = World::new();
    let script = |script: &str| {
        format!(
            "import fcntl, mmap, signal, subprocess, sys\n\
             file = open('{PREFIX}/' + sys.argv[1], 'r+b')\n\
             memory = mmap.mmap(file.fileno(), 0)\n\
             def lock(kind): getattr(fcntl, sys.argv[2])(file, kind)\n\
             {script}"
        )
    };
    let killed = script(
        "lock(fcntl.LOCK_EX)\n\
         memory[5] = 17\n\
         print('stored', flush=True)\n\
         signal.pause()\n",
    );
    let first = script(&format!(
        "killed = subprocess.Popen([sys.executable, '-c', {killed:?}, *sys.argv[1:]])\n\
         input()\n\
         killed.kill()\n\
         killed.wait()\n\
         input()\n\
         memory.close()\n\
         file.close()\n"
    ));
    let other = script(
        "print('waits', flush=True)\n\
         lock(fcntl.LOCK_EX)\n\
         print(memory[5], flush=True)\n\
         memory[5] = 34\n\
         lock(fcntl.LOCK_UN)\n",
    );
    // The second file is read when it is touched, where that is possible.
    for (name, length) in [("small", 4096), ("large", 1 << 20)] {
        for kind in ["lockf", "flock"] {
            let path = world.local("served").join(name);
            fs::write(&path, vec![1; length]).unwrap();
            let mut first = Program::start(&world, &first, &[name, kind]);
            assert_eq!(first.says(), "stored");
            let mut other = Program::start(&world, &other, &[name, kind]);
            assert_eq!(other.says(), "waits");
            first.go_on();
            assert_eq!(other.says(), "17", "{name} {kind}");
            other.end();
            first.go_on();
            first.end();
            assert_eq!(fs::read(&path).unwrap()[5], 34, "{name} {kind}");
        }
    }
}

/// SQLite begins to read like that in WAL mode, with longer and longer sleeps.
#[test]
fn a_mapping_is_new_after_a_sleep_between_looks_that_differed() {
    let world = World::new();
    fs::write(world.local("served/file"), [0; 4096]).unwrap();
    let script = |script: &str| {
        format!(
            "import fcntl, mmap, os, sys, time\n\
             file = open('{PREFIX}/file', 'r+b')\n\
             memory = mmap.mmap(file.fileno(), 0)\n\
             {script}"
        )
    };
    let writes = script(
        "import threading\n\
         ends = threading.Thread(target=input)\n\
         ends.start()\n\
         print(flush=True)\n\
         while ends.is_alive():\n\
         \x20   fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)\n\
         \x20   memory[:8] = (int.from_bytes(memory[:8], 'little') + 1).to_bytes(8, 'little')\n\
         \x20   fcntl.lockf(file, fcntl.LOCK_UN, 1, 0)\n\
         \x20   time.sleep(0.005)\n",
    );
    let looks = script(
        "for _ in range(200):\n\
         \x20   time.sleep(0.05)\n\
         \x20   before = memory[:8]\n\
         \x20   fcntl.lockf(file, fcntl.LOCK_SH, 1, 1)\n\
         \x20   after = memory[:8]\n\
         \x20   fcntl.lockf(file, fcntl.LOCK_UN, 1, 1)\n\
         \x20   if before == after: break\n\
         else: sys.exit('each look differed')\n",
    );
    let mut writes = Program::start(&world, &writes, &[]);
    writes.says();
    Program::start(&world, &looks, &[]).end();
    writes.go_on();
    writes.end();
}

/// Opening a file asks the server, and so does mapping it, also if another mapping keeps older pages.
#[test]
fn a_new_mapping_shows_what_others_have_stored() {
    let world = World::new();
    let script = format!(
        "import mmap, os, subprocess, sys\n\
         def map():\n\
         \x20   file = open('{PREFIX}/' + sys.argv[1], 'r+b')\n\
         \x20   return mmap.mmap(file.fileno(), 0, access=getattr(mmap, sys.argv[2]))\n\
         if len(sys.argv) > 3:\n\
         \x20   print(map()[4097], flush=True)\n\
         else:\n\
         \x20   first = map()\n\
         \x20   if first[0] == 1 and sys.argv[2] == 'ACCESS_WRITE': first[8191] = 7\n\
         \x20   print(first[4097], flush=True)\n\
         \x20   input()\n\
         \x20   subprocess.run([*sys.orig_argv, 'child'], check=True)\n\
         \x20   print(map()[4097], first[4097], first[8191], flush=True)\n"
    );
    // The second file is read when it is touched, where that is possible.
    for (name, length) in [("small", 3 * 4096), ("large", 1 << 20)] {
        for (access, stored) in [("ACCESS_READ", 1), ("ACCESS_WRITE", 7)] {
            let path = world.local("served").join(name);
            fs::write(&path, vec![1; length]).unwrap();
            let mut program = Program::start(&world, &script, &[name, access]);
            assert_eq!(program.says(), "1");
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.write_all_at(&[2; 10], 4090).unwrap();
            program.go_on();
            assert_eq!(program.says(), "2", "{name} {access}");
            assert_eq!(program.says(), format!("2 2 {stored}"), "{name} {access}");
            program.end();
        }
    }
}
