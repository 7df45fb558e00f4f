"""The bench compares like with like: the plain loop computes what Tandem does, on the same work."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from bench import ppo_sides, step3
from bench.harness import Cost, once
from bench.models import SHAPES, WORDS, tiny
from bench.plain_hf_ppo import HoldLengths
from bench.ppo_sides import (
    Done,
    PlainSide,
    TandemSide,
    Work,
    agreement,
    held_lengths,
    require_same_work,
    start,
)

TINY = tiny(SHAPES["b"])


@pytest.fixture
def work() -> Work:
    """Prompts of several lengths, so that the plain loop pads them on the left."""
    return Work(
        shape=TINY,
        mode="ragged",
        num_prompts=12,
        prompt_tokens=(16, 5, 9),
        max_new_tokens=12,
        minibatch_size=12,
        micro_batch_tokens=100,
    )


@pytest.mark.parametrize("mode", ["forced", "ragged"])
def test_losses_gradients_and_weights_agree_given_the_same_rollout(work: Work, mode: Any) -> None:
    apart = agreement(replace(work, mode=mode))
    assert apart.keys() >= {"policy_loss", "value_loss", "actor_grad_norm", "critic_weights"}
    assert max(apart.values()) < 1e-4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grpo_agrees_given_the_same_rollout(work: Work, dtype: Any) -> None:
    work = replace(work, algorithm="grpo", num_prompts=4, samples_per_prompt=3, dtype=dtype)
    apart = agreement(work)
    assert apart.keys() == {
        "old_logprobs", "advantages", "scores", "policy_loss", "actor_grad_norm", "actor_weights"
    }  # fmt: skip
    if dtype == "fp32":
        assert max(apart.values()) < 1e-4


def test_one_grpo_step_is_the_same_work(work: Work) -> None:
    work = replace(work, algorithm="grpo", num_prompts=4, samples_per_prompt=3)
    begin = start(work)
    ours = TandemSide(work, begin)
    lengths = held_lengths(work, ours.make())
    theirs = PlainSide(work, begin, lengths)
    for _ in range(2):
        found = [once(side, 1)[0] for side in (ours, theirs)]
        require_same_work(work, *found)


@pytest.mark.parametrize(
    ("knob", "value", "named"),
    [
        ("kl_coef", 0.5, "advantages"),
        ("lam", 0.9, "advantages"),
        ("gamma", 0.9, "advantages"),
        ("reward_clip", 1e-3, "advantages"),
        ("clip_ratio", 1e-3, "policy_loss"),
        ("value_clip", 1e-3, "value_loss"),
        ("max_grad_norm", 1e-6, "policy_loss"),
        ("epochs", 1, "policy_loss"),
    ],
)
def test_a_plain_loop_with_another_knob_does_not_agree(
    work: Work, monkeypatch: pytest.MonkeyPatch, knob: str, value: float, named: str
) -> None:
    """So none of these parts is idle in the check."""
    settings = ppo_sides.plain_settings
    monkeypatch.setattr(
        ppo_sides, "plain_settings", lambda *given: replace(settings(*given), **{knob: value})
    )
    with pytest.raises(RuntimeError, match=f"{named} must agree to 0.0001 on both sides; got"):
        agreement(work)


@pytest.mark.parametrize("mode", ["forced", "ragged"])
def test_both_sides_do_the_same_work_each_time(work: Work, mode: Any) -> None:
    work = replace(work, mode=mode, epochs=2, minibatch_size=5)
    begin = start(work)
    tandem = TandemSide(work, begin)
    lengths = held_lengths(work, tandem.make())
    plain = PlainSide(work, begin, lengths)
    steps = [once(side, 1) for side in (tandem, plain, tandem, plain)]
    for done, costs in steps:
        require_same_work(work, steps[0][0], done)
        assert done.prompts == tuple(row.token_ids for row in begin.prompts)
        assert done.lengths == tuple(min(n, 12) for n in lengths)
        assert done.metrics["updates"] == 6
        assert costs.keys() == {"generate", "score", "train", "total"}
        assert costs["total"].wall == pytest.approx(
            sum(costs[phase].wall for phase in ("generate", "score", "train"))
        )
    if mode == "forced":
        assert set(lengths) == {13}
    else:
        assert len(set(lengths)) > 3


@pytest.mark.parametrize("vocabulary", [TINY["vocab_size"], 3 * WORDS])
def test_ragged_lengths_have_half_the_limit_as_their_mean(vocabulary: int) -> None:
    shape = {**TINY, "vocab_size": vocabulary}
    work = Work(
        shape=shape, mode="ragged", num_prompts=400, max_new_tokens=16, micro_batch_tokens=10**6
    )
    made = TandemSide(work, start(work)).make()
    lengths = made.batch.response_mask.sum(dim=1).float()
    standard_error = lengths.std() / 20
    assert abs(lengths.mean() - 8) < 3 * standard_error
    # Geometric: what is left falls by the same factor per token.
    left = [(lengths > n).float().mean().item() for n in (0, 5, 10)]
    assert left[1] / left[0] == pytest.approx(left[2] / left[1], abs=0.12)


def test_eos_comes_at_the_held_length_and_never_before() -> None:
    hold = HoldLengths(torch.tensor([1, 3, 9]), prompt_width=4, eos_token_id=2)
    drawn = []
    for width in (4, 5, 6):
        scores = hold(torch.zeros((3, width), dtype=torch.long), torch.randn(3, 5))
        drawn.append(scores.softmax(dim=-1)[:, 2].tolist())
    assert drawn == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_other_work_is_refused(work: Work) -> None:
    done = Done(prompts=((5, 6),), lengths=(3,), metrics={"updates": 1.0})
    require_same_work(work, done, done)
    for name, other in {
        "prompts": replace(done, prompts=((5, 7),)),
        "answers' lengths": replace(done, lengths=(4,)),
        "optimizer steps": replace(done, metrics={"updates": 2.0}),
    }.items():
        with pytest.raises(RuntimeError, match=f"{name} must be the same on both sides; got"):
            require_same_work(work, done, other)
    with pytest.raises(RuntimeError, match="optimizer steps of the work must be the same"):
        require_same_work(replace(work, epochs=2), done, done)
    with pytest.raises(RuntimeError, match="forced lengths must be the same"):
        require_same_work(replace(work, mode="forced"), done, done)


def test_rates_and_ratios_by_hand() -> None:
    work = Work(shape=TINY, num_prompts=2, prompt_tokens=(3,), epochs=2, micro_batch_tokens=99)
    fast = {phase: Cost(wall=1.0, cpu=2.0) for phase in step3.PHASES}
    slow = {phase: Cost(wall=3.0, cpu=2.0) for phase in step3.PHASES}
    costs = {"tandem": [fast, fast, fast], "plain": [fast, slow, slow]}
    table = step3.summary(work, [4, 6], costs)
    rates = {phase: row["tandem"]["tokens_per_wall_second"] for phase, row in table.items()}
    assert rates == {"generate": 10, "score": 16, "train": 32, "total": 10}
    assert table["train"]["plain"]["samples_per_second"] == pytest.approx(2 / 3)
    ratios = {clock: asdict(table["train"]["plain"][f"{clock}_ratio"]) for clock in ("wall", "cpu")}
    assert ratios["wall"] == {"median": 3, "least": 1, "most": 3}
    assert ratios["cpu"] == {"median": 1, "least": 1, "most": 1}


def test_bf16_rounds_begin_at_the_start_too(work: Work) -> None:
    """Its float32 masters are put back with the weights."""
    work = replace(work, dtype="bf16", actor_learning_rate=1e-2, mode="forced")
    side = TandemSide(work, start(work))
    first, second = (once(side, number)[0].metrics["policy_loss"] for number in (1, 2))
    assert first == second


def test_the_peak_is_of_a_side_that_does_its_steps(work: Work) -> None:
    for side in ("tandem", "plain"):
        found = step3.peak_memory(side, work, (13,) * 12, 1, False)
        assert found["peak"] >= found["before"] > 0


def test_phases_in_which_the_plain_loop_is_faster_are_named_with_shares_of_the_peak() -> None:
    def rounds(train: float, flops: float) -> list[dict[str, Cost]]:
        phases = {"generate": Cost(1, 1, flops), "score": Cost(1, 1), "train": Cost(1, train)}
        return [{**phases, "total": Cost(3, 2 + train, flops)}] * 3

    costs = {"tandem": rounds(2.0, 8e9), "plain": rounds(1.0, 0.0)}
    work = Work(shape=TINY, mode="forced", micro_batch_tokens=64)
    found = step3.summary(work, [4] * 64, costs)
    assert step3.slower_phases(found) == {"train": 0.5, "total": 0.75}
    step3.add_shares(found, costs, 4e9)
    shares = {phase: sides["tandem"]["peak_share"] for phase, sides in found.items()}
    assert shares == {"generate": 2.0, "score": 0.0, "train": 0.0, "total": 0.5}
    assert found["total"]["plain"]["peak_share"] == pytest.approx(2 / 3)
