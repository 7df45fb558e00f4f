"""Reward functions on rollouts: what they are given, once for all ranks, and what they make."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tandem.config.schema import PPOConfig
from tandem.config.scoring import EnsembleName, ScoringConfig
from tandem.engine.scoring import Ensemble, FurtherScorer
from tandem.errors import DataError, Stopped
from tandem.parallel.world import World
from tandem.rewards.scoring import GivenFunction
from tandem.text import ignore_line
from tandem.training.evaluate import answer_metrics
from tandem.training.reward_function import RewardColumns, function_scores, rewards_of
from tandem.training.rollout_rows import selected
from tandem.training.scored_answers import ScoredAnswers, score_answers
from tandem.training.signals import StopSignals
from tandem.types import Message, PromptRow, Rollout, Source, TokenBatch, TokenRow
from tests.ranks import on_ranks


def rollout_of(*answers: str, group: list[int] | None = None) -> Rollout:
    rows = [TokenRow((1, 2), (False, True), Source("d", "f", 1)) for _ in answers]
    batch = TokenBatch.from_rows(rows, 0)
    prompts = tuple(
        PromptRow(
            (1,),
            (Message("system", "s"), Message("user", f"q{i}")),
            {"answer": str(i)} if i else {},
            Source("d", "f", i + 1),
        )
        for i in range(len(answers))
    )
    zeros = torch.zeros(len(answers), 2)
    ended = torch.ones(len(answers)).bool()
    groups = torch.arange(len(answers)) if group is None else torch.tensor(group)
    return Rollout(batch, zeros, zeros, zeros, ended, prompts, answers, groups)


def here(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run in this process on all answers at once."""

    def called(prompts: list[str], completions: list[str], **columns: Any) -> Any:
        return function(prompts, completions, **columns)

    called.in_process = True  # type: ignore[attr-defined]
    return called


def scored(
    functions: Sequence[GivenFunction], rollout: Rollout, **knobs: Any
) -> tuple[RewardColumns, list[str]]:
    lines: list[str] = []
    rewards = rewards_of(functions, ScoringConfig(**knobs), lines.append)
    assert rewards is not None
    try:
        return function_scores(rewards, rollout), lines
    finally:
        rewards.close()


def stopped_while_the_first_rank_waits(world: World) -> str:
    """Nothing listens at port 1."""

    def heard(line: str) -> None:
        if "waits" in line:
            signal.raise_signal(signal.SIGTERM)

    url = "http://127.0.0.1:1/"
    rewards = rewards_of(f"tandem:remote?url={url}", ScoringConfig(), heard)
    assert rewards is not None
    with StopSignals(ignore_line) as stops:
        stops.deferring = True
        try:
            function_scores(rewards, rollout_of("a"), world=world)
        except Stopped as stopped:
            return str(stopped)
    return ""


def test_a_signal_while_the_first_rank_waits_for_a_server_stops_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    first, second = on_ranks(2, stopped_while_the_first_rank_waits)
    assert first == second
    assert first.startswith("stopped by SIGTERM while reward function remote waited for its serv")


def test_the_function_sees_prompts_answers_and_every_column() -> None:
    seen: dict[str, object] = {}

    def spy(prompts: list[str], completions: list[str], **columns: object) -> list[float | None]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.5, None]

    found, _ = scored([here(spy)], rollout_of("a", "b"))
    assert found.values[0, 0] == 0.5
    assert found.values[1, 0].isnan()
    assert seen["prompts"] == ["q0", "q1"]
    assert seen["completions"] == ["a", "b"]
    assert seen["answer"] == [None, "1"]
    assert seen["messages"] == [
        [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}] for i in (0, 1)
    ]


