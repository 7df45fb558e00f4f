"""Ways to make one model's training fit: knobs, the peak with each, the cheapest first.

The same lines are in the rehearsal's message when memory runs out, and in `tandem plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.memory.dimensions import Shape
from tandem.memory.model import Layout
from tandem.memory.steps import supervised_memory

_WORTH = 0.03
"""Share of the peak that a way must free to be named."""


@dataclass(frozen=True, slots=True)
class Way:
    """Flags that lower the peak, the peak in bytes with them, and about how many times as long a
    step then takes (of what trains something else: as if it were dear)."""

    flags: str
    peak: int
    cost: float


def ways_out(shape: Shape, layout: Layout, tokens: int, *, ranks: int = 1) -> list[Way]:
    """What lowers the peak of training with micro-batches of `tokens`, the cheapest first."""

    def peak(tokens: int = tokens, **changes: Any) -> int:
        changed = replace(layout, **changes)
        return supervised_memory(shape, changed, tokens=tokens, answered=tokens).peak("train")

    fewer = tokens // 2
    ways = [Way(f"--micro-batch-tokens {fewer}", peak(fewer), 1.02)] if fewer else []
    if layout.optimizer_states != "8bit":
        flags = "--optimizer-states 8bit"
        ways.append(Way(flags, peak(optimizer_states="8bit"), 1.1))
    if ranks > 1 and layout.stage < 3:
        flags = "--actor-zero-stage 3 --critic-zero-stage 3"
        ways.append(Way(flags, peak(stage=3), 1.2))
    if not layout.checkpointing:
        ways.append(Way("--gradient-checkpointing", peak(checkpointing=True), 1.33))
    if not (layout.offload_optimizer or layout.offload_params):
        ways.append(Way("--offload optimizer", peak(offload_optimizer=True), 1.5))
    if not layout.lora_rank:
        ways.append(Way("--lora-rank 16", peak(lora_rank=16), 2.0))
    elif not layout.frozen:
        ways.append(Way("--frozen-weights nf4", peak(frozen="nf4"), 2.5))
    now = peak()
    return [way for way in ways if way.peak < (1 - _WORTH) * now] or [
        min(ways, key=lambda way: way.peak)
    ]


def advice(now: float, ways: Sequence[tuple[str, float]]) -> str:
    """One clear line: the peak as it is, and the first three ways out with theirs.

    Args:
        now: bytes predicted as it is. ways: flags and bytes, the cheapest first.
    """
    named = ", ".join(f"{flags} ({size_text(peak)})" for flags, peak in ways[:3])
    return f"The predicted peak is {size_text(now)}; the cheapest ways out: {named}"


def size_text(size: float) -> str:
    """Bytes in a unit that fits."""
    if size >= 10 * 2**30:
        return f"{size / 2**30:,.0f} GiB"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
