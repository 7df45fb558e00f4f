"""Rotary positions that follow a sequence's length, for sequences that stand side by side.

Hugging Face's modules look at the longest sequence of a forward: longrope (arXiv:2402.13753) turns
every token by other frequencies once it has more tokens than the model was first trained on, and
dynamic NTK scaling stretches them past the model's positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.errors import ShapeError
from tandem.ops.attention_context import Decode, Recording, AttentionMetadata, current_step


def turning_point(module: nn.Module) -> int | None:
    """Most tokens of a sequence with a module's short frequencies; None where it has one kind.

    Also None where no sequence of the model's positions is longer.
    """
    return longrope_border(module.config) if "longrope" in _kinds(module) else None


def longrope_border(config: Any) -> int | None:
    """As `turning_point`, of all that a text model's config says."""
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


def take_over_rope(module: nn.Module) -> None:
    """Give a twin's rotary module the class below that keeps sequences apart, where it needs one.

    A copy keeps the model's own attributes, and the forward of its own class computes.
    """
    border = turning_point(module)
    if border is not None:
        module.__dict__.update(_own=type(module), _border=border)
        module.__class__ = _TwoRopes
    elif any("dynamic" in kind for kind in _kinds(module)):
        limit = int(module.config.max_position_embeddings)  # type: ignore[union-attr, arg-type]
        module.__dict__.update(_own=type(module), _limit=limit)
        module.__class__ = _ShortRope


class _TwoRopes(nn.Module):
    """Cosine and sine by the frequencies of each token's own sequence."""

    def forward(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Positions (1, N) -> cos and sin (1, N, R)."""
        module: Any = self
        # The module chooses by the largest position that it sees: it is asked twice.
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
    """A rope that stays as it is while no sequence is longer than the model's positions."""

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
