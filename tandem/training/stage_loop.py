"""The one loop of every stage: steps in order, saving, stopping, bad steps, metrics.

A stage brings a `StageTrainer`, which knows what one step is, and a `StageJob`: the rows, their
order, and what to do with the trained model. `run_stage` does the rest.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from tandem.checkpoint.state import SavedState, State
from tandem.config.stages import stage_of
from tandem.data.loader import BatchOrder
from tandem.errors import BadStepError, CheckpointError, ConfigError, NumericsError, Stopped
from tandem.files import replace as replace_file
from tandem.garbage import no_collection_of_old_objects
from tandem.metrics.answers import FOLLOWED_FILE
from tandem.metrics.log import Answer, MetricLog, MutedLog, Records
from tandem.metrics.timing import Phases
from tandem.parallel.watchdog import note
from tandem.training.callbacks import CallbackStop, RunState
from tandem.training.flight_recorder import RECORDER_FILE, Recorded, write_recorded
from tandem.training.own_folder import SAVE_NOW
from tandem.training.run_folder import Run
from tandem.training.selection import Selection, best_state
from tandem.training.step_metrics import finite, spreads
from tandem.types import Experience

BAD_STEPS = "bad-steps"
_KEPT = 8


class StageTrainer(Protocol):
    """What a stage does in a step, and all of its state.

    Attributes:
        phases: times what is done.
        thresholds: of alarms, where the stage has its own (see MetricLog).

    A trainer may also have a method `followed`: the lines of followed.jsonl about the held-out
    prompts that its last evaluation answered.
    """

    phases: Phases
    thresholds: Mapping[str, float]

    def step(self, step: int, rows: Sequence[Any], loop: StepLoop) -> dict[str, float]:
        """Do step number `step` on these rows; returns its metrics.

        Args:
            loop: hears of answers that were made (`made`), of updates that were left out (`skip`)
                and of samples to show (`sample`) while the step is running.
        Raises:
            BadStepError: the step is to be left out; nothing has changed.
        """

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics of the model as it is."""

    def rehearse(self) -> None:
        """Run the largest micro-batch that can come, without effect.

        Raises:
            OutOfMemoryError: it does not fit into memory.
        """

    def state(self) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
        """What a checkpoint holds: tensors by part, and numbers."""

    def restore(self, state: SavedState) -> None:
        """Continue from a checkpoint."""


@dataclass(frozen=True, slots=True)
class StageJob:
    """A stage, ready to run.

    rows, order: what its steps read.
    eval_every: steps between evaluations, the last of which follows the last step; 0: only then.
    save: writes the trained model into a folder.
    complete: what is still to do with the trained model; the last evaluation to its facts.
    """

    trainer: StageTrainer
    rows: Sequence[Any]
    order: BatchOrder
    eval_every: int
    save: Callable[[Path], None]
    complete: Callable[[dict[str, float]], dict[str, float]] = dict


