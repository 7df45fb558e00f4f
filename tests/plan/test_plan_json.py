"""`tandem plan --json` beside the schema that documents it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "plan.schema.json").read_text("utf-8"))
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
    "integer": int, "number": (int, float),
}  # fmt: skip
KNOWN = {"type", "description", "required", "additionalProperties", "properties", "items",
         "minimum"}  # fmt: skip


def problems(value: Any, schema: dict[str, Any], where: str = "$") -> Iterator[str]:
    """Where a value is not as a schema of these words says."""
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not any(
        isinstance(value, TYPES[kind]) and (kind not in ("integer", "number") or is_number)
        for kind in kinds
    ):
        yield f"{where}: {value!r} is no {kinds}"
    elif is_number and value < schema.get("minimum", value):
        yield f"{where}: {value} is too small"
    elif isinstance(value, dict):
        own = schema.get("properties", {})
        yield from (
            f"{where}: no {name}" for name in schema.get("required", ()) if name not in value
        )
        for name, inner in value.items():
            more = schema.get("additionalProperties", True)
            if name in own:
                yield from problems(inner, own[name], f"{where}.{name}")
            elif more is False:
                yield f"{where}: {name} is unknown"
            elif isinstance(more, dict):
                yield from problems(inner, more, f"{where}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from problems(inner, schema["items"], f"{where}[{number}]")


def strict(text: str) -> Any:
    """JSON without NaN and infinities, which are none."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("kind", "args", "code"),
    [
        ("plan", ("--hardware", "8xA100-80G", "--reward-model", "facebook/opt-350m"), 0),
        ("plan", ("--hardware", "8xA100-80G", "--stages", "dpo", "--data", "embedded"), 0),
        ("plan", ("--hardware", "1xL4", "--stages", "sft", "--memory-limit", "1GiB"), 1),
        ("largest", ("--hardware", "1xA100-40G", "--stages", "sft", "--largest"), 0),
        ("largest", ("--hardware", "1xL4", "--largest", "--memory-limit", "1MiB"), 1),
        ("tables", ("--tables",), 0),
    ],
)
def test_the_output_is_what_the_schema_says(
    capsys: pytest.CaptureFixture[str], kind: str, args: tuple[str, ...], code: int
) -> None:
    model = () if kind == "tables" else ("--actor-model", "facebook/opt-1.3b")
    assert main(["plan", *model, *args, "--json"]) == code
    said = capsys.readouterr()
    assert said.err == ""
    found = strict(said.out)
    assert not list(problems(found, SCHEMA["$defs"][kind]))
    assert [{"$ref": f"#/$defs/{name}"} for name in SCHEMA["$defs"]] == SCHEMA["oneOf"]
    if kind != "plan":
        return
    assert found["fits"] == (code == 0) == (found["peak_bytes"] <= found["limit_bytes"])
    assert found["peak_bytes"] == max(stage["peak_bytes"] for stage in found["stages"])
    too_large = [layout["changes"] for layout in found["layouts"] if not layout["fits"]]
    assert bool(too_large) == bool(found["rejected"])
    assert all(layout["changes"] in too_large for layout in found["rejected"])


def test_the_schema_refuses_what_is_wrong() -> None:
    schema = {"type": "object", "required": ["a"], "additionalProperties": False,
              "properties": {"a": {"type": ["number", "null"], "minimum": 0},
                             "b": {"type": "array", "items": {"type": "string"}}}}  # fmt: skip
    assert not list(problems({"a": None, "b": ["x"]}, schema))
    for wrong in ({}, {"a": -1}, {"a": True}, {"a": "1"}, {"a": 1, "c": 1}, {"a": 1, "b": [1]}):
        assert list(problems(wrong, schema)), wrong


def every(schema: Any) -> Iterator[dict[str, Any]]:
    """All parts of a schema that describe a field."""
    if isinstance(schema, dict):
        for name, inner in schema.get("properties", {}).items():
            yield {"name": name, **inner}
        for inner in schema.values():
            yield from every(inner)


def test_every_field_is_described() -> None:
    fields = list(every(SCHEMA))
    assert len(fields) > 50
    assert not [field["name"] for field in fields if not field.get("description")]
