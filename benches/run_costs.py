#!/usr/bin/env python3
"""What programs under `towline run` cost: requests to the server, CPU, time; beside the same locally.

  python3 benches/run_costs.py [--towline PROGRAM] [--against PROGRAM] [--files N] [--rounds N] [--transport tcp|near] [WORKLOAD ...]

Everything runs on this machine. Requests are counted by the server, CPU (user and system) is that of the
program inside the run and of the server, medians of rounds that take turns. `--against` measures a second
`towline` as client in the same rounds; the server is always that of `--towline`, or `--server`. Requests do
not depend on how busy the machine is; CPU does a little, time very much.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

import serving
import trees


def processor_ms(pid):
    """Returns the CPU time of a process so far, in milliseconds (in steps of a tick, mostly 10 ms)."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def requests(towline, url):
    text = subprocess.run([towline, "stats", "--json", url], capture_output=True, text=True, check=True).stdout
    return json.loads(text)["counters"]["requests"]


def measured(prefix, command, limit):
    """Returns time and CPU in seconds, measured by a shell inside the run to leave out the run itself."""
    quoted = " ".join("'" + part.replace("'", "'\\''") + "'" for part in command)
    script = f"TIMEFORMAT='%R %U %S'; time {quoted} >/dev/null 2>&1; exit 0"
    done = subprocess.run([*prefix, "bash", "-c", script], capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(f"{command}: status {done.returncode}: {done.stderr[:500]}")
    real, user, system = map(float, done.stderr.split()[-3:])
    return real, user + system


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", default="target/release/towline")
    parser.add_argument("--server", help="the program that serves, if another one")
    parser.add_argument("--against")
    parser.add_argument("--transport", choices=("tcp", "near"), default="tcp", help="near: shared memory, as on one machine by default")
    parser.add_argument("--files", type=int, default=4000)
    parser.add_argument("--archive", type=int, default=2000, help="files in the archive for tar (default 2000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=600, help="seconds that one program may take")
    parser.add_argument("workload", nargs="*")
    options = parser.parse_args()
    with serving.Bench("run-costs") as bench:
        place = bench.place
        served = place / "served"
        served.mkdir()
        trees.make_tree(served, options.files)
        archive = place / "source.tar"
        trees.make_archive(archive, options.archive)
        program = options.server or options.towline
        server, port = bench.serve(program, served)
        scheme = "towline+tcp" if options.transport == "tcp" else "towline"
        control = f"towline+tcp://127.0.0.1:{port}"

        def run(program):
            return [program, "run", "--at", f"/towline-tree={scheme}://127.0.0.1:{port}/d", "--"]

        ways = [("local", [], str(served)), ("towline", run(options.towline), "/towline-tree")]
        if options.against:
            ways.append(("against", run(options.against), "/towline-tree"))
        known = trees.workloads(archive)
        chosen = options.workload or list(known)
        found = {}
        for turn in range(options.rounds):
            for way, prefix, root in ways:
                for name in chosen:
                    before = requests(program, control), processor_ms(server.pid)
                    wall, cpu = measured(prefix, known[name](root), options.limit)
                    after = requests(program, control), processor_ms(server.pid)
                    # The query of the counters is itself one request.
                    row = wall, cpu, (after[1] - before[1]) / 1000, after[0] - before[0] - 1
                    found.setdefault((name, way), []).append(row)
                    print(f"  {turn} {way:8} {name:14} {row}", file=sys.stderr)
        print("| program | way | requests | CPU of the program | CPU of the server | time | times local |")
        print("|---|---|---|---|---|---|---|")
        for name in chosen:
            local = statistics.median(row[0] for row in found[name, "local"])
            for way, _, _ in ways:
                wall, cpu, server_cpu, count = (statistics.median(column) for column in zip(*found[name, way]))
                print(f"| {name} | {way} | {count:.0f} | {cpu * 1000:.0f} ms | {server_cpu * 1000:.0f} ms | {wall * 1000:.0f} ms | {wall / local:.2f} |")


if __name__ == "__main__":
    main()
