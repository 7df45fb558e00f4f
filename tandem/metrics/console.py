"""What a stage shows while it runs: a bar with its ETA, a line a step, samples, alarms.

On a terminal the lines scroll above a progress bar; elsewhere they are plain and end in the ETA.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tandem.metrics.records import Answer
from tandem.metrics.text import duration, short_number, shorten, visible

_COLUMNS: dict[str, dict[str, str]] = {
    "sft": {
        "loss": "loss",
        "grad_norm": "grad",
        "learning_rate": "lr",
        "epoch": "epoch",
        "tokens_per_second/train": "tok/s",
    },
    "reward": {
        "loss": "loss",
        "accuracy": "acc",
        "margin": "margin",
        "grad_norm": "grad",
        "learning_rate": "lr",
        "epoch": "epoch",
        "samples_per_second/train": "pairs/s",
    },
    "dpo": {
        "loss": "loss",
        "accuracy": "acc",
        "implicit_reward_margin": "margin",
        "implicit_reward_chosen": "chosen",
        "grad_norm": "grad",
        "learning_rate": "lr",
        "samples_per_second/train": "pairs/s",
    },
    "ppo": {
        "reward": "reward",
        "kl": "kl",
        "entropy": "entropy",
        "clip_fraction": "clip",
        "explained_variance": "ev",
        "response_tokens": "tok",
        "eos_rate": "eos",
        "seconds/step": "s",
    },
}
_HELDOUT: dict[str, dict[str, str]] = {
    "sft": {"heldout_loss": "loss", "heldout_perplexity": "ppl"},
    "reward": {
        "heldout_loss": "loss",
        "heldout_accuracy": "acc",
        "heldout_calibration_error": "calibration",
    },
    "dpo": {"heldout_loss": "loss", "heldout_accuracy": "acc", "heldout_margin": "margin"},
    "ppo": {
        "heldout_reward": "reward",
        "heldout_reward_ema": "ema",
        "heldout_eos_rate": "eos",
        "heldout_kl": "kl",
        "heldout_ptx_perplexity": "ptx ppl",
    },
}
_SAMPLE_CHARACTERS = 600


class StageConsole:
    """The lines and the bar of one stage.

    Args:
        stage: one of STAGES.
        num_steps: steps of the stage, 0 where that is not known (no total, no ETA).
        start_step: steps already done.
        console: where to write; standard output by default.
    """

    def __init__(
        self, stage: str, num_steps: int, start_step: int, console: Console | None = None
    ) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._stage = stage
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
                TextColumn("eta"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task(
                stage, total=num_steps or None, completed=start_step
            )
            self._progress.start()

    def line(self, step: int, values: Mapping[str, float]) -> None:
        """One aligned line of the stage's main numbers; held-out ones follow where there are."""
        main = _columns(_COLUMNS[self._stage], values, align=True)
        heldout = _columns(_HELDOUT[self._stage], values, align=False)
        parts = [main] if main else []
        parts += [f"held-out {heldout}"] if heldout else []
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        elif eta := self._eta(step):
            parts.append(f"eta {eta}")
        if main or heldout:
            self._show(f"{self._at(step)}  " + "  | ".join(parts))

    def sample(self, step: int, prompt: str, answers: Mapping[str, Answer]) -> None:
        """A prompt and its answers, control characters spelled out, long ones shortened."""
        self._show(f"{self._at(step)}  prompt: {_shown(prompt)}", "bold")
        for label, answer in answers.items():
            score = answer.get("score")
            scored = "" if score is None else f" (score {short_number(score)})"
            self._show(f"    {visible(label)}{scored}: {_shown(answer['text'])}")

    def alarm(self, step: int, name: str, advice: str) -> None:
        """An alarm, in the same place as the numbers it is about."""
        self._show(f"{self._at(step)}  ALARM {name}: {advice}", "bold yellow")

    def notice(self, text: str) -> None:
        """A line about the run itself."""
        self._show(visible(text), "yellow")

    def close(self) -> None:
        """Leave the bar where it stands."""
        if self._progress is not None:
            self._progress.stop()

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
        return duration((time.monotonic() - self._started) / done * (self._num_steps - step))


def _columns(columns: Mapping[str, str], values: Mapping[str, float], align: bool) -> str:
    present = [name for name in columns if name in values]
    if not present:
        return ""
    shown = columns if align else present
    width = 8 if align else 0
    cells = (short_number(values[name], 3) if name in values else "-" for name in shown)
    return " ".join(
        f"{columns[name]} {cell:<{width}}" for name, cell in zip(shown, cells, strict=True)
    )


def _shown(text: str) -> str:
    return shorten(visible(text), _SAMPLE_CHARACTERS).replace("\n", "\n      ")
