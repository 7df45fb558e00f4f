"""GSM8K's two rewards: the number behind `####` (strict), and the last number (lenient).

Most published gains of small models are gains in format, so each is logged beside the other. The
reference may be GSM8K's whole solution or a bare number; numbers are read as in `exact_number`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tandem.rewards.exact_number import last_number

_MARK = "####"
_NUMBER = re.compile(r"\s*[^\w\s]{0,4} ?\d\S*")


def strict(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the first number behind the last `####` of the completion is the reference's."""
    return _scored(completions, answer, marked_number)


def lenient(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the completion's last number is the reference's."""
    return _scored(completions, answer, last_number)


def marked_number(text: str) -> float | None:
    """The number right behind the last `####`, maybe with a sign, a currency or stars before it;
    None where there is none."""
    _, mark, tail = text.rpartition(_MARK)
    found = _NUMBER.match(tail) if mark else None
    return last_number(found[0]) if found else None


def with_mark(reference: str) -> str:
    """A completion that gives the reference as strict GSM8K wants it."""
    return reference if _MARK in reference else f"{_MARK} {reference}"


strict.as_completion = with_mark  # type: ignore[attr-defined]


def _scored(
    completions: Sequence[str], answer: Sequence[Any], read: Callable[[str], float | None]
) -> list[float | None]:
    scores: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        wanted, found = _reference_number(reference), read(completion)
        if wanted is None:
            scores.append(None)  # nothing to compare with
        else:
            close = found is not None and abs(found - wanted) <= 1e-6 * max(1.0, abs(wanted))
            scores.append(float(close))
    return scores


def _reference_number(reference: Any) -> float | None:
    if reference is None:
        return None
    text = str(reference)
    return marked_number(text) if _MARK in text else last_number(text)
