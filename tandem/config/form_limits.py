"""What a form may cost: a request's schema or grammar must not hold the others up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from math import lcm, prod
from typing import Any
from urllib.parse import unquote

MOST_LETTERS = 1 << 20
"""Of a form."""
MOST_GRAMMAR_LETTERS = 1 << 17
"""Of a request's grammar."""
MOST_RULE_LETTERS = 1 << 13
"""Of the same without its quoted texts: rules may be followed in many ways at once."""
_LARGEST_MULTIPLE = 10_000
"""Of `multipleOf`: a number is followed by its remainder."""
MOST_OPTIONAL = 200
"""Properties of an object that may be left out: at each of them an answer may go on in as many
ways."""
MOST_WAYS = 256
"""Alternatives that are objects or lists, beyond the first of each choice: the time of a step grows
with the third power of those that begin alike."""
MOST_RULES = 1000
"""Rules of a request's grammar and their alternatives, for the same reason."""
_CHOOSING = {"anyOf", "oneOf", "allOf"}
_PLAIN = {"string", "number", "integer", "boolean", "null"}
_TEXTS = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Quoted texts. A last quote may be missing, so that no place is tried twice."""


def parser_limits(*, has_rules: bool) -> dict[str, Any]:
    """llguidance's by name, in which a step's tokens are found within about half a second.

    Args:
        has_rules: it is a request's grammar, whose rules may be followed in many ways at once: the
            time of a step grows with the third power of their number.
    """
    return {
        "step_lexer_fuel": 200_000,
        "step_max_items": 20_000,
        "max_items_in_row": 500 if has_rules else 1100,
        "max_lexer_states": 50_000,
        "precompute_large_lexemes": False,  # takes minutes for some thousand properties
    }


def too_long(grammar: str) -> str:
    """Why a request's grammar must not be followed; "" if it may be."""
    if len(grammar) > MOST_GRAMMAR_LETTERS:
        return f"{len(grammar):,} letters, which may be at most {MOST_GRAMMAR_LETTERS:,}"
    rules = _TEXTS.sub("", grammar)
    if len(rules) > MOST_RULE_LETTERS:
        most = f"{MOST_RULE_LETTERS:,}"
        return f"{len(rules):,} letters beside its texts, which may be at most {most}"
    if (number := rules.count("|") + rules.count(":")) > MOST_RULES:
        return f"{number:,} rules and alternatives, which may be at most {MOST_RULES:,}"
    return ""


def too_costly(kind: str, text: str) -> str:
    """Why a form of this kind must not be followed; "" if it may be."""
    if len(text) > MOST_LETTERS:
        return f"{len(text):,} letters, which may be at most {MOST_LETTERS:,}"
    schemas = _schemas_in(text) if kind in ("lark", "grammar") else []
    if kind == "json_schema":
        schemas = [json.loads(text)]
    if any(map(_has_large_multiple, schemas)):
        return f"multipleOf with a common multiple above {_LARGEST_MULTIPLE}"
    if (optional := max(map(_most_optional, schemas), default=0)) > MOST_OPTIONAL:
        return (
            f"an object with {optional:,} optional properties, which may be at most "
            f"{MOST_OPTIONAL}: name more of them in `required`, or group them in objects"
        )
    try:
        ways = sum(map(_spare_ways, schemas))
    except RecursionError:
        return "one that is nested too deep"
    if ways > MOST_WAYS:
        return (
            f"anyOf and oneOf with {ways:,} alternatives that are objects or lists, beyond the "
            f"first of each (multiplied where allOf or $ref combines them), which may be at most "
            f"{MOST_WAYS}"
        )
    return ""


def _spare_ways(schema: Any) -> int:
    """Alternatives that are objects or lists, beyond the first of each choice in a schema."""
    found = dict[int, int]()  # the ways of each part, by its identity

    def ways(part: Any) -> int:
        """In how many ways that begin alike a value of a part may be read."""
        if not isinstance(part, Mapping):
            return 1
        if id(part) in found:
            return found[id(part)]
        found[id(part)] = 1  # of one that refers to itself
        lists = [part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)]
        each = [sum(ways(one) for one in options if not _is_plain(one)) for options in lists]
        parts = part["allOf"] if isinstance(part.get("allOf"), list) else []
        each += [ways(one) for one in (*parts, _referred(schema, part.get("$ref")))]
        found[id(part)] = min(prod(max(1, one) for one in each), 2 * MOST_WAYS)
        return found[id(part)]

    return sum(ways(part) - 1 for part in _mappings(schema) if part.keys() & _CHOOSING)


def _is_plain(schema: Any) -> bool:
    """Whether values of a schema are surely no objects or lists."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return not any(isinstance(value, dict | list) for value in values)
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else kinds
    return isinstance(named, list) and all(kind in _PLAIN for kind in named if kind is not None)


def _referred(schema: Any, reference: Any) -> Any:
    """The part that a reference within the schema means; None for others."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part = schema
    for key in filter(None, reference[1:].split("/")):
        name = unquote(key).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            part = part.get(name) if isinstance(part, Mapping) else None
    return part


def _most_optional(schema: Any) -> int:
    """Most optional properties of any one object."""
    most = 0
    for part in _mappings(schema):
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping):
            named = required if isinstance(required, list) else []
            needed = {name for name in named if isinstance(name, str)} & properties.keys()
            most = max(most, len(properties) - len(needed))
    return most


def _has_large_multiple(schema: Any) -> bool:
    """Whether the common multiple of all `multipleOf` of a schema, each in units of the last
    decimal place of any, is more than numbers can be followed by."""
    unit = multiple = 1
    for value in _multiples(schema):
        if value > _LARGEST_MULTIPLE:  # infinity, too
            return True
        step = Fraction(Decimal(str(value)))
        finer = lcm(unit, step.denominator)
        multiple = lcm(multiple * (finer // unit), int(step * finer))
        unit = finer
        if multiple > _LARGEST_MULTIPLE:
            return True
    return False


def _multiples(schema: Any) -> Iterator[float]:
    """The values of `multipleOf` anywhere in a schema."""
    for part in _mappings(schema):
        value = part.get("multipleOf")
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield value


def _mappings(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All that have keys, anywhere in a schema."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            yield part
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _schemas_in(grammar: str) -> list[Any]:
    """The schemas that a grammar holds as %json."""
    found, at = [], grammar.find("%json")
    decoder = json.JSONDecoder()
    while at >= 0:
        at += len("%json")
        start = at + len(grammar[at:]) - len(grammar[at:].lstrip())
        with suppress(ValueError, RecursionError):  # llguidance says so
            found.append(decoder.raw_decode(grammar, start)[0])
        at = grammar.find("%json", at)
    return found