def test_a_function_of_messages_sees_the_turns_of_the_rows() -> None:
    def spy(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        assert prompts == columns["messages"]
        assert [turns[0] for turns in prompts] == [{"role": "system", "content": "s"}] * 2
        assert completions == [[{"role": "assistant", "content": c}] for c in "ab"]
        return [float(turns[1]["content"][1:]) for turns in prompts]

    function = here(spy)
    function.conversational = True  # type: ignore[attr-defined]
    assert scored([function], rollout_of("a", "b"))[0].values.tolist() == [[0.0], [1.0]]


def test_a_function_may_ask_for_the_prompts_as_the_model_reads_them() -> None:
    def spy(completions: Any, prompt_texts: Any) -> list[float]:
        assert prompt_texts == ["<s>q0", "<s>q1"]
        return [1.0, 2.0]

    spy.in_process = True  # type: ignore[attr-defined]
    renderer: Any = SimpleNamespace(prompt_text=lambda row: f"<s>{row.messages[-1].content}")
    rewards, rollout = rewards_of(spy, ScoringConfig()), rollout_of("a", "b")
    config = PPOConfig(missing_eos_penalty=0.0)
    found = score_answers(rollout, None, renderer, config, rewards, World())
    assert found.scores.tolist() == [1.0, 2.0]


def test_a_worker_sees_the_same(tmp_path: Any) -> None:
    def told(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        assert prompts == ["q1"] or columns["answer"] == [None]
        assert columns["messages"][0][1]["role"] == "user"
        return [float(len(completions[0]) + os.getpid())]

    found, _ = scored([told], rollout_of("a", "bbb"), workers=1)
    assert (found.values[1, 0] - found.values[0, 0]) == 2
    assert int(found.values[0, 0]) - 1 != os.getpid()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(signal.SIGTERM, "here")])
def test_a_stop_inside_it_is_a_stop(stop: BaseException) -> None:
    def stopped(*args: object, **columns: object) -> list[float | None]:
        raise stop

    with pytest.raises(type(stop)):
        scored([here(stopped)], rollout_of("a", "b"))


def test_it_changes_no_default_of_ours() -> None:
    def careless(*args: object, **columns: object) -> list[float | None]:
        torch.set_default_dtype(torch.float64)
        return [1.0, 2.0]

    assert scored([here(careless)], rollout_of("a", "b"))[0].values.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "values", [torch.tensor([0.5, 1.0]), np.array([0.5, 1.0]), [torch.tensor(0.5), np.True_]]
)
def test_arrays_tensors_and_truths_are_numbers(values: object) -> None:
    found, _ = scored([here(lambda *a, **k: values)], rollout_of("a", "b"))
    assert found.total.tolist() == [0.5, 1.0]


def test_a_column_with_an_arguments_name_is_left_out_and_counted_once() -> None:
    seen: dict[str, object] = {}

    def spy(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [1.0] * len(completions)

    rollout = rollout_of("a", "b")
    columns = {"completions": "x", "messages": "y", "level": 1}
    rollout = replace(
        rollout, prompts=(replace(rollout.prompts[0], columns=columns), rollout.prompts[1])
    )
    lines: list[str] = []
    rewards = rewards_of(here(spy), ScoringConfig(), lines.append)
    assert rewards is not None
    for _ in range(2):
        function_scores(rewards, rollout)
    assert seen["prompts"] == ["q0", "q1"]
    assert seen["completions"] == ["a", "b"]
    assert seen["level"] == [1, None]
    assert seen["messages"] == [
        [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}] for i in (0, 1)
    ]
    assert lines == [
        f"reward functions get {name} from Tandem: the data's column of that name, in 1 of 2 rows, "
        "is left out for them"
        for name in ("completions", "messages")
    ]


def test_a_rollout_whose_rows_lack_a_column_gives_none() -> None:
    def spy(completions: list[str], answer: list[Any]) -> list[float]:
        return [float(answer is not None and answer[0] == "1")]

    rollout = rollout_of("a", "b")
    rewards = rewards_of(spy, ScoringConfig(), columns=["answer"])
    assert rewards is not None
    both = [selected(rollout, torch.tensor([i])) for i in (0, 1)]  # the first has no answer
    assert [function_scores(rewards, part).values.item() for part in both] == [0.0, 1.0]
    rewards.close()


