"""A sweep over cases that are not run: what is kept, gone on with, refused, and tabulated."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from tandem.config.load import build_config, load_config
from tandem.errors import CheckpointError, ConfigError
from tandem.plan import sweep as sweep_module
from tandem.plan.cases import Axes
from tandem.plan.processes import Ended
from tandem.plan.results import read_result
from tandem.plan.sweep import Sweep, run_sweep
from tests.jsonl import write_jsonl
from tests.metrics.runs import metrics_line


class Runs:
    """Stands for `tandem STEP --config FILE`: notes its calls and writes what a run would."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.interrupted = ""
        self.logged_peak = 1
        self.meanwhile: Callable[[BinaryIO], object] | None = None

    def __call__(self, arguments: Sequence[str], log: Path, held: BinaryIO) -> Ended:
        if self.meanwhile is not None:
            self.meanwhile(held)
        where = f"{log.parent.parent.name}/{log.parent.name}"
        self.calls.append(where)
        config = load_config(arguments[arguments.index("--config") + 1])
        made = Path(config.output_dir)
        for stage in config.stages:
            (made / stage).mkdir(parents=True)
            (made / stage / "model.safetensors").write_bytes(b"weights")
        stage = config.stages[-1]
        outcome = {"reward": 0.5} if stage == "ppo" else {"loss": 2.5}
        lines = [
            metrics_line(stage, at, **{"seconds/step": 9.0 if at == 0 else at, **outcome})
            for at in range(3)
        ]
        lines[1]["values"] |= {"seconds/train": 1.0, "tokens_per_second/train": 300.0}
        lines[2]["values"] |= {"seconds/train": 2.0, "tokens_per_second/train": 600.0}
        lines[2]["values"]["peak_memory_bytes/train"] = float(self.logged_peak)
        write_jsonl(made / "metrics.jsonl", lines)
        if where == self.interrupted:
            raise KeyboardInterrupt
        if where in self.failing:
            return Ended(2, 1.0, {0: 5}, "lora.rank must be <b>low</b>; got 9.")
        return Ended(0, 65.0, {0: 7 * 2**20, 1: 9 * 2**20}, "")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What is called in place of real runs."""
    made = Runs()
    monkeypatch.setattr(sweep_module, "run_command", made)
    return made


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Two stages of step 1."""
    config = build_config({"data": ["embedded"], "stages": ["sft"], "device": "cpu"}, where="")
    axes = Axes(stages=(0, 3), lora=(0,), offload=(False,), variants=False)
    return Sweep(config=config, folder=tmp_path / "sweep", ranks=2, axes=axes)


def test_every_case_has_a_folder_and_a_line_in_the_tables(sweep: Sweep, runs: Runs) -> None:
    results = run_sweep(sweep, _silent)
    assert runs.calls == ["sft/zero0", "sft/zero3"]
    config = load_config(sweep.folder / "sft" / "zero3" / "config.yaml")
    assert config.parallel.actor_zero_stage == 3
    assert (config.save_every, config.log.tensorboard) == (0, False)
    assert [result.exit_code for result in results] == [0, 0]
    result = results[1]
    assert result.seconds_per_step == 1.5  # step 0 only measures
    assert result.tokens_per_second["train"] == pytest.approx((300 + 2 * 600) / 3)
    assert (result.peak, result.outcome, result.steps) == (9 * 2**20, 2.5, 2)
    assert read_result(sweep.folder / "sft" / "zero3") == result
    head, *lines = (sweep.folder / "table.txt").read_text().splitlines()
    assert head.split("  ")[0] == "stage"
    assert [line.split()[1] for line in lines] == ["zero0", "zero3"]
    assert lines[0].endswith("1 m 05 s")
    rows = list(csv.DictReader(io.StringIO((sweep.folder / "table.csv").read_text())))
    assert [row["parallel.actor_zero_stage"] for row in rows] == ["0", "3"]
    assert rows[0]["peak_bytes/rank1"] == str(9 * 2**20)
    assert "zero3" in (sweep.folder / "report.html").read_text()


def test_a_peak_that_only_the_run_saw_counts(sweep: Sweep, runs: Runs) -> None:
    runs.logged_peak = 20 * 2**20
    assert [result.peak for result in run_sweep(sweep, _silent)] == [20 * 2**20] * 2


def test_weights_go_unless_they_are_asked_for(sweep: Sweep, runs: Runs, tmp_path: Path) -> None:
    run_sweep(sweep, _silent)
    made = Path("sft") / "zero0" / "run"
    assert not (sweep.folder / made / "sft").exists()
    assert (sweep.folder / made / "metrics.jsonl").exists()
    kept = replace(sweep, folder=tmp_path / "kept", keep_models=True)
    run_sweep(kept, _silent)
    assert (kept.folder / made / "sft" / "model.safetensors").exists()


