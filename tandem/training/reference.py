"""A policy in training beside its frozen reference, as the losses on preferences compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.schema import RunConfig
from tandem.data.render import Renderer
from tandem.engine.forward import response_logprobs
from tandem.engine.loading import check_policy, place_policy
from tandem.engine.same_start import check_same_start
from tandem.models.load import check_vocabulary
from tandem.models.lora import adapters_off
from tandem.objectives.preferences import AnswerLogprobs
from tandem.training.evaluate import row_logprobs
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.types import TokenBatch, TokenRow


@dataclass(frozen=True, slots=True)
class ReferencedPolicy:
    """The policy, and what it is compared with.

    frozen: a copy of the policy as it started; None where that is the policy with its adapters off.
    has_reference: False where the loss needs none; then nothing is loaded and nothing scored.
    """

    model: PreTrainedModel
    frozen: PreTrainedModel | None
    renderer: Renderer
    config: RunConfig
    device: torch.device
    has_reference: bool = True

    @property
    def models(self) -> list[PreTrainedModel]:
        """The models that log-probs come from."""
        return [self.model] if self.frozen is None else [self.model, self.frozen]

    def logprobs(self, rows: Sequence[TokenRow]) -> AnswerLogprobs:
        """Of the answers of some rows, with gradient (the reference's without)."""
        batch = TokenBatch.from_rows(rows, self.renderer.pad_token_id).to(self.device)
        reference = self.reference_sums(batch) if self.has_reference else None
        total = response_logprobs(self.model, batch)[0].sum(dim=1)
        return AnswerLogprobs(total, batch.response_mask.sum(dim=1), reference)

    def reference_sums(self, batch: TokenBatch) -> Tensor:
        """(B,) nats, the reference's log-probs summed over each answer; no gradient."""
        with torch.no_grad():
            if self.frozen is not None:
                return response_logprobs(self.frozen, batch)[0].sum(dim=1)
            with adapters_off(self.model):
                return response_logprobs(self.model, batch)[0].sum(dim=1)

    def heldout(self, rows: Sequence[TokenRow]) -> Callable[[], AnswerLogprobs]:
        """What measures the policy on rows, on the CPU; the reference is scored now and once."""
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
    """The policy that a stage starts from, laid over the ranks, with its reference."""
    config, source = run.config, run.policy_source(stage)
    model = place_policy(
        source, config, run.world, trained=True, seed=config.seed, keeps_start=True
    )
    check_vocabulary(model, rows.tokenizer)
    check_policy(model, config, None)
    frozen = None
    if has_reference and config.lora.rank == 0:
        frozen = place_policy(source, config, run.world, trained=False)
    if has_reference:
        check_same_start(model, frozen)
    return ReferencedPolicy(model, frozen, rows.renderer, config, run.device, has_reference)


def halves(both: AnswerLogprobs) -> tuple[AnswerLogprobs, AnswerLogprobs]:
    """The first and the second half of 2 B answers: the chosen and the rejected ones of B pairs."""
    reference: Sequence[Tensor | None] = (None, None)
    if both.reference is not None:
        reference = both.reference.chunk(2)
    sides = zip(both.total.chunk(2), both.tokens.chunk(2), reference, strict=True)
    chosen, rejected = (AnswerLogprobs(*side) for side in sides)
    return chosen, rejected
