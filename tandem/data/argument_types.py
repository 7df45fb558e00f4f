"""The types of functions' arguments, as JSON Schema names them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def argument_schemas(tools: Sequence[Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The schema of each argument of each function that is listed, as far as there are some."""
    found = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        given = properties.items() if isinstance(properties, Mapping) else ()
        known = {key: value for key, value in given if isinstance(value, Mapping)}
        found[str(function.get("name"))] = known
    return found


def argument_types(tools: str) -> dict[str, dict[str, str]]:
    """The type of each argument of each function that is listed (see `kind_of`).

    Args:
        tools: a list of JSON schemas, as JSON text; "" for none.
    """
    return {
        name: {key: kind_of(schema) for key, schema in schemas.items()}
        for name, schemas in argument_schemas(json.loads(tools or "[]")).items()
    }


def kinds_of(schema: Mapping[str, Any]) -> list[Any]:
    """The types that a schema names."""
    kind = schema.get("type")
    return [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []


def kind_of(schema: Mapping[str, Any]) -> str:
    """The type that a schema names, with "?" behind it where null is one, too; "" for several."""
    kinds = kinds_of(schema)
    others = [each for each in kinds if each != "null"]
    if len(others) != 1:
        return ""
    is_nullable = schema.get("nullable") is True or len(others) < len(kinds)
    return f"{others[0]}{'?' if is_nullable else ''}"


_PYTHONS = {"True": True, "False": False, "None": None}
"""As templates write values that they make text of by jinja's `string`."""


def typed(text: str, kind: str) -> Any:
    """An argument's value: text where its schema says so, else JSON if it is some."""
    if kind == "string?" and text in ("null", "None"):
        return None
    if kind.startswith("string"):
        return text
    if text in _PYTHONS:
        return _PYTHONS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