def test_the_same_command_goes_on_after_an_interruption(sweep: Sweep, runs: Runs) -> None:
    runs.interrupted = "sft/zero3"
    stopped: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, stopped.append)
    assert stopped[-1] == "sft/zero3 (2 of 2): stopped; the same command runs it again"
    assert "zero3" not in (sweep.folder / "table.txt").read_text()
    runs.interrupted = ""
    said: list[str] = []
    results = run_sweep(sweep, said.append)
    assert runs.calls == ["sft/zero0", "sft/zero3", "sft/zero3"]
    assert len(results) == 2
    assert said[0].startswith("sft/zero0 (1 of 2): already done: 1 m 05 s")


def test_a_sweep_whose_folder_is_in_use_is_refused(sweep: Sweep, runs: Runs) -> None:
    """By another one, or by a case that a killed one has left: here a process that has the file."""
    case: list[subprocess.Popen[bytes]] = []

    def begun(held: BinaryIO) -> None:
        with pytest.raises(CheckpointError, match="by one sweep at a time; got another that is"):
            run_sweep(sweep, _silent)
        if not case:
            case.append(subprocess.Popen(["sleep", "600"], pass_fds=[held.fileno()]))

    runs.meanwhile = begun
    run_sweep(sweep, _silent)
    assert runs.calls == ["sft/zero0", "sft/zero3"]
    with pytest.raises(CheckpointError, match="or a case of one that was killed, which is ending"):
        run_sweep(sweep, _silent)
    case[0].kill()
    case[0].wait()
    assert len(run_sweep(sweep, _silent)) == 2


def test_a_failing_case_shows_its_line_and_the_sweep_continues(sweep: Sweep, runs: Runs) -> None:
    runs.failing = {"sft/zero0"}
    said: list[str] = []
    results = run_sweep(sweep, said.append)
    assert [result.exit_code for result in results] == [2, 0]
    assert said[-2] == "1 case failed; --retry-failed runs such cases again"
    error = "lora.rank must be <b>low</b>; got 9."
    assert f"sft/zero0 (1 of 2): failed with exit code 2: {error}" in said
    assert error in (sweep.folder / "table.txt").read_text()
    page = (sweep.folder / "report.html").read_text()
    assert "&lt;b&gt;low" in page
    assert "<b>" not in page
    run_sweep(sweep, _silent)
    assert len(runs.calls) == 2
    runs.failing = set()
    said = []
    results = run_sweep(replace(sweep, retry_failed=True), said.append)
    assert not any("--retry-failed" in line for line in said)
    assert runs.calls[2:] == ["sft/zero0"]
    assert [result.exit_code for result in results] == [0, 0]
    assert "error" not in (sweep.folder / "table.txt").read_text()


def test_results_of_other_knobs_are_refused_before_anything_runs(sweep: Sweep, runs: Runs) -> None:
    run_sweep(sweep, _silent)
    other = build_config({"data": ["embedded"], "stages": ["sft"], "seed": 7}, where="")
    for changed in (replace(sweep, config=other), replace(sweep, ranks=4)):
        with pytest.raises(CheckpointError, match="have a result of the same knobs; got others"):
            run_sweep(changed, _silent)
    assert len(runs.calls) == 2
    result = sweep.folder / "sft" / "zero0" / "result.json"
    result.write_text(json.dumps({"stage": "sft"}))
    with pytest.raises(CheckpointError, match="must be a case's result; got"):
        run_sweep(sweep, _silent)


def test_what_the_swept_stages_start_from_is_made_once(sweep: Sweep, runs: Runs) -> None:
    config = build_config({"data": ["embedded"], "actor_model": "base"}, where="")
    whole = replace(sweep, config=config, only=("zero3",))
    run_sweep(whole, _silent)
    assert runs.calls == [
        "sweep/start",
        "sft/zero3",
        "reward/zero3",
        "ppo/zero3",
        "ppo/zero3-plain",
    ]
    start = whole.folder / "start" / "run"
    models = {
        step: load_config(whole.folder / step / "zero3" / "config.yaml")
        for step in ("sft", "reward", "ppo")
    }
    assert models["ppo"].actor_model == str(start / "sft")
    assert models["ppo"].reward_model == str(start / "reward")
    assert models["reward"].actor_model == str(start / "sft")
    assert models["reward"].reward_model == ""
    assert models["sft"].actor_model == "base"  # as configured, and not from its own outcome
    assert (start / "sft" / "model.safetensors").exists()
    run_sweep(whole, _silent)
    assert len(runs.calls) == 5


def test_a_start_that_fails_ends_the_sweep(sweep: Sweep, runs: Runs) -> None:
    runs.failing = {"sweep/start"}
    config = build_config({"data": ["embedded"], "stages": ["sft", "dpo"]}, where="")
    with pytest.raises(ConfigError, match="the stages that the sweep starts from must run; got:"):
        run_sweep(replace(sweep, config=config), _silent)


def test_there_must_be_a_case(sweep: Sweep, runs: Runs) -> None:
    with pytest.raises(ConfigError, match="a sweep must have at least one case; got none"):
        run_sweep(replace(sweep, only=("zero7",)), _silent)


def _silent(line: str) -> None:
    """Says nothing."""
