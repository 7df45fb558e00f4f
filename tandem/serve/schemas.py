"""Pieces of JSON Schema and OpenAPI, of which the description of the server is made."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def object_of(properties: Json, *required: str) -> Json:
    """An object; these keys are required."""
    return {"type": "object", "properties": properties, "required": list(required)}


def maybe(schema: Json) -> Json:
    """Null stands for the default."""
    return {"anyOf": [schema, {"type": "null"}]}


def flag() -> Json:
    """True or false; null stands for the default."""
    return {"type": ["boolean", "null"]}


def whole_number(low: int, high: int) -> Json:
    """A whole number within limits."""
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Json:
    """A number within limits."""
    return {"type": "number", "minimum": low, "maximum": high}


def query(name: str, schema: Json) -> Json:
    """A parameter behind the question mark."""
    return {"name": name, "in": "query", "schema": schema}


def path_text(name: str) -> Json:
    """A part of the address."""
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def json_body(name: str) -> Json:
    """A body in JSON, of a named schema."""
    return {"content": {"application/json": {"schema": ref(name)}}}


def ref(name: str) -> Json:
    """A named schema."""
    return {"$ref": f"#/components/schemas/{name}"}
