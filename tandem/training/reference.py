"""A policy in training beside its reference, as the losses on preferences compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.engine import engine_settings
from tandem.config.schema import RunConfig
from tandem.data.render import Renderer
from tandem.engine.checks import check_same_start
from tandem.engine.forward import response_logprobs
from tandem.engine.learner import Learner
from tandem.engine.moving_reference import MovingReference, moving_reference
from tandem.engine.placement import onload
from tandem.engine.reference import place_reference
from tandem.models.lora import adapters_off
from tandem.objectives.preferences import AnswerLogprobs
from tandem.training.evaluate import row_logprobs
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.training.supervised import policy_to_train
from tandem.types import TokenBatch, TokenRow


@dataclass(frozen=True, slots=True)
class ReferencedPolicy:
    """The policy, and the reference that the loss compares it with.

    frozen: a copy of the policy as it started, which may follow it; None if that is the policy with
        its adapters off.
    has_reference: False if the loss needs none; no reference is then loaded or scored.
    """

    model: PreTrainedModel
    frozen: PreTrainedModel | None
    renderer: Renderer
    config: RunConfig
    device: torch.device
    has_reference: bool = True

    @property
    def models(self) -> list[PreTrainedModel]:
        """The models that compute log-probs."""
        return [self.model] if self.frozen is None else [self.model, self.frozen]

    def logprobs(self, rows: Sequence[TokenRow]) -> AnswerLogprobs:
        """Log-probs of the answers of some rows; only the policy's have a gradient."""
        batch = TokenBatch.from_rows(rows, self.renderer.pad_token_id).to(self.device)
        reference = self.reference_sums(batch) if self.has_reference else None
        total = response_logprobs(self.model, batch)[0].sum(dim=1)
        return AnswerLogprobs(total, batch.response_mask.sum(dim=1), reference)

    def reference_sums(self, batch: TokenBatch) -> Tensor:
        """(B,) nats, the reference's log-probs summed over each answer; no gradient."""
        with torch.no_grad():
            if self.frozen is not None:
                with onload(self.frozen):
                    return response_logprobs(self.frozen, batch)[0].sum(dim=1)
            with adapters_off(self.model):
                return response_logprobs(self.model, batch)[0].sum(dim=1)

    def moving(self, learner: Learner) -> MovingReference | None:
        """The reference as it follows the policy of this learner; None where it stays."""
        if not self.has_reference:
            return None
        return moving_reference(engine_settings(self.config), learner, self.frozen)

    def heldout(self, rows: Sequence[TokenRow]) -> Callable[[], AnswerLogprobs]:
        """A function that scores rows, on the CPU. The reference scores them only once, here:
        evaluations of a stage compare with the policy as it began, also where the reference moves.
        """
        renderer, config = self.renderer, self.config
        reference = None
        if self.frozen is not None:
            reference = row_logprobs(self.frozen, rows, renderer, config)
        elif self.has_reference:
            with adapters_off(self.model):
                reference = row_logprobs(self.model, rows, renderer, config)
        tokens = torch.tensor([sum(row.response_mask) for row in rows])

        def measure() -> AnswerLogprobs:
            return AnswerLogprobs(
                row_logprobs(self.model, rows, renderer, config), tokens, reference
            )

        return measure


def place_referenced(
    run: Run, rows: StepRows, stage: str, *, has_reference: bool = True
) -> ReferencedPolicy:
    """The policy that a stage starts from, placed on the ranks, with its reference."""
    config = run.config
    model = policy_to_train(run, rows, stage, keeps_start=True)
    frozen = None
    if has_reference and config.reference_model:
        frozen = place_reference(run.placement, config.reference_model, rows.tokenizer)
    elif has_reference:
        if config.lora.rank == 0:
            frozen = place_reference(run.placement, run.policy_source(stage))
        check_same_start(model, frozen)
    return ReferencedPolicy(model, frozen, rows.renderer, config, run.device, has_reference)


def halves(both: AnswerLogprobs) -> tuple[AnswerLogprobs, AnswerLogprobs]:
    """Splits 2 B answers into the first half and the second: chosen and rejected of B pairs."""
    reference: Sequence[Tensor | None] = (None, None)
    if both.reference is not None:
        reference = both.reference.chunk(2)
    sides = zip(both.total.chunk(2), both.tokens.chunk(2), reference, strict=True)
    chosen, rejected = (AnswerLogprobs(*side) for side in sides)
    return chosen, rejected
