import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.config.stages import FAMILIES, stage_of
from tandem.errors import ConfigError
from tandem.metrics.alarms import ALARMS, check_alarms
from tandem.metrics.names import METRIC
from tandem.metrics.records import Record

from .runs import history

BELOW_20 = [1.0] * 20
FALLING = [3.0 - i / 50 for i in range(60)]
RISING = [2.0 + i / 50 for i in range(60)]

# alarm: (stage, values of its metric that set it off with the last one, and that never do)
SINGLE = {
    "loss-not-falling": ("sft", "loss", RISING[:51], FALLING),
    "loss-rising": ("sft", "loss", [3.0] * 3 + [6.3] * 7, [3.0] * 3 + [5.7] * 20),
    "heldout-loss-high": ("sft", "heldout_loss", [4.6, 4.0, 9.3], [4.6, 9.1]),
    "heldout-loss-rising": ("reward", "heldout_loss", [3, 2, 2.1, 2.2, 2.3], [3, 2, 2.1, 2.2, 2.1]),
    "grad-spike": ("dpo", "grad_norm", [1.0] * 15 + [11.0], [1.0] * 15 + [9.0]),
    "nothing-learned": ("grpo", "answers_learned", [0.5, 0.0, 0.0], [0.0, 0.1, 0.0]),
    "ratio-gap": ("ppo", "ratio_gap_before_update", [1e-7, 0.031], [0.029]),
    "rollout-gap": ("ppo", "rollout_gap", [1e-7, 0.011], [0.009]),
    "kl-high": ("ppo", "kl", [1.0, 25.1], [24.9]),
    "kl-growth": ("ppo", "kl", [1.5] * 10 + [8.0], [0.5] * 10 + [8.0]),
    "kl-negative": ("ppo", "kl", [0.0, -1.1], [-0.9]),
    "entropy-collapse": ("ppo", "entropy", [2.0] * 4 + [0.19], [2.0] * 4 + [0.21]),
    "clip-fraction": ("ppo", "clip_fraction", [0.4, 0.1, 0.4, 0.4, 0.4], [0.4, 0.4, 0.1] * 4),
    "critic-behind": ("ppo", "explained_variance", [-0.6] * 15, [-0.6] * 14),
    "eos-falling": ("ppo", "eos_rate", [0.99] * 4 + [0.7] * 2, [0.99] * 4 + [0.7, 0.9]),
    "eos-low": ("ppo", "eos_rate", [0.49] * 3, [0.51] * 9),
    "reward-flat": ("ppo", "reward_std", [1.0] + [0.001] * 3, [0.02] * 5),
    "reward-clipped": ("ppo", "reward_clipped", [0.1, 0.21], [0.19]),
    "reward-failing": ("ppo", "reward_failed", [0.04, 0.06], [0.05]),
    "environment-failing": ("ppo", "environment_failed", [0.04, 0.06], [0.05]),
    "actor-grad-spike": ("ppo", "actor_grad_norm", [1.0] * 15 + [11.0], [1.0] * 15 + [9.0]),
    "critic-grad-spike": ("ppo", "critic_grad_norm", [1.0] * 15 + [11.0], [1.0] * 9 + [90.0]),
    "reward-models-disagree": (
        "ppo",
        "reward_model_disagreement",
        [0.3] * 4 + [0.61, 0.5] + [0.61] * 3,
        [0.3] * 4 + [0.59] * 9,
    ),
    "forgetting": ("ppo", "heldout_ptx_perplexity", [30.0, 31.0, 36.1], [30.0, 35.9]),
    "accuracy-chance": ("dpo", "accuracy", [0.4] * 51, [0.6] * 60),
    "grades-unexplained": ("reward", "heldout_grade_explained", [-0.1] * 11, [-0.1] * 10),
    "heldout-accuracy-chance": ("reward", "heldout_accuracy", [0.5] * 11, [0.5] * 10),
}
METRICS_OF_REWARDS = {"clip_fraction", "explained_variance", "critic_grad_norm"}
OTHERS = {"not-finite", "accuracy-overfit", "length-limit", "reward-overfit", "over-optimized"}


def fired(records, thresholds=None):
    """(step, alarm) of a run in which every record is checked as it comes."""
    return [
        (alarm.step, alarm.alarm)
        for end in range(1, len(records) + 1)
        for alarm in check_alarms(records[:end], thresholds or {})
    ]


