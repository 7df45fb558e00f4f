"""The metrics of step 3, PPO. One record per step: a rollout and all of its updates."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.metrics.metric import Metric

_PPO = ("ppo",)

_REWARD = (
    Metric(
        "reward",
        "normalized reward",
        _PPO,
        "Mean score of the step's answers as PPO sees it: normalized, clipped, missing-EOS penalty "
        "taken off; KL not included.",
        healthy="rises; 1 is one standard deviation of the SFT policy's scores",
        better="higher",
    ),
    Metric(
        "reward_before_penalty",
        "normalized reward",
        _PPO,
        "Mean score of the step's answers before the missing-EOS penalty and the clip: what "
        "`heldout_reward` is on held-out prompts.",
        healthy="rises with `reward`",
        better="higher",
    ),
    Metric(
        "reward_std",
        "normalized reward",
        _PPO,
        "Standard deviation of the same over the step's answers.",
        healthy="above 0.01: equal scores teach nothing",
    ),
    Metric(
        "reward_raw",
        "reward units",
        _PPO,
        "Mean raw score of the reward model, before normalization, clip and penalties.",
    ),
    Metric(
        "reward_model_score",
        "normalized reward",
        _PPO,
        "Mean of the reward model's normalized score, before its weight.",
    ),
    Metric(
        "reward_function_score",
        "function units",
        _PPO,
        "Mean of the reward function's numbers, before its weight, over the answers it scored.",
    ),
    Metric(
        "reward_unscored",
        "answers",
        _PPO,
        "Answers for which the reward function returned None.",
        healthy="0, or what the function is meant to leave out",
    ),
    Metric(
        "reward_clipped",
        "share",
        _PPO,
        "Answers whose score ppo.reward_clip cut.",
        healthy="below 0.05",
        better="lower",
    ),
    Metric(
        "shaped_return",
        "normalized reward",
        _PPO,
        "Mean per answer of the sum of its rewards: the score minus kl_coef times KL where the KL "
        "is in the reward.",
        source="arXiv:2203.02155",
        healthy="rises: the gain is worth its KL",
        better="higher",
    ),
)

_DISTANCE = (
    Metric(
        "kl",
        "nats per answer",
        _PPO,
        "KL of the sampling policy from the reference: log-ratio (k1) summed over an answer's "
        "tokens, mean over answers.",
        source="http://joschu.net/blog/kl-approx.html",
        healthy="0 at step 1, then grows slowly to 1 to 20; never clearly negative",
    ),
    Metric("kl_per_token", "nats per token", _PPO, "The same, mean over response tokens."),
    Metric("kl_coef", "ratio", _PPO, "Weight of the KL penalty in this step."),
    Metric(
        "kl_loss",
        "nats per token",
        _PPO,
        "The KL term of the loss before its weight, where ppo.kl_in is `loss`.",
    ),
    Metric(
        "policy_kl",
        "nats per token",
        _PPO,
        "KL of the updated policy from the one that sampled (k3), mean over minibatches; early "
        "stop watches it.",
        source="http://joschu.net/blog/kl-approx.html",
        healthy="0.0001 to 0.05",
    ),
    Metric(
        "ratio_gap_before_update",
        "nats",
        _PPO,
        "Mean |log ratio| of the policy to itself before the step's first update: two forwards of "
        "the same weights.",
        healthy="0 to 1e-4 in fp32, below 3e-2 in bf16",
        better="lower",
    ),
    Metric(
        "policy_kl_before_update",
        "nats per token",
        _PPO,
        "`policy_kl` before the step's first update.",
        healthy="0",
        better="lower",
    ),
    Metric(
        "rollout_gap",
        "nats",
        _PPO,
        "Mean |generator's log-prob - training forward's log-prob| of the sampled tokens.",
        source="verl rollout_probs_diff",
        healthy="below 5e-3",
        better="lower",
    ),
    Metric(
        "old_logprobs_sampled",
        "share",
        _PPO,
        "1 where the sampler's log-probs served as those before the update, 0 where a forward "
        "computed them.",
    ),
)

_UPDATE = (
    Metric(
        "policy_loss",
        "normalized advantage",
        _PPO,
        "Clipped surrogate, mean per response token and over the step's updates.",
        source="arXiv:1707.06347 eq. 7",
        healthy="small and negative; its size says little",
    ),
    Metric(
        "value_loss",
        "reward units squared",
        _PPO,
        "Half the (clipped) squared error of the critic, mean per response token.",
        healthy="falls, then follows the policy",
        better="lower",
    ),
    Metric(
        "entropy",
        "nats per token",
        _PPO,
        "Entropy of the policy's next-token distribution, mean over response tokens.",
        healthy="falls slowly; stays above 10 % of its start",
    ),
    Metric(
        "clip_fraction",
        "share",
        _PPO,
        "Response tokens whose ratio is outside 1 +- ppo.clip_ratio.",
        healthy="0.01 to 0.2",
    ),
    Metric(
        "value_clip_fraction",
        "share",
        _PPO,
        "Response tokens whose value moved further than ppo.value_clip.",
        healthy="below 0.3",
    ),
    Metric("ratio_mean", "ratio", _PPO, "Mean policy ratio over updates.", healthy="0.98 to 1.02"),
    Metric("ratio_max", "ratio", _PPO, "Largest policy ratio of any token.", healthy="below 10"),
    Metric(
        "explained_variance",
        "share",
        _PPO,
        "1 - Var(returns - values) / Var(returns), before the updates: 1 is a perfect critic, 0 "
        "one that knows only the mean.",
        healthy="rises from about 0 towards 0.5 to 0.9",
        better="higher",
    ),
    Metric(
        "advantage_mean",
        "reward units",
        _PPO,
        "Mean advantage over response tokens, before whitening.",
        healthy="near 0 once the critic follows",
    ),
    Metric("advantage_std", "reward units", _PPO, "Standard deviation of the same.", healthy="> 0"),
    Metric("values_mean", "reward units", _PPO, "Mean value over response tokens."),
    Metric(
        "returns_mean",
        "reward units",
        _PPO,
        "Mean return over response tokens.",
        healthy="near values_mean",
    ),
    Metric(
        "actor_grad_norm",
        "norm",
        _PPO,
        "Global L2 norm of the actor's gradient before clipping, mean over updates.",
        healthy="steady",
    ),
    Metric("critic_grad_norm", "norm", _PPO, "The same of the critic's.", healthy="steady"),
    Metric("actor_learning_rate", "per step", _PPO, "The actor's learning rate."),
    Metric("critic_learning_rate", "per step", _PPO, "The critic's learning rate."),
    Metric(
        "epochs_done",
        "passes",
        _PPO,
        "Passes over the rollout that were made; a fraction where ppo.target_kl stopped them.",
        healthy="ppo.epochs",
    ),
    Metric("updates", "updates", _PPO, "Optimizer steps of the actor in this step."),
    Metric(
        "ptx_loss",
        "nats per token",
        _PPO,
        "Language-model loss on the mixture data, before its weight.",
        source="arXiv:2203.02155",
        healthy="level: rising is forgetting",
        better="lower",
    ),
)

_ANSWERS = (
    Metric(
        "rank_wait",
        "share",
        _PPO,
        "Of the ranks' time in the rollout, what they waited for the slowest one's answers.",
        healthy="below 0.2; above, one rank is slow or answers are few",
        better="lower",
    ),
    Metric("prompt_tokens", "tokens", _PPO, "Mean length of the step's prompts."),
    Metric(
        "response_tokens",
        "tokens",
        _PPO,
        "Mean length of the step's answers, EOS included.",
        healthy="steady; well under sampling.max_new_tokens",
    ),
    Metric("response_tokens_max", "tokens", _PPO, "Longest answer of the step."),
    Metric(
        "eos_rate",
        "share",
        _PPO,
        "Answers that ended with a stop token; the others were cut at the length limit.",
        healthy="above 0.9, and not falling",
        better="higher",
    ),
)

_HELDOUT = (
    Metric(
        "heldout_reward",
        "normalized reward",
        _PPO,
        "`reward_before_penalty` of the policy's answers to held-out prompts (see "
        "`heldout_eos_rate` beside it).",
        healthy="rises with `reward_before_penalty`",
        better="higher",
    ),
    Metric(
        "heldout_reward_ema",
        "normalized reward",
        _PPO,
        "The same of the averaged policy (ppo.ema).",
        healthy="close to heldout_reward",
        better="higher",
    ),
    Metric(
        "heldout_reward_function_score",
        "function units",
        _PPO,
        "`reward_function_score` of the answers to held-out prompts.",
        better="higher",
    ),
    Metric(
        "heldout_eos_rate",
        "share",
        _PPO,
        "`eos_rate` of the answers to held-out prompts.",
        healthy="not falling",
        better="higher",
    ),
    Metric("heldout_kl", "nats per answer", _PPO, "`kl` of the answers to held-out prompts."),
    Metric(
        "heldout_response_tokens",
        "tokens",
        _PPO,
        "`response_tokens` of the answers to held-out prompts.",
    ),
    Metric(
        "heldout_ptx_perplexity",
        "ratio",
        _PPO,
        "Perplexity of the policy on held-out mixture text: the forgetting meter.",
        healthy="level",
        better="lower",
    ),
)

PPO_GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "reward": _REWARD,
    "kl": _DISTANCE,
    "update": _UPDATE,
    "answers": _ANSWERS,
    "held-out": _HELDOUT,
}
"""What step 3 logs besides the phases' times, by what it is about."""

PPO_METRICS: tuple[Metric, ...] = tuple(m for group in PPO_GROUPS.values() for m in group)
"""The same in one row."""
