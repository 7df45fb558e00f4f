"""What a reward model learns: pairs, rankings of several answers, and grades of single answers.

All pairs of a ranking are in one micro-batch, count as one row together, and each answer goes
through the model once (InstructGPT, arXiv:2203.02155 section 3.5). A row's margin is taken off the
difference (Llama 2). A graded answer is a row whose loss is its squared error; where a stage has
rows of both kinds, each adds its own loss, and the sum is divided by the rows of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.engine.forward import sequence_scores
from tandem.errors import DataError
from tandem.objectives.grades import Scale, grade_loss, scale_of
from tandem.objectives.losses import pairwise_loss
from tandem.text import visible
from tandem.training.evaluate import standardized_grades
from tandem.training.rendering import Judged
from tandem.training.run_folder import Run
from tandem.training.stage_data import StepRows
from tandem.training.supervised import Loss, Objective
from tandem.types import GradedRow, PairRow, RankedRow, TokenBatch


def scales_of(rows: Sequence[Judged]) -> dict[str, Scale]:
    """The scale of each data set's grades among these rows, by its name.

    Raises:
        DataError: all grades of a data set are the same.
    """
    grades: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if isinstance(row, GradedRow):
            grades[row.answer.source.dataset].append(row.grade)
    scales = {}
    for name, found in grades.items():
        scale = scale_of(torch.tensor(found, dtype=torch.float64))
        if scale is None:
            raise DataError(
                f"data set {visible(name)} must have different grades for stage reward to learn; "
                f"got {min(found):g} to {max(found):g} for its {len(found)} answers. Remove it, or "
                "give more data."
            )
        scales[name] = scale
    return scales


def objective_of(
    run: Run, rows: StepRows, model: PreTrainedModel, scales: Mapping[str, Scale]
) -> Objective[Judged]:
    """The stage's objective on its rows."""
    settings, pad = run.config.reward, rows.reward_renderer.pad_token_id

    def loss_with(means: Means) -> Loss[Judged]:
        def loss(part: Sequence[Judged]) -> tuple[Tensor, dict[str, Tensor]]:
            batch, judged = side_by_side(part, pad, scales, settings.grade_margin)
            scores, judged = sequence_scores(model, batch.to(run.device)), judged.to(run.device)
            total, sums = scores.new_zeros(()), {}
            if means.compared:
                chosen, rejected = scores[judged.better], scores[judged.worse]
                result = pairwise_loss(
                    chosen,
                    rejected,
                    center_coef=settings.center_coef,
                    margins=judged.margins,
                    weights=judged.weights,
                )
                total = result.loss
                sums = {
                    "accuracy": result.accuracy,
                    "margin": result.margin,
                    "center_penalty": result.center_penalty,
                    "score_chosen": (judged.weights * chosen).sum(),
                    "score_rejected": (judged.weights * rejected).sum(),
                }
                sums = {name: means.compared * value for name, value in sums.items()}
            if means.graded:
                error = grade_loss(scores[judged.graded], judged.grades)
                total = total + error
                sums["grade_error"] = means.graded * error.detach()
            return total, sums

        return loss

    whole = Means.of(rows.pairs)
    are_mixed = bool(whole.compared and whole.graded)
    return Objective(
        ends=True,
        units=lambda row: 1,
        sequences=lambda row: row.sequences,
        loss=loss_with(whole),
        # What is divided by all rows of the step must come out as a mean over one kind of them.
        per_step=(lambda batch: (loss_with(Means.of(batch)), {})) if are_mixed else None,
    )


@dataclass(frozen=True, slots=True)
class Means:
    """What makes a sum over the rows of one kind, divided by the number of all, their mean: that
    number over theirs. compared: pairs and rankings; graded: single answers. 0: there are none."""

    compared: float
    graded: float

    @staticmethod
    def of(rows: Sequence[Judged]) -> Means:
        """Of these rows."""
        graded = sum(isinstance(row, GradedRow) for row in rows)
        compared = len(rows) - graded
        return Means(*(len(rows) / count if count else 0.0 for count in (compared, graded)))


@dataclass(frozen=True, slots=True)
class SideBySide:
    """What is said of the answers of a batch.

    better, worse: (P,) int64 rows of the batch, of each pair. margins: (P,) reward-model units.
    weights: (P,) 1 / pairs of the row that each comes from, so that a ranking counts as one row
    however long. graded: (G,) int64 rows of the batch; grades: (G,) theirs, standardized.
    """

    better: Tensor
    worse: Tensor
    margins: Tensor
    weights: Tensor
    graded: Tensor
    grades: Tensor

    def to(self, device: torch.device) -> SideBySide:
        """The same on `device`."""
        return SideBySide(*(getattr(self, field.name).to(device) for field in fields(self)))


def side_by_side(
    rows: Sequence[Judged],
    pad_token_id: int,
    scales: Mapping[str, Scale] | None = None,
    grade_margin: float = 0.0,
) -> tuple[TokenBatch, SideBySide]:
    """The answers of some rows as one batch, each once, and what is said of them.

    The batch has the first answers of all rows, then the second ones, and so on.

    Args:
        scales: of the grades, by data set. grade_margin: the margin of a pair of graded answers per
            unit of difference between their grades.
    """
    most = max(len(row.sequences) for row in rows)
    places = [(k, i) for k in range(most) for i, row in enumerate(rows) if k < len(row.sequences)]
    place = {where: number for number, where in enumerate(places)}
    batch = TokenBatch.from_rows([rows[i].sequences[k] for k, i in places], pad_token_id)
    pairs: list[tuple[PairRow | RankedRow, int, tuple[int, int]]] = []
    weights: list[float] = []
    for i, row in enumerate(rows):
        if isinstance(row, GradedRow):
            continue
        compared = row.pairs  # n^2 steps
        pairs += [(row, i, pair) for pair in compared]
        weights += [1 / len(compared)] * len(compared)
    graded = [(i, row) for i, row in enumerate(rows) if isinstance(row, GradedRow)]
    return batch, SideBySide(
        better=_whole([place[better, i] for _, i, (better, _) in pairs]),
        worse=_whole([place[worse, i] for _, i, (_, worse) in pairs]),
        margins=torch.tensor([_margin(row, pair, grade_margin) for row, _, pair in pairs]),
        weights=torch.tensor(weights),
        graded=_whole([place[0, i] for i, _ in graded]),
        grades=standardized_grades([row for _, row in graded], scales or {}),
    )


def _margin(row: PairRow | RankedRow, pair: tuple[int, int], grade_margin: float) -> float:
    if isinstance(row, RankedRow) and row.grades and grade_margin:
        better, worse = pair
        return grade_margin * (row.grades[better] - row.grades[worse])
    return row.margin


def _whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