def test_every_alarm_has_a_case_here_and_is_well_described():
    assert {rule.name for rule in ALARMS} == set(SINGLE) | OTHERS
    for rule in ALARMS:
        assert rule.metric in METRIC or (rule.metric == "*" and rule.families == FAMILIES)
        assert rule.meaning.endswith(".")
        assert rule.advice.endswith(".")
        assert rule.condition in ("above", "below")


@pytest.mark.parametrize("name", SINGLE)
def test_an_alarm_fires_at_its_threshold_and_not_before(name):
    stage, metric, bad, good = SINGLE[name]
    records = history(stage, metric, bad)
    alarms = fired(records)
    assert (len(bad), name) in alarms
    assert (len(bad) - 1, name) not in alarms
    assert name not in [n for _, n in fired(history(stage, metric, good))]


def test_equal_scores_of_different_tokens_raise_no_alarm():
    records = history("ppo", "reward_std", [0.0] * 4)
    assert fired(records) == [(3, "reward-flat")]
    differing = [replace(r, values={**r.values, "reward_token_std": 0.2}) for r in records]
    assert fired(differing) == []
    alike = [replace(r, values={**r.values, "reward_token_std": 0.0}) for r in records]
    assert fired(alike) == [(3, "reward-flat")]


def test_an_alarm_fires_once_until_it_recovers():
    records = history("ppo", "kl", [1, 30, 31, 32, 2, 40, 41])
    assert fired(records) == [(2, "kl-high"), (6, "kl-high")]
    records = history("ppo", "clip_fraction", [0.4] * 6 + [0.1] + [0.4] * 4)
    assert fired(records) == [(3, "clip-fraction"), (10, "clip-fraction")]


def test_a_record_without_the_metric_changes_nothing():
    records = history("ppo", "kl", [30, 30, 30])
    records[1] = Record("ppo", 2, 0.0, {"reward": 1.0})
    assert fired(records) == [(1, "kl-high")]


def test_a_non_finite_value_raises_only_the_alarm_for_it():
    records = history("ppo", "kl", [math.nan, 30.0, math.nan, math.inf, 1.0, math.nan], first=0)
    assert fired(records) == [
        (0, "not-finite"),
        (1, "kl-high"),
        (2, "not-finite"),
        (5, "not-finite"),
    ]


def test_an_alarm_has_its_rules_value_and_threshold():
    (alarm,) = check_alarms(history("ppo", "eos_rate", [0.9, 0.9, 0.9, 0.6, 0.6]), {})
    assert alarm.alarm == "eos-falling"
    assert alarm.value == pytest.approx(0.3)
    assert alarm.threshold == 0.2
    assert "missing_eos_penalty" in alarm.advice


def test_a_negative_kl_may_be_of_outputs_that_are_never_drawn():
    (alarm,) = check_alarms(history("grpo", "kl", [0.0, -16.0]), {})
    assert alarm.alarm == "kl-negative"
    assert "never drawn because the tokenizer lacks them, train with SFT first" in alarm.advice


def test_who_learns_the_references_distributions_is_not_told_to_learn_more_of_them():
    """The perplexity of texts then goes to the reference's, the faster the higher ptx_coef is."""
    for stage in ("distill", "grpo"):
        (alarm,) = check_alarms(history(stage, "heldout_ptx_perplexity", [2.0, 8.0]), {})
        assert "With grpo.ptx_target reference, choose tokens:" in alarm.advice


def test_a_stage_without_rewards_is_told_no_knob_that_it_refuses():
    unread = {name for name in stage_of("distill").unread if "_" in name}
    for rule in ALARMS:
        advice = rule.without_reward or rule.advice
        if "reward" in rule.metric or rule.metric in METRICS_OF_REWARDS:
            continue  # it has no such metric
        if rule.metric == "kl" and rule.condition == "above":
            continue  # it has no such alarm
        if "rl" in rule.families:
            assert not unread & set(re.findall(r"\w+", advice)), rule.name
            assert "reward" not in advice, rule.name
    (alarm,) = check_alarms(history("distill", "eos_rate", [0.1] * 3), {})
    assert alarm.advice.endswith("Raise sampling.max_new_tokens, or train SFT longer.")


