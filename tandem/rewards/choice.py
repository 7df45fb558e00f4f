"""A reward for multiple choice: the chosen letter against the reference's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_ANSWER_IS = re.compile(
    r"\b(?i:answer|choice|option)\b(?:\s+is)?\s*[:=]?\s*[*_(\[{]*"
    r"([A-Z](?![A-Za-z'])|[a-z](?=[)\]*_.]|\s*$))"
)
_BOXED = re.compile(r"\\boxed\{(?:\\text\{)?\s*\(?([A-Za-z])\)?\s*\}")
_ALONE = re.compile(r"[*_(\[{\s]*([A-Za-z])[)\]}*_.:\s]*")
_LEADING = re.compile(r"[*_(\[]*([A-Z])[)\].:*_]+(?=\s|$)")
_LAST = re.compile(r"(?<![A-Za-z'])\(?([B-Z])\)?(?![A-Za-z'])|\((A)\)|(?<![A-Za-z'])(A)(?=[.):]|$)")


def reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 where the completion chooses the reference's letter, 0.0 where not.

    The reference is a letter ("B", "(b)"), or a number that counts choices from 0. A reference that
    is neither cannot be compared with: None.
    """
    scores: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        wanted = _reference_letter(reference)
        scores.append(None if wanted is None else float(chosen_letter(completion) == wanted))
    return scores


def chosen_letter(text: str) -> str | None:
    r"""The letter that a completion chooses, upper case; None where it chooses none.

    Looked for in this order: the last \boxed{B}; the last "answer is B" (answer, choice, option);
    a completion that is the letter alone; one that begins with it ("B) Paris"); the last letter
    that stands alone (of A, which is a word too, only "(A)", "A)", "A." or at the end).
    """
    for pattern in (_BOXED, _ANSWER_IS):
        if found := pattern.findall(text):
            return str(found[-1]).upper()
    lines = [line for line in text.strip().splitlines() if line.strip()]
    for line in lines[:1]:
        if alone := _ALONE.fullmatch(line) or _LEADING.match(line.strip()):
            return alone[1].upper()
    letters = [next(filter(None, found)) for found in _LAST.findall(text)]
    letters = [letter for letter in letters if letter != "I"]
    return letters[-1].upper() if letters else None


def _reference_letter(reference: Any) -> str | None:
    if isinstance(reference, bool) or reference is None:
        return None
    if isinstance(reference, int):
        return chr(ord("A") + reference) if 0 <= reference < 26 else None
    found = _ALONE.fullmatch(str(reference)) or _LEADING.match(str(reference).strip())
    return found[1].upper() if found else None


def _letter_alone(reference: str) -> str:
    if reference.isdigit():
        return _reference_letter(int(reference)) or reference
    return reference


reward.as_completion = _letter_alone  # type: ignore[attr-defined]
