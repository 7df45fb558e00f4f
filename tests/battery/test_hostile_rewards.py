"""Reward functions that hang, crash, flood and multiply: the batch is scored in its time, each
failure is counted by its reason, and nothing is left running."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tandem.config.scoring import ScoringConfig
from tandem.rewards.scoring import RewardFunctions
from tests.battery.figures import record
from tests.rewards.answers import answers_of

_DEADLINE = 2.0
_MARGIN = 15.0
"""Seconds beyond deadlines that a busy machine may need to end what is over."""
_FILE = """
import ctypes, os, signal, sys, threading, time
def hostile(prompts, completions, **columns):
    exec(completions[0], globals())
    return [1.0]
"""
_HOSTILE: dict[str, tuple[str, set[str]]] = {
    "an endless loop": ("while True: pass", {"timeout"}),
    "a long sleep": ("time.sleep(1000)", {"timeout"}),
    "a loop that catches all": ("while True:\n try: time.sleep(9)\n except: pass", {"timeout"}),
    "a huge power": ("9**9**9", {"timeout", "memory"}),
    "much memory at once": ("bytearray(10**12)", {"memory"}),
    "ever more memory": ("x = []\nwhile True: x.append('y' * 10**8)", {"memory", "timeout"}),
    "a gigabyte printed": ("for _ in range(1000): print('z' * 10**6)", {"", "timeout"}),
    "printing for ever": ("while True: print('z' * 10**6)", {"timeout"}),
    "descriptors flooded": ("while True: os.write(1, b'z' * 10**6)", {"timeout"}),
    "sys.exit": ("sys.exit(3)", {"died"}),
    "os._exit": ("os._exit(0)", {"died"}),
    "a segmentation fault": ("ctypes.string_at(0)", {"died"}),
    "a kill of itself": ("os.kill(os.getpid(), 9)", {"died"}),
    "a kill of its group": ("os.killpg(0, 9)", {"died"}),
    "a stop of itself": ("os.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}),
    "an exception": ("raise KeyError('answer')", {"exception"}),
    "a huge exception": ("raise ValueError('x' * 10**7)", {"exception"}),
    "a fork bomb": ("while True: os.fork()", {"processes", "exception", "timeout"}),
    "a chain of forks": (
        "while os.fork() == 0: pass\ntime.sleep(1000)", {"processes", "exception", "timeout"},
    ),
    "a child in another session": (
        "if os.fork() == 0:\n os.setsid()\n time.sleep(1000)\ntime.sleep(1000)", {"timeout"},
    ),
    "a bomb of threads": (
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()",
        {"exception", "timeout", "died"},
    ),
    "noise on every descriptor": (
        "for i in range(3, 99):\n try: os.write(i, b'\\xff' * 99)\n except OSError: pass",
        {"died", "timeout"},
    ),
    "a kill of its host": ("os.kill(os.getppid(), 9)\ntime.sleep(1000)", {"died"}),
}  # fmt: skip


@pytest.fixture
def rewards(tmp_path: Path) -> RewardFunctions:
    (tmp_path / "hostile.py").write_text(_FILE)
    config = ScoringConfig(deadline_seconds=_DEADLINE, workers=2)
    return RewardFunctions([f"{tmp_path}/hostile.py:hostile"], config, lambda line: None)


def left_running(folder: Path) -> list[str]:
    """Processes whose command line names the test's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in line and b"pytest" not in line:
            found.append(line.decode(errors="replace"))
    return found


_LIKE_OTHERS = {
    "an endless loop": "a loop that catches all",
    "a long sleep": "a loop that catches all",
    "printing for ever": "descriptors flooded",
}
"""What waits for its deadline as another does, which comes in every run; the batch has all."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in _LIKE_OTHERS else []) for n in _HOSTILE],
)
def test_one_hostile_answer_among_good_ones(
    name: str, rewards: RewardFunctions, tmp_path: Path
) -> None:
    code, reasons = _HOSTILE[name]
    start = time.monotonic()
    found = rewards.score(answers_of(["pass", code, "pass", "pass"]))[0]
    seconds = time.monotonic() - start
    again = rewards.score(answers_of(["pass", "pass"]))[0]
    rewards.close()
    failures = set(found.failures) or {""}
    record(f"hostile rewards: {name}", reason=", ".join(failures), seconds=round(seconds, 1))
    assert failures <= reasons
    if name == "a kill of its host":  # what its host ran beside it may die with it
        assert found.failed[1]
    else:
        assert found.scores == [1.0, None if found.failures else 1.0, 1.0, 1.0]
    assert again.scores == [1.0, 1.0]
    assert seconds < _DEADLINE + _MARGIN
    assert left_running(tmp_path) == []


def test_a_batch_of_hostile_answers(rewards: RewardFunctions, tmp_path: Path) -> None:
    """All at once, each beside a good answer."""
    names = [name for name in _HOSTILE if name != "a kill of its host"]
    codes = [text for name in names for text in (_HOSTILE[name][0], "pass")]
    start = time.monotonic()
    found = rewards.score(answers_of(codes))[0]
    seconds = time.monotonic() - start
    late = found.scores[1::2].count(None)  # of the good ones: a busy machine needs more than 2 s
    again = rewards.score(answers_of(["pass"] * late))[0] if late else None
    rewards.close()
    record("hostile rewards: all", failed=found.num_failed, seconds=round(seconds, 1))
    assert set(found.scores[1::2]) <= {1.0, None}
    waits = sum("timeout" in _HOSTILE[name][1] for name in names)
    assert late <= found.failures["timeout"]
    assert found.num_failed - found.failures["timeout"] <= len(names)
    assert found.failures["timeout"] <= waits + late
    assert again is None or again.scores == [1.0] * late
    assert seconds < len(names) * (_DEADLINE + 1) + _MARGIN
    assert left_running(tmp_path) == []
