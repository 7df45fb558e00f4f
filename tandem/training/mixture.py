"""Mixture training: which texts an update of the actor learns from beside its answers, and what."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.config.schema import RLConfig
from tandem.data.loader import BatchOrder
from tandem.engine.divergence import compared_with_reference
from tandem.engine.forward import response_logprobs
from tandem.engine.hybrid import RLHFEngine
from tandem.engine.update import LossTerm, MicroBatchLoss
from tandem.errors import ConfigError
from tandem.objectives.divergence import Divergence
from tandem.objectives.losses import sft_loss
from tandem.types import TokenBatch, TokenRow


def mixed_in(rows: Sequence[TokenRow], update: int, batch_size: int, seed: int) -> list[TokenRow]:
    """The texts of an update, numbered from 0 over the whole run, so that a resumed one goes on."""
    order = BatchOrder(
        num_rows=len(rows), batch_size=batch_size, seed=seed, epochs=None, max_steps=update + 1
    )
    _, indices = next(order.from_step(update))
    return [rows[i] for i in indices]


def mixture_term(
    engine: RLHFEngine, batch: TokenBatch, coefficient: float, divergence: Divergence | None = None
) -> LossTerm:
    """coefficient * loss per token of the update's texts: the language-model loss, or the actor's
    divergence from the reference (GKD on given answers, arXiv:2306.13649)."""

    def loss(rows: list[int]) -> MicroBatchLoss:
        text = batch.select(torch.tensor(rows)).to(engine.device)
        if divergence is not None:
            found = compared_with_reference(engine, text, divergence, learns_logprobs=False)
            return MicroBatchLoss(found.kl_sum)
        logprobs, _ = response_logprobs(engine.actor, text)
        return MicroBatchLoss(sft_loss(logprobs, text.response_mask))

    lengths, count = batch.lengths().tolist(), batch.num_response_tokens
    return LossTerm(lengths, count, loss, coefficient)


def require_texts(rl: RLConfig, section: str, rows: Sequence[TokenRow]) -> None:
    """Refuse a mixture without texts.

    Raises:
        ConfigError: `ptx_data` names data of which no row came.
    """
    if rl.ptx_data and rl.ptx_coef > 0 and not rows:
        raise ConfigError(
            f"PPOTrainer must get the texts of {section}.ptx_data, which it does not read; got no "
            "ptx_rows. Pass ptx_rows= (Renderer.document makes one of a text)."
        )
