"""The published alarms: one rule each, its threshold and what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.metrics.history import (
    History,
    accuracy_gap,
    drop_from_start,
    forgetting,
    growth,
    heldout_reward_lost,
    length_against_longest,
    mean_of,
    now,
    num_non_finite,
    over_median,
    recent_over_first,
    share_of_start,
    step_up,
)
from tandem.metrics.metric import STAGES

_ALL = STAGES
_SUPERVISED = ("sft", "reward", "dpo")
_PPO = ("ppo",)
_OURS = "Tandem's own"


@dataclass(frozen=True, slots=True)
class Rule:
    """One published alarm.

    name: of the alarm. stages: where it applies. metric: looked at after records that carry it.
    quantity: what is compared, in words; measure: the same as a function (None: not yet known).
    condition: "above" or "below" the threshold. in_a_row: for how many records that carry the
    metric. after_step: never at or before this step (-1: also on what is measured before the first
    update). meaning, advice: what it says and what to change. source: whose threshold it is.
    """

    name: str
    stages: tuple[str, ...]
    metric: str
    quantity: str
    measure: Callable[[History], float | None]
    condition: str
    threshold: float
    meaning: str
    advice: str
    source: str = _OURS
    in_a_row: int = 1
    after_step: int = 0

    def holds(self, history: History, threshold: float) -> bool:
        """Whether the condition holds after the last record of `history`."""
        if history.step <= self.after_step or not history.is_known(self.metric):
            return False
        value = self.measure(history)
        if value is None:
            return False
        return value > threshold if self.condition == "above" else value < threshold


ALARMS: tuple[Rule, ...] = (
    Rule(
        "not-finite",
        _ALL,
        "*",
        "values of the record that are nan or infinite",
        num_non_finite,
        "above",
        0,
        "A number of this step is not finite.",
        "Lower the learning rate; look at this step's samples and rows.",
        after_step=-1,
    ),
    Rule(
        "loss-not-falling",
        _SUPERVISED,
        "loss",
        "loss, mean of the last 20 steps / mean of the first 20",
        recent_over_first("loss", 20),
        "above",
        1.0,
        "The loss is not below where it began.",
        "Check the data with `tandem data check`; raise the learning rate, or lower it if the loss "
        "is jumping.",
        after_step=50,
    ),
    Rule(
        "heldout-loss-rising",
        _SUPERVISED,
        "heldout_loss",
        "heldout_loss / the evaluation before",
        step_up("heldout_loss"),
        "above",
        1.0,
        "The model gets worse on rows that it does not train on: overfitting.",
        "Use fewer epochs, more data or a lower learning rate.",
        in_a_row=3,
    ),
    Rule(
        "grad-spike",
        _SUPERVISED,
        "grad_norm",
        "grad_norm / median of the 50 steps before",
        over_median("grad_norm", 50),
        "above",
        10.0,
        "One batch pulls ten times harder than usual.",
        "If it repeats, lower the learning rate or max_grad_norm and look at the rows.",
    ),
    Rule(
        "reward-model-chance",
        ("reward", "dpo"),
        "heldout_accuracy",
        "heldout_accuracy",
        now("heldout_accuracy"),
        "below",
        0.55,
        "On held-out pairs this is hardly better than a coin.",
        "Check that chosen and rejected are not swapped; use more pairs, a larger model or more "
        "epochs before PPO.",
        after_step=10,
    ),
    Rule(
        "reward-model-overfit",
        ("reward", "dpo"),
        "heldout_accuracy",
        "accuracy (mean of the last 20 steps) - heldout_accuracy",
        accuracy_gap(20),
        "above",
        0.2,
        "The pairs are learned by heart, not the preference.",
        "Use one epoch, more pairs or a lower learning rate.",
    ),
    Rule(
        "ratio-gap",
        _PPO,
        "ratio_gap_before_update",
        "ratio_gap_before_update",
        now("ratio_gap_before_update"),
        "above",
        3e-2,
        "Two forwards of the same weights disagree before any update, so PPO's ratio is wrong.",
        "Turn dropout off, use dtype fp32, and report the model type if it stays.",
        source="slime: exactly 0 at the first step; ppo.ratio_tolerance sets Tandem's",
    ),
    Rule(
        "rollout-gap",
        _PPO,
        "rollout_gap",
        "rollout_gap",
        now("rollout_gap"),
        "above",
        1e-2,
        "The generator and the training forward give different log-probs.",
        "Use dtype fp32; check that no layer behaves differently in generation.",
        source="verl: rollout_probs_diff_mean above 0.01 is a precision problem",
    ),
    Rule(
        "kl-high",
        _PPO,
        "kl",
        "kl",
        now("kl"),
        "above",
        25.0,
        "The policy is far from the reference: the reward may be gamed.",
        "Raise ppo.kl_coef or set ppo.kl_target; read the samples.",
    ),
    Rule(
        "kl-growth",
        _PPO,
        "kl",
        "kl / kl 10 steps before (where that was above 1 nat)",
        growth("kl", 10, floor=1.0),
        "above",
        5.0,
        "The policy is running away from the reference.",
        "Lower the actor's learning rate or raise ppo.kl_coef.",
    ),
    Rule(
        "kl-negative",
        _PPO,
        "kl",
        "kl",
        now("kl"),
        "below",
        -1.0,
        "An estimated KL this negative means that the policy makes its own samples less likely "
        "than the reference does: truncated sampling or a bug.",
        "Sample with top_p 1 and top_k 0 and the temperature that training uses.",
        source="TRL PPO docs: objective/kl must not be negative",
    ),
    Rule(
        "entropy-collapse",
        _PPO,
        "entropy",
        "entropy / mean of the first 3 steps",
        share_of_start("entropy"),
        "below",
        0.1,
        "The policy answers nearly always the same.",
        "Raise ppo.entropy_coef or ppo.kl_coef, or lower the actor's learning rate.",
        source="Tandem's own; axolotl holds 0.05 to 0.5 nats for healthy",
    ),
    Rule(
        "clip-fraction",
        _PPO,
        "clip_fraction",
        "clip_fraction",
        now("clip_fraction"),
        "above",
        0.3,
        "Most of the update is being clipped away.",
        "Lower the actor's learning rate, ppo.epochs, or ppo.target_kl.",
        source="Tandem's own; axolotl holds below 0.1 for healthy",
        in_a_row=3,
    ),
    Rule(
        "critic-behind",
        _PPO,
        "explained_variance",
        "explained_variance",
        now("explained_variance"),
        "below",
        -0.5,
        "The critic is worse than a constant, so advantages are noise.",
        "Set ppo.critic_warmup_steps, change the critic's learning rate, or take ppo.lam 1.",
        in_a_row=5,
        after_step=10,
    ),
    Rule(
        "eos-falling",
        _PPO,
        "eos_rate",
        "eos_rate at the start (mean of 3 steps) - now",
        drop_from_start("eos_rate"),
        "above",
        0.2,
        "Answers stop ending by themselves.",
        "Raise ppo.missing_eos_penalty; check whether the reward favours length.",
        in_a_row=2,
    ),
    Rule(
        "eos-low",
        _PPO,
        "eos_rate",
        "eos_rate",
        now("eos_rate"),
        "below",
        0.5,
        "Most answers are cut at the length limit before their reward is earned.",
        "Raise sampling.max_new_tokens, train SFT longer, or raise ppo.missing_eos_penalty.",
        source="Tandem's own; TRL PPO docs watch num_eos_tokens",
        in_a_row=3,
    ),
    Rule(
        "length-limit",
        _PPO,
        "response_tokens",
        "response_tokens / response_tokens_max",
        length_against_longest,
        "above",
        0.98,
        "Nearly all answers are as long as the longest: they are at the limit.",
        "Raise sampling.max_new_tokens or ppo.missing_eos_penalty.",
        in_a_row=3,
    ),
    Rule(
        "reward-flat",
        _PPO,
        "reward_std",
        "reward_std",
        now("reward_std"),
        "below",
        1e-2,
        "All answers score the same, so there is nothing to learn from.",
        "Check the reward on these samples; raise the temperature or use harder prompts.",
        source="Tandem's own; axolotl: share of groups without spread below 0.8",
        in_a_row=3,
    ),
    Rule(
        "reward-clipped",
        _PPO,
        "reward_clipped",
        "reward_clipped",
        now("reward_clipped"),
        "above",
        0.2,
        "Many scores are at the clip, where better and worse look alike.",
        "Raise ppo.reward_clip, or lower the reward's weight.",
    ),
    Rule(
        "actor-grad-spike",
        _PPO,
        "actor_grad_norm",
        "actor_grad_norm / median of the 50 steps before",
        over_median("actor_grad_norm", 50),
        "above",
        10.0,
        "One rollout pulls the actor ten times harder than usual.",
        "If it repeats, lower the actor's learning rate and look at the step's samples.",
    ),
    Rule(
        "critic-grad-spike",
        _PPO,
        "critic_grad_norm",
        "critic_grad_norm / median of the 50 steps before",
        over_median("critic_grad_norm", 50),
        "above",
        10.0,
        "One rollout pulls the critic ten times harder than usual.",
        "If it repeats, lower the critic's learning rate or ppo.reward_clip.",
    ),
    Rule(
        "reward-overfit",
        _PPO,
        "heldout_reward",
        "best heldout_reward so far - now, while reward is above its value then",
        heldout_reward_lost,
        "above",
        0.25,
        "The reward rises on the training prompts and falls on held-out ones.",
        "Stop at the better step, raise ppo.kl_coef or use more prompts.",
        in_a_row=2,
    ),
    Rule(
        "forgetting",
        _PPO,
        "heldout_ptx_perplexity",
        "heldout_ptx_perplexity / its first value",
        forgetting,
        "above",
        1.2,
        "The policy is forgetting the language it was trained on.",
        "Raise ppo.ptx_coef or ppo.kl_coef, or lower the actor's learning rate.",
    ),
    Rule(
        "accuracy-chance",
        ("dpo",),
        "accuracy",
        "accuracy, mean of the last 20 steps",
        mean_of("accuracy", 20),
        "below",
        0.5,
        "The policy does not learn to prefer the chosen answers.",
        "Raise the learning rate; check that chosen and rejected are not swapped.",
        after_step=50,
    ),
)
"""Every alarm, in the order of the reference page."""
