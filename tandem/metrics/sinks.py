"""Trackers that receive what is written to the run folder: TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tandem.errors import ConfigError
from tandem.metrics.names import group_of
from tandem.metrics.records import write_atomically

_WANDB_IDS = "wandb.json"


class Sink(Protocol):
    """Where records go besides metrics.jsonl."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take one record; non-finite values are passed as they are."""

    def close(self, failed: bool) -> None:
        """Flush what is pending; `failed` if the stage ended in an error."""


class TensorBoard:
    """Event files in <run_dir>/tensorboard/<stage>, tags `<stage>/<name>`.

    A name that belongs to a group (`group_of`) is tagged `<stage>-<group>/<name>`: TensorBoard
    folds tags by what comes before their first slash, and PPO logs about sixty numbers.

    Raises:
        ConfigError: if TensorBoard is not installed.
    """

    def __init__(self, run_dir: Path, stage: str, first_step: int) -> None:
        """`first_step` is the first to be written: its events and later ones are purged."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "log.tensorboard must be off where TensorBoard is missing; got on. "
                "Run `pip install tensorboard`, or set log.tensorboard to false."
            ) from error
        folder = run_dir / "tensorboard" / stage
        self._stage = stage
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per value."""
        for name, value in values.items():
            heading = "-".join(filter(None, [self._stage, group_of(name)]))
            self._writer.add_scalar(f"{heading}/{name}", value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """One Weights & Biases run per stage, grouped by run folder, with its id in wandb.json.

    A stage that continues also continues its W&B run. Steps repeated after a kill then appear
    twice there (W&B cannot delete records), but once in the run folder.

    Raises:
        ConfigError: if wandb is not installed.
    """

    def __init__(self, run_dir: Path, stage: str, first_step: int, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"log.wandb must be empty where wandb is missing; got {project!r}. "
                "Run `pip install wandb`, or leave log.wandb empty."
            ) from error
        ids_path = run_dir / _WANDB_IDS
        ids = json.loads(ids_path.read_text("utf-8")) if ids_path.exists() else {}
        if first_step == 0 or stage not in ids:
            ids[stage] = uuid.uuid4().hex
            write_atomically(ids_path, json.dumps(ids, indent=2).encode())
        self._stage = stage
        self._run: Any = wandb.init(
            project=project,
            id=ids[stage],
            name=f"{run_dir.name}/{stage}",
            group=run_dir.name,
            dir=str(run_dir),
            resume="allow",
        )
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One W&B record, with the stage's step as x axis."""
        named = {f"{self._stage}/{name}": value for name, value in values.items()}
        self._run.log({f"{self._stage}/step": step, **named})

    def close(self, failed: bool) -> None:
        """Finish the W&B run; it is marked as failed if the stage failed."""
        self._run.finish(exit_code=int(failed))
