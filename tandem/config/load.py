"""YAML in and out, and every problem of a configuration reported at once."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from tandem.config.knob import Unset, bounds_text
from tandem.config.nearest import advice, got
from tandem.config.rules import rule_problems
from tandem.config.schema import RunConfig, rl_section
from tandem.config.spellings import (
    asks_nothing,
    conversion,
    knob_meant,
    note_of,
    value_meant,
    with_dotted,
)
from tandem.config.stages import defaults_of, of_family, rl_stage, stage_names, stage_of
from tandem.config.updates import answers_per_step
from tandem.config.yaml_file import read_file
from tandem.errors import ConfigError
from tandem.text import is_unicode
from tandem.yaml_text import as_yaml

T = TypeVar("T")


def show_note(line: str) -> None:
    """Print a note to stderr, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        shown = line if line.isprintable() else ascii(line)[1:-1]  # it may hold a file name
        print(f"note: {shown}", file=sys.stderr)


def load_config(path: str | Path, *, note: Callable[[str], None] = show_note) -> RunConfig:
    """Read a YAML file of knobs; missing ones keep their defaults.

    Args:
        note: gets one line on names that were read as others (earlier ones, other trainers').
    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong (all of them listed, an
            unknown key with the nearest known one). Ranges are checked later, by `check_config`,
            after flags are applied.
    """
    return build_config(read_file(path), where=f"{path}: ", note=note)


def build_config(
    values: Any, *, where: str = "", note: Callable[[str], None] = show_note
) -> RunConfig:
    """A configuration from nested plain values; missing knobs keep their defaults.

    Args:
        where: begins every problem and note, such as "run.yaml: ".
        note: as for `load_config`.
    Raises:
        ConfigError: all unknown keys and wrong types.
    """
    values, notes, problems = with_our_names(values)
    if notes:
        note(f"{where}{'; '.join(notes)}")
    config, wrong = build(values)
    problems += wrong
    if problems:
        raise ConfigError("; ".join(f"{where}{problem.rstrip('.')}" for problem in problems))
    return config


def read_named(path: str | None, stage: str = "") -> tuple[RunConfig, Any, list[str], list[str]]:
    """The file of --config, if it is given, as a configuration and as nested values; a note on
    other names; what is wrong, if anything.

    Args:
        stage: the command's, whose knobs may stand outside its section under others' names.
    """
    if not path:
        return RunConfig(), {}, [], []
    try:
        values, others, problems = with_our_names(read_file(path), stage)
    except ConfigError as error:
        return RunConfig(), {}, [], [str(error).rstrip(".")]
    config, mistakes = build(values, stage)
    wrong = "; ".join(problem.rstrip(".") for problem in (*problems, *mistakes))
    notes = [f"{path}: {'; '.join(others)}"] if others else []
    return config, values, notes, [f"{path}: {wrong}"] if wrong else []


def build(values: Any, stage: str = "") -> tuple[RunConfig, list[str]]:
    """A configuration from our own names only, and its problems; wrong knobs keep their defaults.

    Args:
        stage: whose knobs an unknown name may rather mean.
    """
    problems: list[str] = []
    config = _build(RunConfig, values, "", problems, [stage] if stage else [])
    for name, value in defaults_of(config.stages).items():
        section, _, last = name.rpartition(".")
        if last not in _mapping(values, section):
            changed = dataclasses.replace(getattr(config, section), **{last: value})
            config = dataclasses.replace(config, **{section: changed})
    if "minibatch_size" not in _mapping(values, section := rl_stage(config.stages).section):
        rl = rl_section(config)
        size = min(rl.minibatch_size, max(1, answers_per_step(config)))
        changed = dataclasses.replace(rl, minibatch_size=size)
        config = dataclasses.replace(config, **{section: changed})  # type: ignore[arg-type]
    return config, problems


def with_our_names(values: Any, stage: str = "") -> tuple[Any, list[str], list[str]]:
    """Nested values under our names, a note on each other name, and problems with those. Names that
    do not stand for exactly one knob stay, for `build` to refuse.

    Args:
        stage: in whose section other trainers' names outside all sections are.
    """
    others: list[tuple[str, str, Any]] = []
    known = [name for name, _ in config_knobs()]
    values = with_dotted(values, _sections()) if isinstance(values, Mapping) else values
    values = _without_aliases(values, "", known, others, stage and stage_of(stage).section)
    notes, problems = [], []
    for name, knob, value in others:
        if not set_knob(values, knob, value, replace=False):
            problems.append(
                f"{name} must not be given with {knob}, the same knob; got both. Remove one"
            )
        notes.append(note_of(name, name, knob))
    return values, notes, problems


