"""One update: gradients over micro-batches and ranks, and the steps of one or several models.

A model's loss is a sum of terms, each a mean over its own units (tokens, pairs). A term's rows are
divided into micro-batches over the ranks; the sums are divided once, by the count over the whole
step, so that the gradient does not depend on that division.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.checkpoint.state import SavedState
from tandem.engine.forward import Rows, groups_of, rank_micro_batches, rows_together
from tandem.engine.joint_step import step_learners
from tandem.engine.learner import Learner
from tandem.engine.oom import MicroBatchBudget
from tandem.errors import BadStepError
from tandem.types import TokenBatch


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """What one micro-batch adds: the loss (with gradient) and other metrics as sums over its units,
    and `largest`, metrics of which the maximum over micro-batches counts. per_token: (M, T) numbers
    of its rows, for a term that keeps them."""

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    largest: Mapping[str, Tensor] = field(default_factory=dict)
    per_token: Tensor | None = None

    def detached(self) -> MicroBatchLoss:
        """The numbers without their graph."""
        sums = {name: value.detach() for name, value in self.sums.items()}
        largest = {name: value.detach() for name, value in self.largest.items()}
        return MicroBatchLoss(self.loss.detach(), sums, largest)

    def numbers(self) -> list[Tensor]:
        """The loss, the sums and the largest, in this order."""
        return [self.loss, *self.sums.values(), *self.largest.values()]


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of a model's loss in one update: coefficient * sum over rows / units.

    lengths: tokens of each row, to balance micro-batches.
    units: the count that sums are divided by, over all rows and ranks.
    loss: rows, by number, to their sums.
    batch: the rows themselves, where those of one prompt are to stay together.
    keep: (B, T) float32, filled with what the micro-batches made `per_token`, the same on every
        rank.
    """

    lengths: Sequence[int]
    units: float
    loss: Callable[[Rows], MicroBatchLoss]
    coefficient: float = 1.0
    batch: TokenBatch | None = None
    keep: Tensor | None = None


@dataclass(slots=True)
class BegunUpdate:
    """The gradient that `begin_update` left in a learner, until it is used or dropped.

    means: of each term, as `Update.learn` returns them; None once it was taken. times_used: the
    learner's, when it was made.
    """

    learner: Learner
    means: list[dict[str, float]] | None
    times_used: int

    def take(self) -> list[dict[str, float]] | None:
        """The means, once: the caller takes the step. None, and no gradient, where the learner has
        been used since."""
        if self.learner.times_used != self.times_used:
            self.drop()
        means, self.means = self.means, None
        return means

    def drop(self) -> None:
        """Forget the gradient, unless it was taken."""
        if self.means is not None:
            self.means = None
            self.learner.forget()


def begin_update(
    budget: MicroBatchBudget, learner: Learner, terms: Sequence[LossTerm]
) -> BegunUpdate:
    """Compute the gradient of the terms' sum, in place of any other, which a later `Update.learn`
    steps with.

    Raises:
        OutOfMemoryError: a micro-batch does not fit into memory.
    """

    learner.forget()
    try:
        means = budget.retry_on_oom(learner, lambda: _summed_up(learner, terms, budget.tokens))
    except BaseException:  # an interrupted half must not go into the next step
        learner.forget()
        raise
    learner.shards.reshard()
    return BegunUpdate(learner, means, learner.times_used)


