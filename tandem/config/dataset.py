"""How rows become what each stage trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.config.knob import RL, SUPERVISED, knob


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How rows become what each step trains on."""

    split: tuple[float, ...] = knob((), common=True)
    """Shares of the prompts for SFT, reward model and PPO (DPO uses the reward model's share), kept
    for steps that run later too. None given: 2,4,4 (DeepSpeed-Chat's) among the steps that run, so
    that one alone takes all; in a folder whose steps were dealt shares before, those."""
    heldout: float = knob(0.05, ge=0, lt=1)
    """Share of the prompts kept out of every step, to measure on."""
    columns: tuple[str, ...] = knob(())
    """Column map for files of other shapes, as `role=column` (roles: prompt, chosen, rejected,
    completion, messages, text, system); `file.jsonl::prompt=question,completion=answer` behind a
    data set's name maps that one alone."""
    on_bad_row: Literal["error", "drop"] = knob("error", common=True)
    """A row that cannot be used: stop with its file and line, or drop it, counted by reason."""
    max_tokens: int = knob(512, ge=8, common=("train", *SUPERVISED))
    """Longest sequence (prompt and answer) in steps 1 and 2, in tokens."""
    max_prompt_tokens: int = knob(256, ge=1, common=RL)
    """Longest prompt in step 3, in tokens."""
    on_long_row: Literal["drop", "truncate", "error"] = knob("drop")
    """A row over the limit: drop it (counted), truncate the answer's end or the prompt's oldest
    turns (counted; a row whose answer would vanish is dropped), or stop."""
    system_prompt: str = knob("")
    """Put before every conversation that brings no system turn of its own."""
