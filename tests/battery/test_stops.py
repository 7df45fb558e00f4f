"""Stopping signals at random moments, at one rank and two; a rank killed or standing still."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tandem.config.load import dump_config
from tandem.config.schema import RunConfig
from tests.battery.figures import record
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.train.runs import assert_equal_runs

SEED = 11
_HANGS = 240.0
"""Seconds after which a run that was asked to stop counts as hanging."""


def config_of(folder: Path) -> RunConfig:
    model = save_tiny_model(folder / "model")
    data = write_preferences(folder / "prefs.jsonl", 60)
    return tiny_config(folder / "whole", model, data, save_every=2, log__tensorboard=False)


def started(config: RunConfig, ranks: int) -> subprocess.Popen[str]:
    """The command as a user starts it."""
    path = Path(f"{config.output_dir}.yaml")
    path.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "tandem", "train", "--config", str(path)]
    if ranks > 1:
        command += ["--num-gpus", str(ranks), "--parallel.timeout-minutes", "0.2"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def said_until(process: subprocess.Popen[str], phrase: str) -> str:
    """What a run says up to a phrase, or to its end."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if phrase in line:
            break
    return said


def finished(config: RunConfig, ranks: int) -> str:
    process = started(config, ranks)
    said = process.communicate(timeout=_HANGS)[0]
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize(
    ("ranks", "stops"),
    [
        (2, 1),
        pytest.param(1, 50, marks=pytest.mark.slow),
        pytest.param(2, 50, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_is_the_run_that_was_not(tmp_path: Path, ranks: int, stops: int) -> None:
    config = config_of(tmp_path)
    begin = time.monotonic()
    finished(config, ranks)
    seconds = time.monotonic() - begin
    random = Random(SEED)
    done = runs = saved = 0
    while done < stops:
        ours = replace(config, output_dir=str(tmp_path / f"run-{runs}"))
        while True:
            process = started(ours, ranks)
            if done >= stops:
                said = process.communicate(timeout=_HANGS)[0]
                assert process.returncode == 0, said
                break
            number = random.choice([signal.SIGTERM, signal.SIGINT])
            # Half of them once the run has come to a step, the others anywhere.
            begun = said_until(process, ": begins") if random.random() < 0.5 else ""
            time.sleep(random.uniform(0.0, seconds / (4 if begun else 1)))
            process.send_signal(number)
            said = begun + process.communicate(timeout=_HANGS)[0]
            assert "Traceback" not in said, said
            if process.returncode == 0:  # it was done before
                break
            assert process.returncode in (128 + number, -number), said
            done += 1
            saved += len(re.findall(r"stopped by \w+ after \w+ step \d+, which is saved", said))
        assert_equal_runs(Path(ours.output_dir), tmp_path / "whole")
        runs += 1
    record("stopping signals", ranks=ranks, stops=done, saved=saved, runs=runs, seed=SEED,
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
    ("number", "trials"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGKILL, 10, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 10, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_named_and_nothing_hangs(
    tmp_path: Path, number: signal.Signals, trials: int
) -> None:
    config = config_of(tmp_path)
    random = Random(SEED)
    for trial in range(trials):
        ours = replace(config, output_dir=str(tmp_path / f"run-{trial}"))
        process = started(ours, 2)
        victim = rank_process(process.pid, 1)
        metrics = Path(ours.output_dir) / "metrics.jsonl"
        while not metrics.exists() or not metrics.read_text():
            time.sleep(0.05)
        time.sleep(random.uniform(0, 0.5))
        os.kill(victim, number)
        said = process.communicate(timeout=_HANGS)[0]
        assert process.returncode != 0, said
        last = [line for line in said.splitlines() if line.startswith("tandem: ")][-1]
        assert "rank 1" in last, said
        assert not Path(f"/proc/{victim}").exists()
        # On one rank now: what is left is whole.
        finished(ours, 1)
        assert (Path(ours.output_dir) / "ppo" / "actor" / "model.safetensors").exists()
    record(f"one rank of two gets {number.name}", trials=trials, seed=SEED, named=trials, hangs=0)