class Update:
    """An update of one model, or of several that step together; a context manager.

    Example:
        with Update(budget) as update:
            (means,) = update.learn(critic, [LossTerm(...)])
        norm = update.grad_norms.get("critic")

    Without loss scaling each model steps as soon as it has learned. In fp16 all of them step at the
    end, once every loss and gradient is known to be sound, or none does.

    Attributes:
        grad_norms: norms before the clip, by the names of the models that stepped.
        scaling: loss scale and overflows so far, in fp16.
    """

    def __init__(self, budget: MicroBatchBudget) -> None:
        """`budget` says how many tokens a micro-batch holds."""
        self.grad_norms: dict[str, float] = {}
        self.scaling: dict[str, float] = {}
        self._budget = budget
        self._waiting: list[Learner] = []
        self._is_refused = False

    def learn(
        self,
        learner: Learner,
        terms: Sequence[LossTerm],
        check: Callable[[Mapping[str, float]], None] | None = None,
        *,
        begun: BegunUpdate | None = None,
    ) -> list[dict[str, float]]:
        """Compute the gradient of the terms' sum and step, now or at the end.

        Args:
            check: raises to refuse the first term's means, before anything has changed.
            begun: `begin_update` of the same terms, if the gradient is there already.
        Returns:
            each term's means per unit by name, with `loss` and `rank_idle`; the same on every
            rank.
        Raises:
            BadStepError: a mean or the gradient is not finite, or the gradient is out of line; no
                weight has changed.
            OutOfMemoryError: a micro-batch or the optimizer's step does not fit into memory.
        """
        work = partial(self._gradient, learner, terms, check, begun)
        try:
            means, ready = self._budget.retry_on_oom(learner, work)
        except BaseException:
            self._is_refused = True
            raise
        if ready is None:
            self._waiting.append(learner)
        else:
            self._budget.once([learner], lambda: learner.apply(*ready))
            self.grad_norms[learner.name] = ready[1]
        return means

    def _gradient(
        self,
        learner: Learner,
        terms: Sequence[LossTerm],
        check: Callable[[Mapping[str, float]], None] | None,
        begun: BegunUpdate | None,
    ) -> tuple[list[dict[str, float]], tuple[list[Tensor], float] | None]:
        """The terms' means, and the gradient with its norm, unless the models step together."""
        try:
            # A second try, after memory ran out, finds nothing begun.
            means = begun.take() if begun is not None else None
            if means is None:
                means = _summed_up(learner, terms, self._budget.tokens)
            for part in means:
                _require_finite(learner, part)
            if check is not None:
                check(means[0])
            if learner.scaler is not None:
                return means, None
            gradients = learner.finished_gradients()
            return means, (gradients, learner.sound_norm(gradients))
        except BaseException:  # an interrupted half must not go into the next step
            learner.forget()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        waiting, self._waiting = self._waiting, []
        if error is not None or self._is_refused:
            for learner in waiting:
                learner.forget()
            return
        if not waiting or (scaler := waiting[0].scaler) is None:
            return
        norms = self._budget.once(waiting, lambda: step_learners(waiting, scaler))
        self.scaling = {"loss_scale": scaler.scale, "overflows": float(scaler.skipped)}
        if norms is not None:
            names = (learner.name for learner in waiting)
            self.grad_norms |= dict(zip(names, norms, strict=True))


@contextmanager
def training_mode(*models: PreTrainedModel) -> Iterator[None]:
    """Within: dropout, if any, is on; afterwards all are in evaluation mode."""
    for model in models:
        model.train()
    try:
        yield
    finally:
        for model in models:
            model.eval()


def rehearse(budget: MicroBatchBudget, learner: Learner, loss: Callable[[int], Tensor]) -> None:
    """Run the largest possible micro-batch forward and backward without effect, to find out before
    the first step whether it fits into memory.

    Args:
        loss: the loss of a micro-batch of at most this many tokens.
    Raises:
        OutOfMemoryError: it does not fit.
    """

    quantized = learner.shards.quantized

    def work() -> None:
        trial = nullcontext() if quantized is None else quantized.trial()
        with budget.reserving_states(learner), trial:
            learner.backward(loss(budget.tokens), 1.0, weight=0.0)
        learner.forget()

    budget.retry_on_oom(learner, work)


def _summed_up(
    learner: Learner, terms: Sequence[LossTerm], max_tokens: int
) -> list[dict[str, float]]:
    """Add the gradient of the terms' sum; each term's means over all ranks."""
    return [_accumulated(learner, term, max_tokens, is_last=term is terms[-1]) for term in terms]


