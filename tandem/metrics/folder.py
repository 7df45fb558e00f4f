"""What a run folder holds, read for the report: whatever is missing or damaged is left out.

Nothing here raises because of a file's content; what could not be read is said in `notices`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem.config.schema import RunConfig
from tandem.config.stages import stage_names
from tandem.errors import CheckpointError, ConfigError
from tandem.metrics.metric import Metric
from tandem.metrics.names import find_metric
from tandem.metrics.records import (
    ALARMS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    Record,
    parse_record,
    read_lines,
)

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a run, decoded. Empty where a file is missing; see the report for shapes."""

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

    def stages(self) -> tuple[str, ...]:
        """The stages with records, in the order in which they first logged; foreign ones left
        out."""
        seen = dict.fromkeys(record.stage for record in self.records)
        return tuple(stage for stage in seen if stage in stage_names())

    def series(self, stage: str, metric: str) -> list[tuple[float, float]]:
        """(step, value) of one metric, in the order of steps; nan and inf as they are."""
        points = {
            float(r.step): r.values[metric]
            for r in self.records
            if r.stage == stage and metric in r.values
        }
        return sorted(points.items())


def read_folder(run_dir: Path | str) -> RunFolder:
    """Read what is there.

    Raises:
        CheckpointError: if there is no such folder.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise CheckpointError(
            f"run folder must exist; got {str(path)!r}. Give the --output-dir of a run."
        )
    notices: list[str] = []
    config_text = _text(path / "config.yaml", notices)
    commands = [line.strip() for line in _text(path / "command.txt", notices).split("\n")]
    return RunFolder(
        path=path,
        config_text=config_text,
        config=_yaml(config_text, notices),
        commands=tuple(line for line in commands if line),
        environment=_json(path / "environment.json", notices),
        data=_json(path / "data.json", notices),
        evaluation=_evaluation(path, notices),
        records=tuple(read_lines(path / METRICS_FILE, parse_record, notices)),
        samples=tuple(read_lines(path / SAMPLES_FILE, mapping, notices)),
        alarms=tuple(read_lines(path / ALARMS_FILE, mapping, notices)),
        notices=tuple(notices),
    )


def finished_steps(run_dir: Path) -> dict[str, str]:
    """Each finished step's manifest by the SHA-256 that it gives of itself: another model, another
    number. Files are not looked at."""
    found = {}
    for stage in stage_names():
        path = run_dir / stage / "MANIFEST.json"
        if path.is_file():
            found[stage] = str(_json(path, []).get("sha256", "damaged"))
    return found


def _evaluation(path: Path, notices: list[str]) -> Mapping[str, Any]:
    """The final comparison, if it is one of the models that the folder holds now."""
    evaluation = _json(path / EVALUATION_FILE, notices)
    compared = mapping_or_empty(mapping_or_empty(evaluation.get("made_from")).get("steps"))
    if evaluation and dict(compared) != finished_steps(path):
        notices.append(
            f"{EVALUATION_FILE} compares other models than those in this folder and is left out. "
            "`tandem eval` compares these."
        )
        return {}
    return evaluation


_UNDECLARED = Metric("", "", (), "")


def declared(name: str) -> Metric:
    """The metric's declaration; one without unit and meaning for a name of another version."""
    try:
        return find_metric(name)
    except ConfigError:
        return _UNDECLARED


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is a mapping.

    Raises:
        TypeError: if it is not.
    """
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
    """`value` as a number ("nan" and "inf" are), None if it is none or a truth value."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points whose value is a number."""
    return [point for point in points if math.isfinite(point[1])]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested knobs as `ppo.actor.learning_rate: value`; tuples as lists, as YAML reads them."""
    knobs: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            knobs.update(flat(value, f"{prefix}{name}."))
        else:
            knobs[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return knobs


def changed_knobs(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(knob, value, default) where the run's value is not the default; unknown knobs too."""
    defaults = flat(dataclasses.asdict(RunConfig()))
    return [
        (name, _knob_text(value), _knob_text(defaults.get(name, "")))
        for name, value in flat(config).items()
        if name not in defaults or value != defaults[name]
    ]


def _knob_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_knob_text, value)) or "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "empty" if value == "" else str(value)


def _text(path: Path, notices: list[str]) -> str:
    if not path.exists():
        return ""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        notices.append(f"{path.name} could not be read: {error}")
        return ""


def _json(path: Path, notices: list[str]) -> Mapping[str, Any]:
    text = _text(path, notices)
    if not text:
        return {}
    try:
        return mapping(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        notices.append(f"{path.name} could not be read: {error}")
        return {}


def _yaml(text: str, notices: list[str]) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        return mapping(yaml.safe_load(text))
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        notices.append(f"config.yaml could not be read: {error}")
        return {}
