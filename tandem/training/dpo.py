"""Direct preference optimization: takes the place of reward model and PPO, without a reward model.

The reference is the policy as it starts: with LoRA the model with its adapters off, else a frozen
copy. Log-probs are summed over the answer, its EOS included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.engine.checks import check_same_start
from tandem.engine.forward import response_logprobs
from tandem.engine.placement import onload
from tandem.models.lora import adapters_off
from tandem.objectives.losses import dpo_loss
from tandem.training.evaluate import row_logprobs
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob
from tandem.training.supervised import SupervisedTrainer, objective_of_pairs, policy_to_train
from tandem.types import PairRow, TokenBatch


def prepare(run: Run, rows: StepRows) -> StageJob:
    """DPO, ready to run; it leaves `RUN/dpo`, a folder that from_pretrained opens."""
    config, settings = run.config, run.config.dpo
    model = policy_to_train(run, rows, "dpo", keeps_start=True)
    frozen = None
    if config.lora.rank == 0:
        on_host = "reference" in config.parallel.offload
        frozen = run.placement.policy(run.policy_source("dpo"), trained=False, on_host=on_host)
    check_same_start(model, frozen)

    def reference_of(batch: TokenBatch) -> Tensor:
        with torch.no_grad():
            if frozen is not None:
                with onload(frozen):
                    return response_logprobs(frozen, batch)[0].sum(dim=1)
            with adapters_off(model):
                return response_logprobs(model, batch)[0].sum(dim=1)

    def loss(part: Sequence[PairRow]) -> tuple[Tensor, dict[str, Tensor]]:
        both = [pair.chosen for pair in part] + [pair.rejected for pair in part]
        batch = TokenBatch.from_rows(both, rows.renderer.pad_token_id).to(run.device)
        ref_chosen, ref_rejected = reference_of(batch).chunk(2)
        chosen, rejected = response_logprobs(model, batch)[0].sum(dim=1).chunk(2)
        result = dpo_loss(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
        )
        return result.loss, {
            "accuracy": result.accuracy,
            "implicit_reward_chosen": result.chosen_reward,
            "implicit_reward_rejected": result.rejected_reward,
            "implicit_reward_margin": result.chosen_reward - result.rejected_reward,
        }

    objective = objective_of_pairs(loss, scoring_passes=1)
    evaluate = _evaluation(model, frozen, rows, config)
    trainer = SupervisedTrainer(run, "dpo", model, settings, rows.dpo_pairs, objective, evaluate)
    return trainer.policy_job(rows)


def _evaluation(
    model: PreTrainedModel, frozen: PreTrainedModel | None, rows: StepRows, config: RunConfig
) -> Callable[[], dict[str, float]]:
    """Held-out loss and accuracy of the implicit reward; the reference is scored only once."""
    pairs = rows.heldout_dpo_pairs
    sides = [[pair.chosen for pair in pairs], [pair.rejected for pair in pairs]]
    if frozen is not None:
        reference = [row_logprobs(frozen, side, rows.renderer, config) for side in sides]
    else:
        with adapters_off(model):
            reference = [row_logprobs(model, side, rows.renderer, config) for side in sides]

    def evaluate() -> dict[str, float]:
        if not pairs:
            return {}
        chosen, rejected = (row_logprobs(model, side, rows.renderer, config) for side in sides)
        result = dpo_loss(
            chosen,
            rejected,
            *reference,
            beta=config.dpo.beta,
            label_smoothing=config.dpo.label_smoothing,
        )
        return {
            "heldout_loss": float(result.loss) / len(pairs),
            "heldout_accuracy": float(result.accuracy) / len(pairs),
        }

    return evaluate
