"""One stage's log: metrics.jsonl, samples.jsonl, alarms.jsonl, the records of answers, and the
sinks that receive copies."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tandem.config.stages import stage_of
from tandem.files import append
from tandem.metrics.alarms import Alarm, check_alarms
from tandem.metrics.answers import ANSWER_FILES, LINE_FILES, AnswerLines, recorded_every
from tandem.metrics.console import StageConsole
from tandem.metrics.names import find_metric
from tandem.metrics.records import (
    ALARMS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    Answer,
    Record,
    cut_lines,
    json_line,
    parse_record,
    read_metrics,
)
from tandem.metrics.sinks import Sink, TensorBoard, WandB

__all__ = ["Answer", "MetricLog", "MutedLog", "Record", "read_metrics"]

Records = Sequence[Mapping[str, Any]]
"""Lines of one of the files of `metrics.answers`."""


class MutedLog:
    """The log of all ranks except the first: it writes and prints nothing."""

    def begin(self) -> None:
        """Nothing is timed."""

    def log(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """No record, no alarm."""
        return []

    def sample(self, step: int, prompt: str, answers: Mapping[str, Answer]) -> None:
        """No sample."""

    def record(self, step: int, file: str, make: Callable[[], Records]) -> None:
        """No record."""

    def histogram(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """No histogram."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class MetricLog:
    """Writes and prints a stage's metrics; a context manager.

    Example:
        with MetricLog("runs/first", "sft", num_steps=300, tensorboard=True) as log:
            log.log(1, {"loss": 2.31, "grad_norm": 0.8})

    Opening with `start_step=k` continues after step k: this stage's lines of later steps, and a
    half-written last line, are removed from the run folder. With k = 0 the stage starts over and
    all of its lines are removed, step 0 included. Lines that cannot be read are moved to another
    file, and the console says so.

    Args:
        run_dir: the run's folder; made if missing.
        stage: the stage's name.
        num_steps: the stage's last step, for the bar and the ETA; 0 if unknown.
        tensorboard: write event files to <run_dir>/tensorboard/<stage>.
        wandb: Weights & Biases project; empty is off.
        start_step: steps already done.
        console: print a line per step.
        thresholds: alarm thresholds instead of the published ones, by alarm name.
        record_bytes: how large each file of recorded answers may become; 0: nothing is recorded.
    Raises:
        ConfigError: unknown stage, or a sink that is not installed.
    """

    def __init__(
        self,
        run_dir: Path | str,
        stage: str,
        num_steps: int,
        *,
        tensorboard: bool,
        wandb: str = "",
        start_step: int = 0,
        console: bool = True,
        thresholds: Mapping[str, float] | None = None,
        record_bytes: int = 0,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._stage = stage_of(stage).name
        self._thresholds = dict(thresholds or {})
        self._run_dir.mkdir(parents=True, exist_ok=True)
        first_step = start_step + 1 if start_step else 0
        every = {
            name: recorded_every(self._run_dir / name, stage) if start_step else 1
            for name in ANSWER_FILES
        }
        damaged = [
            cut_lines(
                self._run_dir / name,
                keep=lambda line_stage, step: line_stage != stage or step < first_step,
                parse=parse_record if name == METRICS_FILE else dict,
            )
            for name in LINE_FILES
        ]
        self._answers = {
            name: AnswerLines(self._run_dir / name, stage, record_bytes, every[name])
            for name in ANSWER_FILES
        }
        self._history = [r for r in read_metrics(self._run_dir) if r.stage == stage]
        self._sinks: list[Sink] = []
        if tensorboard:
            self._sinks.append(TensorBoard(self._run_dir, stage, first_step))
        if wandb:
            self._sinks.append(WandB(self._run_dir, stage, first_step, wandb))
        self._console = StageConsole(stage, num_steps, start_step) if console else None
        last = max((record.step for record in self._history), default=0)
        for notice in filter(None, [*damaged, self._lacking(last, start_step)]):
            if self._console:
                self._console.notice(notice)

    def _lacking(self, last: int, done: int) -> str:
        """What to say of steps that are done and not in this folder; empty if all are."""
        if last >= done:
            return ""
        return (
            f"{self._run_dir / METRICS_FILE} has nothing of steps {last + 1} to {done} of "
            f"{self._stage}: another node was the first then, or the file was replaced; the run "
            "continues"
        )

    @property
    def history(self) -> Sequence[Record]:
        """This stage's records so far, including those from before a restart."""
        return self._history

    def begin(self) -> None:
        """The first step begins; the ETA counts from here, or else from the log's opening."""
        if self._console:
            self._console.begin()

    def log(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Write and print one record and the alarms that it raises.

        Args:
            step: counts from 1; 0 is before the first update.
            values: by metric name; anything that float() takes.
        Returns:
            the alarms that this record raised.
        Raises:
            ConfigError: an undeclared name; nothing is written then.
        """
        for name in values:
            find_metric(name)
        # One text for each name: all records are kept, and many names are made in every step.
        numbers = {sys.intern(name): float(value) for name, value in values.items()}
        record = Record(self._stage, step, time.time(), numbers)
        self._append(METRICS_FILE, step, {"time": record.time, "values": numbers})
        self._history.append(record)
        for sink in self._sinks:
            sink.write(step, numbers)
        if self._console:
            self._console.line(step, numbers)
        alarms = check_alarms(self._history, self._thresholds)
        for alarm in alarms:
            self.alarm(alarm)
        return alarms

    def sample(self, step: int, prompt: str, answers: Mapping[str, Answer]) -> None:
        """Write and print a prompt and its answers by label ("sft", "ppo", "sample 1")."""
        by_label: dict[str, Answer] = {
            label: {"text": answer["text"], "score": answer.get("score")}
            for label, answer in answers.items()
        }
        self._append(SAMPLES_FILE, step, {"prompt": prompt, "answers": by_label})
        for sink in self._sinks:
            sink.sample(step, prompt, by_label)
        if self._console:
            self._console.sample(step, prompt, answers)

    def record(self, step: int, file: str, make: Callable[[], Records]) -> None:
        """Write what is recorded of a step's answers, if the step is one of those recorded.

        Args:
            file: one of `metrics.answers.ANSWER_FILES`.
            make: the lines without stage and step; called only if they are written.
        """
        lines = self._answers[file]
        if lines.is_due(step) and (notice := lines.write(step, make())) and self._console:
            self._console.notice(f"{self._stage} step {step}: {notice}")

    def histogram(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Show the spread of some numbers in the sinks; those that are not finite are left out."""
        finite = {
            name: [number for number in numbers if math.isfinite(number)]
            for name, numbers in values.items()
        }
        if shown := {name: numbers for name, numbers in finite.items() if numbers}:
            for sink in self._sinks:
                sink.histogram(step, shown)

    def alarm(self, alarm: Alarm) -> None:
        """Write and print an alarm; `log` does so for the published ones."""
        self._append(ALARMS_FILE, alarm.step, asdict(alarm))
        if self._console:
            self._console.alarm(alarm.step, alarm.alarm, alarm.advice)

    def close(self, failed: bool = False) -> None:
        """Close the sinks and the bar; `failed` marks the tracker's run."""
        if self._console:
            self._console.close()
        for sink in self._sinks:
            sink.close(failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _append(self, name: str, step: int, rest: Mapping[str, Any]) -> None:
        line = json_line({"stage": self._stage, "step": step, **rest})
        append(self._run_dir / name, line.encode())
