"""Dynamic loss scaling, which keeps float16 gradients inside float16's range.

A loss is multiplied by a scale before its backward, so that small gradients do not vanish below
float16's 6e-8; the gradients are divided by it, in float32, before the update. When a gradient
overflows, no model takes that step, and the scale is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tandem.errors import CheckpointError, ConfigError, NumericsError

Reduce = Callable[[Tensor], object]
"""Adds a tensor over all ranks, in place (`World.all_reduce_`)."""

_COUNTERS = ("good_steps", "skipped", "skipped_in_a_row")


class LossScaler:
    """One scale, for one model or for several that step together.

        scale = scaler.scale                    loss * scale, then backward, for every model
        overflow = scaler.overflowed([*actor_gradients, *critic_gradients], world.all_reduce_)
        if not overflow: scaler.unscale_(...), clip, step, for every model
        scaler.update(overflow)

    Scales are powers of two if the first is, so scaling and unscaling round nothing. All ranks see
    the same overflows and have the same scale.

    Source: arXiv:1710.03740 section 3.2.

    Attributes:
        scale: what losses are multiplied by.
        good_steps: steps without overflow since the scale last changed.
        skipped: steps that overflowed, in all.
        skipped_in_a_row: those since the last good step.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        *,
        growth_interval: int = 1000,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
    ) -> None:
        """Double after `growth_interval` good steps, halve on overflow, within floor and ceiling.

        Raises:
            ConfigError: the numbers are out of order.
        """
        if not 0 < floor <= initial <= ceiling < float("inf") or growth_interval < 1:
            raise ConfigError(
                "the loss scale must keep 0 < floor <= initial <= ceiling and grow after 1 or more "
                f"steps; got {floor:g}, {initial:g}, {ceiling:g} and {growth_interval}. Change "
                "what is out of order."
            )
        self.scale = float(initial)
        self.good_steps = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self._growth_interval = growth_interval
        self._floor = floor
        self._ceiling = ceiling

    @torch.no_grad()
    def overflowed(self, gradients: Iterable[Tensor], reduce: Reduce | None = None) -> bool:
        """Whether any gradient of any rank holds an inf or a NaN.

        Args:
            gradients: this rank's pieces, plain tensors on any device; possibly none.
            reduce: sums over the ranks, all of which then call this; None on one rank.
        """
        present = [gradient for gradient in gradients if gradient.numel()]
        # The largest magnitude only: a sum of squares could overflow by itself.
        peaks = torch._foreach_norm(present, torch.inf) if present else ()
        device = present[0].device if present else torch.device("cpu")
        bad = torch.zeros((), dtype=torch.float32, device=device)
        for place in {peak.device for peak in peaks}:
            here = torch.stack([peak.float() for peak in peaks if peak.device == place])
            bad += (~here.isfinite()).sum().to(device)
        if reduce is not None:
            reduce(bad)
        return bool(bad > 0)

    @torch.no_grad()
    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, in place.

        Raises:
            NumericsError: one is not float32, and would vanish again.
        """
        for gradient in gradients:
            if gradient.dtype not in (torch.float32, torch.float64):
                raise NumericsError(
                    f"scaled gradients must be float32 when they are unscaled; got "
                    f"{gradient.dtype}. Keep float32 masters of the weights."
                )
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.scale)

    def update(self, overflow: bool) -> bool:
        """Count a step and set the scale of the next one.

        Args:
            overflow: the result of `overflowed`, the same on every rank.
        Returns:
            whether what is left of this step's gradients says nothing of the next ones, for which
            the scale is another, or which follow gradients that were not used.
        """
        before = self.scale
        if overflow:
            self.scale = max(self._floor, self.scale / 2)
            self.good_steps = 0
            self.skipped += 1
            self.skipped_in_a_row += 1
            return True
        self.skipped_in_a_row = 0
        self.good_steps += 1
        if self.good_steps == self._growth_interval:
            self.scale = min(self._ceiling, self.scale * 2)
            self.good_steps = 0
        return self.scale != before

    def state_tensors(self) -> dict[str, Tensor]:
        """The scale and the counters, as tensors to save."""
        counters = {name: torch.tensor(getattr(self, name)) for name in _COUNTERS}
        return {"scale": torch.tensor(self.scale, dtype=torch.float64), **counters}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from `state_tensors`.

        Raises:
            CheckpointError: a number is missing or impossible.
        """
        missing = {"scale", *_COUNTERS} - set(tensors)
        scale = float("nan") if missing else float(tensors["scale"])
        if not 0 < scale < float("inf"):
            raise CheckpointError(
                "the state of a loss scaler must hold a scale above 0 and its counters; got "
                f"{sorted(tensors)} with scale {scale:g}. Use another checkpoint."
            )
        # The saved scale may have had other limits.
        self.scale = min(self._ceiling, max(self._floor, scale))
        for name in _COUNTERS:
            setattr(self, name, int(tensors[name]))
        self.good_steps = min(self.good_steps, self._growth_interval - 1)
