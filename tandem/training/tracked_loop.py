"""What a run has around its steps, for a loop of your own: checkpoints, log, signals, report.

loop = TrackedLoop(trainer, num_steps=200)
for step in loop:
    experience = trainer.generate_experience(prompts, step=step)
    loop.log(trainer.train_rlhf(experience, step=step), experience)
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from tandem.checkpoint.state import SavedState
from tandem.config.rules import selecting
from tandem.config.stages import rl_stage
from tandem.errors import ConfigError
from tandem.metrics.log import MetricLog, MutedLog
from tandem.metrics.notebook import in_notebook
from tandem.metrics.timing import Phases
from tandem.training.answer_records import AnswerKeeper
from tandem.training.callbacks import Callback, CallbackStop, require_callbacks
from tandem.training.given import digest_of_module
from tandem.training.ppo import first_answers, restore_trainer, save_engine, state_of
from tandem.training.ppo_trainer import PPOTrainer
from tandem.training.run_folder import Run
from tandem.training.run_report import report, report_at_a_stop
from tandem.training.stage_loop import StepLoop
from tandem.types import Experience


class TrackedLoop:
    """Iterate over it for the numbers of the steps that are left, and call `log` once per step.

    It writes into `config.output_dir` what `tandem train` writes: metrics.jsonl and the other logs,
    records of the answers (docs/page.md), a checkpoint every `save_every` steps and when a signal
    comes, in the end the models in a folder of the stage's name, and report.html; but nothing of
    held-out prompts, which it does not evaluate. Begun again with the same models and knobs, it
    continues after the newest checkpoint. It ends early where a callback stops it (`stopped`).
    `tandem chat`, `sample`, `serve` and `report` take the folder, and `eval` with `--data`;
    `replay`, which reads a run's data again, does not know your prompts.
    """

    def __init__(
        self,
        trainer: PPOTrainer,
        num_steps: int,
        *,
        callbacks: Sequence[Callback] = (),
        print_line: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            trainer: its configuration names the folder; its engine holds the models.
            num_steps: how many steps there are in all; give the trainer the same number.
            callbacks: hear of rollouts, steps and saves, and may stop the loop.
            print_line: shows a line to the user, on the first rank.
        Raises:
            CheckpointError: the folder is not a run's, or was made with other knobs or models.
            ConfigError: a knob that only a stage's own loop reads (`keep_best`, `patience`).
        """
        if asked := selecting(trainer.rl):
            raise ConfigError(
                f"{asked} must be off in a TrackedLoop, which makes no evaluations to compare; got "
                f"{getattr(trainer.rl, asked)}. Evaluate in the loop, and leave it where you want."
            )
        self.trainer = trainer
        self.num_steps = num_steps
        self.stage = rl_stage(trainer.config.stages).name
        # The folder's only stage: nobody should wait for others that the configuration names.
        alone = replace(trainer.config, stages=(self.stage,))
        self.run = Run(alone, print_line, trainer.engine.world)
        self.run.callbacks = require_callbacks(callbacks)
        self.step = 0
        """The step that is running, or was the last."""
        self._loop: StepLoop | None = None
        self._is_logged = True
        self._kept = AnswerKeeper(trainer.engine.tokenizer, trainer.config.log.record_answers)
        self._note_models()

    @property
    def stopped(self) -> str:
        """Why a callback stopped the loop; empty if none did."""
        return self.run.stopped

    def __iter__(self) -> Iterator[int]:
        """The steps from the newest checkpoint on; then saves the models and writes the report.

        Raises:
            ConfigError: a step was not logged.
            Stopped: a signal came; the step is saved.
        """
        run = self.run
        if run.is_finished(self.stage):
            run.print_line(f"{self.stage}: finished before, in {run.folder(self.stage)}")
            return
        run.require_own_folder()
        run.world.barrier()
        with ExitStack() as stack:
            stack.enter_context(run.stops)
            stack.enter_context(closing(run))
            run.open(_command())
            state = run.load(self.stage)
            start = 0 if state is None else state.step
            log: MetricLog | MutedLog = run.metric_log(self.stage, self.num_steps, start)
            stack.enter_context(log)
            adapter = _Stage(self.trainer)
            self._loop = StepLoop(run, self.stage, log, adapter, self.num_steps)
            if state is not None:
                self._loop.restore(state)
            try:
                with report_at_a_stop(run), self._loop:
                    yield from self._steps(start)
                    self._finish()
            except CallbackStop as stop:
                run.stopped = str(stop)
                run.print_line(f"stopped: {stop}")

    def log(self, metrics: Mapping[str, float], experience: Experience | None = None) -> None:
        """The step is over: log its metrics, save where that is due.

        Args:
            metrics: by declared names (docs/metrics.md).
            experience: what the step learned from; its metrics are logged too, and callbacks hear
                of it. If it is a whole one, no selection of its rows, its answers are recorded and
                samples of them shown.
        Raises:
            ConfigError: an undeclared name, or no step is running.
        """
        if self._loop is None or self._is_logged:
            raise ConfigError(
                "TrackedLoop.log must be called once per step, inside `for step in loop`; got a "
                "call outside. Log once, at the end of the step."
            )
        values = dict(metrics)
        if experience is not None:
            values = {**experience.metrics, **values}
            self._loop.made(experience)
            if experience.batch is experience.rollout.batch:  # their rows are the same
                self._record(self._loop, experience)
        self._values, self._is_logged = values, True

    def _record(self, loop: StepLoop, experience: Experience) -> None:
        """Show and keep answers, as the stage's own loop does."""
        every = self.trainer.config.log.print_samples_every
        if every and self.step % every == 0:
            loop.sample(*first_answers(experience))
        self._kept.record(loop, experience)

    def _steps(self, start: int) -> Iterator[int]:
        assert self._loop is not None
        phases = self.trainer.phases
        for step in range(start + 1, self.num_steps + 1):
            self.step, self._is_logged = step, False
            with phases("step"):
                self._loop.begin(step, [])
                yield step
            if not self._is_logged:
                raise ConfigError(
                    f"step {step} must be logged; got none. Call loop.log(metrics) at its end."
                )
            self._loop.end(self._values)

    def _finish(self) -> None:
        assert self._loop is not None
        engine, dtype = self.trainer.engine, self.trainer.config.save_dtype
        self._loop.finish(
            lambda folder: save_engine(engine, engine, folder, dtype=dtype),
            {"steps": float(self.num_steps)},
        )
        report(self.run)
        self.run.world.barrier()

    def _note_models(self) -> None:
        """Note the models as they start, so that others do not continue their checkpoints."""
        engine, world = self.trainer.engine, self.run.world
        named = self.trainer.config.actor_model
        if world.size > 1 and not named:
            raise ConfigError(
                "TrackedLoop on several ranks must be told the actor's folder; got none. Set "
                "actor_model in the configuration that the engine is made from."
            )
        if world.size == 1:
            self.run.identity.in_memory["the actor"] = digest_of_module(engine.actor)
        self.run.given_actor = str(engine.actor.name_or_path)


def _command() -> str:
    """What runs this program again."""
    if in_notebook():
        return "# the cells of a notebook"
    return f"python {shlex.join(sys.argv)}"


class _Stage:
    """The trainer of a loop that is not ours (a `StageTrainer`)."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self.trainer = trainer
        self.phases: Phases = trainer.phases
        self.thresholds: Mapping[str, float] = {"ratio-gap": trainer.ratio_tolerance}
        self.state = partial(state_of, trainer)

    def step(self, step: int, rows: Sequence[Any], loop: StepLoop) -> dict[str, float]:
        raise NotImplementedError("the loop is the user's")

    def evaluate(self) -> dict[str, float]:
        return {}

    def rehearse(self) -> None:
        """Nothing."""

    def restore(self, state: SavedState) -> None:
        restore_trainer(self.trainer, state)
