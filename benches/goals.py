#!/usr/bin/env python3
"""Measures Towline against its goals: each figure beside the limit of the machine, in turns, medians.

    benches/goals.py [--towline PROGRAM] [--rounds N] [--secs S] [--one-session] [--harness PEERS.PY] [--json FILE] [ROW ...]

Each server has a session of its own, as where users start them: the kernel shares out the processors among sessions first.
Needs two processors and about 2 GiB in /dev/shm and memory. With --harness also measures Towline beside its peers, by peers/ours.py
and the harness for which that is written.
"""
import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

FILES, PER_DIR, BIG = 20000, 100, 256 << 20
FRAGMENT = 256 << 10
HERE = os.path.dirname(os.path.abspath(__file__))


class Bench:
    """The test tree, the servers, and the load generator."""

    def __init__(self, args):
        self.towline, self.secs, self.rounds = args.towline, args.secs, args.rounds
        self.one_session, self.harness = args.one_session, args.harness
        self.tmp = tempfile.mkdtemp(prefix="towline-goals-", dir="/dev/shm")
        self.root = os.path.join(self.tmp, "t")
        self.servers = []
        make_tree(self.root)

    def close(self):
        for server in self.servers:
            server.stop()
        shutil.rmtree(self.tmp, ignore_errors=True)

    def server(self, *exports, cpu=None, options=()):
        server = Server(self, exports, cpu, options)
        self.servers.append(server)
        return server

    def run(self, *arguments):
        """Runs the load generator and returns the JSON of its last line."""
        done = subprocess.run([self.towline, "bench", *map(str, arguments)], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"towline bench {' '.join(map(str, arguments))}: {done.stderr.strip()[-300:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def file(self, url, op, *more):
        length = [] if "--secs" in more else ["--secs", self.secs]
        return self.run("file", "--server", url, "--op", op, *length, "--bigsize", BIG, *more)

    def net(self, *arguments):
        return self.run("net", "--secs", self.secs, *arguments)

    def medians(self, *measures):
        """Runs the measures in turns and returns the median of each."""
        rounds = [[measure() for measure in measures] for _ in range(self.rounds)]
        return [statistics.median(column) for column in zip(*rounds)]


class Server:
    def __init__(self, bench, exports, cpu, options):
        self.bench = bench
        self.port = free_port()
        self.sock = os.path.join(bench.tmp, f"{self.port}.sock")
        pin = ["taskset", "-c", str(cpu)] if cpu is not None else []
        cores = ["--cores", "1"] if cpu is not None else []
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*pin, bench.towline, "serve", *exports, *cores, *options,
             "--listen", f"tcp://127.0.0.1:{self.port}", "--listen", f"unix://{self.sock}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=not bench.one_session)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            except ConnectionRefusedError:
                if self.process.poll() is not None:
                    raise RuntimeError("the server did not start") from None
                time.sleep(0.001)

    def url(self, via="tcp", export="t"):
        if via == "tcp":
            return f"towline+tcp://127.0.0.1:{self.port}/{export}"
        return f"towline+{via}:///{export}?socket={self.sock}"

    def counters(self):
        done = subprocess.run([self.bench.towline, "stats", "--json", self.url(export="")], capture_output=True, text=True)
        return json.loads(done.stdout)["counters"]

    def cpu_seconds(self):
        fields = open(f"/proc/{self.process.pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self, key="VmRSS"):
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith(key):
                return int(line.split()[1]) / 1024
        return 0.0

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(10)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def make_tree(root):
    os.makedirs(os.path.join(root, "wr"))
    data = os.urandom(4096)
    for d in range(FILES // PER_DIR):
        path = os.path.join(root, "tree", f"d{d:03}")
        os.makedirs(path)
        for i in range(PER_DIR):
            with open(os.path.join(path, f"f{d * PER_DIR + i:05}"), "wb") as f:
                f.write(data)
    block = os.urandom(4 << 20)
    with open(os.path.join(root, "big"), "wb") as f:
        for _ in range(BIG // len(block)):
            f.write(block)


def copy_in(bench, server, export):
    for name in sorted(os.listdir(bench.root)):
        subprocess.run([bench.towline, "cp", "-r", os.path.join(bench.root, name), server.url("unix", export)],
                       check=True, stdout=subprocess.DEVNULL)


# ------------------------------------------------------------------------------------------------------- rows
# Each yields (what, goal, reached, limit, good): texts, and whether the goal is met (None: for information).

LATENCY = [("stat", "stat_same", 99, 180), ("open+read 4 KiB+close", "orc", 99, 4300), ("4 KiB random read", "randread", 56, 4150)]


def tcp_latency(bench):
    """One operation at a time over TCP, both ends on one processor and on two."""
    for place, far in (("one CPU", 0), ("two CPUs (ours poll, raw sleeps)", 1)):
        server = bench.server("--dir", f"t={bench.root}", cpu=far)
        local = {op: bench.medians(lambda op=op: bench.file(bench.root, op, "--pin", 0)["p50_us"])[0] for _, op, _, _ in LATENCY}
        for name, op, request, reply in LATENCY:
            raw, ours = bench.medians(
                lambda: bench.net("--kind", "tcp", "--request", request, "--bs", reply, "--pin", f"0,{far}")["p50_us"],
                lambda: bench.file(server.url(), op, "--pin", 0)["p50_us"])
            bound = raw + local[op] + 3 if op == "orc" else 1.3 * raw
            goal = "raw + local + 3 us" if op == "orc" else "1.3 x raw"
            yield f"{name}, TCP, {place}", f"<= {bound:.1f} us ({goal})", f"{ours:.1f} us = {ours / raw:.2f} x", \
                f"raw {raw:.1f}, local {local[op]:.1f} us", ours <= bound
        server.stop()


def shm_latency(bench):
    """The same operations over shared memory, spinning and sleeping."""
    server = bench.server("--dir", f"t={bench.root}", "--mem", "m=2G", cpu=1)
    copy_in(bench, server, "m")
    for store, export, bounds in (("mem", "m", (3, 3, 3)), ("dir", "t", (3, 6, 3))):
        for (name, op, request, reply), bound in zip(LATENCY, bounds):
            # The two processors may be one core of the host's at times, and two at others: raw tells.
            raw, ours = bench.medians(
                lambda: bench.net("--kind", "shm", "--request", request, "--bs", reply, "--pin", "0,1")["p50_us"],
                lambda: bench.file(server.url("shm", export), op, "--pin", 0, "--spin-us", 1000)["p50_us"])
            yield f"{name}, shm, {store}, spinning", f"<= {bound} us", f"{ours:.1f} us", f"raw {raw:.1f} us", ours <= bound
    server.stop()
    # Neither end polls, as neither end of the pair on futexes does.
    server = bench.server("--mem", "m=2G", cpu=1, options=("--spin-us", "0"))
    copy_in(bench, server, "m")
    futex, ours = bench.medians(lambda: bench.net("--kind", "futex", "--pin", "0,1")["p50_us"],
                                lambda: bench.file(server.url("shm", "m"), "stat_same", "--pin", 0, "--spin-us", 0)["p50_us"])
    yield "stat, shm, mem, sleeping", f"<= {1.3 * futex:.1f} us (1.3 x futex)", f"{ours:.1f} us = {ours / futex:.2f} x", \
        f"futex {futex:.1f} us", ours <= 1.3 * futex
    server.stop()


def scan(bench):
    """Lists a tree of 20,000 files with their attributes, 16 directories in flight."""
    server = bench.server("--dir", f"t={bench.root}", "--mem", "m=2G")
    copy_in(bench, server, "m")
    rate = lambda url, *more: bench.file(url, "scan_stat", "--again", *more)["ops"] / bench.secs
    local, ours, mem = bench.medians(lambda: rate(bench.root), lambda: rate(server.url(), "--qd", 16),
                                   lambda: rate(server.url(export="m"), "--qd", 16))
    yield "scan with attributes, TCP, dir", ">= 85 % of local", f"{ours / 1e3:.0f} k/s = {100 * ours / local:.0f} %", \
        f"local {local / 1e3:.0f} k/s", ours >= 0.85 * local
    yield "scan with attributes, TCP, mem", ">= 2 x best peer", f"{mem / 1e3:.0f} k/s", "peer: see row peers", None
    server.stop()


def system_calls(bench):
    """System calls of the server for each request, with 16 outstanding."""
    server = bench.server("--dir", f"t={bench.root}", "--mem", "m=2G", cpu=1)
    copy_in(bench, server, "m")
    for name, export, op, bound in (("4 KiB read, mem", "m", "randread", 0.5), ("stat, dir", "t", "stat_diff", 1.5)):
        counted = []
        for _ in range(bench.rounds):
            load = subprocess.Popen([bench.towline, "bench", "file", "--server", server.url(export=export), "--op", op, "--qd", "16",
                                     "--bigsize", str(BIG), "--secs", "3"], stdout=subprocess.DEVNULL)
            time.sleep(1)
            calls, requests = traced_calls(server, 1)
            load.wait()
            counted.append(calls / max(1, requests))
        calls = statistics.median(counted)
        yield f"system calls a request, {name}, 16 outstanding", f"<= {bound}", f"{calls:.2f}", "", calls <= bound
    server.stop()


def traced_calls(server, seconds):
    """Returns the system calls of a server and its requests, counted by perf, or strace if perf may not.

    Requests are counted within the time in which calls are counted, so both ends can only add calls."""
    ask = ["sh", "-c", f'"$0" stats --json "$1"; sleep {seconds}; "$0" stats --json "$1"', server.bench.towline, server.url(export="")]
    pid = str(server.process.pid)
    perf = subprocess.run(["perf", "stat", "-x,", "-e", "raw_syscalls:sys_enter", "-p", pid, "--", *ask], capture_output=True, text=True)
    first = perf.stderr.strip().split(",")[0]
    if perf.returncode == 0 and first.isdigit():
        return int(first), requests_between(perf.stdout)
    # Not `strace -c`, which omits calls that it does not know.
    trace = os.path.join(server.bench.tmp, "trace")
    with subprocess.Popen(["strace", "-f", "-qq", "-o", trace, "-p", pid], stderr=subprocess.DEVNULL) as strace:
        time.sleep(0.3)
        said = subprocess.run(ask, capture_output=True, text=True)
        strace.terminate()
    with open(trace) as lines:
        calls = sum("(" in line and "resumed>" not in line for line in lines)
    return calls, requests_between(said.stdout)


def requests_between(said):
    """Returns the number of requests served between two outputs of `towline stats --json`."""
    before, end = json.JSONDecoder().raw_decode(said)
    after = json.loads(said[end:])
    return after["counters"]["requests"] - before["counters"]["requests"]


def small_files(bench):
    """Reads 20,000 small files, and creates and removes files, 16 in flight."""
    server = bench.server("--dir", f"t={bench.root}")
    read, = bench.medians(lambda: bench.file(server.url(), "scan_read", "--qd", 16, "--again")["ops"] / bench.secs)
    yield "scan and read small files, TCP, 16 in flight", ">= 69 k/s (3 x best peer's 23 k/s)", f"{read / 1e3:.0f} k/s", "", read >= 69e3
    local, ours = bench.medians(lambda: bench.file(bench.root, "create_unlink")["ops"] / bench.secs,
                                lambda: bench.file(server.url(), "create_unlink", "--qd", 16)["ops"] / bench.secs)
    yield "create+unlink, TCP, 16 in flight", ">= 3 x best peer", f"{ours / 1e3:.0f} k/s", f"local {local / 1e3:.0f} k/s; peer: see row peers", None
    server.stop()


def streams(bench):
    """Sequential reads of 1 MiB."""
    server = bench.server("--dir", f"t={bench.root}", "--mem", "m=2G")
    copy_in(bench, server, "m")
    big = os.path.join(bench.root, "big")
    used = []

    def read(depth):
        before = server.cpu_seconds()
        result = bench.file(server.url(), "seqread", "--bs", "1M", "--qd", depth)
        used.append((server.cpu_seconds() - before) / (result["bytes"] / (1 << 30)))
        return result["bytes"] / result["secs"]

    def raw(into):
        result = bench.net("--op", "stream", "--sendfile", big, "--into", into)
        return result["bytes"] / result["secs"]

    def raw_replies():
        # The stream for a reader with one request in flight: one that waits for each reply.
        result = bench.net("--bs", 1 << 20, "--sendfile", big)
        return result["rbytes"] / result["secs"]

    # For a fair limit, sendfile's receiver fills as much memory as the reader does. Into 256 KiB, which stay
    # in the caches, it is faster.
    raw_warm, raw_four, raw_one, one, four = bench.medians(
        lambda: raw("256K"), lambda: raw("4M"), raw_replies, lambda: read(1), lambda: read(4))
    # Four requests in flight, as in the same goal for disks.
    yield "sequential read 1 MiB, depth 4, TCP, dir", ">= 85 % of sendfile", f"{four / 1e9:.2f} GB/s = {100 * four / raw_four:.0f} %", \
        f"sendfile into 4 MiB {raw_four / 1e9:.2f}, into 256 KiB {raw_warm / 1e9:.2f} GB/s", four >= 0.85 * raw_four
    yield "sequential read 1 MiB, depth 1, TCP, dir", ">= 85 % of sendfile for each request", \
        f"{one / 1e9:.2f} GB/s = {100 * one / raw_one:.0f} %", \
        f"sendfile for each request {raw_one / 1e9:.2f}, as a stream {raw_warm / 1e9:.2f} GB/s", one >= 0.85 * raw_one
    yield "server CPU, the same", "<= half of best peer", f"{statistics.median(used):.2f} s/GiB", "peer: see row peers", None
    memcpy, ours = bench.medians(lambda: bench.run("limits")["memcpy_bytes_per_s"],
                                 lambda: (lambda r: r["bytes"] / r["secs"])(bench.file(server.url("shm", "m"), "seqread", "--bs", "1M")))
    yield "sequential read 1 MiB, shm, mem", ">= 85 % of memcpy", f"{ours / 1e9:.2f} GB/s = {100 * ours / memcpy:.0f} %", \
        f"memcpy {memcpy / 1e9:.2f} GB/s", ours >= 0.85 * memcpy
    server.stop()


def many_clients(bench):
    """8 and 184 clients that read and write 64 KiB at a time, and a mix of 64 clients."""
    limit = 64
    # Long enough that every client gets many turns, after all of them have started and found their order.
    length = ("--ramp", 0.6, "--secs", max(4, bench.secs))
    # The bytes of a request and its reply: a read's reply and a write's request have the data behind a header.
    raw_sizes = {"reading": (53, 65536 + 68, "--sendfile", os.path.join(bench.root, "big")), "writing": (65536 + 68, 68)}
    for name, op in (("reading", "clients"), ("writing", "seqwrite")):
        server = bench.server("--dir", f"t={bench.root}", options=("--buffer-limit", f"{limit}M"))
        fair = {"--procs": [], "--threads": []}

        def run(clients, url, kind="--procs"):
            result = bench.file(url, op, "--bs", 65536, kind, clients, *length)
            if clients == 184 and url != bench.root:
                fair[kind].append(result["fair_min"] / max(1e-9, result["fair_max"]))
            return result["bytes"] / result["secs"]

        def raw(procs):
            request, reply, *more = raw_sizes[name]
            result = bench.run("net", "--procs", procs, "--request", request, "--bs", reply, *length, *more)
            return result["bytes"] / result["secs"]

        few, many, local_few, local_many, raw_few, raw_many, few_threads, many_threads = bench.medians(
            lambda: run(8, server.url()), lambda: run(184, server.url()), lambda: run(8, bench.root), lambda: run(184, bench.root),
            lambda: raw(8), lambda: raw(184),
            lambda: run(8, server.url(), "--threads"), lambda: run(184, server.url(), "--threads"))
        bound, raw_ratio = 0.9 * min(1.0, local_many / local_few), raw_many / raw_few
        yield f"184 clients {name} 64 KiB", f">= {100 * bound:.0f} % of 8 clients' (0.9 x local's ratio)", \
            f"{many / 1e9:.2f} GB/s = {100 * many / few:.0f} %", f"8: {few / 1e9:.2f} GB/s; raw TCP: {100 * raw_ratio:.0f} %", many >= bound * few
        yield f"184 clients {name}, beside raw TCP", f">= {90 * raw_ratio:.0f} % (0.9 x raw TCP's ratio)", \
            f"{100 * many / few:.0f} %", f"raw TCP: 8 {raw_few / 1e9:.2f}, 184 {raw_many / 1e9:.2f} GB/s", many / few >= 0.9 * raw_ratio
        yield f"184 clients {name}, in one process", f">= {100 * bound:.0f} % of 8 clients' (0.9 x local's ratio)", \
            f"{many_threads / 1e9:.2f} GB/s = {100 * many_threads / few_threads:.0f} %", f"8: {few_threads / 1e9:.2f} GB/s", \
            many_threads >= bound * few_threads
        for kind, where in (("--procs", ""), ("--threads", ", in one process")):
            slowest = statistics.median(fair[kind])
            yield f"slowest of 184 clients {name}{where}", ">= 60 % of fastest", f"{100 * slowest:.0f} %", "", slowest >= 0.6
        peak, counters = server.memory_mib("VmHWM"), server.counters()
        buffers = counters["buffer_bytes_peak"] / (1 << 20)
        yield f"server memory, 184 clients {name}", f"buffers <= {limit} MiB", f"buffers {buffers:.0f}, resident {peak:.0f} MiB", "", buffers <= limit
        yield f"bytes sent twice, 184 clients {name}", "0", str(counters["payload_discarded"]), "", counters["payload_discarded"] == 0
        server.stop()
    server = bench.server("--dir", f"t={bench.root}")
    mix, = bench.medians(lambda: (lambda r: r["bytes"] / r["secs"])(bench.file(server.url(), "rwmix", "--bs", 65536, "--procs", 64)))
    yield "read/write mix, 64 clients", ">= 2 x best peer", f"{mix / 1e9:.2f} GB/s", "peer: see row peers", None
    server.stop()


def idle(bench):
    """Memory and CPU of an idle server, and its time to the first answer."""
    first = []
    for _ in range(bench.rounds):
        server = bench.server("--dir", f"t={bench.root}")
        subprocess.run([bench.towline, "stat", server.url()], check=True, stdout=subprocess.DEVNULL)
        first.append(1000 * (time.monotonic() - server.started))
        if len(first) < bench.rounds:
            server.stop()
    answer = statistics.median(first)
    yield "start to first answer", "< 50 ms", f"{answer:.0f} ms", "with the start of `towline stat`", answer < 50
    time.sleep(1)
    before = server.cpu_seconds()
    time.sleep(3)
    used, memory = server.cpu_seconds() - before, server.memory_mib()
    yield "idle server", "< 20 MiB, 0 % CPU", f"{memory:.1f} MiB, {100 * used / 3:.1f} %", "", memory < 20 and used == 0
    server.stop()


def peers(bench):
    """What has to be faster than peers; only with --harness, the program that starts and measures them beside Towline."""
    work = ("scan_stat", "scan_read", "create_unlink", "sr1m", "c8_rw64k")
    environment = {**os.environ, "OURS_PY": os.path.join(HERE, "peers/ours.py"), "OURS_BIN": os.path.dirname(os.path.abspath(bench.towline)),
                   "BENCH_OUT": bench.tmp}
    done = subprocess.run([sys.executable, bench.harness, "file", "--variants", "mem", "--size", str(BIG >> 20), "--work", ",".join(work),
                    "--reps", "3", "--secs", "1", "--tag", "goals", "--silent"], env=environment, stdout=sys.stderr)
    measures, path = [], os.path.join(bench.tmp, "results", "file-full-goals.json")
    if done.returncode == 0 and os.path.exists(path):
        with open(path) as result:
            measures = [one for one in json.load(result)["measures"] if one["ok"]]
    rate = lambda one: one["ops"] / one["secs"]
    # Seconds of the server's processors for a GiB, upside down, so that more is better.
    frugality = lambda one: one["bytes"] / (1 << 30) / max(1e-9, one["srv_cpu"])

    def medians(workload, value, is_wanted):
        """Returns the median of each system."""
        found = {}
        for one in measures:
            if one["workload"] == workload and not one["limit"] and is_wanted(one):
                found.setdefault((one["system"], one["via"]), []).append(value(one))
        return {name: statistics.median(values) for name, values in found.items()}

    for what, workload, value, system, factor, goal, text in (
            ("scan with attributes, dir", "scan_stat", rate, "ours-dir-q16", 1, "ahead of", lambda x: f"{x / 1e3:.0f} k/s"),
            ("scan with attributes, mem", "scan_stat", rate, "ours-mem-q16", 2, ">= 2 x", lambda x: f"{x / 1e3:.0f} k/s"),
            ("scan and read small files", "scan_read", rate, "ours-dir-q16", 3, ">= 3 x", lambda x: f"{x / 1e3:.0f} k/s"),
            ("create+unlink", "create_unlink", rate, "ours-dir-q16", 3, ">= 3 x", lambda x: f"{x / 1e3:.0f} k/s"),
            ("server CPU, sequential read 1 MiB", "sr1m", frugality, "ours-dir", 2, "<= half of", lambda x: f"{1 / x:.3f} s/GiB"),
            ("read/write mix, 8 clients", "c8_rw64k", lambda one: one["bytes"] / one["secs"], "ours-dir", 2, ">= 2 x",
             lambda x: f"{x / 1e9:.2f} GB/s")):
        ours = medians(workload, value, lambda one: one["system"] == system and one["via"] == "tcp")
        # sshfs reads most of that from the kernel's cache, without its server.
        is_cached = lambda one: value is frugality and one["system"].startswith("sshfs")
        others = medians(workload, value, lambda one: not one["ours"] and not is_cached(one))
        if not ours or not others:
            yield f"{what}, beside peers", f"{goal} best peer", "not measured", "see what the harness says", False
            continue
        (reached,), best = ours.values(), max(others, key=others.get)
        yield f"{what}, beside peers", f"{goal} best peer", text(reached), f"{best[0]} {text(others[best])}", reached >= factor * others[best]


ROWS = {row.__name__: row for row in (tcp_latency, shm_latency, scan, system_calls, small_files, streams, many_clients, idle, peers)}


def session_nice():
    """Returns how nice this session is to others (sched(7)), as text; None where the kernel has no such groups."""
    try:
        with open("/proc/self/autogroup") as group:
            return group.read().split()[-1]
    except OSError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", default=os.path.join(HERE, "../target/release/towline"))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each measure; the median counts")
    parser.add_argument("--secs", type=float, default=0.7, help="length of a run")
    parser.add_argument("--one-session", action="store_true", help="servers and clients in one session")
    parser.add_argument("--harness", metavar="PEERS.PY", help="the harness that starts the peers; without it, the row peers is left out")
    parser.add_argument("--json", help="write the results there too")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default: all")
    args = parser.parse_args()
    unknown = set(args.rows) - set(ROWS)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    if "peers" in args.rows and not args.harness:
        parser.error("peers are measured by a harness: name it (--harness)")
    if args.harness and os.path.basename(args.towline) != "towline":
        parser.error("with --harness, the program has to be named towline")
    if not os.access(args.towline, os.X_OK):
        parser.error(f"{os.path.normpath(args.towline)}: no such program; build it (cargo build --release) or name another (--towline)")
    if not args.one_session and session_nice() not in (None, "0"):
        print(f"this session has nice {session_nice()} in /proc/self/autogroup and those of the servers will have 0, so the kernel "
              "does not share out processors equally: start this with setsid", file=sys.stderr)
    bench, results = Bench(args), []
    print(f"| {'what':<50} | {'goal':<42} | {'reached':<28} | {'limit':<28} | met |")
    print(f"|{'-' * 52}|{'-' * 44}|{'-' * 30}|{'-' * 30}|-----|")
    try:
        for name in args.rows or (name for name in ROWS if args.harness or name != "peers"):
            for what, goal, reached, limit, good in ROWS[name](bench):
                met = {True: "yes", False: "NO", None: "-"}[good]
                print(f"| {what:<50} | {goal:<42} | {reached:<28} | {limit:<28} | {met:<3} |", flush=True)
                results.append({"what": what, "goal": goal, "reached": reached, "limit": limit, "met": good})
    finally:
        bench.close()
    if args.json:
        with open(args.json, "w") as f:
            json.dump(results, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
