//! `towline run`: walks of trees of a far server, which open directories before the program does.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;
use support::far::{Far, Meant, far_away};
use support::{TOWLINE, World, have, under_run};
use towline_wire::Request;

/// Makes the server far: opening a directory takes long. Returns whether it is one that was not asked for yet.
fn is_early(requests: &[Request<'_>]) -> bool {
    match requests {
        [Request::Open { .. }, Request::ReadDir { .. }, ..] => {
            std::thread::sleep(Duration::from_millis(10));
            false
        }
        [Request::Open { .. }, Request::Bind { bound: 1, .. }, Request::ReadDir { .. }] => true,
        _ => false,
    }
}

/// Returns what a program in Python prints that runs behind this proxy; it must succeed.
fn python(world: &World, far: &Far, text: &str) -> String {
    let output = far_away(world, far, &["python3", "-c", &format!("{PYTHON}{text}")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Directories are listed by their descriptors, as walkers do.
const PYTHON: &str = "
import os, subprocess
at = os.environ['AT']
def listed(path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    names = sorted(os.listdir(fd))
    os.close(fd)
    return names
def directories(path):
    return [path + '/' + name for name in listed(path)]
";

/// Makes a tree of `width` directories with as many in each, and a file in each of these.
fn tree(world: &World, width: usize) {
    for above in 0..width {
        for below in 0..width {
            let directory = world.local(&format!("served/t/{above:02}/{below:02}"));
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("file"), "x").unwrap();
        }
    }
}

#[test]
fn directories_of_far_trees_are_opened_together() {
    let world = World::new();
    tree(&world, 6);
    let lines = |text: &[u8]| {
        let text = String::from_utf8_lossy(text).replace(world.local("at").to_str().unwrap(), "");
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    for walk in [&["ls", "-R"][..], &["find"]] {
        let is_together = || {
            let far = Far::new(&world, 3, is_early);
            let tree = format!("{}/t", world.local("at").display());
            let output = far_away(&world, &far, &[walk, &[&tree]].concat());
            let complaint = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{complaint}");
            let local = Command::new(walk[0])
                .args(&walk[1..])
                .arg(world.local("served/t"))
                .output()
                .unwrap()
                .stdout;
            let local = String::from_utf8(local).unwrap();
            let local = local.replace(world.local("served").to_str().unwrap(), "");
            assert_eq!(lines(&output.stdout), lines(local.as_bytes()));
            far.came_together()
        };
        // On a busy machine, they may be too old when they are used.
        assert!((0..3).any(|_| is_together()), "{walk:?}");
    }
}

/// A program that ends its walk in the middle does not keep open what it has not opened.
#[test]
fn what_a_walk_does_not_take_is_closed() {
    if !have("python3") {
        return println!("SKIPPED walks that end early: there is no python3");
    }
    let world = World::new();
    tree(&world, 6);
    let far = Far::new(&world, 1, is_early);
    let script = format!(
        "{PYTHON}
for above in directories(at + '/t')[:3]:
    for below in directories(above):
        listed(below)
print('ended', flush=True)
while os.path.exists(os.environ['HERE'] + '/goes on'):
    open(at + '/other').close()
"
    );
    fs::write(world.local("goes on"), "").unwrap();
    fs::write(world.local("served/other"), "").unwrap();
    let at = world.local("at");
    let prefix = format!("{}={}", at.display(), far.url("dir"));
    let mut program = Command::new(TOWLINE)
        .args(["run", "--at", &prefix, "--", "python3", "-c", &script])
        .envs([("AT", &at), ("HERE", &world.path)])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ended\n");
    assert!(far.came_together(), "nothing was opened ahead");
    // The server itself keeps the directories open for a while through which the last paths led.
    let walked = ["", "00", "01", "02"].map(|name| world.local("served/t").join(name));
    support::wait_until("nothing is open on the server that was not opened", || {
        let all = fs::read_dir(format!("/proc/{}/fd", world.server_id())).unwrap().flatten();
        let mut paths = all.filter_map(|fd| fs::read_link(fd.path()).ok());
        !paths.any(|path| path.starts_with(&walked[0]) && !walked.contains(&path))
    });
    fs::remove_file(world.local("goes on")).unwrap();
    assert!(program.wait().unwrap().success());
}

/// Nobody waits for a near server, so nothing is requested that the program may not want.
#[test]
fn directories_of_near_trees_are_opened_when_they_are_wanted() {
    let world = World::new();
    tree(&world, 6);
    let operations = |kind: &str| {
        let command = ["stats", "--json", &world.url("")];
        let output = Command::new(TOWLINE).args(command).output().unwrap();
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        told["operations"][kind].as_u64().unwrap_or(0)
    };
    let asked = || {
        let before = ["Open", "Bind"].map(operations);
        let output = under_run(&world, "ls -R $AT/t; exit $?");
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        (operations("Open") - before[0], operations("Bind") - before[1])
    };
    // On a busy machine, it may seem far.
    assert!((0..10).any(|_| matches!(asked(), (..=44, 0))));
}

/// What processes of the run change is seen, whatever was requested before.
#[test]
fn walks_of_far_trees_see_what_the_run_changes() {
    if !have("python3") {
        return println!("SKIPPED changes during walks: there is no python3");
    }
    let world = World::new();
    let early = |text: &str| {
        let _ = fs::remove_dir_all(world.local("served/t"));
        tree(&world, 8);
        // Far enough to open directories before; nothing is held back.
        let far = Far::new(&world, 1, is_early);
        python(&world, &far, text);
        far.came_together()
    };
    let by_itself = "
for n, path in enumerate(sorted(directories(at + '/t'))):
    for m, below in enumerate(directories(path)):
        assert listed(below) == (['file', 'new'] if m % 3 == 1 else ['file']), below
        if m % 3 == 0:
            os.close(os.open(below[:-2] + '%02d/new' % (m + 1), os.O_CREAT | os.O_WRONLY))
";
    let by_others = "
for n, path in enumerate(sorted(directories(at + '/t'))):
    for m, below in enumerate(directories(path)):
        assert listed(below) == ([] if m == 5 else ['file']), below
        if m == 4:
            subprocess.run(['rm', below[:-2] + '05/file'], check=True)
";
    // The parent goes on with what it has requested, the child does not touch that.
    let with_children = "
for n, path in enumerate(sorted(directories(at + '/t'))):
    for m, below in enumerate(directories(path)):
        if m == 3:
            child = os.fork()
            if child == 0:
                assert [listed(one) for one in directories(path)] == [['file']] * 8
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            subprocess.run(['true'], check=True)
        assert listed(below) == ['file'], below
";
    for text in [by_itself, by_others, with_children] {
        assert!((0..3).any(|_| early(text)), "nothing was requested before");
    }
}

/// A name that is removed leaves alone what is known of other directories, but nothing that it concerns.
#[test]
fn attributes_in_far_trees_are_right_after_a_name_was_removed() {
    if !have("python3") {
        return println!("SKIPPED attributes of removed names: there is no python3");
    }
    let world = World::new();
    for name in ["a", "b", "c"] {
        fs::create_dir_all(world.local(&format!("served/t/{name}/sub"))).unwrap();
        for file in 0..20 {
            fs::write(world.local(&format!("served/t/{name}/{file}")), "").unwrap();
        }
    }
    fs::hard_link(world.local("served/t/a/0"), world.local("served/t/b/link")).unwrap();
    let far = Far::new(&world, 1, |requests| {
        let _ = is_early(requests);
        true
    });
    let text = "
root = os.open(at + '/t', os.O_RDONLY)
a, b, c = [os.open(name, os.O_RDONLY, dir_fd=root) for name in 'abc']
def look():
    for fd in a, b, c, root:
        for name in os.listdir(fd):
            os.stat(name, dir_fd=fd)
def links(name, fd):
    return os.stat(name, dir_fd=fd).st_nlink
def missing(name, fd):
    try:
        os.stat(name, dir_fd=fd)
    except FileNotFoundError:
        return True
listed(at + '/t')
look(), look()
assert (links('link', b), links('0', a), links('a', root), links('b', root)) == (2, 2, 3, 3)
os.unlink('0', dir_fd=a)
assert missing('0', a) and links('link', b) == 1 and not missing('1', a)
look(), look()
before = os.stat('b', dir_fd=root).st_mtime_ns
os.rmdir('sub', dir_fd=b)
assert missing('sub', b) and not missing('sub', a)
assert links('b', root) == 2 and os.stat('b', dir_fd=root).st_mtime_ns != before
assert links('a', root) == 3 and os.stat('b', dir_fd=root).st_ino == os.fstat(b).st_ino
look()
os.rmdir('sub', dir_fd=c)
os.mkdir('sub', dir_fd=c)
assert links('c', root) == 3 and not missing('sub', c)
";
    python(&world, &far, text);
}

/// `rm` opens each directory twice, and asks for its attributes.
#[test]
fn removing_far_trees_takes_few_requests() {
    let world = World::new();
    const DIRECTORIES: usize = 20;
    let is_meant: Meant = |requests| {
        let _ = is_early(requests);
        matches!(requests, [Request::Unlink { .. }])
    };
    let requests = || {
        for name in 0..DIRECTORIES {
            fs::create_dir_all(world.local(&format!("served/t/{name}"))).unwrap();
            fs::write(world.local(&format!("served/t/{name}/file")), "").unwrap();
        }
        let far = Far::new(&world, 1, is_meant);
        let tree = format!("{}/t", world.local("at").display());
        let output = far_away(&world, &far, &["rm", "-r", &tree]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(!world.local("served/t").exists());
        far.requests()
    };
    // Without the rest, five for each directory. On a busy machine, what was requested before may be too old.
    assert!((0..5).any(|_| requests() < 4 * DIRECTORIES));
}
