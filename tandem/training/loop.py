"""What surrounds every step of a stage: stopping, saving, leaving bad steps out, remembering.

with StepLoop(run, "sft", log, evaluate, state, phases) as loop:
    for step, ... in order.from_step(start):
        loop.begin(step, rows)
        try: values = ...
        except BadStepError as bad: loop.skip(bad)
        loop.end(values)        # logs, saves where due or asked, stops where asked
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tandem.checkpoint.state import State
from tandem.errors import BadStepError, NumericsError, Stopped
from tandem.files import replace as replace_file
from tandem.metrics.log import MetricLog, MutedLog
from tandem.metrics.timing import Phases
from tandem.parallel.watch import note
from tandem.training.recorder import Recorded
from tandem.training.run import SAVE_NOW, Run, finite
from tandem.types import Experience

RECORDER_FILE = "recorder.jsonl"
BAD_STEPS = "bad-steps"
_KEPT = 8


class StepLoop:
    """One stage's steps; a context manager.

    The flight recorder keeps the last steps' rows, metrics and the seed, and writes them down when
    the stage ends by an error. A bad step leaves a file of its own in RUN/bad-steps.
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        log: MetricLog | MutedLog,
        evaluate: Callable[[], dict[str, float]],
        state: Callable[[int], State],
        phases: Phases,
    ) -> None:
        """
        Args:
            evaluate: measures the model as it is on held-out rows.
            state: makes what a checkpoint after a step holds, `state_numbers` among it.
        """
        self.run = run
        self.stage = stage
        self.skipped = 0
        self.evaluation: dict[str, float] = {}
        """What was measured last."""
        self._evaluate = evaluate
        self._log = log
        self._state = state
        self._phases = phases
        self._in_a_row = 0
        self._is_bad = False
        self._recorded: deque[Recorded] = deque(maxlen=_KEPT)

    def __enter__(self) -> Self:
        self.run.stops.deferring = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self._write_recorder(f"{type(error).__name__}: {error}")

    def measure(self) -> dict[str, float]:
        """Evaluate now."""
        with self._phases("evaluate"):
            self.evaluation = self._evaluate()
        return self.evaluation

    def measure_start(self) -> None:
        """Evaluate and log before the first step."""
        self._log.log(0, {**self.measure(), **self._phases.metrics()})

    def begin(self, step: int, rows: Sequence[Any]) -> None:
        """A step begins, on these rows."""
        note(f"{self.stage} step {step}")
        self._recorded.append(Recorded(step, rows))
        self._is_bad = False

    def made(self, experience: Experience) -> None:
        """What the step has made of its rows, to learn from."""
        self._recorded[-1].made = experience

    def skip(self, bad: BadStepError, rows: list[Any] | None = None) -> None:
        """Leave the step, or one update of it, out: count it, show it, write its rows down.

        Args:
            rows: what it was made on, if not the step's own rows.
        Raises:
            NumericsError: too many steps in a row were bad.
        """
        now = self._recorded[-1]
        if not self._is_bad:
            self._in_a_row += 1
            self._is_bad = True
        self.skipped += 1
        path = self.run.path / BAD_STEPS / f"{self.stage}-{now.step:06d}-{self.skipped}.json"
        record = {
            "stage": self.stage,
            "step": now.step,
            "seed": self.run.config.seed,
            "reason": str(bad),
            "rows": now.lines() if rows is None else rows,
        }
        if self.run.world.is_first and self.run.writes:
            path.parent.mkdir(exist_ok=True)
            replace_file(path, json.dumps(record, ensure_ascii=False, default=str).encode())
        self.run.say(f"{self.stage} step {now.step}: left out: {bad} Its rows: {path}")
        most = self.run.config.guards.max_skipped
        if self._in_a_row > most:
            raise NumericsError(
                f"{self.stage}: no more than guards.max_skipped={most} steps in a row may be left "
                f"out; got {self._in_a_row} at step {now.step}, the last one because {bad} Go back "
                "to a checkpoint with a lower learning rate, or look at the rows."
            )

    def end(self, values: Mapping[str, float]) -> None:
        """The step is over: log it, save where that is due or asked, stop where that is asked.

        Raises:
            Stopped: a signal asked for it; the step is saved.
        """
        if not self._is_bad:
            self._in_a_row = 0
        step = self._recorded[-1].step
        self._recorded[-1].values = dict(values)
        # Before the checkpoint, so that no record is missing after it; what saving costs is in the
        # next step's.
        self._log.log(step, {**values, "skipped": float(self.skipped), **self._phases.metrics()})
        self.run.step_ended(self._recorded[-1])
        number, asked = self._asked()
        every = self.run.config.save_every
        if asked or number or (every and step % every == 0):
            with self._phases("save"):
                self.run.save(self.stage, self._state(step))
        if asked:
            self.run.finish_saving(self.stage)
            (self.run.path / SAVE_NOW).unlink(missing_ok=True)
            self.run.say(f"{self.stage} step {step}: saved, as {SAVE_NOW} asked")
        if number:
            self.run.finish_saving(self.stage)
            raise Stopped(number, f"after {self.stage} step {step}, which is saved")

    def state_numbers(self) -> dict[str, Any]:
        """What a later loop continues from."""
        return {
            "evaluation": finite(self.evaluation),
            "skipped": self.skipped,
            "skipped_in_a_row": self._in_a_row,
        }

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Continue from an earlier loop's `state_numbers`."""
        self.evaluation = dict(numbers["evaluation"])
        self.skipped = int(numbers["skipped"])
        self._in_a_row = int(numbers["skipped_in_a_row"])

    def _asked(self) -> tuple[int, bool]:
        """The signal that any rank got (0 for none), and whether a file asks for a checkpoint."""
        wants = self.run.world.is_first and self.run.writes
        wants = wants and (self.run.path / SAVE_NOW).is_file()
        number, asked = self.run.world.largest([self.run.stops.requested, float(wants)])
        return int(number), bool(asked)

    def _write_recorder(self, reason: str) -> None:
        if not self.run.world.is_first or not self.run.writes or not self._recorded:
            return
        lines = [
            {
                "stage": self.stage,
                "step": recorded.step,
                "seed": self.run.config.seed,
                "values": recorded.values,
                "rows": recorded.lines(),
            }
            for recorded in self._recorded
        ]
        lines.append({"ended_by": reason})
        text = "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
        try:
            (self.run.path / RECORDER_FILE).write_text(text, encoding="utf-8")
        except OSError:
            return  # the error that ends the stage says more
        self.run.say(
            f"{self.stage}: the last steps' rows and metrics: {self.run.path}/{RECORDER_FILE}"
        )
