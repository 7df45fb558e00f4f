"""The trainer that SFT, the reward model and DPO share: rows in order, one optimizer step each.

A stage supplies its rows and an Objective: how many units (tokens or pairs) a row counts for, and
the loss of some rows as a sum. Everything else, also the denominator, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.checkpoint.state import SavedState
from tandem.config.optimizer import SupervisedConfig
from tandem.data.loader import BatchOrder
from tandem.data.trained_tokens import tokens_to_train
from tandem.engine.checks import check_policy
from tandem.engine.learner import Learner
from tandem.engine.moving_reference import MovingReference
from tandem.engine.oom import MicroBatchBudget
from tandem.engine.update import (
    LossTerm,
    MicroBatchLoss,
    Update,
    rehearse,
    restore_training,
    training_mode,
    training_state,
)
from tandem.errors import DataError
from tandem.metrics.timing import Phases
from tandem.models.load import check_vocabulary
from tandem.parallel.scaling import LossScaler
from tandem.parallel.tensor import tensor_group
from tandem.training.operations import batch_flops
from tandem.training.run_folder import Run
from tandem.training.saving import save_policy
from tandem.training.stage_data import StepRows
from tandem.training.stage_loop import StageJob, StepLoop
from tandem.types import PairRow, TokenBatch, TokenRow

Row = TypeVar("Row", bound=Sized)
Loss = Callable[[Sequence[Row]], tuple[Tensor, Mapping[str, Tensor]]]
"""Rows of one micro-batch to the loss as a sum, and other sums by metric name."""


@dataclass(frozen=True, slots=True)
class Objective(Generic[Row]):
    """What a stage learns from its rows.

    units: what a row adds to the denominator of the loss (tokens or pairs).
    sequences: what it puts through the model; a micro-batch holds fewer rows of several.
    loss: of one micro-batch.
    ends: the loss is of the sequences' last states (a reward model's), not of their responses.
    scoring_passes: forwards beside the trained one (DPO's reference), for TFLOP/s.
    metrics: what is logged of a step, from its means.
    per_step: makes the loss of one optimizer step, and metrics, from all of its rows, if `loss`
        needs a number of the whole step (KTO's baseline); `rehearse` then uses `loss` alone. Called
        once per step on every rank, without gradient.
    """

    units: Callable[[Row], int]
    sequences: Callable[[Row], Sequence[TokenRow]]
    loss: Loss[Row]
    ends: bool = False
    scoring_passes: int = 0
    metrics: Callable[[Mapping[str, float]], Mapping[str, float]] = field(default=dict)
    per_step: Callable[[Sequence[Row]], tuple[Loss[Row], Mapping[str, float]]] | None = None

    def tokens(self, row: Row) -> int:
        """What a row takes of a micro-batch: its sequences, as long as the longest."""
        return len(self.sequences(row)) * len(row)


def objective_of_pairs(loss: Loss[PairRow], scoring_passes: int = 0) -> Objective[PairRow]:
    """An objective for pairs: both answers go through the model, and the pair counts once."""
    return Objective(
        units=lambda pair: 1,
        sequences=lambda pair: pair.sequences,
        loss=loss,
        scoring_passes=scoring_passes,
    )


def policy_to_train(
    run: Run, rows: StepRows, stage: str, *, keeps_start: bool = False
) -> PreTrainedModel:
    """The policy that a stage starts from, placed for training, its forwards and tokens checked.

    Args:
        keeps_start: keep adapters that it came with as they are too, for `adapters_off`.
    """
    tokens = tokens_to_train(run.config.lora, rows.tokenizer)
    source = run.policy_source(stage)
    model = run.placement.policy(source, trained=True, keeps_start=keeps_start, tokens=tokens)
    check_vocabulary(model, rows.tokenizer)
    check_policy(model, tensor_group(run.world, run.settings.parallel.inference_tp_size))
    return model


class SupervisedTrainer(Generic[Row]):
    """Takes one optimizer step per batch of rows (a `StageTrainer`)."""

    def __init__(
        self,
        run: Run,
        stage: str,
        model: PreTrainedModel,
        settings: SupervisedConfig,
        rows: Sequence[Row],
        objective: Objective[Row],
        evaluate: Callable[[], dict[str, float]],
        moving: Callable[[Learner], MovingReference | None] | None = None,
    ) -> None:
        """
        Args:
            rows: all that the stage trains on.
            objective: what is learned from a row.
            evaluate: held-out metrics of the model as it is.
            moving: makes the reference that follows the model, if one does.
        Raises:
            DataError: there is nothing to train on.
        """
        if not rows:
            raise DataError(
                f"stage {stage} must have at least one row to train on; got none. "
                "Look at the drops above, at --dataset.split and at the lengths."
            )
        config = run.config
        self.order = BatchOrder(
            num_rows=len(rows),
            batch_size=settings.batch_size,
            seed=config.seed,
            epochs=settings.epochs,
            max_steps=settings.max_steps,
        )
        self.phases = Phases()
        self.thresholds: Mapping[str, float] = {}
        self.evaluate = evaluate
        self._config, self._settings = config, settings
        self._model = model
        self._rows = rows
        self._objective = objective
        self._budget = MicroBatchBudget(run.settings, run.world, run.print_line)
        dtype = run.placement.dtype
        self.learner = Learner(
            stage,
            model,
            settings,
            self.order.num_steps,
            parallel=config.parallel,
            dtype=dtype,
            scaler=LossScaler() if dtype == torch.float16 else None,
            spike_sigma=config.guards.spike_sigma,
        )
        self._reference = None if moving is None else moving(self.learner)

    def job(
        self,
        save: Callable[[Path], None],
        complete: Callable[[dict[str, float]], dict[str, float]] = dict,
    ) -> StageJob:
        """The stage's work: these rows, this trainer; see `StageJob` for the arguments."""
        every = self._settings.eval_every
        return StageJob(self, self._rows, self.order, every, save, complete)

    def policy_job(self, rows: StepRows) -> StageJob:
        """The work of a stage that trains a policy and leaves it in a folder that from_pretrained
        opens."""
        save = partial(
            save_policy,
            self._model,
            rows,
            masters=self.learner.masters,
            save_dtype=self._config.save_dtype,
        )
        return self.job(save)

    def step(self, step: int, rows: Sequence[Row], loop: StepLoop) -> dict[str, float]:
        """One optimizer step; means of every sum over the whole batch."""
        objective, model = self._objective, self._model
        sequences = [sequence for row in rows for sequence in objective.sequences(row)]
        lengths = [len(sequence) for sequence in sequences]
        batch = TokenBatch.from_rows(sequences, pad_token_id=0)
        flops = batch_flops(model, batch, backward=True, ends=objective.ends)
        if objective.scoring_passes:
            flops += objective.scoring_passes * batch_flops(model, batch, ends=objective.ends)
        learning_rate = self.learner.learning_rate
        with self.phases("train", tokens=sum(lengths), samples=len(rows), flops=flops):
            loss = objective.loss
            of_step: Mapping[str, float] = {}
            if objective.per_step is not None:
                loss, of_step = objective.per_step(rows)
            term = LossTerm(
                lengths=[objective.tokens(row) for row in rows],
                units=sum(objective.units(row) for row in rows),
                loss=lambda numbers: MicroBatchLoss(*loss([rows[i] for i in numbers])),
            )
            with training_mode(model), Update(self._budget) as update:
                (means,) = update.learn(self.learner, [term])
        norms = list(update.grad_norms.values())  # none if an fp16 step overflowed
        followed = {}
        if self._reference is not None:
            followed["reference_updates"] = float(bool(norms) and self._reference.follow())
        return {
            **objective.metrics(means),
            **of_step,
            **({"grad_norm": norms[0]} if norms else {}),
            **update.scaling,
            **followed,
            "learning_rate": learning_rate,
            "tokens": float(sum(lengths)),
        }

    def rehearse(self) -> None:
        """Forward and backward of the largest possible micro-batch, to see whether it fits."""
        longest = sorted(self._rows, key=self._objective.tokens, reverse=True)
        width = self._objective.tokens(longest[0])
        # No rank gets more rows of a batch than this.
        share = -(-self._settings.batch_size // self.learner.shards.world.size)

        def loss(max_tokens: int) -> Tensor:
            return self._objective.loss(longest[: max(1, min(max_tokens // width, share))])[0]

        with training_mode(self._model):
            rehearse(self._budget, self.learner, loss)

    def state(self) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
        """The content of a checkpoint: tensors by part; no numbers."""
        tensors = training_state({"model": self.learner})
        if self._reference is not None:
            tensors["reference"] = self._reference.state_tensors()
        return tensors, {}

    def restore(self, state: SavedState) -> None:
        """Continue from a checkpoint."""
        restore_training(state, {"model": self.learner})
        if self._reference is not None:
            self._reference.load_state_tensors(state.tensors["reference"])
