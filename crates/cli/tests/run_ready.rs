//! `towline run`: connections to a far server that are made before processes need them.

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use support::far::Far;
use support::{TOWLINE, World, have, keeper, wait_until};

/// A shell under `run`, far from the server.
struct Shell {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Shell {
    fn start(world: &World, far: &Far) -> Self {
        let at = world.local("at");
        let prefix = format!("{}={}", at.display(), far.url("dir"));
        let mut child = Command::new(TOWLINE)
            .args(["run", "--at", &prefix, "--", "sh"])
            .env("AT", at)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, input, lines }
    }

    /// Runs a command line and returns its output.
    fn run(&mut self, line: &str) -> Vec<String> {
        writeln!(self.input, "{line}\necho .").unwrap();
        self.lines.by_ref().map(Result::unwrap).take_while(|line| line != ".").collect()
    }

    /// Has a process of its own read a file, which must contain `x`.
    fn read(&mut self) {
        assert_eq!(self.run("cat $AT/f"), ["x"]);
    }

    /// Reads until a process has got a connection that was ready.
    fn read_until_handed_over(&mut self, world: &World) {
        let before = handed_over(world);
        wait_until("a connection is ready", || {
            self.read();
            handed_over(world) > before
        });
    }

    fn end(self) {
        let Self { mut child, input, .. } = self;
        drop(input);
        assert!(child.wait().unwrap().success());
    }
}

/// A world with a file, and the way to it.
fn world() -> (World, Far) {
    let world = World::new();
    fs::write(world.local("served/f"), "x\n").unwrap();
    let far = Far::new(&world, 1, |_| false);
    (world, far)
}

fn count(world: &World, group: &str, name: &str) -> u64 {
    let output = Command::new(TOWLINE).args(["stats", "--json", &world.url("")]).output().unwrap();
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    told[group][name].as_u64().unwrap_or(0)
}

/// Returns how many connections processes have got.
fn handed_over(world: &World) -> u64 {
    count(world, "operations", "HandOver")
}

fn signal(name: &str, process: &str) {
    assert!(Command::new("kill").args([name, process]).status().unwrap().success());
}

#[test]
fn processes_get_connections_that_are_ready() {
    let (world, far) = world();
    let mut shell = Shell::start(&world, &far);
    shell.read_until_handed_over(&world);
    // However many need one at once.
    let many = "for i in 1 2 3 4 5 6 7 8 9 10; do cat $AT/f & done; wait";
    assert_eq!(shell.run(many), ["x"; 10]);
    shell.read_until_handed_over(&world);
    shell.end();
    // None is left behind. One session asks.
    wait_until("all sessions have ended", || count(&world, "counters", "sessions") == 1);
}

#[test]
fn a_near_server_is_not_asked_for_connections_that_nobody_needs() {
    let world = World::new();
    fs::write(world.local("served/f"), "x\n").unwrap();
    let script = "for i in 1 2 3 4 5; do cat $AT/f; done";
    let at = world.local("at");
    let prefix = format!("{}={}", at.display(), world.through("unix", "dir"));
    let mut command = Command::new(TOWLINE);
    command.args(["run", "--at", &prefix, "--", "sh", "-c", script]).env("AT", at);
    assert_eq!(command.output().unwrap().stdout, b"x\nx\nx\nx\nx\n");
    assert_eq!(handed_over(&world), 0);
}

/// Without the keeper, each process connects by itself.
#[test]
fn processes_go_on_while_their_keeper_is_stopped_and_when_it_was_killed() {
    let (world, far) = world();
    let mut shell = Shell::start(&world, &far);
    shell.read_until_handed_over(&world);
    let keeper = keeper(shell.child.id()).unwrap();
    signal("-STOP", &keeper);
    (0..30).for_each(|_| shell.read());
    signal("-CONT", &keeper);
    shell.read_until_handed_over(&world);
    signal("-KILL", &keeper);
    (0..30).for_each(|_| shell.read());
    shell.end();
}

#[test]
fn connections_that_were_lost_while_they_waited_are_replaced() {
    let (mut world, far) = world();
    let mut shell = Shell::start(&world, &far);
    shell.run("exec 3< $AT/f");
    shell.read_until_handed_over(&world);
    for _ in 0..3 {
        world.restart();
        // With a handle from before.
        assert_eq!(shell.run("cat /dev/fd/3"), ["x"]);
        shell.read();
    }
    shell.read_until_handed_over(&world);
    shell.end();
}

/// The server hears of the end of each process that had a lock.
#[test]
fn locks_of_processes_that_were_killed_go() {
    if !have("python3") {
        return;
    }
    let (world, far) = world();
    let mut shell = Shell::start(&world, &far);
    shell.read_until_handed_over(&world);
    let locks = |end: &str| {
        format!(
            "python3 -c 'import fcntl, os; fcntl.lockf(open(\"'$AT'/f\", \"r+\"), fcntl.LOCK_EX); \
             print(os.getpid(), flush=True); {end}'"
        )
    };
    for _ in 0..5 {
        let killed = shell.run(&locks("os.kill(os.getpid(), 9)"));
        let next = shell.run(&locks(""));
        assert_eq!((killed.len(), next.len()), (1, 1), "{killed:?}, {next:?}");
    }
    shell.end();
}

/// A server on its own machine knows a client by its user, and in another network namespace it may be another server.
#[test]
fn other_users_and_network_namespaces_connect_by_themselves() {
    let root = rustix::process::geteuid().is_root();
    if !root || !have("setpriv") || !have("unshare") {
        println!("SKIPPED: only root can become somebody else");
        return;
    }
    let (world, far) = world();
    let mut shell = Shell::start(&world, &far);
    shell.read_until_handed_over(&world);
    let before = handed_over(&world);
    let other = "setpriv --reuid 1234 --clear-groups cat $AT/f";
    (0..5).for_each(|_| assert_eq!(shell.run(other), ["x"]));
    // The loopback interface of the new namespace is down.
    let elsewhere = "timeout 1 unshare -n cat $AT/f 2>/dev/null || echo none";
    assert_eq!(shell.run(elsewhere), ["none"]);
    assert!(handed_over(&world) <= before + 1, "only the one that the second process has refused");
    shell.end();
}
