"""Predicted evaluations: how many there are, what they read, and what their time grows with."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.load import build_config
from tandem.config.stages import in_order, stage_of
from tandem.metrics.log import read_metrics
from tandem.plan.again import predict_again
from tandem.plan.knobs import nested
from tandem.plan.lengths import rows_by_stage
from tandem.predict.constants import constants
from tandem.predict.evaluation import num_evaluations, num_policies
from tandem.predict.hardware import find_hardware
from tandem.predict.memory import Models
from tandem.predict.models import config_of, config_of_shape
from tandem.predict.record import EVALUATE, add_outcomes, read_outcomes
from tandem.predict.rows import Heldout, Rows, recorded_rows
from tandem.predict.stage import StagePrediction, predict_stage
from tandem.training.measured_rows import measured_heldout
from tandem.training.stage_data import prepare_rows
from tests.tiny import save_tiny_model, tiny_config, write_preferences
from tests.training.runs import ran

SHAPE = config_of_shape("layers=8,width=512,heads=8,vocabulary=8192")
ONE = Rows(count=400, tokens=200, answered=100, longest=256, cost=220)
KINDS = ("texts", "pairs", "labelled", "prompts", "ptx")
HELDOUT = Heldout(**dict.fromkeys(KINDS, ONE))
ROWS = replace(ONE, heldout=HELDOUT)
CPU = replace(find_hardware("1xH100"), kind="cpu", count=1, packs=True, memory=64e9)


def predicted(stage: str, rows: Rows = ROWS, **knobs: Any) -> StagePrediction:
    asked = {"actor_model": "x", "reward_model": "y", "stages": [stage]}
    named = {name.replace("__", "."): value for name, value in knobs.items()}
    config = build_config(nested({**asked, **named}), where="")
    return predict_stage(config, stage_of(stage), Models.of(SHAPE, SHAPE), rows, CPU, 1)


def each(stage: str, rows: Rows = ROWS, **knobs: Any) -> float:
    found = predicted(stage, rows, **knobs).evaluations
    assert found is not None
    return found.each


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (3, 2), (4, 2), (5, 0), (7, 50), (50, 7)])
def test_there_are_as_many_as_the_loop_of_a_stage_makes(steps: int, every: int) -> None:
    due = [s for s in range(1, steps + 1) if s == steps or (every and s % every == 0)]
    assert num_evaluations(steps, every) == 1 + len(due)
    assert num_evaluations(0, every) == 0


def test_a_run_evaluates_as_often_and_compares_as_many_models(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    data = write_preferences(tmp_path / "prefs.jsonl")
    config = tiny_config(tmp_path / "run", model, data, sft__eval_every=2, reward__eval_every=0,
                         ppo__eval_every=1, ppo__ema=True)  # fmt: skip
    lines: list[str] = []
    folder = ran(config, lines=lines)
    measured = [r.stage for r in read_metrics(folder) if "seconds/evaluate" in r.values]
    for stage in in_order(config.stages):
        found = predict_stage(config, stage, Models.of(SHAPE, SHAPE), ROWS, CPU, 1)
        assert found.work.steps == 3
        assert found.evaluations is not None
        assert found.evaluations.count == measured.count(stage.name), stage.name
    compared = [line for line in lines if line.startswith("comparing: ")]
    assert len(compared) == num_policies(config) == 4
    assert found.comparison is not None
    assert found.comparison.models == 4


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "kto", "ppo"])
def test_time_grows_with_the_rows_as_far_as_they_are_read(stage: str) -> None:
    longer = replace(ONE, tokens=400, longest=512, cost=440)
    more = replace(ROWS, heldout=Heldout(**dict.fromkeys(KINDS, replace(ONE, count=8000))))
    longer_rows = replace(ROWS, heldout=Heldout(**dict.fromkeys(KINDS, longer)))
    none = replace(ROWS, heldout=Heldout())
    assert each(stage, none) == 0
    assert each(stage, longer_rows) > each(stage)
    if stage == "ppo":
        assert each(stage, more) == each(stage)  # of prompts eval_prompts
        assert each(stage, ppo__eval_prompts=128) > 1.5 * each(stage)
        assert each(stage, ppo__ema=True) > 1.5 * each(stage)
        assert each(stage, ppo__ptx_data=["z"]) > each(stage)
    else:
        assert each(stage, more, dataset__eval_rows=0) > 10 * each(stage)
        assert each(stage, more, dataset__eval_rows=100) < each(stage)


def test_a_total_has_its_evaluations_and_none_where_held_out_rows_are_not_known() -> None:
    found, without = predicted("sft"), predicted("sft", replace(ROWS, heldout=None))
    assert found.evaluations is not None
    assert without.evaluations is None
    assert without.comparison is None
    assert found.total_seconds is not None
    assert without.total_seconds is not None
    evaluated = found.evaluations.count * found.evaluations.each
    assert found.total_seconds == pytest.approx(without.total_seconds + evaluated)
    dpo = predicted("dpo").evaluations
    assert dpo is not None
    assert dpo.once > 0  # the reference, once
    assert dpo.seconds == pytest.approx(dpo.count * dpo.each + dpo.once)


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "kto"])
def test_its_terms_make_its_seconds(stage: str) -> None:
    known = constants("cpu", CPU.name).phases
    found = predicted(stage).evaluations
    assert found is not None
    rates = known.get("evaluate") or known["score"]
    made = sum(rates.get(name, 1.0) * value for name, value in found.terms.items())
    assert found.each == pytest.approx(made)


def test_a_run_writes_what_its_evaluations_take_beside_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of held-out rows as long as those that a plan finds in the text."""
    monkeypatch.setattr("tandem.training.forecast.known_machine", lambda device: CPU)
    model = save_tiny_model(tmp_path / "model")
    data = write_preferences(tmp_path / "prefs.jsonl")
    config = tiny_config(tmp_path / "run", model, data, sft__eval_every=2)
    folder = ran(config)
    found = {o.stage: o for o in read_outcomes(folder) if o.phase == EVALUATE}
    assert set(found) == {"sft", "reward", "ppo"}
    planned = rows_by_stage(config, model)
    policy = config_of(model)
    for stage in in_order(config.stages):
        outcome = found[stage.name]
        assert outcome.measured_seconds
        assert outcome.predicted_seconds
        assert bool(outcome.terms) == (stage.name != "ppo"), "that of answers is not fitted"
        plan = predict_stage(
            config, stage, Models.of(policy, policy), planned[stage.name], CPU, 1
        ).evaluations
        assert plan is not None
        assert outcome.predicted_seconds == pytest.approx(plan.each, rel=0.05), stage.name
    # Held-out rows are recorded: what is predicted again is of these and today's formulas.
    add_outcomes(folder, [replace(o, predicted_seconds=1e9, terms={}) for o in found.values()])
    predict_again(folder, CPU)
    again = {o.stage: o for o in read_outcomes(folder) if o.phase == EVALUATE}
    for stage, outcome in found.items():
        assert again[stage].predicted_seconds == pytest.approx(outcome.predicted_seconds), stage
        assert again[stage].terms == pytest.approx(outcome.terms)
        assert again[stage].slack_bytes == outcome.slack_bytes == constants("cpu").slack(1)
    assert recorded_rows(asdict(ROWS)) == ROWS
    assert recorded_rows(asdict(ONE)) == ONE, "from before they were recorded"


def test_held_out_answers_are_measured_with_a_shared_prompt_once(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    data = write_preferences(tmp_path / "prefs.jsonl")
    config = tiny_config(tmp_path / "run", model, data, stages=["kto"])
    rows = prepare_rows(config, model, model)
    found, planned = measured_heldout(rows), rows_by_stage(config, model)["kto"].heldout
    assert planned is not None
    assert found.labelled.count == len(rows.heldout_labelled) > 0
    assert found.labelled.tokens < found.labelled.cost
    for kind in ("texts", "labelled", "prompts", "pairs"):
        ours, theirs = getattr(found, kind), getattr(planned, kind)
        if ours.count:
            assert ours.count == theirs.count, kind
            assert ours.tokens == pytest.approx(theirs.tokens, rel=0.05), kind
            assert ours.answered == pytest.approx(theirs.answered, rel=0.05), kind
