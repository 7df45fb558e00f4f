"""Runs that are stopped and continued, and what two runs must have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tandem.config.schema import RunConfig
from tandem.config.stages import stage_names
from tandem.metrics.answers import ANSWER_FILES
from tandem.metrics.log import MetricLog
from tandem.parallel.world import World
from tandem.training.run_stages import train

# What depends on the clock and on the machine.
CLOCK = (
    "seconds",
    "reward_seconds",
    "tokens_per",
    "samples_per",
    "tflops",
    "peak_memory",
    "rank_wait",
)


class StopError(Exception):
    """Stands for a kill."""


def ran(config: RunConfig, world: World | None = None, lines: list[str] | None = None) -> Path:
    """The folder of a run that nothing stopped."""
    print_line = (lines if lines is not None else []).append
    return train(config, command="test", print_line=print_line, world=world).path


def stop_at(patch: pytest.MonkeyPatch, stage: str, step: int) -> None:
    """Let a run stop after the updates of a step, before anything is written of it."""
    log = MetricLog.log

    def stopping(self: MetricLog, at: int, values: dict[str, float]) -> object:
        if self._stage == stage and at == step:
            raise StopError
        return log(self, at, values)

    patch.setattr(MetricLog, "log", stopping)


def ran_with_stops(config: RunConfig, folder: Path, stops: Sequence[tuple[str, int]]) -> list[str]:
    """The lines of a run in `folder` that was stopped and continued again and again."""
    config = replace(config, output_dir=str(folder))
    lines: list[str] = []
    for stage, step in stops:
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, stage, step)
            with pytest.raises(StopError):
                ran(config, lines=lines)
    ran(config, lines=lines)
    return lines


def records(folder: Path, unlike: tuple[str, ...] = CLOCK) -> list[dict[str, Any]]:
    """What a run measured, but for names that begin with one of `unlike`."""
    found = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        values = {n: v for n, v in record["values"].items() if not n.startswith(unlike)}
        found.append({"stage": record["stage"], "step": record["step"], "values": values})
    return found


def assert_equal_runs(ours: Path, theirs: Path) -> None:
    """Two runs wrote the same weights, bit for bit, and measured the same."""
    names = sorted(p.relative_to(theirs) for p in theirs.rglob("*.safetensors"))
    assert names == sorted(p.relative_to(ours) for p in ours.rglob("*.safetensors"))
    assert names
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert records(ours) == records(theirs)
    for name in ANSWER_FILES:
        assert answer_lines(ours / name) == answer_lines(theirs / name), name
    for step in stage_names():
        if (theirs / step).is_dir():
            assert figures(ours / step) == figures(theirs / step), step


def assert_same_measures(ours: Path, theirs: Path, unlike: tuple[str, ...] = ()) -> None:
    """Two runs measured the same, up to how sums were put together, but for names that begin with
    one of `unlike`, and what is of ranks."""
    unlike = (*CLOCK, "rank_", *unlike)
    for left, right in zip(records(ours, unlike), records(theirs, unlike), strict=True):
        assert left == {**right, "values": pytest.approx(right["values"], rel=2e-3, abs=2e-4)}


def assert_same_run(ours: Path, theirs: Path, unlike: tuple[str, ...] = ()) -> None:
    """They left the same weights, too, up to rounding."""
    assert_same_measures(ours, theirs, unlike)
    for part in ("sft", "reward", "ppo/actor", "ppo/critic", "ppo/ema"):
        weights = load_file(ours / part / "model.safetensors")
        expected = load_file(theirs / part / "model.safetensors")
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert float((weights[name] - weight).abs().mean()) < 1e-5, (part, name)


def ranks_ran(world: World, config: RunConfig) -> None:
    """`ran`, as `tests.ranks.on_ranks` calls it."""
    ran(config, world=world)


def answer_lines(path: Path) -> list[str]:
    """The lines of a file of recorded answers, which have no times."""
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def figures(folder: Path) -> dict[str, float]:
    """The numbers in a finished step's manifest."""
    facts = json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8"))["facts"]
    return {name: value for name, value in facts.items() if isinstance(value, float)}


def weights_of(run: Path, stage: str) -> dict[str, Tensor]:
    """A policy's, by name."""
    return load_file(run / stage / "actor" / "model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
