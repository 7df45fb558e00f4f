"""Rotary embeddings for packed sequences.

Where they depend on a token's position alone, a CPU computes them once for every position and not
for every token. Others depend on a sequence's length: Hugging Face's modules look at the longest
sequence of a forward. Longrope (arXiv:2402.13753) takes other frequencies for every token of a
sequence that is longer than the model was first trained on, and dynamic NTK scaling changes them
past the model's positions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.errors import ShapeError
from tandem.ops.attention_context import (
    AttentionMetadata,
    Decode,
    Recording,
    current_step,
    longest_packed,
)

STEADY_KINDS = ("default", "linear", "llama3", "yarn")
"""Rope types by which a token's cosine and sine depend on its position alone."""


def turning_point(module: nn.Module) -> int | None:
    """The longest sequence with a module's short frequencies; None if all sequences have the same,
    or if the model's positions end there."""
    return longrope_border(module.config) if "longrope" in _kinds(module) else None


def longrope_border(config: Any) -> int | None:
    """As `turning_point`, from a text model's config alone."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    borders = [
        part["original_max_position_embeddings"]
        for part in nested or [parameters]
        if part.get("rope_type") == "longrope"
    ]
    if not borders:
        return None
    border = min(borders)
    positions = getattr(config, "max_position_embeddings", None)
    return None if positions is not None and positions <= border else int(border)


def packed_rope(module: Any, kind: type[nn.Module]) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class that computes a rotary module in a twin: one below, or its own, `kind`; and
    attributes that its forward needs beside the module's."""
    border = turning_point(module)
    if border is not None:
        return _TwoRopes, {"_own": kind, "_border": border}
    if any("dynamic" in name for name in _kinds(module)):
        return _ShortRope, {"_own": kind, "_limit": int(module.config.max_position_embeddings)}
    kinds = _kinds(module)
    is_steady = bool(kinds) and all(name in STEADY_KINDS for name in kinds)
    own: Any = kind
    is_read = own.__module__.startswith("transformers.models.")
    return (_by_position(own) if is_steady and is_read else kind), {}


@cache
def _by_position(kind: Any) -> type[nn.Module]:
    """A rotary module's class that goes by the name of its own: cosine and sine of every position
    up to the longest sequence's end, of which each token takes its own."""

    def forward(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **keywords: Any) -> Any:
        count = longest_packed()
        is_row = position_ids.dim() == 2 and len(position_ids) == 1
        if x.is_cpu and is_row and 0 < count < position_ids.shape[1]:
            places = torch.arange(count, device=x.device)[None]
            table = kind.forward(self, x, places, *args, **keywords)
            if isinstance(table, tuple) and all(part.shape[:2] == places.shape for part in table):
                return tuple(part.index_select(1, position_ids[0]) for part in table)
        return kind.forward(self, x, position_ids, *args, **keywords)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"forward": forward, **names})


class _TwoRopes(nn.Module):
    """Cosine and sine by the frequencies of each token's own sequence."""

    def forward(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Positions (1, N) -> cos and sin (1, N, R)."""
        module: Any = self
        # The module chooses by the largest position that it sees, so it is called twice.
        within = position_ids.clamp(max=module._border - 1)
        past = F.pad(position_ids, (0, 1), value=module._border)
        short = module._own.forward(self, x, within, *args, **kwargs)
        long = module._own.forward(self, x, past, *args, **kwargs)
        is_long = _lengths(current_step(), position_ids.shape[1]) > module._border
        cos, sin = (
            torch.where(is_long[None, :, None], far[:, :-1], near)
            for near, far in zip(short, long, strict=True)
        )
        return cos, sin


class _ShortRope(nn.Module):
    """The module's own rope, which is constant up to the model's positions; beyond, an error."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the module's own."""
        module: Any = self
        step = current_step()
        longest = step.max_length if not isinstance(step, Decode | Recording) else 0
        if longest > module._limit:
            raise ShapeError(
                f"packed sequences must fit the {module._limit} positions of a model with dynamic "
                f"rope, which stretches all of them by the longest; got {longest} tokens. Shorten "
                "the rows."
            )
        cos, sin = module._own.forward(self, *args, **kwargs)
        return cos, sin


def _kinds(module: nn.Module) -> tuple[str, ...]:
    """Rope types of a rotary module, one per kind of layer; none of any other module."""
    kinds = vars(module).get("rope_type")
    if isinstance(kinds, dict):
        return tuple(str(kind) for kind in kinds.values())
    return (kinds,) if isinstance(kinds, str) else ()


def _lengths(step: AttentionMetadata, num_tokens: int) -> Tensor:
    """(N,) length of each token's sequence."""
    if isinstance(step, Decode):
        return step.positions + 1
    packed = step.packed if isinstance(step, Recording) else step
    lengths = packed.cu_seqlens.diff().long()
    return lengths.repeat_interleave(lengths, output_size=num_tokens)
