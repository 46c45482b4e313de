#!/usr/bin/env python3
"""What `towline run` adds to a call: remote ones beside the library, local ones beside none.

  python3 benches/run_calls.py [--towline PROGRAM] [--rounds N] [--secs S]

Remote: stat, open+read+close and pread of 4 KiB by a C program (calls.c) under `run`, and the same through the
library (`towline bench file`), in turns, medians of the rounds' medians. Local: the same program on local files,
with and without `run`; the start of Python and a build of a small C project, with and without, as CPU time; system
calls of a start of Python, counted by strace. Needs cc, and strace for the last.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess

import goals
import serving

OPERATIONS = {"stat": "stat_diff", "orc": "orc", "pread": "randread"}


def output(command):
    return subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300).stdout


def library(options, url, operation):
    text = output([options.towline, "bench", "file", "--server", url, "--op", OPERATIONS[operation], "--secs", str(options.secs)])
    result = json.loads(text.strip().splitlines()[-1])
    return result["p50_us"]


def program(options, prefix, calls, operation, root):
    text = output([*prefix, str(calls), operation, root, str(goals.FILES), str(options.secs)])
    return float(text.split()[0])


def processor(prefix, script):
    """Returns the CPU time in seconds of everything that a shell script starts, as counted by the shell."""
    minutes = output([*prefix, "bash", "-c", f"({script}) >/dev/null 2>&1; times"]).split()[-2:]
    return sum(60 * float(part.split("m")[0]) + float(part.split("m")[1].rstrip("s")) for part in minutes)


def counted(prefix, log):
    """Counts the system calls of a start of Python, without those that start `towline run` itself."""
    script = f"strace -f -qq -o {log} python3 -S -c 'import json, re, socket'"
    output([*prefix, "sh", "-c", script])
    return sum(1 for line in pathlib.Path(log).read_text().splitlines() if "(" in line and "resumed" not in line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", default="target/release/towline")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--secs", type=float, default=1)
    options = parser.parse_args()
    with serving.Bench("run-calls") as bench:
        place = bench.place
        calls = place / "calls"
        here = pathlib.Path(__file__).parent
        subprocess.run(["cc", "-O2", "-o", calls, here / "calls.c"], check=True)
        root = place / "served"
        goals.make_tree(root)
        _, port = bench.serve(options.towline, root, "--listen", f"unix://{place}/socket")
        urls = {"tcp": f"towline+tcp://127.0.0.1:{port}/d", "shm": f"towline+shm:///d?socket={place}/socket"}

        def run(url):
            return [options.towline, "run", "--at", f"/towline-calls={url}", "--"]

        print("| remote call | through | library | under `run` | ratio of the pairs |\n|---|---|---|---|---|")
        for transport, url in urls.items():
            for operation in OPERATIONS:
                pairs = [(library(options, url, operation), program(options, run(url), calls, operation, "/towline-calls"))
                         for _ in range(options.rounds)]
                plain, ours = (statistics.median(column) for column in zip(*pairs))
                ratio = statistics.median(b / a for a, b in pairs)
                print(f"| {operation} | {transport} | {plain:.1f} us | {ours:.1f} us | {ratio:.2f} |", flush=True)
        print("\n| local | plain | under `run` | ratio of the pairs |\n|---|---|---|---|")
        for operation in OPERATIONS:
            pairs = [(program(options, [], calls, operation, str(root)), program(options, run(urls["tcp"]), calls, operation, str(root)))
                     for _ in range(options.rounds)]
            plain, ours = (statistics.median(column) for column in zip(*pairs))
            print(f"| {operation} | {plain:.2f} us | {ours:.2f} us | {statistics.median(b / a for a, b in pairs):.3f} |", flush=True)
        project = place / "project"
        project.mkdir()
        for number in range(30):
            body = "".join(f"int f{number}_{k}(int x) {{ return x * {k} + {number}; }}\n" for k in range(200))
            (project / f"part{number}.c").write_text(f"#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n{body}")
        scripts = {
            "build of 30 C files": f"cd {project} && for f in part*.c; do cc -O1 -c $f -o $f.o; done",
            "start of Python": "python3 -c 'import json, re, socket'",
        }
        for name, script in scripts.items():
            pairs = [(processor([], script), processor(run(urls["tcp"]), script)) for _ in range(options.rounds)]
            plain, ours = (statistics.median(column) for column in zip(*pairs))
            print(f"| {name} (CPU) | {plain * 1000:.0f} ms | {ours * 1000:.0f} ms | {statistics.median(b / a for a, b in pairs):.3f} |", flush=True)
        if shutil.which("strace"):
            plain, ours = counted([], place / "log"), counted(run(urls["tcp"]), place / "log")
            print(f"| start of Python (system calls) | {plain} | {ours} | {ours / plain:.3f} |")
        else:
            print("SKIPPED: system calls are not counted, strace is not installed")


if __name__ == "__main__":
    main()
