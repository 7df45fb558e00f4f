"""The tasks: where their rows come from, what is strict and what is lenient, how long an answer is.

Training rows have seed 1; held-out rows have seed 1,000,001, less every question that also is in
the training rows. GSM8K's rows are files, given by the variable DATA.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.data.reading.gym import rows as gym_rows
from tandem.errors import DataError
from tandem.rewards import gsm8k
from tandem.rewards.exact_number import last_number

HELDOUT_SEED = 1_000_001
_WORD = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def same_number(answer: str, reference: str) -> float:
    """1 if the last number of both is the same."""
    found = last_number(answer)
    return float(found is not None and found == last_number(reference))


def same_word(answer: str, reference: str) -> float:
    """1 if the answer's last yes or no is the reference."""
    found = _WORD.findall(answer)
    return float(bool(found) and found[-1].lower() == reference.lower())


def after_hashes(answer: str, reference: str) -> float:
    """1 if the number behind #### is the reference's (GSM8K's own rule)."""
    return gsm8k.strict([""], [answer], answer=[reference])[0] or 0.0


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym, or GSM8K.

    name: of the reasoning-gym task; empty for GSM8K. options: its own. rows: of training.
    max_new_tokens: longest answer in training and evaluation. lenient: scores (answer, reference).
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 1000
    max_new_tokens: int = 16
    lenient: Callable[[str, str], float] = same_number

    def data(self, seed: int = 1) -> str:
        """What `--data` takes."""
        if not self.name:
            file = Path(os.environ.get("DATA", "data"), "verifiable/gsm8k_train_3000.jsonl.gz")
            return f"{file}::prompt=question,completion=answer"
        options = {"size": self.rows, "seed": seed, **self.options}
        return f"reasoning-gym:{self.name}?" + "&".join(f"{k}={v}" for k, v in options.items())

    def sft_data(self) -> str:
        """The same with the answer as what is imitated."""
        return self.data() if not self.name else f"{self.data()}::completion=answer"

    @property
    def reward(self) -> str:
        """What `--reward-function` takes: exact, 0 or 1."""
        return "tandem:reasoning_gym?threshold=1" if self.name else "tandem:gsm8k"

    def training_rows(self) -> list[dict[str, Any]]:
        """The rows with `prompt` and `answer`."""
        if self.name:
            return list(gym_rows(self.data().removeprefix("reasoning-gym:")))
        return _gsm8k("gsm8k_train_3000")

    def heldout(self, count: int) -> list[dict[str, Any]]:
        """The first `count` held-out rows, each question once and none of training."""
        if not self.name:
            return _gsm8k("gsm8k_test")[:count]
        seen = {row["prompt"] for row in self.training_rows()}
        fresh = {}
        for row in gym_rows(self.data(HELDOUT_SEED).removeprefix("reasoning-gym:")):
            if row["prompt"] not in seen:
                fresh.setdefault(row["prompt"], row)
        return list(islice(fresh.values(), count))

    def strict(self, answer: str, row: Mapping[str, Any]) -> float:
        """1 if the whole answer is right as the task's own scorer sees it; no partial credit."""
        if not self.name:
            return after_hashes(answer, row["answer"])
        from tandem.rewards.gym import reward as gym_reward  # GSM8K does without reasoning-gym

        score = gym_reward([""], [answer], [row["reasoning_gym"]], threshold=1.0)[0]
        return score or 0.0


TASKS = {
    "sums": Task("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
    "products": Task(
        "products", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    ),
    "syllogism": Task("syllogism", lenient=same_word),
    "letter_counting": Task("letter_counting", {"min_words": 3, "max_words": 5}),
    "gsm8k": Task("", max_new_tokens=192, rows=3000),
}


def _gsm8k(name: str) -> list[dict[str, Any]]:
    file = Path(os.environ.get("DATA", "data"), f"verifiable/{name}.jsonl.gz")
    if not file.is_file():
        raise DataError(f"GSM8K must be in {file}; got no such file. Set DATA to its folder.")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [{"prompt": row["question"], "answer": row["answer"]} for row in rows]
