"""Sets up the directory and the servers of a benchmark, and removes them at its end."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

SHARED = pathlib.Path("/dev/shm")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"{process.args[0]} ended with status {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{process.args[0]} does not answer on port {port}")


def start_sshd(place, address, port, prefix=()):
    """Starts an sshd with keys of its own in `place`, by which root can log in. Returns the process."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / name], check=True)
    (place / "sshd.conf").write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {place}/host\nAuthorizedKeysFile {place}/user.pub\n"
        "PasswordAuthentication no\nPermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n"
        "Subsystem sftp internal-sftp\n"
    )
    os.makedirs("/run/sshd", exist_ok=True)
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    return subprocess.Popen([*prefix, sshd, "-D", "-f", place / "sshd.conf"], stderr=subprocess.DEVNULL)


def sshfs_command(place, address, port, served):
    """Returns the command that mounts a directory of that sshd; the target is to be added."""
    options = f"IdentityFile={place}/user,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,LogLevel=ERROR"
    return ["sshfs", "-p", str(port), "-o", options, f"root@{address}:{served}"]


class Bench(contextlib.ExitStack):
    """The context of a benchmark. Its directory `place` is in memory if `room` bytes are free there."""

    def __init__(self, name, room=0):
        super().__init__()
        in_memory = SHARED.exists() and shutil.disk_usage(SHARED).free > room
        self.place = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=SHARED if in_memory else None))
        self.callback(shutil.rmtree, self.place, ignore_errors=True)

    def serve(self, program, directory, *more):
        """Serves a directory as export "d" over TCP until the end. Returns the process and its port."""
        port = free_port()
        command = [program, "serve", "--dir", f"d={directory}", "--listen", f"tcp://127.0.0.1:{port}", *more]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.callback(process.wait)
        self.callback(process.send_signal, signal.SIGTERM)
        wait_for(port, process)
        return process, port
