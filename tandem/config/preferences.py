"""Knobs of policies that learn from preferences: DPO and its relatives, KTO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tandem.config.knob import STEPS, at_home, knob
from tandem.config.optimizer import SupervisedConfig

PAPER_BETAS = {
    "sigmoid": 0.1,
    "cdpo": 0.1,
    "robust": 0.1,
    "ipo": 0.1,
    "apo-zero": 0.1,
    "apo-down": 0.1,
    "simpo": 2.0,
    "orpo": 0.1,
}
"""`dpo.beta` 0 means the value of the loss's paper."""
PAPER_SMOOTHING = {"cdpo": 0.1, "robust": 0.1}
"""`dpo.label_smoothing` 0 means these for the losses that need smoothing."""
WITHOUT_REFERENCE = ("simpo", "orpo")


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    """Preference optimization on pairs, in place of reward model and PPO: DPO (arXiv:2305.18290)
    and later losses. docs/preferences.md has the formulas."""

    learning_rate: float = knob(1e-6, gt=0, common=STEPS)
    """Peak learning rate of full weights. SimPO's paper uses 3e-7 to 1e-6, ORPO's 8e-6."""
    loss: Literal["sigmoid", "cdpo", "robust", "ipo", "apo-zero", "apo-down", "simpo", "orpo"] = (
        knob("sigmoid", common=("pairs", "rl"))
    )
    """sigmoid is DPO; cdpo and robust assume that a share dpo.label_smoothing of the labels is
    wrong; ipo is a squared error; apo-zero makes chosen answers likelier, apo-down both less likely
    (chosen ones that are worse than the policy's own); simpo and orpo load no reference."""
    beta: float = knob(0.0, ge=0, common=("pairs", "rl"))
    """Strength of the pull towards the reference; for simpo the scale of the reward, for orpo the
    weight lambda of the odds ratio. 0: the value of the loss's paper (simpo 2, the others 0.1)."""
    label_smoothing: float = knob(0.0, ge=0, lt=0.5)
    """Assumed share of wrong labels, for sigmoid, cdpo and robust (sigmoid with any is cdpo). 0:
    0.1 for cdpo and robust, none for sigmoid."""
    simpo_gamma: float = knob(1.0, ge=0)
    """SimPO's target margin between the rewards, half of its beta in the paper."""
    sft_coef: float = knob(0.0, ge=0)
    """Weight of the chosen answer's negative log-prob, a mean per token, added to each pair's loss
    (RPO, arXiv:2404.19733, has 1): it keeps the chosen answers likely. For any loss but orpo."""
    ipo_logprobs: Literal["mean", "sum"] = knob("mean")
    """IPO's log-ratios per token (as its authors advise, and as in TRL) or summed over the
    answer (as in OpenRLHF)."""
    loss_function: str = knob("", path=True)
    """A loss on pairs of your own as `file.py:name?option=value` (docs/preferences.md), called as
    f(chosen, rejected) -> each pair's loss. Empty: that of dpo.loss."""

    def __post_init__(self) -> None:
        at_home(self)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a frozen reference."""
        return self.loss not in WITHOUT_REFERENCE

    @property
    def effective_beta(self) -> float:
        """`beta`, or the value of the loss's paper."""
        return self.beta or PAPER_BETAS[self.loss]

    @property
    def effective_smoothing(self) -> float:
        """`label_smoothing`, or the default of a loss that needs it."""
        return self.label_smoothing or PAPER_SMOOTHING.get(self.loss, 0.0)


@dataclass(frozen=True, kw_only=True)
class KTOConfig(SupervisedConfig):
    """KTO (arXiv:2402.01306): learns from single answers labelled good or bad, not from pairs."""

    learning_rate: float = knob(1e-6, gt=0, common=STEPS)
    batch_size: int = knob(32, ge=2, common=("pairs",))
    """Labelled answers per optimizer step, over all micro-batches and ranks. The baseline z is
    a mean over them, so a small batch makes it noisy (the paper advises 8 or more)."""
    beta: float = knob(0.1, gt=0, common=("pairs",))
    """Strength of the pull towards the reference (the paper's value)."""
    desirable_weight: float = knob(1.0, gt=0, common=("pairs",))
    """Weight of good answers, lambda_D. Weight times number of good answers should be 1 to 4/3 of
    weight times number of bad ones; outside of that range the stage prints what to set."""
    undesirable_weight: float = knob(1.0, gt=0, common=("pairs",))
    """Weight of bad answers, lambda_U."""


def preference_problems(dpo: DPOConfig) -> Iterator[str]:
    """Knobs that were set although the loss does not read them."""
    defaults = DPOConfig()
    if dpo.loss_function:
        for name in ("loss", "label_smoothing", "simpo_gamma", "ipo_logprobs"):
            if (value := getattr(dpo, name)) != getattr(defaults, name):
                yield (
                    f"dpo.{name} must not be set where dpo.loss_function is in its place; got "
                    f"{value}. Remove it, or make it an option of the function "
                    f"(dpo.loss_function FILE.py:NAME?{name}=...)"
                )
        return
    read_by = {
        "label_smoothing": ("sigmoid", "cdpo", "robust"),
        "simpo_gamma": ("simpo",),
        "ipo_logprobs": ("ipo",),
    }
    if dpo.loss == "orpo" and dpo.sft_coef > 0:
        yield (
            f"dpo.sft_coef must be 0 with dpo.loss orpo, which has the term; got {dpo.sft_coef:g}. "
            "Remove it, or set dpo.beta, which weighs the other one"
        )
    for name, losses in read_by.items():
        value = getattr(dpo, name)
        if value != getattr(defaults, name) and dpo.loss not in losses:
            yield (
                f"dpo.{name} must go with dpo.loss {' or '.join(losses)}, which read it; "
                f"got {value} with {dpo.loss}. Set dpo.loss, or remove dpo.{name}"
            )
