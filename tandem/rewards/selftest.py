"""Before step 1: does each reward function tell a right answer from a wrong one?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import ConfigError
from tandem.rewards.calling import RewardFunction
from tandem.rewards.columns import ANSWER, columns_of
from tandem.rewards.form import MESSAGES_ARE_GIVEN, TEXTS_ARE_GIVEN, reads_messages
from tandem.rewards.remote import RemoteReward
from tandem.rewards.scoring import Answers, FunctionScores, RewardFunctions

NUM_ROWS = 8
"""Rows that are tried; they are among the first with a reference."""
_OTHERS = 2
_ANY_ANSWER = "An answer."


Encode = Callable[[str], list[int]]
"""An answer's text as the token ids that a policy would sample for it."""


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """A row to test on: its last user turn, its turns, its columns, its source, and what makes the
    prompt's text as `Answers` has it."""

    prompt: str
    messages: list[dict[str, str]]
    columns: Mapping[str, Any]
    source: str
    text: Callable[[], str] = str


def self_test(
    rewards: RewardFunctions, rows: Sequence[ReferenceRow], encode: Encode | None = None
) -> list[str]:
    """Call each function once; then score, for a few rows, the reference answer, an empty answer
    and other rows' references.

    Args:
        encode: for functions that ask for `completion_ids`, which need it.
    Returns:
        one line per function on what was found.
    Raises:
        ConfigError: a function takes texts for lists of messages, a server gives no reward, or a
            function does not score the reference highest on average.
    """
    column = rewards.config.answer_column
    references = columns_of([row.columns for row in rows], column, [ANSWER])[ANSWER]
    known = [
        (row, text)
        for row, value in zip(rows, references, strict=True)
        if (text := _reference(value))
    ]
    texts = list(dict.fromkeys(text for _, text in known))
    trials = list(zip(rewards.specs, rewards.calls, strict=True))
    first = known[:1] or [(row, _ANY_ANSWER) for row in rows[:1]]
    lines = []
    for spec, call in trials:
        # Not what holds state between calls, or waits for people.
        is_held = getattr(call, "in_process", False) or getattr(call, "training_only", False)
        if isinstance(call, RemoteReward) or not is_held:
            lines += _tried(rewards, spec.label, call, _answers(first, [], call, encode))
    if len(texts) < 2:
        line = (
            "reward functions are not tested before the first step: no two rows have different "
            f"references in the column {column} (--scoring.answer-column)"
        )
        return [*lines, line]
    tested = known[:NUM_ROWS]
    num_others = min(_OTHERS, len(texts) - 1)
    for spec, call in trials:
        if not getattr(call, "checks_answer", True):
            continue
        answers = _answers(tested, texts, call, encode)
        (scored,) = rewards.score(answers, spec.label)
        means = _means(scored, 2 + num_others)
        right, empty, other = means
        if not (right > empty and right > other):  # NaN is not above anything
            told = reads_messages(call)
            raise ConfigError(_complaint(spec.label, column, means, len(tested), scored, told))
        lines.append(
            f"reward function {spec.label} tells answers apart on {len(tested)} rows: reference "
            f"{right:.3g}, empty {_shown(empty)}, another row's reference {_shown(other)}"
        )
    return lines


def _tried(
    rewards: RewardFunctions, label: str, call: RewardFunction, answers: Answers
) -> list[str]:
    """Call a function on its first answer, so that a failure is told before models are loaded; a
    line where it gives nothing and may have caught that it gets texts.

    Raises:
        ConfigError: it takes texts for lists of messages or the other way round, and so will fail
            on all; or a server that gives no reward.
    """
    for found in rewards.score(answers, label) if len(answers) else ():
        if found.failures and isinstance(call, RemoteReward):
            raise ConfigError(
                f"{found.describe()}. Start the server or correct the URL, and see whether "
                "scoring.deadline_seconds is enough; --no-scoring.self-test leaves this try out."
            )
        for given, form in ((TEXTS_ARE_GIVEN, "texts"), (MESSAGES_ARE_GIVEN, "lists of messages")):
            if given in found.first:
                raise ConfigError(
                    f"reward function {label} must take prompts and completions as {form}; got, on "
                    f"{found.first}"
                )
        (score,) = found.scores
        if not score and not found.failures and (told := reads_messages(call)):
            return [f"reward function {label} gives {score} for its first answer: {told}"]
    return []


def _reference(value: Any) -> str:
    """A reference answer as text; "" for what is none."""
    is_text = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value).strip() if is_text else ""


def _answers(
    rows: Sequence[tuple[ReferenceRow, str]],
    texts: Sequence[str],
    call: RewardFunction,
    encode: Encode | None,
) -> Answers:
    """The answers to score: of each row its reference and, if there are `texts` to take others'
    from, an empty one and those of others."""
    completion = getattr(call, "as_completion", str)
    num_others = max(0, min(_OTHERS, len(texts) - 1))
    tried: list[tuple[ReferenceRow, str]] = []
    for row, reference in rows:
        at = texts.index(reference) if texts else 0
        others = [texts[(at + k + 1) % len(texts)] for k in range(num_others)]
        empty = [""] if texts else []
        tried += [(row, text) for text in [completion(reference), *empty, *map(completion, others)]]
    return Answers(
        prompts=[row.prompt for row, _ in tried],
        completions=[text for _, text in tried],
        messages=[row.messages for row, _ in tried],
        rows=[row.columns for row, _ in tried],
        sources=[row.source for row, _ in tried],
        completion_ids=[encode(text) for _, text in tried] if encode else None,
        prompt_texts=[row.text() for row, _ in tried],
    )


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
    label: str,
    column: str,
    means: tuple[float, float, float],
    rows: int,
    scored: FunctionScores,
    form: str,
) -> str:
    right, empty, other = (_shown(mean) for mean in means)
    causes = "".join(f"; {cause}" for cause in (scored.describe(), form) if cause)
    return (
        f"reward function {label} must score the reference answer (column {column}) above an empty "
        f"answer and above another row's reference; got {right}, {empty} and {other} (means over "
        f"{rows} rows){causes}. Fix the function; give it the attribute checks_answer = False if "
        "it does not judge right and wrong; or turn the test off with --no-scoring.self-test."
    )


def _shown(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "none"
