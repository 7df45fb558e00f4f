"""Ways to make one model's training fit: knobs, the peak with each, the cheapest first.

The same lines are in the rehearsal's message when memory runs out, and in `tandem plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from tandem.memory.dimensions import Shape
from tandem.memory.model import Layout
from tandem.memory.steps import supervised_memory

_RANK = "--lora-rank"
NAMED = 3
"""Ways out that a message names."""
_WORTH = 0.03
"""Share of the peak that a way must free to be named."""


@dataclass(frozen=True, slots=True)
class Way:
    """Flags that lower the peak, the peak in bytes with them, and about how many times as long a
    step then takes (of what trains something else: as if it were dear)."""

    flags: str
    peak: int
    cost: float


@dataclass(frozen=True, slots=True)
class _Change:
    """A knob that may help: its flags, what it does to the layout or to the tokens of a
    micro-batch, and the time of a step with it, as in `Way`."""

    flags: str
    cost: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0


def ways_out(
    shape: Shape,
    layout: Layout,
    tokens: int,
    *,
    ranks: int = 1,
    rank_flag: str = _RANK,
    checkpointing_flag: str = "--gradient-checkpointing",
) -> list[Way]:
    """What lowers the peak of training with micro-batches of `tokens`, the cheapest first: single
    knobs, and two together where fewer than three of these help.

    Args:
        rank_flag: sets the rank of the model's adapters; empty: it can have none.
        checkpointing_flag: turns on its checkpointing.
    """

    def way(*changes: _Change) -> Way:
        changed = replace(layout, **{k: v for one in changes for k, v in one.changes.items()})
        fewer = min([one.tokens for one in changes if one.tokens], default=tokens)
        plan = supervised_memory(shape, changed, tokens=fewer, answered=fewer)
        flags = " ".join(one.flags for one in changes)
        return Way(flags, plan.peak("train"), math.prod(one.cost for one in changes))

    found = list(_changes(layout, tokens, ranks, rank_flag, checkpointing_flag))
    single = {change.flags: way(change) for change in found}
    enough = (1 - _WORTH) * way().peak
    ways = [one for one in single.values() if one.peak < enough]
    if len(ways) < NAMED:
        for first, second in combinations(found, 2):
            both = way(first, second)
            alone = min(single[first.flags].peak, single[second.flags].peak)
            if both.peak < min(enough, (1 - _WORTH) * alone) and not _collide(first, second):
                ways.append(both)
    ways = ways or [min(single.values(), key=lambda one: one.peak)]
    return sorted(ways, key=lambda one: one.cost)


def _collide(first: _Change, second: _Change) -> bool:
    """Whether two set one knob."""
    same = {*first.flags.split()} & {*second.flags.split()}
    return any(word.startswith("--") for word in same)


def _changes(
    layout: Layout, tokens: int, ranks: int, rank_flag: str, again: str
) -> Iterator[_Change]:
    """Every knob that is not set yet and can lower what training one model takes."""
    if tokens > 1:
        yield _Change(f"--micro-batch-tokens {tokens // 2}", 1.02, tokens=tokens // 2)
    if layout.optimizer_states != "8bit":
        yield _Change("--parallel.optimizer-states 8bit", 1.1, {"optimizer_states": "8bit"})
    if ranks > 1 and layout.stage < 3:
        flags = "--actor-zero-stage 3 --critic-zero-stage 3"
        yield _Change(flags, 1.2, {"stage": 3})
    if not layout.checkpointing:
        mlp = {"checkpointing": True, "recompute": "mlp"}
        yield _Change(f"{again} --recompute mlp", 1.22, mlp)
        yield _Change(again, 1.33, {"checkpointing": True, "recompute": "layers"})
    elif layout.recompute != "layers":
        yield _Change("--recompute layers", 1.33, {"recompute": "layers"})
    if not layout.on_cpu:  # there the host is the device
        if not (layout.offload_optimizer or layout.offload_params):
            yield _Change("--offload optimizer", 1.5, {"offload_optimizer": True})
        if not layout.offload_params:
            moved = {"offload_optimizer": True, "offload_params": True}
            yield _Change("--offload optimizer params", 1.8, moved)
    if not layout.lora_rank and rank_flag:
        yield _Change(f"{rank_flag} 16", 2.0, {"lora_rank": 16})
    if not layout.frozen and rank_flag == _RANK:  # other ranks than the policy's exclude it
        flags = "--frozen-weights nf4" if layout.lora_rank else f"{_RANK} 16 --frozen-weights nf4"
        changes = {"lora_rank": layout.lora_rank or 16, "frozen": "nf4"}
        yield _Change(flags, 2.5, changes)


def advice(now: float, ways: Sequence[tuple[str, float]]) -> str:
    """One clear line: the peak as it is, and the first three ways out with theirs, or that there
    are no more.

    Args:
        now: bytes predicted as it is. ways: flags and bytes, the cheapest first.
    """
    named = ", ".join(f"{flags} ({size_text(peak)})" for flags, peak in ways[:NAMED])
    found = "cheapest ways" if len(ways) >= NAMED else f"only {'way' if len(ways) == 1 else 'ways'}"
    said = f"the {found} out: {named}" if ways else "no knob makes it smaller"
    return f"The predicted peak is {size_text(now)}; {said}"


def size_text(size: float) -> str:
    """Bytes in a unit that fits."""
    if size >= 10 * 2**30:
        return f"{size / 2**30:,.0f} GiB"
    if size >= 999.5 * 2**20:  # 1,000 MiB would be written 1e+03
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.3g} MiB"
