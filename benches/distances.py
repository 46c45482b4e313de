#!/usr/bin/env python3
"""Programs on files at a distance: under `towline run`, on a kernel NFS mount, and over sshfs.

  sudo python3 benches/distances.py [--towline PROGRAM] [--trip MS]... [--way WAY]... [--rounds N] [WORKLOAD ...]

The servers run in a network namespace of their own, behind a pair of interfaces that `netem` delays. That needs
root and the kernel's modules sch_netem and veth; NFS needs nfsd and nfs and Debian's nfs-kernel-server, sshfs its
usual programs. What is missing is said, and its column stays empty. NFS is served without state on disk
(/etc/exports and /var/lib/nfs are overwritten), so run it in a virtual machine or on one that serves nothing else.

Every workload begins with a fresh mount or run, so with cold caches on the client. All data is in memory. Figures
are seconds, medians of the rounds.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

import serving

CLIENT, SERVER = "10.9.0.1", "10.9.0.2"
SPACE = "towline-distances"
PORT, SSH_PORT = 7440, 2222

# `$D` is the remote directory, `$L` a local one; before each one `$D/new` is an empty directory.
WORKLOADS = {
    "write 4K (32M)": "dd if=/dev/zero of=$D/new/w bs=4k count=8192 conv=fsync",
    "write 128K (128M)": "dd if=/dev/zero of=$D/new/w bs=128k count=1024 conv=fsync",
    "write 1M (128M)": "dd if=/dev/zero of=$D/new/w bs=1M count=128 conv=fsync",
    "append 2000 lines": "exec >> $D/new/log; for n in $(seq 2000); do echo line $n; done",
    "append by >> 200": "for n in $(seq 200); do echo line $n >> $D/new/log; done",
    "cat 20 files": "for n in $(seq 0 19); do /bin/cat $D/tree/part0/sub0/file$n > /dev/null; done",
    "compile 8 C files": "cd $D/new; for n in $(seq 10); do echo \"int f$n(int);\" > h$n.h; done; for n in $(seq 8); do "
    "for h in $(seq 10); do echo \"#include \\\"h$h.h\\\"\"; done > c$n.c; cc -c c$n.c; done",
    "read 4K (32M)": "dd if=$D/big of=/dev/null bs=4k count=8192",
    "read 1M (128M)": "dd if=$D/big of=/dev/null bs=1M",
    "cp in (128M)": "cp $L/big $D/new/big",
    "cp -r in (200)": "cp -r $L/small $D/new",
    "tar x (200)": "tar xf $L/small.tar -C $D/new",
    "rsync -a in (200)": "rsync -a $L/small $D/new",
    "ls -lR (1200)": "ls -lR $D/tree",
    "find (1200)": "find $D/tree -type f",
    "grep -r (1200)": "grep -r 'nowhere to be found' $D/tree || true",
    "git status (1200)": "git -c safe.directory='*' -C $D/tree status",
    "rm -r (200)": "rm -r $D/copy",
    "sqlite 20 commits": "python3 -c \"import sqlite3; c = sqlite3.connect('$D/new/db', isolation_level=None); "
    "c.execute('create table t(a)'); [c.execute('insert into t values(1)') for _ in range(20)]\"",
}


def run(*command, **more):
    return subprocess.run(command, check=True, capture_output=True, text=True, **more)


def there(*command):
    """Runs a command on the servers' side."""
    return run("ip", "netns", "exec", SPACE, *command)


def make_files(root, directories, files, line):
    for number in range(directories * files):
        folder = root / f"part{number // files % 8}" / f"sub{number // files}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"file{number % files}").write_text(f"{line} {number}\n" * 150)


