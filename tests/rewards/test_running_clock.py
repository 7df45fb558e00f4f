"""Deadlines of reward functions while their process is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tandem.rewards import running_clock
from tandem.rewards.running_clock import SLICE, RunningClock

DEADLINE = 3.0
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PROGRAM = """
import json, sys
from dataclasses import replace
from tandem.config.scoring import ScoringConfig
from tandem.rewards.scoring import RewardFunctions
from tests.rewards.answers import answers_of
reward, seconds, texts, tests = json.loads(sys.argv[1])
rewards = RewardFunctions([reward], ScoringConfig(deadline_seconds=seconds))
answers = answers_of(texts, answer=texts, tests=tests)
found = rewards.score(replace(answers, prompt_texts=answers.prompts))[0]
rewards.close()
print(json.dumps([found.scores, found.failures]))
"""
SLOW = """
import time
from pathlib import Path
def length(prompts, completions, **columns):
    Path(__file__).with_name("begun").touch()
    for _ in range(20):
        time.sleep(0.02)
    return [float(len(text)) for text in completions]
"""


class Times:
    """Stands for the time module: time passes where the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    found = Times()
    monkeypatch.setattr(running_clock, "time", found)
    return found


def test_only_the_time_in_which_the_process_ran_is_counted(times: Times) -> None:
    clock = RunningClock()
    for passed in (0.2, 0.3, 86_400.0, 0.25):
        times.now += passed
        clock()
    assert clock() == pytest.approx(0.2 + 0.3 + SLICE + 0.25)


def test_a_clock_never_stands_for_good(times: Times) -> None:
    """Not even where every reading is late."""
    clock = RunningClock()
    for _ in range(8):
        times.now += 5.0
        clock()
    assert clock() == pytest.approx(8 * SLICE)


def descendants(process: int) -> list[int]:
    """A process and all that descend from it."""
    found = [process]
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                stat = (folder / "stat").read_text()
                if int(stat.rsplit(")", 1)[1].split()[1]) == process:
                    found += descendants(int(folder.name))
    return found


def signaled(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def scored_while_stopped(
    reward: str, begun: Callable[[], bool], *, tests: str = "", seconds: float = DEADLINE
) -> list[object]:
    """Scores and failures of two answers by a process that is stopped, with all that it started,
    for longer than `DEADLINE`, once a call has begun.

    Args:
        seconds: of `scoring.deadline_seconds`.
    """
    asked = [reward, seconds, ["ab = 1", "c"], [tests] * 2]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(asked)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "no_proxy": "*"},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not begun():
        assert process.poll() is None
        time.sleep(0.01)
    stopped = descendants(process.pid)
    signaled(stopped, signal.SIGSTOP)
    time.sleep(DEADLINE + 0.5)
    signaled(stopped, signal.SIGCONT)
    found: list[object] = json.loads(process.communicate(timeout=120)[0].splitlines()[-1])
    return found


@needs_proc
def test_a_stop_of_the_whole_job_costs_no_score(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW)
    found = scored_while_stopped(f"{tmp_path}/mine.py:length", (tmp_path / "begun").exists)
    assert found == [[6.0, 1.0], {}]


@needs_proc
def test_nor_does_it_where_code_is_run(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    slow = f"import time; open({str(begun)!r}, 'w').close()\nfor _ in range(20): time.sleep(0.02)"
    name = f"tandem:python_tests?seconds={DEADLINE}"
    found = scored_while_stopped(name, begun.exists, tests=f"{slow}\nassert ab == 1", seconds=60)
    assert found == [[1.0, 0.0], {}]


@pytest.fixture
def late_server() -> Iterator[tuple[str, threading.Event]]:
    """The URL of a server that is no part of the job and answers later than any deadline; and
    whether it was asked."""
    begun = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            begun.set()
            time.sleep(DEADLINE + 1.0)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"rewards": [1.0] * len(asked["query"])}).encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/get_reward", begun
    server.shutdown()
    thread.join()
    server.server_close()


@needs_proc
def test_nor_does_it_where_a_server_scores(late_server: tuple[str, threading.Event]) -> None:
    url, begun = late_server
    found = scored_while_stopped(url, begun.is_set, seconds=DEADLINE / 2)  # two answers a request
    assert found == [[1.0, 1.0], {}]
