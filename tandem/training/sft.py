"""Step 1: supervised fine-tuning.

Learns the assistant's tokens (every turn's, with the token that ends it) of demonstrated or
preferred answers, and whole texts where a row is plain text.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.engine.forward import response_logprobs
from tandem.engine.loading import check_policy, place_policy
from tandem.models.load import check_vocabulary
from tandem.objectives.losses import sft_loss
from tandem.training.evaluate import language_model_metrics
from tandem.training.fit import Objective, fit
from tandem.training.rows import StepRows
from tandem.training.run import Run
from tandem.training.saving import save_policy
from tandem.types import TokenBatch, TokenRow


def train_sft(run: Run, rows: StepRows) -> None:
    """Train step 1 and leave `RUN/sft`, a folder that from_pretrained opens."""
    config = run.config
    device = run.device
    model = place_policy(config.actor_model, config, run.world, trained=True, seed=config.seed)
    check_vocabulary(model, rows.tokenizer)
    check_policy(model, config, None)

    def loss(part: Sequence[TokenRow]) -> tuple[Tensor, dict[str, Tensor]]:
        batch = TokenBatch.from_rows(part, rows.renderer.pad_token_id).to(device)
        logprobs, _ = response_logprobs(model, batch)
        return sft_loss(logprobs, batch.response_mask), {}

    fitted = fit(
        run,
        "sft",
        model,
        config.sft,
        rows.sft,
        Objective(
            units=lambda row: sum(row.response_mask), sequences=lambda row: (row,), loss=loss
        ),
        evaluate=lambda: language_model_metrics(model, rows.heldout_sft, rows.renderer, config),
    )
    run.finish(
        "sft",
        lambda folder: save_policy(model, rows, folder, fitted.masters, config.save_dtype),
        fitted.evaluation,
    )
