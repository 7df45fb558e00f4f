"""Step 1: supervised fine-tuning.

Learns the assistant's tokens (every turn's, with the token that ends it) of demonstrated or
preferred answers, and whole texts where a row is plain text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from tandem.engine.forward import response_logprobs
from tandem.objectives.losses import dft_loss, sft_loss
from tandem.training.evaluate import language_model_metrics
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob
from tandem.training.supervised import Objective, SupervisedTrainer, policy_to_train
from tandem.types import TokenBatch, TokenRow


def prepare(run: Run, rows: StepRows) -> StageJob:
    """Step 1, ready to run; it leaves `RUN/sft`, a folder that from_pretrained opens."""
    config, device = run.config, run.device
    model = policy_to_train(run, rows, "sft")

    def loss(part: Sequence[TokenRow]) -> tuple[Tensor, dict[str, Tensor]]:
        batch = TokenBatch.from_rows(part, rows.renderer.pad_token_id).to(device)
        logprobs, _ = response_logprobs(model, batch)
        cross_entropy = sft_loss(logprobs, batch.response_mask)
        if config.sft.loss == "nll":
            return cross_entropy, {}
        return dft_loss(logprobs, batch.response_mask), {_CROSS_ENTROPY: cross_entropy.detach()}

    objective: Objective[TokenRow] = Objective(
        units=lambda row: sum(row.response_mask),
        sequences=lambda row: (row,),
        loss=loss,
        metrics=_metrics,
    )

    def evaluate() -> dict[str, float]:
        return language_model_metrics(model, rows.heldout_sft, rows.renderer, config)

    trainer = SupervisedTrainer(run, "sft", model, config.sft, rows.sft, objective, evaluate)
    return trainer.policy_job(rows)


_CROSS_ENTROPY = "cross_entropy"


def _metrics(means: Mapping[str, float]) -> dict[str, float]:
    """`loss` is the cross-entropy with either loss, as held out: that of dft rises while tokens
    become possible, and says nothing of how far the model is."""
    logged = dict(means)
    if _CROSS_ENTROPY in logged:
        logged["dft_loss"] = logged["loss"]
        logged["loss"] = logged.pop(_CROSS_ENTROPY)
    return logged | {"perplexity": math.exp(min(logged["loss"], 700.0))}