def _accumulated(
    learner: Learner, term: LossTerm, max_tokens: int, *, is_last: bool
) -> dict[str, float]:
    """Add a term's gradient; its means over all ranks."""
    world = learner.shards.world
    idle = 0.0
    added: list[tuple[float, MicroBatchLoss]] = []
    groups = []
    if term.batch is not None:
        groups = groups_of(term.batch, [cast(PreTrainedModel, learner.model)])
    if term.keep is not None:
        term.keep.zero_()
    parts = rank_micro_batches(term.lengths, max_tokens, world, groups)
    for rows, part in zip(rows_together([part.rows for part in parts]), parts, strict=True):
        found = term.loss(rows)
        loss = found.loss if term.coefficient == 1.0 else term.coefficient * found.loss
        learner.backward(loss, term.units, weight=part.weight, is_last=part.is_last and is_last)
        idle += part.idle * term.units
        if term.keep is not None and found.per_token is not None and part.weight:
            term.keep[rows.on(term.keep.device), : found.per_token.shape[1]] = found.per_token
        added.append((part.weight, found.detached()))
    if term.keep is not None:
        world.all_reduce_(term.keep)
    # Read after all are queued: a GPU that must answer in between runs out of work.
    totals: defaultdict[str, float] = defaultdict(float, rank_idle=idle)
    largest: defaultdict[str, list[float]] = defaultdict(list)
    read = iter(_read([value for _, found in added for value in found.numbers()]))
    for weight, found in added:
        for name in ("loss", *found.sums):
            totals[name] += weight * next(read)
        for name in found.largest:
            value = next(read)
            largest[name].append(value if weight else -math.inf)  # a filler's is another rank's
    means = {name: total / term.units for name, total in world.all_reduce_sum(totals).items()}
    if largest:
        own = [_largest(values) for values in largest.values()]
        means |= dict(zip(largest, world.all_reduce_max(own), strict=True))
    return means


def _largest(numbers: Sequence[float]) -> float:
    """NaN where one is, which Python's `max` may lose."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def _read(numbers: Sequence[Tensor]) -> list[float]:
    """Single numbers of a device, in one transfer for each type."""
    read = [0.0] * len(numbers)
    for kind in {number.dtype for number in numbers}:
        places = [i for i, number in enumerate(numbers) if number.dtype == kind]
        values = torch.stack([numbers[i].reshape(()) for i in places]).tolist()
        for i, value in zip(places, values, strict=True):
            read[i] = float(value)
    return read


def _require_finite(learner: Learner, means: Mapping[str, float]) -> None:
    """Every rank has the same means, so all ranks refuse an update or none does."""
    for name, value in means.items():
        if not math.isfinite(value):
            shown = "the loss" if name == "loss" else name
            raise BadStepError(
                f"{learner.name}: {shown} must be finite; got {value}. Lower the learning rate, or "
                "look at the rows and rewards."
            )


def training_state(learners: Mapping[str, Learner]) -> dict[str, Mapping[str, Tensor]]:
    """What a checkpoint holds of models in training: NAME, NAME_optimizer, and the loss scaler."""
    tensors: dict[str, Mapping[str, Tensor]] = {}
    for name, learner in learners.items():
        tensors[name] = learner.weights()
        tensors[f"{name}_optimizer"] = learner.state_tensors()
        if learner.scaler is not None:  # the same one for all of them
            tensors["scaler"] = learner.scaler.state_tensors()
    return tensors


def restore_training(state: SavedState, learners: Mapping[str, Learner]) -> None:
    """Continue from `training_state`.

    Raises:
        CheckpointError: the state is of other models.
    """
    for name, learner in learners.items():
        learner.load_weights(state.tensors[name])
        learner.load_state_tensors(state.tensors[f"{name}_optimizer"])
        if learner.scaler is not None and "scaler" in state.tensors:
            saved = state.tensors["scaler"].items()
            learner.scaler.load_state_tensors({key: value.whole() for key, value in saved})
