"""The stages that learn from preferences: what they load, learn, resume and divide by."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cli import main
from tandem.config.load import build_config, check_config
from tandem.config.preferences import KTOConfig
from tandem.config.rules import rule_problems
from tandem.config.schema import RunConfig
from tandem.engine.placement import Model, Placement
from tandem.errors import ConfigError, DataError
from tandem.plan.run import plan_memory
from tandem.training import dpo
from tandem.training.calibration import calibration_error, reliability
from tandem.training.comparing import compare
from tandem.training.comparing.best_of_n import best_of_n
from tandem.training.kto import imbalance, mismatched, next_others
from tandem.training.reference import ReferencedPolicy
from tandem.training.reward_objective import side_by_side
from tandem.training.scored_answers import ScoredAnswers
from tandem.types import LabelledRow, PairRow, RankedRow, Rollout, Source, TokenRow
from tests.jsonl import write_jsonl
from tests.ranks import on_ranks
from tests.tiny import tiny_config, tiny_llama
from tests.training.runs import (
    assert_equal_runs,
    assert_same_measures,
    ran,
    ran_with_stops,
    ranks_ran,
    records,
)

HERE = Source("set", "set.jsonl", 1)
SHORT = {"max_steps": 2, "epochs": 10, "batch_size": 8, "learning_rate": 1e-3}


def row(prompt: tuple[int, ...], answer: tuple[int, ...]) -> TokenRow:
    mask = (False,) * len(prompt) + (True,) * len(answer)
    return TokenRow((*prompt, *answer), mask, HERE)


def config_of(folder: Path, model: str, data: str, stage: str, **changes: object) -> RunConfig:
    """Nothing is generated to be compared at the end."""
    made = {"dpo": dict(SHORT), "kto": dict(SHORT), "save_async": False, "dtype": "fp32"}
    made |= {"ppo__eval_prompts": 0, **changes}
    config = tiny_config(folder, model, data, stages=[stage], dataset__split=[], **made)
    check_config(config)
    return config


@pytest.fixture
def labelled(tmp_path: Path, preferences: str) -> str:
    """Every second row of the preferences as one labelled answer, three good to one bad."""
    lines = []
    for i, line in enumerate(Path(preferences).read_text(encoding="utf-8").splitlines()):
        given = json.loads(line)
        good = i % 4 < 3
        completion = given["chosen" if good else "rejected"]
        lines.append({"prompt": given["prompt"], "completion": completion, "label": good})
    path = tmp_path / "labelled.jsonl"
    return write_jsonl(path, lines)


@pytest.fixture
def ranked(tmp_path: Path, preferences: str) -> str:
    """Rankings of three answers, by ranks or by scores, and pairs with a margin, in turn."""
    lines = []
    for i, line in enumerate(Path(preferences).read_text(encoding="utf-8").splitlines()):
        given = json.loads(line)
        best, worst = given["chosen"], given["rejected"]
        scored = [{"response": text, "overall_score": score} for text, score in
                  ((worst, "1.5"), (best, 4), ("No.", 1.5), ("Unrated.", None))]  # fmt: skip
        kinds = (
            {"chosen": best, "rejected": worst, "margin": 0.5},
            {"answers": [worst, best, "No."], "ranks": [2, 1, 2]},
            {"chosen": best, "rejected": worst, "margin": 0.5},
            {"completions": scored},
        )
        lines.append({"prompt": given["prompt"], **kinds[i % 4]})
    path = tmp_path / "ranked.jsonl"
    return write_jsonl(path, lines)


@pytest.mark.parametrize("loss", ["ipo", "simpo", "orpo", "cdpo", "robust", "apo-zero", "apo-down"])
def test_a_loss_by_name_trains_and_a_reference_is_loaded_only_where_it_is_read(
    tmp_path: Path, tiny_model: str, preferences: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[bool] = []
    one, both = Placement.policy, dpo.place_referenced

    def counting(self: Placement, source: Model, *, trained: bool, **others: Any) -> Any:
        placed.append(trained)
        return one(self, source, trained=trained, **others)

    def counted(*args: Any, **others: Any) -> ReferencedPolicy:
        with monkeypatch.context() as patch:
            patch.setattr(Placement, "policy", counting)
            return both(*args, **others)

    monkeypatch.setattr(dpo, "place_referenced", counted)
    config = config_of(tmp_path / "run", tiny_model, preferences, "dpo", dpo__loss=loss)
    lines: list[str] = []
    ran(config, lines=lines)
    free = loss in ("simpo", "orpo")
    assert placed == ([True] if free else [True, False])
    beta = "2" if loss == "simpo" else "0.1"
    (told,) = [line for line in lines if line.startswith("dpo: loss")]
    assert told.startswith(f"dpo: loss {loss}, beta {beta} (its paper's)")
    assert ("no reference is loaded" in told) == free
    start, *_, last = records(tmp_path / "run")
    assert last["values"]["heldout_loss"] < start["values"]["heldout_loss"]
    assert last["values"]["logprob_chosen"] < 0
    plan = plan_memory(config, "dpo", tiny_llama(64).config)
    assert any("reference" in name for name in plan.resting) != free


@pytest.mark.parametrize(("stage", "data"), [("dpo", "preferences"), ("kto", "labelled")])
def test_a_gradient_does_not_depend_on_micro_batches_or_ranks(
    tmp_path: Path, tiny_model: str, stage: str, data: str, request: pytest.FixtureRequest
) -> None:
    rows = request.getfixturevalue(data)
    config = config_of(tmp_path / "whole", tiny_model, rows, stage, dpo__loss="orpo")
    ran(config)
    cut = replace(config, output_dir=str(tmp_path / "cut"), micro_batch_tokens=130)
    ran(cut)
    assert_same_measures(tmp_path / "cut", tmp_path / "whole")
    spread = replace(config, output_dir=str(tmp_path / "spread"))
    on_ranks(2, ranks_ran, spread)
    assert_same_measures(tmp_path / "spread", tmp_path / "whole")


def test_a_ranking_counts_as_one_row_however_it_is_cut(
    tmp_path: Path, tiny_model: str, ranked: str
) -> None:
    config = config_of(
        tmp_path / "whole", tiny_model, ranked, "reward", reward__normalize_prompts=0
    )
    lines: list[str] = []
    ran(config, lines=lines)
    assert any("with a margin, which the reward model's loss reads: 60" in line for line in lines)
    cut = replace(config, output_dir=str(tmp_path / "cut"), micro_batch_tokens=200)
    ran(cut)
    assert_same_measures(tmp_path / "cut", tmp_path / "whole")
    assert main(["replay", str(tmp_path / "whole"), "--step", "2"]) == 0


def test_kto_is_stopped_and_continued_and_tells_of_unequal_labels(
    tmp_path: Path, tiny_model: str, labelled: str
) -> None:
    config = config_of(tmp_path / "straight", tiny_model, labelled, "kto", save_every=1)
    lines: list[str] = []
    straight = ran(config, lines=lines)
    assert any("give --kto.undesirable-weight" in line for line in lines)
    assert any(" = used 120 (pairs " in line for line in lines)
    ran_with_stops(config, tmp_path / "run", [("kto", 2)])
    assert_equal_runs(tmp_path / "run", straight)
    first = records(straight)[1]["values"]
    assert (first["kto_baseline"], first["loss"]) == (0.0, pytest.approx(0.5, abs=1e-6))
    assert 0.5 < first["desirable_share"] < 1
    assert main(["replay", str(straight), "--step", "2"]) == 0


def test_labelled_rows_are_unused_where_no_stage_reads_labels(
    tmp_path: Path, tiny_model: str, labelled: str
) -> None:
    with pytest.raises(ConfigError, match="stage dpo must have at least one row; got none"):
        ran(config_of(tmp_path / "run", tiny_model, labelled, "dpo"))


def test_kto_refuses_rows_of_one_label(tmp_path: Path, tiny_model: str, labelled: str) -> None:
    good = [line for line in Path(labelled).read_text().splitlines() if "true" in line]
    Path(labelled).write_text("\n".join(good))
    with pytest.raises(DataError, match="kto must have good and bad answers to train on; got"):
        ran(config_of(tmp_path / "run", tiny_model, labelled, "kto"))


def test_answers_are_mismatched_over_the_whole_step_never_within_a_prompt() -> None:
    rows = [
        LabelledRow(row((1, 2), (5, 6)), True),
        LabelledRow(row((1, 2), (7,)), False),
        LabelledRow(row((3,), (8, 9)), True),
    ]
    found = mismatched(rows)
    # Row 0 skips row 1, whose prompt is its own; the last takes the first's.
    assert [r.token_ids for r in found] == [(1, 2, 8, 9), (1, 2, 8, 9), (3, 5, 6)]
    assert [r.response_mask.index(True) for r in found] == [2, 2, 1]
    assert mismatched(rows[:2]) == []
    long = [LabelledRow(row((1,), (5, 6, 7)), True), LabelledRow(row((2, 3), (4,)), False)]
    assert mismatched(long)[1].token_ids == (2, 3, 5, 6)  # no longer than the longest row


@given(st.lists(st.integers(0, 2), max_size=8))
def test_the_next_other_prompt_is_found_by_few_comparisons(prompts: list[int]) -> None:
    compared = []

    class Prompt(int):
        def __ne__(self, other: object) -> bool:
            compared.append(other)
            return not int(self) == other

    count = len(prompts)
    expected = [
        next(((i + k) % count for k in range(1, count) if prompts[(i + k) % count] != prompt), -1)
        for i, prompt in enumerate(prompts)
    ]
    assert next_others(list(map(Prompt, prompts))) == expected
    assert len(compared) <= 2 * count


def test_what_to_set_for_unequal_labels() -> None:
    good, bad = (LabelledRow(row((1,), (2,)), label) for label in (True, False))
    assert imbalance([good, bad], KTOConfig()) == ""
    assert "undesirable-weight 2.25 to 3" in imbalance([good] * 3 + [bad], KTOConfig())
    assert "--kto.desirable-weight 3 to 4" in imbalance([good] + [bad] * 3, KTOConfig())
    weights = KTOConfig(undesirable_weight=2.5)
    assert imbalance([good] * 3 + [bad], weights) == ""


def test_side_by_side_has_each_answer_once_and_every_pair() -> None:
    pair = PairRow(row((1,), (2,)), row((1,), (3,)), margin=0.5)
    ranking = RankedRow((row((4,), (5,)), row((4,), (6,)), row((4,), (7,))), (1, 2, 2))
    batch, compared = side_by_side([pair, ranking], 0)
    assert batch.token_ids.tolist() == [[1, 2], [4, 5], [1, 3], [4, 6], [4, 7]]
    assert compared.better.tolist() == [0, 1, 1]
    assert compared.worse.tolist() == [2, 3, 4]
    assert compared.weights.tolist() == [1.0, 0.5, 0.5]
    assert compared.margins.tolist() == [0.5, 0.0, 0.0]


def test_online_dpo_learns_resumes_and_is_evaluated(
    tmp_path: Path,
    tiny_model: str,
    preferences: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def few(prompts, completions, **columns):\n"
        "    return [-0.1 * len(set(c)) for c in completions]\n"
    )
    config = config_of(
        tmp_path / "straight",
        tiny_model,
        preferences,
        "online-dpo",
        sampling__samples_per_prompt=4,
        ppo__reward_function=f"{rewards}:few",
        ppo__missing_eos_penalty=0.0,
        ppo__steps=2,
        ppo__eval_prompts=2,
        sampling__max_new_tokens=6,
        save_every=1,
    )
    straight = ran(config)
    ran_with_stops(config, tmp_path / "run", [("online-dpo", 2)])
    assert_equal_runs(tmp_path / "run", straight)
    values = records(straight)[1]["values"]
    assert values["preference_pairs"] == 8 * (1 - values["tied_prompts"])
    assert values["updates"] == 2 * math.ceil(values["preference_pairs"] / 2)
    assert values["kl"] == 0.0
    assert {"advantage_mean", "value_loss", "kl_coef"}.isdisjoint(values)
    later = records(straight)[2:]
    assert fmean(r["values"]["preference_margin"] for r in later) > 0
    plan = plan_memory(config, "online-dpo", tiny_llama(64).config)
    assert not any("critic" in name for name in (*plan.resting, *plan.phases))
    compared: list[int] = []
    score = compare.score_answers

    def counting(rollout: Rollout, *args: Any) -> ScoredAnswers:
        compared.append(len(rollout))
        return score(rollout, *args)

    monkeypatch.setattr(compare, "score_answers", counting)
    assert main(["eval", str(straight), "--best-of", "4"]) == 0
    assert compared == [2, 2]  # one answer per prompt, though training samples four
    assert "Best of n samples" in capsys.readouterr().out
    frontier = json.loads((straight / "evaluation.json").read_text())["best_of_n"]
    assert list(frontier) == ["base"]
    best = [point["mean_reward"] for point in frontier["base"]]
    assert [point["n"] for point in frontier["base"]] == [1, 2, 4]
    assert best == sorted(best)
    two_ranks = replace(config, output_dir=str(tmp_path / "spread"))
    on_ranks(2, ranks_ran, two_ranks)
    assert_same_measures(tmp_path / "spread", straight)


def test_online_dpo_needs_two_answers_a_prompt() -> None:
    with pytest.raises(ConfigError, match=r"samples_per_prompt must be at least 2 if online-d"):
        check_config(RunConfig(stages=("online-dpo",)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kl_coef": 0.2}, "ppo.kl_coef must keep its default in online-dpo, .*; got 0.2"),
        ({"critic": {"learning_rate": 1e-3}}, "ppo.critic must .*; got learning_rate 0.001"),
        ({"clip_ratio": 0.1, "gamma": 0.9}, "ppo.gamma must .*; ppo.clip_ratio must keep its"),
    ],
)
def test_online_dpo_refuses_knobs_of_ppo_that_it_does_not_read(
    changes: dict[str, object], told: str
) -> None:
    values = {"stages": ["online-dpo"], "sampling": {"samples_per_prompt": 2}, "ppo": changes}
    with pytest.raises(ConfigError, match=told):
        check_config(build_config(values))
    assert not [p for p in rule_problems(build_config({"ppo": changes})) if "keep its" in p]


def test_a_knob_that_the_loss_does_not_read_is_refused(tmp_path: Path) -> None:
    for changes, loss in (({"simpo_gamma": 2.0}, "ipo"), ({"label_smoothing": 0.1}, "orpo")):
        config = RunConfig()
        dpo = replace(config.dpo, loss=loss, **changes)  # type: ignore[arg-type]
        (name,) = changes
        with pytest.raises(ConfigError, match=f"dpo.{name} must go with dpo.loss"):
            check_config(replace(config, dpo=dpo))


def test_an_sft_term_adds_the_chosen_answers_mean_log_prob(
    tmp_path: Path, tiny_model: str, preferences: str
) -> None:
    """Before the first update DPO's own loss is log 2."""
    lines: list[str] = []
    more = {"dpo__sft_coef": 0.5, "dpo__max_steps": 1}
    ran(config_of(tmp_path / "run", tiny_model, preferences, "dpo", **more), lines=lines)
    assert any("SFT term 0.5" in line for line in lines)
    first = next(r["values"] for r in records(tmp_path / "run") if "loss" in r["values"])
    assert first["loss"] == pytest.approx(math.log(2) - 0.5 * first["logprob_chosen"], rel=1e-5)
    config = RunConfig()
    with pytest.raises(ConfigError, match=r"dpo\.sft_coef must be 0 with dpo.loss orpo"):
        check_config(replace(config, dpo=replace(config.dpo, loss="orpo", sft_coef=1.0)))


