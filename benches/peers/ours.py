"""Towline as a system of the harness that measures all peers in turns (OURS_PY names this file).

    OURS_PY=benches/peers/ours.py python3 .../bench/peers.py file --quick --only 'ours*,ganesha*,local'

The program is target/release/towline of this tree, or OURS_BIN/towline. Systems, for files over tcp, unix and shm:

    ours-dir       the harness's tree, exported as a directory; `towline bench file` is the client
    ours-dir-q16   the same with 16 operations in flight, beside the NFS '-q16' systems
    ours-mem       the tree copied into a memory export
    ours-mem-q16   the same with 16 operations in flight
    ours-nbd       a disk image behind our NBD server, over tcp and unix; the client is the harness's own
"""
import os
import subprocess

from block_systems import Block
from common import free_port, wait_path, wait_tcp
from file_systems import FileSys

HERE = os.path.dirname(os.path.abspath(__file__))
TOWLINE = os.path.join(os.environ.get("OURS_BIN") or os.path.join(HERE, "../../target/release"), "towline")


class OursFiles(FileSys):
    """`towline serve` on the tree, with `towline bench file` as its client."""
    ours = True

    def __init__(self, ctx, variant, via, store, depth):
        super().__init__(ctx, variant, via)
        self.store, self.depth = store, depth
        self.name = f"ours-{store}" + (f"-q{depth}" if depth > 1 else "")

    def supports(self, w):
        return self.depth == 1 or w.conns == 1

    def start(self):
        self.port = free_port()
        self.sock = os.path.join(self.ctx.tmp, f"{self.name}-{self.via}-{self.variant}.sock")
        memory = (self.ctx.size >> 20) * 4 + 1024
        export = ["--dir", f"t={self.root}"] if self.store == "dir" else ["--mem", f"t={memory}M"]
        self.spawn([TOWLINE, "serve", *export, "--listen", f"tcp://127.0.0.1:{self.port}", "--listen", f"unix://{self.sock}"])
        wait_tcp(self.port, proc=self.procs[-1])
        wait_path(self.sock, proc=self.procs[-1])
        if self.store == "mem":
            for name in sorted(os.listdir(self.root)):
                subprocess.run([TOWLINE, "cp", "-r", os.path.join(self.root, name), self.url()], check=True,
                               timeout=300, stdout=subprocess.DEVNULL)

    def url(self):
        if self.via == "tcp":
            return f"towline+tcp://127.0.0.1:{self.port}/t"
        return f"towline+{self.via}:///t?socket={self.sock}"

    def clean(self):
        if self.store == "dir":
            super().clean()

    def client(self, w):
        arguments = self.work_args(w)
        if self.depth > 1:
            arguments[arguments.index("--qd") + 1] = str(self.depth)
        return [TOWLINE, "bench", "file", "--server", self.url(), *arguments]


class OursNbd(Block):
    """`towline serve --disk`, with the same client as all NBD peers."""
    name, ours = "ours-nbd", True
    export = "d"

    def start(self):
        self.listen()
        at = f"127.0.0.1:{self.port}" if self.via == "tcp" else f"unix://{self.sock}"
        self.spawn([TOWLINE, "serve", "--disk", f"d={self.image}", "--nbd", at])
        self.ready()


class OursNbdMemory(OursNbd):
    """The same with a disk in the server's memory, to compare with nbdkit's memory plugin."""
    name = "ours-nbd-memory"

    def start(self):
        self.listen()
        at = f"127.0.0.1:{self.port}" if self.via == "tcp" else f"unix://{self.sock}"
        self.spawn([TOWLINE, "serve", "--disk", f"d=mem:{self.ctx.size}", "--nbd", at])
        self.ready()
        subprocess.run(["nbdcopy", self.image, self.uri()], check=True, timeout=300)


def block(ctx, variants):
    """Returns the systems of the block measurements."""
    if not os.path.exists(TOWLINE):
        return []
    systems = [OursNbd(ctx, variant, via) for variant in variants for via in ("tcp", "unix")]
    if "mem" in variants:
        systems += [OursNbdMemory(ctx, "mem", via) for via in ("tcp", "unix")]
    return systems


def file(ctx, variants):
    """Returns the systems of the file measurements."""
    if not os.path.exists(TOWLINE):
        return []
    return [OursFiles(ctx, variant, via, store, depth)
            for variant in variants
            for store in (("dir", "mem") if variant == "mem" else ("dir",))
            for via in ("tcp", "unix", "shm")
            for depth in (1, 16)]
