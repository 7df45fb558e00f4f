"""Implicit rewards: how far a policy that DPO or KTO has trained tells held-out preferences apart,
against the reference that its stage had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.config.stages import Stage, of_family
from tandem.engine.reference import place_reference
from tandem.objectives.preferences import AnswerLogprobs
from tandem.training.dpo import pair_metrics
from tandem.training.evaluate import (
    by_dataset,
    datasets_of_answers,
    datasets_of_pairs,
    row_logprobs,
)
from tandem.training.kto import label_metrics
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.types import TokenRow


def preference_stage(run: Run) -> Stage | None:
    """The run's stage that trains a policy on preferences; None if it has none."""
    stages = of_family(run.config.stages, "pairs")
    return next((stage for stage in stages if stage.leaves == "policy"), None)


class ImplicitRewards:
    """Of the stage's own policies, and of those beside the run, on its held-out rows."""

    def __init__(self, run: Run, rows: StepRows) -> None:
        self._run, self._rows = run, rows
        stage = preference_stage(run)
        self._labels: set[str] = set()
        self._answers: Sequence[TokenRow] = ()
        self._needs_reference, self._source = False, ""
        self._reference: Tensor | None = None
        if stage is None:
            return
        self._labels = {policy.label for policy in stage.policies} | set(run.beside)
        pairs = rows.heldout_dpo_pairs
        self._answers = [row.answer for row in rows.heldout_labelled] if stage.labelled else [
            *(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)
        ]  # fmt: skip
        self._labelled = stage.labelled
        self._needs_reference = stage.labelled or run.config.dpo.needs_reference
        if not run.config.reference_model and self._needs_reference and self._answers:
            self._source = run.policy_source(stage.name)

    def metrics(self, label: str, source: str, model: PreTrainedModel) -> dict[str, float]:
        """heldout_accuracy and heldout_margin of one of them; nothing for others, of which one may
        be the reference.

        Args:
            label, source: of the model, as the comparison names it.
        """
        if not self._answers:
            return {}
        if source == self._source:
            self._reference = self._sums(model)
        if label not in self._labels:
            return {}
        if self._needs_reference and self._reference is None:
            self._reference = self._sums(self._place())
        tokens = torch.tensor([sum(row.response_mask) for row in self._answers])
        answers = AnswerLogprobs(self._sums(model), tokens, self._reference)
        return self._of_labelled(answers) if self._labelled else self._of_pairs(answers)

    def _of_pairs(self, answers: AnswerLogprobs) -> dict[str, float]:
        pairs, settings = self._rows.heldout_dpo_pairs, self._run.config.dpo
        # Implicit rewards are the same whatever function the loss is.
        settings = replace(settings, loss_function="")
        first = torch.arange(len(answers.total)) < len(pairs)
        chosen, rejected = answers.select(first), answers.select(~first)

        def measure(some: Tensor) -> dict[str, float]:
            return _known(pair_metrics(chosen.select(some), rejected.select(some), settings))

        return by_dataset(datasets_of_pairs(pairs), measure)

    def _of_labelled(self, answers: AnswerLogprobs) -> dict[str, float]:
        rows = self._rows.heldout_labelled
        labels = torch.tensor([row.is_desirable for row in rows], dtype=torch.bool)

        def measure(some: Tensor) -> dict[str, float]:
            own = answers.select(some)
            return _known(label_metrics(own, labels[some], 0.0, self._run.config.kto))

        return by_dataset(datasets_of_answers(rows), measure)

    def _place(self) -> PreTrainedModel:
        run = self._run
        named = run.config.reference_model
        own = self._rows.tokenizer if named else None  # the stage's start has the policy's tokens
        model = place_reference(run.placement, named or self._source, own)
        assert model is not None
        return model

    def _sums(self, model: PreTrainedModel) -> Tensor:
        return row_logprobs(model, self._answers, self._rows.renderer, self._run.config)


def _known(found: dict[str, float]) -> dict[str, float]:
    """Without the loss, whose name is a language model's in a comparison."""
    return {name: value for name, value in found.items() if name != "heldout_loss"}
