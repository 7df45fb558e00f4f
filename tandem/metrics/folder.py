"""A run folder's files, read for the report; missing and damaged ones are skipped.

Nothing here raises because of a file's content; `notices` names what could not be read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tandem.config.stages import Stage, stage_names, stage_of
from tandem.errors import CheckpointError
from tandem.metrics.records import (
    ALARMS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    Record,
    parse_record,
    read_lines,
)
from tandem.yaml_text import from_yaml

T = TypeVar("T")

EVALUATION_FILE = "evaluation.json"
EVALUATIONS_FOLDER = "evaluations"
"""Of evaluations on other data than the run's own, a file each."""
PREDICTIONS_FILE = "predictions.jsonl"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a run, decoded; empty where a file is missing."""

    path: Path
    config_text: str
    config: Mapping[str, Any]
    commands: tuple[str, ...]
    environment: Mapping[str, Any]
    data: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    records: tuple[Record, ...]
    samples: tuple[Mapping[str, Any], ...]
    alarms: tuple[Mapping[str, Any], ...]
    notices: tuple[str, ...]
    predictions: tuple[Mapping[str, Any], ...] = ()
    evaluations: tuple[Mapping[str, Any], ...] = ()
    _points: dict[tuple[str, str], dict[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def stages(self) -> list[Stage]:
        """The known stages with records, in the order in which they first logged."""
        seen = dict.fromkeys(record.stage for record in self.records)
        return [stage_of(name) for name in seen if name in stage_names()]

    def series(self, stage: str, metric: str) -> list[tuple[float, float]]:
        """(step, value) of one metric in the order of steps, nan and inf included."""
        if not self._points:  # once for all: a report asks for hundreds
            for record in self.records:
                for name, value in record.values.items():
                    found = self._points.setdefault((record.stage, name), {})
                    found[float(record.step)] = value
        return sorted(self._points.get((stage, metric), {}).items())


def read_folder(run_dir: Path | str) -> RunFolder:
    """Read the files that exist.

    Raises:
        CheckpointError: if there is no such folder.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise CheckpointError(
            f"run folder must exist; got {str(path)!r}. Give the --output-dir of a run."
        )
    notices: list[str] = []
    commands = _read(path / "command.txt", str, "", notices).split("\n")
    return RunFolder(
        path=path,
        config_text=_read(path / "config.yaml", str, "", []),
        config=_read(path / "config.yaml", _yaml, {}, notices),
        commands=tuple(line.strip() for line in commands if line.strip()),
        environment=_json(path / "environment.json", notices),
        data=_json(path / "data.json", notices),
        evaluation=_evaluation(path, notices),
        records=tuple(read_lines(path / METRICS_FILE, parse_record, notices)),
        samples=tuple(read_lines(path / SAMPLES_FILE, mapping, notices)),
        alarms=tuple(read_lines(path / ALARMS_FILE, mapping, notices)),
        predictions=tuple(read_lines(path / PREDICTIONS_FILE, mapping, notices)),
        evaluations=tuple(_on_other_data(path, notices)),
        notices=tuple(notices),
    )


def finished_stages(run_dir: Path) -> dict[str, str]:
    """The SHA-256 in each finished stage's manifest, by stage; the model's files are not read."""
    manifests = {name: run_dir / name / "MANIFEST.json" for name in stage_names()}
    return {
        name: str(_json(path, []).get("sha256", "damaged"))
        for name, path in manifests.items()
        if path.is_file()
    }


def _evaluation(path: Path, notices: list[str]) -> Mapping[str, Any]:
    """The final comparison, if it is of the models now in the folder."""
    return _of_these_models(path, EVALUATION_FILE, notices)


def _on_other_data(path: Path, notices: list[str]) -> list[Mapping[str, Any]]:
    """The evaluations on other data, by the names of their files, of the models now there."""
    files = sorted((path / EVALUATIONS_FOLDER).glob("*.json"))
    found = [_of_these_models(path, f"{EVALUATIONS_FOLDER}/{file.name}", notices) for file in files]
    return [evaluation for evaluation in found if evaluation]


def _of_these_models(path: Path, file: str, notices: list[str]) -> Mapping[str, Any]:
    """An evaluation, if it is of the models now in the folder."""
    evaluation = _json(path / file, notices)
    compared = mapping_or_empty(mapping_or_empty(evaluation.get("made_from")).get("stages"))
    if evaluation and dict(compared) != finished_stages(path):
        again = "`tandem eval`" if file == EVALUATION_FILE else "`tandem eval --data`"
        notices.append(
            f"{file} compares models other than those now in this folder and is not "
            f"shown. Run {again} to compare these."
        )
        return {}
    return evaluation


def mapping(value: Any) -> Mapping[str, Any]:
    """`value`; raises TypeError if it is not a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"line must be a JSON object; got {type(value).__name__}. Remove it.")
    return value


def mapping_or_empty(value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def list_or_empty(value: Any) -> Sequence[Any]:
    """`value` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def number_or_none(value: Any) -> float | None:
    """`value` as a number ("nan" and "inf" included); None if it is not one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number or value in ("nan", "inf", "-inf") else None


def finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points whose value is a number."""
    return [point for point in points if math.isfinite(point[1])]


def _read(path: Path, decode: Callable[[str], T], empty: T, notices: list[str]) -> T:
    """A file's content; `empty` if it is missing or, with a notice, unreadable."""
    try:
        return decode(path.read_text("utf-8")) if path.exists() else empty
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        notices.append(f"{path.name} could not be read: {error}")
        return empty


def _json(path: Path, notices: list[str]) -> Mapping[str, Any]:
    return _read(path, lambda text: mapping(json.loads(text)), {}, notices)


def _yaml(text: str) -> Mapping[str, Any]:
    return mapping(from_yaml(text)) if text.strip() else {}
