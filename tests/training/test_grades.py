"""A reward model from graded answers: what it learns, measures, saves, resumes and divides by."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.cli import main
from tandem.config.load import check_config
from tandem.config.schema import RunConfig
from tandem.config.stages import stage_of
from tandem.errors import DataError
from tandem.models.scalar import grade_scales, load_scalar_model, set_grade_scales
from tandem.objectives.grades import Scale
from tandem.training import reward_objective
from tandem.training.evaluate import grade_metrics, standardized_grades
from tandem.training.reward_objective import Means, objective_of, side_by_side
from tandem.training.stage_data import prepare_rows
from tandem.types import GradedRow, PairRow, RankedRow, Source, TokenBatch, TokenRow
from tests.jsonl import write_jsonl
from tests.ranks import on_ranks
from tests.tiny import tiny_config
from tests.training.runs import (
    assert_equal_runs,
    assert_same_measures,
    ran,
    ran_with_stops,
    ranks_ran,
    records,
)


def row(answer: int, data: str = "set") -> TokenRow:
    return TokenRow((1, answer), (False, True), Source(data, f"{data}.jsonl", 1))


def config_of(folder: Path, model: str, data: str, **changes: object) -> RunConfig:
    """Nothing is generated to be compared at the end."""
    made = {"save_async": False, "dtype": "fp32", "reward__max_steps": 2, "ppo__eval_prompts": 0}
    made |= {"reward__learning_rate": 1e-3, "stages": ["reward"], "dataset__split": [], **changes}
    config = tiny_config(folder, model, data, **made)
    check_config(config)
    return config


@pytest.fixture
def graded(tmp_path: Path, preferences: str) -> str:
    """The first answer of each preference with a grade: 3 or 4 for a chosen one, else 1 or 2."""
    lines = []
    for i, line in enumerate(Path(preferences).read_text(encoding="utf-8").splitlines()):
        given = json.loads(line)
        answer = given["chosen" if i % 2 else "rejected"]
        grade = 1 + 2 * (i % 2) + i % 3 % 2
        lines.append({"prompt": given["prompt"], "completion": answer, "rating": grade})
    path = tmp_path / "graded.jsonl"
    return write_jsonl(path, lines)


@pytest.fixture
def rated(tmp_path: Path, preferences: str) -> str:
    """Three graded answers to each prompt, two of them with the same grade."""
    lines = []
    for line in Path(preferences).read_text(encoding="utf-8").splitlines():
        given = json.loads(line)
        for answer, grade in ((given["rejected"], 1), (given["chosen"], 5), ("No.", 1)):
            lines.append({"prompt": given["prompt"], "completion": answer, "rating": grade})
    path = tmp_path / "rated.jsonl"
    return write_jsonl(path, lines)


def test_grades_are_learned_by_regression_and_the_run_is_resumed_to_the_bit(
    tmp_path: Path, tiny_model: str, graded: str
) -> None:
    config = config_of(
        tmp_path / "straight", tiny_model, graded, save_every=1, reward__keep_best=True,
        reward__eval_every=1, reward__grade_margin=1.0,
    )  # fmt: skip
    lines: list[str] = []
    straight = ran(config, lines=lines)
    assert any(line.startswith("reward: learns ") and "by regression" in line for line in lines)
    assert any("grade_margin is not read" in line for line in lines)
    assert any(line.startswith("reward: a raw score s means the grade 2.") for line in lines)
    ran_with_stops(config, tmp_path / "run", [("reward", 2)])
    assert_equal_runs(tmp_path / "run", straight)
    first, *_, last = records(straight)
    assert {"heldout_grade_correlation", "heldout_grade_rank_correlation"} <= first["values"].keys()
    assert last["values"]["heldout_loss"] < first["values"]["heldout_loss"]
    trained = records(straight)[1]["values"]
    assert trained["grade_error"] == trained["loss"]
    assert "accuracy" not in trained
    config_file = json.loads((straight / "reward" / "config.json").read_text())
    mean, std = config_file["grade_scales"]["graded"]
    assert 2 < mean < 3
    assert 0.5 < std < 1.5
    assert "score_std" in config_file
    evaluation = json.loads((straight / "evaluation.json").read_text())["models"]["reward model"]
    facts = json.loads((straight / "reward" / "MANIFEST.json").read_text())["facts"]
    for name in ("heldout_grade_explained", "heldout_grade_rank_correlation"):
        assert evaluation[name] == pytest.approx(facts[name], abs=1e-5)
    assert main(["replay", str(straight), "--step", "2"]) == 0


def test_grades_beside_pairs_have_one_denominator_on_any_micro_batches_and_ranks(
    tmp_path: Path, tiny_model: str, graded: str, preferences: str
) -> None:
    config = config_of(
        tmp_path / "whole", tiny_model, graded, reward__grades="regression",
        reward__normalize_prompts=0, reward__batch_size=12,
    )  # fmt: skip
    config = replace(config, data=(graded, preferences))
    ran(config)
    cut = replace(config, output_dir=str(tmp_path / "cut"), micro_batch_tokens=130)
    ran(cut)
    assert_same_measures(tmp_path / "cut", tmp_path / "whole")
    on_ranks(2, ranks_ran, replace(config, output_dir=str(tmp_path / "spread")))
    assert_same_measures(tmp_path / "spread", tmp_path / "whole")
    values = records(tmp_path / "whole")[1]["values"]
    assert {"accuracy", "grade_error", "score_chosen"} <= values.keys()


def test_a_mixed_step_has_a_loss_per_row_and_other_means_per_row_of_their_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scores_of(model: object, batch: TokenBatch) -> torch.Tensor:
        return batch.token_ids[:, 1].float()

    monkeypatch.setattr(reward_objective, "sequence_scores", scores_of)
    pairs = [PairRow(row(3), row(1)), PairRow(row(2), row(4))]
    rows = [*pairs, *(GradedRow(row(2, "stars"), grade) for grade in (3.0, 5.0, 7.0))]
    run: Any = SimpleNamespace(config=RunConfig(), device=torch.device("cpu"))
    step: Any = SimpleNamespace(pairs=rows, reward_renderer=SimpleNamespace(pad_token_id=0))
    model: Any = None
    objective = objective_of(run, step, model, {"stars": Scale(3.0, 2.0)})
    assert objective.per_step is not None
    loss, _ = objective.per_step(rows)
    parts = [loss(rows[:1]), loss(rows[1:4]), loss(rows[4:])]
    units = sum(objective.units(row) for row in rows)
    of_pairs = math.log1p(math.exp(-2)) + math.log1p(math.exp(2))
    of_grades = [(2 - 0) ** 2, (2 - 1) ** 2, (2 - 2) ** 2]
    assert float(sum(total for total, _ in parts)) / units == pytest.approx(
        (of_pairs + sum(of_grades)) / 5
    )
    means = {name: float(sum(sums[name] for _, sums in parts)) / units for name in parts[0][1]}
    assert means["accuracy"] == pytest.approx(0.5)
    assert means["margin"] == pytest.approx(0.0, abs=1e-6)
    assert means["score_chosen"] == pytest.approx(2.5)
    assert means["grade_error"] == pytest.approx(sum(of_grades) / 3)
    _, of_one_kind = objective.per_step(rows[:2])[0](rows[:2])
    assert "grade_error" not in of_one_kind  # there is none to take a mean of


def test_answers_to_one_prompt_are_compared_by_their_grades(
    tmp_path: Path, tiny_model: str, rated: str
) -> None:
    lines: list[str] = []
    config = config_of(
        tmp_path / "pairs", tiny_model, rated, reward__normalize_prompts=0, reward__grade_margin=0.5
    )
    ran(config, lines=lines)
    (told,) = [line for line in lines if line.startswith("reward: learns")]
    assert "graded answers as" in told
    assert any("not compared, of equal grade" in line for line in lines)
    values = records(tmp_path / "pairs")[-1]["values"]
    assert {"heldout_accuracy", "heldout_grade_rank_correlation"} <= values.keys()
    assert "heldout_grade_explained" not in values
    saved = json.loads((tmp_path / "pairs" / "reward" / "config.json").read_text())
    assert "grade_scales" not in saved
    dpo = config_of(tmp_path / "dpo", tiny_model, rated, stages=["dpo"], dpo__max_steps=1)
    ran(dpo)
    assert 0 <= records(tmp_path / "dpo")[-1]["values"]["heldout_accuracy"] <= 1


def test_all_stages_run_on_graded_answers_with_adapters_in_bf16(
    tmp_path: Path, tiny_model: str, graded: str
) -> None:
    config = config_of(
        tmp_path / "run", tiny_model, graded, dtype="bf16", lora__rank=2, ppo__steps=1,
        stages=["sft", "reward", "ppo"], dataset__split=[2, 4, 4], sft__max_steps=1,
    )  # fmt: skip
    lines: list[str] = []
    path = ran(config, lines=lines)
    assert any("answer graded below 2." in line for line in lines)
    stages = {record["stage"] for record in records(path)}
    assert stages == {"sft", "reward", "ppo"}
    whole = load_scalar_model(path / "reward", seed=0, from_causal_lm=False)
    adapter = load_scalar_model(path / "reward" / "adapter", seed=0)
    assert list(grade_scales(whole)) == ["graded"]
    assert grade_scales(adapter) == grade_scales(whole)
    set_grade_scales(whole, {})
    assert grade_scales(whole) == {}


def test_a_graded_answer_that_is_too_long_is_dropped_from_its_ranking_and_counted(
    tmp_path: Path, tiny_model: str
) -> None:
    long = "word " * 300
    rows = [
        {"prompt": f"Q{i}?", "completion": answer, "score": score}
        for i in range(3)
        for answer, score in (("Yes.", 3), ("No.", 1), (long, 2), (long, 0))
    ]
    rows += [{"prompt": "R?", "completion": answer, "score": len(answer)} for answer in ("a", long)]
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, rows)
    config = config_of(tmp_path / "run", tiny_model, str(path), dataset__heldout=0.0)
    prepared = prepare_rows(config, tiny_model, tiny_model)
    found = [row for row in prepared.pairs if isinstance(row, RankedRow)]
    assert [row.grades for row in found] == [(3, 1)] * 3
    (account,) = prepared.ledger.datasets.values()
    assert account.balances()
    assert account.used["pairs"] == 6
    (dropped,) = account.dropped.values()
    assert dropped.count == 8  # the long answers, and the one that is left alone
    assert dropped.first[0] == f"{path}:3"


def test_grades_that_do_not_vary_are_refused(tmp_path: Path, tiny_model: str) -> None:
    rows = [{"prompt": f"Q{i}?", "completion": "a", "score": 3} for i in range(20)]
    path = tmp_path / "same.jsonl"
    write_jsonl(path, rows)
    told = "data set same must have different grades for stage reward to learn; got 3 to 3 for its"
    with pytest.raises(DataError, match=told):
        ran(config_of(tmp_path / "run", tiny_model, str(path)))


def test_graded_answers_lie_beside_pairs_on_the_scale_of_their_data_set() -> None:
    rows = [
        GradedRow(row(2, "stars"), 5.0),
        PairRow(row(3), row(4), margin=0.5),
        RankedRow((row(5), row(6), row(7)), (1, 2, 2), grades=(4.0, 1.0, 1.0)),
        GradedRow(row(8, "thumbs"), 0.0),
    ]
    scales = {"stars": Scale(3.0, 2.0), "thumbs": Scale(0.5, 0.5)}
    batch, judged = side_by_side(rows, 0, scales, 0.25)
    assert batch.token_ids[:, 1].tolist() == [2, 3, 5, 8, 4, 6, 7]
    assert (judged.better.tolist(), judged.worse.tolist()) == ([1, 2, 2], [4, 5, 6])
    assert judged.margins.tolist() == [0.5, 0.75, 0.75]  # the grades' difference times 0.25
    assert (judged.graded.tolist(), judged.grades.tolist()) == ([0, 3], [1.0, -1.0])
    _, alone = side_by_side(rows[:1], 0, scales)
    assert (len(alone.better), alone.better.dtype) == (0, torch.int64)
    assert Means.of(rows) == Means(2.0, 2.0)
    assert Means.of(rows[:1]) == Means(0.0, 1.0)


def test_the_pairs_of_a_long_ranking_are_found_once() -> None:
    """Finding n^2 of them for each would take n^4 steps: 20 s for 128 answers."""
    asked = []

    class Counted(RankedRow):
        @property
        def pairs(self) -> tuple[tuple[int, int], ...]:
            asked.append(self.ranks)
            return RankedRow.pairs.fget(self)  # type: ignore[attr-defined, no-any-return]

    answers = tuple(row(2 + i) for i in range(9))
    ranks = (1, 1, 2, 3, 4, 5, 6, 7, 8)
    _, judged = side_by_side([Counted(answers, ranks), PairRow(row(3), row(4))], 0)
    assert asked == [ranks]
    assert judged.weights.tolist() == pytest.approx([1 / 35] * 35 + [1])


def test_held_out_grades_are_measured_per_data_set_on_known_scales() -> None:
    rows = [GradedRow(row(2, "a"), grade) for grade in (1.0, 2.0, 3.0)]
    rows += [GradedRow(row(2, "b"), grade) for grade in (30.0, 20.0, 10.0)]
    scores = torch.tensor([-1.0, 0.0, 1.0, -1.0, 0.0, 1.0])
    found = grade_metrics(scores, rows, {})
    assert found["heldout_grade_rank_correlation/a"] == pytest.approx(1.0)
    assert found["heldout_grade_correlation/b"] == pytest.approx(-1.0)
    assert found["heldout_grade_correlation"] == pytest.approx(0.0, abs=1e-6)
    assert not any("explained" in name for name in found)
    only = {"a": Scale(2.0, 1.0)}
    standard = standardized_grades(rows, only).tolist()
    assert standard[:3] == [-1, 0, 1]
    assert standard[3:] == pytest.approx([1.5**0.5, 0.0, -(1.5**0.5)]), "its scale may be another"
    assert grade_metrics(scores[:3], rows[:3], only)["heldout_grade_explained"] == 1.0
    assert grade_metrics(torch.zeros(0), [], only) == {}


def test_kto_and_notes_know_graded_answers(tmp_path: Path, tiny_model: str, rated: str) -> None:
    for stages in (["kto"], ["reward", "kto"]):
        config = config_of(
            tmp_path, tiny_model, rated, stages=stages, dataset__heldout=0.3,
            reward__grades="regression",
        )  # fmt: skip
        rows = prepare_rows(config, tiny_model, tiny_model)
        assert {row.is_desirable for row in rows.labelled} == {True, False}
        assert {row.is_desirable for row in rows.heldout_labelled} == {True, False}
    pairs = replace(config, stages=("reward",))
    rows = prepare_rows(pairs, tiny_model, tiny_model)
    assert replace(rows, grades="pairs", heldout_pairs=[]).heldout_of(stage_of("reward"))
