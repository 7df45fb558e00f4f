"""Published thresholds: when a run is going wrong, and what to change.

A rule measures one quantity after a record that carries its metric and compares it with its
threshold. It raises an alarm when the comparison holds for `in_a_row` such records and did not
before the last one: once, until it recovers. The state is the history itself, so a continued run
neither repeats nor forgets an alarm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.config.stages import FAMILIES, Family, stage_of
from tandem.errors import ConfigError
from tandem.metrics import measures
from tandem.metrics.measures import History, Measure
from tandem.metrics.names import find_metric
from tandem.metrics.records import Record


@dataclass(frozen=True, slots=True)
class Rule:
    """One published alarm.

    metric: checked after records that carry it (`*`: all), in the stages whose family logs it.
    condition: whether the quantity must be above or below the threshold. meaning, advice: what
    that says and what to change. measure: the quantity; the metric's newest value by default.
    quantity: the same in words, where it is not just the metric. source: whose threshold it is.
    in_a_row: for how many records that carry the metric. after_step: never at or before this step
    (-1: also on what is measured before the first update).
    """

    name: str
    metric: str
    condition: Literal["above", "below"]
    threshold: float
    meaning: str
    advice: str
    measure: Measure = measures.now
    quantity: str = ""
    source: str = "Tandem's own"
    in_a_row: int = 1
    after_step: int = 0

    @property
    def families(self) -> tuple[Family, ...]:
        """The families of stages that it watches."""
        return FAMILIES if self.metric == "*" else find_metric(self.metric).families

    def is_about(self, record: Record) -> bool:
        """Whether the record carries the metric."""
        return self.metric == "*" or self.metric in record.values

    def holds(self, history: History, threshold: float) -> bool:
        """Whether the condition holds after the last record of `history`."""
        is_known = self.metric == "*" or math.isfinite(history.record.values[self.metric])
        if history.record.step <= self.after_step or not is_known:
            return False
        value = self.measure(history, self.metric)
        if value is None:
            return False
        return value > threshold if self.condition == "above" else value < threshold


# fmt: off
ALARMS: tuple[Rule, ...] = (
    Rule("not-finite", "*", "above", 0,
        "A number of this step is not finite.",
        "Lower the learning rate; look at this step's samples and rows.",
        measures.num_non_finite, "nan or infinite values in the record", after_step=-1),
    Rule("loss-not-falling", "loss", "above", 1.0,
        "The loss is not below its starting level.",
        "Check the data with `tandem data check`; raise the learning rate, or lower it if the loss "
        "jumps.",
        measures.mean_over_first_mean, "mean loss of the last 20 steps / of the first 20",
        after_step=50),
    Rule("heldout-loss-rising", "heldout_loss", "above", 1.0,
        "The model is getting worse on rows that it does not train on: overfitting.",
        "Use fewer epochs, more data or a lower learning rate.",
        measures.over_previous, "heldout_loss / its previous value", in_a_row=3),
    Rule("grad-spike", "grad_norm", "above", 10.0,
        "This batch's gradient is ten times larger than usual.",
        "If it repeats, lower the learning rate or max_grad_norm and look at the rows.",
        measures.over_median, "grad_norm / its median over the previous 50 steps"),
    Rule("accuracy-chance", "accuracy", "below", 0.5,
        "The model is not learning to prefer the chosen answers.",
        "Raise the learning rate; check that chosen and rejected are not swapped.",
        measures.mean_of_20, "mean accuracy of the last 20 steps", after_step=50),
    Rule("heldout-accuracy-chance", "heldout_accuracy", "below", 0.55,
        "Accuracy on held-out pairs is hardly better than chance.",
        "Check that chosen and rejected are not swapped; use more pairs, a larger model or more "
        "epochs.",
        after_step=10),
    Rule("accuracy-overfit", "heldout_accuracy", "above", 0.2,
        "The model memorizes the training pairs instead of learning the preference.",
        "Use one epoch, more pairs or a lower learning rate.",
        measures.training_minus_heldout, "mean accuracy of the last 20 steps - heldout_accuracy"),
    Rule("ratio-gap", "ratio_gap_before_update", "above", 3e-2,
        "Two forwards of the same weights disagree before any update, so the ratio is wrong.",
        "Turn dropout off and use dtype fp32; if the gap stays, report the model type.",
        source="slime: exactly 0 at the first step; ppo.ratio_tolerance sets Tandem's"),
    Rule("rollout-gap", "rollout_gap", "above", 1e-2,
        "The generator and the training forward give different log-probs.",
        "Use dtype fp32; check that no layer behaves differently during generation.",
        source="verl: rollout_probs_diff_mean above 0.01 is a precision problem"),
    Rule("kl-high", "kl", "above", 25.0,
        "The policy is far from the reference and may be exploiting the reward.",
        "Raise ppo.kl_coef or set ppo.kl_coef_target; read the samples."),
    Rule("kl-growth", "kl", "above", 5.0,
        "The policy is moving away from the reference fast.",
        "Lower the actor's learning rate or raise ppo.kl_coef.",
        measures.growth_in_10, "kl / kl 10 steps before (where that was at least 1 nat)"),
    Rule("kl-negative", "kl", "below", -1.0,
        "An estimated KL this negative means that the policy finds its own samples less likely "
        "than the reference does: truncated sampling or a bug.",
        "Sample with top_p 1 and top_k 0, at the temperature used in training.",
        source="TRL PPO docs: objective/kl must not be negative"),
    Rule("entropy-collapse", "entropy", "below", 0.1,
        "The policy gives nearly the same answer every time.",
        "Raise ppo.entropy_coef or ppo.kl_coef, or lower the actor's learning rate.",
        measures.over_start, "entropy / its mean over the first 3 steps",
        source="Tandem's own; axolotl calls 0.05 to 0.5 nats healthy"),
    Rule("clip-fraction", "clip_fraction", "above", 0.3,
        "Much of the update is clipped away.",
        "Lower the actor's learning rate, ppo.epochs or ppo.early_stop_kl.",
        source="Tandem's own; axolotl calls below 0.1 healthy", in_a_row=3),
    Rule("critic-behind", "explained_variance", "below", -0.5,
        "The critic is worse than a constant, so the advantages are noise.",
        "Set ppo.critic_warmup_steps, change the critic's learning rate, or set ppo.lam to 1.",
        in_a_row=5, after_step=10),
    Rule("eos-falling", "eos_rate", "above", 0.2,
        "Fewer answers end with a stop token than at the start.",
        "Raise ppo.missing_eos_penalty; check whether the reward favors length.",
        measures.drop_from_start, "mean eos_rate of the first 3 steps - eos_rate", in_a_row=2),
    Rule("eos-low", "eos_rate", "below", 0.5,
        "Most answers are cut off at the length limit.",
        "Raise sampling.max_new_tokens, train SFT longer, or raise ppo.missing_eos_penalty.",
        source="Tandem's own; TRL PPO docs watch num_eos_tokens", in_a_row=3),
    Rule("length-limit", "response_tokens", "above", 0.98,
        "Nearly all answers are as long as the longest: they have reached the length limit.",
        "Raise sampling.max_new_tokens or ppo.missing_eos_penalty.",
        measures.over_longest, "response_tokens / response_tokens_max", in_a_row=3),
    Rule("reward-flat", "reward_std", "below", 1e-2,
        "All answers get the same score, so there is nothing to learn from.",
        "Check the reward on these samples; raise the temperature or use harder prompts.",
        source="Tandem's own; axolotl: share of groups with equal rewards below 0.8", in_a_row=3),
    Rule("reward-clipped", "reward_clipped", "above", 0.2,
        "Many scores are clipped, so better and worse answers look alike.",
        "Raise ppo.reward_clip or lower the reward's weight."),
    Rule("reward-failing", "reward_failed", "above", 0.05,
        "Reward functions fail on many answers, so the policy learns from the others alone.",
        "Read the line that names the first failure; fix the function, or raise "
        "scoring.deadline_seconds or scoring.memory_gb."),
    Rule("actor-grad-spike", "actor_grad_norm", "above", 10.0,
        "The actor's gradient on this rollout is ten times larger than usual.",
        "If it repeats, lower the actor's learning rate and look at the step's samples.",
        measures.over_median, "actor_grad_norm / its median over the previous 50 steps"),
    Rule("critic-grad-spike", "critic_grad_norm", "above", 10.0,
        "The critic's gradient on this rollout is ten times larger than usual.",
        "If it repeats, lower the critic's learning rate or ppo.reward_clip.",
        measures.over_median, "critic_grad_norm / its median over the previous 50 steps"),
    Rule("reward-overfit", "heldout_reward", "above", 0.25,
        "The reward rises on the training prompts and falls on held-out ones.",
        "Go back to the better step, raise ppo.kl_coef or use more prompts.",
        measures.heldout_lost, "best heldout_reward so far - heldout_reward, while reward is above "
        "its value then", in_a_row=2),
    Rule("forgetting", "heldout_ptx_perplexity", "above", 1.2,
        "The policy is forgetting the language that it was trained on.",
        "Raise ppo.ptx_coef or ppo.kl_coef, or lower the actor's learning rate.",
        measures.over_first, "heldout_ptx_perplexity / its first value"),
)
"""Every alarm, in the order of the reference page."""
# fmt: on


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that a record raised; a line of alarms.jsonl."""

    stage: str
    step: int
    alarm: str
    value: float
    threshold: float
    advice: str


