"""Knobs by dotted name: which there are, and a configuration made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.load import build_config, check_config, config_knobs, plain_values
from tandem.config.schema import RunConfig

Knobs = Mapping[str, Any]
"""Values as YAML has them, by dotted name: {"parallel.actor_zero_stage": 3, "lora.rank": 8}."""


def missing_knobs(knobs: Knobs) -> list[str]:
    """Names that the schema does not have."""
    known = {name for name, _ in config_knobs()}
    return [name for name in knobs if name not in known]


def knob_value(config: RunConfig, dotted: str, default: Any) -> Any:
    """A knob's value; `default` where the schema has no such knob."""
    if missing_knobs({dotted: None}):
        return default
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def nested(knobs: Knobs) -> dict[str, Any]:
    """Dotted names as the nested mapping that a YAML file holds."""
    values: dict[str, Any] = {}
    for name, value in knobs.items():
        _put(values, name, value)
    return values


def with_knobs(config: RunConfig, knobs: Knobs) -> RunConfig:
    """The configuration with some knobs set.

    Raises:
        ConfigError: a knob that there is none of, or values that cannot be, all of them.
    """
    values = plain_values(config)
    for name, value in knobs.items():
        _put(values, name, value)
    changed = build_config(values, where="")
    check_config(changed)
    return changed


def _put(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, name = dotted.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value
