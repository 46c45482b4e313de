#!/usr/bin/env python3
"""Measures Towline's disks against their goals, beside nbdkit, nbd-server, qemu-nbd and the limit of the machine, in turns.

    benches/disk_goals.py [--towline PROGRAM] [--rounds N] [--secs S] [--dir DIR] [--json FILE] [--boost] [ROW ...]

Needs two processors and about 1 GiB in /dev/shm; peers that are not installed are left out. --dir is on the disk whose
cached file the sequential row reads, and that the interference row reads. --boost (root): servers and clients run in real
time, before whatever else works on this machine, which nearly stands still for those minutes.
All systems get the same client, `towline bench disk --nbd`; what is said of shared memory is our own protocol and client.
"""
import argparse
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

SIZE = 256 << 20
PEERS = {"nbdkit memory": "nbdkit", "nbdkit file": "nbdkit", "nbd-server": "nbd-server", "qemu-nbd": "qemu-nbd"}
LATENCY, BANDWIDTH = 200e-6, 1 << 30     # of the delayed disk


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what, process=None):
    for _ in range(3000):
        if process and process.poll() not in (None, 0):
            raise RuntimeError(f"{' '.join(process.args)}: ended")
        try:
            if isinstance(what, int):
                socket.create_connection(("127.0.0.1", what)).close()
            elif what.endswith(".pid"):
                int(open(what).read())
            else:
                with socket.socket(socket.AF_UNIX) as s:
                    s.connect(what)
            return
        except (ConnectionRefusedError, FileNotFoundError, ValueError):
            pass
        time.sleep(0.01)
    raise RuntimeError(f"nothing at {what}")


