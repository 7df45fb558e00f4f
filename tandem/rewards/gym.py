"""A reward by reasoning-gym: a task's own scorer, on rows of `--data reasoning-gym:TASK`.

Such a row's column `reasoning_gym` says which task, with what options, and which entry; the entry
is made again from it, so that nothing but text is stored with the rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym as package  # here, so that it is imported before the first deadline runs

from tandem.data.reading.gym import ROW, make_dataset

assert package.create_dataset
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    reasoning_gym: Sequence[Any],
    *,
    threshold: float = 0.0,
    **columns: Any,
) -> list[float | None]:
    """The task's score of the completion, or of what stands in its last <answer> tags; 0 to 1.

    Args:
        threshold: scores below it are 0. Some tasks give a few hundredths for any answer.
    """
    scores: list[float | None] = []
    for completion, row in zip(completions, reasoning_gym, strict=True):
        if row is None:
            scores.append(None)
            continue
        found = ROW.fullmatch(row)
        if found is None:
            raise ValueError(
                f"the column reasoning_gym must be TASK?options#entry; got {row!r:.60}"
            )
        dataset = _dataset(found["task"], found["query"] or "")
        tags = _TAGS.findall(completion)
        text = (tags[-1] if tags else completion).strip()
        score = float(dataset.score_answer(text, entry=dataset[int(found["entry"])]))
        scores.append(score if score >= threshold else 0.0)
    return scores


@lru_cache
def _dataset(task: str, query: str) -> Any:
    return make_dataset(task, query)
