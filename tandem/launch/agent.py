"""One node's launcher: torch's elastic agent, with our own way to start, watch and stop ranks.

Torch decides when ranks start, meet and restart (`SimpleElasticAgent`, made to be extended); this
decides what a rank's process is, how long to wait for it, and which rank caused a failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException

from tandem.files import append
from tandem.launch.cross_node import Peers
from tandem.launch.failure import FAILURE_PIPE, LOG_FILE, Reports
from tandem.launch.failure_report import Ending, Verdict, judge
from tandem.launch.rendezvous import ManyNodes, OneNode
from tandem.parallel.asking import NoAnswerError
from tandem.parallel.watchdog import INTERVAL_SECONDS, blame, read_notes, watch_prefix
from tandem.process import LAUNCHER
from tandem.stopping import holding_back

_SETTLE_SECONDS = 1.0
"""After a failure: for other failures at the same time to appear."""
_SHARED_SECONDS = 6.0
"""After an error that the user can fix: for the other ranks to find the same one."""
_LATER_SECONDS = 60.0
"""How much later than its ranks a launcher gives up on a silent node: they know more."""
_TERM_SECONDS = 2.0
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Rank:
    """A rank's process; `code` and `seen` are set when its end is noticed."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    reports: Reports
    code: int | None = None
    seen: float = 0.0

    def poll(self) -> bool:
        """Whether it has failed, or reported that it will."""
        if self.code is None:
            self.code = self.process.poll()
            self.seen = time.time()
        return self.code not in (None, 0) or self.reports.newest() is not None


