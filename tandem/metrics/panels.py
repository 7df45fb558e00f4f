"""Which curves the report draws for each stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    """One small chart: a title and its lines as (metric, label).

    Metrics that are measured now and then (`heldout_...`) are drawn as points.
    """

    title: str
    lines: tuple[tuple[str, str], ...]


_LOSS = Panel("Loss", (("loss", "training"), ("heldout_loss", "held-out")))
_ACCURACY = Panel("Accuracy on pairs", (("accuracy", "training"), ("heldout_accuracy", "held-out")))
_OPTIMIZER = (
    Panel("Gradient norm", (("grad_norm", "before clipping"),)),
    Panel("Learning rate", (("learning_rate", "learning rate"),)),
)

PANELS: dict[str, tuple[Panel, ...]] = {
    "sft": (
        _LOSS,
        Panel("Perplexity", (("perplexity", "training"), ("heldout_perplexity", "held-out"))),
        *_OPTIMIZER,
        Panel("Tokens per batch", (("tokens", "training"),)),
        Panel("Training speed", (("tokens_per_second/train", "training"),)),
    ),
    "reward": (
        _LOSS,
        _ACCURACY,
        Panel("Margin", (("margin", "training"), ("heldout_margin", "held-out"))),
        Panel("Scores", (("score_chosen", "chosen"), ("score_rejected", "rejected"))),
        Panel("Calibration error", (("heldout_calibration_error", "held-out"),)),
        Panel("Centering penalty", (("center_penalty", "training"),)),
        *_OPTIMIZER,
        Panel("Training speed", (("samples_per_second/train", "pairs"),)),
    ),
    "dpo": (
        _LOSS,
        _ACCURACY,
        Panel("Margin", (("implicit_reward_margin", "training"), ("heldout_margin", "held-out"))),
        Panel(
            "Implicit rewards",
            (("implicit_reward_chosen", "chosen"), ("implicit_reward_rejected", "rejected")),
        ),
        *_OPTIMIZER,
    ),
    "ppo": (
        Panel(
            "Reward before the missing-EOS penalty",
            (
                ("reward_before_penalty", "training"),
                ("heldout_reward", "held-out"),
                ("heldout_reward_ema", "held-out, EMA"),
            ),
        ),
        Panel("Reward that PPO learns from", (("reward", "training, penalty taken off"),)),
        Panel("Spread of the reward", (("reward_std", "standard deviation"),)),
        Panel(
            "Reward function",
            (
                ("reward_function_score", "training"),
                ("heldout_reward_function_score", "held-out"),
            ),
        ),
        Panel("KL to the reference", (("kl", "training"), ("heldout_kl", "held-out"))),
        Panel("Entropy", (("entropy", "policy"),)),
        Panel(
            "Answer length",
            (("response_tokens", "mean"), ("response_tokens_max", "longest")),
        ),
        Panel(
            "Finished answers (EOS rate)",
            (("eos_rate", "training"), ("heldout_eos_rate", "held-out")),
        ),
        Panel("Explained variance", (("explained_variance", "critic"),)),
        Panel("Clipped tokens", (("clip_fraction", "policy"), ("value_clip_fraction", "value"))),
        Panel("Policy loss", (("policy_loss", "actor"),)),
        Panel("Value loss", (("value_loss", "critic"),)),
        Panel("KL of an update", (("policy_kl", "updated from sampling policy"),)),
        Panel(
            "Gap before the update",
            (("ratio_gap_before_update", "two forwards"), ("rollout_gap", "generator")),
        ),
        Panel("Gradient norms", (("actor_grad_norm", "actor"), ("critic_grad_norm", "critic"))),
        Panel(
            "Learning rates", (("actor_learning_rate", "actor"), ("critic_learning_rate", "critic"))
        ),
        Panel("KL coefficient", (("kl_coef", "coefficient"),)),
        Panel("Mixture loss", (("ptx_loss", "training"),)),
        Panel("Perplexity of mixture text", (("heldout_ptx_perplexity", "held-out"),)),
    ),
}
