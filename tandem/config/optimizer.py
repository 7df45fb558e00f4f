"""Knobs of an optimizer, and of the stages that take one optimizer step per batch of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.config.knob import STEPS, SUPERVISED, knob


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule for one model."""

    learning_rate: float = knob(1e-5, gt=0, common=STEPS)
    """Peak learning rate of full weights."""
    lora_learning_rate: float = knob(2e-4, gt=0, common=SUPERVISED)
    """Peak learning rate of adapters, which need 10 to 20 times that of full weights."""
    weight_decay: float = knob(0.0, ge=0)
    """AdamW's decoupled weight decay, on matrices only: not on norms, biases and a recurrence's
    A_log, D and dt_bias, in whatever shape. Embeddings are matrices."""
    betas: tuple[float, float] = knob((0.9, 0.95))
    """AdamW's betas; 0.95 forgets the old policy faster than 0.999 (DeepSpeed-Chat's values)."""
    schedule: Literal["cosine", "linear", "constant"] = knob("cosine")
    """Learning rate after warm-up: cosine or linear decay to 10 % of the peak, or constant."""
    warmup: float = knob(0.03, ge=0, le=1)
    """Share of the optimizer steps over which the learning rate rises from zero."""
    max_grad_norm: float = knob(1.0, gt=0)
    """Gradients are clipped to this global norm."""


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(OptimizerConfig):
    """What SFT, reward model, DPO and KTO have in common."""

    epochs: float = knob(1.0, gt=0, common=SUPERVISED)
    """Passes over the stage's share of the data; may be a fraction."""
    max_steps: int = knob(0, ge=0, common=SUPERVISED)
    """Stop after this many optimizer steps; 0: no limit but the epochs."""
    batch_size: int = knob(32, ge=1, common=SUPERVISED)
    """Sequences (or pairs) per optimizer step, over all micro-batches and ranks."""
    eval_every: int = knob(50, ge=0, common=SUPERVISED)
    """Evaluate on held-out rows every N optimizer steps and at the end; 0: only at the end."""
    keep_best: bool = knob(False, common=SUPERVISED)
    """Leave the model of the evaluation with the lowest held-out loss, not the last one's
    (docs/reliability.md)."""
    patience: int = knob(0, ge=0, common=SUPERVISED)
    """End the stage once this many evaluations in a row have not lowered the lowest held-out loss;
    0: never."""
