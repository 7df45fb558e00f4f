"""Step 1: supervised fine-tuning.

Learns the assistant's tokens (every turn's, with the token that ends it) of demonstrated or
preferred answers, and whole texts where a row is plain text.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.engine.forward import response_logprobs
from tandem.engine.hybrid import on_device, prepare_for_training, resolve_dtype
from tandem.engine.spread import spread
from tandem.models.head import check_head
from tandem.models.load import check_vocabulary, load_causal_lm
from tandem.objectives.losses import sft_loss
from tandem.train.evaluate import language_model_metrics
from tandem.train.fit import Objective, fit
from tandem.train.rows import StepRows
from tandem.train.run import Run, save_policy
from tandem.types import TokenBatch, TokenRow


def train_sft(run: Run, rows: StepRows) -> None:
    """Train step 1 and leave `RUN/sft`, a folder that from_pretrained opens."""
    config = run.config
    device = run.device
    model = load_causal_lm(
        config.actor_model, dropout=config.dropout, trust_remote_code=config.trust_remote_code
    )
    on_device(model, device)
    check_head(model)
    check_vocabulary(model, rows.tokenizer)
    prepare_for_training(model, config, config.seed)
    dtype = resolve_dtype(config.dtype, device)
    spread(model, config.parallel.actor_zero_stage, config, dtype, run.world)

    def loss(part: Sequence[TokenRow]) -> tuple[Tensor, dict[str, Tensor]]:
        batch = TokenBatch.from_rows(part, rows.renderer.pad_token_id).to(device)
        logprobs, _ = response_logprobs(model, batch)
        return sft_loss(logprobs, batch.response_mask), {}

    evaluation = fit(
        run,
        "sft",
        model,
        config.sft,
        rows.sft,
        Objective(units=lambda row: sum(row.response_mask), tokens=len, loss=loss),
        evaluate=lambda: language_model_metrics(model, rows.heldout_sft, rows.renderer, config),
    )
    run.finish("sft", lambda folder: save_policy(model, rows, folder), evaluation)