class System:
    """A server for one disk, over TCP, a Unix socket or shared memory, pinned to `cpu` if given."""

    def __init__(self, bench, name, via="tcp", disk=None, cpu=None):
        self.bench, self.name, self.via, self.export, self.metrics, self.pidfile = bench, name, via, "", None, None
        self.port, self.sock = free_port(), os.path.join(bench.tmp, f"{name[:4]}{free_port()}.sock")
        pin = ["taskset", "-c", str(cpu)] if cpu is not None else []
        command = {"towline": self.towline, "nbdkit memory": self.nbdkit, "nbdkit file": self.nbdkit,
                   "nbd-server": self.nbd_server, "qemu-nbd": self.qemu_nbd}[name](disk)
        self.process = subprocess.Popen([*pin, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        bench.systems.append(self)
        wait_for(self.port if via == "tcp" else self.sock, self.process)
        if self.metrics:
            wait_for(self.metrics, self.process)
        if self.pidfile:
            wait_for(self.pidfile)
        if name == "nbdkit memory" or (disk or "").startswith("mem"):
            bench.fill(self)

    def towline(self, disk):
        self.metrics = free_port()
        at = f"127.0.0.1:{self.port}" if self.via == "tcp" else f"unix://{self.sock}"
        speaks = "--listen" if self.via == "shm" else "--nbd"
        return [self.bench.towline, "serve", "--disk", f"d={disk or self.bench.image}", speaks, at,
                "--metrics", f"127.0.0.1:{self.metrics}"]

    def nbdkit(self, disk):
        at = ["-i", "127.0.0.1", "-p", str(self.port)] if self.via == "tcp" else ["-U", self.sock]
        return ["nbdkit", "-f", *at, *(["memory", str(SIZE)] if self.name == "nbdkit memory" else ["file", disk or self.bench.image])]

    def nbd_server(self, disk):
        self.export = "d"
        path = os.path.join(self.bench.tmp, f"{self.port}.conf")
        at = f"port = {self.port}\n" if self.via == "tcp" else f"port = {self.port}\nunixsock = {self.sock}\n"
        with open(path, "w") as f:
            f.write(f"[generic]\nlistenaddr = 127.0.0.1\n{at}[d]\nexportname = {disk or self.bench.image}\nmaxconnections = 0\n")
        self.pidfile = path + ".pid"         # runs as a daemon: with -d it serves only one client
        return ["nbd-server", "-C", path, "-p", self.pidfile]

    def qemu_nbd(self, disk):
        at = ["-b", "127.0.0.1", "-p", str(self.port)] if self.via == "tcp" else ["-k", self.sock]
        return ["qemu-nbd", "-f", "raw", "-t", "-e", "200", *at, disk or self.bench.image]

    def address(self):
        if self.via == "shm":
            return f"towline+shm:///d?socket={self.sock}"
        return f"127.0.0.1:{self.port}" if self.via == "tcp" else f"unix://{self.sock}"

    def pid(self):
        """Returns the process number of the server, for a daemon from its pid file."""
        return int(open(self.pidfile).read()) if self.pidfile else self.process.pid

    def cpu_seconds(self):
        total, tick = 0, os.sysconf("SC_CLK_TCK")
        for pid in tree(self.pid()):
            try:
                fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
                total += sum(map(int, fields[11:15]))
            except OSError:
                pass
        return total / tick

    def counters(self):
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=20).read().decode()
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("towline_"): float(value) for name, value in lines}

    def stop(self):
        for pid in tree(self.pid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def tree(pid):
    found = [pid]
    for at in found:
        try:
            found += map(int, open(f"/proc/{at}/task/{at}/children").read().split())
        except OSError:
            pass
    return found


class Bench:
    def __init__(self, args):
        self.towline, self.secs, self.rounds, self.dir = args.towline, args.secs, args.rounds, args.dir
        self.tmp = tempfile.mkdtemp(prefix="towline-disks-", dir="/dev/shm")
        self.image, self.systems = self.write_image(self.tmp), []

    @staticmethod
    def write_image(directory):
        path, block = os.path.abspath(os.path.join(directory, "image")), os.urandom(1 << 20)
        with open(path, "wb") as f:
            for _ in range(SIZE >> 20):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
        return path

    def peers(self, *names, **how):
        return [System(self, name, **how) for name in names if shutil.which(PEERS[name])]

    def load(self, system, *arguments, secs=None):
        """Runs the client against a system. Returns its output, and CPU seconds of the server as `cpu`."""
        before = system.cpu_seconds()
        at = ["--server", system.address()] if system.via == "shm" else ["--nbd", system.address(), "--export", system.export]
        done = self.run("disk", *at, "--span", SIZE, "--secs", secs or self.secs, *arguments)
        done["cpu"] = system.cpu_seconds() - before
        return done

    def fill(self, system):
        """Writes the whole disk: reads of holes would be faster, because they do not touch memory."""
        to = {"shm": f"towline+unix:///d?socket={system.sock}", "unix": f"nbd+unix:///{system.export}?socket={system.sock}",
              "tcp": f"nbd://127.0.0.1:{system.port}/{system.export}"}[system.via]
        subprocess.run([self.towline, "disk", "copy", "--quiet", self.image, to], check=True)

    def run(self, *arguments):
        done = subprocess.run([self.towline, "bench", *map(str, arguments)], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"towline bench {' '.join(map(str, arguments))}: {done.stderr.strip()[-300:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def medians(self, *measures, times=1):
        """Runs the measures in turns, `times` as often as usual, and returns the median of each."""
        rounds = [[measure() for measure in measures] for _ in range(self.rounds * times)]
        return [statistics.median(column) for column in zip(*rounds)]

    def beside(self, systems, figure, *arguments):
        """Measures a figure of each system in turns and returns the medians by name."""
        values = self.medians(*(lambda s=s: figure(self.load(s, *arguments)) for s in systems))
        return dict(zip((s.name for s in systems), values))

    def stop(self):
        for system in self.systems:
            system.stop()
        self.systems.clear()

    def close(self):
        self.stop()
        shutil.rmtree(self.tmp, ignore_errors=True)


def children_seconds():
    """Returns the CPU seconds of all child processes that have exited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def others(found):
    return {name: value for name, value in found.items() if name != "towline"}


def listed(found, unit, digits=1):
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in found.items()) + f" {unit}"


# ------------------------------------------------------------------------------------------------------- rows
# Each yields (what, goal, reached, beside, good): texts, and whether the goal is met (None: for information).

def latency(bench):
    for via in ("tcp", "unix"):
        for where, cpus, goal in (("one CPU", (0, 0), 1.6), ("two CPUs", (0, 1), None)):
            systems = [System(bench, "towline", via, f"mem:{SIZE}", cpus[0])]
            systems += bench.peers("nbdkit memory", "nbd-server", "qemu-nbd", via=via, cpu=cpus[0])
            raw = lambda: bench.run("net", "--kind", via, "--request", 28, "--bs", 4112, "--secs", bench.secs,
                                    "--pin", f"{cpus[0]},{cpus[1]}")["p50_us"]
            one = lambda s: bench.load(s, "--random", "--pin", cpus[1])["p50_us"]
            values = bench.medians(raw, *(lambda s=s: one(s) for s in systems))
            limit, found = values[0], dict(zip((s.name for s in systems), values[1:]))
            ours, best = found["towline"], min(others(found).values(), default=float("inf"))
            good = ours <= goal * limit if goal else ours <= 1.05 * best
            yield (f"4 KiB read, depth 1, {via}, {where}", f"<= {goal} x raw" if goal else "<= best peer",
                   f"{ours:.1f} us = {ours / limit:.2f} x raw", f"raw {limit:.1f}, " + listed(others(found), "us"), good)
            bench.stop()


def depth(bench):
    """The limit is a round trip of messages as long as 32 requests and 32 replies."""
    count = 32
    for via in ("unix", "tcp"):
        systems = [System(bench, "towline", via, f"mem:{SIZE}")] + bench.peers("nbdkit memory", "nbd-server", "qemu-nbd", via=via)
        for what, more in (("read", []), ("write", ["--write"])):
            calls = systems[0].counters()
            there, back = (28 + 4096, 16) if more else (28, 16 + 4096)
            raw = lambda: count * 1000 / bench.run("net", "--kind", via, "--request", count * there, "--bs", count * back,
                                                   "--secs", bench.secs, "--pin", "0,1")["p50_us"]
            rate = lambda s: (lambda r: r["ops"] / r["secs"] / 1000)(bench.load(s, "--random", "--depth", count, *more))
            limit, *values = bench.medians(raw, *(lambda s=s: rate(s) for s in systems))
            found = dict(zip((s.name for s in systems), values))
            after = systems[0].counters()
            each = (after["system_calls_total"] - calls["system_calls_total"]) / (after["requests_total"] - calls["requests_total"])
            best, ours = max(others(found).values(), default=0), found["towline"]
            yield (f"4 KiB random {what}, depth 32, {via}", ">= 75 % of raw",
                   f"{ours:.0f} k/s = {ours / limit:.0%}, {ours / best if best else 0:.1f} x best peer; {each:.2f} system calls each",
                   f"raw {limit:.0f}, " + listed(others(found), "k/s", 0), ours >= 0.75 * limit and each < 0.5)
        bench.stop()


def shared(bench):
    """Towline's own protocol over shared memory. Also tells CPU, which depends less on the machine's load."""
    systems = [System(bench, "towline", "shm", f"mem:{SIZE}")] + bench.peers("nbdkit memory", "nbd-server", "qemu-nbd", via="unix")
    for what, more in (("read", []), ("write", ["--write"])):
        cpu = {s.name: [] for s in systems}

        def one(s):
            before = children_seconds()
            done = bench.load(s, "--random", "--depth", 32, *more)
            cpu[s.name].append(((children_seconds() - before) / done["ops"] * 1e6, done["cpu"] / done["ops"] * 1e6))
            return done["ops"] / done["secs"] / 1000

        found = dict(zip((s.name for s in systems), bench.medians(*(lambda s=s: one(s) for s in systems))))
        best, ours = max(others(found).values(), default=0), found["towline"]
        each = {name: [statistics.median(column) for column in zip(*list_)] for name, list_ in cpu.items()}
        costs = ", ".join(f"{name} {client:.2f} + {server:.2f}" for name, (client, server) in each.items())
        yield (f"4 KiB random {what}, depth 32, native over shared memory", ">= 5 x best peer",
               f"{ours:.0f} k/s = {ours / best if best else 0:.2f} x",
               listed(others(found), "k/s", 0) + f"; CPU of client + server: {costs} us each", ours >= 5 * best)
    bench.stop()


def sequential(bench):
    with tempfile.TemporaryDirectory(prefix="towline-disks-", dir=bench.dir) as directory:
        yield from sequential_of(bench, bench.write_image(directory), "cached file", True)
        bench.stop()
    # Its pages are looked up one by one, and are never contiguous.
    yield from sequential_of(bench, bench.image, "file on tmpfs", False)


def sequential_of(bench, image, what, counts):
    """Yields rows for sequential reads of an image; `counts`: their goals do."""
    systems = [System(bench, "towline", disk=image)] + bench.peers("nbdkit file", "nbd-server", "qemu-nbd", disk=image)
    arguments = ("--size", "1M", "--depth", 4)
    names = ("sendfile", *(s.name for s in systems))
    cpu, both = {name: [] for name in names}, {name: [] for name in names}

    def one(s):
        before = children_seconds()
        done = bench.load(s, *arguments)
        gib = done["bytes"] / (1 << 30)
        cpu[s.name].append(done["cpu"] / gib)
        both[s.name].append((done["cpu"] + children_seconds() - before) / gib)
        return done["bytes_per_s"] / 1e9

    def stream(into):
        before = children_seconds()
        done = bench.run("net", "--op", "stream", "--sendfile", image, "--into", into, "--secs", bench.secs)
        gib = done["bytes"] / (1 << 30)
        cpu["sendfile"].append(done["far_cpu_secs"] / gib)
        both["sendfile"].append((children_seconds() - before) / gib)
        return done["bytes"] / done["secs"] / 1e9

    # For a fair limit, sendfile's receiver fills as much memory as the reader does. Into 256 KiB, which stay
    # in the caches, it is faster.
    # A receiver that keeps falling asleep slows the sender down, which lets it fall asleep. So the rates of sendfile and
    # of servers are one of two, a half apart, and more runs are needed.
    measures = lambda: stream("256K"), lambda: stream("4M"), *(lambda s=s: one(s) for s in systems)
    warm, limit, *values = bench.medians(*measures, times=3)
    found = dict(zip((s.name for s in systems), values))
    best = max(others(found).values(), default=0)
    ours = found["towline"]
    goal = lambda text, met: (text, met) if counts else ("reported only", None)
    text, met = goal(">= 85 % of sendfile", ours >= 0.85 * limit)
    yield (f"1 MiB sequential read, depth 4, TCP, {what}", text,
           f"{ours:.2f} GB/s = {ours / limit:.0%}, {ours / best if best else 0:.2f} x best peer",
           f"sendfile into 4 MiB {limit:.2f}, into 256 KiB {warm:.2f}, " + listed(others(found), "GB/s", 2), met)
    each = {name: statistics.median(list_) for name, list_ in cpu.items()}
    text, met = goal("<= 0.1 s/GiB", each["towline"] <= 0.1)
    yield ("  CPU of the server for it", text, f"{each['towline']:.3f} s/GiB", listed(others(each), "s/GiB", 2), met)
    each = {name: statistics.median(list_) for name, list_ in both.items()}
    yield ("  CPU of both ends for it", "reported only", f"{each['towline']:.2f} s/GiB", listed(others(each), "s/GiB", 2), None)


def alone(bench):
    server = System(bench, "towline", disk=f"delay:{SIZE}:{int(LATENCY * 1e6)}:{BANDWIDTH}")
    memory = System(bench, "towline", disk=f"mem:{SIZE}")
    for size in (1 << 20, 8 << 20):
        own = LATENCY + size / BANDWIDTH
        one = lambda s: bench.load(s, "--size", size, "--structured")["p50_us"] / 1e6
        ours, network = bench.medians(lambda: one(server), lambda: one(memory))
        yield (f"{size >> 20} MiB read at depth 1 from a disk of 200 us and 1 GiB/s", ">= 90 % of the disk", f"{own / ours:.0%}",
               f"disk {own * 1e3:.2f} ms, towline {ours * 1e3:.2f}, in series {(own + network) * 1e3:.2f}", own / ours >= 0.9)


def first(bench):
    size = 32 << 20
    systems = [System(bench, "towline")] + bench.peers("nbdkit file", "qemu-nbd", "nbd-server")
    found = bench.beside(systems, lambda r: r["first_data_us"] / 1000, "--size", size, "--structured")
    best = min(others(found).values(), default=float("nan"))
    yield ("first data of a 32 MiB read", ">= 20 x sooner", f"{found['towline']:.2f} ms = {best / found['towline']:.0f} x sooner",
           listed(others(found), "ms"), best >= 20 * found["towline"])


def memory(bench):
    server = System(bench, "towline", disk=f"delay:{SIZE}:{int(LATENCY * 1e6)}:{BANDWIDTH}")
    bench.load(server, "--size", "8M", "--structured")
    peak = server.counters()["buffer_bytes_peak"] / (1 << 20)
    yield ("memory for an outstanding 8 MiB read", "<= 1 MiB", f"{peak:.2f} MiB", "", peak <= 1)


def local_rate(bench, processes):
    """Returns the bytes per second that `processes` processes read from the page cache, 64 KiB at a time."""
    begin = time.monotonic() + 0.5
    end = begin + bench.secs

    def child(to):
        done, buffer, size = 0, bytearray(64 << 10), SIZE >> 16
        with open(bench.image, "rb", buffering=0) as f:
            time.sleep(max(0, begin - time.monotonic()))
            while time.monotonic() < end:
                done += os.preadv(f.fileno(), [buffer], (done >> 16) % size << 16)
        os.write(to, done.to_bytes(8, "little"))
        os._exit(0)
    sources = []
    for _ in range(processes):
        source, to = os.pipe()
        if os.fork() == 0:
            child(to)
        os.close(to)
        sources.append(source)
    total = sum(int.from_bytes(os.read(source, 8), "little") for source in sources)
    for source in sources:
        os.close(source)
        os.wait()
    return total / bench.secs


def clients(bench):
    many, fewer = bench.medians(lambda: local_rate(bench, 184), lambda: local_rate(bench, 8))
    local = many / fewer
    kinds = [(f"{what}{by}", more + threads) for by, threads in (("", []), (", in two threads", ["--threads", 2]))
             for what, more in (("read", []), ("write", ["--write"]))]
    for what, more in kinds:
        systems = [System(bench, "towline", "tcp", f"mem:{SIZE}")] + bench.peers("nbdkit memory", "nbd-server", "qemu-nbd")
        few = bench.beside(systems[:1], lambda r: r["bytes_per_s"] / 1e9, "--size", "64K", "--clients", 8, *more)["towline"]
        fair = []

        def one(s):
            is_ours = s.name == "towline"
            # Ours long enough that every client gets hundreds of turns, of which some take 20 ms.
            secs = max(4, bench.secs) if is_ours else 2 * bench.secs
            done = bench.load(s, "--size", "64K", "--clients", 184, *more, secs=secs)
            if is_ours:
                fair.append(done["slowest"] / done["fastest"])
            return done["bytes_per_s"] / 1e9
        found = dict(zip((s.name for s in systems), bench.medians(*(lambda s=s: one(s) for s in systems))))
        ours, best, ratio = found["towline"], max(others(found).values(), default=0), statistics.median(fair)
        yield (f"184 clients, 64 KiB {what}", f">= {0.9 * local:.0%} of 8 as for local reads; fair >= 60 %; >= 1.5 x best peer",
               f"{ours:.2f} GB/s = {ours / few:.0%} of 8, slowest {ratio:.0%} of fastest, {ours / best if best else 0:.2f} x",
               listed(others(found), "GB/s", 2), ours >= 0.9 * local * few and ratio >= 0.6 and ours >= 1.5 * best)
        bench.stop()


def interference(bench):
    done = bench.run("disk", "--paper", "--dir", bench.dir, "--disks", "plain", "--sizes", "1M", "--outstanding", 1,
                     "--rounds", bench.rounds, "--secs", bench.secs, "--span", "64M")
    for row in done["interference"]:
        yield (f"memory-bound program beside a {row['system']} server", "reported only", f"{row['slowdown']:.0%} slower",
               f"reads of {row['bytes_per_s'] / 1e6:.0f} MB/s", None)


ROWS = [latency, depth, shared, sequential, alone, first, memory, clients, interference]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--towline", default=os.path.join(here, "../target/release/towline"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--secs", type=float, default=0.5)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--json")
    parser.add_argument("--boost", action="store_true")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(row.__name__ for row in ROWS))
    args = parser.parse_args()
    unknown = set(args.rows) - {row.__name__ for row in ROWS}
    if unknown or args.rounds < 1:
        parser.error(f"no such row: {', '.join(unknown)}" if unknown else "--rounds: at least 1")
    if not os.access(args.towline, os.X_OK):
        parser.error(f"{os.path.normpath(args.towline)}: no such program; build it (cargo build --release) or name another (--towline)")
    if args.boost:
        with open("/proc/self/autogroup", "w") as f:
            f.write("-10")
    bench, lines, bad = Bench(args), [], 0
    try:
        for row in ROWS:
            if args.rows and row.__name__ not in args.rows:
                continue
            if args.boost:
                # All servers and clients inherit real-time priority, so that they do not wait for other
                # programs. Not in the row `clients`, where many share a processor: real-time slices are long.
                kind = os.SCHED_OTHER if row is clients else os.SCHED_RR
                os.sched_setscheduler(0, kind, os.sched_param(int(kind == os.SCHED_RR)))
            for what, goal, reached, beside, good in row(bench):
                mark = {True: "ok ", False: "NOT", None: "   "}[good]
                print(f"{mark} {what}: {reached} (goal {goal}; {beside})", flush=True)
                lines.append({"what": what, "goal": goal, "reached": reached, "beside": beside, "good": good})
                bad += good is False
            bench.stop()
    finally:
        bench.close()
    load = os.getloadavg()[0]
    print(f"{len(lines)} figures, {bad} goals not reached; load of the machine at the end {load:.1f}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(lines, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
