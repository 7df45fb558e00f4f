"""The loop that SFT, the reward model and DPO share: rows in order, micro-batches, one step each.

A stage brings its rows and an Objective: how many units (tokens or pairs) a row counts for, and
the loss of some rows as a sum. Everything else, the denominator included, is here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.checkpoint.state import SavedState, State
from tandem.config.schema import RunConfig, SupervisedConfig
from tandem.data.loader import BatchOrder
from tandem.engine.devices import resolve_dtype
from tandem.engine.forward import deal
from tandem.engine.optimizer import Trainee, scaling_metrics, step_together
from tandem.engine.room import Room
from tandem.errors import BadStepError, DataError
from tandem.metrics.timing import Phases
from tandem.models.summary import sequence_flops
from tandem.parallel.scaling import LossScaler
from tandem.training.loop import StepLoop
from tandem.training.run import Run
from tandem.types import TokenRow

Row = TypeVar("Row", bound=Sized)


@dataclass(frozen=True, slots=True)
class Objective(Generic[Row]):
    """What a stage learns from its rows.

    units: what a row adds to the denominator of the loss (tokens or pairs).
    sequences: what it puts through the model, for throughput.
    loss: rows of one micro-batch to (the loss as a sum, other sums by metric name).
    sequences_per_row: 2 for pairs, so that a micro-batch holds half as many.
    scoring_passes: forwards beside the trained one (DPO's reference), for TFLOP/s.
    """

    units: Callable[[Row], int]
    sequences: Callable[[Row], Sequence[TokenRow]]
    loss: Callable[[Sequence[Row]], tuple[Tensor, Mapping[str, Tensor]]]
    sequences_per_row: int = 1
    scoring_passes: int = 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained model's last evaluation, and the float32 values of weights that rest in less."""

    evaluation: dict[str, float]
    masters: Mapping[nn.Parameter, Tensor]


def fit(
    run: Run,
    stage: str,
    model: PreTrainedModel,
    settings: SupervisedConfig,
    rows: Sequence[Row],
    objective: Objective[Row],
    evaluate: Callable[[], dict[str, float]],
) -> Fitted:
    """Train `model` on `rows`; log, measure and checkpoint on the way; continue if there is one.

    Args:
        objective: what is learned from a row.
        evaluate: held-out metrics of the model as it is.
    Returns:
        the last evaluation, and the weights to save.
    Raises:
        DataError: there is nothing to train on.
        NumericsError: too many steps in a row brought a loss or gradient that is not sound.
        Stopped: a signal asked for it.
    """
    if not rows:
        raise DataError(
            f"step {stage} must have at least one row to train on; got none. "
            "Look at the drops above, at --dataset.split and at the lengths."
        )
    config = run.config
    order = BatchOrder(
        num_rows=len(rows),
        batch_size=settings.batch_size,
        seed=config.seed,
        epochs=settings.epochs,
        max_steps=settings.max_steps,
    )
    trainee = _trainee(stage, model, settings, order.num_steps, run)
    state = run.load(stage)
    start = 0 if state is None else state.step
    phases, room = Phases(), Room(config, run.world, run.say)
    with run.metric_log(stage, order.num_steps, start) as log:
        loop = StepLoop(run, stage, log, evaluate, lambda step: _state(step, trainee, loop), phases)
        if state is not None:
            _restore(state, trainee, loop)
        else:
            loop.measure_start()
        with loop:
            if start < order.num_steps:
                rehearse = partial(
                    _rehearse, trainee, rows, settings.batch_size, objective, config, room
                )
                room.attempt(stage, model, rehearse, trainee.forget)
            for step, indices in order.from_step(start):
                with phases("step"):
                    batch = [rows[i] for i in indices]
                    loop.begin(step, batch)
                    # Only dropout draws from it, other numbers on every rank.
                    torch.manual_seed(config.seed + step + (run.world.rank << 40))
                    values = {"epoch": order.epochs_done(step)}
                    work = partial(_train_step, trainee, batch, objective, config, room, phases)
                    try:
                        values |= room.attempt(stage, model, work, trainee.forget)
                    except BadStepError as bad:
                        loop.skip(bad)
                    if stage == "sft" and "loss" in values:
                        values["perplexity"] = math.exp(min(values["loss"], 700.0))
                    if _is_due(step, settings.eval_every, order.num_steps):
                        values |= loop.measure()
                loop.end(values)
    return Fitted(loop.evaluation or evaluate(), trainee.masters)


def _trainee(
    stage: str, model: PreTrainedModel, settings: SupervisedConfig, num_steps: int, run: Run
) -> Trainee:
    dtype = resolve_dtype(run.config.dtype, run.device)
    return Trainee(
        stage,
        model,
        settings,
        num_steps,
        offload=run.config.parallel.offload,
        dtype=dtype,
        scaler=LossScaler() if dtype == torch.float16 else None,
        spike_sigma=run.config.guards.spike_sigma,
    )


def _train_step(
    trainee: Trainee,
    batch: Sequence[Row],
    objective: Objective[Row],
    config: RunConfig,
    room: Room,
    phases: Phases,
) -> dict[str, float]:
    """One optimizer step, micro-batch by micro-batch; means of every sum over the whole batch."""
    model = cast(PreTrainedModel, trainee.model)
    denominator = sum(objective.units(row) for row in batch)
    sequences = [sequence for row in batch for sequence in objective.sequences(row)]
    lengths = [len(sequence) for sequence in sequences]
    num_tokens = sum(lengths)
    num_logits = sum(sum(sequence.response_mask) for sequence in sequences)
    flops = sequence_flops(model, lengths, num_logits, backward=True)
    flops += objective.scoring_passes * sequence_flops(model, lengths, num_logits)
    widths = [objective.sequences_per_row * len(row) for row in batch]
    totals: defaultdict[str, float] = defaultdict(float)
    model.train()
    with phases("train", tokens=num_tokens, samples=len(batch), flops=flops):
        world = trainee.shards.world
        for part in deal(widths, room.tokens, world):
            loss_sum, sums = objective.loss([batch[i] for i in part.rows])
            trainee.backward(loss_sum, denominator, weight=part.weight, is_last=part.is_last)
            totals["rank_idle"] += part.idle * denominator
            for name, value in (("loss", loss_sum), *sums.items()):
                totals[name] += part.weight * float(value.detach())
        model.eval()
        summed = world.sums(totals)
        _require_finite_loss(trainee, summed["loss"])
        learning_rate = trainee.learning_rate
        stepped = _step(trainee)
    means = {name: total / denominator for name, total in summed.items()}
    return {
        **means,
        **stepped,
        "learning_rate": learning_rate,
        "tokens": float(num_tokens),
    }


def _rehearse(
    trainee: Trainee,
    rows: Sequence[Row],
    batch_size: int,
    objective: Objective[Row],
    config: RunConfig,
    room: Room,
) -> None:
    """The largest micro-batch that can come, forward and backward, for nothing: what does not fit
    is known before the first step."""
    longest = sorted(rows, key=len, reverse=True)
    width = objective.sequences_per_row * len(longest[0])
    world = trainee.shards.world
    share = -(-batch_size // world.size)  # no rank is dealt more of a batch than this
    model = cast(PreTrainedModel, trainee.model)
    model.train()
    with room.kept_for(trainee):
        loss, _ = objective.loss(longest[: max(1, min(room.tokens // width, share))])
        trainee.backward(loss, 1.0, weight=0.0)
    trainee.forget()
    model.eval()


def _step(trainee: Trainee) -> dict[str, float]:
    """Take the step and say how: in fp16 it may have been skipped."""
    if trainee.scaler is None:
        return {"grad_norm": trainee.step()}
    norms = step_together([trainee], trainee.scaler)
    taken = {} if norms is None else {"grad_norm": norms[0]}
    return taken | scaling_metrics(trainee.scaler)


def _require_finite_loss(trainee: Trainee, loss: float) -> None:
    """Every rank has the same sum, so that all of them stop or none."""
    if not math.isfinite(loss):
        trainee.forget()
        raise BadStepError(
            f"{trainee.name}: the loss must be finite; got {loss}. Lower the learning rate, or "
            "look at the rows."
        )


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _state(step: int, trainee: Trainee, loop: StepLoop) -> State:
    tensors = {"model": trainee.weights(), "optimizer": trainee.state_tensors()}
    if trainee.scaler is not None:
        tensors["scaler"] = trainee.scaler.state_tensors()
    return State(step, tensors, loop.state_numbers())


def _restore(state: SavedState, trainee: Trainee, loop: StepLoop) -> None:
    loop.restore(state.numbers)
    trainee.load_weights(state.tensors["model"])
    trainee.load_state_tensors(state.tensors["optimizer"])
    if trainee.scaler is not None and "scaler" in state.tensors:
        trainee.scaler.load_state_tensors(state.tensors["scaler"].whole())
