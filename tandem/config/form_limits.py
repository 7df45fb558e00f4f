"""What a form may cost: a request's schema or grammar must not hold the others up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import Any

MOST_LETTERS = 1 << 20
"""Of a form."""
MOST_GRAMMAR_LETTERS = 1 << 17
"""Of a request's grammar."""
MOST_RULE_LETTERS = 1 << 14
"""Of the same without its texts: rules may be followed in many ways at once."""
_LARGEST_MULTIPLE = 10_000
"""Of `multipleOf`: a number is followed by its remainder."""
_TEXTS = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Its last quote may be missing, so that no place is tried twice."""


def parser_limits() -> Any:
    """llguidance's, in which finding the tokens of one step takes some tenths of a second at
    most."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=20_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        precompute_large_lexemes=False,  # takes minutes for some thousand properties
    )


def too_long(grammar: str) -> str:
    """Why a request's grammar must not be followed; "" if it may be."""
    if len(grammar) > MOST_GRAMMAR_LETTERS:
        return f"{len(grammar):,} letters, which may be at most {MOST_GRAMMAR_LETTERS:,}"
    rules = _TEXTS.sub("", grammar)
    if len(rules) <= MOST_RULE_LETTERS:
        return ""
    return f"{len(rules):,} letters beside its texts, which may be at most {MOST_RULE_LETTERS:,}"


def too_costly(kind: str, text: str) -> str:
    """Why a form of this kind must not be followed; "" if it may be."""
    if len(text) > MOST_LETTERS:
        return f"{len(text):,} letters, which may be at most {MOST_LETTERS:,}"
    schemas = _schemas_in(text) if kind == "lark" else []
    if kind == "json_schema":
        schemas = [json.loads(text)]
    found = max(map(_common_multiple, schemas), default=1)
    if found <= _LARGEST_MULTIPLE:
        return ""
    return f"multipleOf with the common multiple {found}, which may be at most {_LARGEST_MULTIPLE}"


def _common_multiple(schema: Any) -> int:
    """Of all `multipleOf` of a schema, each in units of the last decimal place of any."""
    found = [Fraction(Decimal(str(each))) for each in _multiples(schema)]
    unit = lcm(*(each.denominator for each in found))
    return lcm(*(int(each * unit) for each in found))


def _multiples(schema: Any) -> Iterator[float]:
    """The values of `multipleOf` anywhere in a schema."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            value = part.get("multipleOf")
            if isinstance(value, int | float) and value > 0:
                yield value
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
