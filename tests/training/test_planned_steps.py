"""What is said of a stage's steps before the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tandem.config.stages import stage_of
from tandem.data.loader import BatchOrder
from tandem.training.checks.planned_steps import planned_steps
from tandem.training.stage_data import StepRows


def planned(stage: str, num_rows: int, batch: int, *, heldout: int = 3, **more: Any) -> list[str]:
    rows: Any = SimpleNamespace(heldout_of=lambda stage: [None] * heldout)
    order = BatchOrder(num_rows=num_rows, batch_size=batch, seed=1, **{"epochs": 1.0, **more})
    return planned_steps(stage_of(stage), order, rows)


def test_few_rows_and_many() -> None:
    few, advice = planned("sft", 10, 32)
    assert few == "sft: 1 optimizer step of 10 rows, 1 epoch of 10 rows"
    assert advice.startswith("note: sft learns little in 1 step. Raise --sft.epochs, lower")
    (many,) = planned("reward", 4000, 32, epochs=2.5)
    assert many == "reward: 313 optimizer steps of 32 rows, 2.5 epochs of 4,000 rows"


def test_few_steps_that_were_asked_for_are_no_surprise() -> None:
    assert len(planned("sft", 1000, 32, max_steps=2)) == 1


def test_few_prompts_and_none_held_out() -> None:
    plan, advice = planned("ppo", 19, 64, epochs=None, max_steps=200)
    assert plan == "ppo: 200 rollouts of 64 prompts, out of 19: each comes about 674 times"
    assert "each comes 3.37 times per rollout. Lower --ppo.prompts-per-step" in advice
    plan, advice = planned("grpo", 100, 4, heldout=0, epochs=None, max_steps=5)
    assert plan.endswith("4 prompts, out of 100: each comes about 0.2 times")
    assert "grpo has no held-out prompt" in advice


def test_each_stage_has_its_own_held_out_rows() -> None:
    names = ("heldout_sft", "heldout_pairs", "heldout_dpo_pairs", "heldout_labelled")
    rows: Any = SimpleNamespace(**{name: name for name in (*names, "heldout_prompts")})
    rows.grades, rows.heldout_graded = "pairs", "heldout_graded"
    stages = ("sft", "reward", "dpo", "kto", "ppo")
    found = [StepRows.heldout_of(rows, stage_of(stage)) for stage in stages]
    assert found == [*names, "heldout_prompts"]
