"""The processes that run a reward function: a host, and the workers that it forks.

The host imports the function once and then forks a worker whenever the trainer asks for one, so
that a killed worker is replaced within milliseconds. It also kills workers, and what they started.
A worker calls the function on what its socket brings, in its main thread, and answers in JSON:
the trainer never unpickles what a worker sends.

    trainer --control socket--> host --fork--> worker <--a socket each--> trainer

The host ends when the trainer does, and the workers end with the host. No torch here: a host must
start fast.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any, Literal

from tandem.process import die_with_parent, fork
from tandem.rewards import limits
from tandem.rewards.calling import Call, Judge, Outcome, RewardFunction, outcomes_of
from tandem.rewards.seeding import seed_by
from tandem.stopping import let_through

What = Literal["reward function", "environment"]
"""What the workers call."""
MOST_PROCESSES = 64
"""Processes that a worker's call may start; with more it is killed."""
_LONGEST_REPLY = 64 * 2**20
_WATCH_SECONDS = 0.02
_KEPT_OUTPUT = 2000
_HEADER = struct.Struct("!I")


def send(connection: socket.socket, content: bytes) -> None:
    """Send one message."""
    connection.sendall(_HEADER.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes | None:
    """One message, or None at the other side's end.

    Raises:
        ValueError: the message is longer than any of ours.
    """
    header = _exactly(connection, _HEADER.size)
    if header is None:
        return None
    (length,) = _HEADER.unpack(header)
    if length > _LONGEST_REPLY:
        raise ValueError(f"a message of {length} bytes")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    parts = []
    while length:
        part = connection.recv(min(length, 2**20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def main(control: int, parent: int) -> None:
    """A host in a process of its own: the first message names the function."""
    connection = socket.socket(fileno=control)
    content = receive(connection)
    if content is None:
        return
    order = json.loads(content)
    os.setsid()
    # Ctrl-C before that was for the run, which decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    let_through()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if order["follows"]:
        die_with_parent(parent)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            function = _loaded(order["what"], order["names"])
        except Exception as error:
            send(connection, json.dumps({"error": str(error)}).encode())
            return
        send(connection, b"{}")
        _Host(connection, function, order["memory_bytes"]).serve()


def _loaded(what: What, names: list[str]) -> RewardFunction | Judge:
    """The function of that name; of an environment ("" for none) and tools, what calls them.

    Raises:
        ConfigError: one leads nowhere.
    """
    if what == "environment":
        from tandem.named_functions import named_function
        from tandem.rewards.hearing import EnvironmentCall

        name, *tools = names
        function = named_function(name, what) if name else None
        return EnvironmentCall(function, [named_function(tool, "tools") for tool in tools])
    from tandem.rewards.loading import load_reward_function

    return load_reward_function(names[0])


def fork_host(
    control: socket.socket, function: RewardFunction | Judge, memory_bytes: int, *, follows: bool
) -> int:
    """A host forked from this process, for a function that only this process has; its id.

    Args:
        follows: it dies with the thread that forks it.
    """
    parent = os.getpid()

    def serve() -> None:
        os.setsid()
        if follows:
            die_with_parent(parent)
        gc.freeze()  # nothing of the trainer's is to be collected here
        _close_all_but(control.fileno())
        if "torch" in sys.modules:  # its thread pool did not come along
            sys.modules["torch"].set_num_threads(1)
        _Host(control, function, memory_bytes).serve()

    return fork(serve)


def _close_all_but(kept: int) -> None:
    """Point every other descriptor at nothing: sockets to other ranks must not stay open here, and
    the numbers must not be given to other files."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (kept, nowhere):
            with suppress(OSError):
                os.dup2(nowhere, int(name))


class _Host:
    """Forks workers, watches them, kills them."""

    def __init__(
        self, connection: socket.socket, function: RewardFunction | Judge, memory_bytes: int
    ) -> None:
        self._connection = connection
        self._function = function
        self._memory_bytes = memory_bytes
        self._workers: dict[int, str] = {}
        self._watching = False
        self._niceness = 0

    def serve(self) -> None:
        """Until the trainer ends."""
        limits.adopt_orphans()
        limits.no_core_file()
        self._niceness = limits.set_niceness(-20)  # to be in time with a fork bomb
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # should memory run out, the trainer is not the one to die
        try:
            while self._step():
                pass
        finally:
            for pid in list(self._workers):
                self._kill(pid)

    def _step(self) -> bool:
        if self._watching and not select.select([self._connection], [], [], _WATCH_SECONDS)[0]:
            self._watch()
            return True
        try:
            content, descriptors, _, _ = socket.recv_fds(self._connection, 4096, 1)
        except ConnectionError:
            return False
        if not content:
            return False
        order = json.loads(content)
        reply: dict[str, Any] = {}
        if order["do"] == "spawn":
            reply["pid"] = self._spawn(socket.socket(fileno=descriptors[0]))
        elif order["do"] == "kill":
            reply["status"], reply["why"] = self._kill(order["pid"])
        else:
            self._watching = order["on"]
        send(self._connection, json.dumps(reply).encode())
        return True

    def _spawn(self, connection: socket.socket) -> int:
        host = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                self._connection.close()
                limits.set_niceness(self._niceness)
                limits.limit_processes(MOST_PROCESSES)
                die_with_parent(host)
                limits.limit_memory(self._memory_bytes)
                _Worker(connection, self._function).serve()
            finally:
                os._exit(0)
        with suppress(OSError):
            os.setpgid(pid, pid)
        connection.close()
        self._workers[pid] = ""
        return pid

    def _watch(self) -> None:
        for pid in self._workers:
            if limits.num_descendants(pid, MOST_PROCESSES) > MOST_PROCESSES:
                self._workers[pid] = "processes"
                limits.kill_group(pid)

    def _kill(self, pid: int) -> tuple[int, str]:
        """End a worker and all that descends from it; its wait status and why it was killed."""
        why = self._workers.pop(pid, "")
        limits.kill_group(pid)
        status = 0
        with suppress(ChildProcessError):
            status = os.waitpid(pid, 0)[1]
        # What left the group came here when its parent died; and what that started, after it.
        while strays := [p for p in limits.children_of(os.getpid()) if p not in self._workers]:
            for stray in strays:
                limits.kill_group(stray)
                with suppress(ChildProcessError):
                    os.waitpid(stray, 0)
        return status, why


class _Worker:
    """Calls the function on what comes, until the socket closes."""

    def __init__(self, connection: socket.socket, function: RewardFunction | Judge) -> None:
        self._connection = connection
        self._function = function

    def serve(self) -> None:
        """Read a call, answer with its outcomes, again and again."""
        printed = _Printed()
        # Text and bytes that are printed are kept, a little of them; what C code prints is lost.
        sys.stdout = sys.stderr = io.TextIOWrapper(printed, "utf-8", "replace", write_through=True)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        own = os.getpid()
        while (content := receive(self._connection)) is not None:
            seconds, prompts, completions, columns = pickle.loads(content)
            seed_by(completions)
            limits.limit_cpu(seconds)
            outcomes = self._outcomes(Call(prompts, completions, columns))
            if os.getpid() != own:  # a process that the function forked and that returned, too
                os._exit(0)
            with suppress(Exception):
                sys.stdout.flush()
            reply = {
                "outcomes": [[o.score, o.failure, o.message, o.turns, o.tokens] for o in outcomes],
                "printed": printed.taken(),
            }
            send(self._connection, json.dumps(reply).encode())

    def _outcomes(self, call: Call) -> list[Outcome]:
        try:
            return outcomes_of(self._function, call)
        except BaseException as error:  # a signal that the function sent itself
            return [Outcome(None, "died", type(error).__name__)] * len(call)


class _Printed(io.RawIOBase):
    """What a reward prints: the beginning is kept, the rest is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = b""
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        kept = bytes(memoryview(content)[: _KEPT_OUTPUT - len(self._kept)])
        self._kept += kept
        self._dropped += size - len(kept)
        return size

    def taken(self) -> str:
        text = self._kept.decode("utf-8", "replace")
        more = f"... and {self._dropped} bytes more" if self._dropped else ""
        self._kept, self._dropped = b"", 0
        return text + more
