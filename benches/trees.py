#!/usr/bin/env python3
"""Programs on a remote tree of 20,000 files: under `towline run`, over sshfs, and locally.

  sudo python3 benches/trees.py [--towline PROGRAM] [--files N] [--rounds N] [WORKLOAD ...]

Everything runs on this machine, remote means TCP loopback for both. sshd and sshfs are set up for the
time of the run, which needs root, the programs and /dev/fuse; where they are missing, that is said and the
column stays empty. The tree is on tmpfs if there is room. Workloads run in turns, local, towline, sshfs,
and the figures are medians: compare within one run only, machines and neighbours differ.
"""

import argparse
import json
import os
import pathlib
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import serving

MODULES = "asyncio, http.server, xml.dom.minidom, email.mime.text, unittest, logging.config, sqlite3, concurrent.futures"


def source(seed, number):
    """Returns text like that of a program, 0.5 to 12 KB, the same each time."""
    words = ["int", "static", "return", "if", "for", "struct", "buffer", "length", "offset", "{", "}", ";", "(", ")"]
    chance = random.Random(f"{seed}/{number}")
    lines = []
    for _ in range(chance.randint(12, 260)):
        lines.append(" ".join(chance.choice(words) for _ in range(chance.randint(2, 12))))
    return "\n".join(lines) + "\n"


def make_tree(root, files):
    """Makes a git repository of `files` files, twenty in each directory, and a copy of Python's library."""
    tree = root / "tree"
    for number in range(files):
        folder = tree / f"part{number // 400:03}" / f"sub{number // 20 % 20:02}"
        if number % 20 == 0:
            folder.mkdir(parents=True)
        (folder / f"file{number % 20:02}.c").write_text(source("tree", number))
    # Otherwise git runs maintenance in the background and takes CPU from the measurement.
    git = ["git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@x", "-c", "gc.auto=0", "-c", "maintenance.auto=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run(git + command, check=True, stdout=subprocess.DEVNULL)
    # The modules that `python import` loads.
    library = pathlib.Path(json.__file__).parent.parent
    shutil.copytree(
        library, root / "python", symlinks=True,
        ignore=shutil.ignore_patterns("site-packages", "dist-packages", "test", "tests", "idlelib", "config-*"),
    )
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(root / "python")], stdout=subprocess.DEVNULL)


def make_archive(path, files):
    # Stays local to the client: only the unpacked files are remote.
    with tempfile.TemporaryDirectory() as place:
        for number in range(files):
            folder = pathlib.Path(place) / "src" / f"part{number // 20:03}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"file{number % 20:02}.c").write_text(source("archive", number))
        subprocess.run(["tar", "-C", place, "-cf", str(path), "src"], check=True)


def workloads(archive):
    """Returns the workloads by name: functions that return the command for a root directory."""
    imports = f"import sys; sys.path.insert(0, {{root!r}} + '/python'); import {MODULES}"
    return {
        "git status": lambda root: ["git", "-C", f"{root}/tree", "status", "--short"],
        "ls -lR": lambda root: ["ls", "-lR", f"{root}/tree"],
        "grep -r": lambda root: ["grep", "-rc", "nowhere to be found", f"{root}/tree"],
        "tar x": lambda root: ["sh", "-c", f"mkdir {root}/x && tar -xf {archive} -C {root}/x"],
        "rm -r": lambda root: ["rm", "-r", f"{root}/x"],
        "python import": lambda root: [sys.executable, "-S", "-B", "-c", imports.format(root=root)],
    }


