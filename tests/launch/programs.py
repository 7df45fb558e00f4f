"""Small programs as ranks, and ways to launch them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tandem.launch.flags import LaunchOptions
from tandem.launch.run import launch

# Ranks without torch start in a moment. `how` is what rank 1 does.
PLAIN = """
import os, resource, signal, sys, time
from tandem.errors import DataError
from tandem.launch.failure import complain
how, rank = sys.argv[1], int(os.environ["RANK"])
print(f"hello from {rank}", flush=True)
if how == "shared":
    sys.exit(complain("data must hold rows", 2, DataError("data must hold rows")))
if how == "full":  # no file takes a byte more
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    error = OSError(28, "No space left on device", "rows.json")
    sys.exit(complain(f"rows.json: {error.strerror}", 2, error))
if how == "answers":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if how == "saves":
    def save(*_):
        open(f"{sys.argv[2]}/asked-{rank}", "w").close()
        while not os.path.exists(f"{sys.argv[2]}/may-end"):
            time.sleep(0.05)
        open(f"{sys.argv[2]}/saved-{rank}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{sys.argv[2]}/pid-{rank}", "w").write(str(os.getpid()))
if rank == 1:
    if how == "raises":
        raise ValueError("boom")
    if how == "exits":
        print("the last words")
        sys.exit(7)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
if how != "well":
    time.sleep(60)
"""

# Ranks that exchange. `how` is what rank 1 does before the second exchange. As `tandem` does, they
# and launchers import torch without a search for garbage among what stays.
EXCHANGES = """
import gc, os, signal, sys, time
gc.disable()
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from tandem.parallel.watchdog import note, watching
how, folder = sys.argv[1], Path(sys.argv[2])
def exchange():
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
with watching(rank, size, interval=0.2):
    note("the first exchange")
    done = folder / "done"
    begun = done.exists()
    total = exchange()
    if rank == 0:
        print(f"total {total:.0f}, begun {begun}", flush=True)
        inodes = {os.readlink(f"/proc/self/fd/{fd}")[8:-1] for fd in os.listdir("/proc/self/fd")
                  if os.path.exists(f"/proc/self/fd/{fd}")
                  and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")}
        rows = [r.split() for name in ("tcp", "tcp6") if os.path.exists(f"/proc/net/{name}")
                for r in open(f"/proc/net/{name}").readlines()[1:]]
        listening = {r[1].split(":")[0] for r in rows if r[3] == "0A" and r[9] in inodes}
        print(f"listening {sorted(listening)}", flush=True)
        done.write_text("1")
    exchange()
    if rank == 1 and not begun:
        time.sleep(0.3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
    if how == "waits":
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(60)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))  # ranks may meet late
    note("the second exchange")
    exchange()
dist.destroy_process_group()
"""

LAUNCHER = """
import gc, sys
gc.disable()
from tandem.launch.flags import take_launch_flags
from tandem.launch.run import launch
options, rest, _ = take_launch_flags(sys.argv[1:])
sys.exit(launch(rest, options, log_folder=rest[-1] + "/logs", device="cpu", join_seconds=60))
"""


class Launched:
    """What a launch in this process gave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.code = -1

    def run(self, program: str, how: str, options: LaunchOptions) -> Launched:
        script = self.folder / "program.py"
        script.write_text(program)
        self.code = launch(
            [str(script), how, str(self.folder)],
            options,
            log_folder=self.folder / "logs",
            device="cpu",
            print_line=self.said.append,
        )
        return self

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank-{rank}.log").read_text()


def start_launcher(folder: Path, program: str, how: str, *flags: str) -> subprocess.Popen[str]:
    """A launcher as its own process, its output one text."""
    (folder / "program.py").write_text(program)
    (folder / "launcher.py").write_text(LAUNCHER)
    command = [sys.executable, str(folder / "launcher.py"), *flags]
    return subprocess.Popen(
        [*command, str(folder / "program.py"), how, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(folder: Path, num_ranks: int) -> list[int]:
    """The ranks' process ids, once all have written them."""
    files = [folder / f"pid-{rank}" for rank in range(num_ranks)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def wait_for(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def listens(port: int) -> bool:
    """Whether something takes connections on the loopback's port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
