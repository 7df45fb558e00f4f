"""What the report and the page show of recorded answers: distributions, win rates, the frontier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.metrics.folder import list_or_empty, mapping_or_empty, number_or_none
from tandem.metrics.records import Record

_Z = 1.959964
"""Standard normal deviate of a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class WinRate:
    """How often one side scored higher on the same prompts; a tie counts half of a win.

    rate, low, high: shares; the interval is Wilson's score interval at 95 %, with ties as half a
    win each. With no prompt: 0.5, 0, 1.
    """

    wins: int
    ties: int
    losses: int
    rate: float
    low: float
    high: float

    @property
    def prompts(self) -> int:
        """How many were compared."""
        return self.wins + self.ties + self.losses

    @staticmethod
    def of(pairs: Iterable[tuple[float, float]]) -> WinRate:
        """From (score, score of the other) of each prompt; pairs that are not finite are left
        out."""
        scores = [pair for pair in pairs if all(map(math.isfinite, pair))]
        wins = sum(ours > theirs for ours, theirs in scores)
        ties = sum(ours == theirs for ours, theirs in scores)
        low, high = wilson(wins + ties / 2, len(scores))
        rate = (wins + ties / 2) / len(scores) if scores else 0.5
        return WinRate(wins, ties, len(scores) - wins - ties, rate, low, high)


def wilson(wins: float, total: int) -> tuple[float, float]:
    """Wilson's score interval of a share at 95 %; (0, 1) without observations.

    Source: E. B. Wilson, JASA 22 (1927) 209-212.
    """
    if total == 0:
        return 0.0, 1.0
    share, square = wins / total, _Z * _Z
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    half /= 1 + square / total
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` values from `low + i * width`; the last bin holds its upper edge too."""

    low: float
    high: float
    counts: tuple[int, ...]
    mean: float
    std: float

    @staticmethod
    def of(
        values: Sequence[float],
        bins: int = 24,
        span: tuple[float, float] | None = None,
        *,
        whole: bool = False,
    ) -> Histogram | None:
        """Of the finite values; None if there are none, or they are too far apart to count.

        Args:
            bins: at most, where `whole`.
            span: low and high instead of the values' own, to compare several.
            whole: every bin holds as many whole numbers as the others, which are in its middle.
        """
        found = [value for value in values if math.isfinite(value)]
        low, high = span or (min(found, default=0.0), max(found, default=0.0))
        if not found or not math.isfinite(high - low):
            return None
        if whole:
            numbers_per_bin = math.ceil((high - low + 1) / bins)
            bins = math.ceil((high - low + 1) / numbers_per_bin)
            low, high = low - 0.5, low - 0.5 + bins * numbers_per_bin
        if high <= low:
            low, high = low - 0.5, high + 0.5
        counts = [0] * bins
        for value in found:
            place = int((value - low) / (high - low) * bins)
            counts[min(bins - 1, max(0, place))] += 1
        mean = sum(found) / len(found)
        std = math.sqrt(sum((value - mean) ** 2 for value in found) / len(found))
        return Histogram(low, high, tuple(counts), mean, std)


def numbers(values: Any) -> list[float]:
    """The numbers of a JSON list; what is not a number is NaN."""
    found = map(number_or_none, list_or_empty(values))
    return [math.nan if number is None else number for number in found]


def recorded_advantages(line: Mapping[str, Any]) -> tuple[float, float, list[int]] | None:
    """Low, high and counts of the advantages of an answers.jsonl line; None if it has none."""
    found = mapping_or_empty(line.get("advantage"))
    low, high = numbers([found.get("low"), found.get("high")])
    counts = [int(n) for n in numbers(found.get("counts")) if 0 <= n < 1e12]
    return (low, high, counts) if 0 < high - low < math.inf and any(counts) else None


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A step's held-out (or, where that was not measured, training) KL and reward; of
    `checkpoint`s a folder exists."""

    step: int
    kl: float
    reward: float
    heldout: bool
    checkpoint: bool = False


def frontier(
    records: Iterable[Record], stage: str, checkpoints: Iterable[int] = ()
) -> list[FrontierPoint]:
    """Reward against KL over a stage: held-out figures if there are any, else those of training.

    Both are without the missing-EOS penalty and without clips, so their rewards share a scale.
    """
    saved = set(checkpoints)
    found: dict[bool, list[FrontierPoint]] = {True: [], False: []}
    names = {True: ("heldout_kl", "heldout_reward"), False: ("kl", "reward_before_penalty")}
    for record in records:
        for heldout, (kl, reward) in names.items():
            if record.stage != stage or kl not in record.values or reward not in record.values:
                continue
            point = (record.values[kl], record.values[reward])
            if all(map(math.isfinite, point)):
                is_saved = record.step in saved
                found[heldout].append(FrontierPoint(record.step, *point, heldout, is_saved))
    return found[True] or found[False]


def followed_prompts(lines: Iterable[Mapping[str, Any]], stage: str) -> dict[str, list[Any]]:
    """The lines of followed.jsonl of a stage by prompt, in the order of steps."""
    found: dict[str, list[Any]] = {}
    for line in lines:
        if line.get("stage") == stage and "prompt_id" in line and type(line.get("step")) is int:
            found.setdefault(str(line["prompt_id"]), []).append(line)
    for answers in found.values():
        answers.sort(key=lambda line: line["step"])
    return found


def reward_at(answers: Iterable[Mapping[str, Any]], step: int) -> float:
    """The mean reward of a prompt's answers at a step: held-out rows may share a prompt. NaN where
    none was scored."""
    rewards = numbers([line.get("reward") for line in answers if line["step"] == step])
    scored = [reward for reward in rewards if math.isfinite(reward)]
    return sum(sorted(scored)) / len(scored) if scored else math.nan  # in whatever order they came


def win_rate_of_steps(
    prompts: Iterable[Iterable[Mapping[str, Any]]], step: int, against: int
) -> WinRate:
    """Of a step's answers against another step's to the same prompts (`followed_prompts`)."""
    return WinRate.of((reward_at(lines, step), reward_at(lines, against)) for lines in prompts)


def last_turn(prompt: Any) -> str:
    """The text of a recorded prompt's last turn."""
    turns = list_or_empty(prompt)
    return str(mapping_or_empty(turns[-1]).get("content", "")) if turns else ""


def model_win_rates(evaluation: Mapping[str, Any]) -> list[tuple[str, str, WinRate]]:
    """(policy, an earlier policy, its win rate) of evaluation.json's scores, every two policies
    that share a scored prompt."""
    scores = {
        str(label): numbers(values)
        for label, values in mapping_or_empty(evaluation.get("scores")).items()
    }
    labels = list(scores)
    rates = [
        (ours, theirs, WinRate.of(zip(scores[ours], scores[theirs], strict=False)))
        for number, ours in enumerate(labels)
        for theirs in labels[:number]
    ]
    return [(ours, theirs, rate) for ours, theirs, rate in rates if rate.prompts]