class Sshfs:
    """An sshd on loopback and an sshfs mount through it. `why` says why there is none."""

    def __init__(self, place, served):
        self.mounted = None
        self.daemon = None
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        missing = [p for p in ("sshfs", "ssh-keygen", "fusermount3") if not shutil.which(p)]
        if os.geteuid() != 0:
            self.why = "not root"
        elif missing or not os.path.exists(sshd):
            self.why = f"not installed: {', '.join(missing) or 'sshd'}"
        elif not os.path.exists("/dev/fuse"):
            self.why = "no /dev/fuse"
        else:
            self.why = self.start(place, served)

    def start(self, place, served):
        port = serving.free_port()
        self.daemon = serving.start_sshd(place, "127.0.0.1", port)
        serving.wait_for(port, self.daemon)
        target = place / "sshfs"
        target.mkdir()
        mount = serving.sshfs_command(place, "127.0.0.1", port, served)
        done = subprocess.run([*mount, target], capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            return f"sshfs: {done.stderr.strip()}"
        self.mounted = target
        return None

    def stop(self):
        if self.mounted:
            subprocess.run(["fusermount3", "-u", "-z", self.mounted])
        if self.daemon:
            self.daemon.terminate()
            self.daemon.wait()


def timed(command, limit):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=limit, stdin=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # grep exits with 1 because it finds nothing, as intended.
    if done.returncode not in (0, 1) or (done.returncode == 1 and b"grep" not in str(command).encode()):
        raise SystemExit(f"{command}: status {done.returncode}: {done.stderr.decode(errors='replace')[:500]}")
    return wall, cpu, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", default="target/release/towline")
    parser.add_argument("--files", type=int, default=20000)
    parser.add_argument("--archive", type=int, default=2000, help="files in the archive for tar (default 2000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-sshfs", action="store_true")
    parser.add_argument("--limit", type=int, default=900, help="seconds that one program may take")
    parser.add_argument("workload", nargs="*")
    options = parser.parse_args()
    with serving.Bench("trees", room=2 << 30) as bench:
        place = bench.place
        served = place / "served"
        served.mkdir()
        print(f"making {options.files} files in {served}", file=sys.stderr)
        make_tree(served, options.files)
        archive = place / "source.tar"
        make_archive(archive, options.archive)
        _, port = bench.serve(options.towline, served)
        run = [options.towline, "run", "--at", f"/towline-tree=towline+tcp://127.0.0.1:{port}/d", "--"]
        ways = [("local", [], str(served)), ("towline", run, "/towline-tree")]
        if options.no_sshfs:
            print("sshfs: left out as asked", file=sys.stderr)
        else:
            sshfs = Sshfs(place, served)
            bench.callback(sshfs.stop)
            if sshfs.why:
                print(f"SKIPPED: sshfs: {sshfs.why}", file=sys.stderr)
            else:
                ways.append(("sshfs", [], str(sshfs.mounted)))
        known = workloads(archive)
        chosen = options.workload or list(known)
        times = {(name, way): [] for name in chosen for way, _, _ in ways}
        for turn in range(options.rounds):
            # All workloads of one way before the next: rm -r removes what tar x made.
            for way, prefix, root in ways:
                for name in chosen:
                    wall, cpu, _ = timed(prefix + known[name](root), options.limit)
                    times[name, way].append((wall, cpu))
                    print(f"  {turn} {way:8} {name:14} {wall:8.3f} s, CPU of the program {cpu:7.3f} s", file=sys.stderr)
        result = {}
        print(f"| {options.files} files | " + " | ".join(way for way, _, _ in ways) + " | towline / local | sshfs / towline |")
        print("|---" * (len(ways) + 3) + "|")
        for name in chosen:
            middle = {way: statistics.median(wall for wall, _ in times[name, way]) for way, _, _ in ways}
            result[name] = middle
            times_local = f"{middle['towline'] / middle['local']:.2f}"
            faster = f"{middle['sshfs'] / middle['towline']:.1f}" if "sshfs" in middle else ""
            print(f"| {name} | " + " | ".join(f"{middle[way]:.3f} s" for way, _, _ in ways) + f" | {times_local} | {faster} |")
        print(json.dumps(result))


if __name__ == "__main__":
    main()
