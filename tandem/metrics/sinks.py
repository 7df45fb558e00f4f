"""Trackers that receive a copy of what the run folder gets: TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tandem.errors import ConfigError
from tandem.files import append, replace
from tandem.metrics.names import group_of
from tandem.metrics.records import Answer
from tandem.metrics.text import short_number
from tandem.text import visible_lines
from tandem.yaml_text import from_yaml

CONFIG_FILE = "config.yaml"
_WANDB_IDS = "wandb.json"
_FORMAT = "brain.Event:2"
_numbers = count()
_EVENTS = "events.out.tfevents"
_BINS = 30
_DT_STRING = 7  # tensorboard.compat.proto.types_pb2


_NO_TENSORBOARD = (
    "log.tensorboard must be off if TensorBoard is not installed; got on. "
    "Run `pip install tensorboard`, or set log.tensorboard to false."
)
_NO_WANDB = (
    "log.wandb must be empty if wandb is not installed; got {!r}. "
    "Run `pip install wandb`, or leave log.wandb empty."
)


def missing_trackers(*, tensorboard: bool, wandb: str) -> list[str]:
    """What is wrong with the trackers that a run wants, found without importing them."""
    problems = [_NO_TENSORBOARD] if tensorboard and not _is_installed("tensorboard") else []
    return problems + ([_NO_WANDB.format(wandb)] if wandb and not _is_installed("wandb") else [])


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of runs is called wandb too


class Sink(Protocol):
    """Where records go besides metrics.jsonl."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take one record, non-finite values included."""

    def sample(self, step: int, prompt: str, answers: Mapping[str, Answer]) -> None:
        """Take a prompt and its answers by label."""

    def histogram(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Take finite numbers by name, at least one each, of which the spread is of interest."""

    def close(self, failed: bool) -> None:
        """Flush; `failed` if the stage ended in an error."""


class TensorBoard:
    """Event files in <run_dir>/tensorboard/<stage>, tags `<stage>/<name>`.

    A name that belongs to a group (`group_of`) is tagged `<stage>-<group>/<name>`: TensorBoard
    folds tags by the part before their first slash, and PPO logs about sixty numbers. Events are
    written before `write` returns: torch's SummaryWriter writes them in a thread, where a full disk
    ends in a traceback.

    Raises:
        ConfigError: if TensorBoard is not installed.
        OSError: the disk refuses; so does `write`.
    """

    def __init__(self, run_dir: Path, stage: str, first_step: int) -> None:
        """`first_step` is the first to be written; older events from that step on are purged."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ConfigError(_NO_TENSORBOARD) from error
        folder = run_dir / "tensorboard" / stage
        folder.mkdir(parents=True, exist_ok=True)
        writer = f"{_after(folder):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):06d}"
        self._path = folder / f"{_EVENTS}.{writer}"
        self._stage = stage
        self._event, self._summary, self._records = Event, Summary, RecordWriter
        self._histogram, self._tensor, self._shape = HistogramProto, TensorProto, TensorShapeProto
        self._append(file_version=_FORMAT)
        self._append(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per value."""
        scalars = []
        for name, value in values.items():
            heading = "-".join(filter(None, [self._stage, group_of(name)]))
            scalars.append(self._summary.Value(tag=f"{heading}/{name}", simple_value=value))
        self._append(step=step, summary=self._summary(value=scalars))

    def sample(self, step: int, prompt: str, answers: Mapping[str, Answer]) -> None:
        """One text, as TensorBoard's text tab shows it (Markdown)."""
        from tensorboard.plugins.text.metadata import create_summary_metadata

        text = self._tensor(
            dtype=_DT_STRING,
            string_val=[_markdown(prompt, answers).encode(errors="replace")],
            tensor_shape=self._shape(dim=[self._shape.Dim(size=1)]),
        )
        tag = f"{self._stage}/samples"
        metadata = create_summary_metadata(display_name="", description="")
        value = self._summary.Value(tag=tag, metadata=metadata, tensor=text)
        self._append(step=step, summary=self._summary(value=[value]))

    def histogram(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """One histogram per name, of 30 bins."""
        shown = [
            self._summary.Value(tag=f"{self._stage}/{name}", histo=self._binned(numbers))
            for name, numbers in values.items()
        ]
        self._append(step=step, summary=self._summary(value=shown))

    def _binned(self, numbers: Sequence[float]) -> Any:
        counts, edges = np.histogram(np.asarray(numbers, dtype=np.float64), bins=_BINS)
        array = np.asarray(numbers, dtype=np.float64)
        return self._histogram(
            min=array.min(),
            max=array.max(),
            num=len(array),
            sum=array.sum(),
            sum_squares=(array**2).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )

    def close(self, failed: bool) -> None:
        """Nothing to flush."""

    def _append(self, **event: Any) -> None:
        record = BytesIO()
        event_bytes = self._event(wall_time=time.time(), **event).SerializeToString()
        self._records(record).write(event_bytes)
        append(self._path, record.getvalue())


class WandB:
    """One Weights & Biases run per stage, grouped by run folder, with its id in wandb.json and the
    run's configuration.

    A resumed stage also resumes its W&B run. Steps repeated after a kill then appear twice there
    (W&B cannot delete records), but once in the run folder.

    Raises:
        ConfigError: if wandb is not installed.
    """

    def __init__(self, run_dir: Path, stage: str, first_step: int, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(_NO_WANDB.format(project)) from error
        ids_path = run_dir / _WANDB_IDS
        ids = json.loads(ids_path.read_text("utf-8")) if ids_path.exists() else {}
        if first_step == 0 or stage not in ids:
            ids[stage] = uuid.uuid4().hex
            replace(ids_path, json.dumps(ids, indent=2).encode())
        self._stage = stage
        self._wandb: Any = wandb
        config = run_dir / CONFIG_FILE
        knobs = from_yaml(config.read_text("utf-8")) if config.exists() else {}
        self._run: Any = wandb.init(
            project=project,
            config=knobs,
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

    def sample(self, step: int, prompt: str, answers: Mapping[str, Answer]) -> None:
        """A table of one row per answer."""
        table = self._wandb.Table(columns=["prompt", "answer", "text", "score"])
        for label, answer in answers.items():
            table.add_data(prompt, label, answer["text"], answer.get("score"))
        self._run.log({f"{self._stage}/step": step, f"{self._stage}/samples": table})

    def histogram(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """One W&B histogram per name."""
        named = {
            f"{self._stage}/{name}": self._wandb.Histogram(list(numbers), num_bins=_BINS)
            for name, numbers in values.items()
        }
        self._run.log({f"{self._stage}/step": step, **named})

    def close(self, failed: bool) -> None:
        """Finish the W&B run; it is marked as failed if the stage failed."""
        self._run.finish(exit_code=int(failed))


def _after(folder: Path) -> int:
    """The time for the name of a new file, in seconds: TensorBoard reads a folder's files by name,
    so it is later than those of the files there, also if the clock was set back since."""
    times = [file.name.removeprefix(f"{_EVENTS}.")[:10] for file in folder.glob(f"{_EVENTS}.*")]
    return max([int(time.time()), *(int(text) + 1 for text in times if text.isdecimal())])


def _markdown(prompt: str, answers: Mapping[str, Answer]) -> str:
    """A prompt and its answers as indented code, so that nothing in them is markup."""
    parts = [("prompt", prompt)]
    for label, answer in answers.items():
        score = answer.get("score")
        parts.append(
            (f"{label}{'' if score is None else f' ({short_number(score)})'}", answer["text"])
        )
    shown = []
    for label, text in parts:
        lines = "\n".join(f"    {line}" for line in visible_lines(text).splitlines() or [""])
        shown.append(f"**{visible_lines(label)}**\n\n{lines}")
    return "\n\n".join(shown)
