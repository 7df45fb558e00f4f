"""The types of functions' arguments, as JSON Schema names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def argument_types(tools: str) -> dict[str, dict[str, str]]:
    """The type of each argument of each function that is listed (see `kind_of`).

    Args:
        tools: a list of JSON schemas, as JSON text; "" for none.
    """
    found = {}
    for tool in json.loads(tools or "[]"):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        given = properties.items() if isinstance(properties, dict) else ()
        known = {key: kind_of(value) for key, value in given if isinstance(value, dict)}
        found[str(function.get("name"))] = known
    return found


def kind_of(schema: Mapping[str, Any]) -> str:
    """The type that a schema names, with "?" behind it where null is one, too; "" for several."""
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
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
