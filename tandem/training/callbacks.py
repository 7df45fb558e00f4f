"""What Python code hears of a running stage, and how it stops the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tandem.errors import ConfigError
from tandem.metrics.names import find_metric
from tandem.metrics.own import OWN_PREFIX
from tandem.text import class_name
from tandem.types import Experience

if TYPE_CHECKING:
    from tandem.training.run_folder import Run
    from tandem.training.stage_loop import StageTrainer

Moment = Literal["on_rollout", "on_step", "on_evaluate", "on_save"]


class Callback:
    """Hears of a run while it trains; subclass it, and override what you need.

    Pass instances to `train(callbacks=[...])` or `TrackedLoop(callbacks=[...])`. Each method gets a
    `RunState`: the run, the trainer with its models, and what has just been made. It may read all
    of it, should change nothing, logs numbers of its own by `state.log`, and stops the run by
    `state.stop("why")`. With several ranks every rank calls it. What it raises ends the run as any
    error does.
    """

    def on_rollout(self, state: RunState) -> None:
        """An RL stage has answered and scored its prompts: `state.experience`, before the
        update."""

    def on_step(self, state: RunState) -> None:
        """A step is over: `state.metrics`, which go into metrics.jsonl next."""

    def on_evaluate(self, state: RunState) -> None:
        """Held-out rows were evaluated: `state.metrics`. At step 0, before the first update."""

    def on_save(self, state: RunState) -> None:
        """`state.folder` is saved: a checkpoint, which may still be written in the background
        (`save_async`), or, at the end of a stage, its finished folder."""


def require_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Callbacks as they were given.

    Raises:
        ConfigError: they are no list of objects of `Callback`.
    """
    is_list = isinstance(callbacks, Iterable) and not isinstance(callbacks, Callback | type)
    others = [one for one in callbacks if not isinstance(one, Callback)] if is_list else [callbacks]
    if others:
        raise ConfigError(
            "callbacks must be a list of objects of classes derived from Callback; got "
            f"{class_name(others[0])}. Write e.g. callbacks=[Mine()]."
        )
    return tuple(callbacks)


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
    _own: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def stop(self, reason: str = "stopped by a callback") -> None:
        """Stop the run after this step, which is saved; `train` returns, and the same call
        continues. After the last step of a stage, its model is not saved either."""
        self.reason = reason or "stopped by a callback"

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add numbers of your own to the step's, by names that begin with own/. With several ranks
        the first one's are kept.

        Raises:
            ConfigError: a name of another kind, or a callback of `on_save`, which has no step.
        """
        if self.folder is not None:
            raise ConfigError(
                "RunState.log must be called in on_rollout, on_evaluate or on_step; got on_save. "
                "Keep the number until the next step."
            )
        for name, value in metrics.items():
            if not name.startswith(OWN_PREFIX):
                raise ConfigError(
                    f"RunState.log must get names that begin with {OWN_PREFIX}; got {name!r}. Log "
                    f"{OWN_PREFIX + name!r}."
                )
            find_metric(name)
            self._own[name] = float(value)

    def logged(self) -> dict[str, float]:
        """What callbacks have logged since the last time."""
        own, self._own = self._own, {}
        return own

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
