"""Answers scored by worker processes: in order, in parallel, within their limits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from tandem.config.scoring import ScoringConfig
from tandem.errors import ConfigError
from tandem.rewards import scoring
from tandem.rewards.calling import Call
from tandem.rewards.pool import PoolLimits, WorkerPool
from tandem.rewards.scoring import RewardFunctions
from tandem.rewards.worker import receive, send
from tests.rewards.answers import answers_of

FILE = """
import asyncio, os, random, time
CALLS = 0
def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]
def pid(prompts, completions, **columns):
    time.sleep(0.05)
    return [os.getpid()] * len(completions)
async def later(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [float(len(c)) for c in completions]
def chance(prompts, completions, **columns):
    time.sleep(random.random() / 100)
    return [random.random()]
def rank(prompts, completions, **columns):
    return [float(sorted(completions).index(c)) for c in completions]
rank.whole_rollout = True
def chatty(prompts, completions, **columns):
    print("one", "\\x1b[31m")
    return [0.0]
def slow(prompts, completions, answer, **columns):
    time.sleep(float(answer[0]))
    return [float(answer[0])]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FILE)
    return str(path)


def scores(
    name: Any, completions: list[str], lines: list[str] | None = None, **knobs: Any
) -> list[float | None]:
    columns = {"answer": knobs.pop("answer")} if "answer" in knobs else {}
    print_line = (lines if lines is not None else []).append
    rewards = RewardFunctions([name], ScoringConfig(**knobs), print_line)
    try:
        return rewards.score(answers_of(completions, **columns))[0].scores
    finally:
        rewards.close()


def test_results_come_in_order_whatever_the_workers(file: str) -> None:
    completions = ["x" * (7 * i % 23) for i in range(60)]
    expected = [float(len(c)) for c in completions]
    for workers in (1, 3):
        assert scores(f"{file}:length", completions, workers=workers) == expected


def test_answers_are_scored_side_by_side(file: str) -> None:
    pids = scores(f"{file}:pid", list("abcdefgh"), workers=3)
    assert len(set(pids)) == 3
    assert os.getpid() not in pids


def test_async_functions_are_awaited(file: str) -> None:
    assert scores(f"{file}:later", ["a", "bb"]) == [1.0, 2.0]

    async def here(prompts: Any, completions: Any, **columns: Any) -> Any:
        return [3.0] * len(completions)

    here.in_process = True  # type: ignore[attr-defined]
    assert scores(here, ["a", "b"]) == [3.0, 3.0]


def test_random_numbers_depend_on_the_answer_alone(file: str) -> None:
    completions = list("abcdefgh")
    one = scores(f"{file}:chance", completions, workers=1)
    assert one == scores(f"{file}:chance", completions, workers=4)
    assert len(set(one)) == len(one)


def test_a_function_may_ask_for_the_whole_rollout(file: str) -> None:
    assert scores(f"{file}:rank", ["b", "c", "a"]) == [1.0, 2.0, 0.0]


def test_a_function_of_this_process_is_forked_and_keeps_what_it_closes_over() -> None:
    bonus = {"a": 5.0}

    def inside(prompts: Any, completions: Any, **columns: Any) -> Any:
        bonus["a"] += 1  # its own copy
        return [bonus["a"]]

    assert scores(inside, ["a"]) == [6.0]
    assert bonus == {"a": 5.0}


def test_where_nothing_can_be_forked_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "cannot_fork", lambda: "this system cannot fork them")
    lines: list[str] = []
    assert scores(lambda p, c, **k: [float(os.getpid())] * len(c), ["a"], lines) == [os.getpid()]
    assert "runs in the training process, without deadline and limits: this system" in lines[0]


def test_what_is_printed_is_shown_a_little(file: str) -> None:
    lines: list[str] = []
    scores(f"{file}:chatty", list("abcdef"), lines)
    assert lines == [
        *["reward function chatty printed: one \\x1b[31m"] * 3,
        "reward function chatty printed 3 more lines",
    ]


def test_the_reference_column_has_a_knob(file: str) -> None:
    rewards = RewardFunctions([f"{file}:slow"], ScoringConfig(answer_column="delay"))
    found = rewards.score(answers_of(["a", "b"], delay=["0", "0.01"]))[0]
    rewards.close()
    assert found.scores == [0.0, 0.01]


def test_a_deadline_holds_for_each_answer_and_the_others_are_scored(file: str) -> None:
    start = time.monotonic()
    rewards = RewardFunctions(
        [f"{file}:slow"], ScoringConfig(deadline_seconds=2.0, workers=2), lambda line: None
    )
    delays = ["0", "60", "0.01", "60", "0", "0"]
    found = rewards.score(answers_of([""] * 6, answer=delays))[0]
    again = rewards.score(answers_of([""] * 2, answer=["0", "0.01"]))[0]
    rewards.close()
    assert found.scores == [0.0, None, 0.01, None, 0.0, 0.0]
    assert found.failures == {"timeout": 2}
    assert found.first == "d.jsonl:2: took more than 2 s"
    assert again.scores == [0.0, 0.01]
    assert time.monotonic() - start < 20


