"""What the report shows of recorded answers: frontier, distributions, prompts over training, wins.

Every function skips what the folder does not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.metrics.answer_views import (
    Histogram,
    followed_prompts,
    frontier,
    last_turn,
    model_win_rates,
    numbers,
    recorded_advantages,
    win_rate_of_steps,
)
from tandem.metrics.answers import ANSWERS_FILE, FOLLOWED_FILE
from tandem.metrics.charts import Path, histogram_chart, path_chart
from tandem.metrics.folder import (
    RunFolder,
    mapping,
    number_or_none,
)
from tandem.metrics.records import read_lines
from tandem.metrics.text import short_number, trimmed

Row = Mapping[str, Any]

_MAX_PROMPTS = 6
_SHOWN_ANSWERS = 3
_DISTRIBUTIONS = (
    ("reward", "Reward of answers", "reward"),
    ("length", "Length of answers", "tokens"),
    ("kl", "KL of answers", "nats"),
)


class AnswerRecords:
    """The recorded answers of a run.

    Attributes:
        notices: lines that could not be read.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.notices: list[str] = []
        self._folder = folder
        self._answers = self._read(ANSWERS_FILE)
        self._followed = self._read(FOLLOWED_FILE)

    def _read(self, name: str) -> list[Row]:
        return read_lines(self._folder.path / name, mapping, self.notices)

    def frontier(self) -> Row | None:
        """Reward against KL of every stage that logged both."""
        found: list[Path] = []
        for stage in self._folder.stages():
            points = frontier(self._folder.records, stage.name)
            shown = [(p.kl, p.reward, f"step {p.step}") for p in points]
            if shown:
                heldout = "held-out" if points[0].heldout else "training"
                found.append(Path(f"{stage.short}, {heldout} answers", shown, len(found) + 1))
        if not found:
            return None
        svg = path_chart("Reward against KL", "KL to the reference, nats per answer", found)
        return {"svg": svg, "legend": [(path.color, path.label) for path in found]}

    def distributions(self) -> list[Row]:
        """Histograms of the first and the last recorded step of each stage, on one axis."""
        rows: list[Row] = []
        for stage in self._folder.stages():
            lines = [line for line in self._answers if line.get("stage") == stage.name]
            if not lines:
                continue
            ends = [lines[0]] if len(lines) == 1 else [lines[0], lines[-1]]
            figures = [figure for line in ends for figure in _histograms(line, ends)]
            rewarded = any("reward" in line for line in ends)
            rows.append({"title": stage.title, "figures": figures, "rewarded": rewarded})
        return rows

    def followed(self) -> list[Row]:
        """Held-out prompts with the answers at the beginning, the middle and the end."""
        rows: list[Row] = []
        for stage in self._folder.stages():
            prompts = list(followed_prompts(self._followed, stage.name).values())[:_MAX_PROMPTS]
            for lines in prompts:
                last = len(lines) - 1
                shown = sorted({round(last * n / (_SHOWN_ANSWERS - 1)) for n in range(3)})
                rows.append(
                    {
                        "prompt": last_turn(lines[0].get("prompt")),
                        "at": stage.title,
                        "answers": [_answer(lines[number]) for number in shown],
                    }
                )
        return rows

    def win_rates(self) -> list[list[str]]:
        """(what, against what, wins, ties, losses, rate with its interval) as text."""
        found = [
            (ours, theirs, rate) for ours, theirs, rate in model_win_rates(self._folder.evaluation)
        ]
        for stage in self._folder.stages():
            answers = followed_prompts(self._followed, stage.name).values()
            steps = {line["step"] for lines in answers for line in lines}
            if len(steps) > 1:
                last, first, of = max(steps), min(steps), f"{stage.short} at step"
                rate = win_rate_of_steps(answers, last, first)
                found.append((f"{of} {last}", f"{of} {first}", rate))
        return [
            [
                ours,
                theirs,
                f"{rate.wins}",
                f"{rate.ties}",
                f"{rate.losses}",
                f"{rate.rate:.0%} ({rate.low:.0%} to {rate.high:.0%})",
            ]
            for ours, theirs, rate in found
            if rate.wins + rate.ties + rate.losses  # none without rewards
        ]


def _histograms(line: Row, ends: Sequence[Row]) -> list[Row]:
    figures: list[Row] = []
    step = line.get("step")
    for name, title, unit in _DISTRIBUTIONS:
        every = [x for end in ends for x in numbers(end.get(name)) if abs(x) < float("inf")]
        span = (min(every), max(every)) if every else None
        is_count = unit == "tokens"
        made = Histogram.of(numbers(line.get(name)), span=span, whole=is_count)
        if made is not None:
            told = f"mean {_short(made.mean)}, standard deviation {_short(made.std)}"
            figures.append(
                {
                    "title": f"{title}, step {step}",
                    "told": told,
                    "svg": histogram_chart(
                        title, unit, made.low, made.high, made.counts, whole=is_count
                    ),
                }
            )
    if (advantages := recorded_advantages(line)) is not None:
        title, count = f"Advantages, step {step}", sum(advantages[2])
        svg = histogram_chart("Advantages", "as the update reads them", *advantages)
        figures.append({"title": title, "told": f"{count} tokens", "svg": svg})
    return figures


def _answer(line: Row) -> Row:
    reward = _reward(line)  # nan: not scored
    return {
        "label": f"step {line.get('step')}",
        "text": str(line.get("text", "")),
        "score": "" if math.isnan(reward) else _short(reward),
        "best": False,
    }


def _reward(line: Row) -> float:
    value = number_or_none(line.get("reward"))
    return float("nan") if value is None else value


def _short(value: float) -> str:
    return trimmed(short_number(value, 3))
