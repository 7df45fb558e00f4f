"""Calls of tools as a form that answers must have: written as a template does, of functions that
are listed, with arguments that their schemas allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.config.answer_form import SPACE, AnswerForm, quoted
from tandem.data.argument_types import kind_of
from tandem.data.chat.call_shape import CallShape, JsonShape, TaggedShape
from tandem.data.chat.grammar_text import GrammarText

_SHARED = ("$defs", "definitions")
"""Where a schema keeps what its parts refer to."""


def calls_form(
    shape: CallShape, writing: GrammarText, tools: str, name: str = "", *, one: bool = False
) -> AnswerForm | None:
    """Answers that are calls of tools, as many as the template can write.

    Args:
        shape: of the template's calls.
        tools: that are listed, as JSON text. name: the function to call; "" for any. one: one call
            alone.
    Returns:
        None if no function is listed.
    """
    listed = [tool.get("function", tool) for tool in json.loads(tools)]
    named = [f for f in listed if isinstance(f, Mapping) and isinstance(f.get("name"), str)]
    functions = [function for function in named if not name or function["name"] == name]
    if not functions:
        return None
    if isinstance(shape, JsonShape):
        rules = _json_rules(shape, writing, functions, one)
    else:
        rules = _Tagged(shape, writing).rules(functions, one)
    return AnswerForm("lark", "\n".join(rules))


def _json_rules(
    shape: JsonShape, writing: GrammarText, functions: Sequence[Mapping[str, Any]], one: bool
) -> list[str]:
    written = writing.literal
    calls, rules = [], []
    for number, function in enumerate(functions):
        calls.append(f"call_{number}")
        name = written(json.dumps(function["name"])[1:-1])
        rules.append(f"call_{number}: {name} {written(shape.inside)} args_{number}")
        rules.append(f"args_{number}: {_json_rule(_parameters(function))}")
    more = "" if shape.link is None or one else f" ({written(shape.link)} call)*"
    start = f"start: {written(shape.head)} call{more} {written(shape.tail)}"
    return [start, f"call: {' | '.join(calls)}", *rules]


@dataclass(frozen=True, slots=True)
class _Tagged:
    """The rules of calls whose arguments stand in tags."""

    shape: TaggedShape
    writing: GrammarText

    def rules(self, functions: Sequence[Mapping[str, Any]], one: bool) -> list[str]:
        """All rules, the start first."""
        shape, written = self.shape, self.writing.literal
        ways, rules = list[str](), list[str]()  # ways: of the calls from here on
        for number, function in enumerate(functions):
            parameters, name = _parameters(function), written(function["name"])
            given, required = parameters.get("properties"), parameters.get("required")
            properties = dict(given) if isinstance(given, Mapping) else {}
            needed = set(required if isinstance(required, list) else ()) & properties.keys()
            begun = []  # what a call is, with what ends it before another one and at the end
            if properties:
                call = f"{name} {written(shape.first)} from_{number}_0"
                begun.append((call, shape.link, shape.tail))
                rules += self._arguments(str(number), parameters, properties, needed)
            if not needed:
                begun.append((name, shape.link_empty, shape.tail_empty))
            for call, link, tail in begun:
                ways.append(f"{call} {written(tail)}")
                ways += [] if one else [f"{call} {written(link)} calls"]
        return [f"start: {written(shape.head)} calls", f"calls: {' | '.join(ways)}", *rules]

    def _arguments(
        self,
        name: str,
        parameters: Mapping[str, Any],
        properties: Mapping[str, Any],
        needed: set[str],
    ) -> list[str]:
        """Rules of a call's arguments, in the order of the schema: from_NAME_i are those from
        number i on, of which there is one at least; then_NAME_i are any of them, behind another."""
        rules, written, keys = list[str](), self.writing.literal, list(properties)
        inside, more = written(self.shape.inside), written(self.shape.more)
        for i, key in enumerate(keys):
            rules.append(f"arg_{name}_{i}: {written(key)} {inside} value_{name}_{i}")
            rules += self._value(f"value_{name}_{i}", parameters, properties[key])
            is_last, begin = i + 1 == len(keys), f"from_{name}_{i}"
            ways = [f"arg_{name}_{i}" + ("" if is_last else f" then_{name}_{i + 1}")]
            if key not in needed and not is_last:
                ways.append(f"from_{name}_{i + 1}")
            rules.append(f"{begin}: {' | '.join(ways)}")
            if i:
                none = "" if needed.intersection(keys[i:]) else ' | ""'
                rules.append(f"then_{name}_{i}: {more} {begin}{none}")
        return rules

    def _value(self, name: str, parameters: Mapping[str, Any], schema: Any) -> list[str]:
        """Rules of an argument's value and of what ends it."""
        schema = schema if isinstance(schema, Mapping) else {}
        ends = self.writing.literal(self.shape.ends)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in choices]
            return [f"{name}: ({' | '.join(map(quoted, texts))}) {ends}"]
        kind = kind_of(schema)
        if not kind or kind.startswith("string"):
            return self.writing.until(name, self.shape.ends)
        shared = {key: parameters[key] for key in _SHARED if key in parameters}
        return [f"{name}: {name}_json {ends}", f"{name}_json: {_json_rule({**shared, **schema})}"]


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments: none if it lists none."""
    found = function.get("parameters")
    if isinstance(found, Mapping) and found:
        return found
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _json_rule(schema: Mapping[str, Any]) -> str:
    """A rule for JSON of a schema, with spaces within bounds."""
    guidance = schema.get("x-guidance")
    spaced = {"whitespace_pattern": SPACE, **(guidance if isinstance(guidance, Mapping) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': spaced})}"
