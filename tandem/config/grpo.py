"""The knobs of policy gradients without a critic, and the algorithms as values for them.

`algorithm` names a preset: it sets the knobs that were not set. What each then is stands in the
section itself, in what a run prints and in its saved config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from tandem.config.knob import UNSET, knob

_GRPO: dict[str, Any] = {
    "baseline": "group-mean",
    "advantage_scale": "group-std",
    "loss": "clip",
    "normalization": "token",
    "kl": "none",
    "kl_coef": 0.05,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "sampling_rounds": 1,
    "overlong_penalty": 0.0,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _GRPO,
    "dr-grpo": _GRPO | {"advantage_scale": "none", "normalization": "constant"},
    "rloo": _GRPO
    | {
        "baseline": "leave-one-out",
        "advantage_scale": "none",
        "kl": "k1-in-reward",
        "kl_coef": 0.03,
    },
    "reinforce++": _GRPO
    | {
        "baseline": "none",
        "advantage_scale": "whiten",
        "kl": "k1-in-reward",
        "kl_coef": 0.01,
    },
    "reinforce++-baseline": _GRPO
    | {"advantage_scale": "whiten", "kl": "k2-in-loss", "kl_coef": 0.001},
    "dapo": _GRPO | {"clip_high": 0.28, "sampling_rounds": 10, "overlong_penalty": 1.0},
    "gspo": _GRPO
    | {"loss": "gspo", "normalization": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": _GRPO | {"loss": "cispo"},
}
"""What each algorithm sets. docs/grpo.md has the sources, and where a preset differs from one."""


@dataclass(frozen=True, kw_only=True)
class CriticFreeConfig:
    """Advantage x loss x normalization x KL placement. A default of `algorithm` is the preset's."""

    algorithm: Literal[
        "grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "dapo", "gspo", "cispo"
    ] = knob("grpo", common=("rl",))
    """The preset of the knobs below that are not set: advantage (baseline, advantage_scale), loss,
    normalization, kl and what belongs to them. docs/grpo.md has the table."""
    baseline: Literal["none", "group-mean", "leave-one-out", "length-weighted"] = knob(UNSET)
    """What is taken from an answer's reward: nothing, its group's mean (GRPO), the mean of the
    others (RLOO), or the group's mean weighted by length (OPO). A group is the answers to one
    prompt. Without a baseline each token gets the rewards from it on (REINFORCE++)."""
    advantage_scale: Literal["none", "group-std", "batch-std", "whiten"] = knob(UNSET)
    """What that is divided by: nothing, the group's deviation (GRPO), the deviation of all rewards,
    or it is brought to mean 0 and sd 1 over all response tokens (REINFORCE++)."""
    loss: Literal["clip", "gspo", "cispo"] = knob(UNSET)
    """PPO's clipped ratio per token; the clipped ratio of a whole answer (GSPO); or REINFORCE
    weighted by the capped ratio, which cuts no token's gradient (CISPO)."""
    normalization: Literal["token", "sequence", "constant"] = knob(UNSET)
    """Every response token of an optimizer step counts alike (DAPO); every answer does (GRPO's
    paper: short right answers and long wrong ones gain); or each token counts
    1 / (answers x sampling.max_new_tokens) (Dr. GRPO)."""
    clip_low: float = knob(UNSET, gt=0, lt=1)
    """The ratio counts down to 1 - this where the advantage is negative."""
    clip_high: float = knob(UNSET, gt=0)
    """The ratio counts up to 1 + this where the advantage is positive. DAPO's clip-higher has 0.28,
    so that rare tokens can grow."""
    dual_clip: float = knob(0.0, ge=0)
    """Where the advantage is negative the ratio counts up to this, above 1 (arXiv:1912.09729 has
    3); 0 sets no bound. For loss clip."""
    cispo_max_ratio: float = knob(5.0, gt=0)
    """CISPO's cap on the ratio itself: 5 as in ScaleRL and TRL's epsilon_high. verl's cap is 1 +
    clip_ratio_high, so write that sum here."""
    kl: Literal[
        "none", "k1-in-reward", "k2-in-loss", "k3-times-ratio", "forward-k3-in-loss",
        "exact-in-loss", "forward-exact-in-loss", "jsd-in-loss",
    ] = knob(UNSET)  # fmt: skip
    """Where the KL to the reference goes. The first three after none have the gradient of
    KL(policy, reference); forward-k3-in-loss, which GRPO's paper has, has that of
    KL(reference, policy). The exact ones sum over the vocabulary instead of estimating from the
    sampled token, for one more forward of the reference; jsd-in-loss mixes both directions. none:
    no reference is loaded."""
    jsd_beta: float = knob(0.5, gt=0, lt=1)
    """The reference's share of the mixture from which jsd-in-loss measures both (GKD's beta), the
    generalized Jensen-Shannon divergence. Near 0 its gradient is beta times that of
    forward-exact-in-loss, near 1 it is 1 - beta times that of exact-in-loss."""
    ptx_target: Literal["tokens", "reference"] = knob("tokens")
    """What the texts of ptx_data teach: their own next tokens, or the reference's distribution of
    each, by kl, which must be an exact one (GKD's given answers)."""
    overlong_penalty: float = knob(UNSET, ge=0)
    """Taken from the score of an answer at the length limit, in proportion from overlong_buffer on
    (DAPO's soft overlong punishment); 0 is off. Beside it, missing_eos_penalty is 0 by default."""
    overlong_buffer: float = knob(0.2, gt=0, le=1)
    """The last share of sampling.max_new_tokens, over which overlong_penalty grows (DAPO: 4,096 of
    20,480)."""
    overlong_filter: bool = knob(False)
    """Leave answers that the length limit cut out of the loss; they still count in their group's
    statistics and in the reward that is reported."""
    sampling_rounds: int = knob(UNSET, ge=1)
    """Most prompts that a step answers, in multiples of prompts_per_step: each group of equal
    rewards is replaced by a further prompt, while the others are answered (DAPO's dynamic
    sampling); 1 is off."""

    def apply_preset(self) -> None:
        """Set what is unset to the algorithm's; in place, where the section is made."""
        # A wrong name is refused with all else that is wrong, in `load`.
        preset = PRESETS.get(self.algorithm, _GRPO)
        for name, value in preset.items():
            if getattr(self, name) is UNSET:
                is_unread = name == "kl_coef" and self.kl == "none"
                object.__setattr__(self, name, 0.0 if is_unread else value)

    def effective(self) -> str:
        """One line: what the algorithm is in these knobs."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        own_loss, own_advantages = values["loss_function"], values["advantage_function"]
        is_read = {
            "baseline": not own_advantages,
            "advantage_scale": not own_advantages,
            "loss": not own_loss,
            "clip_low": self.loss != "cispo" and not own_loss,
            "clip_high": self.loss != "cispo" and not own_loss,
            "dual_clip": self.dual_clip > 0,
            "cispo_max_ratio": self.loss == "cispo" and not own_loss,
            "overlong_buffer": self.overlong_penalty > 0,
            "kl_coef": self.kl != "none",
            "jsd_beta": self.kl == "jsd-in-loss",
            "ptx_target": self.ptx_target != "tokens",
        }
        names = [f.name for f in fields(CriticFreeConfig) if f.name != "algorithm"]
        names.insert(names.index("kl") + 1, "kl_coef")
        names[:0] = [name for name in ("advantage_function", "loss_function") if values[name]]
        shown = (name for name in names if is_read.get(name, True))
        return ", ".join(f"{name} {values[name]}" for name in shown)
