import math
import random

import pytest

from tandem.metrics.answer_views import (
    Histogram,
    WinRate,
    followed_prompts,
    frontier,
    model_win_rates,
    wilson,
    win_rate_of_steps,
)
from tandem.metrics.records import Record


@pytest.mark.parametrize(
    ("wins", "total", "low", "high"),
    # R: prop.test(x, n, correct = FALSE)$conf.int
    [(8, 10, 0.4901625, 0.9433178), (0, 10, 0.0, 0.2775328), (50, 100, 0.4038315, 0.5961685)],
)
def test_wilsons_interval_is_that_of_r(wins, total, low, high):
    assert wilson(wins, total) == pytest.approx((low, high), abs=1e-6)


def test_wilsons_bounds_are_where_the_score_test_rejects():
    low, high = wilson(7.5, 12)
    for bound in (low, high):
        z = (7.5 / 12 - bound) / math.sqrt(bound * (1 - bound) / 12)
        assert abs(z) == pytest.approx(1.959964, abs=1e-6)


def test_a_tie_is_half_a_win_and_what_is_unscored_does_not_count():
    rate = WinRate.of([(2, 1), (1, 1), (0, 1), (3, 1), (math.nan, 1)])
    assert (rate.wins, rate.ties, rate.losses, rate.rate) == (2, 1, 1, 0.625)
    assert WinRate.of([]) == WinRate(0, 0, 0, 0.5, 0.0, 1.0)


def test_a_histogram_counts_every_finite_value_once():
    draw = random.Random(1)
    values = [draw.gauss(0, 2) for _ in range(500)]
    found = Histogram.of([*values, math.nan, math.inf], bins=7)
    assert found is not None
    width = (found.high - found.low) / 7
    slow = [0] * 7
    for value in values:
        for place in range(7):
            last = place == 6 and value == found.high
            if found.low + place * width <= value < found.low + (place + 1) * width or last:
                slow[place] += 1
                break
    assert list(found.counts) == slow
    assert found.mean == pytest.approx(sum(values) / 500)
    assert Histogram.of([math.nan]) is None
    assert sum(Histogram.of([3.0, 3.0]).counts) == 2


@pytest.mark.parametrize(("low", "high"), [(13, 13), (5, 20), (1, 24), (1, 25), (3, 128)])
def test_bins_of_whole_numbers_hold_as_many_as_each_other(low: int, high: int) -> None:
    found = Histogram.of(range(low, high + 1), whole=True)
    assert found is not None
    assert len(found.counts) <= 24
    assert len({*found.counts[:-1], max(found.counts)}) == 1
    assert (found.high - found.low) / len(found.counts) == found.counts[0]
    assert sum(found.counts) == high - low + 1


def record(step, **values):
    return Record("ppo", step, 0.0, values)


def test_the_frontier_is_held_out_where_that_was_measured():
    records = [
        record(0, heldout_kl=0.0, heldout_reward=0.1),
        record(1, kl=1.0, reward_before_penalty=9.0),
        record(2, kl=1.0, reward_before_penalty=9.0, heldout_kl=2.0, heldout_reward=0.5),
        record(4, heldout_kl=3.0, heldout_reward=math.nan),
        Record("sft", 1, 0.0, {"heldout_kl": 1.0, "heldout_reward": 1.0}),
    ]
    points = frontier(records, "ppo", [2])
    assert [(p.step, p.kl, p.reward, p.checkpoint) for p in points] == [
        (0, 0.0, 0.1, False),
        (2, 2.0, 0.5, True),
    ]
    assert [p.step for p in frontier(records[1:2], "ppo")] == [1]


def test_every_two_models_are_compared():
    found = model_win_rates({"scores": {"base": [0, 0], "sft": [1, None], "ppo": [2, "nan"]}})
    assert [(ours, theirs, rate.wins) for ours, theirs, rate in found] == [
        ("sft", "base", 1),
        ("ppo", "base", 1),
        ("ppo", "sft", 1),
    ]


def test_models_without_a_prompt_that_both_have_a_score_of_are_not_compared():
    """A rate of no wins and no losses would read as 50 %."""
    scores = {"base": [0, None, 1], "sft": [None, 2, None], "ppo": ["nan", 2, None], "x": []}
    found = model_win_rates({"scores": scores})
    assert [(ours, theirs, rate.ties) for ours, theirs, rate in found] == [("ppo", "sft", 1)]


def test_a_prompt_of_several_held_out_rows_counts_once_by_its_mean_reward():
    rewards = {
        "one": {0: [1.0, 5.0], 4: [4.0, 1.0]},  # means 3 and 2.5: a loss, whichever came first
        "two": {0: [0.5], 4: [0.75]},
        "gone": {0: ["nan", 2.0], 4: [None, 2.0]},  # of what was scored: a tie
        "never": {0: [1.0], 4: ["nan"]},
        "swapped": {0: [0.1, 0.2, 0.3], 4: [0.3, 0.2, 0.1]},  # a tie: the order of sums is no win
    }
    lines = [
        {"stage": "ppo", "step": step, "prompt_id": name, "reward": reward}
        for name, steps in rewards.items()
        for step, given in steps.items()
        for reward in given
    ]
    for order in (lines, lines[::-1]):
        rate = win_rate_of_steps(followed_prompts(order, "ppo").values(), 4, against=0)
        assert (rate.wins, rate.ties, rate.losses) == (1, 2, 1)
