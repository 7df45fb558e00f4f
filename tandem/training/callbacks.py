"""What Python code hears of a running stage, and how it stops the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tandem.types import Experience

if TYPE_CHECKING:
    from tandem.training.run_folder import Run
    from tandem.training.stage_loop import StageTrainer

Moment = Literal["on_rollout", "on_step", "on_evaluate", "on_save"]


class Callback:
    """Hears of a run while it trains; subclass it, and override what you need.

    Pass instances to `train(callbacks=[...])` or `TrackedLoop(callbacks=[...])`. Each method gets a
    `RunState`: the run, the trainer with its models, and what has just been made. It may read all
    of it, should change nothing, and stops the run by `state.stop("why")`. With several ranks every
    rank calls it. What it raises ends the run as any error does.
    """

    def on_rollout(self, state: RunState) -> None:
        """An RL stage has answered and scored its prompts: `state.experience`, before the
        update."""

    def on_step(self, state: RunState) -> None:
        """A step is over and logged: `state.metrics`, as in metrics.jsonl."""

    def on_evaluate(self, state: RunState) -> None:
        """Held-out rows were evaluated: `state.metrics`. At step 0, before the first update."""

    def on_save(self, state: RunState) -> None:
        """`state.folder` is saved: a checkpoint, which may still be written in the background
        (`save_async`), or, at the end of a stage, its finished folder."""


class CallbackStop(BaseException):
    """A callback has stopped the run; the running step is saved. `train` catches it."""


@dataclass
class RunState:
    """What a callback may read.

    run: its folder (`run.path`) and configuration (`run.config`). stage: the stage's name. trainer:
    the stage's, with its models (in RL stages `trainer.trainer.engine`). step: counts from 1; 0 is
    before the first. metrics: of what the callback hears of. experience: of the step, in RL stages.
    folder: what was saved.
    """

    run: Run
    stage: str
    num_steps: int
    trainer: StageTrainer
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    experience: Experience | None = None
    folder: Path | None = None
    reason: str = ""

    def stop(self, reason: str = "stopped by a callback") -> None:
        """Stop the run after this step, which is saved; `train` returns, and the same call
        continues. After the last step of a stage, its model is not saved either."""
        self.reason = reason or "stopped by a callback"

    def tell(
        self,
        moment: Moment,
        *,
        metrics: Mapping[str, float] | None = None,
        experience: Experience | None = None,
        folder: Path | None = None,
    ) -> None:
        """Call the run's callbacks."""
        self.metrics, self.experience, self.folder = dict(metrics or {}), experience, folder
        for callback in self.run.callbacks:
            getattr(callback, moment)(self)
