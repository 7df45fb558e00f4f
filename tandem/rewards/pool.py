"""Answers scored by several worker processes, each call with a deadline; results in order."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tandem.config.scoring import ScoringConfig
from tandem.errors import ConfigError
from tandem.processor import num_cores
from tandem.rewards.calling import Call, Judge, Outcome, Reason, RewardFunction, failed
from tandem.rewards.feed import Feed
from tandem.rewards.running_clock import SLICE, RunningClock
from tandem.rewards.worker import MOST_PROCESSES, What, fork_host, receive, send
from tandem.stopping import holding_back
from tandem.text import visible

_MOST_WORKERS = 16
_LINES_SHOWN = 3
START_SECONDS = 300.0
"""How long the file of a reward function may take to be imported."""
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from tandem.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What a call may take.

    seconds: for each answer of a call. workers: processes side by side, at least 1.
    memory_bytes: that a worker may map beyond what it has after importing the function; 0: any.
    """

    seconds: float = 5.0
    workers: int = 1
    memory_bytes: int = 4 * 2**30

    @staticmethod
    def of(config: ScoringConfig) -> PoolLimits:
        """Those that a run sets."""
        return PoolLimits(
            seconds=config.deadline_seconds,
            workers=config.workers or min(_MOST_WORKERS, num_cores()),
            memory_bytes=int(config.memory_gb * 2**30),
        )


@dataclass(slots=True)
class _Busy:
    """A worker: its socket, its process, the call that it has and until when."""

    connection: socket.socket
    pid: int
    number: int = -1
    due: float = 0.0
    call: Call = field(default_factory=lambda: Call([], [], {}))


@dataclass(slots=True)
class _Host:
    """The process that forks the workers."""

    control: socket.socket
    pid: int
    process: subprocess.Popen[bytes] | None = None
    idle: list[_Busy] = field(default_factory=list)

    def ask(self, order: dict[str, Any], descriptor: int | None = None) -> dict[str, Any]:
        """Give an order and wait for its reply.

        Raises:
            ConnectionError: the host is gone.
        """
        given = [descriptor] if descriptor is not None else []
        socket.send_fds(self.control, [json.dumps(order).encode()], given)
        reply = receive(self.control)
        if reply is None:
            raise ConnectionError("the host of reward workers is gone")
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def close(self) -> None:
        """End it, its workers and all that they started."""
        for worker in self.idle:
            worker.connection.close()
        self.control.close()  # the host hears it and kills what it has
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.process.kill()
            self.process.wait()
            return
        with suppress(ChildProcessError):
            until = time.monotonic() + 10
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.005)


