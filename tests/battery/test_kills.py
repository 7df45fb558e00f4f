"""SIGKILL at random moments over a whole run of three steps, and the same command again."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from tandem.config.load import dump_config
from tandem.config.schema import RunConfig
from tests.battery.figures import record
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training.runs import assert_equal_runs, ran

SEED = 7


def config_of(folder: Path) -> RunConfig:
    """A run of all three steps, with its optimizer on the host, EMA and mixture training."""
    model = save_tiny_model(folder / "model")
    data = write_preferences(folder / "prefs.jsonl", 60)
    return tiny_config(
        folder / "whole", model, data, save_every=1, ppo__ema=True, ppo__ptx_data=[data],
        ppo__kl_target=0.01, ppo__eval_every=0, log__tensorboard=True,
        parallel__offload=["optimizer"], reward__normalize_prompts=8,
    )  # fmt: skip


def started(run: Callable[[], object], log: Path) -> int:
    """A process that runs it, forked: it shares what is imported. Exit code 1 is a traceback."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            try:
                torch.set_num_threads(1)
                run()
                code = 0
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def commanded(config: RunConfig, folder: Path) -> None:
    """Become the command that a user starts."""
    path = folder / "given.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "tandem", "train", "--config", str(path)]
    os.execve(sys.executable, command, {**os.environ, "OMP_NUM_THREADS": "1"})


def lived(child: int, seconds: float) -> bool:
    """Let a process live so long, then kill it; whether it was done before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, "see the log"
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_run_is_the_run_that_was_not(tmp_path: Path, kills: int) -> None:
    config = config_of(tmp_path)
    begin = time.monotonic()
    assert lived(started(lambda: ran(config), tmp_path / "log"), 600)
    seconds = time.monotonic() - begin
    random = Random(SEED)
    done = runs = commands = 0
    while done < kills:
        folder = tmp_path / f"run-{runs}"
        killed = replace(config, output_dir=str(folder))
        log = tmp_path / f"log-{runs}"
        while True:
            may_kill = done < kills
            # Other intervals of saving, beside the training and not; they change no number.
            saves = {"save_every": random.choice([1, 2, 3]), "save_async": random.random() < 0.7}
            now = replace(killed, **saves)
            moment = random.uniform(0, seconds / 3) if may_kill else 600.0
            # Every tenth as a user starts it, so that a kill may come while modules are imported.
            if may_kill and done % 10 == 0:
                child = started(lambda now=now: commanded(now, tmp_path), log)
                moment = random.uniform(0, 8 + seconds / 3)
                commands += 1
            else:
                child = started(lambda now=now: ran(now), log)
            if lived(child, moment):
                break
            done += 1
        assert "Traceback" not in log.read_text()
        assert_equal_runs(folder, tmp_path / "whole")
        assert not list(folder.glob("checkpoints/*/*"))
        runs += 1
    record(
        "SIGKILL over whole runs", kills=done, runs=runs, seed=SEED, resumed=done,
        commands=commands,
        seconds_of_a_run=round(seconds, 1), tracebacks=0, equal=runs,
    )  # fmt: skip