def check_alarms(
    stage: str, history: Sequence[Record], thresholds: Mapping[str, float] | None = None
) -> list[Alarm]:
    """The alarms that the last record of `history` raises.

    Args:
        stage: the stage whose rules apply.
        history: the stage's records, oldest first; records of other stages are ignored.
        thresholds: in place of published ones, by alarm name.
    Raises:
        ConfigError: unknown stage, or a threshold for an unknown alarm.
    """
    family = stage_of(stage).family
    own = thresholds or {}
    for name in own:
        if name not in {rule.name for rule in ALARMS}:
            raise ConfigError(
                f"thresholds must name alarms of tandem.metrics.alarms; got {name!r}. "
                f"Use one of {', '.join(rule.name for rule in ALARMS)}."
            )
    if not history or history[-1].stage != stage:
        return []
    records = [record for record in history if record.stage == stage]
    last = History(records, len(records))
    alarms = []
    for rule in ALARMS:
        threshold = own.get(rule.name, rule.threshold)
        if family in rule.families and _is_raised(rule, last, threshold):
            value = rule.measure(last, rule.metric)
            assert value is not None
            advice = f"{rule.meaning} {rule.advice}"
            alarms.append(Alarm(stage, last.record.step, rule.name, value, threshold, advice))
    return alarms


def _is_raised(rule: Rule, last: History, threshold: float) -> bool:
    """Whether the condition holds for `in_a_row` records now, and did not one record before."""
    if not rule.is_about(last.record) or not rule.holds(last, threshold):
        return False
    ends = (end for end in range(last.end, 0, -1) if rule.is_about(last.records[end - 1]))
    held = [
        rule.holds(History(last.records, end), threshold)
        for end in itertools.islice(ends, rule.in_a_row + 1)
    ]
    was_on = len(held) > rule.in_a_row and all(held[1:])
    return len(held) >= rule.in_a_row and all(held[: rule.in_a_row]) and not was_on