def prepare(served, local):
    make_files(served / "tree", 60, 20, "a line of")
    git = ["git", "-C", str(served / "tree"), "-c", "user.name=x", "-c", "user.email=x@x", "-c", "gc.auto=0"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        run(*git, *command)
    make_files(local / "small", 10, 20, "another line of")
    run("tar", "-C", str(local), "-cf", str(local / "small.tar"), "small")
    for place in (served, local):
        with open(place / "big", "wb") as file:
            for _ in range(128):
                file.write(os.urandom(1 << 20))


def join(stack):
    """Makes the namespace and the interfaces that join it with this one."""
    run("ip", "netns", "add", SPACE)
    stack.callback(subprocess.run, ["ip", "netns", "del", SPACE])
    run("ip", "link", "add", "distance0", "type", "veth", "peer", "name", "distance1", "netns", SPACE)
    for prefix, name, address in ((run, "distance0", CLIENT), (there, "distance1", SERVER)):
        prefix("ip", "address", "add", f"{address}/24", "dev", name)
        prefix("ip", "link", "set", name, "up")
    there("ip", "link", "set", "lo", "up")


def delay(trip):
    for prefix, name in ((run, "distance0"), (there, "distance1")):
        prefix("tc", "qdisc", "replace", "dev", name, "root", "netem", "delay", f"{trip / 2}ms", "limit", "200000")


class Towline:
    def __init__(self, stack, place, served, program):
        command = ["ip", "netns", "exec", SPACE, program, "serve", "--insecure", "--dir", f"d={served}"]
        command += ["--listen", f"tcp://{SERVER}:{PORT}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        self.prefix = [program, "run", "--at", f"/distance=towline+tcp://{SERVER}:{PORT}/d", "--"]

    def mount(self):
        return "/distance"

    def unmount(self):
        pass


class Mounted:
    """A file system that is mounted anew for each workload."""

    prefix = []

    def __init__(self, place, command):
        self.target = place / "mounted"
        self.target.mkdir(exist_ok=True)
        self.command = command

    def mount(self):
        run(*self.command, str(self.target))
        return str(self.target)

    def unmount(self):
        run("umount", str(self.target))


def nfs(stack, place, served, _):
    pathlib.Path("/etc/exports").write_text(f"{served} *(rw,no_root_squash,no_subtree_check,fsid=0,async)\n")
    for name in ("rpc_pipefs", "v4recovery"):
        os.makedirs(f"/var/lib/nfs/{name}", exist_ok=True)
    for name in ("etab", "rmtab"):
        pathlib.Path("/var/lib/nfs", name).touch()
    run("mount", "-t", "rpc_pipefs", "rpc_pipefs", "/var/lib/nfs/rpc_pipefs")
    # Each `ip netns exec` has mounts of its own; the last command of this one waits for the end.
    script = "mount -t nfsd nfsd /proc/fs/nfsd && rpcbind -w; echo 10 > /proc/fs/nfsd/nfsv4gracetime; exportfs -ra && "
    script += "rpc.mountd -N 3 && rpc.nfsd -N 3 -V 4.2 4 && echo up && cat; rpc.nfsd 0; exportfs -ua; killall rpc.mountd rpcbind"
    daemon = subprocess.Popen(
        ["ip", "netns", "exec", SPACE, "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    stack.callback(daemon.communicate)
    if daemon.stdout.readline() != "up\n":
        raise OSError("the kernel's NFS server does not start")
    time.sleep(11)  # Its period of grace, in which it opens nothing.
    return Mounted(place, ["mount", "-t", "nfs", "-o", "vers=4.2,proto=tcp", f"{SERVER}:/"])


def sshfs(stack, place, served, _):
    keys = place / "keys"
    keys.mkdir(mode=0o700)
    daemon = serving.start_sshd(keys, SERVER, SSH_PORT, ["ip", "netns", "exec", SPACE])
    stack.callback(daemon.wait)
    stack.callback(daemon.terminate)
    return Mounted(place, serving.sshfs_command(keys, SERVER, SSH_PORT, served))


WAYS = {"towline": Towline, "nfs": nfs, "sshfs": sshfs}


def measure(way, script, served, local, limit):
    for name in ("new", "copy"):
        shutil.rmtree(served / name, ignore_errors=True)
    (served / "new").mkdir()
    shutil.copytree(local / "small", served / "copy")
    there_is = way.mount()
    try:
        start = time.perf_counter()
        done = subprocess.run(
            [*way.prefix, "bash", "-c", script], capture_output=True, text=True, timeout=limit,
            env={**os.environ, "D": there_is, "L": str(local)},
        )
        taken = time.perf_counter() - start
    finally:
        way.unmount()
    if done.returncode != 0:
        raise SystemExit(f"{script}: status {done.returncode}: {done.stderr[-500:]}")
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", default="target/release/towline")
    parser.add_argument("--trip", type=float, action="append", help="a round trip, in ms (default 0.2, 1 and 20)")
    parser.add_argument("--way", action="append", choices=WAYS, help="only these (default all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=300, help="seconds that one workload may take")
    parser.add_argument("workload", nargs="*", help=f"of {', '.join(WORKLOADS)}")
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("distances: network namespaces and mounts need root")
    with contextlib.ExitStack() as outer, serving.Bench("distances", room=1 << 30) as bench:
        served, local = bench.place / "served", bench.place / "local"
        for directory in (served, local):
            directory.mkdir()
        prepare(served, local)
        join(outer)
        ways = {}
        for name in options.way or WAYS:
            try:
                ways[name] = WAYS[name](bench, bench.place, served, options.towline)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"SKIPPED: {name}: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
        time.sleep(1)
        result = {}
        for trip in options.trip or [0.2, 1, 20]:
            delay(trip)
            print(f"| {trip} ms | " + " | ".join(ways) + " |\n" + "|---" * (len(ways) + 1) + "|")
            for name in options.workload or WORKLOADS:
                times = {way: [] for way in ways}
                for _ in range(options.rounds):
                    for way, at in ways.items():
                        times[way].append(measure(at, WORKLOADS[name], served, local, options.limit))
                middle = {way: statistics.median(taken) for way, taken in times.items()}
                result[f"{trip} ms, {name}"] = middle
                print(f"| {name} | " + " | ".join(f"{middle[way]:.3f} s" for way in ways) + " |", flush=True)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
