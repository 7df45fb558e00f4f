"""Stopping signals at random moments on two ranks; a rank killed or standing still."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tandem.config.load import dump_config
from tandem.config.schema import RunConfig
from tandem.parallel.world import World
from tests.battery.figures import record
from tests.ranks import on_ranks
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training.runs import assert_equal_runs, ran
from tests.whole import is_whole

SEED = 11
_HANGS = 240.0
"""Seconds after which a run that was asked to stop counts as hanging."""
_IN_STEP = r"^sft +[1-9]/24 "
"""A line of the first steps, not of the measurement before them: a run that hears of a signal
before its first step has begun has nothing to save."""


def config_of(folder: Path, stages: Sequence[str]) -> RunConfig:
    """Steps enough that a signal sent in one comes in one, on a busy machine too; nothing is saved
    but where a signal asks for it."""
    model = save_tiny_model(folder / "model")
    data = write_preferences(folder / "prefs.jsonl", 60)
    return tiny_config(
        folder / "whole", model, data, save_every=0, log__tensorboard=False,
        stages=list(stages), sft__max_steps=24, sft__epochs=100,
    )  # fmt: skip


Undisturbed = Callable[[Sequence[str]], RunConfig]
"""Stages to a run of them on two ranks that nothing stopped."""
SFT, ALL = ("sft",), ("sft", "reward", "ppo")
"""One stop and one lost rank come in the first stage: the others would only cost time."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    @functools.cache
    def made(stages: Sequence[str]) -> RunConfig:
        config = config_of(tmp_path_factory.mktemp("stops"), stages)
        on_ranks(2, run_on, config)
        return config

    return made


def run_on(world: World, config: RunConfig) -> str:
    lines: list[str] = []
    ran(config, world, lines)
    return "\n".join(lines)


def started(config: RunConfig, ranks: int) -> subprocess.Popen[str]:
    """The command as a user starts it, once it hears signals."""
    path = Path(f"{config.output_dir}.yaml")
    path.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "tandem", "train", "--config", str(path)]
    if ranks > 1:
        command += ["--num-gpus", str(ranks), "--parallel.timeout-minutes", "0.5"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    heard = 1 << (signal.SIGTERM - 1)
    status = Path(f"/proc/{process.pid}/status")
    while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) & heard:
        time.sleep(0.01)  # Python's own start is not ours
    return process


def said_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What a run says up to a line, or to its end."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if re.search(pattern, line):
            break
    return said


def finish(config: RunConfig, ranks: int, *, by_command: bool) -> str:
    """Go on to the end, by the same command or in forks of this process, which import nothing;
    what is said."""
    if not by_command:
        return str(on_ranks(ranks, run_on, config)[0])
    process = started(config, ranks)
    said = process.communicate(timeout=_HANGS)[0]
    assert process.returncode == 0, said
    return said


def require_saved(said: str, folder: Path) -> list[str]:
    """The checkpoint that a stopped run says it has saved, if it does: there it is, whole. As what
    continues from it will say."""
    found = re.findall(r"stopped by \w+ after (\w+) step (\d+), which is saved", said)
    for stage, step in found:
        assert is_whole(folder / "checkpoints" / stage / f"step-{int(step):06d}"), said
    return [f"{stage}: continuing after step {step} (checkpoint verified)" for stage, step in found]


@pytest.mark.parametrize(
    ("stops", "stages"), [(1, SFT), pytest.param(50, ALL, marks=pytest.mark.slow)]
)
def test_a_stopped_run_is_the_run_that_was_not(
    tmp_path: Path, undisturbed: Undisturbed, stops: int, stages: Sequence[str]
) -> None:
    whole = undisturbed(stages)
    random = Random(SEED)
    done = runs = saved = in_steps = between = 0
    while done < stops:
        ours = replace(whole, output_dir=str(tmp_path / f"run-{runs}"))
        newest: list[str] = []
        while done < stops:
            process = started(ours, 2)
            number = random.choice([signal.SIGTERM, signal.SIGINT])
            # Every other one in a step, the others anywhere.
            is_in_step = done % 2 == 0
            begun = said_until(process, _IN_STEP) if is_in_step else ""
            if not is_in_step:
                time.sleep(random.uniform(0.0, 20.0))
            process.send_signal(number)
            said = begun + process.communicate(timeout=_HANGS)[0]
            assert "Traceback" not in said, said
            if "which is finished" in said or process.returncode == 0:
                newest = []
                between += 1  # it was read late, and the stage had ended
            if process.returncode == 0:  # it was done before
                break
            assert process.returncode == 128 + number or (process.returncode, said) == (-number, "")
            done += 1
            in_steps += bool(re.search(_IN_STEP, begun, re.MULTILINE))
            kept = require_saved(said, Path(ours.output_dir))
            saved += len(kept)
            newest = kept or newest
        finishing = finish(ours, 2, by_command=stops > 1)
        assert all(line in finishing for line in newest), finishing
        assert_equal_runs(Path(ours.output_dir), Path(whole.output_dir))
        runs += 1
    assert saved + between >= max(1, in_steps)
    record("stopping signals", ranks=2, stops=done, saved=saved, runs=runs, seed=SEED,
           equal=runs, hangs=0, tracebacks=0)  # fmt: skip


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank, once it runs."""
    for _ in range(600):
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            except OSError:
                continue
            if int(parent) == launcher and b"RANK=%d" % rank in environment:
                return int(folder.name)
        time.sleep(0.1)
    raise AssertionError("the rank never came")


@pytest.mark.parametrize(
    ("number", "trials", "stages"),
    [
        (signal.SIGKILL, 1, SFT),
        pytest.param(signal.SIGKILL, 10, ALL, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 10, ALL, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_named_and_the_run_is_the_run_that_was_not(
    tmp_path: Path,
    undisturbed: Undisturbed,
    number: signal.Signals,
    trials: int,
    stages: Sequence[str],
) -> None:
    whole = undisturbed(stages)
    random = Random(SEED)
    for trial in range(trials):
        ours = replace(whole, output_dir=str(tmp_path / f"run-{trial}"), save_every=2)
        process = started(ours, 2)
        victim = rank_process(process.pid, 1)
        while not list(Path(ours.output_dir).glob("checkpoints/*/step-*")):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(random.uniform(0, 0.5))
        os.kill(victim, number)
        said = process.communicate(timeout=_HANGS)[0]
        assert process.returncode != 0, said
        last = [line for line in said.splitlines() if line.startswith("tandem: ")][-1]
        assert "rank 1" in last, said
        assert not Path(f"/proc/{victim}").exists()
        finishing = finish(ours, 2, by_command=trials > 1)
        assert re.search(r"continuing after step \d+ \(checkpoint|finished before", finishing)
        assert_equal_runs(Path(ours.output_dir), Path(whole.output_dir))
    record(f"one rank of two gets {number.name}", trials=trials, seed=SEED, named=trials,
           equal=trials, hangs=0)  # fmt: skip