def test_a_function_that_names_completion_ids_gets_the_sampled_tokens() -> None:
    """Of every row its own tokens: without the prompt, without padding, with the EOS."""
    rows = [
        TokenRow((1, 5, 6, 2), (False, True, True, True), Source("d", "f", 1)),
        TokenRow((1, 7), (False, True), Source("d", "f", 2)),
    ]
    rollout = replace(rollout_of("a", "b"), batch=TokenBatch.from_rows(rows, 0))

    def ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(sum(each)) for each in completion_ids]

    def unasked(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float("completion_ids" in columns)]

    found, _ = scored([ids, unasked], rollout)
    assert found.values.tolist() == [[13.0, 0.0], [7.0, 0.0]]


def test_what_fails_is_logged_by_function_and_reason() -> None:
    def picky(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        if completions[0] == "bad":
            raise ValueError("no")
        return [float("nan")] if completions[0] == "nan" else [None]

    def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float(len(c)) for c in completions]

    rollout = rollout_of("a", "bad", "nan", "bad")
    found, lines = scored([(picky, 1.0), (length, 0.5)], rollout)
    metrics = found.metrics()
    assert metrics["reward_failed"] == 0.75
    assert metrics["reward_failures/exception"] == 2
    assert metrics["reward_failures/result"] == 1
    assert metrics["reward_none/picky"] == 1
    assert metrics["reward_none/length"] == 0
    assert "reward_mean/picky" not in metrics
    assert metrics["reward_mean/length"] == 2.5
    assert metrics["reward_std/length"] == pytest.approx(0.866, abs=1e-3)
    assert found.total.tolist() == [0.5, 1.5, 1.5, 1.5]
    (line,) = lines
    told = "reward function picky failed on 3 of 4 answers (exception 2, result 1)"
    assert line == f"{told}, which get no score from it; the first: f:2: ValueError: no"
    (again,) = scored([(picky, 1.0)], rollout, on_failure="zero")[0].values.T.tolist()
    assert again[1:] == [0.0, 0.0, 0.0]
    with pytest.raises(DataError, match=r"failed on 3 of 4 answers .* Fix the function"):
        scored([picky], rollout, on_failure="stop")


def answered(rollout: Rollout, functions: Sequence[GivenFunction], **knobs: Any) -> ScoredAnswers:
    rewards = rewards_of(functions, ScoringConfig(**knobs))
    config = PPOConfig(missing_eos_penalty=0.0, reward_clip=0.0)
    combine = knobs.get("combine", "sum")
    return score_answers(rollout, None, None, config, rewards, World(), combine=combine)  # type: ignore[arg-type]


def test_rows_without_a_score_are_left_out_or_0_but_always_counted() -> None:
    some = here(lambda p, c, **k: [None if text == "none" else 2.0 for text in c])
    rollout = rollout_of("a", "none")
    dropped = answered(rollout, [some])
    assert dropped.is_scored.tolist() == [True, False]
    zero = answered(rollout, [some], on_none="zero")
    assert zero.is_scored.tolist() == [True, True]
    assert zero.scores.tolist() == [2.0, 0.0]
    for found in (dropped, zero):
        assert found.metrics(rollout)["reward_unscored"] == 1


def test_a_heldout_mean_says_of_how_many_answers_it_is_not() -> None:
    """Otherwise `keep_best` and comparisons show means of one answer as those of a hundred."""
    some = here(lambda p, c, **k: [None if text == "none" else float(len(text)) for text in c])
    rollout = rollout_of("abc", "none", "none", "a")
    dropped = answer_metrics(rollout, answered(rollout, [some]))
    assert (dropped["heldout_reward"], dropped["heldout_unscored"]) == (2.0, 0.5)
    zero = answer_metrics(rollout, answered(rollout, [some], on_none="zero"))
    assert (zero["heldout_reward"], zero["heldout_unscored"]) == (1.0, 0.5)
    whole = rollout_of("abc", "a")
    assert "heldout_unscored" not in answer_metrics(whole, answered(whole, [some]))


