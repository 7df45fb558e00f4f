"""Mixture training: which texts an update of the actor learns from beside its answers."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.config.schema import RunConfig
from tandem.data.loader import BatchOrder
from tandem.types import TokenRow


def mixed_in(rows: Sequence[TokenRow], update: int, config: RunConfig) -> list[TokenRow]:
    """The texts of an update, numbered from 0 over the whole run, so that a resumed one goes on."""
    order = BatchOrder(
        num_rows=len(rows),
        batch_size=config.ppo.ptx_batch_size,
        seed=config.seed,
        epochs=None,
        max_steps=update + 1,
    )
    _, indices = next(order.from_step(update))
    return [rows[i] for i in indices]