def test_a_function_that_takes_long_is_named(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "OVERDUE_SECONDS", 0.01)
    lines: list[str] = []
    scores(f"{file}:slow", ["a"], lines, answer=["0.5"])
    assert lines[0].startswith("reward function slow has run for 0 s on 1 answers and has not")


def test_workers_that_cannot_import_it_say_why(tmp_path: Path) -> None:
    file = tmp_path / "gone.py"
    file.write_text("raise ValueError('not here')\n")
    pool = WorkerPool(f"{file}:f", PoolLimits())
    with pytest.raises(ConfigError, match=r"in a process of its own; got: .*not here"):
        pool.run([])


def test_a_killed_host_is_replaced(file: str) -> None:
    rewards = RewardFunctions([f"{file}:pid"], ScoringConfig(workers=1), lambda line: None)
    (worker,) = rewards.score(answers_of(["a"]))[0].scores
    assert worker is not None
    stat = Path(f"/proc/{int(worker)}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(stat[1]), signal.SIGKILL)
    found = rewards.score(answers_of(["a", "b"]))[0]
    rewards.close()
    assert found.failures == {}
    assert found.scores[0] != worker


def test_workers_need_no_torch() -> None:
    code = (
        "import sys, tandem.rewards.worker, tandem.rewards.loading, tandem.rewards.selftest\n"
        "from tandem.rewards.shipped import SHIPPED\n"
        "from tandem.rewards.loading import load_reward_function\n"
        "options = {'remote': '?url=http://localhost/', 'format': '?pattern=a',"
        " 'length': '?limit=9', 'votes': '?file=votes.jsonl'}\n"
        "for name, shipped in SHIPPED.items():\n"
        "    if not shipped.needs: load_reward_function(f'tandem:{name}' + options.get(name, ''))\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("forked", [False, True])
def test_workers_die_with_the_trainer(file: str, tmp_path: Path, forked: bool) -> None:
    program = tmp_path / "trainer.py"
    named = "lambda p, c, **k: [os.getpid()]" if forked else repr(f"{file}:pid")
    program.write_text(
        "import os, time\n"
        "from tandem.rewards.scoring import RewardFunctions\n"
        "from tests.rewards.answers import answers_of\n"
        f"rewards = RewardFunctions([{named}])\n"
        "print(int(rewards.score(answers_of(['a']))[0].scores[0]), flush=True)\n"
        "time.sleep(600)\n"
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        host = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        assert is_running(worker)
        process.kill()
    until = time.monotonic() + 10
    while (is_running(worker) or is_running(host)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(worker)
    assert not is_running(host)


@pytest.mark.parametrize("late", [False, True])
def test_what_waits_for_a_worker_is_not_begun_once_they_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """However far another thread has come with ending them when the lost worker is noticed."""
    begun = tmp_path / "begun"

    def sleeping(prompts: list[str], completions: list[str]) -> list[float]:
        begun.write_text(begun.read_text() + "x" if begun.exists() else "x")
        time.sleep(600)
        return [0.0]

    pool = WorkerPool(sleeping, PoolLimits(seconds=1000.0, workers=1))
    if late:
        answer, closed = pool._answer, threading.Event()
        monkeypatch.setattr(pool, "_answer", lambda *given: closed.wait(60) and answer(*given))
    with futures.ThreadPoolExecutor(1) as thread:
        calls = [Call(["p"], ["a"], {}) for _ in range(3)]
        running = thread.submit(pool.run, calls)
        while not begun.exists() or not begun.read_text():
            time.sleep(0.01)
        pool.close()
        if late:
            closed.set()
        with pytest.raises((RuntimeError, OSError)):
            running.result()
    assert begun.read_text() == "x"
    assert pool.run([]) == []
    pool.close()


def test_a_worker_that_starts_while_ctrl_c_is_pressed_leaves_it_to_the_run(file: str) -> None:
    """The terminal's signal reaches a process that has not yet left its group."""
    ours, theirs = socket.socketpair()
    program = (
        "import os, signal; from tandem.rewards.worker import main\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        f"main({theirs.fileno()}, os.getppid())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
    )
    theirs.close()
    order = {"what": "reward function", "names": [f"{file}:length"]}
    order |= {"memory_bytes": 0, "follows": False}
    send(ours, json.dumps(order).encode())
    assert receive(ours) == b"{}"
    ours.close()
    assert process.communicate(timeout=60)[1] == b""