def test_rewards_normalized_in_their_groups_count_alike() -> None:
    """One in thousands, one in hundredths, against each other: neither drowns the other."""
    wide = here(lambda p, c, **k: [1000.0, 3000.0, 5.0, 5.0])
    narrow = here(lambda p, c, **k: [0.02, 0.01, 0.01, 0.03])
    rollout = rollout_of("a", "b", "c", "d", group=[0, 0, 1, 1])
    half = 0.5**0.5
    found = answered(rollout, [wide, (narrow, 2.0)], combine="group")
    assert found.scores.tolist() == pytest.approx([half, -half, -2 * half, 2 * half], abs=0.05)
    summed = answered(rollout, [wide, (narrow, 2.0)])
    assert summed.mixed.tolist() == pytest.approx([1000.04, 3000.02, 5.02, 5.06])
    assert found.mixed.tolist() == summed.mixed.tolist(), "what is shown is the weighted sum"
    assert found.metrics(rollout)["reward"] == pytest.approx(float(summed.mixed.mean()))


class FixedScorer:
    """Stands for a reward model: given raw scores, normalized by mean and spread."""

    def __init__(self, raw: list[float], mean: float, std: float, *others: FurtherScorer) -> None:
        self.scores, self.mean, self.std = torch.tensor(raw), mean, std
        self.ensemble = Ensemble(others)

    def raw(self, rollout: Rollout, renderer: object) -> torch.Tensor:
        return self.scores

    def normalized(self, raw: torch.Tensor) -> torch.Tensor:
        return (raw - self.mean) / self.std


def test_several_reward_models_add_their_normalized_scores_by_weight() -> None:
    second = FurtherScorer("helpful", 0.5, FixedScorer([10.0, 30.0], 10.0, 10.0))  # type: ignore[arg-type]
    third = FurtherScorer("harmless", -2.0, FixedScorer([0.0, 0.25], 0.0, 1.0))  # type: ignore[arg-type]
    scorer: Any = FixedScorer([3.0, 1.0], 1.0, 2.0, second, third)
    function = here(lambda p, c, **k: [1.0, None])
    config = PPOConfig(missing_eos_penalty=0.0, reward_model_weight=2.0, reward_function_weight=3.0)
    rollout, rewards = rollout_of("a", "b"), rewards_of([function], ScoringConfig())
    found = score_answers(rollout, scorer, None, config, rewards, World())  # type: ignore[arg-type]
    assert found.scores.tolist() == [2 * (1 + 0 - 0) + 3 * 1, 2 * (0 + 1.0 - 0.5) + 0]
    metrics = found.metrics(rollout)
    assert metrics["reward_mean/helpful"] == 1.0
    assert metrics["reward_mean/harmless"] == 0.125
    assert metrics["reward_mean/reward_model"] == 0.5
    grouped = score_answers(
        rollout_of("a", "b", group=[0, 0]),
        scorer,
        None,
        config,
        None,
        World(),
        combine="group",  # type: ignore[arg-type]
    )
    half = 0.5**0.5  # each one's two answers become +-half, by their order
    assert grouped.scores.tolist() == pytest.approx(
        [2 * half * s for s in (1 - 0.5 + 2, -2.5)], abs=5e-3
    )
    assert grouped.mixed.tolist() == [2.0, 1.0]