def without_presets(values: dict[str, Any], given: Any) -> dict[str, Any]:
    """Nested values without the knobs that a preset, a stage's defaults or a rollout's size have
    set, so that later values of `algorithm`, `stages` and the size set them; in place.

    Args:
        given: the nested values that they were built from; what is in these stays.
    """
    preset = {name for name, knob in config_knobs() if isinstance(knob.default, Unset)}
    sizes = {f"{stage.section}.minibatch_size" for stage in of_family(stage_names(), "rl")}
    for name in preset | defaults_of(stage_names()).keys() | sizes:
        section, _, last = name.rpartition(".")
        if last not in _mapping(given, section):
            _mapping(values, section).pop(last, None)
    return values


def _mapping(values: Any, dotted: str) -> dict[str, Any]:
    """A section of nested values; empty if there is none."""
    for part in dotted.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def set_knob(values: Any, dotted: str, value: Any, *, replace: bool = True) -> bool:
    """Set a knob in nested values, in place; returns whether it was set.

    Args:
        replace: overwrite an existing value. A section that is not a mapping is never changed.
    """
    *sections, name = dotted.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return True
    if name in values and not replace:
        return False
    values[name] = value
    return True


def dump_config(config: RunConfig) -> str:
    """The whole configuration as YAML that `load_config` reads back to an equal one."""
    return as_yaml(plain_values(config))


def check_ranges(section: Any, prefix: str = "") -> None:
    """Check the ranges of one section's knobs.

    Raises:
        ConfigError: all problems in one message.
    """
    _refuse(list(range_problems(section, prefix)))


def check_config(config: RunConfig) -> None:
    """Check every type, every range and every rule between knobs.

    Raises:
        ConfigError: all problems in one message.
    """
    wrong_types = list(_type_problems(config))
    _refuse(wrong_types or [*range_problems(config), *rule_problems(config)])


def check_values(config: RunConfig) -> None:
    """Check every type and every range, but no rule between knobs.

    Raises:
        ConfigError: all problems in one message.
    """
    _refuse(list(_type_problems(config)) or list(range_problems(config)))


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems))


def config_knobs(
    cls: type = RunConfig, prefix: str = ""
) -> typing.Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every knob as (dotted name, field), in the order of the schema."""
    for f in dataclasses.fields(cls):
        nested = resolved_types(cls)[f.name]
        if dataclasses.is_dataclass(nested):
            yield from config_knobs(typing.cast(type, nested), f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f


def knob_value(config: RunConfig, dotted: str) -> Any:
    """The value of a knob, or a section, by its dotted name."""
    return operator.attrgetter(dotted)(config)


def changed_knobs(config: Any, default: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The differences between two configurations: dotted name -> (value in config, in default)."""
    changed: dict[str, tuple[Any, Any]] = {}
    for f in dataclasses.fields(config):
        ours, theirs = getattr(config, f.name), getattr(default, f.name)
        if dataclasses.is_dataclass(ours):
            changed |= changed_knobs(ours, theirs, f"{prefix}{f.name}.")
        elif ours != theirs:
            changed[f"{prefix}{f.name}"] = (ours, theirs)
    return changed


@functools.cache
def resolved_types(cls: type) -> Mapping[str, Any]:
    """The annotations of a section's knobs as types; resolving them takes most of the time that
    building a configuration takes."""
    return types.MappingProxyType(typing.get_type_hints(cls))


def type_hints(cls: type) -> dict[str, Any]:
    """The types of a section's knobs by name; a list of choices is a list of Literals."""
    hints = dict(resolved_types(cls))
    for f in dataclasses.fields(cls):
        if choices := f.metadata.get("choices"):
            hints[f.name] = types.GenericAlias(tuple, (Literal.__getitem__(choices()), ...))
    return hints


