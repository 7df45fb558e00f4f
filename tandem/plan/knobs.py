"""Configurations from knobs by dotted name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.load import build_config, check_config, plain_values, set_knob
from tandem.config.schema import RunConfig

Knobs = Mapping[str, Any]
"""Values as in YAML, by dotted name: {"parallel.actor_zero_stage": 3, "lora.rank": 8}."""


def nested(knobs: Knobs) -> dict[str, Any]:
    """Dotted names as the nested mapping that a YAML file holds."""
    values: dict[str, Any] = {}
    for name, value in knobs.items():
        set_knob(values, name, value)
    return values


def with_knobs(config: RunConfig, knobs: Knobs) -> RunConfig:
    """The configuration with some knobs set.

    Raises:
        ConfigError: all unknown knobs and wrong values.
    """
    values = plain_values(config)
    for name, value in knobs.items():
        set_knob(values, name, value)
    changed = build_config(values, where="")
    check_config(changed)
    return changed