class WorkerPool:
    """The worker processes of one reward function; they are started when they are first needed.

    `printed` gets what the function prints, a little of it per call.
    """

    def __init__(
        self,
        function: RewardFunction | Judge | str | tuple[str, ...],
        pool_limits: PoolLimits,
        printed: Callable[[str], None] = lambda text: None,
        what: What = "reward function",
    ) -> None:
        """`function`: its name, or all names that it is made of, which the workers import; or
        itself, which they inherit by fork."""
        self.limits = pool_limits
        self._what: What = what
        self._function = function
        self._printed = printed
        self._host: _Host | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._starting = threading.Lock()
        self._is_stopped = False

    def close(self) -> None:
        """End the processes, and with them a `run` in another thread; they start again when they
        are needed."""
        with self._starting:
            self._is_stopped = True  # or what still waits for a worker would start them again
            self._end()

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._host = self._finalizer = None

    def run(self, calls: Sequence[Call]) -> list[list[Outcome]]:
        """The outcomes of each call, in the order of the calls.

        Raises:
            ConfigError: the workers cannot import the function.
            RuntimeError: the pool was closed meanwhile.
        """
        found: list[list[Outcome]] = [[] for _ in calls]
        self.serve(Feed(calls), found.__setitem__)
        return found

    def serve(self, feed: Feed, done: Callable[[int, list[Outcome]], object]) -> None:
        """Make the calls of a feed until it is over, each as soon as a worker is free.

        Args:
            done: gets each one's number and outcomes when it comes back.
        Raises:
            ConfigError, RuntimeError: as `run`.
        """
        self._is_stopped = False
        busy: dict[int, _Busy] = {}  # by descriptor
        clock = RunningClock()
        try:
            self._watch(on=True)
            with selectors.DefaultSelector() as selector:
                if feed.bell is not None:
                    selector.register(feed.bell, selectors.EVENT_READ)
                while busy or not feed.is_over():
                    while len(busy) < self.limits.workers and (item := feed.take()) is not None:
                        number, call = item
                        worker = self._given(call)
                        if worker is None:
                            done(number, failed(len(call), "died", "its worker died"))
                            continue
                        worker.number, worker.call = number, call
                        worker.due = clock() + self._seconds(call)
                        busy[worker.connection.fileno()] = worker
                        selector.register(worker.connection, selectors.EVENT_READ)
                    if not busy and (feed.bell is None or feed.is_over()):
                        continue
                    first = min((worker.due for worker in busy.values()), default=None)
                    patience = None if first is None else min(SLICE, max(0.0, first - clock()))
                    ready = {key.fd for key, _ in selector.select(patience)}
                    if feed.bell is not None and feed.bell.fileno() in ready:
                        feed.heard()
                        ready.discard(feed.bell.fileno())
                    now = clock()
                    ready |= {fd for fd, worker in busy.items() if worker.due <= now}
                    for descriptor in sorted(ready):
                        selector.unregister(busy[descriptor].connection)
                        worker = busy.pop(descriptor)
                        done(worker.number, self._answer(worker, worker.call, clock))
            self._watch(on=False)
        except BaseException:
            for worker in busy.values():
                worker.connection.close()
            self._end()  # a signal came: nothing goes on in the background
            raise

    def _seconds(self, call: Call) -> float:
        return self.limits.seconds * max(1, len(call))

    def _watch(self, *, on: bool) -> None:
        try:
            self._started().ask({"do": "watch", "on": on})
        except ConnectionError:  # its host was killed meanwhile, and its workers with it
            self._end()
            if on:
                self._started().ask({"do": "watch", "on": on})

    def _started(self) -> _Host:
        with holding_back(), self._starting:
            if self._host is None:
                if self._is_stopped:
                    raise RuntimeError("the reward workers were ended while they ran")
                self._host = self._start()
                self._finalizer = weakref.finalize(self, self._host.close)
            return self._host

    def _start(self) -> _Host:
        ours, theirs = socket.socketpair()
        memory = self.limits.memory_bytes
        # The kernel's message comes at the end of the thread, not of the process.
        follows = threading.current_thread() is threading.main_thread()
        with theirs:
            if not isinstance(self._function, str | tuple):
                return _Host(ours, fork_host(theirs, self._function, memory, follows=follows))
            process = subprocess.Popen(
                [
                    sys.executable, "-c", _PROGRAM,
                    str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path),
                ],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **os.environ},
            )  # fmt: skip
        order: dict[str, Any] = {
            "what": self._what,
            "names": [self._function] if isinstance(self._function, str) else self._function,
            "memory_bytes": memory,
            "follows": follows,
        }
        reply: dict[str, Any] = {"error": "its process ended while it was imported"}
        ours.settimeout(START_SECONDS)
        with suppress(ConnectionError):
            try:
                send(ours, json.dumps(order).encode())
                reply = json.loads(receive(ours) or json.dumps(reply))
            except TimeoutError:
                reply = {"error": f"importing it took more than {START_SECONDS:.0f} s"}
        ours.settimeout(None)
        if "error" in reply:
            process.kill()
            process.wait()
            ours.close()
            names = ", ".join(filter(None, order["names"]))
            raise ConfigError(
                f"{self._what} {names} must be importable in a process of its own; got: "
                f"{reply['error']}"
            )
        return _Host(ours, process.pid, process)

    def _given(self, call: Call) -> _Busy | None:
        """A worker that has been given the call; None if none takes it."""
        content = pickle.dumps(
            (self._seconds(call), call.prompts, call.completions, dict(call.columns))
        )
        for _ in range(3):  # an idle worker, or even the host, may have been killed meanwhile
            worker = None
            try:
                host = self._started()
                worker = host.idle.pop() if host.idle else self._spawn(host)
                worker.connection.settimeout(self._seconds(call))
                send(worker.connection, content)
                return worker
            except OSError:
                if worker is not None:
                    self._kill(worker)
                else:
                    self._end()
        return None

    def _spawn(self, host: _Host) -> _Busy:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = host.ask({"do": "spawn"}, theirs.fileno())["pid"]
            except BaseException:
                ours.close()
                raise
        return _Busy(ours, pid)

    def _kill(self, worker: _Busy) -> tuple[int, str]:
        """End a worker; its wait status, and why its host killed it before."""
        worker.connection.close()
        try:
            reply = self._started().ask({"do": "kill", "pid": worker.pid})
        except ConnectionError:
            self._end()
            return 0, ""
        return reply["status"], reply["why"]

    def _answer(self, worker: _Busy, call: Call, clock: RunningClock) -> list[Outcome]:
        """What a worker has answered, or why it did not."""
        content = None
        late = worker.due <= clock()
        if not late or _has_answered(worker.connection):
            with suppress(OSError, ValueError):
                worker.connection.settimeout(max(0.01, worker.due - clock()))
                content = receive(worker.connection)
        late = worker.due <= clock()
        try:
            reply = json.loads(content) if content is not None else None
            outcomes = [Outcome(*item) for item in reply["outcomes"]] if reply else []
        except (ValueError, TypeError, KeyError):
            outcomes = []  # something else wrote to its socket
        if len(outcomes) == len(call) and reply:
            if reply["printed"]:
                self._printed(reply["printed"])
            assert self._host is not None
            self._host.idle.append(worker)
            return outcomes
        status, why = self._kill(worker)
        reason, message = _death(status, why, late, self._seconds(call))
        return failed(len(call), reason, message)


def _has_answered(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


def _death(status: int, why: str, late: bool, seconds: float) -> tuple[Reason, str]:
    """The reason that a worker has no answer, and the words for it."""
    if why == "processes":
        return "processes", f"started more than {MOST_PROCESSES} processes"
    if late:
        return "timeout", f"took more than {seconds:g} s"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return "timeout", f"computed for more than {seconds:g} s"
        return "died", f"its process was killed by {signal.Signals(number).name}"
    return "died", f"its process exited with {os.waitstatus_to_exitcode(status)}"


def cannot_fork() -> str:
    """Why this process cannot fork workers; "" if it can."""
    if not sys.platform.startswith("linux"):
        return "this system cannot fork them"
    torch = sys.modules.get("torch")
    return (
        "a GPU is in use, which a fork would break" if torch and torch.cuda.is_initialized() else ""
    )


def lines_printed(printed: list[str]) -> list[str]:
    """The lines of what a pool's `printed` was given, which is emptied."""
    lines = [line for text in printed for line in text.splitlines() if line.strip()]
    printed.clear()
    return lines


def told_printed(what: str, lines: Sequence[str]) -> list[str]:
    """What to tell the user of lines that a function, `what`, has printed: the first of them."""
    told = [f"{what} printed: {visible(line)[:200]}" for line in lines[:_LINES_SHOWN]]
    more = len(lines) - _LINES_SHOWN
    return [*told, f"{what} printed {more} more lines"] if more > 0 else told