def plain_values(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists, as in YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_values(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain_values(item) for item in value]
    return value


def _without_aliases(
    raw: Any, prefix: str, knobs: list[str], others: list[tuple[str, str, Any]], section: str
) -> Any:
    """A copy without aliases; those with a value go to `others` as (name, knob, value)."""
    if not isinstance(raw, Mapping):
        return raw
    kept: dict[Any, Any] = {}
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if any(knob.startswith(f"{name}.") for knob in knobs):
            kept[key] = _without_aliases(value, f"{name}.", knobs, others, section)
        elif name not in knobs and (knob := knob_meant(name, knobs, section)):
            others += [(name, knob, value_meant(name, value))] if value is not None else []
        elif name in knobs or not asks_nothing(name, value, section):
            kept[key] = value
    return kept


def _build(
    cls: type[T], raw: Any, prefix: str, problems: list[str], stages: typing.Sequence[str]
) -> T:
    """One dataclass from a mapping; collects every problem. Knobs of `stages` are preferred in
    advice."""
    if not isinstance(raw, Mapping):
        section = prefix.rstrip(".") or "the file"
        told = _hint(section, stages) if conversion(section) else "Write `knob: value`"
        problems.append(f"{section} must be a mapping of knobs; got {raw!r}. {told}")
        return cls()
    hints = type_hints(cls)
    values: dict[str, Any] = {}
    strange: dict[str, list[str]] = {}
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if key not in hints:
            strange.setdefault(_hint(name, stages), []).append(name)
        elif dataclasses.is_dataclass(hints[key]):
            nested = typing.cast(type, hints[key])
            values[key] = _build(nested, value, f"{name}.", problems, stages)
        else:
            if name == "sampling.json_schema" and isinstance(value, Mapping):
                value = json.dumps(value)  # in YAML it need be no text
            try:
                values[key] = _convert(value, hints[key])
            except ValueError as error:
                problems.append(f"{name} must be {error}; got {got(name, value)}")
    for told, names in sorted(strange.items(), key=lambda item: not item[0]):
        are = "are not knobs" if len(names) > 1 else "is not a knob"
        told = told or f"Known here: {', '.join(hints)}."
        problems.append(f"{', '.join(names)} {are}. {told}")
    return cls(**values)


def _hint(name: str, stages: typing.Sequence[str]) -> str:
    """What a wrong key may mean; empty if nothing is close."""
    if told := advice(name, [knob for knob, _ in config_knobs()], stages, str):
        return told
    near = difflib.get_close_matches(name, _sections(), n=1) if "." not in name else []
    return f"Did you mean {near[0]}?" if near else ""


def _sections() -> list[str]:
    return [f.name for f in dataclasses.fields(RunConfig) if f.default is dataclasses.MISSING]


def _convert(value: Any, hint: Any) -> Any:
    """`value` as the knob's type; ValueError names what is expected."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        options = typing.get_args(hint)
        if value in options and not isinstance(value, bool):
            return value
        near = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
        hint_text = f" (did you mean {near[0]}?)" if near else ""
        named = ", ".join(str(option) or "''" for option in options)
        raise ValueError(f"one of {named}{hint_text}")
    if origin is tuple:
        item_hint = typing.get_args(hint)[0]
        if item_hint is str and isinstance(value, str):
            return (value,) if value else ()
        if not isinstance(value, list | tuple):
            raise ValueError("a list")
        items = tuple(_convert(item, item_hint) for item in value)
        if Ellipsis not in typing.get_args(hint) and len(items) != len(typing.get_args(hint)):
            raise ValueError(f"a list of {len(typing.get_args(hint))}")
        return items
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-5 as text
        except ValueError:
            raise ValueError("a number") from None
    if type(value) is hint:
        if isinstance(value, str) and not is_unicode(value):
            raise ValueError("text in UTF-8")
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise ValueError(names[hint])


def _type_problems(config: RunConfig) -> typing.Iterator[str]:
    """Knobs of a wrong type in a configuration written in Python."""
    if not isinstance(config, RunConfig):
        yield f"a configuration must be a RunConfig; got {type(config).__name__}. Use build_config"
        return
    yield from build(plain_values(config))[1]
    for name, knob in config_knobs():
        value = operator.attrgetter(name)(config)
        if isinstance(knob.default, tuple) and isinstance(value, str | list):
            items = (value,) if isinstance(value, str) else tuple(value)
            yield f"{name} must be a tuple; got {value!r}. Write {items!r}"


def range_problems(config: Any, prefix: str = "") -> typing.Iterator[str]:
    """What is out of range in a section, at any depth."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from range_problems(value, f"{prefix}{f.name}.")
            continue
        bounds: dict[str, float] = f.metadata.get("bounds", {})
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{prefix}{f.name} must be finite; got {value}"
        elif not all(getattr(operator, name)(value, bound) for name, bound in bounds.items()):
            yield f"{prefix}{f.name} must be {bounds_text(f)}; got {value!r}"
