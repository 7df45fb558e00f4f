"""What a stage prints: a progress bar, one line per step, samples, alarms.

On a terminal the lines scroll above the bar; elsewhere they are plain text and end with the ETA. In
a notebook a bar above them is updated in place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from tandem.config.stages import Family, stage_of
from tandem.metrics.names import metric_or_unknown
from tandem.metrics.notebook import NotebookBar, in_notebook
from tandem.metrics.records import Answer
from tandem.metrics.table import METRICS
from tandem.metrics.text import duration, short_number, shorten
from tandem.text import visible_lines

_SPEED: dict[Family, tuple[str, str]] = {
    "supervised": ("tokens_per_second/train", "tok/s"),
    "pairs": ("samples_per_second/train", "pairs/s"),
    "rl": ("seconds/step", "s"),
}
_SAMPLE_CHARACTERS = 600


class StageConsole:
    """The lines and the progress bar of one stage.

    Args:
        stage: its name.
        num_steps: steps of the stage, 0 if unknown (no total, no ETA).
        start_step: steps already done.
        console: where to write; standard output by default.
        label: what its lines begin with; the stage's name by default.
    """

    def __init__(
        self,
        stage: str,
        num_steps: int,
        start_step: int,
        console: Console | None = None,
        *,
        label: str = "",
    ) -> None:
        self._bar: NotebookBar | None = None
        if console is None and in_notebook():
            # Plain lines: Jupyter sets FORCE_COLOR, and rich would redraw its bar line by line.
            console = Console(
                highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=False
            )
            self._bar = NotebookBar(label or stage, num_steps, start_step)
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._stage = label or stage
        family = stage_of(stage).family
        self._heldout = _columns(family, heldout=True)
        self._possible = _columns(family, heldout=False) | dict([_speed(stage)])
        self._main: dict[str, str] = {}
        self._num_steps = num_steps
        self._start_step = start_step
        self._started = time.monotonic()
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[eta]}"),
                console=self._console,
            )
            self._task = self._progress.add_task(
                self._stage, total=num_steps or None, completed=start_step, eta=""
            )
            self._progress.start()

    def begin(self) -> None:
        """The first step begins: what came before it is not part of the ETA."""
        self._started = time.monotonic()

    def line(self, step: int, values: Mapping[str, float]) -> None:
        """One aligned line of the stage's main numbers, then held-out ones if there are any.

        A column stays once its metric has been logged; `-` is a step without a value.
        """
        self._main = {
            name: label
            for name, label in self._possible.items()
            if name in values or name in self._main
        }
        main = _cells(self._main, values, width=self._cell_width())
        heldout = _cells(self._heldout, values, width=0)
        if heldout:
            heldout = [f"{'| ' if main else ''}held-out {heldout[0]}", *heldout[1:]]
        eta = self._eta(step)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, eta=f"eta {eta}" if eta else "")
        if self._bar is not None:
            self._bar.update(step, eta)
        cells = main + heldout
        if cells and eta and self._progress is None:
            cells.append(f"| eta {eta}")
        if cells:
            self._show(self._wrapped(f"{self._at(step)}  ", cells))

    def sample(self, step: int, prompt: str, answers: Mapping[str, Answer]) -> None:
        """A prompt and its answers, control characters escaped, long texts shortened."""
        self._show(f"{self._at(step)}  prompt: {_shown(prompt)}", "bold")
        for label, answer in answers.items():
            score = answer.get("score")
            scored = "" if score is None else f" (score {short_number(score)})"
            self._show(f"    {visible_lines(label)}{scored}: {_shown(answer['text'])}")

    def alarm(self, step: int, name: str, advice: str) -> None:
        """An alarm."""
        self._show(f"{self._at(step)}  ALARM {name}: {advice}", "bold yellow")

    def notice(self, text: str) -> None:
        """A line about the run itself."""
        self._show(visible_lines(text), "yellow")

    def close(self) -> None:
        """Stop the bar."""
        if self._progress is not None:
            self._progress.stop()

    def _cell_width(self) -> int:
        """Characters for a value; fewer on a narrow terminal."""
        return 6 if self._console.is_terminal and self._console.width < 110 else 8

    def _wrapped(self, head: str, cells: Sequence[str]) -> str:
        """The cells after their head; on a terminal lines break between cells."""
        if not self._console.is_terminal:
            return (head + " ".join(cells)).rstrip()
        lines, line = [], head
        for number, cell in enumerate(cells):
            if number and len(line) + len(cell.rstrip()) > self._console.width:
                lines.append(line.rstrip())
                line = " " * len(head)
            line += f"{cell} "
        return "\n".join([*lines, line.rstrip()])

    def _show(self, text: str, style: str = "") -> None:
        # Text, not a string: rich would read [bold] in an answer as markup.
        self._console.print(Text(text, style=style))

    def _at(self, step: int) -> str:
        width = len(str(self._num_steps or 9999))
        of = f"/{self._num_steps}" if self._num_steps else ""
        return f"{self._stage:<6} {step:>{width}}{of}"

    def _eta(self, step: int) -> str:
        done = step - self._start_step
        if done < 1 or self._num_steps <= step:
            return ""
        left = (time.monotonic() - self._started) / done * (self._num_steps - step)
        # A guess has no hundredths.
        return duration(left) if left >= 10 else f"{max(1, round(left))} s"


def _speed(stage: str) -> tuple[str, str]:
    metric, unit = _SPEED[stage_of(stage).family]
    if stage_of(stage).labelled:
        return metric, "answers/s"
    # A reward model's rows may be rankings, or graded answers.
    return metric, "rows/s" if stage_of(stage).leaves == "reward model" else unit


def _columns(family: Family, heldout: bool) -> dict[str, str]:
    """Metric names and their labels for a family of stages."""
    return {
        metric.name: metric.column
        for metric in METRICS
        if family in metric.families and metric.column and metric.is_heldout == heldout
    }


def _cells(columns: Mapping[str, str], values: Mapping[str, float], width: int) -> list[str]:
    """`label value` of each column, values padded to `width`; with width 0 only columns that have a
    value. Empty if no column has one."""
    if not any(name in values for name in columns):
        return []
    return [
        f"{label} {_cell(name, values[name]) if name in values else '-':<{width}}"
        for name, label in columns.items()
        if width or name in values
    ]


def _cell(name: str, value: float) -> str:
    is_step = value.is_integer() and metric_or_unknown(name).unit == "step"
    return f"{value:.0f}" if is_step else short_number(value, 3)


def _shown(text: str) -> str:
    return shorten(visible_lines(text), _SAMPLE_CHARACTERS).replace("\n", "\n      ")
