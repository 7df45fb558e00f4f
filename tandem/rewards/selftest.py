"""Before step 1: does each reward function tell a right answer from a wrong one?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import ConfigError
from tandem.rewards.calling import RewardFunction
from tandem.rewards.scoring import Answers, FunctionScores, RewardFunctions

NUM_ROWS = 8
"""Rows that are tried; they are among the first with a reference."""
_OTHERS = 2


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """A row to test on: its last user turn, its columns (`messages` among them), its source."""

    prompt: str
    columns: Mapping[str, Any]
    source: str


def self_test(rewards: RewardFunctions, rows: Sequence[ReferenceRow]) -> list[str]:
    """Score, for a few rows, the reference answer, an empty answer and other rows' references.

    Returns:
        one line per function on what was found.
    Raises:
        ConfigError: a function does not score the reference highest on average.
    """
    column = rewards.config.answer_column
    known = [row for row in rows if _reference(row, column)]
    texts = list(dict.fromkeys(_reference(row, column) for row in known))
    if len(texts) < 2:
        line = (
            "reward functions are not tested before the first step: no two rows have different "
            f"references in the column {column} (--scoring.answer-column)"
        )
        return [line]
    tested = known[:NUM_ROWS]
    lines = []
    trials = [
        (spec.label, call)
        for spec, call in zip(rewards.specs, rewards.calls, strict=True)
        if getattr(call, "checks_answer", True)
    ]
    for label, call in trials:
        completion = _completions_by(call)
        answers, per_row = _answers(tested, texts, column, completion)
        scored = next(found for found in rewards.score(answers) if found.label == label)
        means = _means(scored, per_row)
        right, empty, other = means
        if not (right > empty and right > other):  # NaN is not above anything
            raise ConfigError(_complaint(label, column, means, len(tested), scored))
        lines.append(
            f"reward function {label} tells answers apart on {len(tested)} rows: reference "
            f"{right:.3g}, empty {_shown(empty)}, another row's reference {_shown(other)}"
        )
    return lines


def _reference(row: ReferenceRow, column: str) -> str:
    value = row.columns.get(column)
    is_text = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value).strip() if is_text else ""


def _completions_by(call: RewardFunction) -> Any:
    return getattr(call, "as_completion", str)


def _answers(
    rows: Sequence[ReferenceRow], texts: Sequence[str], column: str, completion: Any
) -> tuple[Answers, int]:
    """The answers to score, and how many there are of each row: right, empty, others."""
    names = sorted({name for row in rows for name in row.columns})
    prompts: list[str] = []
    completions: list[str] = []
    columns: dict[str, list[Any]] = {name: [] for name in names}
    sources: list[str] = []
    num_others = min(_OTHERS, len(texts) - 1)
    for row in rows:
        reference = _reference(row, column)
        at = texts.index(reference)
        others = [texts[(at + k + 1) % len(texts)] for k in range(num_others)]
        for text in [completion(reference), "", *map(completion, others)]:
            prompts.append(row.prompt)
            completions.append(text)
            sources.append(row.source)
            for name in names:
                columns[name].append(row.columns.get(name))
    return Answers(prompts, completions, columns, sources), 2 + num_others


def _means(scored: FunctionScores, per_row: int) -> tuple[float, float, float]:
    """Mean score of the references, of the empty answers and of others' references. An answer
    without a score is left out; a mean of nothing is NaN for the references, else -inf."""
    kinds: tuple[list[float], ...] = ([], [], [])
    for i, score in enumerate(scored.scores):
        if score is not None:
            kinds[min(i % per_row, 2)].append(score)
    right, empty, other = (
        sum(scores) / len(scores) if scores else (math.nan if kind == 0 else -math.inf)
        for kind, scores in enumerate(kinds)
    )
    return right, empty, other


def _complaint(
    label: str, column: str, means: tuple[float, float, float], rows: int, scored: FunctionScores
) -> str:
    right, empty, other = (_shown(mean) for mean in means)
    failures = f"; {scored.describe()}" if scored.failures else ""
    return (
        f"reward function {label} must score the reference answer (column {column}) above an empty "
        f"answer and above another row's reference; got {right}, {empty} and {other} (means over "
        f"{rows} rows){failures}. Fix the function; give it the attribute checks_answer = False if "
        "it does not judge right and wrong; or turn the test off with --no-scoring.self-test."
    )


def _shown(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "none"
