"""When a step is left out, and what a run shows and keeps."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.knob import knob


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """When a step is left out for the numbers that it brings, and when that ends the run."""

    spike_sigma: float = knob(6.0, ge=0)
    """Skip an update whose gradient norm is this many standard deviations above the last 100
    (of its logarithm); 0 takes any that is finite. One that is not finite is always left out."""
    max_skipped: int = knob(5, ge=0)
    """Steps in a row that may be left out; one more ends the run."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run shows and keeps."""

    tensorboard: bool = knob(True)
    """Write TensorBoard event files too."""
    wandb: str = knob("")
    """Weights & Biases project to log to as well (needs `pip install wandb`); empty is off."""
    print_samples_every: int = knob(10, ge=0)
    """Print a prompt and its answers every this many steps of step 3; 0: never."""