def test_answers_at_the_length_limit_raise_an_alarm():
    def records(mean, **more):
        values = {"response_tokens": mean, "response_tokens_max": 128.0, **more}
        return [Record("ppo", step, 0.0, values) for step in range(1, 4)]

    assert fired(records(127.0)) == [(3, "length-limit")]
    assert fired(records(100.0)) == []
    # A policy that has learned one form says as much each time.
    assert "length-limit" not in dict(map(reversed, fired(records(127.0, eos_rate=0.99))))
    assert (3, "length-limit") in fired(records(127.0, eos_rate=0.1))


def test_overfitting_compares_with_the_recent_training_accuracy():
    records = history("reward", "accuracy", [0.5] * 20 + [0.95] * 20)
    for heldout, expected in ((0.70, ["accuracy-overfit"]), (0.80, [])):
        last = Record("reward", 41, 0.0, {"heldout_accuracy": heldout})
        assert [a.alarm for a in check_alarms([*records, last], {})] == expected


def test_training_reward_up_and_held_out_reward_down_raises_an_alarm():
    def run(rewards, heldout):
        return [
            Record("ppo", i + 1, 0.0, {"reward": r, "heldout_reward": h})
            for i, (r, h) in enumerate(zip(rewards, heldout, strict=True))
        ]

    up, down = [0.0, 1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0, 0.0]
    fallen = [0.0, 1.0, 0.7, 0.6, 0.5]
    assert fired(run(up, fallen)) == [(4, "reward-overfit")]
    assert fired(run(down, fallen)) == []
    assert fired(run(up, up)) == []


def test_a_watched_reward_model_that_falls_while_the_other_rises_is_over_optimization():
    def run(rewarding, watched):
        values = zip(rewarding, watched, strict=True)
        return [
            Record("ppo", step, 0.0, {"reward_before_penalty": reward, "reward_watched": seen})
            for step, (reward, seen) in enumerate(values, start=1)
        ]

    rising = [0.1 * step for step in range(20)]
    # The means of five are best, 0.9, after step 10, and 0.3 below that after step 15.
    falls = [0.5] * 5 + [0.9] * 5 + [0.6] * 10
    assert fired(run(rising, falls)) == [(17, "over-optimized")]
    assert fired(run(rising[::-1], falls)) == [], "both fall: the answers are worse, not hacked"
    assert fired(run(rising, [0.5] * 5 + [0.9, 0.5] * 7 + [0.9])) == [], "noise"
    assert fired(run(rising, rising)) == []


def test_a_loss_is_compared_with_the_held_out_one_where_easy_batches_come_first():
    records = history("sft", "loss", [0.3] * 3 + [2.0] * 20)
    assert (10, "loss-rising") in fired(records)
    before = Record("sft", 0, 0.0, {"heldout_loss": 1.9})
    assert "loss-rising" not in [name for _, name in fired([before, *records])]


def test_thresholds_can_be_replaced_by_name():
    records = history("ppo", "ratio_gap_before_update", [1e-3])
    assert fired(records) == []
    assert fired(records, thresholds={"ratio-gap": 1e-4}) == [(1, "ratio-gap")]
    with pytest.raises(
        ConfigError, match=r"^thresholds must name alarms .*; got 'ratio'\. Use one of not-finite"
    ):
        check_alarms(records, {"ratio": 1.0})


class Counted(Sequence):
    """Records that count how often one of them is read."""

    def __init__(self, records):
        self.records, self.reads = records, 0

    def __len__(self):
        return len(self.records)

    def __getitem__(self, place):
        self.reads += 1
        return self.records[place]


def nothing_held_out(count):
    """Without a first held-out value that could be found."""
    return history("sft", "loss", [2.0] * count)


def held_out_at_first(count):
    names = {rule.metric for rule in ALARMS if "rl" in rule.families} - {"*"}
    early = dict.fromkeys(names, 1.0)
    later = {name: 1.0 for name in names if "heldout" not in name}
    return [Record("ppo", n + 1, 0.0, early if n < 50 else later) for n in range(count)]


@pytest.mark.parametrize("run", [nothing_held_out, held_out_at_first])
def test_a_check_costs_no_more_late_in_a_run(run):
    reads = []
    for count in (3000, 30_000):
        records = Counted(run(count))
        assert check_alarms(records, {}) == []
        reads.append(records.reads)
    assert reads[0] == reads[1]