class Agent(SimpleElasticAgent):
    """Starts the ranks of one node, watches them, and stops them all together."""

    def __init__(
        self,
        spec: WorkerSpec,
        meeting: OneNode | ManyNodes,
        command: Sequence[str],
        *,
        log_folder: Path,
        print_line: Callable[[str], None],
        patience_seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            command: what follows `python` for a rank: -m MODULE or SCRIPT, and arguments.
            patience_seconds: how long ranks may take to stop.
            environment: variables beside this process's own.
        """
        super().__init__(spec)
        self.node = 0
        self.name = ""  # once it has met others
        self.verdict: Verdict | None = None
        self.asked_to_stop: signal.Signals | None = None
        self._was_signaled = False
        self._must_stop_at_once = False
        self._can_interrupt = True
        self._meeting = meeting
        self._command = list(command)
        self._log_folder = log_folder
        self._print_line = print_line
        self._patience = patience_seconds
        self._environment = dict(environment or {})
        self._host = socket.gethostname()
        self._ranks: list[Rank] = []
        self._peers = Peers(None, 0, 1)

    def stop(self, number: int, frame: object) -> None:
        """A signal handler: ask all ranks to stop; on the second call kill them at once. A job's
        one signal may come to another node first, and from there before it comes here."""
        if self._was_signaled:
            self._must_stop_at_once = True
            return
        self._was_signaled = True
        if self.asked_to_stop is not None:
            return
        self.asked_to_stop = signal.Signals(number)
        if self._can_interrupt:  # waiting for other nodes, with no rank of ours alive
            raise SignalException(f"stopped by {self.asked_to_stop.name}", self.asked_to_stop)

    @property
    def all_finished(self) -> bool:
        """Whether every rank of this node has ended without failing."""
        return bool(self._ranks) and all(rank.code == 0 for rank in self._ranks)

    @property
    def last_words(self) -> str:
        """How far a stopped rank says it got; empty if none says so."""
        failures = [rank.reports.newest() for rank in self._ranks]
        lines = [f.line for f in failures if f is not None and f.kind == "stopped"]
        return next((line for line in lines if line.startswith("stopped by")), "")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._can_interrupt = False
        group: Any = worker_group  # torch annotates what the rendezvous sets as None
        self._peers = Peers(group.store, group.group_rank, group.group_world_size)
        attempt = group.spec.max_restarts - self._remaining_restarts
        self._ranks = [self._start(group, worker.local_rank, attempt) for worker in group.workers]
        if group.group_world_size > 1:
            numbers = " ".join(str(rank.number) for rank in self._ranks)
            self.node = group.group_rank
            self.name = f"node {self.node} of {group.group_world_size}, {self._host}"
            self._print_line(f"{self.name}: ranks {numbers}")
        return {local: rank.process.pid for local, rank in enumerate(self._ranks)}

    def _start(self, group: Any, local_rank: int, attempt: int) -> Rank:
        worker = group.workers[local_rank]
        number = worker.global_rank
        log = self._log_folder / f"rank-{number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        reports = Reports()
        environment = {
            **os.environ,
            **self._environment,
            "RANK": str(number),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # which the launcher keeps
            FAILURE_PIPE: str(reports.write_end),
            LOG_FILE: str(log),
            LAUNCHER: str(os.getpid()),
        }
        # Without the working folder on sys.path, unless it is on ours.
        safe = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        append(log, f"--- {when} rank {number} on {self._host}, start {attempt}\n".encode())
        with log.open("ab") as output, holding_back():
            console = None if number == 0 else output
            process = subprocess.Popen(
                [sys.executable, *safe, "-m", "tandem.launch.worker", *self._command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher
                pass_fds=[reports.write_end],
            )
            os.close(reports.write_end)
            return Rank(number, process, log, output.tell(), reports)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._heed_stop()
        told = self._ask_peers() if self._peers.is_time_to_ask() else None
        failed = [rank for rank in self._ranks if rank.poll()]
        if failed or told is not None:
            self.verdict = told or self._judge(worker_group)
            if not self.verdict.can_retry:
                self._remaining_restarts = 0
            if self._remaining_restarts:
                tries = worker_group.spec.max_restarts
                number = tries - self._remaining_restarts + 1
                self._print_line(
                    f"{self.verdict.line}. All ranks start again ({number} of {tries})."
                )
            return RunResult(state=WorkerState.FAILED)
        if self.all_finished:
            done = {rank.number: None for rank in self._ranks}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=done)
        return RunResult(state=WorkerState.HEALTHY)

    def _ask_peers(self) -> Verdict | None:
        """The other nodes' verdict; None if there is none, or the link to them is down.

        Raises:
            NoAnswerError: it has been down for longer than a rank may wait for another.
        """
        try:
            # In this order: a signal may come while we ask.
            self.asked_to_stop = self._peers.asked_to_stop() or self.asked_to_stop
            self._heed_stop()
            return self._peers.verdict()
        except NoAnswerError:
            self._heed_stop()
            if self._meeting.silent_seconds > self._patience + _LATER_SECONDS:
                raise
            return None

    def _heed_stop(self) -> None:
        if self.asked_to_stop is not None:
            self._peers.tell_stop(self.asked_to_stop)
            raise SignalException(f"stopped by {self.asked_to_stop.name}", self.asked_to_stop)

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._end(signal.SIGTERM, _TERM_SECONDS)
        self._can_interrupt = True
        self._heed_stop()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30, **more: Any
    ) -> None:
        self._end(death_sig, self._patience if self.asked_to_stop else _TERM_SECONDS)

    def _end(self, number: signal.Signals, seconds: float) -> None:
        """Signal the ranks, wait, then kill them and all that they started."""
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._must_stop_at_once:
            if all(rank.process.poll() is not None for rank in self._ranks):
                break
            for rank in self._ranks:
                rank.reports.newest()  # one that reports much waits for its pipe to be read
            time.sleep(_POLL_SECONDS)
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            rank.poll()
            rank.reports.close()

    def _judge(self, group: Any) -> Verdict:
        """Wait for other failures, then decide, together with the other nodes."""
        begun = time.monotonic()
        while not all(rank.poll() or rank.code is not None for rank in self._ranks):
            failures = [rank.reports.newest() for rank in self._ranks]
            is_error = any(failure and failure.kind == "error" for failure in failures)
            if time.monotonic() > begun + (_SHARED_SECONDS if is_error else _SETTLE_SECONDS):
                break
            time.sleep(_POLL_SECONDS)
        endings = [
            Ending(
                rank=rank.number,
                host=self._host,
                log=rank.log,
                log_start=rank.log_start,
                code=rank.code,
                failure=rank.reports.newest(),
                seen=rank.seen,
            )
            for rank in self._ranks
        ]
        killed = [e for e in endings if e.failure is None and (e.code or 0) < 0]
        places, silent = self._last_seen(group, killed) if killed else ({}, [])
        return self._peers.agree(judge(endings, places, silent))

    def _last_seen(self, group: Any, killed: Sequence[Ending]) -> tuple[dict[int, str], list[str]]:
        """Where ranks were that a signal killed, and, for aborted ones, which ranks are silent."""
        attempt = group.spec.max_restarts - self._remaining_restarts
        store = self._meeting.ranks_store
        assert store is not None, "ranks were started"
        notes = PrefixStore(watch_prefix(str(attempt)), store)
        size = group.workers[0].world_size
        try:
            before = read_notes(notes, size)
            places = {seen.rank: seen.where() for seen in before if seen is not None}
            if all(ending.code != -signal.SIGABRT for ending in killed):
                return places, []
            time.sleep(2 * INTERVAL_SECONDS)
            said = blame(before, read_notes(notes, size))
        except RuntimeError:  # the store was on a node that is gone
            return {}, []
        names = tuple(f"rank {ending.rank}," for ending in killed)
        return places, [phrase for phrase in said if not phrase.startswith(names)]