def test_several_reward_models_make_one_careful_score() -> None:
    """Three count, one is watched; by hand. The function stands beside what they make."""
    raw = {"b": ([0.0, 2.0], 1.0), "c": ([4.0, -1.0], 3.0), "gold": ([-9.0, -7.0], 0.0)}
    others = [
        FurtherScorer(name, weight, FixedScorer(scores, 0.0, 1.0))  # type: ignore[arg-type]
        for name, (scores, weight) in raw.items()
    ]
    scorer: Any = FixedScorer([1.0, 5.0], 0.0, 1.0, *others)
    function = here(lambda p, c, **k: [1.0, None])
    config = PPOConfig(missing_eos_penalty=0.0, reward_model_weight=2.0, reward_function_weight=3.0)
    rollout, rewards = rollout_of("a", "b", group=[0, 0]), rewards_of([function], ScoringConfig())

    def found(how: EnsembleName, combine: Literal["sum", "group"] = "sum") -> ScoredAnswers:
        scorer.ensemble = Ensemble(tuple(others), how, 0.25)
        return score_answers(rollout, scorer, None, config, rewards, World(), combine=combine)  # type: ignore[arg-type]

    means = [(1 + 0 + 3 * 4) / 5, (5 + 2 - 3 * 1) / 5]
    variances = [
        ((1 - 2.6) ** 2 + 2.6**2 + 3 * 1.4**2) / 5,
        (4.2**2 + 1.2**2 + 3 * 1.8**2) / 5,
    ]
    assert found("mean").scores.tolist() == pytest.approx([2 * means[0] + 3, 2 * means[1]])
    assert found("worst-case").scores.tolist() == [0.0 + 3, 2 * -1.0]
    careful = [2 * (m - 0.25 * v) for m, v in zip(means, variances, strict=True)]
    assert found("uncertainty").scores.tolist() == pytest.approx([careful[0] + 3, careful[1]])
    half = 0.5**0.5  # within the group the ensemble is one reward; the function scored one alone
    grouped = found("worst-case", "group").scores.tolist()
    assert grouped == pytest.approx([2 * half, -2 * half], abs=5e-4)
    assert "reward_model_disagreement" not in found("sum").metrics(rollout), "they may judge others"
    metrics = found("mean").metrics(rollout)
    assert metrics["reward_watched"] == -8.0
    plain = [torch.tensor(s).std(correction=0) for s in ([1.0, 0.0, 4.0], [5.0, 2.0, -1.0])]
    assert metrics["reward_model_disagreement"] == pytest.approx(float(sum(plain)) / 2)
    assert "reward_watched" not in answered(rollout, [function]).metrics(rollout)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("how", ["sum", "mean", "worst-case", "uncertainty"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_an_answer_that_one_of_the_reward_models_cannot_score_has_no_score_of_theirs(
    how: EnsembleName, bad: float
) -> None:
    """It is counted and named, whichever model it is; that of weight 0 counts for no answer. A
    score that is not finite was 0, or the limit of reward_clip."""
    config = PPOConfig(missing_eos_penalty=0.0, reward_clip=10.0)
    raw = {"first": [bad, 1.0, 2.0, 3.0], "b": [4.0, bad, 5.0, 6.0], "gold": [1.0, 1.0, bad, 2.0]}
    others = tuple(
        FurtherScorer(name, float(name == "b"), FixedScorer(raw[name], 0.0, 1.0))  # type: ignore[arg-type]
        for name in ("b", "gold")
    )
    scorer: Any = FixedScorer(raw["first"], 0.0, 1.0)
    scorer.ensemble = Ensemble(others, how, 0.25)
    rollout = rollout_of("a", "b", "c", "d", group=[0, 0, 0, 0])
    for combine in ("sum", "group"):
        found = score_answers(rollout, scorer, None, config, None, World(), combine=combine)  # type: ignore[arg-type]
        assert found.is_scored.tolist() == [False, False, True, True]
        assert found.num_unscored == 2
        assert bool(found.scores.isfinite().all())
        assert found.scores[:2].tolist() == [0.0, 0.0]
    alone: Any = FixedScorer([2.0, 3.0], 0.0, 1.0)
    rest = tuple(
        FurtherScorer(o.label, o.weight, FixedScorer(raw[o.label][2:], 0.0, 1.0))  # type: ignore[arg-type]
        for o in others
        if o.weight
    )
    alone.ensemble = Ensemble(rest, how, 0.25)
    expected = score_answers(rollout_of("c", "d"), alone, None, config, None, World())  # type: ignore[arg-type]
    found = score_answers(rollout, scorer, None, config, None, World())  # type: ignore[arg-type]
    assert torch.equal(found.scores[2:], expected.scores)
    metrics = found.metrics(rollout)
    assert metrics["reward_failed"] == 0.5
    assert metrics["reward_failures/result"] == 2.0
    names = ("reward_model", "b", "gold")
    assert [metrics[f"reward_none/{name}"] for name in names] == [0.25, 0.25, 0.25]
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["reward_watched"] == pytest.approx(4 / 3)
    joined = ScoredAnswers.joined([found, found])
    assert joined.metrics(rollout_of(*"abcdabcd"))["reward_failures/result"] == 4.0
    lines: list[str] = []
    joined.tell_failed_models(lines.append)
    assert lines == [
        "reward model gave 2 of 8 answers no finite score: 2 left out",
        "reward model b gave 2 of 8 answers no finite score: 2 left out",
        (
            "reward model gold gave 2 of 8 answers no finite score: its weight is 0, so no reward "
            "changes"
        ),
    ]


def test_beside_a_reward_model_that_fails_a_function_alone_counts() -> None:
    scorer: Any = FixedScorer([NAN, 1.0], 0.0, 1.0)
    config = PPOConfig(missing_eos_penalty=0.0)

    function = here(lambda p, c, **k: [0.5, NAN])
    rollout, rewards = rollout_of("a", "b"), rewards_of([function], ScoringConfig())
    found = score_answers(rollout, scorer, None, config, rewards, World())  # type: ignore[arg-type]
    assert found.scores.tolist() == [0.5, 1.0]
    metrics = found.metrics(rollout)
    assert metrics["reward_failed"] == 1.0
    assert metrics["reward_failures/result"] == 2.0
    assert metrics["reward_none/reward_model"] == 0.5
    lines: list[str] = []
    found.tell_failed_models(lines.append)
    told = "reward model gave 1 of 2 answers no finite score: 1 rewarded by functions alone"
    assert lines == [told]
    zero = rewards_of([function], ScoringConfig(on_none="zero"))
    scorer.ensemble = Ensemble(
        (FurtherScorer("reward_model.b", 1.0, FixedScorer([1.0, INF], 0.0, 1.0)),)
    )  # type: ignore[arg-type]
    found = score_answers(rollout, scorer, None, config, zero, World())  # type: ignore[arg-type]
    found.tell_failed_models(lines.append)
    none = "reward model b gave 1 of 2 answers no finite score: 1 scored 0"
    assert lines == [told, told, none]


def test_reward_models_that_score_no_answer_are_named() -> None:
    scorer: Any = FixedScorer([NAN, 1.0], 0.0, 1.0)
    scorer.ensemble = Ensemble((FurtherScorer("b", 1.0, FixedScorer([1.0, INF], 0.0, 1.0)),))  # type: ignore[arg-type]
    found = score_answers(rollout_of("a", "b"), scorer, None, PPOConfig(), None, World())  # type: ignore[arg-type]
    told = (
        r"the reward model must give at least one answer of a rollout a finite score; got none for "
        r"all 2 \(reward_model gave no finite score of 1 answers; b gave no finite score of 1 "
    )
    with pytest.raises(DataError, match=told):
        found.require_some()


def test_two_batches_joined_are_one_batch() -> None:
    """Dynamic sampling's rounds: scores, failures and times of each function."""

    def picky(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        if completions[0] == "bad":
            raise ValueError(prompts[0])
        return [float(len(text)) if text != "none" else None for text in completions]

    answers = ("a", "bad", "none", "four", "bad")
    whole = rollout_of(*answers)
    parts = [selected(whole, torch.tensor(rows)) for rows in ([0, 1], [2, 3, 4])]
    every, _ = scored([picky], whole)
    joined = RewardColumns.joined([scored([picky], part)[0] for part in parts])
    assert joined.values.nan_to_num(-1).tolist() == every.values.nan_to_num(-1).tolist()
    (one,), (other,) = joined.functions, every.functions
    assert (one.scores, one.failed, one.failures) == (other.scores, other.failed, other.failures)
    assert (one.first, one.num_failed) == (other.first, 2)
    assert joined.failure() == every.failure()
