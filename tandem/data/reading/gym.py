"""Rows of a reasoning-gym task: `--data 'reasoning-gym:syllogism?size=2000&seed=1'`.

Every row has the question as `prompt`, the task's own `answer` (where it has one), and the column
`reasoning_gym`, from which the reward `tandem:reasoning_gym` makes the entry again. No torch here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

from tandem.errors import DataError
from tandem.text import cause_of

PREFIX = "reasoning-gym:"
ROW = re.compile(r"(?P<task>\w+)(?:\?(?P<query>[^#]*))?#(?P<entry>\d+)")
"""The column `reasoning_gym`: TASK?options#entry."""


def make_dataset(task: str, query: str) -> Any:
    """The task's data set; `query` holds its options, `size` and `seed` among them.

    Raises:
        DataError: reasoning-gym is not installed, or has no such task or option.
    """
    where = f"data set {PREFIX}{task}"
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(
            f"{where} must find the package reasoning-gym; got {cause_of(error)}. Run pip install "
            "reasoning-gym"
        ) from None
    if task not in DATASETS:
        raise DataError(
            f"{where} must be a task of reasoning-gym; got {task!r}. Its tasks: "
            f"{', '.join(sorted(DATASETS))}."
        )
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        options = {"size": 1000, "seed": 0} | {name: _value(text) for name, text in pairs}
        return reasoning_gym.create_dataset(task, **options)
    except Exception as error:  # its options are checked by assertions and constructors
        raise DataError(
            f"{where} must have options that the task takes; got {query!r} "
            f"({cause_of(error)}). Write e.g. ?size=2000&seed=1."
        ) from None


def rows(spec: str) -> Iterator[dict[str, Any]]:
    """The rows of `TASK?option=value&...`, in order."""
    task, _, query = spec.partition("?")
    dataset = make_dataset(task, query)
    for number in range(len(dataset)):
        entry = dataset[number]
        row = {"prompt": entry["question"], "reasoning_gym": f"{task}?{query}#{number}"}
        if entry["answer"] is not None:
            row["answer"] = str(entry["answer"])
        yield row


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
