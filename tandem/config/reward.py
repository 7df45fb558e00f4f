"""Knobs of the reward model's stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.config.knob import STEPS, knob
from tandem.config.optimizer import SupervisedConfig


@dataclass(frozen=True, kw_only=True)
class RewardConfig(SupervisedConfig):
    """Stage 2, the reward model: Bradley-Terry loss on the score at the last token, or, of graded
    answers, its squared error."""

    learning_rate: float = knob(1e-5, gt=0, common=STEPS)
    grades: Literal["auto", "pairs", "regression"] = knob("auto", common=("pairs",))
    """How graded answers are learned: as pairs of one prompt's answers whose grades differ, or by
    squared error, each one's grade standardized. auto: pairs if the stage also has preference pairs
    or half of the graded answers have such a partner, else regression."""
    grade_margin: float = knob(0.0, ge=0)
    """Margin of a pair of graded answers, per unit of difference between their grades, subtracted
    from the difference of scores in the loss (arXiv:2307.09288); 0 is off."""
    center_coef: float = knob(0.0, ge=0)
    """Weight of (chosen + rejected)^2, which keeps raw scores near zero (arXiv:2312.09244 uses
    0.01). Off: scores are normalized afterwards anyway, and it cost accuracy (LOG.md)."""
    normalize_prompts: int = knob(128, ge=0)
    """Scores are normalized to mean 0 and sd 1 on the SFT policy's answers to this many of PPO's
    prompts (of its own prompts if PPO has no share); 0 keeps them raw."""
