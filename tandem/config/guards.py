"""When an update is skipped, and what a run prints and logs."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.knob import knob


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """When an update with bad numbers is skipped, and when that stops the run."""

    spike_sigma: float = knob(6.0, ge=0)
    """Skip an update whose log gradient norm is this many standard deviations above the last 100;
    0: only those that are not finite, which are always skipped."""
    max_skipped: int = knob(5, ge=0)
    """Steps in a row that may be skipped; one more stops the run."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run prints and logs."""

    tensorboard: bool = knob(True)
    """Also write TensorBoard event files."""
    wandb: str = knob("")
    """Weights & Biases project to log to (needs `pip install wandb`); empty is off."""
    print_samples_every: int = knob(10, ge=0)
    """Print a prompt and its answers every N steps of an RL stage; 0: never."""
    record_answers: int = knob(8, ge=0)
    """Answers of each rollout that rollouts.jsonl keeps, with every token's numbers; 0: none."""
    record_bytes: int = knob(2**25, ge=0)
    """How large answers.jsonl, rollouts.jsonl and followed.jsonl may each become, in bytes; a file
    that grows beyond keeps every second of its steps. 0: none is written."""
