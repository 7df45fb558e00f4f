"""SIGKILL at random moments over a whole run of three steps, and the same command again.

Moments are CPU seconds of the process: on a busy machine a run comes as far before its kill as on
a quiet one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import pytest
import torch

from tandem.config.load import dump_config
from tandem.config.schema import RunConfig
from tests.battery.figures import record
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training import letter_rewards
from tests.training.runs import assert_equal_runs, ran

SEED = 7
_HANGS = 1200.0
"""Seconds after which a run counts as hanging, on a busy machine too."""


def config_of(folder: Path, stages: tuple[str, ...], dtype: str) -> RunConfig:
    """A run of some stages: of all three of PPO with its optimizer on the host, EMA and mixture
    training (in bf16 that host keeps the float32 masters too); or with KTO on labelled answers, or
    with DAPO on a reward function."""
    model = save_tiny_model(folder / "model")
    data = write_preferences(folder / "prefs.jsonl", 60)
    changes: dict[str, object] = {"save_every": 1, "log__tensorboard": True, "dtype": dtype}
    if "ppo" in stages:
        changes |= {
            "ppo__ema": True, "ppo__ptx_data": [data], "ppo__kl_coef_target": 0.01,
            "ppo__eval_every": 0, "parallel__offload": ["optimizer"],
            "reward__normalize_prompts": 8,
        }  # fmt: skip
    if "grpo" in stages:
        changes |= {
            "grpo__algorithm": "dapo", "grpo__steps": 3, "grpo__prompts_per_step": 6,
            "grpo__minibatch_size": 12, "grpo__eval_prompts": 4, "grpo__ema": True,
            "grpo__reward_function": [f"{letter_rewards.__file__}:starts_early"],
            "sampling__samples_per_prompt": 4, "sampling__max_new_tokens": 8,
        }  # fmt: skip
    if "kto" in stages:
        data = labelled(data, folder / "labelled.jsonl")
        changes["kto"] = {"max_steps": 4, "epochs": 10, "batch_size": 8, "learning_rate": 1e-3}
    return tiny_config(folder / "whole", model, data, stages=list(stages), **changes)


def labelled(pairs: str, path: Path) -> str:
    """Both answers of every pair as rows with a label."""
    with path.open("w", encoding="utf-8") as file:
        for line in Path(pairs).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for kind in ("chosen", "rejected"):
                one = {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
                file.write(json.dumps(one) + "\n")
    return str(path)


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


def computed(child: int) -> float:
    """How many CPU seconds a process that was not waited for has used."""
    used = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def lived(child: int, seconds: float) -> bool:
    """Let a process compute so long, then kill it; whether it was done before."""
    begin = time.monotonic()
    while computed(child) < seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, "see the log"
            return True
        assert time.monotonic() - begin < _HANGS, "it computes no more"
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def stage_in(folder: Path, stages: tuple[str, ...]) -> str:
    """The stage that a run is in, by what is finished in its folder."""
    return next((stage for stage in stages if not (folder / stage).exists()), "comparison")


PPO, GRPO, KTO = ("sft", "reward", "ppo"), ("grpo",), ("kto",)


@pytest.mark.parametrize(
    ("stages", "dtype", "kills"),
    [
        (PPO, "bf16", 3),
        (GRPO, "fp32", 2),
        (KTO, "fp32", 2),
        pytest.param(PPO, "fp32", 3, marks=pytest.mark.slow),
        pytest.param(PPO, "fp32", 100, marks=pytest.mark.slow),
        pytest.param(PPO, "bf16", 100, marks=pytest.mark.slow),
        pytest.param(GRPO, "fp32", 50, marks=pytest.mark.slow),
        pytest.param(KTO, "fp32", 50, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_is_the_run_that_was_not(
    tmp_path: Path, stages: tuple[str, ...], dtype: str, kills: int
) -> None:
    config = config_of(tmp_path, stages, dtype)
    before = sum(os.times()[2:4])
    assert lived(started(lambda: ran(config), tmp_path / "log"), inf)
    seconds = sum(os.times()[2:4]) - before
    random = Random(SEED)
    done = runs = commands = 0
    killed_in: Counter[str] = Counter()
    while done < kills:
        folder = tmp_path / f"run-{runs}"
        killed = replace(config, output_dir=str(folder))
        log = tmp_path / f"log-{runs}"
        while True:
            may_kill = done < kills
            # Other intervals of saving, beside the training and not; they change no number.
            saves = {"save_every": random.choice([1, 2, 3]), "save_async": random.random() < 0.7}
            now = replace(killed, **saves)
            moment = random.uniform(0, seconds / 2) if may_kill else inf
            # Every tenth as a user starts it, so that a kill may come while modules are imported.
            if may_kill and done % 10 == 9:
                child = started(lambda now=now: commanded(now, tmp_path), log)
                moment = random.uniform(0, 8 + seconds / 2)
                commands += 1
            else:
                child = started(lambda now=now: ran(now), log)
            if lived(child, moment):
                break
            done += 1
            killed_in[stage_in(folder, stages)] += 1
        assert "Traceback" not in log.read_text()
        assert_equal_runs(folder, tmp_path / "whole")
        assert not list(folder.glob("checkpoints/*/*"))
        runs += 1
    assert kills < 50 or killed_in.keys() >= set(stages)
    record(
        "SIGKILL over whole runs", stages=" ".join(stages), dtype=dtype, kills=done, runs=runs,
        seed=SEED, resumed=done,
        commands=commands, killed_in=dict(killed_in),
        cpu_seconds_of_a_run=round(seconds, 1), tracebacks=0, equal=runs,
    )  # fmt: skip