def run_stage(run: Run, stage: str, job: StageJob, *, until: int | None = None) -> Recorded | None:
    """Train a stage from its newest checkpoint, or from its beginning, and save its model.

    Args:
        until: stop after this step and leave everything as it was; returns the step as recorded.
    Raises:
        ConfigError: the stage has no step `until`.
        CheckpointError: the checkpoint of the best evaluation is missing or damaged.
        NumericsError: too many steps in a row brought a loss or gradient that is not sound.
        Stopped: a signal asked for it.
    """
    trainer, order = job.trainer, job.order
    if until is not None and until > order.num_steps:
        raise ConfigError(f"--step must be at most {order.num_steps}, {stage}'s last; got {until}.")
    state = run.load(stage, before=until)
    start = 0 if state is None else state.step
    with run.metric_log(stage, order.num_steps, start, trainer.thresholds) as log:
        loop = StepLoop(run, stage, log, trainer, order.num_steps)
        if state is None:
            loop.measure_start()
        else:
            loop.restore(state)
        done = start
        with loop, no_collection_of_old_objects():
            if start < order.num_steps and not loop.selection.ends:
                trainer.rehearse()
            for step, indices in order.from_step(start):
                if loop.selection.ends:
                    run.print_line(loop.selection.end(order.num_steps))
                    break
                is_last = step == order.num_steps
                is_due = is_last or (job.eval_every > 0 and step % job.eval_every == 0)
                more = {} if order.epochs is None else {"epoch": order.epochs_done(step)}
                recorded = loop.run_step(step, [job.rows[i] for i in indices], more, is_due=is_due)
                if step == until:
                    return recorded
                done = step
    if until is not None:
        raise ConfigError(f"--step must be at most {done}, where {stage} ended; got {until}.")
    loop.take_best()
    facts = job.complete(loop.evaluation or trainer.evaluate())
    loop.finish(job.save, {**facts, "steps": float(done)})
    return None


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
        trainer: StageTrainer,
        num_steps: int = 0,
    ) -> None:
        """`num_steps`: the stage's, for callbacks."""
        self.run = run
        self.stage = stage
        self.skipped = 0
        self.evaluation: dict[str, float] = {}
        """What was measured last."""
        self._trainer = trainer
        self._log = log
        self._phases = trainer.phases
        self._in_a_row = 0
        self._is_bad = False
        self._recorded: deque[Recorded] = deque(maxlen=_KEPT)
        self._heard = RunState(run, stage, num_steps, trainer)
        record = stage_of(stage)
        self.selection = Selection(record, getattr(run.config, record.section))

    def __enter__(self) -> Self:
        self.run.stops.deferring = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._write_recorder(f"{type(error).__name__}: {error}")
        elif isinstance(error, Stopped):  # on every rank, perhaps within a step
            self.run.finish_saving(self.stage)

    def measure(self, step: int) -> dict[str, float]:
        """Evaluate now, after `step` steps; what is to be logged of it."""
        with self._phases("evaluate"):
            self.evaluation = self._trainer.evaluate()
        self._heard.tell("on_evaluate", metrics=self.evaluation)
        heard = self.selection.hear(step, self.evaluation, self.run.world)
        return {**self.evaluation, **heard, **self._heard.logged()}

    def measure_start(self) -> None:
        """Evaluate and log before the first step."""
        values = self.measure(0)
        self._record_followed(0)
        self._log.log(0, {**values, **self._phases.metrics()})
        if self.selection.kept_step == 0:
            self._save(0)

    def run_step(
        self, step: int, rows: Sequence[Any], more: Mapping[str, float], *, is_due: bool
    ) -> Recorded:
        """One step, evaluated if that is due, logged and saved.

        Args:
            more: metrics that hold whatever becomes of the step.
        """
        with self._phases("step"):
            self.begin(step, rows)
            # Only dropout draws from it, other numbers on every rank.
            torch.manual_seed(self.run.config.seed + step + (self.run.world.rank << 40))
            values = dict(more)
            try:
                values |= self._trainer.step(step, rows, self)
            except BadStepError as bad:
                self.skip(bad)
            made = self._recorded[-1].made
            if made is not None:
                values = {**made.metrics, **values}
            if is_due:
                values |= self.measure(step)
                self._record_followed(step)
        self.end(values)
        return self._recorded[-1]

    def begin(self, step: int, rows: Sequence[Any]) -> None:
        """A step begins, on these rows."""
        note(f"{self.stage} step {step}")
        if not self._recorded:
            self._log.begin()
        self._heard.step = step
        self._recorded.append(Recorded(step, rows))
        self._is_bad = False

    def made(self, experience: Experience) -> None:
        """What the step has made of its rows, to learn from."""
        self._recorded[-1].made = experience
        self._heard.tell("on_rollout", metrics=experience.metrics, experience=experience)

    def sample(self, prompt: str, answers: Mapping[str, Answer]) -> None:
        """Keep and show answers to a prompt, by label."""
        self._log.sample(self._recorded[-1].step, prompt, answers)

    def record(self, file: str, make: Callable[[], Records]) -> None:
        """Keep lines about the step's answers in one of the files of `metrics.answers`."""
        self._log.record(self._recorded[-1].step, file, make)

    def _record_followed(self, step: int) -> None:
        followed: Callable[[], Records] | None = getattr(self._trainer, "followed", None)
        if followed is not None:
            self._log.record(step, FOLLOWED_FILE, followed)

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
        self.run.print_line(f"{self.stage} step {now.step}: left out: {bad} Its rows: {path}")
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
        now = self._recorded[-1]
        now.values = dict(values)
        self._heard.tell("on_step", metrics=values, experience=now.made)
        values = now.values = {**values, **self._heard.logged()}
        self.run.require_there()
        # Before the checkpoint, so that no record is missing after it; what saving costs is in the
        # next step's.
        self._log.log(step, {**values, "skipped": float(self.skipped), **self._phases.metrics()})
        if now.made is not None:
            self._log.histogram(step, spreads(now.made))
        number, asked, stops = self._asked()
        every = self.run.config.save_every
        is_best = self.selection.kept_step == step
        if asked or number or stops or is_best or (every and step % every == 0):
            self._save(step)
        if asked:
            self.run.finish_saving(self.stage)
            (self.run.path / SAVE_NOW).unlink(missing_ok=True)
            self.run.print_line(f"{self.stage} step {step}: saved, as {SAVE_NOW} asked")
        if number:
            self.run.finish_saving(self.stage)
            raise Stopped(number, f"after {self.stage} step {step}, which is saved")
        if stops:
            self.run.finish_saving(self.stage)
            raise CallbackStop(f"{self._heard.reason} ({self.stage} step {step}, which is saved)")

    def take_best(self) -> None:
        """Bring the trainer back to the best evaluation, if the stage is to leave its models.

        Raises:
            CheckpointError: its checkpoint is missing or damaged.
        """
        best = self.selection.kept_step
        if best is not None and best != self._heard.step:
            try:
                self.run.finish_saving(self.stage)
            except CheckpointError as error:  # a later step's checkpoint is not needed any more
                self.run.print_line(f"{self.stage}: {error}")
            state = best_state(self.run.checkpoints(self.stage), best, self.run.world)
            self._trainer.restore(state)
            self.evaluation = dict(state.numbers["evaluation"])
        for line in self.selection.result():
            self.run.print_line(line)

    def finish(self, save: Callable[[Path], None], facts: Mapping[str, float]) -> None:
        """Write the stage's folder, in place of its checkpoints."""
        facts = {**facts, **self.selection.facts()}
        self.run.finish(self.stage, save, facts)
        self._heard.tell("on_save", metrics=facts, folder=self.run.folder(self.stage))

    def restore(self, state: SavedState) -> None:
        """Continue from what an earlier loop saved, the trainer's part included.

        Raises:
            CheckpointError: the best evaluation's checkpoint is missing or damaged.
        """
        self.selection.restore(state.numbers)
        best = self.selection.kept_step
        # Not only found out at the end.
        if best is not None and best != state.step and self.run.writes:
            best_state(self.run.checkpoints(self.stage), best, self.run.world)
        self.evaluation = dict(state.numbers["evaluation"])
        self.skipped = int(state.numbers["skipped"])
        self._heard.step = state.step
        self._in_a_row = int(state.numbers["skipped_in_a_row"])
        self._trainer.restore(state)

    def _state(self, step: int) -> State:
        tensors, numbers = self._trainer.state()
        own = {
            "evaluation": finite(self.evaluation),
            "skipped": self.skipped,
            "skipped_in_a_row": self._in_a_row,
        }
        numbers = {**numbers, **own, **self.selection.numbers()}
        return State(step, tensors, numbers, self.selection.kept_step)

    def _save(self, step: int) -> None:
        with self._phases("save"):
            self.run.save(self.stage, self._state(step))
        self._heard.tell("on_save", folder=self.run.checkpoint(self.stage, step))

    def _asked(self) -> tuple[int, bool, bool]:
        """The signal that any rank got (0 for none), whether a file asks for a checkpoint, and
        whether a callback stops the run."""
        wants = self.run.world.is_first and self.run.writes
        wants = wants and (self.run.path / SAVE_NOW).is_file()
        stops = float(bool(self._heard.reason))
        number, asked, stops = self.run.world.all_reduce_max(
            [self.run.stops.requested, float(wants), stops]
        )
        return int(number), bool(asked), bool(stops)

    def _write_recorder(self, reason: str) -> None:
        if self.run.world.is_first and self.run.writes and self._recorded:
            path, seed = self.run.path / RECORDER_FILE, self.run.config.seed
            if write_recorded(path, self.stage, seed, self._recorded, reason):
                self.run.print_line(f"{self.stage}: the last steps' rows and metrics: {path}")
