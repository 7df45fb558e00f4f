"""Rows that are too long: dropped, truncated or an error, and always counted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, NoReturn, TypeVar

from tandem.data.render import Renderer
from tandem.errors import DataError
from tandem.text import visible
from tandem.types import (
    GradedRow,
    LabelledRow,
    Message,
    PairRow,
    PromptRow,
    RankedRow,
    Source,
    TokenRow,
)

LongRowPolicy = Literal["drop", "truncate", "error"]
Outcome = Literal["kept", "truncated", "dropped"]
Row = TypeVar("Row", TokenRow, PairRow, RankedRow, LabelledRow, GradedRow, PromptRow)
Answer = TypeVar("Answer", LabelledRow, GradedRow)


@dataclass(frozen=True, slots=True)
class Fitted(Generic[Row]):
    """A row after the length policy.

    row: what to use; None if the row was dropped whole. outcome: what the ledger counts.
    reason: why, the same text for all rows of a kind; "" for a row that was kept.
    """

    row: Row | None
    outcome: Outcome
    reason: str = ""


def fit(row: TokenRow, max_tokens: int, policy: LongRowPolicy) -> Fitted[TokenRow]:
    """Limit a rendered row to `max_tokens`.

    Truncation cuts the end of the last answer, terminator included, so that the model does not
    learn to stop there. A row that would lose that whole answer is dropped.

    Raises:
        DataError: the row is too long and the policy is "error".
    """
    if len(row) <= max_tokens:
        return Fitted(row, "kept")
    if policy == "error":
        _refuse(row.source, "a sequence", len(row), max_tokens, "dataset.max_tokens")
    if policy == "drop":
        return Fitted(None, "dropped", "longer than max_tokens")
    if max_tokens <= _answer_begins(row):
        return Fitted(None, "dropped", "no room for the answer within max_tokens")
    return Fitted(_head(row, max_tokens), "truncated", "answer cut at max_tokens")


def fit_pair(pair: PairRow, max_tokens: int, policy: LongRowPolicy) -> Fitted[PairRow]:
    """Limit both sides of a pair to `max_tokens`; a pair that truncation makes equal is dropped.

    Raises:
        DataError: a side is too long and the policy is "error".
    """
    sides, outcome, reason = _fit_all((pair.chosen, pair.rejected), max_tokens, policy, "both")
    if outcome == "truncated":
        pair = replace(pair, chosen=sides[0], rejected=sides[1])
    return Fitted(pair if outcome != "dropped" else None, outcome, reason)


def fit_answer(row: Answer, max_tokens: int, policy: LongRowPolicy) -> Fitted[Answer]:
    """Hold a labelled or graded answer to `max_tokens`, as `fit` does.

    Raises:
        DataError: it is too long and the policy is "error".
    """
    fitted = fit(row.answer, max_tokens, policy)
    kept = None if fitted.row is None else replace(row, answer=fitted.row)
    return Fitted(kept, fitted.outcome, fitted.reason)


def fit_ranked(row: RankedRow, max_tokens: int, policy: LongRowPolicy) -> Fitted[RankedRow]:
    """Hold every answer of a ranking to `max_tokens`; one that does not fit drops the row, for the
    ranking without it is another, and so do two that truncation makes equal.

    Raises:
        DataError: an answer is too long and the policy is "error".
    """
    sequences, outcome, reason = _fit_all(row.sequences, max_tokens, policy, "two")
    if outcome == "truncated":
        row = replace(row, sequences=sequences)
    return Fitted(row if outcome != "dropped" else None, outcome, reason)


def _fit_all(
    answers: Sequence[TokenRow], max_tokens: int, policy: LongRowPolicy, several: str
) -> tuple[tuple[TokenRow, ...], Outcome, str]:
    """Answers that are compared, what became of them, and why. `several`: how many may be equal."""
    fitted = [fit(answer, max_tokens, policy) for answer in answers]
    kept = tuple(each.row for each in fitted if each.row is not None)
    if len(kept) < len(fitted):
        return (), "dropped", next(each.reason for each in fitted if each.row is None)
    cut = [each for each in fitted if each.outcome == "truncated"]
    if not cut:
        return kept, "kept", ""
    if len({answer.token_ids for answer in kept}) < len(kept):
        return (), "dropped", f"{several} answers equal within max_tokens"
    return kept, "truncated", cut[0].reason


def fit_graded(row: RankedRow, max_tokens: int, policy: LongRowPolicy) -> Fitted[RankedRow]:
    """Hold the answers of a ranking made of graded ones to `max_tokens`; those that do not fit are
    dropped from it, and it is dropped if no two of different grades are left.

    Raises:
        DataError: an answer is too long and the policy is "error".
    """
    fitted = [fit(answer, max_tokens, policy) for answer in row.sequences]
    places = [place for place, each in enumerate(fitted) if each.row is not None]
    if len(places) == len(fitted):
        return fit_ranked(row, max_tokens, policy)
    reason = next(each.reason for each in fitted if each.row is None)
    ranks = tuple(row.ranks[place] for place in places)
    if len(set(ranks)) < 2:
        return Fitted(None, "dropped", reason)
    left = replace(
        row,
        sequences=tuple(row.sequences[place] for place in places),
        ranks=ranks,
        grades=tuple(row.grades[place] for place in places),
    )
    whole = fit_ranked(left, max_tokens, policy)
    return Fitted(whole.row, "dropped", reason if whole.row is not None else whole.reason)


def fit_prompt(
    row: PromptRow, max_tokens: int, policy: LongRowPolicy, renderer: Renderer
) -> Fitted[PromptRow]:
    """Limit a prompt to `max_tokens`.

    Truncation removes the oldest turns, except system turns, until the rest fits and begins with a
    user turn; the last turn stays. If the last turn alone is too long, the row is dropped.

    Raises:
        DataError: the prompt is too long and the policy is "error".
    """
    if len(row) <= max_tokens:
        return Fitted(row, "kept")
    if policy == "error":
        _refuse(row.source, "a prompt", len(row), max_tokens, "dataset.max_prompt_tokens")
    if policy == "drop":
        return Fitted(None, "dropped", "longer than max_prompt_tokens")
    shorter: list[tuple[Message, ...]] = []
    messages = row.messages
    while messages := _without_oldest(messages):
        shorter.append(messages)

    def fits(turns: tuple[Message, ...]) -> bool:
        return len(renderer.prompt(turns, row.columns, row.source, row.tools)) <= max_tokens

    # Fewer turns have fewer tokens, so bisection renders only a few of the candidates.
    first = bisect_left(shorter, True, key=fits)
    if first == len(shorter):
        return Fitted(None, "dropped", "last turns alone longer than max_prompt_tokens")
    fitted = renderer.prompt(shorter[first], row.columns, row.source, row.tools)
    return Fitted(fitted, "truncated", "oldest turns removed for max_prompt_tokens")


def _answer_begins(row: TokenRow) -> int:
    """Index of the first token of the last answer."""
    begin = len(row)
    while begin > 0 and row.response_mask[begin - 1]:
        begin -= 1
    return begin


def _head(row: TokenRow, n: int) -> TokenRow:
    return TokenRow(row.token_ids[:n], row.response_mask[:n], row.source)


def _without_oldest(messages: Sequence[Message]) -> tuple[Message, ...]:
    """`messages` from the second user turn on, after the system turns; () if there is none."""
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    later = next((i for i in users if any(m.role != "system" for m in messages[:i])), None)
    if later is None:
        return ()
    system = [message for message in messages[:later] if message.role == "system"]
    return (*system, *messages[later:])


def _refuse(source: Source, what: str, found: int, limit: int, knob: str) -> NoReturn:
    raise DataError(
        f"{visible(str(source))}: {what} must have at most {limit} tokens ({knob}); got {found}. "
        f"Raise {knob}, or set dataset.on_long_row to drop or truncate."
    )