def test_best_of_n_is_the_mean_over_all_subsets() -> None:
    scores = torch.tensor([[1.0, 5.0, 2.0, 4.0, 3.0, 0.5], [0.0, -1.0, 7.0, 2.0, 2.0, 1.0]])
    points = best_of_n(scores)
    assert [point.n for point in points] == [1, 2, 4, 6]
    for point in points:
        slow = fmean(
            fmean(max(some) for some in itertools.combinations(prompt, point.n))
            for prompt in scores.tolist()
        )
        assert point.mean_reward == pytest.approx(slow)
        assert point.kl == pytest.approx(math.log(point.n) - (point.n - 1) / point.n)


def test_a_reliability_table_by_hand() -> None:
    odds = torch.logit(torch.tensor([0.62, 0.68, 0.97]))
    first, second = reliability(odds * torch.tensor([1.0, -1.0, 1.0]), num_bins=5)
    assert (first.pairs, first.accuracy) == (2, 0.5)
    assert first.confidence == pytest.approx(0.65)
    assert (second.pairs, second.accuracy) == (1, 1.0)
    error = calibration_error(odds * torch.tensor([1.0, -1.0, 1.0]), num_bins=5)
    assert error == pytest.approx((2 * 0.15 + 0.03) / 3, abs=1e-6)
