"""`tandem eval` of policies that learned from preferences: how they tell held-out ones apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.metrics.log import read_metrics
from tandem.training.comparing.eval_command import evaluate_run
from tests.tiny import tiny_config, write_preferences
from tests.training.runs import ran

NAMES = ("heldout_accuracy", "heldout_margin")


def trained(folder: Path, model: str, data: str, *stages: str, **knobs: Any) -> str:
    """A run's folder, with a learning rate that moves the policy."""
    section = stages[-1]
    knobs = {f"{section}__learning_rate": 1e-3, **knobs}
    ran(tiny_config(folder, model, data, stages=list(stages), **knobs))
    return str(folder)


def last_evaluation(path: str, stage: str) -> dict[str, float]:
    """What the stage itself measured after its last step."""
    values: dict[str, float] = {}
    for record in read_metrics(path):
        if record.stage == stage:
            values |= {name: record.values[name] for name in NAMES if name in record.values}
    return values


@pytest.mark.parametrize(
    ("stages", "knobs"),
    [
        (("dpo",), {}),
        (("sft", "dpo"), {}),
        (("dpo",), {"dpo__loss": "simpo"}),
        (("kto",), {}),
    ],
)
def test_the_figures_are_those_of_the_stage(
    stages: tuple[str, ...],
    knobs: dict[str, Any],
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = trained(tmp_path / "run", tiny_model, preferences, *stages, **knobs)
    models = evaluate_run(path, 0)["models"]
    stage = stages[-1]
    found = {name: models[stage][name] for name in NAMES}
    assert found == pytest.approx(last_evaluation(path, stage), rel=1e-4, abs=1e-6)
    assert found["heldout_margin"] != 0
    assert not any(name in models[label] for label in models if label != stage for name in NAMES)
    assert json.loads((tmp_path / "run/evaluation.json").read_text())["models"] == models


def test_other_pairs_a_named_reference_and_models_beside(
    tmp_path: Path, tiny_model: str, preferences: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = trained(tmp_path / "other", tiny_model, preferences, "sft")
    reference = f"{other}/sft"
    path = trained(tmp_path / "run", tiny_model, preferences, "dpo", reference_model=reference)
    data = write_preferences(tmp_path / "new.jsonl", num=5)
    found = evaluate_run(path, 0, data=[str(data)], models=[reference])
    assert found["evaluated"]["pairs"] == 5
    models = found["models"]
    assert models["sft"]["heldout_margin"] == 0, "the reference itself"
    assert models["sft"]["heldout_accuracy"] == 0.5
    assert models["dpo"]["heldout_margin"] != 0
    assert "heldout_margin" not in models["base"]
